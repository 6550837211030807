"""Costs of memory plans for a train step beyond keeping everything: modelled seconds, or FLOP if rates are unknown.

Seconds are those of recomputation by roofline, and of copies to the host and back that the block's own work does not
hide. Only the model's blocks are traced, once.
"""

import dataclasses
import functools
from collections.abc import Mapping

from jaxscale.memory.decide import decide
from jaxscale.memory.decision import Decision
from jaxscale.memory.plan import MemoryPlan
from jaxscale.planning.program import described_step
from jaxscale.platforms.platform import Platform
from jaxscale.programs import roofline
from jaxscale.programs.collect import BlockCall
from jaxscale.recipe.experiment import Experiment
from jaxscale.recipe.plan import Plan
from jaxscale.step.memory_resolve import traced_blocks


@dataclasses.dataclass(frozen=True)
class Prices:
    """Costs of memory plans for one model on one platform.

    Args:
        platform: its roofline gives the seconds.
        calls: the model's blocks, per device and microbatch; for a pipeline, those of a stage.
        parts: microbatches of a step.
        stages: pipeline stages on one device, which are equal.
    """

    platform: Platform
    calls: tuple[BlockCall, ...]
    parts: int
    stages: int = 1

    @classmethod
    def of(cls, experiment: Experiment, platform: Platform, plan: Plan) -> "Prices":
        """The prices of an experiment's step.

        Args:
            experiment: what to train.
            platform: where it would run.
            plan: its memory plan does not matter.
        """
        step = described_step(experiment, platform, dataclasses.replace(plan, memory=MemoryPlan("none")))
        calls = traced_blocks(step.objective, platform.chip)
        return cls(platform, calls, plan.microbatches, step.objective.stages_here)

    @property
    def timed(self) -> bool:
        """Whether seconds are known."""
        return roofline.rate(self.platform.chip, "bfloat16") is not None

    @property
    def scanned(self) -> bool:
        """Whether the model is one scanned stack of equal blocks."""
        return len(self.calls) == 1 and self.calls[0].rolled

    @functools.cached_property
    def passes(self) -> float:
        """Seconds of the blocks' forward and backward passes in a step that keeps everything."""
        return 3 * self.parts * self.stages * sum(call.count * call.graph.seconds for call in self.calls)

    def decision(self, memory: MemoryPlan) -> Decision:
        """The decision of a memory plan, for one of the stages on a device.

        Raises:
            UserError: it is not valid for the model, or its budget is too small.
        """
        if memory.budget is not None:
            memory = dataclasses.replace(memory, budget=memory.budget // self.stages)
        return decide(memory, self.calls, self.platform.chip)

    def seconds(self, decision: Decision) -> float:
        """Seconds of a step beyond keeping everything."""
        return self.parts * self.stages * decision.seconds

    def steps(self, flop: Mapping[str, float]) -> Mapping[str, float]:
        """Seconds of whole steps under several memory plans.

        Args:
            flop: FLOP of a step's products on all devices, by the text form of the memory plan.
        """
        rate = roofline.rate(self.platform.chip, "bfloat16")
        assert rate is not None, "the platform's rates are known"
        block_flop = 3 * self.parts * self.stages * sum(call.count * call.graph.flop for call in self.calls)
        unplanned_seconds = self.passes + max(0.0, min(flop.values()) / self.platform.devices - block_flop) / rate
        if not self.calls:  # without blocks, memory plans change nothing
            return dict.fromkeys(flop, unplanned_seconds)
        return {text: unplanned_seconds + self.seconds(self.decision(MemoryPlan.parse(text))) for text in flop}
