"""`memory fit`: the cheapest memory plan that fits.

The candidates are plans without a budget (`MENU`) and the optimal plan for the largest budget that fits: the best save
set for a stack of identical blocks, or Rotor's plan for a chain of different blocks. The estimate guides the search
for this budget. With a compiler, the chosen plan is compiled, and the compiled bytes correct the estimate for the next
budget. In this way, few programs are compiled. POFO's plan at the same budget also copies activations to the host. On
a platform with separate host memory, it is chosen if it saves the share `OFFLOAD_GAIN` of the blocks' time.

The cost is the modeled seconds of a step, on the scale of `jaxscale plan`: a memory plan adds recomputation, the
collectives and launches that it repeats, and copies that do not overlap with computation. If one of the plans
cannot be modeled, the cost is FLOP. Left out: selectors that are never better than POFO, and budgets for weights and
optimizer state.
"""

import dataclasses
import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from jaxscale.compiler.usable import host_share, usable_bytes
from jaxscale.errors import UserError
from jaxscale.memory.decision import Decision
from jaxscale.memory.plan import MemoryPlan
from jaxscale.planning.accuracy import MARGIN
from jaxscale.planning.estimate import of_step
from jaxscale.planning.memory_costs import MemoryCosts
from jaxscale.planning.program import described_step
from jaxscale.platforms.platform import Platform
from jaxscale.recipe.experiment import Experiment, plan_of
from jaxscale.recipe.plan import Plan
from jaxscale.state.batches import batch_shapes
from jaxscale.step.memory_resolve import SEGMENT_RULES
from jaxscale.values.byte_sizes import bytes_text
from jaxscale.values.units import size

MENU = ("none", "dots", "jax:dots_with_no_batch_dims_saveable", "full", "sqrt")
"""Text forms of the candidates without a budget."""

OFFLOAD_GAIN = 0.01
"""Share of the blocks' time that offload must save; the cost model ignores other transfers that slow down copies."""

CLOSE_SHARE = 0.02
"""The search for a budget ends when at most this share of the limit is unused."""

MAX_ESTIMATES = 8
"""Maximum number of budgets that are estimated for one limit and rule."""

MAX_COMPILES = 4
"""Maximum number of budgets that are compiled for one rule."""

Measure = Callable[[Experiment, Plan], int]
"""Function that compiles an experiment's step and returns its bytes of device memory per device."""


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A memory plan with its cost and bytes.

    Args:
        plan: the whole plan, with this memory plan.
        flop: FLOP of the step's matrix products, including recomputation.
        device_bytes: bytes of device memory per device, by estimate.
        kept_bytes: bytes of kept activations.
        host_bytes: bytes of host memory per device, by estimate.
    """

    plan: Plan
    flop: int
    device_bytes: int
    kept_bytes: int
    host_bytes: int = 0


class NothingFits(UserError):
    """Raised if no memory plan fits.

    Args:
        message: text with the bytes of the smallest plan and ways to lower them.
        smallest_plan: the plan that needs the least memory.
    """

    def __init__(self, message: str, smallest_plan: Plan) -> None:
        super().__init__(message, page="choosing/memory")
        self.smallest_plan = smallest_plan


def cheapest_fit(
    experiment: Experiment,
    platform: Platform,
    limit: int | None = None,
    plan: Plan | None = None,
    *,
    menu: Sequence[str] | None = None,
    measure: Measure | None = None,
    host_limit: int | None = None,
) -> Plan:
    """Return the plan with the cheapest memory plan that fits the device.

    Args:
        experiment: the experiment to plan for.
        platform: platform to train on.
        limit: bytes of device memory per device; by default the bytes that the platform's programs may use.
        plan: plan in which the memory plan is replaced; the experiment's plan by default.
        menu: text forms of the memory plans to choose from; by default `MENU`, and optimal plans for any budget.
        measure: function that compiles a step and returns its bytes of device memory; if `None`, the estimate decides.
        host_limit: bytes of host memory per device; by default an equal share of the host's memory.

    Raises:
        UserError: no memory plan fits; the message gives the bytes of the smallest plan and ways to lower them.

    Example:
        >>> from jaxscale.models import Decoder
        >>> from jaxscale.data import Text
        >>> tiny = Experiment("tiny", Decoder(vocab=256, context=64, layers=2, embed=64, heads=4), Text("text.txt"))
        >>> str(cheapest_fit(tiny, Platform.parse("tpu v5e:1x1")).memory)
        'none'
    """
    plan = plan_of(experiment, plan)
    limit = usable_bytes(platform) if limit is None else limit
    if limit is None:
        raise UserError(f"memory fit: the memory of {platform} is unknown; set it, such as --limit 14GiB")
    candidates = _Candidates(experiment, platform, plan, measure, is_default_menu=menu is None)
    first_plan_text, *other_plan_texts = menu_of(plan) if menu is None else menu
    menu_candidates = [candidates.candidate(first_plan_text)]
    if menu_candidates[0].device_bytes <= limit and candidates.needed_bytes(menu_candidates[0]) <= limit:
        return menu_candidates[0].plan
    rules = searched_rules(plan, candidates.costs) if menu is None else ()
    max_budget = candidates.costs.kept_bytes(menu_candidates[0].kept_bytes)
    optimal_candidates = [_largest_candidate(candidates, rule, limit, max_budget) for rule in rules]
    best_candidate = next(iter(candidates.cheapest_first(list(filter(None, optimal_candidates)))), None)
    # POFO is not tried if weights stream from the host, because they keep the link to the host busy
    if best_candidate is not None and candidates.costs.is_scanned and plan.offload.weights == "device":
        host_limit = host_share(platform) if host_limit is None else host_limit
        best_candidate = _pofo_candidate(candidates, best_candidate, limit, host_limit) or best_candidate
    menu_candidates += filter(None, map(candidates.candidate_or_none, other_plan_texts))
    least_bytes = min(candidate.device_bytes for candidate in menu_candidates)
    bytes_and_candidates: list[tuple[int, Candidate]] = []  # needed bytes, candidate
    all_candidates = menu_candidates if best_candidate is None else [best_candidate, *menu_candidates]
    for candidate in candidates.cheapest_first(all_candidates):
        is_promising = candidate.device_bytes <= limit * (1 + MARGIN) or candidate.device_bytes == least_bytes
        needed_bytes = candidates.needed_bytes(candidate) if is_promising else candidate.device_bytes
        if candidate is best_candidate or needed_bytes <= limit:
            return candidate.plan
        bytes_and_candidates.append((needed_bytes, candidate))
    needed_bytes, smallest_candidate = min(bytes_and_candidates, key=lambda bytes_and_candidate: bytes_and_candidate[0])
    raise NothingFits(
        f"memory fit: {experiment.name} takes at least {size(needed_bytes)} per device under each of the memory plans "
        f"{', '.join(str(candidate.plan.memory) for candidate in menu_candidates)}; "
        f"the limit is {size(limit)}. Use more devices, ZeRO 3, more microbatches or a loss in chunks. To see which "
        f"change saves most, run jaxscale fit FILE --plan.memory {smallest_candidate.plan.memory} "
        f"--limit {bytes_text(limit)}",
        smallest_candidate.plan,
    )


def menu_of(plan: Plan) -> tuple[str, ...]:
    """Return `MENU`, or only `none`, `dots` and `full` if the plan unrolls the scan."""
    return MENU if plan.unroll == 1 else ("none", "dots", "full")


def searched_rules(plan: Plan, costs: MemoryCosts) -> tuple[str, ...]:
    """Return the names of the optimal memory rules whose budget is to be searched; `()` if the step cannot use them."""
    if plan.unroll > 1 or not costs.calls:
        return ()
    is_chain = len(costs.calls) > 1 and all(call.count == 1 for call in costs.calls)
    return ("save", "chain") if is_chain else ("save",)


@dataclasses.dataclass(eq=False)
class _Candidates:
    """Candidates for one experiment, with cached estimates and compiled bytes.

    Args:
        experiment: the experiment to plan for.
        platform: platform to train on.
        plan: plan in which each candidate replaces the memory plan.
        measure: function that compiles a step and returns its bytes of device memory; `None` to rely on estimates.
        is_default_menu: whether the memory plans to choose from are the default ones.
        candidate_by_text: candidates that were estimated, by the text form of their memory plan.
        measured_bytes_by_candidate: bytes of device memory per device of the candidates that were compiled.
        seconds_by_candidate: modeled seconds of the steps of candidates, computed on demand.
    """

    experiment: Experiment
    platform: Platform
    plan: Plan
    measure: Measure | None
    is_default_menu: bool = True
    candidate_by_text: dict[str, Candidate] = dataclasses.field(default_factory=dict)
    measured_bytes_by_candidate: dict[Candidate, int] = dataclasses.field(default_factory=dict)
    seconds_by_candidate: dict[Candidate, float | None] = dataclasses.field(default_factory=dict)

    @functools.cached_property
    def abstract_batch(self) -> Any:
        """The shapes and types of a global batch."""
        return batch_shapes(self.experiment)

    @functools.cached_property
    def costs(self) -> MemoryCosts:
        """The costs of memory plans for the model's blocks."""
        return MemoryCosts.of(self.experiment, self.platform, self.plan)

    def candidate(self, text: str) -> Candidate:
        """Return the candidate whose memory plan has this text form.

        Raises:
            UserError: the memory plan is not valid for the model.
        """
        if text not in self.candidate_by_text:
            plan = dataclasses.replace(self.plan, memory=MemoryPlan.parse(text))
            step = described_step(self.experiment, self.platform, plan)
            estimate = of_step(step, self.abstract_batch, self.platform)
            kept_bytes = estimate.kept_bytes if step.decision is None else step.decision.bytes
            self.candidate_by_text[text] = Candidate(
                plan, estimate.flop, estimate.device_bytes, kept_bytes, estimate.host_bytes
            )
        return self.candidate_by_text[text]

    def cheapest_first(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """Return the candidates by the modeled seconds of a step, or by FLOP if one of them cannot be modeled."""
        seconds = [self._seconds_of(candidate) for candidate in candidates]
        costs = [
            candidate.flop if None in seconds or cost is None else cost
            for candidate, cost in zip(candidates, seconds, strict=True)
        ]
        return [candidates[index] for index in sorted(range(len(candidates)), key=costs.__getitem__)]

    def _seconds_of(self, candidate: Candidate) -> float | None:
        """Return the modeled seconds of a candidate's step; `None` if they cannot be modeled."""
        if not self.costs.calls:
            return None
        if candidate not in self.seconds_by_candidate:
            memory = candidate.plan.memory
            try:
                self.seconds_by_candidate[candidate] = self.seconds(memory, self.costs.decision(memory))
            except UserError:  # the plan copies to the host, which needs rates that are unknown
                self.seconds_by_candidate[candidate] = None
        return self.seconds_by_candidate[candidate]

    def seconds(self, memory: MemoryPlan, decision: Decision) -> float | None:
        """Return the modeled seconds of a step under a memory plan.

        If a whole step cannot be modeled, return only the seconds that the memory plan adds, or `None` if the chip's
        rates are unknown.
        """
        seconds = self.costs.step_seconds(memory, decision)
        return self.costs.seconds(decision) if seconds is None and self.costs.is_timed else seconds

    def candidate_or_none(self, text: str) -> Candidate | None:
        """Return the candidate of a memory plan; if the memory plan is not valid for the model, warn and return `None`.

        There is no warning for a rule of the default menu that recomputes segments of blocks, because many models have
        no such segments.
        """
        try:
            return self.candidate(text)
        except UserError as error:
            if self.is_default_menu and MemoryPlan.parse(text).rule in SEGMENT_RULES:
                return None
            warnings.warn(f"memory fit: {text} is left out: {error}", stacklevel=3)
            return None

    def candidate_of_budget(self, rule: str, budget: int) -> Candidate | None:
        """Return the candidate of a rule with this budget in bytes; `None` if the budget is too small."""
        try:
            return self.candidate(f"{rule}:{bytes_text(budget)}")
        except UserError:
            return None

    def needed_bytes(self, candidate: Candidate) -> int:
        """Return a candidate's bytes of device memory per device: compiled if there is `measure`, or estimated."""
        if self.measure is None:
            return candidate.device_bytes
        if candidate not in self.measured_bytes_by_candidate:
            self.measured_bytes_by_candidate[candidate] = self.measure(self.experiment, candidate.plan)
        return self.measured_bytes_by_candidate[candidate]


def _largest_candidate(candidates: _Candidates, rule: str, limit: int, max_budget: int) -> Candidate | None:
    """Return a rule's candidate with the largest budget up to `max_budget` that fits; `None` if no budget fits."""
    max_budget += -max_budget % _granularity(max_budget)  # rounded up
    if candidates.candidate_or_none(f"{rule}:{bytes_text(max_budget)}") is None:
        return None
    low_budget, high_budget, estimate_error, best_candidate = 0, max_budget + 1, 0, None
    for _ in range(MAX_COMPILES):
        candidate = _largest_estimated_candidate(candidates, rule, limit - estimate_error, low_budget, high_budget)
        if candidate is None or (best_candidate is not None and candidate.kept_bytes <= best_candidate.kept_bytes):
            break
        needed_bytes = candidates.needed_bytes(candidate)
        estimate_error = needed_bytes - candidate.device_bytes
        if needed_bytes <= limit:
            best_candidate, low_budget = candidate, _budget_of(candidate)
            if limit - needed_bytes <= CLOSE_SHARE * limit:
                break
        else:
            high_budget = min(_budget_of(candidate), candidate.kept_bytes)
        if candidates.measure is None:
            break
    return best_candidate


def _pofo_candidate(
    candidates: _Candidates, best_candidate: Candidate, limit: int, host_limit: int | None
) -> Candidate | None:
    """Return POFO's candidate at the best candidate's budget; `None` if it saves too little time or does not fit."""
    costs = candidates.costs
    # the kept bytes, rounded up
    budget = best_candidate.kept_bytes + -best_candidate.kept_bytes % _granularity(best_candidate.kept_bytes)
    if not costs.is_timed or candidates.platform.chip.kind == "cpu" or best_candidate.plan.memory.rule != "save":
        return None
    for _ in range(2):
        memory = MemoryPlan("offload", budget=budget, selector="pofo")
        try:
            save_seconds = candidates.seconds(best_candidate.plan.memory, costs.decision(best_candidate.plan.memory))
            seconds = candidates.seconds(memory, costs.decision(memory))
        except UserError:  # the budget is below the least possible
            return None
        if save_seconds is None or seconds is None or save_seconds - seconds < OFFLOAD_GAIN * costs.block_seconds:
            return None
        candidate = candidates.candidate_of_budget("offload:pofo", budget)
        if candidate is None or (host_limit is not None and candidate.host_bytes > host_limit):
            return None
        excess_bytes = candidates.needed_bytes(candidate) - limit
        if excess_bytes <= 0:
            return candidate
        budget = max(0, budget - excess_bytes) // _granularity(budget) * _granularity(budget)
    return None


def _largest_estimated_candidate(
    candidates: _Candidates, rule: str, limit: int, low_budget: int, high_budget: int
) -> Candidate | None:
    """Return a rule's candidate with the largest budget whose estimate is within `limit`; `None` if there is none.

    Args:
        candidates: candidates of the experiment.
        rule: rule of the memory plan.
        limit: maximum of the estimated bytes of device memory per device.
        low_budget: number of bytes that all budgets to try exceed.
        high_budget: number of bytes that no budget to try reaches.
    """
    granularity, best_candidate = _granularity(high_budget), None
    budget = (high_budget - 1) // granularity * granularity
    for _ in range(MAX_ESTIMATES):
        if not low_budget < budget < high_budget:
            break
        candidate = candidates.candidate_of_budget(rule, budget)
        if candidate is None:
            low_budget = target_budget = budget
        else:
            unused_bytes = limit - candidate.device_bytes
            if unused_bytes >= 0:
                best_candidate, low_budget = candidate, budget
                if unused_bytes <= CLOSE_SHARE * limit:
                    break
            else:
                high_budget = min(budget, candidate.kept_bytes)
            # each byte of kept activations adds a byte to the estimate
            target_budget = candidate.kept_bytes + unused_bytes
        is_target_open = low_budget < target_budget < high_budget
        budget = (target_budget if is_target_open else (low_budget + high_budget) // 2) // granularity * granularity
    return best_candidate


def _granularity(budget: int) -> int:
    """Return a power of two, in bytes; budgets near `budget` are rounded to its multiples, to keep texts short."""
    return 2 ** max(budget.bit_length() - 8, 0)


def _budget_of(candidate: Candidate) -> int:
    """Return the budget of a candidate's memory plan, in bytes."""
    assert candidate.plan.memory.budget is not None, "a searched rule has a budget"
    return candidate.plan.memory.budget
