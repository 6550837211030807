"""Update: the optimizer of an experiment, with its state in the number format that the plan specifies.

The experiment specifies the update rule (an optax transformation), and the plan specifies the number format of its
moments. A quantized state is divided into blocks within each device's shard, and all moments of a block share one
scale. `Layout` places the state, and `step/host.py` selects the device or the host for the update.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from jaxscale.errors import UserError
from jaxscale.layers.stack import in_one_stack
from jaxscale.lowbit.quantized import quantize_state, quantized_bytes_and_size
from jaxscale.lowbit.split_weights import split, split_weights
from jaxscale.offload.updates import Advance
from jaxscale.optim.groups import group_indices
from jaxscale.optim.leaves import LeafKind, ParamInfo, leaf_of
from jaxscale.optim.one_bit import Messages, clip_mean_gradients
from jaxscale.optim.optimizer import Optimizer
from jaxscale.optim.rules import RULES
from jaxscale.recipe.experiment import Experiment
from jaxscale.recipe.plan import Plan
from jaxscale.sharding.zero import without_axis
from jaxscale.state.layout import PIPE_AXIS, device_of, placements_of
from jaxscale.state.pure_model import PureModel
from jaxscale.trees import path_name, tree_bytes
from jaxscale.typing import Params, PyTree

_SMALLEST_EPS = 1e-30
"""Smallest `eps` of a rule that counts as bounded; a smaller one may vanish in float32."""
_LARGEST_GROWTH = 36.0
"""Largest ratio of a bounded rule's update to the size that the rule's entry in `RULES` specifies."""


@dataclasses.dataclass(frozen=True)
class Update:
    """An optimizer as three optax transformations, and their properties.

    Args:
        float32_rule: the experiment's rule without clipping, with float32 weights and state.
        rule: the rule without clipping, with weights and state in the number formats that the plan specifies.
        clipped_rule: the whole optimizer: clipping, then `rule`.
        clip: global norm to which gradients are clipped; `None` if they are not clipped.
        is_split: whether weights are kept in bfloat16, with their rounding errors in the optimizer state.
        messages: function that computes the momenta that each replica sends (1-bit Adam and LAMB); `None` if replicas
            send gradients.
        fused_advance: function that applies the whole update by a fused kernel of the platform; `None` without one.
        unfused_reason: why no fused kernel updates a quantized state; `None` if a kernel does, or if the state is
            float32.
        is_bounded: whether the rule bounds its updates, so their size need not be measured.
        by_layer_flags: tree that shows for each parameter whether it is a stack whose layers the rule treats one by
            one; `None` if that is unknown, because the rule is the user's own.
        param_infos: tree of the `ParamInfo` of each parameter.
    """

    float32_rule: optax.GradientTransformation
    rule: optax.GradientTransformation
    clipped_rule: optax.GradientTransformation
    clip: float | None
    is_split: bool = False
    messages: Messages | None = None
    fused_advance: Advance | None = None
    unfused_reason: str | None = None
    is_bounded: bool = False
    by_layer_flags: PyTree[bool] | None = None
    param_infos: PyTree[ParamInfo] = None

    @classmethod
    def of(cls, experiment: Experiment, plan: Plan, pure_model: PureModel, mesh: Mesh | AbstractMesh) -> "Update":
        """Return the optimizer of an experiment under a plan.

        Raises:
            UserError: moments of this rule cannot be kept in the number format that the plan specifies, or the plan
                updates quantized moments on the host of a TPU, which the compiler for TPU does not support.
        """
        placements, map_with_path = placements_of(pure_model, plan, mesh), jax.tree_util.tree_map_with_path
        shardings = map_with_path(
            lambda path, _: NamedSharding(mesh, placements[path_name(path)].state), pure_model.abstract_params
        )
        param_infos = map_with_path(
            lambda path, leaf, sharding: leaf_of(
                in_one_stack(name := path_name(path))[0],  # a pattern of a group means all layers of a stack in groups
                pure_model.axis_names.get(name),
                leaf.shape,
                sharding,
                pure_model.variable_type_names.get(name, ""),
                pure_model.tensor_dims.get(name),
            ),
            pure_model.abstract_params,
            shardings,
        )
        float32_rule = rule = experiment.optimizer.rule(experiment.steps, param_infos)
        fused_advance = unfused_reason = None
        if plan.state.moments != "float32":
            stacked_flags = map_with_path(
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
            rule = quantize_state(
                rule,
                plan.state.moments,
                local=_shapes_on_stages(pure_model, shardings) if plan.asynchronous else shardings,
                layers=stacked_flags,
                exact=_exact_flags(experiment.optimizer, param_infos),
                platform=platform,
            )
            unfused_reason = _unfused_reason(experiment.optimizer, plan, platform)
            if unfused_reason is None:
                device_name = f"{platform} {device.device_kind}"
                fused_advance = _fused_adamw(
                    experiment.optimizer, experiment.steps, rule, param_infos, shardings, device_name
                )
        if plan.state.master == "split":
            rule = split_weights(rule)
        clip, messages = experiment.optimizer.clip, experiment.optimizer.messages(experiment.steps)
        clipped_rule = rule if clip is None else optax.chain(optax.clip_by_global_norm(clip), rule)
        if messages is not None:
            clipped_rule = clip_mean_gradients(rule, messages)
        members = experiment.optimizer.members().values()
        is_known_rule = all(member.custom is None for member in members)
        return cls(
            float32_rule=float32_rule,
            rule=rule,
            clipped_rule=clipped_rule,
            clip=clip,
            is_split=plan.state.master == "split",
            messages=messages,
            fused_advance=fused_advance,
            unfused_reason=unfused_reason,
            is_bounded=is_known_rule and plan.state.moments == "float32" and all(map(_bounds_updates, members)),
            by_layer_flags=jax.tree.map(lambda info: info.stack > 0, param_infos) if is_known_rule else None,
            param_infos=param_infos,
        )

    def start(self, params: Params) -> tuple[Params, optax.OptState]:
        """Split the weights into bfloat16 weights and rounding errors, and create the state before the first update.

        Args:
            params: float32 parameters.

        Returns:
            The weights in bfloat16, and the optimizer state, which contains their rounding errors.
        """
        weights_and_corrections = [
            split(param) if jnp.issubdtype(param.dtype, jnp.floating) else (param, optax.MaskedNode())
            for param in jax.tree.leaves(params)
        ]
        treedef = jax.tree.structure(params)
        weights = treedef.unflatten([weight for weight, _ in weights_and_corrections])
        initial_state: PyTree = self.rule.init(weights)
        corrections = treedef.unflatten([correction for _, correction in weights_and_corrections])
        rule_state = initial_state._replace(correction=corrections)
        if self.clip is None:
            return weights, rule_state
        return weights, (optax.clip_by_global_norm(self.clip).init(weights), rule_state)


def _shapes_on_stages(pure_model: PureModel, shardings: PyTree[NamedSharding]) -> PyTree[jax.ShapeDtypeStruct]:
    """Return the shape of each parameter on one device of an asynchronous pipeline.

    A stage has whole copies of the parameters outside of the blocks; a synchronous pipeline splits them over stages.
    """

    def shape_on_stage(leaf: jax.ShapeDtypeStruct, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
        """Return the shape of a parameter without the axis of the stages."""
        stage_sharding = NamedSharding(sharding.mesh, without_axis(sharding.spec, PIPE_AXIS))
        return jax.ShapeDtypeStruct(stage_sharding.shard_shape(leaf.shape), leaf.dtype)

    return jax.tree.map(shape_on_stage, pure_model.abstract_params, shardings)


def _bounds_updates(optimizer: Optimizer) -> bool:
    """Return whether an optimizer's rule, one of `RULES`, bounds its updates; with an `eps` of 0, no rule does.

    After small gradients, an update of Adam is at most `(1 - b1) / sqrt(1 - b2)` times as large as usual. Under
    constant gradients, an update with momentum is `1 / (1 - momentum)` times as large as without.
    """
    options = optimizer.options()
    momentum, b1, b2 = (options.get(name, 0.0) for name in ("momentum", "b1", "b2"))
    momentum_growth = 1.0 / (1.0 - momentum) if momentum < 1 else math.inf
    growth = max(momentum_growth, (1.0 - b1) / math.sqrt(1.0 - b2))
    has_eps = options.get("eps", 1.0) >= _SMALLEST_EPS
    return RULES[optimizer.name].is_bounded and has_eps and growth <= _LARGEST_GROWTH


def _exact_flags(optimizer: Optimizer, param_infos: PyTree[ParamInfo]) -> PyTree[bool]:
    """Return a tree of bools: whether each parameter's moments stay float32, as the parameter's optimizer specifies."""
    member_by_index = optimizer.members()
    if not optimizer.groups:
        return jax.tree.map(lambda _: optimizer.moments == "float32", param_infos)
    index_tree = group_indices(list(optimizer.groups), param_infos)
    return jax.tree.map(lambda index: member_by_index[index].moments == "float32", index_tree)


def _unfused_reason(optimizer: Optimizer, plan: Plan, platform: str) -> str | None:
    """Return why the kernel of 8-bit AdamW cannot update a quantized state; `None` if it can."""
    if plan.offload.optimizer_state != "device" or plan.offload.weights != "device":
        return "the kernel needs weights and state on the device"
    if platform not in ("tpu", "gpu"):
        return "kernels are for TPU and GPU"
    if plan.kernels.of("adam8") == "reference":
        return "the plan names the reference implementation"
    if plan.state.moments not in ("int8", "dynamic8"):
        return f"the kernel supports states int8 and dynamic8, not {plan.state.moments}"
    if optimizer.groups:
        return "the kernel supports one rule for all parameters, not groups"
    if optimizer.name != "adamw" or optimizer.custom is not None:
        rule_name = "a rule of your own" if optimizer.custom is not None else optimizer.name
        return f"the kernel supports AdamW, not {rule_name}"
    if plan.state.master == "split":
        return "the kernel needs float32 weights, not split ones"
    return "replicas under diloco are updated together by XLA's program" if plan.diloco is not None else None


def _fused_adamw(
    optimizer: Optimizer,
    step_count: int,
    rule: optax.GradientTransformation,
    param_infos: Params,
    shardings: Params,
    device_name: str,
) -> Advance:
    """Return the update of AdamW by a fused kernel.

    Args:
        optimizer: AdamW, with its options.
        step_count: number of steps of the run, for the schedule of the learning rate.
        rule: the rule with its quantized state, without clipping.
        param_infos: tree with the `ParamInfo` of each parameter, which shows whether weight decay applies to the
            parameter.
        shardings: `NamedSharding` of each parameter's state.
        device_name: platform and kind of the device, such as "tpu TPU v5e".
    """
    from jaxscale.optim.fused import AdamW, fused_advance

    decay_mask = jax.tree.map(lambda info: info.decays, param_infos) if optimizer.decay == "matrices" else None
    adamw = AdamW(optimizer.schedule_fn(step_count), **optimizer.options(), mask=decay_mask)
    return fused_advance(rule, adamw, platform=device_name, state_shardings=shardings, clip=optimizer.clip)


def describe_kinds(param_infos: PyTree[ParamInfo]) -> str:
    """Return a line for the user with the number of parameters of each kind: matrix, table or vector.

    Args:
        param_infos: tree of the `ParamInfo` of each parameter.

    Example:
        >>> stack, bias = leaf_of("w", ("layers", "embed", "mlp"), (2, 8, 24)), leaf_of("bias", None, (24,))
        >>> describe_kinds({"w": stack, "bias": bias})
        'parameters: 1 matrix (1 stack of layers), 1 vector'
    """
    stacked_flags_by_kind: dict[LeafKind, list[bool]] = {"matrix": [], "table": [], "vector": []}
    for param_info in jax.tree.leaves(param_infos):
        stacked_flags_by_kind[param_info.kind].append(param_info.stack > 0)
    plural_by_noun = {"matrix": "matrices", "table": "tables", "vector": "vectors", "stack": "stacks"}

    def count_text(count: int, noun: str) -> str:
        return f"{count} {noun if count == 1 else plural_by_noun[noun]}"

    kind_texts = [
        count_text(len(stacked_flags), kind)
        + (f" ({count_text(sum(stacked_flags), 'stack')} of layers)" if any(stacked_flags) else "")
        for kind, stacked_flags in stacked_flags_by_kind.items()
        if stacked_flags
    ]
    return f"parameters: {', '.join(kind_texts)}"


def describe_state(plan: Plan, abstract_state: PyTree, parameter_count: int) -> list[str]:
    """Return a line for the user on a quantized optimizer state; [] for a float32 state.

    Args:
        plan: the plan, which specifies the bits of a moment.
        abstract_state: shapes and dtypes of the optimizer's state.
        parameter_count: number of elements of all trained parameters.

    Example:
        >>> from jaxscale.lowbit.quantize import zeros
        >>> from jaxscale.recipe.plan import StatePlan
        >>> describe_state(Plan(state=StatePlan("int8")), {"mu": zeros((256, 4), "soft8", 256)}, 2048)
        ['state int8: 0.51 bytes a parameter; 1,024 moments in 1.02 bytes each, the others in float32']
    """
    if plan.state.moments == "float32":
        return []
    moment_bytes, moment_count = quantized_bytes_and_size(abstract_state)
    correction_text = ", corrections of weights in int8" if plan.state.master == "split" else ""
    return [
        f"state {plan.state.moments}: {tree_bytes(abstract_state) / parameter_count:.2f} bytes a parameter; "
        f"{moment_count:,} moments in {moment_bytes / moment_count:.2f} bytes each, the others in float32"
        f"{correction_text}"
    ]
