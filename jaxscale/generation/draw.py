"""The draw of one token for each row: the most likely token, or a random token from a filtered distribution.

The filters need thresholds: the k-th largest logit, or the lowest probability among the most likely tokens that
together reach a given probability. A sort of the vocabulary would find these thresholds at a higher cost. Here the 32
bits of a threshold are found one by one, each by one sum over the vocabulary. The threshold is exact, and the program
does not depend on the value of k.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxscale.generation.sampling import Sampling
from jaxscale.typing import Array, Bool, Float, Int


class DrawKind(NamedTuple):
    """The static settings of a draw. Each kind has compiled programs of its own.

    Args:
        is_greedy: whether the most likely token is drawn.
        has_top_k, has_top_p, has_min_p: which filters apply.
        id_limit: exclusive upper limit of the drawn ids.
    """

    is_greedy: bool
    has_top_k: bool
    has_top_p: bool
    has_min_p: bool
    id_limit: int


class DrawSettings(NamedTuple):
    """The settings of a draw that a compiled program takes as arguments, as `Sampling` describes them.

    Args:
        temperature, top_p, min_p: float32 scalars.
        top_k: int32 scalar.
        stop_ids: int32 [n], ids of tokens that end a row, padded with -1.
    """

    temperature: Any
    top_k: Any
    top_p: Any
    min_p: Any
    stop_ids: Any


def kind_of(sampling: Sampling, id_limit: int) -> DrawKind:
    """Return the static settings of the draws that `sampling` describes."""
    is_greedy = sampling.temperature == 0
    filter_flags = [
        not is_greedy and threshold is not None for threshold in (sampling.top_k, sampling.top_p, sampling.min_p)
    ]
    return DrawKind(is_greedy, filter_flags[0], filter_flags[1], filter_flags[2], id_limit)


def settings_of(sampling: Sampling) -> DrawSettings:
    """Return the settings of `sampling` that a compiled program takes as arguments."""
    stop_id_count = -(-max(len(sampling.stop_ids), 1) // 8) * 8  # a multiple of 8: fewer shapes to compile for
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
        settings: the settings that are arguments of the program.
    """
    choice_logits = logits[:, : kind.id_limit].astype(jnp.float32)
    if kind.is_greedy:
        return jnp.argmax(choice_logits, axis=-1).astype(jnp.int32)
    return jax.vmap(jax.random.categorical)(keys, filtered_logits(choice_logits, kind, settings)).astype(jnp.int32)


def filtered_logits(logits: Float[Array, "B V"], kind: DrawKind, settings: DrawSettings) -> Float[Array, "B V"]:
    """Return the logits divided by the temperature, with minus infinity for tokens that the filters remove."""
    scaled_logits = logits / jnp.maximum(settings.temperature, 1e-6)
    if kind.has_top_k:
        order_keys = _order_keys(scaled_logits)
        is_in_top_k = order_keys >= _threshold(
            order_keys, lambda is_selected: jnp.sum(is_selected, -1) >= settings.top_k
        )
        scaled_logits = jnp.where(is_in_top_k, scaled_logits, -jnp.inf)
    if kind.has_top_p:
        probabilities = jax.nn.softmax(scaled_logits, -1)
        order_keys = _order_keys(probabilities)

        def has_mass(is_selected: Any) -> Any:
            return jnp.sum(jnp.where(is_selected, probabilities, 0.0), -1) >= settings.top_p

        scaled_logits = jnp.where(order_keys >= _threshold(order_keys, has_mass), scaled_logits, -jnp.inf)
    if kind.has_min_p:
        least_logits = jnp.max(scaled_logits, -1, keepdims=True) + jnp.log(settings.min_p)
        scaled_logits = jnp.where(scaled_logits >= least_logits, scaled_logits, -jnp.inf)
    return scaled_logits


def _order_keys(floats: Float[Array, "B V"]) -> Any:
    """Return a uint32 key for each float32 value; the keys sort in the same order as the values."""
    bits = jax.lax.bitcast_convert_type(floats, jnp.uint32)
    sign_bit = jnp.uint32(1 << 31)
    return jnp.where(bits >= sign_bit, ~bits, bits | sign_bit)


def _threshold(order_keys: Any, is_enough: Callable[[Bool[Array, "B V"]], Bool[Array, "B"]]) -> Any:
    """Return the largest threshold of each row, uint32 (B, 1), for which `is_enough` holds.

    `is_enough` is called with the mask of the keys at or above the threshold. If it is false even for all keys of a
    row, the row's threshold is 0.
    """

    def add_bit(bit_index: Any, thresholds: Any) -> Any:
        candidate_thresholds = thresholds | (jnp.uint32(1 << 31) >> bit_index.astype(jnp.uint32))
        return jnp.where(is_enough(order_keys >= candidate_thresholds)[:, None], candidate_thresholds, thresholds)

    return jax.lax.fori_loop(0, 32, add_bit, jnp.zeros((order_keys.shape[0], 1), jnp.uint32))
