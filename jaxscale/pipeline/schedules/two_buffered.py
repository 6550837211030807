"""PipeDream-2BW: 1F1B that never drains, with an update per M microbatches (Narayanan et al., 2021, arXiv:2006.09503).

Two versions of the weights live at once: for the microbatches of group g, every stage computes with its weights after
g-1 updates. So the gradients of all stages are late by one update: W(t+1) = update(W(t), gradient at W(t-1)). M must be
at least p, so that every stage has applied the update of group g-2 before it needs the result.
"""

import dataclasses

from jaxscale.errors import UserError
from jaxscale.pipeline.method import Method
from jaxscale.pipeline.orders import Schedule, Versions
from jaxscale.pipeline.schedules.pipedream import pipedream


def _refuse(ranks: int, microbatches: int, chunks: int) -> None:
    """Raise UserError if there are fewer microbatches than devices."""
    if microbatches < ranks:
        reason = f"got {microbatches} microbatches per update, expected at least {ranks}, the number of devices"
        raise UserError(f"schedule 2bw: {reason}, because two versions of the weights suffice only then")


def two_buffered(ranks: int, microbatches: int, updates: int) -> Schedule:
    """Make the asynchronous schedule of 1F1B with an update after every M microbatches and two versions of the weights.

    Args:
        ranks: p, number of ranks, with one stage each.
        microbatches: M, number of microbatches per update, p or more.
        updates: number of updates.

    Raises:
        UserError: there are fewer microbatches than devices.
    """
    _refuse(ranks, microbatches, chunks=1)
    versions = Versions(group=microbatches, backward="forward", lag=1)
    return dataclasses.replace(pipedream(ranks, microbatches, updates), name="2bw", versions=versions)


METHOD = Method(
    "2bw", "1F1B without end, an update per M microbatches, two versions", two_buffered, steps=True, refuse=_refuse
)
