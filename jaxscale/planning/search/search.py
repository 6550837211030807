"""Choose the best plan for an experiment on a platform: the fastest step, as modeled, among those that fit.

Closed forms (`step_seconds`, `step_bytes`) rank all layouts and variants (`space`). In this order, candidates are built
and estimated in full (`planning.estimate`), which applies every rule of combination, until enough of them fit. A layout
that does not fit without recomputation gets the optimal rule of the bytes that are left (`save:BYTES`, or
`chain:BYTES`), and the estimates correct this budget. With `verify`, the compiler judges the best plans, and the first
that fits is the choice.

References:
    Zheng et al. 2022, "Alpa" (arXiv:2201.12023); Miao et al. 2022, "Galvatron" (arXiv:2211.13878).
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable

from jaxscale.compiler.compile import compile_report
from jaxscale.compiler.report import CompileReport
from jaxscale.errors import UserError
from jaxscale.memory.plan import MemoryPlan
from jaxscale.planning.estimate import Estimate, estimate
from jaxscale.planning.program import step_recipe
from jaxscale.planning.search.model_costs import Kept, SplitCosts, rated, split_costs
from jaxscale.planning.search.space import Choices, Variant, layouts, variants
from jaxscale.planning.search.step_bytes import bytes_by_kind, sum_of_kinds
from jaxscale.planning.search.step_seconds import StepSeconds, step_seconds
from jaxscale.platforms.platform import Platform
from jaxscale.recipe.experiment import Experiment
from jaxscale.recipe.plan import Plan

MiB = 2**20
FINALISTS = 4
"""Number of plans that fit, the fastest of different meshes, which are compared in the end."""
MAX_ESTIMATES = 18
"""Maximum number of estimates of whole steps after which no further candidate is tried."""
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
COMFORTABLE = 0.8
"""Share of the limit below which a layout that keeps everything needs no chunks and no offload."""


@dataclasses.dataclass(frozen=True)
class RankedPlan:
    """A plan of the search, by the closed forms alone.

    Args:
        layout: mesh, ZeRO stage, pipeline and microbatches.
        variant: memory rule, chunk of the loss and offload.
        kept: what the memory rule keeps and recomputes in the rows of a microbatch; approximate if it has a budget.
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
    def plan(self) -> Plan:
        """The plan."""
        return self.variant.applied(self.layout)

    @property
    def is_allowed(self) -> bool:
        """Whether the rules of combination allow the variant in the layout."""
        try:
            return self.plan is not None
        except UserError:
            return False

    @property
    def microbatch_rows(self) -> float:
        """The rows of one microbatch on a device."""
        assert self.layout.mesh is not None
        return self.costs.batch / self.layout.mesh.batch_shards / self.layout.microbatches

    @property
    def family(self) -> tuple[object, ...]:
        """What candidates have in common whose closed forms of bytes are off by about the same factor."""
        mesh, pipeline = self.layout.mesh, self.layout.pipeline
        assert mesh is not None
        method = None if pipeline is None else (pipeline.name, pipeline.ranks, pipeline.stash)
        return (mesh.tensor, mesh.sequence, self.layout.zero, method, *self._variant_kind)

    @property
    def kind(self) -> tuple[object, ...]:
        """What decides whether a rule or the model refuses the plan, apart from sizes."""
        mesh, pipeline = self.layout.mesh, self.layout.pipeline
        assert mesh is not None
        used_axes = tuple(axis for axis, count in mesh.sizes.items() if count > 1)
        method = None if pipeline is None else (pipeline.name, pipeline.ranks)
        return (used_axes, mesh.tensor, mesh.sequence, self.layout.zero, method, *self._variant_kind)

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
        fits: whether the step fits device and host: according to the compiler if there is a report.
        report: the compiler's report; `None` if the step was not compiled.
    """

    plan: Plan
    seconds: StepSeconds
    estimate: Estimate
    fits: bool
    report: CompileReport | None = None

    @property
    def device_bytes(self) -> int:
        """The bytes of device memory per device: the compiler's number, or the estimate if there is none."""
        compiled_bytes = None if self.report is None else self.report.device_bytes
        return self.estimate.device_bytes if compiled_bytes is None else compiled_bytes


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The plans that a search compared.

    Args:
        plans: the plans that fit, the best first; if none fits, the one that needs the least memory.
        rejected: the estimated plans that do not fit, in the order in which they were tried.
        refusals: the reason of each kind of plan that a rule or the model refuses.
        candidate_count: number of plans that were ranked.
    """

    plans: tuple[JudgedPlan, ...]
    rejected: tuple[JudgedPlan, ...]
    refusals: tuple[str, ...]
    candidate_count: int


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
    estimates: list[Estimate] = dataclasses.field(default_factory=list)

    def run(self, verify: int = 0, make: Callable[[], Experiment] | None = None) -> Outcome:
        """Search, and return the plans that were compared.

        Args:
            verify: number of plans that may be compiled, the best first.
            make: function that returns the experiment, called in the process that compiles.

        Raises:
            UserError: every plan is refused.
        """
        candidates, smallest_candidates = self.candidates()
        fitting, rejected = self._judged(candidates)
        fitting.sort(key=self._order)
        if verify:
            fitting = [self._compiled(judged, make) for judged in fitting[:verify]] + fitting[verify:]
        plans = tuple(judged for judged in fitting if judged.fits)
        rejected += [judged for judged in fitting if not judged.fits]
        if not plans:
            smallest = [judged for one in smallest_candidates if (judged := self.judge(one)) is not None]
            plans = tuple(sorted((judged for judged in smallest if judged.fits), key=self._order))
            rejected += [judged for judged in smallest if not judged.fits]
        if not plans and not rejected:
            reasons_text = (
                "; ".join(dict.fromkeys(self.refusals.values())) or "no mesh divides the batch over the devices"
            )
            raise UserError(f"{self.experiment.name} on {self.platform}: every plan is refused: {reasons_text}")
        if not plans:
            plans = (min(rejected, key=lambda judged: judged.device_bytes),)
        return Outcome(plans, tuple(rejected), tuple(dict.fromkeys(self.refusals.values())), len(candidates))

    def candidates(self) -> tuple[list[RankedPlan], list[RankedPlan]]:
        """Return all plausible candidates, the best first, and the ones that take the least memory.

        They use as many devices as the batch, the model and the choices allow. Those with the least memory are one
        with a pipeline and one without, because closed forms are less exact for pipelines.
        """
        for device_count in range(self.platform.devices, 0, -1):
            candidates, smallest = self._candidates_on(device_count)
            if smallest:
                return sorted(candidates, key=self._candidate_order), smallest
        return [], []

    def _candidates_on(self, device_count: int) -> tuple[list[RankedPlan], list[RankedPlan]]:
        """Return the plausible candidates on a number of devices, and those with the least memory."""
        all_variants = variants(self.experiment, self.platform, self.choices)
        candidates: list[RankedPlan] = []
        smallest: dict[bool, RankedPlan] = {}  # by whether there is a pipeline
        first_kind = (all_variants[0].loss_chunk, all_variants[0].offload)
        for layout in layouts(self.experiment, self.platform, device_count, self.choices):
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
        calls = more.costs.calls
        rule = "chain" if len(calls) > 1 and all(call.count == 1 for call in calls) else "save"
        stage_count = 1 if more.layout.pipeline is None else more.layout.pipeline.shape()[0]
        memory = MemoryPlan.parse(f"{rule}:{int(kept.kept_bytes / stage_count) // MiB}MiB")
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

    def _candidate_order(self, candidate: RankedPlan) -> tuple[float, float, str]:
        """Return the key by which candidates are sorted; its last part makes the order independent of the space's."""
        seconds, byte_count = candidate.seconds.total, candidate.bytes
        text = f"{candidate.layout.mesh}{candidate.variant}"
        return (seconds, byte_count, text) if self.objective == "time" else (byte_count, seconds, text)

    def _order(self, judged: JudgedPlan) -> tuple[float, float]:
        """Return the key by which estimated plans are sorted."""
        seconds, byte_count = judged.seconds.total, float(judged.device_bytes)
        return (seconds, byte_count) if self.objective == "time" else (byte_count, seconds)

    def _judged(self, candidates: list[RankedPlan]) -> tuple[list[JudgedPlan], list[JudgedPlan]]:
        """Estimate candidates in their order; return those that fit, and those that do not.

        After the first that fits, only candidates of other meshes are estimated, and those that would be better: the
        seconds of a candidate with a budget are a lower bound, so that its estimate may show it slower than the next.
        """
        fitting: list[JudgedPlan] = []
        rejected: list[JudgedPlan] = []
        excess_by_family: dict[object, float] = {}  # estimated bytes as a multiple of the closed form's
        refusal_counts: dict[object, int] = {}
        meshes_that_fit: set[object] = set()
        for candidate in candidates:
            is_better = not fitting or self._candidate_order(candidate)[:2] < min(map(self._order, fitting))
            if not is_better and (len(fitting) >= FINALISTS or candidate.layout.mesh in meshes_that_fit):
                continue
            if len(self.estimates) >= MAX_ESTIMATES:
                break
            if refusal_counts.get(candidate.kind, 0) >= MAX_REFUSALS:
                continue
            if (
                self.limit is not None
                and excess_by_family.get(candidate.family, LEAST_EXCESS) * candidate.bytes > self.limit
            ):
                continue
            judged = self.judge(candidate)
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
        limit = self.limit
        best: JudgedPlan | None = None
        try:
            plan = candidate.plan
        except UserError:  # a rule refuses the combination of layout and variant
            return None
        for _ in range(1 if plan.memory.budget is None or limit is None else MAX_BUDGETS):
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
            if best is None or (judged.fits, -judged.seconds.total) > (best.fits, -best.seconds.total):
                best = judged
            if plan.memory.budget is None or limit is None or CLOSE * limit <= judged.device_bytes <= limit:
                break
            budget = plan.memory.budget + int(ROOM * limit) - judged.device_bytes
            if budget < 0:
                break
            memory = dataclasses.replace(plan.memory, budget=budget // MiB * MiB)
            plan = dataclasses.replace(plan, memory=memory)
        return best

    def _fits(self, step_estimate: Estimate) -> bool:
        """Return whether a step fits device and host; an unknown limit counts as enough."""
        limits_and_bytes = ((self.limit, step_estimate.device_bytes), (self.host_limit, step_estimate.host_bytes))
        return all(limit is None or byte_count <= limit for limit, byte_count in limits_and_bytes)

    def _compiled(self, judged: JudgedPlan, make: Callable[[], Experiment] | None) -> JudgedPlan:
        """Return a plan as the compiler judges it."""
        report = compile_report(step_recipe(self.experiment, judged.plan, make), self.platform)
        has_failed = report.oom is not None or report.crashed is not None
        device_bytes = judged.estimate.device_bytes if report.device_bytes is None else report.device_bytes
        fits = not has_failed and (self.limit is None or device_bytes <= self.limit)
        return dataclasses.replace(judged, fits=fits, report=report)
