"""`memory fit`: the memory plan that costs the least and still fits.

Weighed are plans that need no number (`MENU`) and, on the whole curve between keeping everything and nothing, the
optimum of the largest budget that fits: the save set of a stack, Rotor's plan of a chain of unlike blocks. A budget is
found on the estimate; where a compiler is at hand it has the last word on what is chosen, and what it says corrects the
estimate for the next budget, so that few programs are compiled. On a platform with host memory of its own, POFO's
combination is taken at that budget where it spares `OFFLOAD_GAIN` of the blocks' time.

The cost is modelled seconds, of recomputation and of copies that nothing hides; recomputed FLOP where nothing says how
fast the chip is. Left out: the selectors that POFO is never behind, and budgets for weights and optimizer state.
"""

import dataclasses
import functools
import warnings
from collections.abc import Callable, Sequence

from jaxscale.errors import UserError
from jaxscale.memory.plan import MemoryPlan
from jaxscale.planning.accuracy import MARGIN
from jaxscale.planning.estimate import of_step
from jaxscale.planning.prices import Prices
from jaxscale.planning.program import described_step
from jaxscale.platforms.platform import Platform
from jaxscale.platforms.usable import host_share, usable_bytes
from jaxscale.step.experiment import Experiment
from jaxscale.step.plan import Plan
from jaxscale.step.rows import batch_shapes
from jaxscale.values.byte_sizes import bytes_text
from jaxscale.values.units import size

MENU = ("none", "dots", "jax:dots_with_no_batch_dims_saveable", "full", "sqrt")
"""Memory plans that are weighed beside those of a budget."""

OFFLOAD_GAIN = 0.01
"""Share of the blocks' time that offload must spare: copies hide as well as modelled only if nothing else moves."""

CLOSE = 0.02
"""A save set that leaves less than this share of the limit unused is large enough."""

ESTIMATES = 8
"""Budgets that are estimated for one limit and rule."""

COMPILES = 4
"""Budgets that are compiled at most, of one rule."""

Measure = Callable[[Experiment, Plan], int]


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A memory plan that is weighed.

    Args:
        plan: with the memory plan.
        cost: seconds of a step beyond keeping everything, or FLOP of all its products; that of `none` is not asked.
        bytes: of device memory per device, by estimate.
        kept: bytes of activations that are kept.
        host_bytes: of host memory per device, by estimate.
    """

    plan: Plan
    cost: float
    bytes: int
    kept: int
    host_bytes: int = 0


class NothingFits(UserError):
    """No memory plan fits.

    Args:
        message: how much the least takes, and what would lower it.
        least: the plan that takes the least.
    """

    def __init__(self, message: str, least: Plan) -> None:
        super().__init__(message)
        self.least = least


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
    """The plan with the memory plan of least cost that fits the device.

    Args:
        experiment: what to train.
        platform: where.
        limit: bytes of device memory per device; what the platform's programs may use by default.
        plan: how; the experiment's own by default. Its memory plan is replaced.
        menu: text forms of the memory plans to choose from; by default `MENU` and the optima of any budget.
        measure: says what a plan takes, in bytes per device, by compiling it; without it the estimate decides.
        host_limit: bytes of host memory per device; an equal share of the host's by default.

    Raises:
        UserError: none fits; the message says the least bytes, and what would lower them.

    Example:
        >>> from jaxscale.models import Decoder
        >>> from jaxscale.data import Text
        >>> tiny = Experiment("tiny", Decoder(vocab=256, context=64, layers=2, embed=64, heads=4), Text("text.txt"))
        >>> str(cheapest_fit(tiny, Platform.parse("tpu v5e:1x1")).memory)
        'none'
    """
    plan = experiment.plan if plan is None else plan
    limit = usable_bytes(platform) if limit is None else limit
    if limit is None:
        raise UserError(f"memory fit: nothing says how much memory {platform} has; give --limit, such as 14GiB")
    scales = _Scales(experiment, platform, plan, measure)
    first, *rest = menu_of(experiment, plan) if menu is None else menu
    found = [scales.must(first)]
    if found[0].bytes <= limit and scales.taken(found[0]) <= limit:
        return found[0].plan
    rules = searched(experiment, plan, scales.prices) if menu is None else ()
    optima = [_largest(scales, rule, limit, found[0].kept) for rule in rules]
    best = min((one for one in optima if one is not None), key=lambda one: one.cost, default=None)
    # weights that stream from the host keep its link busy
    if best is not None and scales.prices.scanned and plan.offload.weights == "device":
        host_limit = host_share(platform) if host_limit is None else host_limit
        best = _offloaded(scales, best, limit, host_limit) or best
    found += [candidate for candidate in map(scales.weigh, rest) if candidate is not None]
    least = min(candidate.bytes for candidate in found)
    needed: list[tuple[int, Candidate]] = []
    for candidate in sorted(found, key=lambda candidate: candidate.cost):
        if best is not None and best.cost <= candidate.cost:
            return best.plan
        promising = candidate.bytes <= limit * (1 + MARGIN) or candidate.bytes == least
        taken = scales.taken(candidate) if promising else candidate.bytes
        if taken <= limit:
            return candidate.plan
        needed.append((taken, candidate))
    if best is not None:
        return best.plan
    taken, smallest = min(needed, key=lambda pair: pair[0])
    raise NothingFits(
        f"memory fit: {experiment.name} takes at least {size(taken)} per device under any of "
        f"{', '.join(str(candidate.plan.memory) for candidate in found)}; "
        f"there are {size(limit)}: take more devices, ZeRO 3, more microbatches or a loss in chunks; what would help "
        f"most says jaxscale fit FILE --plan.memory {smallest.plan.memory} --limit {bytes_text(limit)}",
        smallest.plan,
    )


def menu_of(experiment: Experiment, plan: Plan) -> tuple[str, ...]:
    """Of `MENU` what goes with a model and the rest of its plan."""
    if plan.unroll > 1:
        return ("none", "dots", "full")
    # segments of blocks need a model that hands its blocks over, and weights that lie on the device
    whole = getattr(experiment.model, "foreign", False) or plan.offload.weights == "host"
    return tuple(text for text in MENU if text != "sqrt" or not whole)


def searched(experiment: Experiment, plan: Plan, prices: Prices) -> tuple[str, ...]:
    """Rules whose budgets are worth a search: the optima for the blocks of a model."""
    if plan.unroll > 1 or not prices.calls:
        return ()
    chain = len(prices.calls) > 1 and all(call.count == 1 for call in prices.calls)
    chain = chain and not getattr(experiment.model, "foreign", False) and plan.offload.weights == "device"
    return ("save", "chain") if chain else ("save",)


class _Scales:
    """What memory plans of one experiment take, by estimate and by compiler; neither is asked twice."""

    def __init__(self, experiment: Experiment, platform: Platform, plan: Plan, measure: Measure | None) -> None:
        self.experiment = experiment
        self.platform = platform
        self.plan = plan
        self.measure = measure
        self._batch = batch_shapes(experiment)
        self._weighed: dict[str, Candidate] = {}
        self._measured: dict[Candidate, int] = {}

    @functools.cached_property
    def prices(self) -> Prices:
        """Of the model's blocks."""
        return Prices.of(self.experiment, self.platform, self.plan)

    def must(self, text: str) -> Candidate:
        """The candidate of a memory plan by its text form.

        Raises:
            UserError: it does not go with the model.
        """
        if text not in self._weighed:
            plan = dataclasses.replace(self.plan, memory=MemoryPlan.parse(text))
            step = described_step(self.experiment, self.platform, plan)
            found = of_step(step, self._batch, self.platform)
            if step.decision is None:
                moments = found.timeline.moments
                kept = max((moment.by_kind.get("kept activations", 0) for moment in moments), default=0)
            else:
                kept = step.decision.bytes
            cost: float = found.flop
            if plan.memory.rule != "none" and self.prices.timed and self.prices.calls:
                cost = self.prices.seconds(self.prices.decision(plan.memory))
            self._weighed[text] = Candidate(plan, cost, found.device_bytes, kept, found.host_bytes)
        return self._weighed[text]

    def weigh(self, text: str) -> Candidate | None:
        """The same, or `None` and a warning."""
        try:
            return self.must(text)
        except UserError as error:
            warnings.warn(f"memory fit: {text} is left out: {error}", stacklevel=3)
            return None

    def within(self, rule: str, budget: int) -> Candidate | None:
        """The candidate of a rule and a budget; `None` where the budget is below the least possible."""
        try:
            return self.must(f"{rule}:{bytes_text(budget)}")
        except UserError:
            return None

    def taken(self, candidate: Candidate) -> int:
        """Bytes of device memory: the compiler's word where there is one."""
        if self.measure is None:
            return candidate.bytes
        if candidate not in self._measured:
            self._measured[candidate] = self.measure(self.experiment, candidate.plan)
        return self._measured[candidate]


def _largest(scales: _Scales, rule: str, limit: int, most: int) -> Candidate | None:
    """What a rule makes of the largest budget, up to `most`, that fits the limit; `None` where none does.

    The compiler takes as much more than the estimate at one budget as at another: its word on one says where to look
    for the next.
    """
    most += -most % _grain(most)
    if scales.weigh(f"{rule}:{bytes_text(most)}") is None:
        return None
    low, high, off, best = 0, most + 1, 0, None
    for _ in range(COMPILES):
        candidate = _by_estimate(scales, rule, limit - off, low, high)
        if candidate is None or (best is not None and candidate.kept <= best.kept):
            break
        taken = scales.taken(candidate)
        off = taken - candidate.bytes
        if taken <= limit:
            best, low = candidate, _budget(candidate)
            if limit - taken <= CLOSE * limit:
                break
        else:
            high = min(_budget(candidate), candidate.kept)
        if scales.measure is None:
            break
    return best


def _offloaded(scales: _Scales, best: Candidate, limit: int, host_limit: int | None) -> Candidate | None:
    """POFO at the budget of the best plan without it; `None` where it spares too little, or does not fit."""
    prices, budget = scales.prices, best.kept + -best.kept % _grain(best.kept)
    if not prices.timed or scales.platform.chip.kind == "cpu" or best.plan.memory.rule != "save":
        return None
    for _ in range(2):
        try:
            decision = prices.decision(MemoryPlan("offload", budget=budget, selector="pofo"))
        except UserError:  # below the least possible
            return None
        if best.cost - prices.seconds(decision) < OFFLOAD_GAIN * prices.passes:
            return None
        found = scales.within("offload:pofo", budget)
        if found is None or (host_limit is not None and found.host_bytes > host_limit):
            return None
        over = scales.taken(found) - limit
        if over <= 0:
            return found
        budget = max(0, budget - over) // _grain(budget) * _grain(budget)
    return None


def _by_estimate(scales: _Scales, rule: str, room: int, low: int, high: int) -> Candidate | None:
    """What a rule makes of the largest budget above `low` and below `high` whose estimate is within `room`."""
    grain, best = _grain(high), None
    budget = (high - 1) // grain * grain
    for _ in range(ESTIMATES):
        if not low < budget < high:
            break
        candidate = scales.within(rule, budget)
        if candidate is None:
            low = aim = budget
        else:
            spare = room - candidate.bytes
            if spare >= 0:
                best, low = candidate, budget
                if spare <= CLOSE * room:
                    break
            else:
                high = min(budget, candidate.kept)
            # what is kept more is taken more, byte by byte
            aim = candidate.kept + spare
        budget = (aim if low < aim < high else (low + high) // 2) // grain * grain
    return best


def _grain(budget: int) -> int:
    """Budgets are multiples of it, so that their text is short."""
    return 2 ** max(budget.bit_length() - 8, 0)


def _budget(candidate: Candidate) -> int:
    assert candidate.plan.memory.budget is not None, "a searched rule has one"
    return candidate.plan.memory.budget
