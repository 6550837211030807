"""What memory plans cost a train step beyond keeping everything: modelled seconds, or FLOP where no rates are known.

Seconds are those of recomputation by roofline, and of copies to the host and back that the block's own work does not
hide. Nothing is traced but the model's blocks, once.
"""

import dataclasses
import functools
from collections.abc import Mapping

from jaxscale.costs import roofline
from jaxscale.costs.collect import BlockCall
from jaxscale.memory.decide import decide
from jaxscale.memory.decision import Decision
from jaxscale.memory.plan import MemoryPlan
from jaxscale.planning.program import described_step
from jaxscale.platforms.platform import Platform
from jaxscale.step.experiment import Experiment
from jaxscale.step.plan import Plan
from jaxscale.step.remember import traced_blocks


@dataclasses.dataclass(frozen=True)
class Prices:
    """Costs of memory plans for one model on one platform.

    Args:
        platform: whose roofline tells seconds.
        calls: the model's blocks, per device and microbatch; of a pipeline those of a stage.
        parts: microbatches of a step.
        stages: of a pipeline on one device, which are alike.
    """

    platform: Platform
    calls: tuple[BlockCall, ...]
    parts: int
    stages: int = 1

    @classmethod
    def of(cls, experiment: Experiment, platform: Platform, plan: Plan) -> "Prices":
        """Those of an experiment's step.

        Args:
            experiment: what to train.
            platform: where.
            plan: how; its memory plan does not matter.
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
        """Whether the model is one scanned stack of alike blocks."""
        return len(self.calls) == 1 and self.calls[0].rolled

    @functools.cached_property
    def passes(self) -> float:
        """Seconds of the blocks' forward and backward passes in a step that keeps everything."""
        return 3 * self.parts * self.stages * sum(call.count * call.graph.seconds for call in self.calls)

    def decision(self, memory: MemoryPlan) -> Decision:
        """What a memory plan comes to, for one of the stages on a device.

        Raises:
            UserError: the model or the budget does not take it.
        """
        if memory.budget is not None:
            memory = dataclasses.replace(memory, budget=memory.budget // self.stages)
        return decide(memory, self.calls, self.platform.chip)

    def seconds(self, decision: Decision) -> float:
        """Of a step, beyond keeping everything."""
        return self.parts * self.stages * decision.seconds

    def steps(self, flop: Mapping[str, float]) -> Mapping[str, float]:
        """Seconds of whole steps under memory plans.

        Args:
            flop: of a step's products on all devices, under each memory plan by its text form.
        """
        rate = roofline.rate(self.platform.chip, "bfloat16")
        assert rate is not None, "asked of a platform whose rates are known"
        inside = 3 * self.parts * self.stages * sum(call.count * call.graph.flop for call in self.calls)
        whole = self.passes + max(0.0, min(flop.values()) / self.platform.devices - inside) / rate
        if not self.calls:  # no plan changes anything
            return dict.fromkeys(flop, whole)
        return {text: whole + self.seconds(self.decision(MemoryPlan.parse(text))) for text in flop}
