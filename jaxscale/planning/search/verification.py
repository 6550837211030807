"""Compile the best plans of a search, and order them by what the compiler reports.

A TPU computes the products of ZeRO 3 in steps around a ring of devices. By libtpu's own clock, whole gathers that run
beside the products (`--plan.compiler overlap`) are faster for some steps, and need less memory. Options of the compiler
do not change results, so that the best plan is compiled both ways, and further plans with the better options.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence

from jaxscale.compiler.compile import compile_report
from jaxscale.errors import UserError
from jaxscale.planning.estimate import estimate
from jaxscale.planning.program import step_recipe
from jaxscale.planning.search.compiler_seconds import compiler_seconds
from jaxscale.planning.search.ranked import JudgedPlan
from jaxscale.planning.search.space import Choices
from jaxscale.platforms.compiler_options import DEFAULT, SETS, WINDOWED_EINSUM_THRESHOLD, CompilerOptions
from jaxscale.platforms.platform import Platform
from jaxscale.recipe.experiment import Experiment

NEAR_SHARE = 0.05
"""If the modeled seconds of compiled plans differ by at most this share, the compiler's estimates decide."""
OVERLAP = CompilerOptions(("overlap",))
"""Options that replace products around a ring."""


@dataclasses.dataclass(frozen=True, eq=False)
class Verification:
    """The compilation of an experiment's best plans for a platform.

    Args:
        experiment: the experiment to plan for.
        platform: platform to compile for.
        choices: settings that the user has fixed or forbidden.
        limit: bytes of device memory per device; `None` if unknown.
        objective: "time", or "memory" for the plan that takes the least memory.
        make: function that returns the experiment, called in the process that compiles.
    """

    experiment: Experiment
    platform: Platform
    choices: Choices
    limit: int | None
    objective: str
    make: Callable[[], Experiment] | None

    def in_order(self, fitting_plans: Sequence[JudgedPlan], plan_count: int) -> list[JudgedPlan]:
        """Compile the first plans, and more until one fits; return all plans, the compiled ones first.

        If the objective is time, compiled plans that fit and are modeled to be nearly as fast as the fastest are sorted
        by the compiler's seconds, if it estimates all of them.

        Args:
            fitting_plans: plans that fit by estimate, the best first.
            plan_count: number of plans to compile.
        """
        compiled_plans: list[JudgedPlan] = []
        worse_twins: list[JudgedPlan] = []  # the same plans with worse options of the compiler
        options: CompilerOptions | None = None  # the better ones of a plan that was compiled both ways and fits
        for judged_plan in fitting_plans:
            if len(compiled_plans) >= plan_count and any(plan.fits for plan in compiled_plans):
                break
            twins = self._compiled_twins(judged_plan, (DEFAULT, OVERLAP) if options is None else (options,))
            twins.sort(key=self._compiled_key)
            compiled_plans.append(twins[0])
            worse_twins += twins[1:]
            if len(twins) > 1 and twins[0].fits:
                options = twins[0].plan.compiler
        other_plans = list(fitting_plans[len(compiled_plans) :])
        near_plans, far_plans = _near_and_far(compiled_plans) if self.objective == "time" else (compiled_plans, [])
        if self.objective != "time" or all(plan.compiler_seconds is not None for plan in near_plans):
            near_plans.sort(key=self._compiled_key)
        return [*near_plans, *worse_twins, *far_plans, *other_plans]

    def _compiled_twins(self, judged_plan: JudgedPlan, options: Sequence[CompilerOptions]) -> list[JudgedPlan]:
        """Compile a plan with each of the options; without products around a ring, with its own options alone.

        Options that the compiler refuses are left out, unless they are the plan's own.
        """
        if not self._has_rings(judged_plan):
            return [self._compiled_plan(judged_plan)]
        twins: list[JudgedPlan] = []
        for plan_options in options:
            plan = dataclasses.replace(judged_plan.plan, compiler=plan_options)
            try:
                twin = judged_plan
                if plan_options != judged_plan.plan.compiler:
                    twin = dataclasses.replace(twin, plan=plan, estimate=estimate(self.experiment, self.platform, plan))
                twins.append(self._compiled_plan(twin))
            except UserError:
                if plan_options == judged_plan.plan.compiler:
                    raise
        return twins or [self._compiled_plan(judged_plan)]

    def _has_rings(self, judged_plan: JudgedPlan) -> bool:
        """Return whether the step may compute products around a ring, and options of the compiler are free."""
        plan, chip_sets = judged_plan.plan, SETS["overlap"].get(self.platform.chip.name, ())
        replaces_rings = any(recommendation.option == WINDOWED_EINSUM_THRESHOLD for recommendation in chip_sets)
        is_free = self.choices.is_open("compiler") and plan.compiler == DEFAULT
        return replaces_rings and is_free and plan.zero == 3 and plan.mesh is not None and plan.mesh.fsdp > 2

    def _compiled_plan(self, judged_plan: JudgedPlan) -> JudgedPlan:
        """Compile a plan's step, and return the plan with the compiler's report, seconds and verdict."""
        report = compile_report(step_recipe(self.experiment, judged_plan.plan, self.make), self.platform)
        if report.added_options:  # the compiler refuses the step without them
            options = judged_plan.plan.compiler.with_single(report.added_options)
            judged_plan = dataclasses.replace(judged_plan, plan=dataclasses.replace(judged_plan.plan, compiler=options))
        has_failed = report.oom is not None or report.crashed is not None
        device_bytes = judged_plan.estimate.device_bytes if report.device_bytes is None else report.device_bytes
        fits = not has_failed and (self.limit is None or device_bytes <= self.limit)
        clock_seconds = compiler_seconds(report.schedule, judged_plan.plan, self.platform)
        return dataclasses.replace(judged_plan, fits=fits, report=report, compiler_seconds=clock_seconds)

    def _compiled_key(self, judged_plan: JudgedPlan) -> tuple[bool, float]:
        """Return the key by which compiled plans are sorted: those that fit first, then by bytes or seconds."""
        if self.objective == "memory":
            return not judged_plan.fits, judged_plan.device_bytes
        seconds = judged_plan.compiler_seconds
        return not judged_plan.fits, math.inf if seconds is None else seconds.total


def _near_and_far(compiled_plans: Sequence[JudgedPlan]) -> tuple[list[JudgedPlan], list[JudgedPlan]]:
    """Split compiled plans into those that fit and are modeled nearly as fast as the fastest, and the others."""
    fewest_seconds = min((plan.seconds.total for plan in compiled_plans if plan.fits), default=0.0)
    near_plans = [
        plan for plan in compiled_plans if plan.fits and plan.seconds.total <= (1 + NEAR_SHARE) * fewest_seconds
    ]
    return near_plans, [plan for plan in compiled_plans if plan not in near_plans]
