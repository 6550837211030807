"""Versions of weights in an asynchronous schedule: which version each action uses, and how long each version lives.

Version n of a stage is the stage's weights after n updates. The number of versions that live at once follows from the
schedule: p on the first stage of PipeDream, 2 in 2BW, 1 in PipeMare.
"""

import dataclasses
from collections.abc import Hashable, Mapping, Sequence

from jaxscale.errors import UserError
from jaxscale.pipeline.action import Action, Kind
from jaxscale.pipeline.orders import Schedule


@dataclasses.dataclass(frozen=True)
class Use:
    """The versions of the stage's weights that an action uses.

    Args:
        reads: the version that a forward reads, or at which a backward differentiates its stage.
        makes: the version that the update right after a backward makes; `None` if no update follows the action.
    """

    reads: int
    makes: int | None = None


def uses(schedule: Schedule) -> dict[Action, Use]:
    """Return the versions that each forward and backward uses. An update counts as part of the backward before it.

    Raises:
        UserError: the schedule is synchronous, a backward is split into I and W, or an update does not follow the
            backward of its microbatch.

    Example:
        >>> from jaxscale.pipeline.schedules import METHODS
        >>> use_of = uses(METHODS["pipedream"].schedule(2, 1, updates=3))
        >>> [use_of[Action(Kind.F, 0, i)].reads for i in range(3)]
        [0, 0, 1]
        >>> use_of[Action(Kind.B, 0, 2)]
        Use(reads=1, makes=3)
    """
    versions = schedule.versions
    if versions is None:
        raise UserError(
            f"schedule {schedule.name}: got a synchronous schedule without versions, expected an asynchronous one"
        )
    use_of: dict[Action, Use] = {}
    for rank, order in enumerate(schedule.orders):
        newest_version_of = dict.fromkeys(schedule.stages_of(rank), 0)  # by stage
        previous_action: Action | None = None
        for action in order:
            stage, group_index, lag = action.stage, action.microbatch // versions.group, versions.lag
            match action.kind:
                case Kind.F:
                    use_of[action] = Use(newest_version_of[stage] if lag is None else max(0, group_index - lag))
                case Kind.B:
                    forward_version = use_of[Action(Kind.F, stage, action.microbatch)].reads
                    use_of[action] = Use(
                        forward_version if versions.backward == "forward" else newest_version_of[stage]
                    )
                case Kind.U:
                    if previous_action is None or previous_action != Action(Kind.B, stage, action.microbatch):
                        raise UserError(
                            f"schedule {schedule.name}, rank {rank}: {action} follows {previous_action}, expected the "
                            f"backward of microbatch {action.microbatch}: an update is part of the backward before it"
                        )
                    newest_version_of[stage] += 1
                    use_of[previous_action] = dataclasses.replace(
                        use_of[previous_action], makes=newest_version_of[stage]
                    )
                case kind:
                    raise UserError(
                        f"schedule {schedule.name}, rank {rank}: {action} is of kind {kind}, expected F, B or U: an "
                        "update needs both gradients of a backward at once"
                    )
            previous_action = action
    return use_of


def version_lifetimes(schedule: Schedule, tick_of: Mapping[Action, int]) -> dict[int, list[tuple[int, int, int]]]:
    """Return, by stage, (first tick, tick after the last, version) for every version of the stage's weights.

    A version lives from the tick after the update that makes it until its last read or the next update, whichever is
    later.

    Args:
        schedule: an asynchronous schedule.
        tick_of: the tick of each forward and backward.
    """
    # the first and the last tick by (stage, version)
    first_ticks: dict[tuple[int, int], int] = {(stage, 0): 0 for stage in range(schedule.stages)}
    last_ticks: dict[tuple[int, int], int] = {}
    for action, use in uses(schedule).items():
        tick, stage = tick_of[action], action.stage
        if use.makes is not None:
            first_ticks[stage, use.makes] = tick + 1
            last_ticks[stage, use.makes - 1] = max(tick, last_ticks.get((stage, use.makes - 1), 0))
        last_ticks[stage, use.reads] = max(tick, last_ticks.get((stage, use.reads), 0))
    lifetimes: dict[int, list[tuple[int, int, int]]] = {stage: [] for stage in range(schedule.stages)}
    for (stage, version), tick in sorted(first_ticks.items()):
        lifetimes[stage].append((tick, max(tick, last_ticks.get((stage, version), tick) + 1), version))
    return lifetimes


def ring_slot_count(lifetimes: Sequence[tuple[int, int, Hashable]]) -> int:
    """Return the smallest number of slots n such that values can take the slots in turn.

    Value i takes slot i mod n, which must be free when the value's lifetime begins.

    Args:
        lifetimes: (first tick, tick after the last, name) of each value, in the order in which values take slots.

    Example:
        >>> ring_slot_count([(0, 3, "a"), (1, 4, "b"), (3, 6, "c"), (4, 7, "d")])
        2
    """
    slot_count = 1
    # a value and its successor in the same slot must not overlap
    while any(end > successor[0] for (_, end, _), successor in zip(lifetimes, lifetimes[slot_count:], strict=False)):
        slot_count += 1
    return slot_count
