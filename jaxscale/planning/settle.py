"""Resolve the automatic choices of a plan, for the devices of this process.

`pipeline auto:P` becomes the best schedule (`pipeline_choice.py`), `memory fit` the cheapest memory plan that fits
(`cheapest.py`), as confirmed by this machine's compiler.
"""

import dataclasses

from jaxscale.recipe.experiment import Experiment
from jaxscale.recipe.plan import Plan


def settled(experiment: Experiment, plan: Plan, limit: int | None = None) -> Plan:
    """The plan with all automatic choices resolved.

    Args:
        experiment: what to train.
        plan: possibly with automatic choices.
        limit: bytes of device memory per device to plan for; by default those that programs may use.

    Raises:
        UserError: no choice fits.

    Example:
        >>> from jaxscale.models import Decoder
        >>> tiny = Experiment("tiny", Decoder(vocab=8, context=8, layers=2, embed=8, heads=2), data=None)
        >>> settled(tiny, Plan(zero=1)).zero
        1
    """
    auto_pipeline = plan.pipeline is not None and plan.pipeline.name == "auto"
    if not auto_pipeline and plan.memory.rule != "fit":
        return plan
    from jaxscale.planning.cheapest import cheapest_fit
    from jaxscale.planning.pipeline_choice import pipeline_choice
    from jaxscale.planning.program import compiled_bytes
    from jaxscale.platforms.detect import detect

    if auto_pipeline:
        plan, _ = pipeline_choice(experiment, detect(), limit, plan)
    if plan.memory.rule != "fit":
        return plan
    return cheapest_fit(dataclasses.replace(experiment, plan=plan), detect(), limit, measure=compiled_bytes)
