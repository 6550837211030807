"""Resolve the automatic choices of a plan, for a platform or for the devices of this process.

`pipeline auto:P` becomes the best schedule (`pipeline_choice.py`), and `memory fit` becomes the cheapest memory plan
that fits (`memory_search.py`).
"""

from jaxscale.platforms.platform import Platform
from jaxscale.recipe.experiment import Experiment
from jaxscale.recipe.plan import Plan


def resolve_choices(
    experiment: Experiment,
    plan: Plan,
    limit: int | None = None,
    platform: Platform | None = None,
    host_limit: int | None = None,
) -> Plan:
    """Resolve all automatic choices of a plan, and return the resolved plan.

    Args:
        experiment: the experiment to plan for.
        plan: a plan with or without automatic choices.
        limit: bytes of device memory per device to plan for; by default the bytes that programs may use.
        platform: platform to train on. By default, this is the local machine, where memory plans are also compiled to
            confirm that they fit.
        host_limit: bytes of host memory per device; by default an equal share of the host's memory.

    Raises:
        NothingFits: no memory plan fits.
        UserError: no pipeline fits.

    Example:
        >>> from jaxscale.models import Decoder
        >>> tiny = Experiment("tiny", Decoder(vocab=8, context=8, layers=2, embed=8, heads=2), data=None)
        >>> resolve_choices(tiny, Plan(zero=1)).zero
        1
    """
    is_auto_pipeline = plan.pipeline is not None and plan.pipeline.name == "auto"
    if not is_auto_pipeline and plan.memory.rule != "fit":
        return plan
    from jaxscale.planning.memory_search import cheapest_fit
    from jaxscale.planning.pipeline_choice import pipeline_choice
    from jaxscale.planning.program import compiled_bytes
    from jaxscale.platforms.detect import detect

    measure = compiled_bytes if platform is None else None
    target_platform = detect() if platform is None else platform
    if is_auto_pipeline:
        plan = pipeline_choice(experiment, target_platform, limit, plan)
    if plan.memory.rule == "fit":
        plan = cheapest_fit(experiment, target_platform, limit, plan, measure=measure, host_limit=host_limit)
    return plan
