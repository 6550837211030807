"""Update: the optimizer of an experiment, with its state in the number of bits that the plan specifies.

The experiment specifies the update rule (an optax transformation). The plan specifies in how many bits its moments are
kept; blocks of moments within a device's shard share a scale. `Layout` places the state, and `step/host.py` selects
device or host for the update.
"""

import dataclasses

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from jaxscale.errors import UserError
from jaxscale.lowbit.quantized import quantize_state, state_bytes
from jaxscale.lowbit.split_weights import split, split_weights
from jaxscale.offload.updates import Advance
from jaxscale.optim.leaves import leaf_of
from jaxscale.optim.one_bit import Messages, clipped
from jaxscale.optim.optimizer import Optimizer
from jaxscale.recipe.experiment import Experiment
from jaxscale.recipe.plan import Plan
from jaxscale.state.layout import device_of, placements_of
from jaxscale.state.pure_model import PureModel
from jaxscale.trees import path_name, tree_bytes
from jaxscale.typing import Params, PyTree


@dataclasses.dataclass(frozen=True)
class Update:
    """An optimizer in its three forms.

    Args:
        plain: the experiment's rule without clipping, with float32 weights and state.
        rule: the rule without clipping, with weights and state in the bits that the plan specifies.
        whole: clipping, then `rule`.
        clip: global norm that gradients are clipped to; `None` never clips.
        split: whether weights are kept in bfloat16, with their rounding errors as part of the optimizer state.
        messages: computes what each replica sends (1-bit Adam and LAMB); `None` if replicas send gradients.
        fused: the whole update by a fused kernel of the plan's platform; `None` if there is no such kernel.
        unfused: why no kernel updates a state in few bits; `None` if one does, or if the state is float32.
        layers: for each parameter, whether it is a stack of layers that the rule treats one by one; `None` for a rule
            of the user's own, of which this is unknown.
    """

    plain: optax.GradientTransformation
    rule: optax.GradientTransformation
    whole: optax.GradientTransformation
    clip: float | None
    split: bool = False
    messages: Messages | None = None
    fused: Advance | None = None
    unfused: str | None = None
    layers: Params | None = None

    @classmethod
    def of(cls, experiment: Experiment, plan: Plan, pure_model: PureModel, mesh: Mesh | AbstractMesh) -> "Update":
        """Make the optimizer of an experiment under a plan.

        Raises:
            UserError: moments of this rule cannot be kept in the plan's bits, or the plan updates such moments on
                the host of a TPU, which the compiler for TPU does not support.
        """
        placements, map_with_path = placements_of(pure_model, plan, mesh), jax.tree_util.tree_map_with_path
        shardings = map_with_path(
            lambda path, _: NamedSharding(mesh, placements[path_name(path)].state), pure_model.abstract_params
        )
        leaf_descriptions = map_with_path(
            lambda path, leaf, sharding: leaf_of(
                path_name(path), pure_model.axis_names.get(path_name(path)), leaf.shape, sharding
            ),
            pure_model.abstract_params,
            shardings,
        )
        plain = rule = experiment.optimizer.rule(experiment.steps, leaf_descriptions)
        fused = unfused = None
        if plan.state.moments != "float32":
            is_stacked = map_with_path(
                lambda path, _: pure_model.is_stacked(path_name(path)), pure_model.abstract_params
            )
            device = device_of(mesh)
            if plan.offload.optimizer_state == "host" and device.platform == "tpu":
                raise UserError(
                    f"state {plan.state.moments} with optimizer_state host: the compiler for TPU crashes on numbers of "
                    "so few bits in code for the host's CPU; take offload.optimizer_state streamed, or, if the rule "
                    "mixes elements of a tensor, state.moments float32"
                )
            platform = "cpu" if plan.offload.optimizer_state == "host" else device.platform
            rule = quantize_state(rule, plan.state.moments, local=shardings, layers=is_stacked, platform=platform)
            unfused = _why_unfused(experiment.optimizer, plan, platform)
            if unfused is None:
                device_name = f"{platform} {device.device_kind}"
                fused = _fused_adamw(
                    experiment.optimizer, experiment.steps, rule, leaf_descriptions, shardings, device_name
                )
        if plan.state.master == "split":
            rule = split_weights(rule)
        clip, messages = experiment.optimizer.clip, experiment.optimizer.messages(experiment.steps)
        whole = rule if clip is None else optax.chain(optax.clip_by_global_norm(clip), rule)
        if messages is not None:
            whole = clipped(rule, messages)
        is_known_rule = experiment.optimizer.custom is None
        is_by_layer = jax.tree.map(lambda leaf: leaf.stack > 0, leaf_descriptions) if is_known_rule else None
        return cls(
            plain=plain,
            rule=rule,
            whole=whole,
            clip=clip,
            split=plan.state.master == "split",
            messages=messages,
            fused=fused,
            unfused=unfused,
            layers=is_by_layer,
        )

    def start(self, params: Params) -> tuple[Params, optax.OptState]:
        """Split the weights, and create the state before the first update.

        Args:
            params: float32 parameters.

        Returns:
            Weights in bfloat16, and the optimizer state with their rounding errors.
        """
        weights_with_corrections = jax.tree.map(
            lambda p: split(p) if jnp.issubdtype(p.dtype, jnp.floating) else (p, optax.MaskedNode()), params
        )
        structure = jax.tree.structure(params)
        pairs = structure.flatten_up_to(weights_with_corrections)
        weights, corrections = (structure.unflatten([pair[i] for pair in pairs]) for i in (0, 1))
        state: PyTree = self.rule.init(weights)
        state = state._replace(correction=corrections)
        return weights, state if self.clip is None else (optax.clip_by_global_norm(self.clip).init(weights), state)


def _why_unfused(optimizer: Optimizer, plan: Plan, platform: str) -> str | None:
    """Return why the kernel of 8-bit AdamW cannot update a state in few bits; `None` if it can."""
    if plan.offload.optimizer_state != "device" or plan.offload.weights != "device":
        return "it needs weights and state on the device"
    if platform not in ("tpu", "gpu"):
        return "kernels are for TPU and GPU"
    if plan.kernels.of("adam8") == "reference":
        return "the plan names the reference"
    if plan.state.moments not in ("int8", "dynamic8"):
        return f"the kernel supports states int8 and dynamic8, not {plan.state.moments}"
    if optimizer.name != "adamw" or optimizer.custom is not None:
        rule_name = "a rule of your own" if optimizer.custom is not None else optimizer.name
        return f"the kernel supports AdamW, not {rule_name}"
    if plan.state.master == "split":
        return "it needs float32 weights, not split ones"
    return "replicas under diloco are updated together by XLA's program" if plan.diloco is not None else None


def _fused_adamw(
    optimizer: Optimizer,
    steps: int,
    rule: optax.GradientTransformation,
    leaf_descriptions: Params,
    shardings: Params,
    device_name: str,
) -> Advance:
    """Return the update of AdamW by a fused kernel.

    Args:
        optimizer: AdamW, with its options.
        steps: number of steps of the run, for the schedule of the learning rate.
        rule: the rule with its state in few bits, without clipping.
        leaf_descriptions: description of each parameter (`optim.leaves`), with whether it decays.
        shardings: `NamedSharding` of each parameter's state.
        device_name: platform and kind of the device, such as "tpu TPU v5e".
    """
    from jaxscale.optim.fused import AdamW, fused

    mask = jax.tree.map(lambda leaf: leaf.decays, leaf_descriptions) if optimizer.decay == "matrices" else None
    adamw = AdamW(optimizer.schedule_fn(steps), **optimizer.options(), mask=mask)
    return fused(rule, adamw, platform=device_name, state_shardings=shardings, clip=optimizer.clip)


def describe_state(plan: Plan, state: PyTree, parameters: int) -> list[str]:
    """Return a line for the user on an optimizer state in few bits, or no line for a float32 state.

    Args:
        plan: the plan, which specifies the bits of a moment.
        state: shapes of the optimizer's state.
        parameters: number of trained numbers.

    Example:
        >>> from jaxscale.lowbit.quantize import zeros
        >>> from jaxscale.recipe.plan import StatePlan
        >>> describe_state(Plan(state=StatePlan("int8")), {"mu": zeros((256, 4), "soft8", 256)}, 2048)
        ['state int8: 0.51 bytes a parameter; 1,024 moments in 1.02 bytes each, the others in float32']
    """
    if plan.state.moments == "float32":
        return []
    moment_bytes, moment_count = state_bytes(state)
    others = "the others in float32" + (", corrections of weights in int8" if plan.state.master == "split" else "")
    return [
        f"state {plan.state.moments}: {tree_bytes(state) / parameters:.2f} bytes a parameter; {moment_count:,} moments "
        f"in {moment_bytes / moment_count:.2f} bytes each, {others}"
    ]
