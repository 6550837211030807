"""Choose the best plan for an experiment on a platform: the fastest step, as modeled, among those that fit.

Closed forms (`step_seconds`, `step_bytes`) rank all layouts and variants (`space`). In this order, candidates are built
and estimated in full (`planning.estimate`), which applies every rule of combination, until enough of them fit. A layout
that does not fit without recomputation gets the optimal rule of the bytes that are left (`save:BYTES`, or
`chain:BYTES`), and the estimates correct this budget. With `verify`, the compiler judges the best plans, and the first
that fits is the choice; among plans that are modeled as about as fast, the one with the least `compiler_seconds`.

References:
    Zheng et al. 2022, "Alpa" (arXiv:2201.12023); Miao et al. 2022, "Galvatron" (arXiv:2211.13878).
"""

import dataclasses
import functools
import heapq
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence

from jaxscale.compiler.compile import compile_report
from jaxscale.errors import UserError
from jaxscale.memory.plan import MemoryPlan
from jaxscale.planning.estimate import Estimate, estimate
from jaxscale.planning.program import step_recipe
from jaxscale.planning.search.compiler_seconds import compiler_seconds
from jaxscale.planning.search.model_costs import Kept, SplitCosts, rated, split_costs
from jaxscale.planning.search.ranked import JudgedPlan, Outcome, RankedPlan, bin_of, rounded_down
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
from jaxscale.platforms.platform import Platform
from jaxscale.recipe.experiment import Experiment
from jaxscale.recipe.plan import Plan

FINALISTS = 4
"""Number of plans that fit, the fastest of different meshes, which are compared in the end."""
MAX_ESTIMATES = 18
"""Maximum number of estimates of whole steps after which no further candidate is tried."""
MAX_RIVAL_ESTIMATES = 6
"""Maximum number of estimates of candidates that can only become runners-up."""
MAX_BUDGETS = 3
"""Maximum number of budgets of kept activations that are estimated for one candidate."""
MAX_REFUSALS = 2
"""Number of refusals of candidates of one kind after which no more of this kind are built."""
PLAUSIBLE = 1.15
"""Candidates whose closed form of bytes exceeds the limit by this factor are left out at once."""
LEAST_EXCESS = 0.95
"""Least ratio of estimated bytes to those of the closed form, for candidates of a family without an estimate."""
ROOM = 0.97
"""Share of the limit that a budget of kept activations aims at."""
CLOSE = 0.94
"""Share of the limit above which a budget is not enlarged."""
NEAR = 0.05
"""Share by which the modeled seconds of compiled plans may differ so that the compiler's estimates decide."""
COMFORTABLE = 0.8
"""Share of the limit below which a layout that keeps everything needs no chunks and no offload."""


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
        costs: costs of the model by its split over (tensor, sequence), which fills as the search goes on; `None` for a
            split that the model refuses.
        refusals: reasons for which kinds of plans were refused, which fill as the search goes on.
        layout_refusals: reasons for which layouts were left out, which fill as the search goes on.
        estimates: the estimates that were made.
    """

    experiment: Experiment
    platform: Platform
    choices: Choices
    limit: int | None
    host_limit: int | None
    objective: str = "time"
    costs: dict[tuple[int, int], SplitCosts | None] = dataclasses.field(default_factory=dict)
    refusals: dict[str, str] = dataclasses.field(default_factory=dict)
    layout_refusals: set[str] = dataclasses.field(default_factory=set)
    estimates: list[Estimate] = dataclasses.field(default_factory=list)

    def run(self, verify: int = 0, make: Callable[[], Experiment] | None = None) -> Outcome:
        """Search, and return the plans that were compared.

        Args:
            verify: number of plans that may be compiled, the best first.
            make: function that returns the experiment, called in the process that compiles.

        Raises:
            UserError: every plan is refused.
        """
        candidates, smallest_candidates = self.candidates
        fitting, rejected = self._judged(self.ordered(candidates))
        fitting.sort(key=self._order)
        if verify:
            fitting = self._verified(fitting, verify, make)
        plans = tuple(judged for judged in fitting if judged.fits)
        rejected += [judged for judged in fitting if not judged.fits]
        if not plans:
            smallest = [judged for one in smallest_candidates if (judged := self.judge(one)) is not None]
            plans = tuple(sorted((judged for judged in smallest if judged.fits), key=self._order))
            rejected += [judged for judged in smallest if not judged.fits]
        if not plans and not rejected:
            raise UserError(f"{self.experiment.name} on {self.platform}: every plan is refused: {self._reasons()}")
        if not plans:
            plans = (min(rejected, key=lambda judged: judged.device_bytes),)
        return Outcome(plans, tuple(rejected), tuple(dict.fromkeys(self.refusals.values())), len(candidates))

    @functools.cached_property
    def candidates(self) -> tuple[list[RankedPlan], list[RankedPlan]]:
        """All plausible candidates, and the ones that take the least memory.

        They use as many devices as the batch, the model and the choices allow. Those with the least memory are one
        with a pipeline and one without, because closed forms are less exact for pipelines.
        """
        for device_count in range(self.platform.devices, 0, -1):
            candidates, smallest = self._candidates_on(device_count)
            if smallest:
                return candidates, smallest
        return [], []

    def ordered(self, candidates: Sequence[RankedPlan]) -> Iterator[RankedPlan]:
        """Yield candidates, the best first; communication is modeled only for those that may come next.

        Args:
            candidates: the candidates, in any order.
        """
        # first by lower bounds, which are not above the figures, and then by the figures themselves
        heap: list[tuple[tuple[float, ...], str, int]] = []
        is_by_bytes = self.objective == "memory"
        for number, candidate in enumerate(candidates):
            bound = (candidate.bytes,) if is_by_bytes else (bin_of(candidate.computation_seconds),)
            heap.append((bound, "", number))
        heapq.heapify(heap)
        while heap:
            figures, _, number = heap[0]
            if len(figures) > 1:
                heapq.heappop(heap)
                yield candidates[number]
            else:
                heapq.heapreplace(heap, (*self._candidate_order(candidates[number]), number))

    def _candidates_on(self, device_count: int) -> tuple[list[RankedPlan], list[RankedPlan]]:
        """Return the plausible candidates on a number of devices, and those with the least memory."""
        all_variants = variants(self.experiment, self.platform, self.choices)
        candidates: list[RankedPlan] = []
        smallest: dict[bool, RankedPlan] = {}  # by whether there is a pipeline
        first_kind = (all_variants[0].loss_chunk, all_variants[0].offload)
        for layout in layouts(self.experiment, self.platform, device_count, self.choices, self.layout_refusals):
            costs = self.costs_of(layout)
            if costs is None:
                continue
            for chunk_and_offload, group in itertools.groupby(all_variants, lambda v: (v.loss_chunk, v.offload)):
                members = [candidate for variant in group if (candidate := self._candidate(layout, variant, costs))]
                is_pipelined = layout.pipeline is not None
                for member in members:
                    is_smaller = is_pipelined not in smallest or member.bytes < smallest[is_pipelined].bytes
                    if is_smaller and member.is_allowed:
                        smallest[is_pipelined] = member
                if self.limit is not None and self.choices.is_open("memory"):
                    members = self._with_budget(members, self.limit)
                candidates += [m for m in members if self.limit is None or m.bytes <= PLAUSIBLE * self.limit]
                has_room = bool(members) and (self.limit is None or members[0].bytes <= COMFORTABLE * self.limit)
                keeps_all = has_room and members[0].variant.memory.rule == "none"
                if keeps_all and self.objective == "time" and chunk_and_offload == first_kind:
                    break  # no other variant is faster
        return candidates, list(smallest.values())

    def _candidate(self, layout: Plan, variant: Variant, costs: SplitCosts) -> RankedPlan | None:
        """Return the candidate of a layout and a variant; `None` if the memory rule does not suit the model."""
        assert layout.mesh is not None
        if not costs.suits(variant.memory):
            return None
        kept = costs.kept(variant.memory, costs.batch / layout.mesh.batch_shards / layout.microbatches)
        byte_count = sum_of_kinds(bytes_by_kind(layout, variant, kept, costs))
        return RankedPlan(layout, variant, kept, costs, self._rated, byte_count)

    def _with_budget(self, members: list[RankedPlan], limit: int) -> list[RankedPlan]:
        """Return candidates that differ in the memory rule alone, and one whose budget uses up the limit.

        Its recomputation is interpolated between those of the rules: the optimal rule of a budget recomputes less.
        If the rule that keeps everything fits, it is the only candidate.
        """
        undominated = [
            member
            for member in members
            if not any(other.kept.seconds < member.kept.seconds and other.bytes <= member.bytes for other in members)
        ]
        by_kept_bytes = sorted(undominated, key=lambda member: -member.kept.kept_bytes)
        if not members or by_kept_bytes[0].bytes <= limit:
            return by_kept_bytes[:1]
        members = undominated
        pairs = itertools.pairwise(by_kept_bytes)
        pair = next(((more, less) for more, less in pairs if less.bytes <= ROOM * limit < more.bytes), None)
        if pair is None or pair[0].bytes == pair[1].bytes:
            return members
        more, less = pair
        share = (ROOM * limit - less.bytes) / (more.bytes - less.bytes)
        kept = Kept(*(b + share * (a - b) for a, b in zip(more.kept.figures, less.kept.figures, strict=True)))
        memory = MemoryPlan(more.costs.budget_rule, budget=rounded_down(kept.kept_bytes / more.stage_count))
        variant = dataclasses.replace(more.variant, memory=memory)
        return [*members, RankedPlan(more.layout, variant, kept, more.costs, more.platform, ROOM * limit)]

    def costs_of(self, layout: Plan) -> SplitCosts | None:
        """Return the costs of the model under a layout's split; `None` if the model cannot be split in this way."""
        assert layout.mesh is not None
        split = (layout.mesh.tensor, layout.mesh.sequence)
        if split not in self.costs:
            try:
                self.costs[split] = split_costs(self.experiment, self._rated, self.choices.base, *split)
            except UserError as error:
                if split == (1, 1):  # an error that no split mends
                    raise
                self.refusals[f"split {split}"] = str(error)
                self.costs[split] = None
        return self.costs[split]

    @functools.cached_property
    def _rated(self) -> Platform:
        """The platform with known rates."""
        return rated(self.platform)

    def _candidate_order(self, candidate: RankedPlan) -> tuple[tuple[float, ...], str]:
        """Return the key by which candidates are sorted; its last part makes the order independent of the space's."""
        figures = self._figures(candidate.seconds, candidate.bytes, candidate.layout, candidate.variant)
        return figures, f"{candidate.layout.mesh}{candidate.variant}"

    def _order(self, judged: JudgedPlan) -> tuple[float, ...]:
        """Return the key by which estimated plans are sorted."""
        return self._figures(judged.seconds, judged.device_bytes, judged.plan, Variant.of(judged.plan))

    def _figures(self, seconds: StepSeconds, nbytes: float, layout: Plan, variant: Variant) -> tuple[float, ...]:
        """Return the figures by which plans are sorted; those that are about as fast, by their techniques."""
        if self.objective == "memory":
            return nbytes, seconds.total
        return bin_of(seconds.total), technique_count(layout, variant), seconds.total, nbytes

    def _judged(self, candidates: Iterable[RankedPlan]) -> tuple[list[JudgedPlan], list[JudgedPlan]]:
        """Estimate candidates in their order; return those that fit, and those that do not.

        After the first that fits, only candidates of other meshes are estimated, and those that would be better: the
        seconds of a candidate with a budget are a lower bound, so that its estimate may show it slower than the next.
        """
        fitting: list[JudgedPlan] = []
        rejected: list[JudgedPlan] = []
        excess_by_family: dict[object, float] = {}  # estimated bytes as a multiple of the closed form's
        refusal_counts: dict[object, int] = {}
        meshes_that_fit: set[object] = set()
        rival_estimates = 0  # of candidates that are not better than one that fits
        for candidate in candidates:
            is_better = not fitting or self._candidate_order(candidate)[0] < min(map(self._order, fitting))
            has_rivals = len(fitting) >= FINALISTS or rival_estimates >= MAX_RIVAL_ESTIMATES
            if (not is_better and has_rivals) or len(self.estimates) >= MAX_ESTIMATES:
                break
            if not is_better and candidate.layout.mesh in meshes_that_fit:
                continue
            if refusal_counts.get(candidate.kind, 0) >= MAX_REFUSALS:
                continue
            if (
                self.limit is not None
                and excess_by_family.get(candidate.family, LEAST_EXCESS) * candidate.bytes > self.limit
            ):
                continue
            estimate_count = len(self.estimates)
            judged = self.judge(candidate)
            rival_estimates += 0 if is_better else len(self.estimates) - estimate_count
            if judged is None:
                refusal_counts[candidate.kind] = refusal_counts.get(candidate.kind, 0) + 1
                continue
            excess_by_family[candidate.family] = judged.device_bytes / max(candidate.bytes, 1)
            (fitting if judged.fits else rejected).append(judged)
            meshes_that_fit |= {candidate.layout.mesh} if judged.fits else set()
        return fitting, rejected

    def judge(self, candidate: RankedPlan) -> JudgedPlan | None:
        """Estimate a candidate's whole step; `None` if a rule or the model refuses the plan.

        The budget of a memory rule is corrected by the bytes of each estimate, until the step fits with little room.
        """
        best: JudgedPlan | None = None
        try:
            plan = candidate.plan
        except UserError:  # a rule refuses the combination of layout and variant
            return None
        for _ in range(MAX_BUDGETS):
            try:
                seconds = candidate.seconds
                if plan.memory.budget is not None:
                    kept = candidate.costs.kept(plan.memory, candidate.microbatch_rows)
                    variant = Variant.of(plan)
                    seconds = step_seconds(candidate.layout, variant, kept, candidate.costs, candidate.platform)
                step_estimate = estimate(self.experiment, self.platform, plan)
            except UserError as error:
                self.refusals.setdefault(str(candidate.kind), str(error))
                break
            self.estimates.append(step_estimate)
            judged = JudgedPlan(step_estimate.plan, seconds, step_estimate, self._fits(step_estimate))
            is_stuck = best is not None and judged.device_bytes == best.device_bytes  # the budget is not the reason
            if best is None or (judged.fits, -judged.seconds.total) > (best.fits, -best.seconds.total):
                best = judged
            memory = self._corrected(candidate, plan.memory, judged.device_bytes)
            if memory is None or is_stuck:
                break
            plan = dataclasses.replace(plan, memory=memory)
        return best

    def _corrected(self, candidate: RankedPlan, memory: MemoryPlan, device_bytes: int) -> MemoryPlan | None:
        """Return a memory rule with a better budget than that of an estimated plan; `None` if there is none.

        A plan that keeps everything, and does not fit by a little, gets a budget.
        """
        limit, budget = self.limit, memory.budget
        if limit is None or not self.choices.is_open("memory"):
            return None
        if budget is None:
            if memory.rule != "none" or not candidate.costs.calls or device_bytes <= limit:
                return None
            budget = candidate.kept.kept_bytes / candidate.stage_count
        elif CLOSE * limit <= device_bytes <= limit:
            return None
        corrected_bytes = budget + int(ROOM * limit) - device_bytes
        if corrected_bytes < 0:
            return None
        return MemoryPlan(candidate.costs.budget_rule, budget=rounded_down(corrected_bytes))

    def _fits(self, step_estimate: Estimate) -> bool:
        """Return whether a step fits device and host; an unknown limit counts as enough."""
        limits_and_bytes = ((self.limit, step_estimate.device_bytes), (self.host_limit, step_estimate.host_bytes))
        return all(limit is None or byte_count <= limit for limit, byte_count in limits_and_bytes)

    def _verified(
        self, fitting: list[JudgedPlan], verify: int, make: Callable[[], Experiment] | None
    ) -> list[JudgedPlan]:
        """Compile the first plans, and further ones until one fits; return all, the compiled ones first.

        Among those that fit and whose modeled seconds are near each other, the compiler's estimates decide.
        """
        compiled: list[JudgedPlan] = []
        for judged in fitting:
            if len(compiled) >= verify and any(one.fits for one in compiled):
                break
            compiled.append(self._compiled(judged, make))
        compiled.sort(key=self._order)
        fastest = next((one.seconds.total for one in compiled if one.fits), 0.0)
        near = [one for one in compiled if one.fits and one.seconds.total <= (1 + NEAR) * fastest]
        others = [one for one in compiled if one not in near] + fitting[len(compiled) :]
        if self.objective == "time" and all(one.compiler_seconds is not None for one in near):
            near.sort(key=lambda one: math.inf if one.compiler_seconds is None else one.compiler_seconds.total)
        return near + others

    def _reasons(self) -> str:
        """Return why there is no plan at all."""
        if exchanges_updates(self.experiment, self.choices.base) and self.platform.devices == 1:
            return "its replicas exchange updates, but there is one device; choose more devices, or no codec"
        base, batch = self.choices.base, self.experiment.batch
        if "mesh" in self.choices.fixed and base.mesh and base.mesh.devices > self.platform.devices:
            return f"mesh {base.mesh} takes {base.mesh.devices} devices, and there are {self.platform.devices}"
        if "microbatches" in self.choices.fixed and batch % base.microbatches:
            return f"{base.microbatches} microbatches do not divide the batch of {batch} rows"
        batch_text = f"no mesh divides the batch of {batch} rows over the devices"
        return "; ".join(dict.fromkeys(self.refusals.values())) or "; ".join(sorted(self.layout_refusals)) or batch_text

    def _compiled(self, judged: JudgedPlan, make: Callable[[], Experiment] | None) -> JudgedPlan:
        """Return a plan as the compiler judges it."""
        report = compile_report(step_recipe(self.experiment, judged.plan, make), self.platform)
        has_failed = report.oom is not None or report.crashed is not None
        device_bytes = judged.estimate.device_bytes if report.device_bytes is None else report.device_bytes
        fits = not has_failed and (self.limit is None or device_bytes <= self.limit)
        clocked = compiler_seconds(report.schedule, judged.plan, self.platform)
        return dataclasses.replace(judged, fits=fits, report=report, compiler_seconds=clocked)
