"""Costs of memory plans: the modeled seconds of a train step under each plan.

A memory plan adds the seconds of recomputation (by the roofline model), and the seconds of copies to and from the host
that do not overlap with the block's own computation. `step_seconds` adds them to the other items of a step, on the
scale on which `jaxscale plan` ranks plans, with the collectives and launches that recomputation repeats. For the memory
plans, the model's blocks are traced once; the other items come from one more trace (`split_costs`).
"""

import dataclasses
import functools

from jaxscale.memory.decide import decide
from jaxscale.memory.decision import Decision
from jaxscale.memory.plan import MemoryPlan
from jaxscale.planning.program import described_step
from jaxscale.planning.search.model_costs import Kept, SplitCosts, step_costs
from jaxscale.planning.search.space import Variant
from jaxscale.planning.search.step_seconds import step_seconds
from jaxscale.platforms.platform import Platform
from jaxscale.programs import roofline
from jaxscale.programs.collect import BlockCall
from jaxscale.recipe.experiment import Experiment
from jaxscale.recipe.plan import Plan
from jaxscale.step.gradients import Objective
from jaxscale.step.memory_resolve import SEGMENT_RULES, is_foreign_list, traced_blocks


@dataclasses.dataclass(frozen=True)
class MemoryCosts:
    """Costs of memory plans for one model on one platform.

    Args:
        platform: platform on which the seconds are modeled.
        calls: calls of the model's blocks, per device and microbatch; in a pipeline, those of one stage.
        microbatch_count: number of microbatches of a step.
        stage_count: number of pipeline stages on one device; all stages cost the same.
        objective: objective of the step, from which `sequence_calls` are traced; `None` if they equal `calls`.
        experiment: the experiment, whose plan has a resolved mesh; `None` if no seconds of whole steps are modeled.
    """

    platform: Platform
    calls: tuple[BlockCall, ...]
    microbatch_count: int
    stage_count: int = 1
    objective: Objective | None = dataclasses.field(default=None, repr=False, compare=False)
    experiment: Experiment | None = dataclasses.field(default=None, repr=False, compare=False)

    @classmethod
    def of(cls, experiment: Experiment, platform: Platform, plan: Plan) -> "MemoryCosts":
        """Return the costs of memory plans for an experiment's step.

        Args:
            experiment: the experiment to plan for.
            platform: platform that the step would run on.
            plan: plan of the step; its memory plan is ignored.
        """
        step = described_step(experiment, platform, dataclasses.replace(plan, memory=MemoryPlan("none")))
        calls = traced_blocks(step.objective, platform.chip)
        planned_experiment = dataclasses.replace(experiment, plan=step.plan)
        stage_count = step.objective.stages_per_device
        return cls(platform, calls, step.plan.microbatches, stage_count, step.objective, planned_experiment)

    @property
    def is_timed(self) -> bool:
        """Whether costs are seconds, because the chip's rates are known."""
        return roofline.rate(self.platform.chip, "bfloat16") is not None

    @property
    def models_steps(self) -> bool:
        """Whether `step_seconds` returns the seconds of whole steps."""
        return self._split_costs is not None

    @property
    def is_scanned(self) -> bool:
        """Whether the model is one scanned stack of identical blocks."""
        return len(self.calls) == 1 and self.calls[0].rolled

    def kept_bytes(self, estimated_bytes: int) -> int:
        """Return the bytes of activations that a step keeps without a memory plan.

        They are the larger of two numbers: the estimate for the step, and the bytes that the traced blocks keep. The
        estimate alone may be too low, because it may count activations that blocks outside a scan keep as transients.

        Args:
            estimated_bytes: bytes of kept activations in the estimate of a step without a memory plan.
        """
        if not self.calls:
            return estimated_bytes
        return max(estimated_bytes, self.stage_count * self.decision(MemoryPlan("none")).bytes)

    @functools.cached_property
    def block_seconds(self) -> float:
        """The modeled seconds of the blocks' forward and backward passes in a step that keeps all activations.

        A backward pass is assumed to take twice as long as a forward pass.
        """
        return (
            3 * self.microbatch_count * self.stage_count * sum(call.count * call.graph.seconds for call in self.calls)
        )

    @functools.cached_property
    def sequence_calls(self) -> tuple[BlockCall, ...]:
        """The calls of the blocks, traced as one sequence, for rules that recompute segments of several blocks.

        Raises:
            UserError: the blocks do not form a chain.
        """
        if self.objective is None or not is_foreign_list(self.objective):
            return self.calls
        return traced_blocks(self.objective, self.platform.chip, is_sequence=True)

    def decision(self, memory: MemoryPlan) -> Decision:
        """Return the memory decision for one pipeline stage of a device.

        The stages of a device share the memory plan's budget equally.

        Raises:
            UserError: the memory plan is not valid for the model, or its budget is too small.
        """
        budget = None if memory.budget is None else memory.budget // self.stage_count
        calls = self.sequence_calls if memory.rule in SEGMENT_RULES else self.calls
        return decide(dataclasses.replace(memory, budget=budget), calls, self.platform.chip)

    def seconds(self, decision: Decision) -> float:
        """Return the modeled seconds that a decision adds to a step, compared with keeping all activations."""
        return self.microbatch_count * self.stage_count * decision.seconds

    def step_seconds(self, memory: MemoryPlan, decision: Decision) -> float | None:
        """Return the modeled seconds of a whole step; `None` if they cannot be modeled.

        They are not modeled if the model exposes no blocks, or with assumed rates: with those of a CPU, `full` seemed
        faster than a save set, which took 0.90 of its time (`experiments/tight_memory.py`, 2 cores, 2026-11-30).

        Args:
            memory: memory plan of the step; everything else is as in the experiment's plan.
            decision: decision of the memory plan.
        """
        costs = self._split_costs
        if costs is None:
            return None
        assert self.experiment is not None
        plan = dataclasses.replace(self.experiment.plan, memory=memory)
        assert plan.mesh is not None
        group_count = self.stage_count * plan.mesh.pipe  # a decision is that of one group of blocks
        group_flop = sum(call.count * call.graph.flop for call in self.calls)
        recomputed_share = decision.flop / group_flop if group_flop else 0.0
        decision_of_all = Kept(group_count * decision.bytes, group_count * decision.seconds, recomputed_share)
        return step_seconds(plan, Variant.of(plan), decision_of_all, costs, self.platform).total

    @functools.cached_property
    def _split_costs(self) -> SplitCosts | None:
        """The costs of the other items of a step; `None` if they cannot be modeled."""
        if self.experiment is None or not self.calls or not self.is_timed:
            return None
        return step_costs(self.experiment, self.platform)
