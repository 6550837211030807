r"""Weights as bfloat16 and an 8-bit correction: three bytes each, instead of six with a float32 master copy.

    weight      bfloat16, read by the model
    correction  int8, the rounding error, in units of 2/255 of the weight's unit in the last place

Together the two give the float32 weight to a relative error of 1.54e-5 (2^-8 / 255; bfloat16 alone: 3.9e-3), so that
updates far below bfloat16's precision still add up (FlashOptim, Gonzalez Ortiz et al. 2026, arXiv 2602.23349). With
gradients in bfloat16 and moments in 8 bits, training takes 7 bytes per parameter; mixed-precision Adam takes 16. Left
out: corrections for weights of other dtypes, and corrections of 16 bits, which would be exact and save less. The rule
in `rounding.py` needs no corrections.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxscale.errors import UserError
from jaxscale.lowbit.rounding import in_float32
from jaxscale.typing import Array, Float

_STEPS_PER_HALF_UNIT = 127.5
"""Number of correction steps per half unit in the last place; the largest correction is 127 steps."""


class SplitState(NamedTuple):
    """State of `split_weights`.

    Args:
        correction: tree of int8 arrays like the parameters; `optax.MaskedNode` where a parameter is not bfloat16.
        inner: the rule's state.
    """

    correction: Any
    inner: Any


def split(x: Float[Array, "..."]) -> tuple[Array, Array]:
    """Split a float32 array into bfloat16 numbers and corrections.

    Args:
        x: float32 numbers, of any shape, below 3.39e38 (the largest bfloat16).

    Returns:
        The nearest bfloat16 numbers, and int8 corrections of the same shape.

    Example:
        >>> weight, correction = split(jnp.array([1.001]))
        >>> weight.astype(jnp.float32).tolist(), correction.tolist()
        ([1.0], [33])
        >>> print(join(weight, correction))
        [1.001011]
    """
    weight = x.astype(jnp.bfloat16)
    half_units = (x.astype(jnp.float32) - weight.astype(jnp.float32)) / _half_unit(weight)  # the rounding error
    finite_half_units = jnp.where(jnp.abs(half_units) < jnp.inf, half_units, 0)
    return weight, jnp.clip(jnp.round(finite_half_units * _STEPS_PER_HALF_UNIT), -127, 127).astype(jnp.int8)


def join(weight: Array, correction: Array) -> Float[Array, "..."]:
    """Join bfloat16 values and corrections to float32 values: the inverse of `split`, up to a relative 1.54e-5."""
    return weight.astype(jnp.float32) + correction.astype(jnp.float32) * (1 / _STEPS_PER_HALF_UNIT) * _half_unit(weight)


def split_params(params: Any) -> tuple[Any, Any]:
    """Split float32 parameters into bfloat16 parameters to train and corrections for an initial `SplitState`.

    Args:
        params: tree of float32 arrays.

    Returns:
        The pair (weights, corrections) of trees like `params`. The state of the rule for `params` is
        `rule.init(weights)._replace(correction=corrections)`.
    """
    weight_and_correction_tree = jax.tree.map(split, params)
    return jax.tree.transpose(jax.tree.structure(params), jax.tree.structure((0, 0)), weight_and_correction_tree)


def join_params(params: Any, state: SplitState) -> Any:
    """Return the float32 parameters that a step starts from.

    Args:
        params: parameters; bfloat16 leaves are joined with their corrections, and all other leaves stay unchanged.
        state: state of `split_weights`.
    """

    def join_leaf(correction: Any, param: Array) -> Array:
        return param if _is_masked(correction) else join(param, correction)

    return jax.tree.map(join_leaf, state.correction, params, is_leaf=_is_masked)


def split_weights(rule: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Return an optax transformation of bfloat16 weights with a state that contains the weights' rounding errors.

    Args:
        rule: any optax transformation, including one that `quantize_state` returned; its weights, gradients and state
            are in float32.

    Returns:
        The transformation. Its updates are the float32 differences between new and old rounded weights, so that
        `optax.apply_updates` returns the new rounded weights. For weights of dtypes other than bfloat16, it returns the
        rule's updates.

    Raises:
        UserError: `init` raises it if no parameter is bfloat16, and `update` if `params` is `None`.

    Example:
        >>> params = {"w": jnp.ones((2, 2), jnp.bfloat16)}
        >>> rule = split_weights(optax.sgd(2.0**-11))
        >>> state = rule.init(params)
        >>> for _ in range(4):  # each step is a quarter of the least change of a bfloat16 weight below 1
        ...     updates, state = rule.update(jax.tree.map(jnp.ones_like, params), state, params)
        ...     params = optax.apply_updates(params, updates)
        >>> params["w"].dtype.name, round(float(join_params(params, state)["w"][0, 0]), 4), 1 - 4 * 2.0**-11
        ('bfloat16', 0.998, 0.998046875)
    """
    base_rule = optax.with_extra_args_support(rule)

    def init(params: Any) -> SplitState:
        leaves = jax.tree.leaves(params)
        if leaves and not any(leaf.dtype == jnp.bfloat16 for leaf in leaves):
            raise UserError(
                "split_weights: no parameter is bfloat16; cast them first, or use split_params(params), which keeps "
                "the rounding errors of the cast"
            )

        def zero_correction(leaf: Any) -> Any:
            return jnp.zeros(leaf.shape, jnp.int8) if leaf.dtype == jnp.bfloat16 else optax.MaskedNode()

        return SplitState(jax.tree.map(zero_correction, params), base_rule.init(in_float32(params)))

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, SplitState]:
        """Return the updates for the gradients `updates`, and the new state."""
        if params is None:
            raise UserError("split_weights: update got no params; pass the parameters as its third argument")
        float32_weights = join_params(params, state)
        rule_updates, rule_state = base_rule.update(in_float32(updates), state.inner, float32_weights, **extra)

        def update_and_correction_of(
            correction: Any, old_weight: Array, joined_weight: Array, rule_update: Array
        ) -> tuple[Any, Any]:
            """Return the pair (update of a weight, new correction of the weight)."""
            if _is_masked(correction):
                return rule_update, correction
            new_weight, new_correction = split(joined_weight + rule_update)
            return new_weight.astype(jnp.float32) - old_weight.astype(jnp.float32), new_correction

        update_and_correction_tree = jax.tree.map(
            update_and_correction_of, state.correction, params, float32_weights, rule_updates, is_leaf=_is_masked
        )
        treedef = jax.tree.structure(params)
        new_updates, corrections = map(
            treedef.unflatten, zip(*treedef.flatten_up_to(update_and_correction_tree), strict=True)
        )
        return new_updates, SplitState(corrections, rule_state)

    return optax.GradientTransformationExtraArgs(init, update)


def _half_unit(weight: Array) -> Array:
    """Return half a unit in the last place of bfloat16 numbers: 2^(exponent - 8), at least the least normal float32."""
    exponent = (jax.lax.bitcast_convert_type(weight, jnp.uint16) >> 7).astype(jnp.int32) & 255
    return jax.lax.bitcast_convert_type(jnp.maximum(exponent - 8, 1) << 23, jnp.float32)


def _is_masked(x: Any) -> bool:
    """Return whether a node is a `MaskedNode`, which marks a parameter without a correction."""
    return isinstance(x, optax.MaskedNode)
