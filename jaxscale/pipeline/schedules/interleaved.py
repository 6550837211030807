"""Interleaved 1F1B: v stages a rank (Narayanan et al., 2021, arXiv:2104.04473), in Megatron's order.

Microbatches pass in groups, each through all stages of a rank before the next. Bubble (p-1)/(vm+p-1) of the makespan
for m >= p, whether p divides m or not: groups differ by one at most, larger ones first, none smaller than p (Megatron
and PyTorch require equal groups, and then have the same order). With m < p there is one group, which waits p - m turns
between its stages: (p-1 + (v-1)(p-m))/(vm + p-1 + (v-1)(p-m)).
"""

import itertools

from jaxscale.errors import UserError
from jaxscale.pipeline.builders import Lane, single_route, weave
from jaxscale.pipeline.method import Method
from jaxscale.pipeline.orders import Schedule


def groups(ranks: int, microbatches: int) -> list[range]:
    """Return the groups of microbatches that pass together: as many groups of p or more as possible, larger ones first.

    Example:
        >>> groups(4, 10), groups(4, 3)
        ([range(0, 5), range(5, 10)], [range(0, 3)])
    """
    group_count = max(1, microbatches // ranks)
    base_size, larger_groups = divmod(microbatches, group_count)
    starts = [base_size * i + min(i, larger_groups) for i in range(group_count + 1)]
    return [range(start, end) for start, end in itertools.pairwise(starts)]


def interleaved(ranks: int, microbatches: int, chunks: int) -> Schedule:
    """Make the schedule of 1F1B with v stages a rank.

    Args:
        ranks: p, number of ranks.
        microbatches: m, any number of microbatches.
        chunks: v, number of stages per rank, 2 or more; rank r has the stages r, p + r, 2p + r, ...

    Raises:
        UserError: v is 1.
    """
    if chunks < 2:
        raise UserError(f"schedule interleaved: got v={chunks}, expected 2 or more; 1f1b has one stage for each device")
    microbatch_groups, pass_count = groups(ranks, microbatches), chunks * microbatches
    orders, bound = [], []
    for rank in range(ranks):
        stages = range(rank, chunks * ranks, ranks)
        forwards = [(stage, i) for group in microbatch_groups for stage in stages for i in group]
        backwards = [(stage, i) for group in microbatch_groups for stage in reversed(stages) for i in group]
        warmup = min((chunks - 1) * len(microbatch_groups[0]) + 2 * (ranks - 1 - rank), pass_count)
        phases = ("F", warmup), ("F B", pass_count - warmup), ("B", warmup)
        orders.append(weave(Lane(tuple(forwards), tuple(backwards)), *phases))
        bound.append(min(warmup + 1, pass_count))
    return single_route("interleaved", orders, microbatches, bound, route=(*range(ranks),) * chunks)


METHOD = Method("interleaved", "1F1B with v stages a device", interleaved, chunks=2, interleaves=True)
