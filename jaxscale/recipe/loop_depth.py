"""The number of nested loops in which the devices of an experiment's train step wait for one another."""

import dataclasses

from jaxscale.models.decoder import Decoder
from jaxscale.models.resnet import ResNet
from jaxscale.models.vit import ViT
from jaxscale.platforms.cpu_threads import DEFAULT_LOOP_DEPTH
from jaxscale.recipe.experiment import Experiment
from jaxscale.recipe.plan import Plan
from jaxscale.sharding.mesh import MeshSpec

_ELEMENTWISE_OPTIMIZERS = ("adamw", "lion", "sgd")
_FREE_FIELDS = ("mesh", "precision", "memory", "kernels", "unroll")
"""Fields of a plan that add no loops around collectives, or whose values are looked at by themselves."""
_MEMORY_RULES = ("none", "dots", "full", "save")
"""Rules that add no loops over segments of layers."""


def loop_depth_of(experiment: Experiment) -> int:
    """Return an upper bound of the number of nested loops around a collective of an experiment's train step.

    With data parallelism alone, devices exchange gradients, and statistics of a batch: those of a `ResNet`, and of a
    `ViT` whose layers are all unrolled, outside loops; those of a `Decoder` and of other `ViT`s in loops over layers or
    over chunks of the loss. For other models, plans and rules of optimizers the bound is `DEFAULT_LOOP_DEPTH`.

    Example:
        >>> loop_depth_of(Experiment("images", ResNet(), data=None))
        0
    """
    plan, optimizer = experiment.plan, experiment.optimizer
    depth = {ResNet: 0, Decoder: 1, ViT: 1}.get(type(experiment.model))
    if isinstance(experiment.model, ViT) and plan.unroll >= experiment.model.layers and plan.memory.rule == "none":
        depth = 0
    default_plan = Plan()
    mesh = MeshSpec() if plan.mesh is None else plan.mesh
    is_plain = (
        all(
            getattr(plan, field.name) == getattr(default_plan, field.name)
            for field in dataclasses.fields(plan)
            if field.name not in _FREE_FIELDS
        )
        and mesh == MeshSpec(data=mesh.data)
        and plan.memory.rule in _MEMORY_RULES
        and optimizer.name in _ELEMENTWISE_OPTIMIZERS
        and optimizer.custom is None
        and not optimizer.groups
    )
    return DEFAULT_LOOP_DEPTH if depth is None or not is_plain else depth
