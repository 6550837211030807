"""`memory fit`: the memory plan that recomputes the least and still fits."""

import dataclasses
import warnings
from collections.abc import Callable, Sequence

from jaxscale.errors import UserError
from jaxscale.memory.plan import MemoryPlan
from jaxscale.planning.estimate import estimate
from jaxscale.platforms.platform import Platform
from jaxscale.platforms.usable import usable_bytes
from jaxscale.step.experiment import Experiment
from jaxscale.step.plan import Plan
from jaxscale.values.units import size

MENU = ("none", "dots", "jax:dots_with_no_batch_dims_saveable", "full", "sqrt")
"""Memory plans that are weighed, beside save sets of several budgets."""

SHARES = (0.5, 0.25, 0.125)
"""Budgets of the save sets that are weighed, as shares of all activations."""

MARGIN = 0.15
"""An estimate that is above the limit by less than this share of it may still fit: it is worth measuring."""


def cheapest_fit(
    experiment: Experiment,
    platform: Platform,
    limit: int | None = None,
    plan: Plan | None = None,
    *,
    menu: Sequence[str] | None = None,
    measure: Callable[[Experiment, Plan], int] | None = None,
) -> Plan:
    """The plan with the memory plan of least FLOP that fits the device.

    Args:
        experiment: what to train.
        platform: where.
        limit: bytes of device memory per device; what the platform's programs may use by default.
        plan: how; the experiment's own by default. Its memory plan is replaced.
        menu: text forms of the memory plans to choose from; `menu(...)` by default.
        measure: says what a plan takes, in bytes per device, by compiling it; without it the estimate decides.

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
    found = {}
    for place, text in enumerate(menu_of(experiment, platform, plan) if menu is None else menu):
        candidate = dataclasses.replace(plan, memory=MemoryPlan.parse(text))
        try:
            guess = estimate(experiment, platform, candidate)
        except UserError as error:
            if text == "none":
                raise
            warnings.warn(f"memory fit: {text} is left out: {error}", stacklevel=2)
            continue
        # of two with as many products, the one that is named first does less beside them
        found[guess.flop, place] = (candidate, guess.device_bytes)
    least = min(taken for _, taken in found.values())
    needed = []
    for _, (candidate, taken) in sorted(found.items()):
        if measure is not None and (taken <= limit * (1 + MARGIN) or taken == least):
            taken = measure(experiment, candidate)
        if taken <= limit:
            return candidate
        needed.append(taken)
    least = min(needed)
    raise UserError(
        f"memory fit: {experiment.name} takes at least {size(least)} per device under any of "
        f"{', '.join(str(candidate.memory) for candidate, _ in found.values())}; "
        f"there are {size(limit)}: take more devices, --plan.zero 3, more --plan.microbatches, a --plan.loss-chunk, or "
        f"ask what would help most: jaxscale fit FILE --plan.memory full --limit {limit}B"
    )


def menu_of(experiment: Experiment, platform: Platform, plan: Plan) -> tuple[str, ...]:
    """Memory plans worth weighing for a model: text forms, those that keep the most first.

    Args:
        experiment: with the model.
        platform: where.
        plan: how; its memory plan is of no account.
    """
    if getattr(experiment.model, "foreign", False) or plan.unroll > 1:
        return ("none", "dots", "full")
    everything = estimate(experiment, platform, dataclasses.replace(plan, memory=MemoryPlan("none")))
    kept = max((moment.by_kind.get("kept activations", 0) for moment in everything.timeline.moments), default=0)
    budgets = [max(round(kept * share / 2**20), 1) for share in SHARES]
    first, *rest = MENU
    return (first, *(f"save:{budget}MiB" for budget in budgets), *rest)
