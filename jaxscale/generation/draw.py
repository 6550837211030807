"""The draw of one token for each row: the most likely one, or a random one of a filtered distribution.

The filters need thresholds: the k-th largest logit, the least probability in the smallest set of a given mass. A sort
of the vocabulary would find them at a higher cost. Here a threshold is found bit by bit in the 32 bits of a float, each
by one sum over the vocabulary: exact, without a sort, and in a program that is independent of the value of k.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxscale.generation.sampling import Sampling
from jaxscale.typing import Array, Bool, Float, Int


class DrawKind(NamedTuple):
    """The static settings of a draw: the programs of two kinds differ.

    Args:
        is_greedy: whether the most likely token is drawn.
        has_top_k, has_top_p, has_min_p: which filters apply.
        choice_count: exclusive upper limit of the drawn ids.
    """

    is_greedy: bool
    has_top_k: bool
    has_top_p: bool
    has_min_p: bool
    choice_count: int


class DrawSettings(NamedTuple):
    """The settings of a draw that a compiled program takes as arguments, as `Sampling` describes them.

    Args:
        temperature, top_p, min_p: float32 scalars.
        top_k: int32 scalar.
        stop_ids: int32 [n], ids of tokens that end a row, filled up with -1.
    """

    temperature: Any
    top_k: Any
    top_p: Any
    min_p: Any
    stop_ids: Any


def kind_of(sampling: Sampling, choice_count: int) -> DrawKind:
    """Return the static settings of the draws that `sampling` describes."""
    is_greedy = sampling.temperature == 0
    has_filter = [not is_greedy and value is not None for value in (sampling.top_k, sampling.top_p, sampling.min_p)]
    return DrawKind(is_greedy, has_filter[0], has_filter[1], has_filter[2], choice_count)


def settings_of(sampling: Sampling) -> DrawSettings:
    """Return the other settings of the draws that `sampling` describes."""
    stop_id_count = -(-max(len(sampling.stop_ids), 1) // 8) * 8  # few different shapes, so few compilations
    stop_ids = np.full(stop_id_count, -1, np.int32)
    stop_ids[: len(sampling.stop_ids)] = sampling.stop_ids
    # the filters of `Sampling` may exceed int32 or be absent
    top_k, top_p, min_p = min(sampling.top_k or 1, 2**31 - 1), sampling.top_p or 1.0, sampling.min_p or 0.0
    return DrawSettings(
        np.float32(sampling.temperature), np.int32(top_k), np.float32(top_p), np.float32(min_p), stop_ids
    )


def draw(logits: Float[Array, "B V"], keys: Any, kind: DrawKind, settings: DrawSettings) -> Int[Array, "B"]:
    """Return the drawn ids, int32.

    Args:
        logits: logits of the next token.
        keys: random keys, one for each row [B].
        kind: static settings.
        settings: the other settings.
    """
    choice_logits = logits[:, : kind.choice_count].astype(jnp.float32)
    if kind.is_greedy:
        return jnp.argmax(choice_logits, axis=-1).astype(jnp.int32)
    return jax.vmap(jax.random.categorical)(keys, filtered(choice_logits, kind, settings)).astype(jnp.int32)


def filtered(logits: Float[Array, "B V"], kind: DrawKind, settings: DrawSettings) -> Float[Array, "B V"]:
    """Return the logits divided by the temperature, and minus infinity for tokens that the filters remove."""
    scaled_logits = logits / jnp.maximum(settings.temperature, 1e-6)
    if kind.has_top_k:
        keys = _ordered_bits(scaled_logits)
        is_likely = keys >= _threshold(keys, lambda selected: jnp.sum(selected, -1) >= settings.top_k)
        scaled_logits = jnp.where(is_likely, scaled_logits, -jnp.inf)
    if kind.has_top_p:
        probabilities = jax.nn.softmax(scaled_logits, -1)
        keys = _ordered_bits(probabilities)

        def has_mass(selected: Any) -> Any:
            return jnp.sum(jnp.where(selected, probabilities, 0.0), -1) >= settings.top_p

        scaled_logits = jnp.where(keys >= _threshold(keys, has_mass), scaled_logits, -jnp.inf)
    if kind.has_min_p:
        least_logits = jnp.max(scaled_logits, -1, keepdims=True) + jnp.log(settings.min_p)
        scaled_logits = jnp.where(scaled_logits >= least_logits, scaled_logits, -jnp.inf)
    return scaled_logits


def _ordered_bits(numbers: Float[Array, "B V"]) -> Any:
    """Return uint32 keys in the order of the float32 numbers."""
    bits = jax.lax.bitcast_convert_type(numbers, jnp.uint32)
    sign_bit = jnp.uint32(1 << 31)
    return jnp.where(bits >= sign_bit, ~bits, bits | sign_bit)


def _threshold(keys: Any, is_enough: Callable[[Bool[Array, "B V"]], Bool[Array, "B"]]) -> Any:
    """Return the largest threshold (B, 1) for which the keys at or above it are enough; 0 if all keys are too few."""

    def add_bit(index: Any, thresholds: Any) -> Any:
        candidates = thresholds | (jnp.uint32(1 << 31) >> index.astype(jnp.uint32))
        return jnp.where(is_enough(keys >= candidates)[:, None], candidates, thresholds)

    return jax.lax.fori_loop(0, 32, add_bit, jnp.zeros((keys.shape[0], 1), jnp.uint32))
