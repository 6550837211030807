"""Plans ranked by closed forms, plans judged by estimates of whole steps, and the outcome of a search."""

import dataclasses
import functools
import math

from jaxscale.compiler.report import CompileReport
from jaxscale.errors import UserError
from jaxscale.planning.estimate import Estimate
from jaxscale.planning.search.model_costs import Kept, SplitCosts
from jaxscale.planning.search.space import Variant
from jaxscale.planning.search.step_seconds import StepSeconds, computation, step_seconds
from jaxscale.platforms.platform import Platform
from jaxscale.recipe.plan import Plan

KiB, MiB = 2**10, 2**20
BIN_WIDTH = 0.02
"""Width of the bins of the logarithm of modeled seconds; within a bin, plans with fewer techniques come first."""


@dataclasses.dataclass(frozen=True)
class RankedPlan:
    """A plan of the search, with its seconds and bytes in closed form.

    Args:
        layout: plan with the mesh, ZeRO stage, pipeline and microbatches; the variant has the other settings.
        variant: memory rule, chunk of the loss and offload.
        kept: what the memory rule keeps and recomputes for the rows of a microbatch; approximate if the rule has a
            budget.
        costs: costs of the model under the layout's split.
        platform: platform with known rates.
        bytes: approximate bytes of device memory per device.
    """

    layout: Plan
    variant: Variant
    kept: Kept
    costs: SplitCosts
    platform: Platform
    bytes: float

    @functools.cached_property
    def seconds(self) -> StepSeconds:
        """The modeled seconds of a step."""
        return step_seconds(self.layout, self.variant, self.kept, self.costs, self.platform)

    @functools.cached_property
    def computation_seconds(self) -> float:
        """The modeled seconds of a step without communication: a cheap lower bound on `seconds`."""
        return sum(computation(self.layout, self.variant, self.kept, self.costs, self.platform).values())

    @functools.cached_property
    def plan(self) -> Plan:
        """The layout with the settings of the variant."""
        return self.variant.applied_to(self.layout)

    @property
    def is_allowed(self) -> bool:
        """Whether the rules of combination allow the variant in the layout."""
        try:
            return self.plan is not None
        except UserError:
            return False

    @property
    def microbatch_rows(self) -> float:
        """The number of rows of one microbatch on a device."""
        assert self.layout.mesh is not None
        return self.costs.batch / self.layout.mesh.batch_shards / self.layout.microbatches

    @property
    def stage_count(self) -> int:
        """The number of ranks among which a pipeline divides the blocks; 1 without a pipeline."""
        return 1 if self.layout.pipeline is None else self.layout.pipeline.shape()[0]

    @property
    def family(self) -> tuple[object, ...]:
        """The key of a family: candidates whose bytes in closed form are off by about the same factor."""
        mesh, pipeline = self.layout.mesh, self.layout.pipeline
        assert mesh is not None
        pipeline_key = None if pipeline is None else (pipeline.name, pipeline.ranks, pipeline.stash)
        return (mesh.tensor, mesh.sequence, self.layout.zero, pipeline_key, *self._variant_kind)

    @property
    def kind(self) -> tuple[object, ...]:
        """The key of a kind: candidates that a rule or the model would refuse for the same reasons."""
        mesh, pipeline = self.layout.mesh, self.layout.pipeline
        assert mesh is not None
        used_axes = tuple(axis for axis, axis_size in mesh.sizes.items() if axis_size > 1)
        pipeline_key = None if pipeline is None else (pipeline.name, pipeline.ranks)
        return (used_axes, mesh.tensor, mesh.sequence, self.layout.zero, pipeline_key, *self._variant_kind)

    @property
    def _variant_kind(self) -> tuple[object, ...]:
        """The variant, apart from the budget of its memory rule."""
        return (self.variant.memory.rule, self.variant.loss_chunk, self.variant.offload)


@dataclasses.dataclass(frozen=True)
class JudgedPlan:
    """A plan whose whole step was estimated, and perhaps compiled.

    Args:
        plan: the plan.
        seconds: modeled seconds of a step.
        estimate: estimate of the step's bytes.
        fits: whether the step fits device and host, according to the compiler if there is a report.
        report: the compiler's report; `None` if the step was not compiled.
        compiler_seconds: seconds of a step, as the compiler estimates them; `None` if the step was not compiled, or if
            the compiler makes no such estimates.
    """

    plan: Plan
    seconds: StepSeconds
    estimate: Estimate
    fits: bool
    report: CompileReport | None = None
    compiler_seconds: StepSeconds | None = None

    @property
    def device_bytes(self) -> int:
        """The bytes of device memory per device, by the compiler's report; without one, by estimate."""
        compiled_bytes = None if self.report is None else self.report.device_bytes
        return self.estimate.device_bytes if compiled_bytes is None else compiled_bytes


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The plans that a search compared.

    Args:
        plans: the plans that fit, the best first; if none fits, only the plan that needs the least memory.
        rejected: the estimated plans that do not fit, in the order in which they were tried.
        refusals: the reasons for which a rule or the model refuses plans.
        candidate_count: number of plans that were ranked.
    """

    plans: tuple[JudgedPlan, ...]
    rejected: tuple[JudgedPlan, ...]
    refusals: tuple[str, ...]
    candidate_count: int

    def scaled(self, factor: float) -> "Outcome":
        """Return the outcome, with all modeled seconds multiplied by a factor."""

        def scaled_plans(judged_plans: tuple[JudgedPlan, ...]) -> tuple[JudgedPlan, ...]:
            """Return judged plans with their seconds multiplied by the factor."""
            return tuple(
                dataclasses.replace(judged_plan, seconds=judged_plan.seconds.scaled(factor))
                for judged_plan in judged_plans
            )

        return dataclasses.replace(self, plans=scaled_plans(self.plans), rejected=scaled_plans(self.rejected))


def bin_of(seconds: float) -> float:
    """Return the index of the bin in which seconds lie; bins are `BIN_WIDTH` wide on a logarithmic scale."""
    return math.floor(math.log(max(seconds, 1e-12)) / BIN_WIDTH)


def rounded_down_bytes(byte_count: float) -> int:
    """Round a number of bytes down to whole MiB, or to whole KiB if it is below 64 MiB.

    Example:
        >>> rounded_down_bytes(70.9 * 2**20) / 2**20, rounded_down_bytes(5000) / 2**10
        (70.0, 4.0)
    """
    unit_bytes = MiB if byte_count >= 64 * MiB else KiB
    return int(byte_count) // unit_bytes * unit_bytes
