r"""Any optax transformation with its state in 8 or 4 bits.

Between steps the moments are quantized arrays (`quantize.py`). A step decodes them, updates them by the rule in
float32, computes the update of the weights from the unrounded moments, and encodes the moments again (Dettmers et al.
2021, arXiv 2110.02861; Li et al. 2023, arXiv 2309.01507). XLA fuses all of this, so that no float32 moment lies in
memory. The state is the rule's state with `Quantized` instead of some arrays, and works wherever an optax state does.

Two names determine whether a leaf is quantized: that of its field in the state, and that of its parameter. The field
(`mu`, `nu`, ...) also determines whether the map is signed, which never depends on the data. Parameters of embedding,
head and norms are excluded; in an embedding, a block of a column would mix frequent tokens with rare ones. Small leaves
stay float32 too. AdamW's step as one kernel is in `optim/fused.py`. Left out: separate rules such as `Adam8bit`.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Sharding

from jaxscale.errors import UserError, unknown
from jaxscale.lowbit import quantize
from jaxscale.lowbit.in_blocks import find_reshaper, owner_path_of
from jaxscale.lowbit.quantize import block_of, decode, encode, is_quantized, zeros
from jaxscale.trees import leaf_bytes, path_name
from jaxscale.typing import Params

MomentsFormat = Literal["float32", "int8", "dynamic8", "int4", "fp8"]
"""Format of the moments in an optimizer's state between steps."""

_FORMATS: Mapping[str, tuple[str, str, int]] = {
    "int8": ("soft8", "sqrt8", 256),
    "dynamic8": ("dynamic8", "dynamic8_unsigned", 256),
    "int4": ("dynamic4", "linear4_unsigned", 128),
    "fp8": ("e4m3", "sqrt_e4m3", 256),
}
"""(map of signed fields, map of unsigned fields, largest block) of each format."""

SIGNED_FIELDS = ("mu", "trace", "momentum", "m", "m1", "m2", "exp_avg", "velocity")
"""Names of state fields, in optax and elsewhere, that are first moments."""
UNSIGNED_FIELDS = ("nu", "nu_max", "v", "exp_avg_sq")
"""Names of state fields, in optax and elsewhere, that are second moments."""
NEVER_QUANTIZED: Mapping[str, str] = {
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
"""For each state field that must never be quantized, by name: what the field holds, and why that must be exact."""


@dataclasses.dataclass(frozen=True)
class StatePolicy:
    """Selects the leaves of an optimizer's state to quantize.

    Args:
        skip: regular expression searched in a parameter's path ("blocks/layers/mlp/up/weight"); the state of matching
            parameters stays float32.
        least: smallest number of elements, over all layers, of a parameter whose state is quantized.
        block: largest number of elements of a column that share a scale; `None` for 256, or 128 in 4 bits.
        signed: names of state fields that are quantized as values of both signs.
        unsigned: names of state fields that are quantized as values >= 0.

    Example:
        >>> StatePolicy(signed=("x0",))
        Traceback (most recent call last):
        jaxscale.errors.UserError: field 'x0' must stay float32, because it holds weights: leave it out
    """

    skip: str = r"embed|norm|bias|(^|[/_])(head|wte|wpe|scale)(/|$)"
    least: int = 4096
    block: int | None = None
    signed: tuple[str, ...] = SIGNED_FIELDS
    unsigned: tuple[str, ...] = UNSIGNED_FIELDS

    def __post_init__(self) -> None:
        for name in (*self.signed, *self.unsigned):
            if name in NEVER_QUANTIZED:
                raise UserError(
                    f"field {name!r} must stay float32, because it holds {NEVER_QUANTIZED[name]}: leave it out"
                )
        shared_names = sorted(set(self.signed) & set(self.unsigned))
        if shared_names:
            raise UserError(f"field {shared_names[0]!r} is both signed and unsigned; list it in only one of the two")
        if self.block is not None and self.block < 1:
            raise UserError(f"block: got {self.block}, expected a number of elements >= 1")
        try:
            re.compile(self.skip)
        except re.error as error:
            raise UserError(f"skip: {self.skip!r} is not a regular expression: {error}") from None


class NothingQuantized(UserError):
    """An optimizer's state has no leaf that would be quantized.

    Args:
        abstract_state: the state.
        states: format of the moments.
        least: smallest number of elements of a parameter whose state is quantized.

    Attributes:
        reason: sentences, each after a space, on why fields of the state must stay float32; "" if there are none.
        least: the argument `least`.
    """

    def __init__(self, abstract_state: Any, states: str, least: int) -> None:
        paths_and_leaves = jax.tree_util.tree_flatten_with_path(abstract_state)[0]
        paths = sorted(path_name(path) for path, leaf in paths_and_leaves if leaf.ndim > 0)
        field_by_reason = {
            reason: name for path in paths for name, reason in NEVER_QUANTIZED.items() if name in path.split("/")
        }
        paths_text = ", ".join(paths[:3]) + (", ..." if len(paths) > 3 else "") if paths else "it has no arrays"
        self.least = least
        self.reason = "".join(f" Field {name} holds {reason}." for reason, name in field_by_reason.items())
        super().__init__(
            f"states {states!r} would quantize no leaf of this optimizer's state ({paths_text}).{self.reason} "
            f"Expected moments (mu, nu, trace, ...) of matrices of {least:,} numbers or more outside embedding, head "
            "and norms. Use states='float32', or choose the leaves by the argument policy of quantize_state"
        )


def map_params(
    function: Callable[..., Any],
    rule: optax.GradientTransformation,
    state: Any,
    *param_trees: Any,
    transform_non_params: Callable[[Any], Any],
) -> Any:
    """Map a function over the leaves of an optimizer's state that belong to parameters, like `optax.tree.map_params`.

    A quantized array is one leaf. The function is not called for parameters that `optax.masked`, `multi_transform` or
    `partition` keep away from a rule.

    Args:
        function: function to map. Its arguments are a leaf and, from each of `param_trees`, the node of the leaf's
            parameter.
        rule: the transformation.
        state: the transformation's state.
        param_trees: trees like the parameters.
        transform_non_params: function of every other leaf.
    """

    def map_node(node: Any, *param_nodes: Any) -> Any:
        return node if isinstance(node, optax.MaskedNode) else function(node, *param_nodes)

    return optax.tree.map_params(
        rule,
        map_node,
        state,
        *param_trees,
        transform_non_params=transform_non_params,
        is_leaf=lambda node: isinstance(node, optax.MaskedNode) or is_quantized(node),
    )


def quantize_state(
    rule: optax.GradientTransformation,
    states: MomentsFormat = "int8",
    policy: StatePolicy = StatePolicy(),
    *,
    local: Params | None = None,
    layers: Params | None = None,
    exact: Params | None = None,
    platform: str | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Return an optax transformation with its moments in 8 or 4 bits between steps.

    `map_params` works on the transformation's state.

    Args:
        rule: any optax transformation, including chains, masks, `multi_transform` and `inject_hyperparams`.
        states: format of the moments: "int8" (`soft8` and `sqrt8`), "dynamic8" (bitsandbytes' map), "int4" or "fp8";
            "float32" returns the rule unchanged.
        policy: selection of the leaves to quantize.
        local: tree like the parameters, with their `Sharding`s or with the shapes of one device's shards. Blocks then
            divide every shard; without `local`, blocks divide the global shape.
        layers: tree of bools like the parameters, true if the first dim is stacked layers, along which no block lies.
            By default, blocks lie along the second-last dim of every array of two dims or more.
        exact: tree of bools like the parameters, true if the state of the parameter stays float32; by default, all
            values are false.
        platform: platform on which updates run, "tpu", "gpu" or "cpu"; `None` for the platform that a program is
            compiled for.

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
        params = _without_variables(params)
        abstract_state = jax.eval_shape(base_rule.init, params)
        maps_and_blocks = _choose_maps(abstract_state, params, states, policy, (local, layers, exact))
        if not any(maps_and_blocks):
            raise NothingQuantized(abstract_state, states, policy.least)
        state_leaves, treedef = jax.tree.flatten(base_rule.init(params))

        def quantize_leaf(leaf: Any, map_and_block: tuple[str, int] | None, is_zero: bool) -> Any:
            if map_and_block is None:
                return leaf
            return zeros(leaf.shape, *map_and_block) if is_zero else encode(leaf, *map_and_block)

        return treedef.unflatten(map(quantize_leaf, state_leaves, maps_and_blocks, _zero_flags(base_rule.init, params)))

    def update(updates: Any, state: Any, params: Any = None, **extra_args: Any) -> tuple[Any, Any]:
        """Return the updates for the gradients `updates`, and the new state."""

        def update_float32(float32_state: Any) -> tuple[Any, Any]:
            """Return the rule's updates and new state for a float32 state."""
            return base_rule.update(updates, float32_state, params, **extra_args)

        def new_state_in_blocks(quantized_state: Any) -> Any:
            """Return the rule's new float32 state for a quantized state, computed on blocks if the rule allows it."""
            reshaper = None if extra_args else find_reshaper(base_rule, updates, quantized_state)
            if reshaper is None:
                return update_float32(_decode_disguised(quantized_state, threshold=-1.0, repeated=True))[1]
            blocked_state = reshaper.to_blocks(quantized_state)
            blocked_gradients, blocked_weights = (
                reshaper.disguise(reshaper.to_blocks(tree), blocked_state) for tree in (updates, params)
            )
            return base_rule.update(
                blocked_gradients, _decode_disguised(blocked_state, threshold=-1.0, repeated=True), blocked_weights
            )[1]

        update_by_platform = {
            "cpu": functools.partial(_update_once, update_float32),
            "tpu": functools.partial(
                _update_recomputed, update_float32, repeated=True, state_for_scales=new_state_in_blocks
            ),
            "default": functools.partial(_update_recomputed, update_float32, repeated=False),
        }
        if platform is not None:
            return update_by_platform[platform if platform in update_by_platform else "default"](state)
        return jax.lax.platform_dependent(state, **update_by_platform)

    return optax.GradientTransformationExtraArgs(init, update)


def _without_variables(params: Any) -> Any:
    """Return parameters with each Flax variable replaced by its array; `nnx.Optimizer` passes variables to `update`.

    A variable cannot hold a quantized array, which is a pytree of two arrays.
    """

    def is_variable(leaf: Any) -> bool:
        return hasattr(leaf, "get_metadata") and hasattr(leaf, "get_value")

    return jax.tree.map(lambda leaf: leaf.get_value() if is_variable(leaf) else leaf, params, is_leaf=is_variable)


def dequantize(state: Any, *, repeated: bool = False) -> Any:
    """Return a state with its quantized arrays decoded to float32, which is a state of the wrapped rule.

    Args:
        state: state of `quantize_state`.
        repeated: whether to broadcast the scales, as in `quantize.pair_with_scales`.
    """
    return _map_quantized(functools.partial(decode, repeated=repeated), state)


def quantized_shardings(state: Any, shardings: Any) -> Any:
    """Return a tree with the shardings of codes and scales, from a tree with one sharding per quantized array.

    Both have the sharding of the array, because codes have the array's shape and blocks divide its shards.

    Args:
        state: state with `Quantized` nodes, of arrays or shapes.
        shardings: tree like the state, with a `Sharding` or `PartitionSpec` for each leaf and each quantized array.
    """
    return _map_quantized(lambda q, sharding: dataclasses.replace(q, codes=sharding, scale=sharding), state, shardings)


def quantized_bytes_and_size(state: Any) -> tuple[int, int]:
    """Return (number of bytes, number of elements) of all quantized arrays of a state together.

    Args:
        state: state with `Quantized` nodes, of arrays or shapes.

    Example:
        >>> quantized_bytes_and_size({"mu": zeros((256, 4), "soft8", 256), "count": jnp.zeros(())})
        (1040, 1024)
    """
    quantized_arrays = [leaf for leaf in jax.tree.leaves(state, is_leaf=is_quantized) if is_quantized(leaf)]
    return sum(leaf_bytes(q.codes) + leaf_bytes(q.scale) for q in quantized_arrays), sum(
        q.size for q in quantized_arrays
    )


def _update_once(update: Any, state: Any) -> tuple[Params, Any]:
    """Decode, update and encode a state, with one run of the rule: for CPUs, where arithmetic is the bottleneck.

    Args:
        update: function from a state in float32 to the updates and the new state.
        state: quantized state.

    Returns:
        The updates and the new quantized state.
    """
    updates, new_state = update(dequantize(state))
    return updates, _map_quantized(lambda q, array: encode(array, q.map, q.block, by_rows=True), state, new_state)


def _update_recomputed(update: Any, state: Any, repeated: bool, state_for_scales: Any = None) -> tuple[Any, Any]:
    """Decode, update and encode a state; the rule runs three times, for updates, for scales and for codes.

    XLA would otherwise store float32 moments: up to 3.5 bytes per parameter on H100 (dynamic map), and 10 on v5e
    (`int8`). XLA drops optimization barriers before common-subexpression elimination, so the three runs must differ as
    expressions.

    Args:
        update: function from a state in float32 to the updates and the new state.
        state: quantized state.
        repeated: whether to broadcast the scales, as in `quantize.pair_with_scales`.
        state_for_scales: function from the quantized state to the new float32 state whose scales are computed; `None`
            computes this state by `update`.

    Returns:
        The updates and the new quantized state.
    """
    updates, new_state = update(dequantize(state, repeated=repeated))

    def recompute_state(threshold: float) -> Any:
        """Recompute the new float32 state by expressions that contain `threshold`, so that XLA does not merge them."""
        return update(_decode_disguised(state, threshold=threshold, repeated=repeated))[1]

    scale_state = state_for_scales(state) if state_for_scales else recompute_state(-1.0)
    code_state = recompute_state(-2.0)

    def encode_leaf(q: Any, scale_array: Any, code_array: Any, _: Any) -> Any:
        """Return a new quantized array like `q`, with the scales of `scale_array` and the codes of `code_array`."""
        scale = quantize.compute_scales(scale_array, q.map, q.block).reshape(q.scale.shape)
        codes = quantize.compute_codes(code_array, scale, q.map, q.block, repeated=repeated)
        return dataclasses.replace(q, codes=codes, scale=scale)

    return updates, _map_quantized(encode_leaf, state, scale_state, code_state, new_state)


def _decode_disguised(state: Any, *, threshold: float, repeated: bool) -> Any:
    """Decode a state by an expression that differs with `threshold`, so that XLA does not merge two such expressions.

    Codes would become 0 if their scale were below `threshold`, which is negative. No scale is negative, but XLA cannot
    infer this.
    """

    def disguise(q: Any) -> Any:
        """Return a quantized array with equal codes, computed by an expression that contains `threshold`."""
        codes, scale = quantize.pair_with_scales(q.codes, q.scale, repeated)
        disguised_codes = jnp.where(scale < threshold, jnp.zeros((), codes.dtype), codes)
        return dataclasses.replace(q, codes=disguised_codes.reshape(q.shape))

    return dequantize(_map_quantized(disguise, state), repeated=repeated)


def _map_quantized(function: Any, state: Any, *trees: Any) -> Any:
    """Map a function over the quantized arrays of a state, each together with the nodes of `trees` at the same path.

    All other leaves of the returned tree are those of the last tree.
    """

    def map_node(*nodes: Any) -> Any:
        return function(*nodes) if is_quantized(nodes[0]) else nodes[-1]

    return jax.tree.map(map_node, state, *trees, is_leaf=is_quantized)


def _choose_maps(
    abstract_state: Any, params: Params, format_name: str, policy: StatePolicy, fact_trees: Sequence[Params | None]
) -> list[tuple[str, int] | None]:
    """Return (map name, block) for each leaf of a state; `None` for a leaf that stays float32.

    `params`, `policy` and `format_name` (its `states`) are arguments of `quantize_state`; `fact_trees` are its `local`,
    `layers` and `exact`.
    """
    local_shape_tree, stacked_flag_tree, exact = fact_trees
    signed_map, unsigned_map, max_block = _FORMATS[format_name]
    paths_and_params, treedef = jax.tree_util.tree_flatten_with_path(params)
    shardings_or_shapes: list[Any] = (
        [None] * len(paths_and_params) if local_shape_tree is None else treedef.flatten_up_to(local_shape_tree)
    )
    stacked_flags: list[Any] = (
        [False] * len(paths_and_params) if stacked_flag_tree is None else treedef.flatten_up_to(stacked_flag_tree)
    )
    exact_flags: list[Any] = [False] * len(paths_and_params) if exact is None else treedef.flatten_up_to(exact)
    map_by_field = dict.fromkeys(policy.unsigned, unsigned_map) | dict.fromkeys(policy.signed, signed_map)
    # (shape, sharding or local shape, whether the first dim is layers, whether the state stays float32) of a parameter
    facts_by_path = {
        path: (param.shape, *sharding_and_flags)
        for (path, param), *sharding_and_flags in zip(
            paths_and_params, shardings_or_shapes, stacked_flags, exact_flags, strict=True
        )
    }

    def choose_map(path: tuple[Any, ...], leaf: Any) -> tuple[str, int] | None:
        """Return (map name, block) for the leaf at this path of the state; `None` for a leaf that stays float32."""
        owner_path = owner_path_of(path, facts_by_path)
        if owner_path is None or owner_path == path or not jnp.issubdtype(leaf.dtype, jnp.floating):
            return None
        shape, sharding_or_shape, is_stacked, is_exact = facts_by_path[owner_path]
        field_name = path_name(path[: len(path) - len(owner_path)][-1:])
        map_name = map_by_field.get(field_name)
        if is_exact or map_name is None or leaf.shape != shape or re.search(policy.skip, path_name(owner_path)):
            return None
        local_shape = _local_shape(shape, sharding_or_shape)  # that of one of the copies on an asynchronous pipeline
        if len(local_shape) - is_stacked < 2 or math.prod(shape) < policy.least:
            return None
        return map_name, block_of(local_shape[-2], policy.block or max_block)

    paths_and_leaves, _ = jax.tree_util.tree_flatten_with_path(abstract_state)
    return [choose_map(path, leaf) for path, leaf in paths_and_leaves]


def _local_shape(shape: tuple[int, ...], sharding_or_shape: Any) -> tuple[int, ...]:
    """Return the shape of one device's shard.

    Args:
        shape: shape of the whole array.
        sharding_or_shape: the array's `Sharding`, or the shard's shape; `None` if the array is not sharded.
    """
    if sharding_or_shape is None:
        return shape
    if isinstance(sharding_or_shape, Sharding):
        return sharding_or_shape.shard_shape(shape)
    return tuple(getattr(sharding_or_shape, "shape", sharding_or_shape))


def _zero_flags(init: Any, params: Params) -> list[bool]:
    """Return for each leaf of a state whether the traced program of `init` returns zeros for it."""
    closed_jaxpr = jax.make_jaxpr(init)(params)
    return [_is_zero(closed_jaxpr.jaxpr, variable) for variable in closed_jaxpr.jaxpr.outvars]


def _is_zero(jaxpr: Any, atom: Any) -> bool:
    """Return whether an atom (a variable or literal) of a program is the constant 0, perhaps broadcast."""
    if hasattr(atom, "val"):
        return bool(jnp.size(atom.val) == 1 and atom.val == 0)
    equation = next((candidate for candidate in jaxpr.eqns if atom in candidate.outvars), None)
    if equation is None:
        return False
    if equation.primitive.name in ("broadcast_in_dim", "convert_element_type", "copy", "reshape"):
        return _is_zero(jaxpr, equation.invars[0])
    inner_jaxpr = equation.params.get("jaxpr")
    if equation.primitive.name in ("jit", "pjit") and inner_jaxpr is not None:
        return _is_zero(inner_jaxpr.jaxpr, inner_jaxpr.jaxpr.outvars[equation.outvars.index(atom)])
    return False
