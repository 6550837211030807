r"""Any optax transformation with its state kept in 8 or 4 bits.

Between steps the moments are quantized arrays (`quantize.py`); a step decodes them, lets the rule update them in
float32, takes the update from the unrounded moments, and encodes them again (Dettmers et al. 2021, arXiv 2110.02861;
Li et al. 2023, arXiv 2309.01507). XLA fuses all that, so that no float32 moment lies in memory. The state is the rule's
own with `Quantized` in place of some arrays: whatever else works on an optax state works on it.

What is quantized follows from names: of the state's field (`mu`, `nu`, ...: also whether it is signed, which is never
read off the data) and of the parameter (embedding, head, norms and small leaves stay float32, for a block of a column
would mix frequent tokens with rare ones). AdamW's step as one kernel: `fused.py`. Left out: rules of their own such as
`Adam8bit`.
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
from jaxscale.optim.in_blocks import owner_of, views_of
from jaxscale.optim.quantize import beside, block_of, codes, decode, encode, is_quantized, scales, zeros
from jaxscale.trees import leaf_bytes, path_name
from jaxscale.typing import Params

States = Literal["float32", "int8", "dynamic8", "int4", "fp8"]
"""How an optimizer's state is kept between steps."""

_MAPS: Mapping[str, tuple[str, str, int]] = {
    "int8": ("soft8", "sqrt8", 256),
    "dynamic8": ("dynamic8", "dynamic8_unsigned", 256),
    "int4": ("dynamic4", "linear4_unsigned", 128),
    "fp8": ("e4m3", "sqrt_e4m3", 256),
}
"""Maps of signed and of unsigned fields, and the numbers of a column that share a scale at most."""

SIGNED = ("mu", "trace", "momentum", "m", "m1", "m2", "exp_avg", "velocity")
"""Fields of optax states, and usual names elsewhere, of a first moment."""
UNSIGNED = ("nu", "nu_max", "v", "exp_avg_sq")
"""Likewise of a second moment."""
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
    "residual": "what compression still owes, which must be exact",
}
"""Fields that must never be quantized, and why."""


@dataclasses.dataclass(frozen=True)
class StatePolicy:
    """Which leaves of an optimizer's state are quantized.

    Args:
        skip: pattern searched in a parameter's path ("blocks/layers/mlp/up/weight"); what it finds stays float32.
        least: numbers that a parameter must have, all its layers together.
        block: numbers of a column that share a scale, at most; `None` is 256, and 128 in 4 bits.
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
        both = sorted(set(self.signed) & set(self.unsigned))
        if both:
            raise UserError(f"field {both[0]!r} is both signed and unsigned: name it once")
        if self.block is not None and self.block < 1:
            raise UserError(f"block: got {self.block}, expected a number of rows >= 1")
        try:
            re.compile(self.skip)
        except re.error as error:
            raise UserError(f"skip: {self.skip!r} is no regular expression: {error}") from None


def quantize_state(
    rule: optax.GradientTransformation,
    states: States = "int8",
    policy: StatePolicy = StatePolicy(),
    *,
    local: Params | None = None,
    layers: Params | None = None,
    platform: str | None = None,
) -> optax.GradientTransformationExtraArgs:
    """An optax transformation whose moments are kept in a few bits between steps.

    `optax.tree.map_params` works on its state with `is_leaf=is_quantized`.

    Args:
        rule: any optax transformation, of chains, masks, `multi_transform` and `inject_hyperparams` too.
        states: "int8" (companded), "dynamic8" (bitsandbytes' map), "int4", "fp8"; "float32" gives the rule back.
        policy: which leaves.
        local: a tree like the parameters of `Sharding`s, or of the shapes of one device's shards: blocks then divide
            every shard. Without it blocks divide the whole.
        layers: a tree of bools like the parameters: the first dim is stacked layers, along which no block lies. Without
            it blocks lie along the second-last dim of two or more, whatever that is.
        platform: where updates run: "tpu", "gpu" or "cpu"; `None` asks when a program is compiled.

    Returns:
        The transformation. Its `init` raises `UserError` where no leaf would be quantized.

    Raises:
        UserError: no such `states`.

    Example:
        >>> params = {"up": jnp.ones((64, 64)), "norm": jnp.ones(64)}
        >>> rule = quantize_state(optax.adamw(1e-3), "int8")
        >>> mu = rule.init(params)[0].mu
        >>> mu["up"].map, mu["up"].scale.shape, mu["norm"].dtype.name
        ('soft8', (1, 64), 'float32')
    """
    if states not in get_args(States):
        raise unknown("states", states, get_args(States))
    inner = optax.with_extra_args_support(rule)
    if states == "float32":
        return inner

    def init(params: Any) -> Any:
        if not jax.tree.leaves(params):  # optax asks what a state looks like with a placeholder for the parameters
            return inner.init(params)
        shapes = jax.eval_shape(inner.init, params)
        chosen = _choose(shapes, params, states, policy, local, layers)
        if not any(choice is not None for choice in chosen):
            raise UserError(_nothing(shapes, states))
        leaves, treedef = jax.tree.flatten(inner.init(params))
        blank = _zero_leaves(inner.init, params)
        made = [
            leaf if choice is None else zeros(leaf.shape, *choice) if zero else encode(leaf, *choice)
            for leaf, choice, zero in zip(leaves, chosen, blank, strict=True)
        ]
        return treedef.unflatten(made)

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        def stepped(state: Any) -> tuple[Any, Any]:
            return inner.update(updates, state, params, **extra)

        def in_blocks(state: Any) -> Any:
            views = None if extra else views_of(inner, updates, state)
            if views is None:
                return stepped(_decoded(_disguised(state, -1.0, True), True))[1]
            state = views.cut(state)
            seen = [views.disguised(views.cut(tree), state) for tree in (updates, params)]
            return inner.update(seen[0], _decoded(_disguised(state, -1.0, True), True), seen[1])[1]

        ways = {
            "cpu": functools.partial(_once, stepped),
            "tpu": functools.partial(_again, stepped, repeated=True, in_blocks=in_blocks),
            "default": functools.partial(_again, stepped, repeated=False),
        }
        if platform is not None:
            return ways[platform if platform in ways else "default"](state)
        return jax.lax.platform_dependent(state, **ways)

    return optax.GradientTransformationExtraArgs(init, update)


def dequantize(state: Any) -> Any:
    """A state with float32 arrays in place of quantized ones: the state of the rule itself."""
    return _decoded(state)


def placed(state: Any, shardings: Any) -> Any:
    """Shardings of a state, from a tree like it that has one `Sharding` or `PartitionSpec` for each quantized array.

    Codes have the parameter's shape, and blocks divide its shards: codes and scales lie as the parameter does.

    Args:
        state: with `Quantized` nodes, of arrays or shapes.
        shardings: tree of shardings, one for each leaf and each quantized array.
    """
    return jax.tree.map(
        lambda leaf, place: dataclasses.replace(leaf, codes=place, scale=place) if is_quantized(leaf) else place,
        state,
        shardings,
        is_leaf=is_quantized,
    )


def state_bytes(state: Any) -> tuple[int, int]:
    """Bytes of the quantized arrays of a state, and how many numbers they hold.

    Args:
        state: of arrays or shapes.

    Example:
        >>> state_bytes({"mu": zeros((256, 4), "soft8", 256), "count": jnp.zeros(())})
        (1040, 1024)
    """
    found = [leaf for leaf in jax.tree.leaves(state, is_leaf=is_quantized) if is_quantized(leaf)]
    return sum(leaf_bytes(q.codes) + leaf_bytes(q.scale) for q in found), sum(q.size for q in found)


def _once(stepped: Any, state: Any) -> tuple[Params, Any]:
    """Decode, update, encode: for CPU, which is bound by arithmetic and has memory."""
    updates, after = stepped(_decoded(state))
    return updates, _map(lambda q, new: encode(new, q.map, q.block, by_rows=True), state, after)


def _again(stepped: Any, state: Any, repeated: bool, in_blocks: Any = None) -> tuple[Any, Any]:
    """The same, with the rule run once each for updates, scales and codes: each keeps nothing but what it reads.

    XLA would rather keep float32 moments than compute them again: up to 3.5 bytes a parameter on H100 (dynamic map), 10
    on v5e (`int8`). It drops optimization barriers before it looks for equal expressions, so these must differ.

    Args:
        stepped: the rule, of a state in float32.
        state: quantized.
        repeated: how scales meet codes, of `beside`.
        in_blocks: the state that scales are taken of, from the quantized one; `stepped` gives it otherwise.
    """
    updates, after = stepped(_decoded(state, repeated))
    large = in_blocks(state) if in_blocks else stepped(_decoded(_disguised(state, -1.0, repeated), repeated))[1]
    last = stepped(_decoded(_disguised(state, -2.0, repeated), repeated))[1]

    def made(q: Any, first: Any, large: Any, last: Any) -> Any:
        if not is_quantized(q):
            return first
        scale = scales(large, q.map, q.block).reshape(q.scale.shape)
        return dataclasses.replace(q, codes=codes(last, scale, q.map, q.block, repeated=repeated), scale=scale)

    return updates, jax.tree.map(made, state, after, large, last, is_leaf=is_quantized)


def _disguised(state: Any, impossible: float, repeated: bool) -> Any:
    """The same state by another expression: other codes where a scale is less than it can be."""

    def one(q: Any) -> Any:
        if not is_quantized(q):
            return q
        kept, scale = beside(q.codes, q.scale, repeated)
        return dataclasses.replace(
            q, codes=jnp.where(scale < impossible, jnp.zeros((), kept.dtype), kept).reshape(q.shape)
        )

    return jax.tree.map(one, state, is_leaf=is_quantized)


def _map(function: Any, state: Any, after: Any) -> Any:
    return jax.tree.map(lambda q, new: function(q, new) if is_quantized(q) else new, state, after, is_leaf=is_quantized)


def _decoded(state: Any, repeated: bool = False) -> Any:
    return jax.tree.map(
        lambda leaf: decode(leaf, repeated=repeated) if is_quantized(leaf) else leaf, state, is_leaf=is_quantized
    )


def _choose(
    shapes: Any, params: Params, states: str, policy: StatePolicy, local: Params | None, layers: Params | None
) -> list[tuple[str, int] | None]:
    """Map and block of each leaf of a state; `None` keeps it."""
    signed, unsigned, most = _MAPS[states]
    most = policy.block or most
    flat, treedef = jax.tree_util.tree_flatten_with_path(params)
    places: list[Any] = [None] * len(flat) if local is None else jax.tree.leaves(local, is_leaf=_is_local)
    stacked: list[Any] = [False] * len(flat) if layers is None else treedef.flatten_up_to(layers)
    owners = {path: (leaf.shape, *rest) for (path, leaf), *rest in zip(flat, places, stacked, strict=True)}

    def choice(path: tuple[Any, ...], leaf: Any) -> tuple[str, int] | None:
        owner = owner_of(path, owners)
        if owner is None or owner == path or not jnp.issubdtype(leaf.dtype, jnp.floating):
            return None
        shape, place, is_stacked = owners[owner]
        field = path_name(path[: len(path) - len(owner)][-1:])
        map = signed if field in policy.signed else unsigned if field in policy.unsigned else None
        if map is None or leaf.shape != shape or re.search(policy.skip, path_name(owner)):
            return None
        if len(shape) - is_stacked < 2 or math.prod(shape) < policy.least:
            return None
        return map, block_of(_local_shape(shape, place)[-2], most)

    found, _ = jax.tree_util.tree_flatten_with_path(shapes)
    return [choice(path, leaf) for path, leaf in found]


def _is_local(x: Any) -> bool:
    return isinstance(x, Sharding | tuple | jax.ShapeDtypeStruct)


def _local_shape(shape: tuple[int, ...], place: Any) -> tuple[int, ...]:
    if place is None:
        return shape
    if isinstance(place, Sharding):
        return place.shard_shape(shape)
    return tuple(getattr(place, "shape", place))


def _nothing(shapes: Any, states: str) -> str:
    found = jax.tree_util.tree_flatten_with_path(shapes)[0]
    kept = sorted(path_name(path) for path, leaf in found if leaf.ndim > 0)
    reasons = {why: name for path in kept for name, why in NEVER.items() if name in path.split("/")}
    return (
        f"states {states!r} would quantize no leaf of this optimizer's state ("
        + (", ".join(kept[:3]) + (", ..." if len(kept) > 3 else "") if kept else "it has no arrays")
        + ")"
        + "".join(f"; {name}: {why}" for why, name in reasons.items())
        + "; expected moments (mu, nu, trace, ...) of matrices of 4096 numbers or more outside embedding, head and "
        "norms: take states 'float32', or name what to quantize in StatePolicy(signed=..., unsigned=..., least=...)"
    )


def _zero_leaves(init: Any, params: Params) -> list[bool]:
    """Which leaves of a state start as zeros, as the program of `init` shows it."""
    closed = jax.make_jaxpr(init)(params)
    return [_is_zero(closed.jaxpr, variable) for variable in closed.jaxpr.outvars]


def _is_zero(jaxpr: Any, variable: Any) -> bool:
    if hasattr(variable, "val"):
        return bool(jnp.size(variable.val) == 1 and variable.val == 0)
    made = next((eqn for eqn in jaxpr.eqns if variable in eqn.outvars), None)
    if made is None:
        return False
    if made.primitive.name in ("broadcast_in_dim", "convert_element_type", "copy", "reshape"):
        return _is_zero(jaxpr, made.invars[0])
    inner = made.params.get("jaxpr")
    if made.primitive.name in ("jit", "pjit") and inner is not None:
        return _is_zero(inner.jaxpr, inner.jaxpr.outvars[made.outvars.index(variable)])
    return False
