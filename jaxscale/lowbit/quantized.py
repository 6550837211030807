r"""Any optax transformation with its state in 8 or 4 bits.

Between steps the moments are quantized arrays (`quantize.py`). A step decodes them, updates them by the rule in
float32, computes the update of the weights from the unrounded moments, and encodes the moments again (Dettmers et al.
2021, arXiv 2110.02861; Li et al. 2023, arXiv 2309.01507). XLA fuses all of it, so that no float32 moment lies in
memory. The state is the rule's with `Quantized` in place of some arrays, and works wherever an optax state does.

Two names select what is quantized. The name of the state's field (`mu`, `nu`, ...) also determines whether the map is
signed, which never depends on the data. By the name of the parameter, embedding, head, norms and small leaves stay
float32; in an embedding, a block of a column would mix frequent tokens with rare ones. AdamW's step as one kernel is in
`optim/fused.py`. Left out: separate rules such as `Adam8bit`.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Mapping
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Sharding

from jaxscale.errors import UserError, unknown
from jaxscale.lowbit.in_blocks import owner_of, views_of
from jaxscale.lowbit.quantize import beside, block_of, codes, decode, encode, is_quantized, scales, zeros
from jaxscale.trees import leaf_bytes, path_name
from jaxscale.typing import Params

MomentsFormat = Literal["float32", "int8", "dynamic8", "int4", "fp8"]
"""Format of an optimizer's state between steps."""

_MAPS: Mapping[str, tuple[str, str, int]] = {
    "int8": ("soft8", "sqrt8", 256),
    "dynamic8": ("dynamic8", "dynamic8_unsigned", 256),
    "int4": ("dynamic4", "linear4_unsigned", 128),
    "fp8": ("e4m3", "sqrt_e4m3", 256),
}
"""For each format: the map of signed fields, the map of unsigned fields, and the largest block."""

SIGNED = ("mu", "trace", "momentum", "m", "m1", "m2", "exp_avg", "velocity")
"""Names of state fields, in optax and elsewhere, that are first moments."""
UNSIGNED = ("nu", "nu_max", "v", "exp_avg_sq")
"""Names of state fields, in optax and elsewhere, that are second moments."""
NEVER: Mapping[str, str] = {
    "acc_grads": "a sum of gradients, in which small ones would be lost",
    "z": "schedule-free's weights, not a moment",
    "x0": "weights",
    "params0": "weights",
    "init_params": "weights",
    "v_row": "Adafactor's factors, which are small and whose errors multiply",
    "v_col": "Adafactor's factors, which are small and whose errors multiply",
    "grad_sum": "a sum over all steps, which would stop growing",
    "grad_sum_sq": "a sum over all steps, which would stop growing",
    "sum_of_squares": "a sum over all steps, which would stop growing",
    "GG": "Shampoo's statistics, whose small eigenvalues would be lost",
    "Q": "a basis, whose columns must stay orthogonal",
    "projector": "a basis, whose columns must stay orthogonal",
    "residual": "the error feedback of compression, which must be exact",
}
"""Names of state fields that must never be quantized, with the reason."""


@dataclasses.dataclass(frozen=True)
class StatePolicy:
    """Selects the leaves of an optimizer's state to quantize.

    Args:
        skip: regular expression searched in a parameter's path ("blocks/layers/mlp/up/weight"); the state of matching
            parameters stays float32.
        least: smallest number of elements of a parameter, in all its layers, whose state is quantized.
        block: most elements of a column that share a scale; `None` for 256, or 128 in 4 bits.
        signed: names of state fields that are quantized as numbers of either sign.
        unsigned: names of state fields that are quantized as numbers >= 0.

    Example:
        >>> StatePolicy(signed=("x0",))
        Traceback (most recent call last):
        jaxscale.errors.UserError: field 'x0' must never be quantized: weights; leave it out
    """

    skip: str = r"embed|norm|bias|(^|[/_])(head|wte|wpe|scale)(/|$)"
    least: int = 4096
    block: int | None = None
    signed: tuple[str, ...] = SIGNED
    unsigned: tuple[str, ...] = UNSIGNED

    def __post_init__(self) -> None:
        for name in (*self.signed, *self.unsigned):
            if name in NEVER:
                raise UserError(f"field {name!r} must never be quantized: {NEVER[name]}; leave it out")
        overlap = sorted(set(self.signed) & set(self.unsigned))
        if overlap:
            raise UserError(f"field {overlap[0]!r} is both signed and unsigned: list it in only one of the two")
        if self.block is not None and self.block < 1:
            raise UserError(f"block: got {self.block}, expected a number of elements >= 1")
        try:
            re.compile(self.skip)
        except re.error as error:
            raise UserError(f"skip: {self.skip!r} is not a regular expression: {error}") from None


def quantize_state(
    rule: optax.GradientTransformation,
    states: MomentsFormat = "int8",
    policy: StatePolicy = StatePolicy(),
    *,
    local: Params | None = None,
    layers: Params | None = None,
    platform: str | None = None,
) -> optax.GradientTransformationExtraArgs:
    """The same optax transformation with moments that have 8 or 4 bits between steps.

    `optax.tree.map_params` works on its state with `is_leaf=is_quantized`.

    Args:
        rule: any optax transformation, also chains, masks, `multi_transform` and `inject_hyperparams`.
        states: format of the moments: "int8" (`soft8` and `sqrt8`), "dynamic8" (bitsandbytes' map), "int4" or "fp8";
            "float32" returns the rule unchanged.
        policy: selects the leaves to quantize.
        local: tree like the parameters, of their `Sharding`s or of the shapes of one device's shards; blocks then
            divide every shard. Without it blocks divide the global shape.
        layers: tree of bools like the parameters: whether the first dim is stacked layers, along which no block lies.
            Without it blocks lie along the second-last dim of any array of two dims or more.
        platform: platform on which updates run: "tpu", "gpu" or "cpu"; `None` chooses it when a program is compiled.

    Returns:
        The transformation. Its `init` raises `UserError` if no leaf would be quantized.

    Raises:
        UserError: `states` is not a known format.

    Example:
        >>> params = {"up": jnp.ones((64, 64)), "norm": jnp.ones(64)}
        >>> rule = quantize_state(optax.adamw(1e-3), "int8")
        >>> mu = rule.init(params)[0].mu
        >>> mu["up"].map, mu["up"].scale.shape, mu["norm"].dtype.name
        ('soft8', (1, 64), 'float32')
    """
    if states not in get_args(MomentsFormat):
        raise unknown("states", states, get_args(MomentsFormat))
    base_rule = optax.with_extra_args_support(rule)
    if states == "float32":
        return base_rule

    def init(params: Any) -> Any:
        if not jax.tree.leaves(params):  # `optax.tree.map_params` passes placeholders
            return base_rule.init(params)
        shapes = jax.eval_shape(base_rule.init, params)
        choices = _choose_maps(shapes, params, states, policy, local, layers)
        if not any(choice is not None for choice in choices):
            raise UserError(_refusal(shapes, states))
        leaves, treedef = jax.tree.flatten(base_rule.init(params))
        zero_flags = _zero_leaves(base_rule.init, params)
        quantized_leaves = [
            leaf if choice is None else zeros(leaf.shape, *choice) if is_zero else encode(leaf, *choice)
            for leaf, choice, is_zero in zip(leaves, choices, zero_flags, strict=True)
        ]
        return treedef.unflatten(quantized_leaves)

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        def update_float32(state: Any) -> tuple[Any, Any]:
            return base_rule.update(updates, state, params, **extra)

        def update_blocks(state: Any) -> Any:
            views = None if extra else views_of(base_rule, updates, state)
            if views is None:
                return update_float32(_disguised(state, -1.0, True))[1]
            state = views.cut(state)
            inputs = [views.disguised(views.cut(tree), state) for tree in (updates, params)]
            return base_rule.update(inputs[0], _disguised(state, -1.0, True), inputs[1])[1]

        update_by_platform = {
            "cpu": functools.partial(_update_once, update_float32),
            "tpu": functools.partial(_update_recomputed, update_float32, repeated=True, run_blocks=update_blocks),
            "default": functools.partial(_update_recomputed, update_float32, repeated=False),
        }
        if platform is not None:
            return update_by_platform[platform if platform in update_by_platform else "default"](state)
        return jax.lax.platform_dependent(state, **update_by_platform)

    return optax.GradientTransformationExtraArgs(init, update)


def dequantize(state: Any, *, repeated: bool = False) -> Any:
    """A state with float32 arrays in place of quantized ones: the state of the wrapped rule.

    Args:
        state: state of `quantize_state`.
        repeated: whether to broadcast scales, as in `quantize.beside`.
    """
    return _map_quantized(functools.partial(decode, repeated=repeated), state)


def placed(state: Any, shardings: Any) -> Any:
    """Shardings of the codes and scales in a state, from a tree with one sharding for each quantized array.

    Codes have the parameter's shape, and blocks divide its shards: codes and scales share the parameter's sharding.

    Args:
        state: state with `Quantized` nodes, of arrays or shapes.
        shardings: tree like the state, with a `Sharding` or `PartitionSpec` for each leaf and each quantized array.
    """
    return _map_quantized(lambda q, spec: dataclasses.replace(q, codes=spec, scale=spec), state, shardings)


def state_bytes(state: Any) -> tuple[int, int]:
    """Bytes of the quantized arrays of a state, and their number of elements.

    Args:
        state: state with `Quantized` nodes, of arrays or shapes.

    Example:
        >>> state_bytes({"mu": zeros((256, 4), "soft8", 256), "count": jnp.zeros(())})
        (1040, 1024)
    """
    quantized = [leaf for leaf in jax.tree.leaves(state, is_leaf=is_quantized) if is_quantized(leaf)]
    return sum(leaf_bytes(q.codes) + leaf_bytes(q.scale) for q in quantized), sum(q.size for q in quantized)


def _update_once(update: Any, state: Any) -> tuple[Params, Any]:
    """Decode, update and encode a state: for CPU, on which arithmetic is the bottleneck and memory is not."""
    updates, new_state = update(dequantize(state))
    return updates, _map_quantized(lambda q, array: encode(array, q.map, q.block, by_rows=True), state, new_state)


def _update_recomputed(update: Any, state: Any, repeated: bool, run_blocks: Any = None) -> tuple[Any, Any]:
    """Like `_update_once`, but run the rule three times: for updates, scales and codes. No float32 moment is then kept.

    XLA would keep float32 moments rather than recompute them: up to 3.5 bytes a parameter on H100 (dynamic map), 10 on
    v5e (`int8`). It drops optimization barriers before common-subexpression elimination, so the three
    runs must differ as expressions.

    Args:
        update: function from a state in float32 to the updates and the new state.
        state: quantized state.
        repeated: whether to broadcast scales, as in `quantize.beside`.
        run_blocks: function from the quantized state to the new state from which scales are computed; `None` for
            `update`.
    """
    updates, new_state = update(dequantize(state, repeated=repeated))
    scale_state = run_blocks(state) if run_blocks else update(_disguised(state, -1.0, repeated))[1]
    code_state = update(_disguised(state, -2.0, repeated))[1]

    def encode_leaf(q: Any, scale_array: Any, code_array: Any, _: Any) -> Any:
        scale = scales(scale_array, q.map, q.block).reshape(q.scale.shape)
        return dataclasses.replace(q, codes=codes(code_array, scale, q.map, q.block, repeated=repeated), scale=scale)

    return updates, _map_quantized(encode_leaf, state, scale_state, code_state, new_state)


def _disguised(state: Any, bound: float, repeated: bool) -> Any:
    """The decoded state as another expression, in which codes change where a scale is below `bound`; no scale is."""

    def disguise(q: Any) -> Any:
        codes_array, scale = beside(q.codes, q.scale, repeated)
        codes_array = jnp.where(scale < bound, jnp.zeros((), codes_array.dtype), codes_array)
        return dataclasses.replace(q, codes=codes_array.reshape(q.shape))

    return dequantize(_map_quantized(disguise, state), repeated=repeated)


def _map_quantized(function: Any, state: Any, *trees: Any) -> Any:
    """Map a function over the quantized arrays of a state and the entries of further trees at the same places.

    All other leaves are taken from the last tree.
    """

    def mapped(*entries: Any) -> Any:
        return function(*entries) if is_quantized(entries[0]) else entries[-1]

    return jax.tree.map(mapped, state, *trees, is_leaf=is_quantized)


def _choose_maps(
    shapes: Any, params: Params, states: str, policy: StatePolicy, local: Params | None, layers: Params | None
) -> list[tuple[str, int] | None]:
    """(map name, block) of each leaf of a state; `None` for a leaf that stays float32."""
    signed_map, unsigned_map, max_block = _MAPS[states]
    leaves, treedef = jax.tree_util.tree_flatten_with_path(params)
    shardings: list[Any] = [None] * len(leaves) if local is None else treedef.flatten_up_to(local)
    stacked: list[Any] = [False] * len(leaves) if layers is None else treedef.flatten_up_to(layers)
    map_by_field = dict.fromkeys(policy.unsigned, unsigned_map) | dict.fromkeys(policy.signed, signed_map)
    # shape, sharding and whether the first dim is layers, by the path of the parameter
    leaf_facts = {path: (leaf.shape, *facts) for (path, leaf), *facts in zip(leaves, shardings, stacked, strict=True)}

    def choose_map(path: tuple[Any, ...], leaf: Any) -> tuple[str, int] | None:
        owner = owner_of(path, leaf_facts)
        if owner is None or owner == path or not jnp.issubdtype(leaf.dtype, jnp.floating):
            return None
        shape, sharding, is_stacked = leaf_facts[owner]
        field = path_name(path[: len(path) - len(owner)][-1:])
        map_name = map_by_field.get(field)
        if map_name is None or leaf.shape != shape or re.search(policy.skip, path_name(owner)):
            return None
        if len(shape) - is_stacked < 2 or math.prod(shape) < policy.least:
            return None
        return map_name, block_of(_local_shape(shape, sharding)[-2], policy.block or max_block)

    state_leaves, _ = jax.tree_util.tree_flatten_with_path(shapes)
    return [choose_map(path, leaf) for path, leaf in state_leaves]


def _local_shape(shape: tuple[int, ...], local: Any) -> tuple[int, ...]:
    """Shape of one device's shard, from the array's `Sharding` or the shard's shape; `None` for the whole shape."""
    if local is None:
        return shape
    if isinstance(local, Sharding):
        return local.shard_shape(shape)
    return tuple(getattr(local, "shape", local))


def _refusal(shapes: Any, states: str) -> str:
    """The message of the error for a state of which no leaf would be quantized."""
    leaves = jax.tree_util.tree_flatten_with_path(shapes)[0]
    names = sorted(path_name(path) for path, leaf in leaves if leaf.ndim > 0)
    field_by_reason = {reason: name for path in names for name, reason in NEVER.items() if name in path.split("/")}
    return (
        f"states {states!r} would quantize no leaf of this optimizer's state ("
        + (", ".join(names[:3]) + (", ..." if len(names) > 3 else "") if names else "it has no arrays")
        + ")"
        + "".join(f"; {name}: {reason}" for reason, name in field_by_reason.items())
        + ". Expected moments (mu, nu, trace, ...) of matrices of 4096 numbers or more outside embedding, head and "
        "norms: use states='float32', or specify what to quantize by StatePolicy(signed=..., unsigned=..., least=...)"
    )


def _zero_leaves(init: Any, params: Params) -> list[bool]:
    """For each leaf of a state, whether it starts as zeros according to the traced program of `init`."""
    closed_jaxpr = jax.make_jaxpr(init)(params)
    return [_is_zero(closed_jaxpr.jaxpr, variable) for variable in closed_jaxpr.jaxpr.outvars]


def _is_zero(jaxpr: Any, variable: Any) -> bool:
    """Whether a variable of a program is a broadcast constant 0."""
    if hasattr(variable, "val"):
        return bool(jnp.size(variable.val) == 1 and variable.val == 0)
    equation = next((eqn for eqn in jaxpr.eqns if variable in eqn.outvars), None)
    if equation is None:
        return False
    if equation.primitive.name in ("broadcast_in_dim", "convert_element_type", "copy", "reshape"):
        return _is_zero(jaxpr, equation.invars[0])
    body = equation.params.get("jaxpr")
    if equation.primitive.name in ("jit", "pjit") and body is not None:
        return _is_zero(body.jaxpr, body.jaxpr.outvars[equation.outvars.index(variable)])
    return False
