"""Update: the optimizer of an experiment, with its state as the plan keeps it.

The rule is the experiment's; the plan decides in how many bits its moments are kept, and in which parts of a device's
shard they share a scale. `Layout` places what comes of it, `step/host.py` decides where it is run.
"""

import dataclasses
from typing import Any

import jax
import optax
from jax.sharding import NamedSharding

from jaxscale.optim.leaves import leaf_of
from jaxscale.optim.quantized import quantize_state
from jaxscale.step.experiment import Experiment
from jaxscale.step.functional import Functional
from jaxscale.step.layout import placements_of
from jaxscale.step.plan import Plan
from jaxscale.trees import path_name


@dataclasses.dataclass(frozen=True)
class Update:
    """An optimizer in its three forms.

    Args:
        plain: the experiment's rule, without clipping, as if its state were float32.
        rule: the same with its state as the plan keeps it.
        whole: clipping, then that.
        clip: global norm that gradients are clipped to; `None` never clips.
    """

    plain: optax.GradientTransformation
    rule: optax.GradientTransformation
    whole: optax.GradientTransformation
    clip: float | None

    @classmethod
    def of(cls, experiment: Experiment, plan: Plan, functional: Functional, mesh: Any) -> "Update":
        """The optimizer of an experiment under a plan.

        Raises:
            UserError: its moments cannot be kept as asked.
        """
        placements, by_path = placements_of(functional, plan, mesh), jax.tree_util.tree_map_with_path
        places = by_path(lambda path, _: NamedSharding(mesh, placements[path_name(path)].state), functional.params)
        leaves = by_path(
            lambda path, leaf, place: leaf_of(
                path_name(path), functional.names.get(path_name(path)), leaf.shape, place
            ),
            functional.params,
            places,
        )
        plain = rule = experiment.optimizer.rule(experiment.steps, leaves)
        if plan.state != "float32":
            layers = by_path(lambda path, _: functional.stacked(path_name(path)), functional.params)
            platform = "cpu" if plan.optimizer_state == "host" else mesh.devices.flat[0].platform
            rule = quantize_state(rule, plan.state, local=places, layers=layers, platform=platform)
        clip = experiment.optimizer.clip
        return cls(plain, rule, rule if clip is None else optax.chain(optax.clip_by_global_norm(clip), rule), clip)
