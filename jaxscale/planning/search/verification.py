"""Compile the best plans of a search, and order them by what the compiler reports.

A TPU computes the products of ZeRO 3 in steps around a ring of devices. By libtpu's own clock, whole gathers that run
beside the products (`--plan.compiler overlap`) are faster for some steps, and need less memory. Options of the compiler
do not change results, so that the best plan is compiled both ways, and further plans with the faster options.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence

from jaxscale.compiler.compile import compile_report
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


@dataclasses.dataclass(frozen=True, eq=False)
class Verification:
    """The compilation of an experiment's best plans for a platform.

    Args:
        experiment: the experiment to plan for.
        platform: platform to compile for.
        choices: settings that the user has fixed or forbidden.
        limit: bytes of device memory per device; `None` if unknown.
        compile_count: number of programs to compile; if none of them fits, more are compiled.
        make: function that returns the experiment, called in the process that compiles.
    """

    experiment: Experiment
    platform: Platform
    choices: Choices
    limit: int | None
    compile_count: int
    make: Callable[[], Experiment] | None

    def compiled_plans(self, fitting_plans: Sequence[JudgedPlan]) -> tuple[list[JudgedPlan], Sequence[JudgedPlan]]:
        """Compile the first plans, and more until one fits; return the compiled plans, and the plans that were not.

        Args:
            fitting_plans: plans that fit by estimate, the best first.
        """
        compiled_plans: list[JudgedPlan] = []
        options: CompilerOptions | None = None  # the faster ones of the first plan that was compiled both ways
        for index, judged_plan in enumerate(fitting_plans):
            if len(compiled_plans) >= self.compile_count and any(plan.fits for plan in compiled_plans):
                return compiled_plans, fitting_plans[index:]
            has_rings = self._has_rings(judged_plan)
            if has_rings and options is not None:
                judged_plan = with_options(judged_plan, options)
            compiled_plans.append(self._compiled_plan(judged_plan))
            if has_rings and options is None and len(compiled_plans) < self.compile_count:
                compiled_plans.append(self._compiled_plan(with_options(judged_plan, OVERLAP)))
                options = min(compiled_plans[-2:], key=_clock_key).plan.compiler
        return compiled_plans, ()

    def _has_rings(self, judged_plan: JudgedPlan) -> bool:
        """Return whether the step may compute products around a ring, and options of the compiler are free."""
        plan, chip_sets = judged_plan.plan, SETS["overlap"].get(self.platform.chip.name, ())
        replaces_rings = any(recommendation.option == WINDOWED_EINSUM_THRESHOLD for recommendation in chip_sets)
        is_free = self.choices.is_open("compiler") and plan.compiler == DEFAULT
        return replaces_rings and is_free and plan.zero == 3 and plan.mesh is not None and plan.mesh.fsdp > 2

    def _compiled_plan(self, judged_plan: JudgedPlan) -> JudgedPlan:
        """Compile a plan's step, and return the plan with the compiler's report, seconds and verdict."""
        report = compile_report(step_recipe(self.experiment, judged_plan.plan, self.make), self.platform)
        has_failed = report.oom is not None or report.crashed is not None
        device_bytes = judged_plan.estimate.device_bytes if report.device_bytes is None else report.device_bytes
        fits = not has_failed and (self.limit is None or device_bytes <= self.limit)
        clock_seconds = compiler_seconds(report.schedule, judged_plan.plan, self.platform)
        return dataclasses.replace(judged_plan, fits=fits, report=report, compiler_seconds=clock_seconds)


def with_options(judged_plan: JudgedPlan, options: CompilerOptions) -> JudgedPlan:
    """Return a plan that was not compiled yet, with other options of the compiler."""
    return dataclasses.replace(judged_plan, plan=dataclasses.replace(judged_plan.plan, compiler=options))


def in_order_of_clock(compiled_plans: Sequence[JudgedPlan]) -> tuple[list[JudgedPlan], list[JudgedPlan]]:
    """Split compiled plans into those that are modeled nearly as fast as the fastest and fit, and the other ones.

    The first ones are sorted by the compiler's seconds, if it estimates all of them.

    Args:
        compiled_plans: the compiled plans, the best by modeled figures first.
    """
    fewest_seconds = next((plan.seconds.total for plan in compiled_plans if plan.fits), 0.0)
    near_plans = [
        plan for plan in compiled_plans if plan.fits and plan.seconds.total <= (1 + NEAR_SHARE) * fewest_seconds
    ]
    other_plans = [plan for plan in compiled_plans if plan not in near_plans]
    if all(plan.compiler_seconds is not None for plan in near_plans):
        near_plans.sort(key=_clock_key)
    return near_plans, other_plans


def _clock_key(judged_plan: JudgedPlan) -> tuple[bool, float]:
    """Return the key by which compiled plans are sorted: those that fit first, then by the compiler's seconds."""
    seconds = judged_plan.compiler_seconds
    return not judged_plan.fits, math.inf if seconds is None else seconds.total
