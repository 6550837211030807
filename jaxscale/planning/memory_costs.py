"""Costs of memory plans for a train step beyond keeping everything: modelled seconds, or FLOP if rates are unknown.

Seconds are those of recomputation by roofline, and of copies to the host and back that the block's own work does not
hide. Only the model's blocks are traced, once.
"""

import dataclasses
import functools

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
class MemoryCosts:
    """Costs of memory plans for one model on one platform.

    Args:
        platform: its roofline gives the seconds.
        calls: the model's blocks, per device and microbatch; for a pipeline, those of a stage.
        microbatches: of a step.
        stages: pipeline stages on one device, which are equal.
    """

    platform: Platform
    calls: tuple[BlockCall, ...]
    microbatches: int
    stages: int = 1

    @classmethod
    def of(cls, experiment: Experiment, platform: Platform, plan: Plan) -> "MemoryCosts":
        """The costs for an experiment's step.

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
    def block_seconds(self) -> float:
        """Seconds of the blocks' forward and backward passes in a step that keeps everything."""
        return 3 * self.microbatches * self.stages * sum(call.count * call.graph.seconds for call in self.calls)

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
        return self.microbatches * self.stages * decision.seconds

    def step_seconds(self, flop: float) -> float:
        """Seconds of a whole step that keeps everything.

        Args:
            flop: FLOP of its products on all devices.
        """
        rate = roofline.rate(self.platform.chip, "bfloat16")
        assert rate is not None, "the platform's rates are known"
        calls_flop = sum(call.count * call.graph.flop for call in self.calls)
        flop_besides_blocks = flop / self.platform.devices - 3 * self.microbatches * self.stages * calls_flop
        return self.block_seconds + max(0.0, flop_besides_blocks) / rate
