"""The costs of a pipeline: the seconds of each stage's passes and of each link's messages, and the bytes of stashes.

Times are called seconds, but may be in any unit, because the simulator only adds and compares them.
"""

import dataclasses
import math

from jaxscale.errors import UserError
from jaxscale.pipeline.orders import Kind, Schedule

_FIELD_OF_KIND = {Kind.F: "forward", Kind.I: "input", Kind.W: "weight", Kind.B: "backward", Kind.U: "update"}


@dataclasses.dataclass(frozen=True)
class Costs:
    """The seconds of each pass of one microbatch through each stage, the seconds of messages, and the stashed bytes.

    Args:
        forward: for each stage, seconds of F.
        input: for each stage, seconds of I, the input gradient.
        weight: for each stage, seconds of W, the weight gradient.
        backward: for each stage, seconds of B; empty: I + W.
        update: for each stage, seconds of U; empty: 0.
        links: for each rank r, seconds of a message between ranks r and r + 1 in either direction; empty: 0. The last
            link closes the ring.
        stash: for each stage, bytes kept from F until B or W is done; empty: 0.
        pending: for each stage, further bytes kept from I until W is done; empty: 0.

    Example:
        >>> costs = Costs((1.0, 2.0), (1.0, 2.0), (0.5, 1.0))
        >>> costs.seconds(Kind.B, 1), costs.whole
        (3.0, 7.5)
    """

    forward: tuple[float, ...]
    input: tuple[float, ...]
    weight: tuple[float, ...]
    backward: tuple[float, ...] = ()
    update: tuple[float, ...] = ()
    links: tuple[float, ...] = ()
    stash: tuple[float, ...] = ()
    pending: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            field_costs = getattr(self, field.name)
            for cost in field_costs:
                if not (math.isfinite(cost) and cost >= 0):
                    raise UserError(f"costs: {field.name} is {cost}, expected 0 or more")
            is_required = field.name in ("forward", "input", "weight")
            if field.name != "links" and (field_costs or is_required) and len(field_costs) != self.stages:
                raise UserError(f"costs: got {field.name} of {len(field_costs)} stages, expected {self.stages} stages")

    @classmethod
    def alike(
        cls,
        schedule: Schedule,
        forward: float = 1.0,
        input: float = 1.0,
        weight: float = 1.0,
        *,
        backward: float | None = None,
        update: float = 0.0,
        link: float = 0.0,
        stash: float = 0,
        pending: float = 0,
    ) -> "Costs":
        """Make the costs of equal ranks from the costs of one rank's layers, which are divided evenly among its stages.

        Args:
            schedule: the schedule for which the costs are made.
            forward: seconds of F of one rank's layers for one microbatch.
            input: seconds of I of one rank's layers.
            weight: seconds of W of one rank's layers.
            backward: seconds of B of one rank's layers; `None`: I + W.
            update: seconds of U of one rank's layers.
            link: seconds of a message.
            stash: bytes that one rank's layers keep from F until B or W is done.
            pending: further bytes that one rank's layers keep from I until W is done.

        Example:
            >>> from jaxscale.pipeline.schedules import METHODS
            >>> Costs.alike(METHODS["gpipe"].schedule(2, 4), 3.0).forward
            (3.0, 3.0)
        """

        def stage_costs(rank_cost: float) -> tuple[float, ...]:
            """Divide a rank's cost evenly among its stages, and return the cost of every stage of the schedule."""
            return (rank_cost * (schedule.ranks / schedule.stages),) * schedule.stages

        return cls(
            *map(stage_costs, (forward, input, weight)),
            backward=() if backward is None else stage_costs(backward),
            update=stage_costs(update),
            links=(link,) * schedule.ranks,
            stash=stage_costs(stash),
            pending=stage_costs(pending),
        )

    @property
    def stages(self) -> int:
        """The number of stages."""
        return len(self.forward)

    def seconds(self, kind: Kind, stage: int) -> float:
        """Return the seconds of a pass of kind `kind` through a stage."""
        if kind is Kind.B and not self.backward:
            return self.input[stage] + self.weight[stage]
        if kind is Kind.U and not self.update:
            return 0.0
        return getattr(self, _FIELD_OF_KIND[kind])[stage]

    @property
    def whole(self) -> float:
        """Seconds of the forward and the backward of one microbatch through all stages; a backward takes I + W."""
        return sum(self.forward) + sum(self.input) + sum(self.weight)

    def check(self, schedule: Schedule) -> None:
        """Check that the costs have the schedule's numbers of stages and links.

        Raises:
            UserError: a number differs; the message gives both numbers.
        """
        if self.stages != schedule.stages:
            raise UserError(f"got costs of {self.stages} stages for {schedule.name}, expected {schedule.stages} stages")
        if self.links and len(self.links) != schedule.ranks:
            raise UserError(f"got costs of {len(self.links)} links for {schedule.name}, expected {schedule.ranks}")
