"""Interleaved 1F1B: v stages per rank (Narayanan et al., 2021, arXiv:2104.04473), in Megatron's order.

Microbatches are divided into groups, and a group passes through all stages of a rank before the next group starts. The
sizes of the groups differ by at most one, larger groups come first, and no group is smaller than p. (For equal groups,
which Megatron and PyTorch require, the order is the same as theirs.) The bubble is (p-1)/(vm+p-1) of the makespan for m
>= p, even if p does not divide m. With m < p there is one group, which waits p - m turns between its stages, and the
bubble is (p-1 + (v-1)(p-m))/(vm + p-1 + (v-1)(p-m)).
"""

import itertools

from jaxscale.errors import UserError
from jaxscale.pipeline.builders import Lane, single_route, weave
from jaxscale.pipeline.method import Method
from jaxscale.pipeline.orders import Schedule


def groups(rank_count: int, microbatch_count: int) -> list[range]:
    """Return the groups of microbatches: as many groups of p or more microbatches as possible, the larger groups first.

    Example:
        >>> groups(4, 10), groups(4, 3)
        ([range(0, 5), range(5, 10)], [range(0, 3)])
    """
    group_count = max(1, microbatch_count // rank_count)
    base_size, larger_count = divmod(microbatch_count, group_count)  # `larger_count` groups have one microbatch more
    group_boundaries = [base_size * i + min(i, larger_count) for i in range(group_count + 1)]
    return [range(start, end) for start, end in itertools.pairwise(group_boundaries)]


def _refuse(ranks: int, microbatches: int, chunks: int) -> None:
    """Raise UserError if v is 1."""
    if chunks < 2:
        raise UserError(f"schedule interleaved: got v={chunks}, expected 2 or more; 1f1b has one stage for each device")


def interleaved(ranks: int, microbatches: int, chunks: int) -> Schedule:
    """Make the schedule of 1F1B with v stages per rank (interleaved 1F1B).

    Args:
        ranks: p, number of ranks.
        microbatches: m, any number of microbatches.
        chunks: v, number of stages per rank, 2 or more; rank r has the stages r, p + r, 2p + r, ...

    Raises:
        UserError: v is 1.
    """
    _refuse(ranks, microbatches, chunks)
    microbatch_groups, pass_count = groups(ranks, microbatches), chunks * microbatches
    orders, max_activations = [], []
    for rank in range(ranks):
        stages = range(rank, chunks * ranks, ranks)
        forwards = [(stage, i) for group in microbatch_groups for stage in stages for i in group]
        backwards = [(stage, i) for group in microbatch_groups for stage in reversed(stages) for i in group]
        warmup_count = min((chunks - 1) * len(microbatch_groups[0]) + 2 * (ranks - 1 - rank), pass_count)
        phases = ("F", warmup_count), ("F B", pass_count - warmup_count), ("B", warmup_count)
        orders.append(weave(Lane(tuple(forwards), tuple(backwards)), *phases))
        max_activations.append(min(warmup_count + 1, pass_count))
    return single_route("interleaved", orders, microbatches, max_activations, route=(*range(ranks),) * chunks)


METHOD = Method("interleaved", "1F1B with v stages a device", interleaved, chunks=2, interleaves=True, refuse=_refuse)
