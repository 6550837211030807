"""attend: attention by one of several implementations, and the selection of the implementation.

| implementation | file | stores | used for |
|---|---|---|---|
| plain | attend_on_mesh | T x S scores per head | short sequences, decoding; defines the results |
| chunked | attention_chunked | chunk x chunk scores per head | long sequences anywhere |
| tpu, gpu | attention_kernel | no scores | TPU; GPUs of compute capability 9.0 |
| splash | attention_splash | no scores | TPU, for calls that our kernel does not support |
| cudnn | attention_kernel | no scores | NVIDIA GPUs; selected only by name |
"""

import functools
import math
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jaxscale.errors import UserError, unknown
from jaxscale.layers.attention_chunked import attend_chunked
from jaxscale.layers.attention_kernel import KERNELS, attend_kernel, why_not_kernel
from jaxscale.layers.attention_splash import attend_splash, why_not_splash
from jaxscale.layers.traced_device import note_selection, traced_device
from jaxscale.typing import Array, Float, Int
from pallas_kernels.attention.reference import UNSEEN, scores
from pallas_kernels.attention.visibility import Visibility

AttentionImplementation = Literal["auto", "plain", "chunked", "tpu", "gpu", "cudnn", "splash"]

MAX_PLAIN_SCORES = 512 * 512
"""Largest number of scores per head for which "auto" selects plain. On a CPU, chunks of 256 are as fast as plain at
this number of scores, and faster above it."""


def attend(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
    *,
    causal: bool = True,
    q_positions: Int[Array, "#B T"] | None = None,
    kv_positions: Int[Array, "#B S"] | None = None,
    q_segments: Int[Array, "#B T"] | None = None,
    kv_segments: Int[Array, "#B S"] | None = None,
    window: int | Int[Array, ""] | None = None,
    soft_cap: float | None = None,
    scale: float | None = None,
    implementation: str = "auto",
    chunk: int = 256,
) -> Float[Array, "B T N H"]:
    """Compute attention: `softmax(cap(scale * q k^T)) v` over the keys that each query sees, `cap(s) = c tanh(s / c)`.

    Query head n reads key head n // (N / K). A query that sees no key has zeros as output and as gradients.

    Args:
        q, k, v: queries, keys, values, of any float type. Scores and softmax are computed in float32.
        causal: whether queries do not see keys at later positions.
        q_positions, kv_positions: positions of queries and of keys; the index in the row by default.
        q_segments, kv_segments: segments of queries and of keys; a query sees keys of its segment only. Segment 0 is
            padding, which sees no key and is seen by no query.
        window: number of positions that a query sees: keys with 0 <= q_position - kv_position < window.
        soft_cap: cap c of the scores; `None` for no cap.
        scale: factor of the scores; 1 / sqrt(H) by default.
        implementation: "plain" or "chunked"; "tpu", "gpu", "cudnn" or "splash" on a device that has this kernel; or
            "auto", which selects the first of the following that supports the call: our kernel for the platform,
            splash on a TPU, plain up to 512 * 512 scores per head, chunked.
        chunk: number of queries and of keys in a chunk of "chunked".

    Returns:
        The attention output, in the type of `q`.

    Raises:
        UserError: the implementation is unknown or does not support the call, or the array shapes are incompatible.

    Example:
        >>> import jax.numpy as jnp
        >>> q, k = jnp.ones((1, 3, 4, 8)), jnp.ones((1, 3, 2, 8))
        >>> v = jnp.arange(3.0).reshape(1, 3, 1, 1) * jnp.ones((1, 1, 2, 8))
        >>> attend(q, k, v)[0, :, 0, 0].tolist()
        [0.0, 0.5, 1.0]
    """
    head_count, kv_head_count = q.shape[2], k.shape[2]
    if head_count % kv_head_count:
        raise UserError(
            f"attention: got {head_count} query heads, expected a multiple of the {kv_head_count} key heads"
        )
    if (q_segments is None) != (kv_segments is None):
        raise UserError("attention: got segments of only the queries or only the keys; pass segments of both")
    if window is not None and not causal:
        raise UserError(
            "attention: got a window, which looks back from a query, with causal=False; leave one of them out"
        )
    if isinstance(window, int) and window < 1:
        raise UserError(f"attention: got window {window}, expected at least 1 position")
    if chunk < 1:
        raise UserError(f"attention: got chunk {chunk}, expected at least 1 position")
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    visibility = Visibility(q_positions, kv_positions, q_segments, kv_segments, window, causal)
    score_settings: dict[str, Any] = {"scale": scale, "soft_cap": soft_cap}
    selection, reason = _choose_implementation(implementation, q, k, v, visibility, score_settings)
    if selection in KERNELS:
        return attend_kernel(q, k, v, visibility, implementation=selection, **score_settings)
    note_selection("attention", selection, reason)
    if selection == "splash":
        platform = traced_device()[0]
        if platform != "tpu":
            raise UserError(f"attention 'splash': got platform {platform}, expected tpu; use 'chunked' or 'auto'")
        return attend_splash(q, k, v, visibility, **score_settings)
    if selection == "plain":
        return _attend_plain(q, k, v, visibility, scale, soft_cap)
    scaled_q, remaining_scale = _scale_queries(q, scale)
    return attend_chunked(scaled_q, k, v, visibility, scale=remaining_scale, soft_cap=soft_cap, chunk=chunk)


def _scale_queries(q: Any, scale: float) -> tuple[Any, float]:
    """Return (queries, factor of their scores): scaled `q` and 1, or `q` and `scale` if scaling would round `q`."""
    if q.dtype == jnp.float32 or math.frexp(scale)[0] == 0.5:
        return q * jnp.asarray(scale, q.dtype), 1.0
    return q, scale


def _attend_plain(q: Any, k: Any, v: Any, visibility: Visibility, scale: float, soft_cap: float | None) -> Any:
    """Compute attention with all scores at once; the backward pass keeps the probabilities in the type of `v`."""
    batch_size, query_count, head_count, head_dim = q.shape
    key_count, kv_head_count = k.shape[1:3]
    is_grouped = head_count != kv_head_count
    grouped_shape = (batch_size, query_count, kv_head_count, head_count // kv_head_count, head_dim)
    scaled_q, remaining_scale = _scale_queries(q.reshape(grouped_shape) if is_grouped else q, scale)
    attention_scores = scores(scaled_q, k, remaining_scale, soft_cap)
    is_visible, may_be_blind = None, False
    if not visibility.is_trivial:
        is_visible = visibility.mask(jnp.arange(query_count), jnp.arange(key_count))
        is_visible = jnp.expand_dims(is_visible, (1, 2) if is_grouped else 1)
        may_be_blind = visibility.may_be_blind(query_count, key_count)
    probabilities = _softmax(attention_scores, is_visible, may_be_blind, v.dtype)
    output = jnp.einsum("bkgts,bskh->btkgh" if is_grouped else "bnts,bsnh->btnh", probabilities, v)
    return checkpoint_name(output.reshape(batch_size, query_count, head_count, head_dim), "attention_out")


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _softmax(attention_scores: Any, is_visible: Any, may_be_blind: bool, dtype: Any) -> Any:
    """Return the softmax over the visible keys in the type `dtype`; the backward pass keeps only this result.

    Args:
        attention_scores: scores of the keys, float32 [..., T, S].
        is_visible: bool array that broadcasts to the scores; `None` if all keys are visible.
        may_be_blind: whether a query may see no key; the probabilities of such a query are 0.
        dtype: type of the probabilities.
    """
    if is_visible is None:
        return jax.nn.softmax(attention_scores, -1).astype(dtype)
    probabilities = jax.nn.softmax(jnp.where(is_visible, attention_scores, UNSEEN), -1)
    if may_be_blind:
        probabilities = jnp.where(jnp.any(is_visible, -1, keepdims=True), probabilities, 0.0)
    return probabilities.astype(dtype)


def _softmax_forward(attention_scores: Any, is_visible: Any, may_be_blind: bool, dtype: Any) -> Any:
    probabilities = _softmax(attention_scores, is_visible, may_be_blind, dtype)
    return probabilities, probabilities


def _softmax_backward(may_be_blind: bool, dtype: Any, probabilities: Any, gradient: Any) -> Any:
    """Return the gradient of the scores, p * (g - sum(p * g)); an unseen key has p = 0."""
    probabilities, gradient = probabilities.astype(jnp.float32), gradient.astype(jnp.float32)
    products = probabilities * gradient
    return products - probabilities * jnp.sum(products, -1, keepdims=True), None


_softmax.defvjp(_softmax_forward, _softmax_backward)


def _choose_implementation(
    implementation: str, q: Any, k: Any, v: Any, visibility: Visibility, score_settings: dict[str, Any]
) -> tuple[str, str]:
    """Return (selected implementation, reason why the platform's kernel is not selected)."""
    if implementation not in get_args(AttentionImplementation):
        raise unknown("implementation of attention", implementation, get_args(AttentionImplementation))
    if implementation != "auto":
        return implementation, f"{implementation} is named"
    platform, (query_count, key_count) = traced_device()[0], (q.shape[1], k.shape[1])
    reason = "kernels are for TPU and GPU"
    if platform in ("tpu", "gpu"):
        refusal = why_not_kernel(platform, q, k, v, visibility, **score_settings)
        if refusal is None:
            return platform, ""
        reason = refusal.removeprefix(f"attention: implementation '{platform}' cannot run: ").removesuffix(".")
    if platform == "tpu" and why_not_splash(query_count, key_count, visibility) is None:
        return "splash", reason
    return "plain" if query_count * key_count <= MAX_PLAIN_SCORES else "chunked", reason
