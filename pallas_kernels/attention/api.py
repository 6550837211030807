"""attention(q, k, v): softmax attention with grouped heads, sliding windows, segments and capped scores.

The output and the log-sum-exp of each query's scores carry the residual names of `NAMES`: a rematerialization policy
that keeps them spares the backward a second run of the forward. A call is code of one device; under a mesh, wrap it in
`jax.shard_map`, with keys and values whole along the sequence; queries may be a part of it, given by `query_offset`.
"""

import dataclasses
import functools
import importlib
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.core import Tracer

from pallas_kernels import arguments, dispatch
from pallas_kernels.attention import chunked, reference
from pallas_kernels.attention.problem import Problem
from pallas_kernels.attention.reference import Options
from pallas_kernels.compat import Interpret, align_varying, full_varying_like
from pallas_kernels.dispatch import Choice, Explanation, Implementation
from pallas_kernels.target import COMPILED_TPUS, Target, target

NAMES = ("attention_out", "attention_lse")
"""Residual names: the output, and the log-sum-exp of the scores."""

SHORT = 512 * 512
"""Scores per head up to which the reference is preferred to chunks, where no kernel runs."""

LENGTH = 128
"""Kernels see lengths that are multiples of it, on TPU those that were none of two or four times as many where larger
tiles are worth it; what is added is hidden from all others."""

_LONE_QUERY, _LONE_KEY = -(2**31) + 1, -(2**31)
"""Segment ids of what is added."""


def _tpu(target: Target, problem: Problem) -> str | None:
    from pallas_kernels.attention import tpu

    return tpu.why_unsupported(target, problem)


def _gpu(target: Target, problem: Problem) -> str | None:
    from pallas_kernels.attention import gpu

    return gpu.why_unsupported(target, problem)


def _cudnn(target: Target, problem: Problem) -> str | None:
    from pallas_kernels.attention import cudnn

    return cudnn.why_unsupported(target, problem)


_KERNELS = (
    Implementation("tpu", "tpu", chips=("v4", *COMPILED_TPUS), why_unsupported=_tpu),
    Implementation("gpu", "gpu", needs_hopper=True, why_unsupported=_gpu),
    Implementation("cudnn", "gpu", needs_name=True, why_unsupported=_cudnn),
)
_PLAIN = (Implementation("reference"), Implementation("chunked"))

IMPLEMENTATIONS = tuple(one.name for one in (*_KERNELS, *_PLAIN))


def implementations(problem: Problem) -> tuple[Implementation, ...]:
    """All of them, best first: chunks come before the reference where its scores would be many."""
    plain = _PLAIN if problem.T * problem.S <= SHORT else _PLAIN[::-1]
    return (*_KERNELS, *plain)


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    causal: bool = True,
    window: int | None = None,
    segment_ids: Any = None,
    query_offset: Any = 0,
    logit_soft_cap: float | None = None,
    scale: float | None = None,
    implementation: str | None = None,
    platform: str | None = None,
    tiles: Any = None,
    interpret: Interpret = False,
) -> jax.Array:
    """Attention of queries over the keys they see: `softmax(cap(scale * q k^T)) v`, `cap(s) = c tanh(s / c)`.

    Query head n reads key head n // (N / K). Scores and softmax are float32. A query that sees no key gives zeros; one
    with a value that is not finite gives NaN.

    Args:
        q: queries (B,T,N,H): floating, not float64 for the kernels.
        k, v: keys and values (B,S,K,H) of the same type; N a multiple of K.
        causal: a query sees no key of a later position; positions count from 0 on both sides.
        window: keys that a query sees, its own position's included; causal only.
        segment_ids: integers (B,T) where S is T, or a pair (B,T) and (B,S): a query sees keys of its own id.
        query_offset: position of the first query, where `q` is a part of a sequence: a whole number, or an int32 scalar
            (`jax.lax.axis_index(..) * T`); at least 0. Positions may pass the last key's.
        logit_soft_cap: the scores' bound c.
        scale: of the scores; 1 / sqrt(H) by default.
        implementation: None for the best that runs; "tpu", "gpu", "cudnn", "chunked" or "reference" for that one alone.
        platform: "tpu v5e", "gpu h200", "cpu", where that is known better than from the mesh in force.
        tiles: a named kernel's `Tiles`, instead of the tuned ones.
        interpret: run a named kernel in Pallas' interpreter; "races" also looks for races.

    Returns:
        (B,T,N,H) in the type of `q`.

    Raises:
        ValueError: arguments that fit no implementation; an unknown implementation or platform.
        NotImplementedError: the named implementation cannot run this, or not there.

    Example:
        >>> import jax.numpy as jnp
        >>> q, k = jnp.ones((1, 3, 4, 8)), jnp.ones((1, 3, 2, 8))
        >>> v = jnp.arange(3.0).reshape(1, 3, 1, 1) * jnp.ones((1, 1, 2, 8))
        >>> attention(q, k, v)[0, :, 0, 0].tolist()
        [0.0, 0.5, 1.0]
        >>> print(explain(q, k, v, platform="gpu a100"))
        attention on gpu a100: reference
          not tpu: it is for TPUs, and the target is gpu
          not gpu: it needs compute capability 9.0 (H100, H200), and the target is a100
          not cudnn: cuDNN needs bfloat16 or float16, not float32
          not chunked: reference comes before it

    References:
        Dao, FlashAttention-2 (arXiv 2307.08691). Ainslie et al., GQA (2305.13245). Beltagy et al., Longformer, for
        windows (2004.05150). Gemma 2, for the cap (2408.00118).
    """
    ids = _pair(segment_ids)
    arguments.check_arrays("attention", q=q, k=k, v=v)
    arguments.check_static("attention", causal=causal, window=window, logit_soft_cap=logit_soft_cap, scale=scale)
    offset = _offset(query_offset, q)
    problem = _checked(q, k, v, ids, causal, window, logit_soft_cap, scale, offset)
    if tiles is not None and implementation not in ("tpu", "gpu"):
        raise ValueError(f"attention: tiles belong to a named kernel, 'tpu' or 'gpu', and not to {implementation!r}")
    at = target(platform, q, k, v, ids, query_offset)
    ways = implementations(problem)
    choice = dispatch.choose("attention", ways, problem, at, implementation=implementation, interpret=bool(interpret))
    if choice.default == "cudnn":
        from pallas_kernels.attention import cudnn

        return checkpoint_name(cudnn.attention(q, k, v, problem.options), NAMES[0])
    if implementation is not None and tiles is not None:
        _module(implementation).check_tiles(tiles, _padded(problem, _module(implementation)))
    call = _Call(choice, problem.options, at.on("tpu").chip, at.on("gpu").chip, tiles, interpret)
    operands = (q, k, v, *(ids or (None, None)), jnp.asarray(offset, jnp.int32) if problem.offset else None)
    return _attention(call, *align_varying(*operands))


def explain(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool = True,
    window: int | None = None,
    segment_ids: Any = None,
    query_offset: Any = 0,
    logit_soft_cap: float | None = None,
    scale: float | None = None,
    implementation: str | None = None,
    platform: str,
) -> Explanation:
    """What `attention` would run on a platform, and why each other implementation would not be taken.

    Args:
        q, k, v, causal, window, segment_ids, query_offset, logit_soft_cap, scale, implementation: as of `attention`;
            arrays may be `jax.ShapeDtypeStruct`.
        platform: "gpu h200", "tpu v5e", "cpu".
    """
    offset = _offset(query_offset, q)
    problem = _checked(q, k, v, _pair(segment_ids), causal, window, logit_soft_cap, scale, offset)
    return dispatch.explain("attention", implementations(problem), problem, target(platform), implementation)


attention.explain = explain  # pyright: ignore[reportFunctionMemberAccess]


def _pair(segment_ids: Any) -> tuple[Any, Any] | None:
    if segment_ids is None:
        return None
    if isinstance(segment_ids, tuple | list):
        if not all(ids is None or (hasattr(ids, "shape") and hasattr(ids, "dtype")) for ids in segment_ids):
            raise ValueError(
                f"attention: segment_ids as a {type(segment_ids).__name__} of what are no arrays, expected one array, "
                "or a pair of arrays: take jnp.asarray(segment_ids)"
            )
        if len(segment_ids) != 2 or any(ids is None for ids in segment_ids):
            raise ValueError("attention: segment_ids of queries or of keys alone: give one array, or a pair of both")
        return segment_ids[0], segment_ids[1]
    arguments.check_arrays("attention", segment_ids=segment_ids)
    return segment_ids, segment_ids


def _offset(query_offset: Any, q: Any) -> Any:
    """The position of the first query, an int where it is known while tracing.

    Raises:
        ValueError: it is no whole number, or negative, or positions would exceed int32.
    """
    expectation = "expected a whole number, or an int32 scalar, of at least 0"
    if hasattr(query_offset, "dtype"):
        if query_offset.shape != () or not jnp.issubdtype(query_offset.dtype, jnp.integer):
            raise ValueError(f"attention: query_offset of {query_offset.shape} {query_offset.dtype}, {expectation}")
        if isinstance(query_offset, Tracer | jax.ShapeDtypeStruct):
            return query_offset
    if isinstance(query_offset, bool) or not hasattr(query_offset, "__index__") or int(query_offset) < 0:
        raise ValueError(f"attention: query_offset={query_offset!r}, {expectation}")
    if int(query_offset) + q.shape[1] > 2**30:
        raise ValueError(
            f"attention: query_offset={query_offset!r} and {q.shape[1]} queries, expected positions below 2**30"
        )
    return int(query_offset)


def _checked(
    q: Any,
    k: Any,
    v: Any,
    ids: tuple[Any, Any] | None,
    causal: bool,
    window: int | None,
    soft_cap: float | None,
    scale: float | None,
    offset: Any,
) -> Problem:
    """The problem that arguments pose.

    Raises:
        ValueError: what no implementation could run.
    """
    shapes = f"got q {tuple(q.shape)}, k {tuple(k.shape)} and v {tuple(v.shape)}"
    if q.ndim != 4 or k.ndim != 4 or k.shape != v.shape or q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise ValueError(f"attention: {shapes}; expected (B,T,N,H), and (B,S,K,H) twice")
    (B, T, N, H), (S, K) = q.shape, k.shape[1:3]
    if 0 in (B, T, S, N, K, H):
        raise ValueError(f"attention: {shapes}; expected no empty dim")
    if N % K:
        raise ValueError(f"attention: {N} query heads and {K} key heads; expected a multiple")
    if not (q.dtype == k.dtype == v.dtype) or not jnp.issubdtype(q.dtype, jnp.floating):
        types_text = f"{q.dtype}, {k.dtype} and {v.dtype}"
        raise ValueError(f"attention: q, k, v of {types_text}; expected one floating type: cast them first")
    if ids is not None:
        types_text = f"segment_ids of {tuple(ids[0].shape)} {ids[0].dtype} and {tuple(ids[1].shape)} {ids[1].dtype}"
        if ids[0].shape != (B, T) or ids[1].shape != (B, S):
            raise ValueError(f"attention: {types_text}; expected {(B, T)} for queries and {(B, S)} for keys")
        if not all(jnp.issubdtype(array.dtype, jnp.integer) for array in ids):
            raise ValueError(f"attention: {types_text}; expected integers")
    if window is not None and (isinstance(window, bool) or not hasattr(window, "__index__")):
        raise ValueError(f"attention: window={window!r}, expected a whole number known while tracing")
    scale = 1 / math.sqrt(H) if scale is None else float(scale)
    options = Options(bool(causal), window, None if soft_cap is None else float(soft_cap), scale)
    has_offset = options.causal and not (isinstance(offset, int) and offset == 0)
    return Problem(B, T, S, N, K, H, jnp.dtype(q.dtype).name, ids is not None, options, has_offset)


@dataclasses.dataclass(frozen=True)
class _Call:
    """What is static in a call."""

    choice: Choice
    options: Options
    tpu_chip: str | None
    gpu_chip: str | None
    tiles: Any
    interpret: Interpret

    def branches(self, plain: str, run: Callable[..., Any]) -> dict[str, Callable[..., Any]]:
        """By name, what runs a pass: the plain modules' function `plain`, or `run` with a kernel's module and chip."""

        def kernel(name: str, *args: Any) -> Any:
            chip = self.tpu_chip if name == "tpu" else self.gpu_chip
            return dispatch.without_derivatives("attention", functools.partial(run, self, _module(name), chip))(*args)

        return {
            **{name: functools.partial(kernel, name) for name in ("tpu", "gpu")},
            "reference": lambda *args: getattr(reference, plain)(*args, self.options),
            "chunked": dispatch.without_derivatives(
                "attention", lambda *args: getattr(chunked, plain)(*args, self.options)
            ),
        }


def _module(name: str) -> Any:
    return importlib.import_module(f"pallas_kernels.attention.{name}")


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(call: _Call, *operands: Any) -> Any:
    return _forward(call, *operands)[0]


def _forward(call: _Call, *operands: Any) -> tuple[Any, Any]:
    branches = call.branches("forward", _kernel_forward)
    out, lse = dispatch.by_platform(call.choice, branches, *operands)
    out, lse = checkpoint_name(out, NAMES[0]), checkpoint_name(lse, NAMES[1])
    return out, (*operands, out, lse)


def _backward(call: _Call, saved: Any, d_out: Any) -> tuple[Any, ...]:
    branches = call.branches("backward", _kernel_backward)
    return *dispatch.by_platform(call.choice, branches, *saved, d_out), None, None, None


_attention.defvjp(_forward, _backward)


def _kernel_forward(
    call: _Call, module: Any, chip: str | None, q: Any, k: Any, v: Any, q_ids: Any, kv_ids: Any, offset: Any
) -> Any:
    (_, T, _, H), arrays = q.shape, _Arrays(module, q, k, (q_ids, kv_ids), offset, call.options)
    q, k, v = arrays.queries(q), arrays.keys(k), arrays.keys(v)
    tiles = call.tiles or module.choose_tiles(chip, arrays.problem)
    out, lse = module.forward(q, k, v, *arrays.ids, offset, call.options, tiles, call.interpret)
    return arrays.back(out, T, H), lse[:, :, :T]


def _kernel_backward(
    call: _Call, module: Any, chip: str | None, q: Any, k: Any, v: Any, q_ids: Any, kv_ids: Any, offset: Any, *rest: Any
) -> Any:
    (_, T, _, H), S, arrays = q.shape, k.shape[1], _Arrays(module, q, k, (q_ids, kv_ids), offset, call.options)
    out, lse, d_out = rest
    q, k, v, out, d_out = (*(arrays.queries(q), arrays.keys(k), arrays.keys(v)), *map(arrays.queries, (out, d_out)))
    lse = jnp.pad(lse, ((0, 0), (0, 0), (0, arrays.problem.T - T)))
    tiles = call.tiles or module.choose_tiles(chip, arrays.problem)
    grads = module.backward(q, k, v, *arrays.ids, offset, out, lse, d_out, call.options, tiles, call.interpret)
    return tuple(arrays.back(grad, length, H) for grad, length in zip(grads, (T, S, S), strict=True))


def _padded(problem: Problem, module: Any) -> Problem:
    """The problem as a kernel sees it: what must be filled up on TPU is as far as tiles that are larger cost less."""
    if not hasattr(module, "work") or problem.T % LENGTH == problem.S % LENGTH == 0:
        return _filled(problem, module, LENGTH)
    return min((_filled(problem, module, step) for step in (LENGTH, 2 * LENGTH, 4 * LENGTH)), key=module.work)


def _filled(problem: Problem, module: Any, step: int) -> Problem:
    """The problem with lengths that are multiples of `step`."""
    T, S = (length + -length % step for length in (problem.T, problem.S))
    # positions hide the keys that fill up, or segment ids do
    hidden = problem.S == S or (problem.options.causal and problem.T <= problem.S and not problem.offset)
    segments = problem.segments or not hidden
    return dataclasses.replace(problem, T=T, S=S, H=module.padded_width(problem.H), segments=segments)


class _Arrays:
    """Arrays as a kernel takes them: lengths that are multiples of LENGTH, a width of heads that it supports, and its
    order of dims (on TPU heads come before positions: Mosaic tiles the last two dims).

    Keys that fill up are hidden by segment ids, unless positions hide them already.
    """

    def __init__(self, module: Any, q: Any, k: Any, ids: Sequence[Any], offset: Any, options: Options) -> None:
        (B, T, N, H), (S, K) = q.shape, k.shape[1:3]
        dtype = jnp.dtype(q.dtype).name
        unpadded = Problem(B, T, S, N, K, H, dtype, ids[0] is not None, options, offset is not None)
        self.problem = _padded(unpadded, module)
        self.swapped = module.__name__.endswith("tpu")
        self.ids: tuple[Any, ...] = (None, None)
        if self.problem.segments:
            sides = ((T, self.problem.T, _LONE_QUERY), (S, self.problem.S, _LONE_KEY))
            unpadded_ids = (
                ids
                if unpadded.segments
                else [full_varying_like((B, length), jnp.int32, 0, q, k) for length, _, _ in sides]
            )
            self.ids = tuple(
                jnp.pad(side_ids.astype(jnp.int32), ((0, 0), (0, longer - length)), constant_values=lone)
                for side_ids, (length, longer, lone) in zip(unpadded_ids, sides, strict=True)
            )

    def queries(self, x: Any) -> Any:
        """(B,T,N,H) for the kernel."""
        return self._for_kernel(x, self.problem.T)

    def keys(self, x: Any) -> Any:
        """(B,S,K,H) for the kernel."""
        return self._for_kernel(x, self.problem.S)

    def _for_kernel(self, x: Any, length: int) -> Any:
        more, wider = length - x.shape[1], self.problem.H - x.shape[3]
        x = jnp.pad(x, ((0, 0), (0, more), (0, 0), (0, wider))) if more or wider else x
        return jnp.swapaxes(x, 1, 2) if self.swapped else x

    def back(self, x: Any, length: int, H: int) -> Any:
        """(B, length, heads, H) from what the kernel returns."""
        x = jnp.swapaxes(x, 1, 2) if self.swapped else x
        return x[:, :length, :, :H] if x.shape[1] > length or x.shape[3] > H else x
