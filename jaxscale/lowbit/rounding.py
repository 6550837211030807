r"""Stochastic rounding to bfloat16: numbers are rounded up or down at random, and their mean is the number itself.

Rounding to the nearest always loses an update below half a unit in the last place of a bfloat16 weight; stochastic
rounding keeps the update on average (Gupta et al. 2015, arXiv 1502.02551; for weights in bfloat16, Zamirai et al. 2020,
arXiv 2010.06192). `split_weights.py` also needs no float32 copy of the weights, and its rounding errors are smaller.
"""

import zlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxscale.trees import path_name
from jaxscale.typing import Array, Key


def key_of(seed: int, step: Any, path: str) -> Key:
    """Return the random key of one leaf in one step; it does not depend on the mesh, restarts or the order of leaves.

    Args:
        seed: seed of the run.
        step: index of the step, which may be traced.
        path: name of the leaf.

    Example:
        >>> bool((key_of(0, 3, "mlp/up") == key_of(0, 3, "mlp/up")).all())
        True
    """
    leaf_key = jax.random.fold_in(jax.random.key(seed), zlib.crc32(path.encode()) & 0x7FFFFFFF)
    return jax.random.fold_in(leaf_key, step)


def stochastic_bfloat16(x: Array, key: Key) -> Array:
    """Round float32 numbers to bfloat16, up or down at random, so that the mean over keys is the number itself.

    Args:
        x: float32 array of any shape. NaN, infinities and numbers that bfloat16 represents are unchanged.
        key: key of the random draws.

    Example:
        >>> x = jnp.full(4096, 1 + 2**-10, jnp.float32)  # an eighth of the way from 1 to the next bfloat16
        >>> rounded_x = stochastic_bfloat16(x, jax.random.key(0)).astype(jnp.float32)
        >>> sorted(set(rounded_x.tolist())), bool(abs(rounded_x.mean() - x[0]) < 2e-4)
        ([1.0, 1.0078125], True)
    """
    bits = jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)
    random_bits = jax.random.bits(key, x.shape, jnp.uint16).astype(jnp.uint32)
    rounded_x = jax.lax.bitcast_convert_type((bits + random_bits) & jnp.uint32(0xFFFF0000), jnp.float32)
    return jnp.where(jnp.isfinite(x), rounded_x, x).astype(jnp.bfloat16)


class StochasticState(NamedTuple):
    """State of `stochastic_weights`.

    Args:
        count: number of updates made.
        inner: the rule's state.
    """

    count: Any
    inner: Any


def stochastic_weights(rule: optax.GradientTransformation, seed: int = 0) -> optax.GradientTransformationExtraArgs:
    """Return an optax transformation that rounds weights stochastically to bfloat16, without a float32 copy.

    Args:
        rule: any optax transformation; its weights, gradients and state are in float32.
        seed: seed of the rounding, used together with the index of the update and the weight's path.

    Returns:
        The transformation. `optax.apply_updates` with the transformation's updates returns the rounded weights. For
        weights of dtypes other than bfloat16, the transformation returns the rule's updates.

    Example:
        >>> params = {"w": jnp.ones(4096, jnp.bfloat16)}
        >>> rule = stochastic_weights(optax.sgd(2.0**-10))
        >>> updates, _ = rule.update(params, rule.init(params), params)
        >>> new_weights = optax.apply_updates(params, updates)["w"].astype(jnp.float32)
        >>> bool(abs(new_weights.mean() - (1 - 2**-10)) < 2e-4)  # rounding to the nearest would change none
        True
    """
    base_rule = optax.with_extra_args_support(rule)

    def init(params: Any) -> StochasticState:
        return StochasticState(jnp.zeros((), jnp.int32), base_rule.init(in_float32(params)))

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, StochasticState]:
        """Return the updates for the gradients `updates`, and the new state."""
        float32_weights = in_float32(params)
        rule_updates, rule_state = base_rule.update(in_float32(updates), state.inner, float32_weights, **extra)

        def rounded_update(path: Any, old_weight: Array, float32_weight: Array, rule_update: Array) -> Array:
            """Return the update from the old weight to the new one, which is rounded to bfloat16.

            `float32_weight` is the old weight in float32.
            """
            if old_weight.dtype != jnp.bfloat16:
                return rule_update
            key = key_of(seed, state.count, path_name(path))
            return stochastic_bfloat16(float32_weight + rule_update, key).astype(jnp.float32) - float32_weight

        new_updates = jax.tree_util.tree_map_with_path(rounded_update, params, float32_weights, rule_updates)
        return new_updates, StochasticState(optax.safe_increment(state.count), rule_state)

    return optax.GradientTransformationExtraArgs(init, update)


def in_float32(tree: Any) -> Any:
    """Return a tree with its bfloat16 leaves cast to float32."""
    return jax.tree.map(lambda leaf: leaf.astype(jnp.float32) if leaf.dtype == jnp.bfloat16 else leaf, tree)
