"""`memory fit`: the memory plan that recomputes the least and still fits."""

import dataclasses
from collections.abc import Callable, Sequence

from jaxscale.errors import UserError
from jaxscale.memory.plan import MemoryPlan
from jaxscale.planning.estimate import estimate
from jaxscale.platforms.platform import Platform
from jaxscale.platforms.usable import usable_bytes
from jaxscale.step.experiment import Experiment
from jaxscale.step.plan import Plan
from jaxscale.values.units import size

MENU = ("none", "dots", "full")
"""Memory plans that are weighed."""

MARGIN = 0.15
"""An estimate that is above the limit by less than this share of it may still fit: it is worth measuring."""


def cheapest_fit(
    experiment: Experiment,
    platform: Platform,
    limit: int | None = None,
    plan: Plan | None = None,
    *,
    menu: Sequence[str] = MENU,
    measure: Callable[[Experiment, Plan], int] | None = None,
) -> Plan:
    """The plan with the memory plan of least FLOP that fits the device.

    Args:
        experiment: what to train.
        platform: where.
        limit: bytes of device memory per device; what the platform's programs may use by default.
        plan: how; the experiment's own by default. Its memory plan is replaced.
        menu: text forms of the memory plans to choose from.
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
    for place, text in enumerate(menu):
        candidate = dataclasses.replace(plan, memory=MemoryPlan.parse(text))
        guess = estimate(experiment, platform, candidate)
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
        f"memory fit: {experiment.name} takes at least {size(least)} per device under any of {', '.join(menu)}; "
        f"there are {size(limit)}: take more devices, --plan.zero 3, more --plan.microbatches, a --plan.loss-chunk, or "
        f"ask what would help most: jaxscale fit FILE --plan.memory full --limit {limit}B"
    )
