"""Choose the best plan for an experiment on a platform: the fastest step, as modeled, among those that fit.

Closed forms (`step_seconds`, `step_bytes`) rank all layouts and variants (`space`): a layout is a plan with a mesh, a
ZeRO stage, a pipeline and microbatches, and a variant is a memory rule, a loss chunk and an offload. In this order,
candidates are built and estimated in full (`planning.estimate`), until enough of them fit. The estimate applies every
rule of combination. A layout that does not fit without recomputation gets the optimal memory rule for the remaining
bytes (`save:BYTES`, or `chain:BYTES`), and the estimates correct this budget. With `verify`, the best plans are
compiled, and the first that fits is chosen. Among plans whose modeled seconds are nearly equal, the choice is the one
with the least `compiler_seconds`.

References:
    Zheng et al. 2022, "Alpa" (arXiv:2201.12023); Miao et al. 2022, "Galvatron" (arXiv:2211.13878).
"""

import dataclasses
import functools
import heapq
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence

from jaxscale.errors import UserError
from jaxscale.memory.plan import MemoryPlan
from jaxscale.planning.estimate import Estimate, estimate
from jaxscale.planning.search.model_costs import Kept, SplitCosts, rated, split_costs
from jaxscale.planning.search.ranked import JudgedPlan, Outcome, RankedPlan, bin_of, rounded_down_bytes
from jaxscale.planning.search.space import (
    Choices,
    Variant,
    exchanges_updates,
    layouts,
    technique_count,
    variants,
)
from jaxscale.planning.search.step_bytes import bytes_by_kind, sum_of_kinds
from jaxscale.planning.search.step_seconds import StepSeconds, step_seconds
from jaxscale.planning.search.verification import Verification
from jaxscale.platforms.platform import Platform
from jaxscale.recipe.experiment import Experiment
from jaxscale.recipe.plan import Plan

FINALISTS = 4
"""Number of fitting plans, each the fastest on its mesh, that are compared in the end."""
MAX_ESTIMATES = 18
"""Number of estimates of whole steps after which no further candidate is tried."""
MAX_RIVAL_ESTIMATES = 6
"""Maximum number of estimates of candidates that can only become runners-up."""
MAX_BUDGETS = 3
"""Maximum number of budgets of kept activations that are estimated for one candidate."""
MAX_REFUSALS = 2
"""Number of refusals of candidates of one kind after which no more of this kind are built."""
PLAUSIBLE_RATIO = 1.15
"""Largest plausible ratio of a candidate's bytes in closed form to the limit; candidates above it are left out."""
LEAST_BYTES_RATIO = 0.95
"""Ratio of estimated bytes to bytes in closed form that is assumed if no candidate of a family has been estimated."""
TARGET_SHARE = 0.97
"""Share of the limit that a budget of kept activations aims at."""
CLOSE_SHARE = 0.94
"""Share of the limit above which a budget is not enlarged."""
COMFORTABLE_SHARE = 0.8
"""Share of the limit below which a layout that keeps everything needs no chunks, offload or other memory rule."""


@dataclasses.dataclass(frozen=True, eq=False)
class Search:
    """A search for the best plan of an experiment on a platform.

    Args:
        experiment: the experiment to plan for.
        platform: platform to plan for.
        choices: settings that the user has fixed or forbidden.
        limit: bytes of device memory per device; `None` if unknown.
        host_limit: bytes of host memory per device; `None` if unknown.
        objective: "time", the fastest plan that fits; "memory", the plan that takes the least memory.
        costs_by_split: costs of the model by its split (tensor, sequence); `None` for a split that the model refuses.
            The search fills this field and the next three.
        refusal_by_kind: reason for the refusal of each kind of plan that was refused.
        layout_refusals: the reasons for leaving out layouts.
        estimates: the estimates that were made.
    """

    experiment: Experiment
    platform: Platform
    choices: Choices
    limit: int | None
    host_limit: int | None
    objective: str = "time"
    costs_by_split: dict[tuple[int, int], SplitCosts | None] = dataclasses.field(default_factory=dict)
    refusal_by_kind: dict[str, str] = dataclasses.field(default_factory=dict)
    layout_refusals: set[str] = dataclasses.field(default_factory=set)
    estimates: list[Estimate] = dataclasses.field(default_factory=list)

    def run(self, compile_count: int = 0, make: Callable[[], Experiment] | None = None) -> Outcome:
        """Search, and return the plans that were compared.

        Args:
            compile_count: number of plans to compile, the best first; if none of them fits, more plans are compiled.
            make: function that returns the experiment, called in the process that compiles.

        Raises:
            UserError: every plan is refused.
        """
        candidates, smallest_candidates = self.candidates
        fitting_plans, rejected_plans = self._fitting_and_rejected(self.best_first(candidates))
        fitting_plans.sort(key=self._plan_sort_key)
        if compile_count:
            # by estimate, all fit; according to the compiler, some may not
            verification = Verification(self.experiment, self.platform, self.choices, self.limit, self.objective, make)
            fitting_plans = verification.in_order(fitting_plans, compile_count)
        plans = tuple(judged_plan for judged_plan in fitting_plans if judged_plan.fits)
        rejected_plans += [judged_plan for judged_plan in fitting_plans if not judged_plan.fits]
        if not plans:
            smallest_plans = [
                judged_plan for candidate in smallest_candidates if (judged_plan := self.judge(candidate)) is not None
            ]
            plans = tuple(
                sorted((judged_plan for judged_plan in smallest_plans if judged_plan.fits), key=self._plan_sort_key)
            )
            rejected_plans += [judged_plan for judged_plan in smallest_plans if not judged_plan.fits]
        if not plans and not rejected_plans:
            raise UserError(f"{self.experiment.name} on {self.platform}: every plan is refused: {self._refusal_text()}")
        if not plans:
            plans = (min(rejected_plans, key=lambda judged_plan: judged_plan.device_bytes),)
        return Outcome(
            plans, tuple(rejected_plans), tuple(dict.fromkeys(self.refusal_by_kind.values())), len(candidates)
        )

    def for_experiment(self, experiment: Experiment) -> "Search":
        """Return a search with the same arguments for another experiment, without anything that this one found."""
        return Search(experiment, self.platform, self.choices, self.limit, self.host_limit, self.objective)

    @functools.cached_property
    def candidates(self) -> tuple[list[RankedPlan], list[RankedPlan]]:
        """All plausible candidates, and those that take the least memory.

        Candidates use as many devices as the batch, the model and the choices allow. The second list has one candidate
        with a pipeline and one without, because closed forms are less exact for pipelines.
        """
        for device_count in range(self.platform.devices, 0, -1):
            candidates, smallest_candidates = self._candidates_on(device_count)
            if smallest_candidates:
                return candidates, smallest_candidates
        return [], []

    def best_first(self, candidates: Sequence[RankedPlan]) -> Iterator[RankedPlan]:
        """Yield candidates, the best first. Communication is modeled only for those that may come next.

        Args:
            candidates: the candidates, in any order.
        """
        # A candidate enters the heap with a lower bound, and is pushed again with its full figures before its turn.
        heap: list[tuple[tuple[float, ...], str, int]] = []
        is_by_bytes = self.objective == "memory"
        for index, candidate in enumerate(candidates):
            lower_bounds = (candidate.bytes,) if is_by_bytes else (bin_of(candidate.computation_seconds),)
            heap.append((lower_bounds, "", index))
        heapq.heapify(heap)
        while heap:
            sort_figures, _, index = heap[0]
            if len(sort_figures) > 1:
                heapq.heappop(heap)
                yield candidates[index]
            else:
                heapq.heapreplace(heap, (*self._candidate_sort_key(candidates[index]), index))

    def _candidates_on(self, device_count: int) -> tuple[list[RankedPlan], list[RankedPlan]]:
        """Return the plausible candidates on a number of devices, and those with the least memory."""
        all_variants = variants(self.experiment, self.platform, self.choices)
        candidates: list[RankedPlan] = []
        smallest_by_is_pipelined: dict[bool, RankedPlan] = {}  # by whether the plan has a pipeline
        first_chunk_and_offload = (all_variants[0].loss_chunk, all_variants[0].offload)
        for layout in layouts(self.experiment, self.platform, device_count, self.choices, self.layout_refusals):
            costs = self.costs_of(layout)
            if costs is None:
                continue
            for chunk_and_offload, group_variants in itertools.groupby(
                all_variants, lambda v: (v.loss_chunk, v.offload)
            ):
                group_candidates = [
                    candidate for variant in group_variants if (candidate := self._candidate(layout, variant, costs))
                ]
                is_pipelined = layout.pipeline is not None
                for candidate in group_candidates:
                    is_smaller = (
                        is_pipelined not in smallest_by_is_pipelined
                        or candidate.bytes < smallest_by_is_pipelined[is_pipelined].bytes
                    )
                    if is_smaller and candidate.is_allowed:
                        smallest_by_is_pipelined[is_pipelined] = candidate
                if self.limit is not None and self.choices.is_open("memory"):
                    group_candidates = self._with_budget(group_candidates, self.limit)
                candidates += [
                    candidate
                    for candidate in group_candidates
                    if self.limit is None or candidate.bytes <= PLAUSIBLE_RATIO * self.limit
                ]
                has_free_memory = bool(group_candidates) and (
                    self.limit is None or group_candidates[0].bytes <= COMFORTABLE_SHARE * self.limit
                )
                keeps_everything = has_free_memory and group_candidates[0].variant.memory.rule == "none"
                if keeps_everything and self.objective == "time" and chunk_and_offload == first_chunk_and_offload:
                    break  # no other variant is faster
        return candidates, list(smallest_by_is_pipelined.values())

    def _candidate(self, layout: Plan, variant: Variant, costs: SplitCosts) -> RankedPlan | None:
        """Return the candidate of a layout and a variant; `None` if the memory rule does not suit the model."""
        assert layout.mesh is not None
        if not costs.suits(variant.memory):
            return None
        rule_costs = costs.kept(variant.memory, costs.batch / layout.mesh.batch_shards / layout.microbatches)
        byte_count = sum_of_kinds(bytes_by_kind(layout, variant, rule_costs, costs))
        return RankedPlan(layout, variant, rule_costs, costs, self._rated_platform, byte_count)

    def _with_budget(self, candidates: list[RankedPlan], limit: int) -> list[RankedPlan]:
        """Drop dominated candidates, and add one whose memory rule has a budget that uses up the limit.

        What the added candidate keeps and recomputes is interpolated between two rules; the optimal rule for its budget
        usually recomputes less. If the candidate that keeps everything fits comfortably, only this one is returned.

        Args:
            candidates: candidates that differ only in the memory rule.
            limit: bytes of device memory per device.
        """
        undominated_candidates = [
            candidate
            for candidate in candidates
            if not any(
                rival.kept.seconds < candidate.kept.seconds and rival.bytes <= candidate.bytes for rival in candidates
            )
        ]
        sorted_candidates = sorted(undominated_candidates, key=lambda candidate: -candidate.kept.kept_bytes)
        if not candidates or sorted_candidates[0].bytes <= COMFORTABLE_SHARE * limit:
            return sorted_candidates[:1]
        if sorted_candidates[0].bytes <= limit:
            return sorted_candidates  # the first may exceed the limit by estimate
        neighbor_pairs = itertools.pairwise(sorted_candidates)
        surrounding_pair = next(
            (
                (larger_plan, smaller_plan)
                for larger_plan, smaller_plan in neighbor_pairs
                if smaller_plan.bytes <= TARGET_SHARE * limit < larger_plan.bytes
            ),
            None,
        )
        if surrounding_pair is None or surrounding_pair[0].bytes == surrounding_pair[1].bytes:
            return undominated_candidates
        larger_plan, smaller_plan = surrounding_pair
        interpolation_weight = (TARGET_SHARE * limit - smaller_plan.bytes) / (larger_plan.bytes - smaller_plan.bytes)
        rule_costs = Kept(
            *(
                smaller_figure + interpolation_weight * (larger_figure - smaller_figure)
                for larger_figure, smaller_figure in zip(
                    larger_plan.kept.figures, smaller_plan.kept.figures, strict=True
                )
            )
        )
        memory = MemoryPlan(
            larger_plan.costs.budget_rule, budget=rounded_down_bytes(rule_costs.kept_bytes / larger_plan.stage_count)
        )
        variant = dataclasses.replace(larger_plan.variant, memory=memory)
        return [
            *undominated_candidates,
            RankedPlan(
                larger_plan.layout,
                variant,
                rule_costs,
                larger_plan.costs,
                larger_plan.platform,
                TARGET_SHARE * limit,
            ),
        ]

    def costs_of(self, layout: Plan) -> SplitCosts | None:
        """Return the costs of the model under a layout's split; `None` if the model cannot be split in this way."""
        assert layout.mesh is not None
        split = (layout.mesh.tensor, layout.mesh.sequence)
        if split not in self.costs_by_split:
            try:
                self.costs_by_split[split] = split_costs(
                    self.experiment, self._rated_platform, self.choices.base, *split
                )
            except UserError as error:
                if split == (1, 1):  # the split is not the reason
                    raise
                self.refusal_by_kind[f"split {split}"] = str(error)
                self.costs_by_split[split] = None
        return self.costs_by_split[split]

    @functools.cached_property
    def _rated_platform(self) -> Platform:
        """The platform with known rates."""
        return rated(self.platform)

    def _candidate_sort_key(self, candidate: RankedPlan) -> tuple[tuple[float, ...], str]:
        """Return the sort key of a candidate. Its text breaks ties, so that the order of layouts has no effect."""
        figures = self._sort_figures(candidate.seconds, candidate.bytes, candidate.layout, candidate.variant)
        return figures, f"{candidate.layout.mesh}{candidate.variant}"

    def _plan_sort_key(self, judged_plan: JudgedPlan) -> tuple[float, ...]:
        """Return the sort key of an estimated plan."""
        return self._sort_figures(
            judged_plan.seconds, judged_plan.device_bytes, judged_plan.plan, Variant.of(judged_plan.plan)
        )

    def _sort_figures(
        self, seconds: StepSeconds, byte_count: float, layout: Plan, variant: Variant
    ) -> tuple[float, ...]:
        """Return the numbers by which plans are sorted. Of about equally fast plans, the simplest comes first."""
        if self.objective == "memory":
            return byte_count, seconds.total
        return bin_of(seconds.total), technique_count(layout, variant), seconds.total, byte_count

    def _fitting_and_rejected(self, candidates: Iterable[RankedPlan]) -> tuple[list[JudgedPlan], list[JudgedPlan]]:
        """Estimate candidates in their order; return the plans that fit, and those that do not.

        After the first plan that fits, only candidates on other meshes and candidates that would be better are
        estimated. A later candidate may be better, because estimates correct the budgets of candidates, which may then
        be slower.
        """
        fitting_plans: list[JudgedPlan] = []
        rejected_plans: list[JudgedPlan] = []
        bytes_ratio_by_family: dict[object, float] = {}  # estimated bytes divided by bytes in closed form
        refusal_counts: dict[object, int] = {}
        meshes_that_fit: set[object] = set()
        rival_estimate_count = 0  # estimates of candidates that are not better than a plan that fits
        for candidate in candidates:
            is_better = not fitting_plans or self._candidate_sort_key(candidate)[0] < min(
                map(self._plan_sort_key, fitting_plans)
            )
            has_enough_rivals = len(fitting_plans) >= FINALISTS or rival_estimate_count >= MAX_RIVAL_ESTIMATES
            if (not is_better and has_enough_rivals) or len(self.estimates) >= MAX_ESTIMATES:
                break
            if not is_better and candidate.layout.mesh in meshes_that_fit:
                continue
            if refusal_counts.get(candidate.kind, 0) >= MAX_REFUSALS:
                continue
            if (
                self.limit is not None
                and bytes_ratio_by_family.get(candidate.family, LEAST_BYTES_RATIO) * candidate.bytes > self.limit
            ):
                continue
            previous_estimate_count = len(self.estimates)
            judged_plan = self.judge(candidate)
            rival_estimate_count += 0 if is_better else len(self.estimates) - previous_estimate_count
            if judged_plan is None:
                refusal_counts[candidate.kind] = refusal_counts.get(candidate.kind, 0) + 1
                continue
            bytes_ratio_by_family[candidate.family] = judged_plan.device_bytes / max(candidate.bytes, 1)
            (fitting_plans if judged_plan.fits else rejected_plans).append(judged_plan)
            meshes_that_fit |= {candidate.layout.mesh} if judged_plan.fits else set()
        return fitting_plans, rejected_plans

    def judge(self, candidate: RankedPlan) -> JudgedPlan | None:
        """Estimate a candidate's whole step, and return the plan; `None` if a rule or the model refuses it.

        The budget of a memory rule is corrected by the bytes of each estimate, until the step fits with little unused
        memory.
        """
        best_plan: JudgedPlan | None = None
        try:
            plan = candidate.plan
        except UserError:  # a rule refuses the combination of layout and variant
            return None
        for _ in range(MAX_BUDGETS):
            try:
                seconds = candidate.seconds
                if plan.memory.budget is not None:
                    rule_costs = candidate.costs.kept(plan.memory, candidate.microbatch_rows)
                    variant = Variant.of(plan)
                    seconds = step_seconds(candidate.layout, variant, rule_costs, candidate.costs, candidate.platform)
                step_estimate = estimate(self.experiment, self.platform, plan)
            except UserError as error:
                self.refusal_by_kind.setdefault(str(candidate.kind), str(error))
                break
            self.estimates.append(step_estimate)
            judged_plan = JudgedPlan(step_estimate.plan, seconds, step_estimate, self._fits(step_estimate))
            # If another budget takes the same bytes, the budget is not the reason that the plan does not fit.
            is_stuck = best_plan is not None and judged_plan.device_bytes == best_plan.device_bytes
            if best_plan is None or (judged_plan.fits, -judged_plan.seconds.total) > (
                best_plan.fits,
                -best_plan.seconds.total,
            ):
                best_plan = judged_plan
            corrected_memory = self._corrected_memory(candidate, plan.memory, judged_plan.device_bytes)
            if corrected_memory is None or is_stuck:
                break
            plan = dataclasses.replace(plan, memory=corrected_memory)
        return best_plan

    def _corrected_memory(self, candidate: RankedPlan, memory: MemoryPlan, device_bytes: int) -> MemoryPlan | None:
        """Return a memory rule with a better budget than that of the estimated plan; `None` if there is none.

        A plan that keeps everything and does not fit gets a budget.
        """
        limit, budget = self.limit, memory.budget
        if limit is None or not self.choices.is_open("memory"):
            return None
        if budget is None:
            if memory.rule != "none" or not candidate.costs.calls or device_bytes <= limit:
                return None
            budget = candidate.kept.kept_bytes / candidate.stage_count
        elif CLOSE_SHARE * limit <= device_bytes <= limit:
            return None
        corrected_bytes = budget + int(TARGET_SHARE * limit) - device_bytes
        if corrected_bytes < 0:
            return None
        return MemoryPlan(candidate.costs.budget_rule, budget=rounded_down_bytes(corrected_bytes))

    def _fits(self, step_estimate: Estimate) -> bool:
        """Return whether a step fits device and host; an unknown limit is never exceeded."""
        limits_and_bytes = ((self.limit, step_estimate.device_bytes), (self.host_limit, step_estimate.host_bytes))
        return all(limit is None or byte_count <= limit for limit, byte_count in limits_and_bytes)

    def _refusal_text(self) -> str:
        """Return the reasons why every plan is refused, as text."""
        if exchanges_updates(self.experiment, self.choices.base) and self.platform.devices == 1:
            return "its replicas exchange updates, but there is one device; choose more devices, or no codec"
        base, row_count = self.choices.base, self.experiment.batch
        if "mesh" in self.choices.fixed and base.mesh and base.mesh.devices > self.platform.devices:
            return f"mesh {base.mesh} takes {base.mesh.devices} devices, and there are {self.platform.devices}"
        if "microbatches" in self.choices.fixed and row_count % base.microbatches:
            return f"{base.microbatches} microbatches do not divide the batch of {row_count} rows"
        batch_text = f"no mesh divides the batch of {row_count} rows over the devices"
        return (
            "; ".join(dict.fromkeys(self.refusal_by_kind.values()))
            or "; ".join(sorted(self.layout_refusals))
            or batch_text
        )
