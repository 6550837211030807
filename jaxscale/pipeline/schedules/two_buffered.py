"""PipeDream-2BW: 1F1B that never drains, an update per M microbatches (Narayanan et al., 2021, arXiv:2006.09503).

Two versions of the weights live at once: every stage computes the microbatches of group g with the weights after g-1
updates. So all stages are one group late, W(t+1) = update(W(t), grad at W(t-1)). This needs M >= p, so that all stages
have done the update of group g-2 in time.
"""

import dataclasses

from jaxscale.errors import UserError
from jaxscale.pipeline.method import Method
from jaxscale.pipeline.orders import Schedule, Versions
from jaxscale.pipeline.schedules.pipedream import pipedream


def two_buffered(ranks: int, microbatches: int, updates: int) -> Schedule:
    """Make the schedule of a stream of updates, one for each M microbatches.

    Args:
        ranks: p, number of ranks, with one stage each.
        microbatches: M, number of microbatches per update, p or more.
        updates: number of updates.

    Raises:
        UserError: there are fewer microbatches than devices.
    """
    if microbatches < ranks:
        reason = f"got {microbatches} microbatches per update, expected at least the {ranks} devices"
        raise UserError(f"schedule 2bw: {reason}, because two versions of the weights suffice only then")
    versions = Versions(group=microbatches, backward="forward", lag=1)
    return dataclasses.replace(pipedream(ranks, microbatches, updates), name="2bw", versions=versions)


METHOD = Method("2bw", "1F1B without end, an update per M microbatches, two versions", two_buffered, steps=True)
