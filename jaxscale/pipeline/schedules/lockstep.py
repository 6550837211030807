"""Lock-step 1F1B, plain and interleaved: the actions of a tick are all forwards or all backwards.

One program on many devices ends each tick with an exchange. In 1F1B some ticks have forwards on some ranks and
backwards on others, so forwards wait for backwards: the bubble is 40% for p=4, m=8, B=2F, where GPipe has 27%. If
each tick has only one kind, the bubble is (p-1)/(vm+p-1) again for m >= p (and for any m if v = 1), and the program
needs no branches. The price is memory: stage s holds 2p-1-2s activations instead of p-s.
"""

from collections.abc import Iterator

from jaxscale.pipeline.action import Action, Kind
from jaxscale.pipeline.builders import orders_by_slot, single_route
from jaxscale.pipeline.method import Method
from jaxscale.pipeline.orders import Schedule
from jaxscale.pipeline.schedules.interleaved import groups


def _timetable(rank_count: int, microbatch_count: int, chunk_count: int) -> Iterator[tuple[int, int, Action]]:
    """Yield (rank, slot, action) of every action. Forwards have even slots, and backwards have odd slots."""
    microbatch_groups = groups(rank_count, microbatch_count)
    # number of turns until the last stage gets its first microbatch
    ramp_turns = (chunk_count - 1) * max(rank_count, len(microbatch_groups[0])) + rank_count - 1
    for group in microbatch_groups:
        chunk_turns = max(rank_count, len(group))  # number of turns until a group's next chunk starts
        for index_in_group, microbatch in enumerate(group):
            for stage in range(chunk_count * rank_count):
                chunk, rank = divmod(stage, rank_count)
                turn = chunk_count * group.start + index_in_group
                forward_turn = turn + chunk * chunk_turns + rank
                backward_turn = turn + (chunk_count - 1 - chunk) * chunk_turns + rank_count - 1 - rank + ramp_turns
                yield rank, 2 * forward_turn, Action(Kind.F, stage, microbatch)
                yield rank, 2 * backward_turn + 1, Action(Kind.B, stage, microbatch)


def lockstep(ranks: int, microbatches: int, chunks: int) -> Schedule:
    """Make the schedule of 1F1B in which all actions of a tick have the same kind.

    Args:
        ranks: p, number of ranks.
        microbatches: m, any number of microbatches.
        chunks: v, number of stages per rank; rank r has the stages r, p + r, 2p + r, ...
    """
    group_turns = max(ranks, len(groups(ranks, microbatches)[0]))
    waiting_activations = (chunks - 1) * group_turns
    return single_route(
        "lockstep",
        orders_by_slot(ranks, _timetable(ranks, microbatches, chunks)),
        microbatches,
        bound=(min(waiting_activations + 2 * (ranks - rank) - 1, chunks * microbatches) for rank in range(ranks)),
        route=(*range(ranks),) * chunks,
        cycle=(Kind.F, Kind.B),
    )


METHOD = Method("lockstep", "1F1B in ticks of one kind, v stages a device", lockstep, interleaves=True)
