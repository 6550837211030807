"""attention(q, k, v): softmax attention with grouped heads, sliding windows, segments and capped scores.

The output and the log-sum-exp of each query's scores have the residual names in `NAMES`: if a rematerialization policy
saves them, the backward pass does not run the forward pass again. A call computes on one device; under a mesh, wrap it
in `jax.shard_map`. Each shard needs the keys and values of the whole sequence; its queries may be a part of the
sequence, which `query_offset` specifies.
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
"""Residual names of the output and of the log-sum-exp of the scores."""

SHORT = 512 * 512
"""The largest number of scores per head for which the reference is preferred to chunks, if no kernel runs."""

LENGTH = 128
"""For the kernels, the numbers of queries and of keys are padded to multiples of this number.

On TPU, a length that needs padding is padded to a multiple of two or four times this number if larger tiles then save
work. The caller's queries do not see the padding keys.
"""

_PADDING_QUERY_ID, _PADDING_KEY_ID = -(2**31) + 1, -(2**31)
"""Segment ids of padding queries and padding keys; they differ, so that neither sees the other."""


def _why_unsupported_on_tpu(target: Target, problem: Problem) -> str | None:
    from pallas_kernels.attention import tpu

    return tpu.why_unsupported(target, problem)


def _why_unsupported_on_gpu(target: Target, problem: Problem) -> str | None:
    from pallas_kernels.attention import gpu

    return gpu.why_unsupported(target, problem)


def _why_unsupported_on_cudnn(target: Target, problem: Problem) -> str | None:
    from pallas_kernels.attention import cudnn

    return cudnn.why_unsupported(target, problem)


_KERNELS = (
    Implementation("tpu", "tpu", chips=("v4", *COMPILED_TPUS), why_unsupported=_why_unsupported_on_tpu),
    Implementation("gpu", "gpu", needs_hopper=True, why_unsupported=_why_unsupported_on_gpu),
    Implementation("cudnn", "gpu", needs_name=True, why_unsupported=_why_unsupported_on_cudnn),
)
_PLAIN = (Implementation("reference"), Implementation("chunked"))
"""Implementations in plain JAX."""

IMPLEMENTATIONS = tuple(implementation.name for implementation in (*_KERNELS, *_PLAIN))
"""Names of all implementations."""


def implementations(problem: Problem) -> tuple[Implementation, ...]:
    """Return all implementations, best first; if there are many scores, chunks come before the reference."""
    plain_implementations = _PLAIN if problem.T * problem.S <= SHORT else _PLAIN[::-1]
    return (*_KERNELS, *plain_implementations)


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
    """Compute the attention of queries to the keys they see: `softmax(cap(scale * q k^T)) v`, `cap(s) = c tanh(s / c)`.

    Query head n reads key head n // (N / K). Scores and softmax are float32. The output for a query that sees no key is
    0; the output for a query that has an element that is not finite is NaN.

    Args:
        q: queries (B,T,N,H) of a floating dtype; the kernels do not support float64.
        k, v: keys and values (B,S,K,H) of the same dtype; N must be a multiple of K.
        causal: whether a query sees no key at a later position. Positions of queries and of keys count from 0.
        window: number of positions that a query sees, ending with its own; None for no limit. Only with `causal`.
        segment_ids: a query sees only keys that have the query's id. One array of integers (B,T) for queries and keys
            if T equals S; or a pair of arrays, the ids (B,T) of the queries and the ids (B,S) of the keys.
        query_offset: position of the first query if `q` is a part of a sequence: an integer >= 0, or an int32 scalar
            such as `jax.lax.axis_index(..) * T`. The positions of queries may exceed those of all keys.
        logit_soft_cap: the number c that bounds the scores; None for no cap.
        scale: factor of the scores; by default 1 / sqrt(H).
        implementation: "tpu", "gpu", "cudnn", "chunked" or "reference"; None for the best one that can run.
        platform: "tpu v5e", "gpu h200", "cpu"; by default that of the mesh in force, or of the arrays.
        tiles: `Tiles` of the named kernel, to use instead of tuned tiles.
        interpret: whether to run the named kernel in Pallas' interpreter; "races" also looks for races.

    Returns:
        The output (B,T,N,H) in the dtype of `q`.

    Raises:
        ValueError: no implementation accepts the arguments, or the implementation or the platform is unknown.
        NotImplementedError: the named implementation does not support these arguments or this platform.

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
    id_pair = _id_pair(segment_ids)
    arguments.check_arrays("attention", q=q, k=k, v=v)
    arguments.check_static("attention", causal=causal, window=window, logit_soft_cap=logit_soft_cap, scale=scale)
    offset = _checked_offset(query_offset, q)
    problem = _checked_problem(q, k, v, id_pair, causal, window, logit_soft_cap, scale, offset)
    if tiles is not None and implementation not in ("tpu", "gpu"):
        raise ValueError(f"attention: tiles belong to a named kernel, 'tpu' or 'gpu', and not to {implementation!r}")
    call_target = target(platform, q, k, v, id_pair, query_offset)
    choice = dispatch.choose(
        "attention",
        implementations(problem),
        problem,
        call_target,
        implementation=implementation,
        interpret=bool(interpret),
    )
    if choice.default == "cudnn":
        from pallas_kernels.attention import cudnn

        return checkpoint_name(cudnn.attention(q, k, v, problem.options), NAMES[0])
    if implementation is not None and tiles is not None:
        _module(implementation).check_tiles(tiles, padded_problem(problem, _module(implementation)))
    tpu_chip, gpu_chip = call_target.on("tpu").chip, call_target.on("gpu").chip
    call = _Call(choice, problem.options, tpu_chip, gpu_chip, tiles, interpret)
    operands = (q, k, v, *(id_pair or (None, None)), jnp.asarray(offset, jnp.int32) if problem.has_offset else None)
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
    """Explain which implementation `attention` would run on a platform, and why the others do not.

    Args:
        q, k, v, causal, window, segment_ids, query_offset, logit_soft_cap, scale, implementation: as in `attention`;
            arrays may be `jax.ShapeDtypeStruct`.
        platform: "gpu h200", "tpu v5e", "cpu".
    """
    offset = _checked_offset(query_offset, q)
    problem = _checked_problem(q, k, v, _id_pair(segment_ids), causal, window, logit_soft_cap, scale, offset)
    return dispatch.explain("attention", implementations(problem), problem, target(platform), implementation)


attention.explain = explain  # pyright: ignore[reportFunctionMemberAccess]


def _id_pair(segment_ids: Any) -> tuple[Any, Any] | None:
    """The segment ids of queries and of keys, or None if there are none; raises a ValueError unless they are arrays."""
    if segment_ids is None:
        return None
    if isinstance(segment_ids, tuple | list):
        if not all(ids is None or (hasattr(ids, "shape") and hasattr(ids, "dtype")) for ids in segment_ids):
            raise ValueError(
                f"attention: got segment_ids as a {type(segment_ids).__name__} whose members are not arrays, expected "
                "one array, or a pair of arrays: take jnp.asarray(segment_ids)"
            )
        if len(segment_ids) != 2 or any(ids is None for ids in segment_ids):
            raise ValueError(
                "attention: got segment_ids of queries or of keys alone, expected both: pass one array for both, or a "
                "pair of arrays"
            )
        return segment_ids[0], segment_ids[1]
    arguments.check_arrays("attention", segment_ids=segment_ids)
    return segment_ids, segment_ids


def _checked_offset(query_offset: Any, q: Any) -> Any:
    """The position of the first query: an int, or a scalar array if it is traced.

    Raises:
        ValueError: the offset is not an integer, is negative, or leads to positions that are too large for int32.
    """
    expected_text = "expected an integer, or an int32 scalar, of at least 0"
    if hasattr(query_offset, "dtype"):
        if query_offset.shape != () or not jnp.issubdtype(query_offset.dtype, jnp.integer):
            shape_text = f"shape {query_offset.shape} and dtype {query_offset.dtype}"
            raise ValueError(f"attention: got query_offset of {shape_text}, {expected_text}")
        if isinstance(query_offset, Tracer | jax.ShapeDtypeStruct):
            return query_offset
    if isinstance(query_offset, bool) or not hasattr(query_offset, "__index__") or int(query_offset) < 0:
        raise ValueError(f"attention: got query_offset={query_offset!r}, {expected_text}")
    if int(query_offset) + q.shape[1] > 2**30:
        raise ValueError(
            f"attention: got query_offset={query_offset!r} and {q.shape[1]} queries, expected positions below 2**30"
        )
    return int(query_offset)


def _checked_problem(
    q: Any,
    k: Any,
    v: Any,
    id_pair: tuple[Any, Any] | None,
    causal: bool,
    window: int | None,
    soft_cap: float | None,
    scale: float | None,
    offset: Any,
) -> Problem:
    """The problem that the arguments of `attention` define.

    Raises:
        ValueError: the arguments do not fit together, so that no implementation could run them.
    """
    shapes_text = f"got q {tuple(q.shape)}, k {tuple(k.shape)} and v {tuple(v.shape)}"
    if q.ndim != 4 or k.ndim != 4 or k.shape != v.shape or q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise ValueError(f"attention: {shapes_text}, expected q (B,T,N,H), and k and v (B,S,K,H)")
    (B, T, N, H), (S, K) = q.shape, k.shape[1:3]
    if 0 in (B, T, S, N, K, H):
        raise ValueError(f"attention: {shapes_text}, expected no empty dim")
    if N % K:
        raise ValueError(f"attention: got {N} query heads and {K} key heads, expected a multiple of the key heads")
    if not (q.dtype == k.dtype == v.dtype) or not jnp.issubdtype(q.dtype, jnp.floating):
        dtypes_text = f"{q.dtype}, {k.dtype} and {v.dtype}"
        raise ValueError(f"attention: got q, k and v of {dtypes_text}, expected one floating dtype: cast them first")
    if id_pair is not None:
        q_ids, kv_ids = id_pair
        ids_text = f"got segment_ids {tuple(q_ids.shape)} {q_ids.dtype} and {tuple(kv_ids.shape)} {kv_ids.dtype}"
        if q_ids.shape != (B, T) or kv_ids.shape != (B, S):
            raise ValueError(f"attention: {ids_text}, expected {(B, T)} for queries and {(B, S)} for keys")
        if not all(jnp.issubdtype(ids.dtype, jnp.integer) for ids in id_pair):
            raise ValueError(f"attention: {ids_text}, expected integers")
    if window is not None and (isinstance(window, bool) or not hasattr(window, "__index__")):
        raise ValueError(f"attention: got window={window!r}, expected an integer that is known during tracing")
    factor = 1 / math.sqrt(H) if scale is None else float(scale)
    options = Options(bool(causal), window, None if soft_cap is None else float(soft_cap), factor)
    has_offset = options.causal and not (isinstance(offset, int) and offset == 0)
    return Problem(B, T, S, N, K, H, jnp.dtype(q.dtype).name, id_pair is not None, options, has_offset)


@dataclasses.dataclass(frozen=True)
class _Call:
    """The static arguments of the custom_vjp.

    Args:
        choice: which implementations run.
        options: what to compute.
        tpu_chip, gpu_chip: the chip if the call is lowered for a TPU, and if for a GPU; None if the chip is unknown.
        tiles: the caller's tiles, or None for tuned tiles.
        interpret: how to run a kernel.
    """

    choice: Choice
    options: Options
    tpu_chip: str | None
    gpu_chip: str | None
    tiles: Any
    interpret: Interpret

    def branches(self, pass_name: str, run_kernel: Callable[..., Any]) -> dict[str, Callable[..., Any]]:
        """The functions that run a pass, by implementation name.

        Args:
            pass_name: "forward" or "backward", the name of the function in the modules of plain JAX.
            run_kernel: `_kernel_forward` or `_kernel_backward`.
        """

        def run_on_chip(name: str, *args: Any) -> Any:
            chip = self.tpu_chip if name == "tpu" else self.gpu_chip
            kernel = functools.partial(run_kernel, self, _module(name), chip)
            return dispatch.without_derivatives("attention", kernel)(*args)

        return {
            **{name: functools.partial(run_on_chip, name) for name in ("tpu", "gpu")},
            "reference": lambda *args: getattr(reference, pass_name)(*args, self.options),
            "chunked": dispatch.without_derivatives(
                "attention", lambda *args: getattr(chunked, pass_name)(*args, self.options)
            ),
        }


def _module(name: str) -> Any:
    """The module of an implementation."""
    return importlib.import_module(f"pallas_kernels.attention.{name}")


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(call: _Call, *operands: Any) -> Any:
    """The output; `operands` are q, k, v and, each perhaps None, the ids of queries, the ids of keys and the offset."""
    return _forward(call, *operands)[0]


def _forward(call: _Call, *operands: Any) -> tuple[Any, Any]:
    """The output, and the residuals: the operands, the output and the log-sum-exp."""
    branches = call.branches("forward", _kernel_forward)
    unnamed_out, unnamed_lse = dispatch.by_platform(call.choice, branches, *operands)
    out, lse = checkpoint_name(unnamed_out, NAMES[0]), checkpoint_name(unnamed_lse, NAMES[1])
    return out, (*operands, out, lse)


def _backward(call: _Call, residuals: Any, d_out: Any) -> tuple[Any, ...]:
    """The gradients of q, k and v, and None for the segment ids and the offset."""
    branches = call.branches("backward", _kernel_backward)
    return *dispatch.by_platform(call.choice, branches, *residuals, d_out), None, None, None


_attention.defvjp(_forward, _backward)


def _kernel_forward(
    call: _Call, module: Any, chip: str | None, q: Any, k: Any, v: Any, q_ids: Any, kv_ids: Any, offset: Any
) -> Any:
    """The output and the log-sum-exp from the kernel of `module`; arrays are in the shapes of `attention`."""
    (_, T, _, H), arrays = q.shape, _KernelArrays(module, q, k, (q_ids, kv_ids), offset, call.options)
    kernel_args = (arrays.to_queries(q), arrays.to_keys(k), arrays.to_keys(v), *arrays.ids, offset)
    tiles = call.tiles or module.choose_tiles(chip, arrays.problem)
    out, lse = module.forward(*kernel_args, call.options, tiles, call.interpret)
    return arrays.from_kernel(out, T, H), lse[:, :, :T]


def _kernel_backward(
    call: _Call,
    module: Any,
    chip: str | None,
    q: Any,
    k: Any,
    v: Any,
    q_ids: Any,
    kv_ids: Any,
    offset: Any,
    out: Any,
    lse: Any,
    d_out: Any,
) -> Any:
    """The gradients of q, k and v from the kernel of `module`; arrays are in the shapes of `attention`."""
    (_, T, _, H), S, arrays = q.shape, k.shape[1], _KernelArrays(module, q, k, (q_ids, kv_ids), offset, call.options)
    forward_args = (arrays.to_queries(q), arrays.to_keys(k), arrays.to_keys(v), *arrays.ids, offset)
    padded_out, padded_d_out = arrays.to_queries(out), arrays.to_queries(d_out)
    padded_lse = jnp.pad(lse, ((0, 0), (0, 0), (0, arrays.problem.T - T)))
    tiles = call.tiles or module.choose_tiles(chip, arrays.problem)
    gradients = module.backward(
        *forward_args, padded_out, padded_lse, padded_d_out, call.options, tiles, call.interpret
    )
    return tuple(arrays.from_kernel(gradient, length, H) for gradient, length in zip(gradients, (T, S, S), strict=True))


def padded_problem(problem: Problem, module: Any) -> Problem:
    """Return the problem that a kernel runs after padding; on TPU, lengths are padded so that the work is least.

    Args:
        problem: the problem before padding.
        module: the kernel's module.
    """
    if not hasattr(module, "work") or problem.T % LENGTH == problem.S % LENGTH == 0:
        return _pad_problem(problem, module, LENGTH)
    candidates = (_pad_problem(problem, module, multiple) for multiple in (LENGTH, 2 * LENGTH, 4 * LENGTH))
    return min(candidates, key=module.work)


def _pad_problem(problem: Problem, module: Any, multiple: int) -> Problem:
    """The problem with T and S padded to multiples of `multiple`, and H to a width that the kernel supports."""
    T, S = (length + -length % multiple for length in (problem.T, problem.S))
    # if positions do not hide the padding keys, segment ids must
    is_padding_hidden = problem.S == S or (problem.options.causal and problem.T <= problem.S and not problem.has_offset)
    has_segments = problem.has_segments or not is_padding_hidden
    return dataclasses.replace(problem, T=T, S=S, H=module.padded_width(problem.H), has_segments=has_segments)


class _KernelArrays:
    """Converts arrays to and from the shapes that a kernel takes.

    A kernel takes lengths that are multiples of LENGTH, widths of heads that it supports, and, on TPU, heads before
    positions, because Mosaic tiles the last two dims. Segment ids hide the padding keys, unless positions hide them.

    Attributes:
        problem: the problem after padding.
        has_heads_first: whether the kernel takes heads before positions.
        ids: the padded segment ids of queries and of keys; both are None if the kernel takes no ids.
    """

    def __init__(self, module: Any, q: Any, k: Any, ids: Sequence[Any], offset: Any, options: Options) -> None:
        (B, T, N, H), (S, K) = q.shape, k.shape[1:3]
        dtype = jnp.dtype(q.dtype).name
        unpadded = Problem(B, T, S, N, K, H, dtype, ids[0] is not None, options, offset is not None)
        self.problem = padded_problem(unpadded, module)
        self.has_heads_first = module.__name__.endswith("tpu")
        self.ids: tuple[Any, ...] = (None, None)
        if self.problem.has_segments:
            q_ids, kv_ids = (
                ids
                if unpadded.has_segments
                else [full_varying_like((B, length), jnp.int32, 0, q, k) for length in (T, S)]
            )
            self.ids = (
                _pad_ids(q_ids, self.problem.T, _PADDING_QUERY_ID),
                _pad_ids(kv_ids, self.problem.S, _PADDING_KEY_ID),
            )

    def to_queries(self, x: Any) -> Any:
        """Convert queries, or an array of the same shape (B,T,N,H), for the kernel."""
        return self._to_kernel(x, self.problem.T)

    def to_keys(self, x: Any) -> Any:
        """Convert keys or values (B,S,K,H) for the kernel."""
        return self._to_kernel(x, self.problem.S)

    def _to_kernel(self, x: Any, length: int) -> Any:
        """Pad an array (B, positions, heads, H), and put its dims into the kernel's order."""
        position_padding, width_padding = length - x.shape[1], self.problem.H - x.shape[3]
        if position_padding or width_padding:
            x = jnp.pad(x, ((0, 0), (0, position_padding), (0, 0), (0, width_padding)))
        return jnp.swapaxes(x, 1, 2) if self.has_heads_first else x

    def from_kernel(self, x: Any, length: int, H: int) -> Any:
        """Convert a result of the kernel into an array (B, length, heads, H) without padding."""
        x = jnp.swapaxes(x, 1, 2) if self.has_heads_first else x
        return x[:, :length, :, :H] if x.shape[1] > length or x.shape[3] > H else x


def _pad_ids(ids: Any, length: int, padding_id: int) -> Any:
    """Segment ids (B, length), int32, padded with `padding_id`."""
    return jnp.pad(ids.astype(jnp.int32), ((0, 0), (0, length - ids.shape[1])), constant_values=padding_id)
