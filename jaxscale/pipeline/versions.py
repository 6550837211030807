"""Which version of a stage's weights each action of an asynchronous schedule computes with, and how long each lives.

Version n of a stage is its weights after n updates. How many live at once is found, not declared: p on the first stage
of PipeDream, 2 in 2BW, 1 in PipeMare.
"""

import dataclasses
from collections.abc import Hashable, Mapping, Sequence

from jaxscale.errors import UserError
from jaxscale.pipeline.action import Action, Kind
from jaxscale.pipeline.schedule import Schedule


@dataclasses.dataclass(frozen=True)
class Use:
    """What an action does with the versions of its stage's weights.

    Args:
        reads: the version that a forward reads, or that a backward linearises at.
        makes: the version that an update right after this backward makes; `None` without one.
    """

    reads: int
    makes: int | None = None


def uses(schedule: Schedule) -> dict[Action, Use]:
    """The versions of every forward and backward; updates are told with the backward that they follow.

    Raises:
        UserError: a synchronous schedule; a backward in two halves; an update that follows no backward.

    Example:
        >>> from jaxscale.pipeline.schedules import METHODS
        >>> found = uses(METHODS["pipedream"].schedule(2, 1, updates=3))
        >>> [found[Action(Kind.F, 0, i)].reads for i in range(3)]
        [0, 0, 1]
        >>> found[Action(Kind.B, 0, 2)]
        Use(reads=1, makes=3)
    """
    versions = schedule.versions
    if versions is None:
        raise UserError(f"schedule {schedule.name}: got one without versions of weights, expected an asynchronous one")
    found: dict[Action, Use] = {}
    for rank, order in enumerate(schedule.orders):
        done = dict.fromkeys(schedule.stages_of(rank), 0)
        before: Action | None = None
        for action in order:
            stage, group = action.stage, action.microbatch // versions.group
            match action.kind:
                case Kind.F:
                    found[action] = Use(done[stage] if versions.lag is None else max(0, group - versions.lag))
                case Kind.B:
                    own = found[Action(Kind.F, stage, action.microbatch)].reads
                    found[action] = Use(own if versions.backward == "forward" else done[stage])
                case Kind.U:
                    if before is None or before != Action(Kind.B, stage, action.microbatch):
                        raise UserError(
                            f"schedule {schedule.name}, rank {rank}: {action} follows {before}, expected the backward "
                            f"of microbatch {action.microbatch}: an update is done with the backward before it"
                        )
                    done[stage] += 1
                    found[before] = dataclasses.replace(found[before], makes=done[stage])
                case kind:
                    raise UserError(
                        f"schedule {schedule.name}, rank {rank}: {action} is of kind {kind}, expected F, B and U: an "
                        "update needs both gradients of a backward at once"
                    )
            before = action
    return found


def lives(schedule: Schedule, at: Mapping[Action, int]) -> dict[int, list[tuple[int, int, int]]]:
    """By stage, (first tick, tick after the last, version): from the update that makes it, which stands at the end of a
    tick, to its last reader, or to the update that makes the next one.

    Args:
        schedule: asynchronous.
        at: the tick of each forward and backward.
    """
    first: dict[tuple[int, int], int] = {(stage, 0): 0 for stage in range(schedule.stages)}
    last: dict[tuple[int, int], int] = {}
    for action, use in uses(schedule).items():
        tick, stage = at[action], action.stage
        if use.makes is not None:
            first[stage, use.makes] = tick + 1
            last[stage, use.makes - 1] = max(tick, last.get((stage, use.makes - 1), 0))
        last[stage, use.reads] = max(tick, last.get((stage, use.reads), 0))
    found: dict[int, list[tuple[int, int, int]]] = {stage: [] for stage in range(schedule.stages)}
    for (stage, version), tick in sorted(first.items()):
        found[stage].append((tick, max(tick, last.get((stage, version), tick) + 1), version))
    return found


def ring(lives: Sequence[tuple[int, int, Hashable]]) -> int:
    """Slots so that the values may take them in turn, value i slot i mod slots, each free when it is taken.

    Args:
        lives: (first tick, tick after the last, name) in the order in which they take slots.

    Example:
        >>> ring([(0, 3, "a"), (1, 4, "b"), (3, 6, "c"), (4, 7, "d")])
        2
    """
    slots = 1
    while any(end > later[0] for (_, end, _), later in zip(lives, lives[slots:], strict=False)):
        slots += 1
    return slots
