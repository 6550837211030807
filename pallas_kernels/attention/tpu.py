"""Flash attention on TPU (Mosaic): forward, and the backward in two passes (dq; dk and dv).

Scores are kept transposed, (keys, queries), and in base 2: running maxima, sums, log-sum-exps and segment ids of
queries are rows along the lanes, reductions over keys run over sublanes, and no number per query is padded to 128
lanes. The grid's last axis has as many steps as the longest visible range of tiles; index maps stop at its end, so that
a step with nothing to do copies nothing. After FlashAttention-2 (arXiv 2307.08691).
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.attention.reference import Options
from pallas_kernels.attention.tpu_sizes import (
    LANES,
    LOG2E,
    Sizes,
    Tiles,
    check_tiles,
    choose_tiles,
    div,
    padded_width,
    why_unsupported,
    work,
)
from pallas_kernels.compat import Interpret, interpret_params, product_precision, result_struct

__all__ = ["Tiles", "backward", "check_tiles", "choose_tiles", "forward", "padded_width", "why_unsupported", "work"]

NEG = -1e30
"""Stands for -inf: a row with nothing to see never makes a NaN."""
F32 = jnp.float32

_ROWS, _COLS, _FLIP = ((1,), (1,)), ((1,), (0,)), ((0,), (0,))
"""Contractions a @ b.T, a @ b, a.T @ b."""


def _dot(a: Any, b: Any, contract: Any) -> Any:
    return lax.dot_general(a, b, (contract, ((), ())), precision=product_precision(a), preferred_element_type=F32)


def _scores(sizes: Sizes, q: Any, k: Any, q0: Any, k0: Any, ids: Any, hide: bool) -> tuple[Any, Any]:
    """Scores (keys, queries), `sizes.unit` of base 2 each, NEG where hidden; and the cap's derivative, or None."""
    options = sizes.options
    s, slope = _dot(k, q, _ROWS), None
    if options.soft_cap is not None:
        s = jnp.tanh(s * (options.scale / options.soft_cap))
        slope = 1 - s * s
    if sizes.unit == 1:
        s = s * sizes.factor
    if hide:
        back = lax.broadcasted_iota(jnp.int32, s.shape, 1) - lax.broadcasted_iota(jnp.int32, s.shape, 0) + (q0 - k0)
        seen = back >= 0
        s = jnp.where(seen if options.window is None else seen & (back < options.window), s, NEG)
    if ids is not None:
        s = jnp.where(ids[0] == ids[1], s, NEG)
    return s, slope


def _with_or_without_mask(sizes: Sizes, visited: Any, q0: Any, k0: Any, run: Callable[[bool], None]) -> None:
    """Run a tile's code; without the comparison of positions where all its pairs are visible by position."""
    if not sizes.options.causal:
        pl.when(visited)(lambda: run(False))
        return
    partly = sizes.partly(q0, k0)
    pl.when(visited & partly)(lambda: run(True))
    pl.when(visited & ~partly)(lambda: run(False))


def _start(sizes: Sizes, refs: Sequence[Any]) -> tuple[Any, Sequence[Any]]:
    """Position of the first query, if it is not 0, which lies before all other references; and these."""
    return (refs[0][0], refs[1:]) if sizes.offset else (None, refs)


def _tile_ids(sizes: Sizes, refs: Sequence[Any]) -> tuple[Any, Sequence[Any]]:
    """Segment ids' references of a tile, read where they are used; and what follows them."""
    return (refs[:2], refs[2:]) if sizes.segments else (None, refs)


def _read(ids: Any) -> Any:
    return None if ids is None else (ids[0][...], ids[1][...])


def _forward_kernel(*refs: Any, sizes: Sizes) -> None:
    start, (q, k, v, *rest) = _start(sizes, refs)
    ids, (out, lse, acc, top, total) = _tile_ids(sizes, rest)
    i, j = pl.program_id(2), pl.program_id(3)
    first, end = sizes.key_tiles(i, start)
    q0, k0 = sizes.position(i, start), (first + j) * sizes.bk

    @pl.when(j == 0)
    def _() -> None:
        acc[...] = jnp.zeros_like(acc)
        top[...] = jnp.full_like(top, NEG)
        total[...] = jnp.zeros_like(total)

    def run(hide: bool) -> None:
        parts = 2 if sizes.bk % (2 * LANES) == 0 else 1
        size = sizes.bk // parts

        def scores(part: int) -> Any:
            at = pl.ds(part * size, size)
            own = None if ids is None else (ids[0][...], ids[1][at])
            return _scores(sizes, q[...], k[at], q0, k0 + part * size, own, hide)[0]

        ahead, highest, sums = scores(0), top[...], total[...]
        for part in range(parts):
            # the next part's product comes first: it is made while this part's softmax is taken
            s, ahead = ahead, scores(part + 1) if part + 1 < parts else ahead
            new = jnp.maximum(highest, jnp.max(s, 0, keepdims=True))
            p = jnp.exp2((s - new) * sizes.unit)
            fade = jnp.exp2((highest - new) * sizes.unit)
            sums = sums * fade + jnp.sum(p, 0, keepdims=True)
            acc[...] = acc[...] * fade + _dot(v[pl.ds(part * size, size)], p.astype(v.dtype), _FLIP)
            highest = new
        top[...], total[...] = highest, sums

    _with_or_without_mask(sizes, first + j < end, q0, k0, run)

    @pl.when(j == pl.num_programs(3) - 1)
    def _() -> None:
        blind = top[...] <= NEG / 2
        inverse = jnp.where(blind, jnp.nan if sizes.sighted else 0.0, 1 / jnp.maximum(total[...], 1e-30))
        # a query with infinite values may hide all its keys: it must not come out as a blind one
        broken = _dot(jnp.ones((8, q.shape[1]), q.dtype), q[...] * jnp.zeros((), q.dtype), _ROWS)[:1]
        out[...] = (acc[...] * inverse + broken).T.astype(out.dtype)
        unseen = jnp.nan if sizes.sighted else -jnp.inf
        lse[...] = jnp.where(blind, unseen, top[...] * (sizes.unit / LOG2E) + jnp.log(jnp.maximum(total[...], 1e-30)))


def _probabilities(sizes: Sizes, s: Any, lse: Any) -> Any:
    return jnp.exp2(s * sizes.unit - jnp.where(lse > NEG / 2, lse * LOG2E, -NEG))


def _dq_kernel(*refs: Any, sizes: Sizes) -> None:
    start, (q, k, v, d_out, lse, delta, *rest) = _start(sizes, refs)
    ids, (dq, acc) = _tile_ids(sizes, rest)
    i, j = pl.program_id(2), pl.program_id(3)
    first, end = sizes.key_tiles(i, start)
    q0, k0 = sizes.position(i, start), (first + j) * sizes.bk

    @pl.when(j == 0)
    def _() -> None:
        acc[...] = jnp.zeros_like(acc)

    def run(hide: bool) -> None:
        s, slope = _scores(sizes, q[...], k[...], q0, k0, _read(ids), hide)
        ds = _probabilities(sizes, s, lse[...]) * (_dot(v[...], d_out[...], _ROWS) - delta[...])
        ds = ds if slope is None else ds * slope
        acc[...] += _dot(k[...], ds.astype(k.dtype), _FLIP)

    _with_or_without_mask(sizes, first + j < end, q0, k0, run)

    @pl.when(j == pl.num_programs(3) - 1)
    def _() -> None:
        dq[...] = (acc[...] * sizes.options.scale).T.astype(dq.dtype)


def _dkv_kernel(*refs: Any, sizes: Sizes) -> None:
    start, (q, k, v, d_out, lse, delta, *rest) = _start(sizes, refs)
    ids, (dk, dv, dk_acc, dv_acc) = _tile_ids(sizes, rest)
    j, g, i = pl.program_id(2), pl.program_id(3), pl.program_id(4)
    first, end = sizes.query_tiles(j, start)
    q0, k0 = sizes.position(first + i, start), j * sizes.bk

    @pl.when((g == 0) & (i == 0))
    def _() -> None:
        dk_acc[...] = jnp.zeros_like(dk_acc)
        dv_acc[...] = jnp.zeros_like(dv_acc)

    def run(hide: bool) -> None:
        s, slope = _scores(sizes, q[...], k[...], q0, k0, _read(ids), hide)
        p = _probabilities(sizes, s, lse[...])
        dv_acc[...] += _dot(p.astype(d_out.dtype), d_out[...], _COLS)
        ds = p * (_dot(v[...], d_out[...], _ROWS) - delta[...])
        ds = ds if slope is None else ds * slope
        dk_acc[...] += _dot(ds.astype(q.dtype), q[...], _COLS)

    _with_or_without_mask(sizes, first + i < end, q0, k0, run)

    @pl.when((g == pl.num_programs(3) - 1) & (i == pl.num_programs(4) - 1))
    def _() -> None:
        dk[...] = (dk_acc[...] * sizes.options.scale).astype(dk.dtype)
        dv[...] = dv_acc[...].astype(dv.dtype)


def cost(sizes: Any, products: int, moved: int) -> pl.CostEstimate:
    """FLOP of the visible pairs alone (where queries have an offset, the mean over a sequence's parts), and bytes.

    Args:
        sizes: with B, T, S, N, H, offset and options.
        products: matrix products per pair of tiles.
        moved: bytes of operands and results.
    """
    pairs = sizes.B * sizes.N * sizes.options.pairs(sizes.T, sizes.S, anywhere=sizes.offset)
    return pl.CostEstimate(flops=2 * products * sizes.H * pairs, transcendentals=pairs, bytes_accessed=moved)


def _call(
    kernel: Callable[..., None],
    sizes: Sizes,
    grid: tuple[int, ...],
    ins: Sequence[Any],
    outs: Sequence[tuple[Any, jax.ShapeDtypeStruct]],
    scratch: Sequence[Any],
    args: Sequence[Any],
    products: int,
    offset: Any,
    interpret: Interpret,
) -> Any:
    kinds = [kind for _, kind in outs]
    moved = sum(math.prod(x.shape) * x.dtype.itemsize for x in (*args, *kinds))
    parallel: Any = ("parallel",) * 3 + ("arbitrary",) * (len(grid) - 3)
    specs: dict[str, Any] = {
        "grid": grid,
        "in_specs": list(ins),
        "out_specs": [spec for spec, _ in outs],
        "scratch_shapes": list(scratch),
    }
    if offset is not None:  # it lies in scalar memory, where index maps read it, too
        specs = {"grid_spec": pltpu.PrefetchScalarGridSpec(num_scalar_prefetch=1, **specs)}
        args = offset[None], *args
    return pl.pallas_call(
        functools.partial(kernel, sizes=sizes),
        out_shape=kinds,
        **specs,
        interpret=interpret_params("tpu", interpret),
        name=f"attention{kernel.__name__}",
        compiler_params=pltpu.CompilerParams(dimension_semantics=parallel),
        cost_estimate=cost(sizes, products, moved),
    )(*args)


def _sizes(q: Any, k: Any, q_ids: Any, offset: Any, options: Options, bq: int, bk: int) -> Sizes:
    (B, N, T, H), (K, S) = q.shape, k.shape[1:3]
    return Sizes(B, T, S, N, K, H, min(bq, T), min(bk, S), q_ids is not None, options, offset is not None)


def _by_query(sizes: Sizes) -> tuple[Any, Any, Any, list[Any], tuple[int, ...]]:
    """Specs of queries, keys, numbers per query and segment ids, and the grid, of a pass over tiles of queries."""
    G = sizes.N // sizes.K

    def key(i: Any, j: Any, at: Sequence[Any]) -> Any:
        first, end = sizes.key_tiles(i, _start(sizes, at)[0])
        return jnp.clip(first + j, 0, jnp.maximum(end - 1, 0))

    queries = pl.BlockSpec((None, None, sizes.bq, sizes.H), lambda b, n, i, j, *at: (b, n, i, 0))
    keys = pl.BlockSpec((None, None, sizes.bk, sizes.H), lambda b, n, i, j, *at: (b, div(n, G), key(i, j, at), 0))
    row = pl.BlockSpec((None, None, 1, sizes.bq), lambda b, n, i, j, *at: (b, n, 0, i))
    ids = [
        pl.BlockSpec((None, 1, sizes.bq), lambda b, n, i, j, *at: (b, 0, i)),
        pl.BlockSpec((None, sizes.bk, 1), lambda b, n, i, j, *at: (b, key(i, j, at), 0)),
    ]
    count = sizes.T // sizes.bq
    grid = (sizes.B, sizes.N, count, sizes.steps(False))
    return queries, keys, row, ids if sizes.segments else [], grid


def _by_key(sizes: Sizes) -> tuple[Any, Any, Any, list[Any], tuple[int, ...]]:
    """As `_by_query`, of the pass over tiles of keys, which sums over the query heads of a key head."""
    G = sizes.N // sizes.K

    def query(j: Any, i: Any, at: Sequence[Any]) -> Any:
        first, end = sizes.query_tiles(j, _start(sizes, at)[0])
        return jnp.clip(first + i, 0, jnp.maximum(end - 1, 0))

    queries = pl.BlockSpec(
        (None, None, sizes.bq, sizes.H), lambda b, h, j, g, i, *at: (b, h * G + g, query(j, i, at), 0)
    )
    keys = pl.BlockSpec((None, None, sizes.bk, sizes.H), lambda b, h, j, g, i, *at: (b, h, j, 0))
    row = pl.BlockSpec((None, None, 1, sizes.bq), lambda b, h, j, g, i, *at: (b, h * G + g, 0, query(j, i, at)))
    ids = [
        pl.BlockSpec((None, 1, sizes.bq), lambda b, h, j, g, i, *at: (b, 0, query(j, i, at))),
        pl.BlockSpec((None, sizes.bk, 1), lambda b, h, j, g, i, *at: (b, j, 0)),
    ]
    count = sizes.S // sizes.bk
    grid = (sizes.B, sizes.K, count, G, sizes.steps(True))
    return queries, keys, row, ids if sizes.segments else [], grid


def _id_args(q_ids: Any, kv_ids: Any) -> tuple[Any, ...]:
    return () if q_ids is None else (q_ids[:, None], kv_ids[:, :, None])


def forward(
    q: Any,
    k: Any,
    v: Any,
    q_ids: Any,
    kv_ids: Any,
    offset: Any,
    options: Options,
    tiles: Tiles,
    interpret: Interpret = False,
) -> tuple[Any, Any]:
    """As `reference.forward`, heads before positions.

    Args:
        q: queries (B,N,T,H).
        k, v: keys and values (B,K,S,H).
        q_ids, kv_ids: segment ids, or None.
        offset: position of the first query, an int32 scalar; None for 0.
        options: what to compute.
        tiles: of which T and S are multiples.
        interpret: see `compat.interpret_params`.

    Returns:
        (B,N,T,H) in the type of `q`, and the log-sum-exp (B,N,T).
    """
    sizes = _sizes(q, k, q_ids, offset, options, tiles.q, tiles.kv)
    queries, keys, row, ids, grid = _by_query(sizes)
    args = (q, k, v, *_id_args(q_ids, kv_ids))
    outs = [
        (queries, result_struct(q.shape, q.dtype, args)),
        (row, result_struct((sizes.B, sizes.N, 1, sizes.T), F32, args)),
    ]
    line = pltpu.VMEM((1, sizes.bq), F32)
    scratch = [pltpu.VMEM((sizes.H, sizes.bq), F32), line, line]
    ins = [queries, keys, keys, *ids]
    out, lse = _call(_forward_kernel, sizes, grid, ins, outs, scratch, args, 2, offset, interpret)
    return out, lse[:, :, 0]


def backward(
    q: Any,
    k: Any,
    v: Any,
    q_ids: Any,
    kv_ids: Any,
    offset: Any,
    out: Any,
    lse: Any,
    d_out: Any,
    options: Options,
    tiles: Tiles,
    interpret: Interpret = False,
) -> tuple[Any, Any, Any]:
    """As `reference.backward`, heads before positions: seven products where five would do, and no atomics.

    Args:
        q, k, v, q_ids, kv_ids, offset, options, tiles, interpret: as of `forward`.
        out, lse: what it returned.
        d_out: the gradient of `out`, (B,N,T,H).
    """
    delta = jnp.sum(out.astype(F32) * d_out.astype(F32), -1)[:, :, None]
    args = (q, k, v, d_out, lse[:, :, None], delta, *_id_args(q_ids, kv_ids))

    sizes = _sizes(q, k, q_ids, offset, options, tiles.q_dq, tiles.kv_dq)
    queries, keys, row, ids, grid = _by_query(sizes)
    ins = [queries, keys, keys, queries, row, row, *ids]
    scratch = [pltpu.VMEM((sizes.H, sizes.bq), F32)]
    outs = [(queries, result_struct(q.shape, q.dtype, args))]
    (dq,) = _call(_dq_kernel, sizes, grid, ins, outs, scratch, args, 3, offset, interpret)

    sizes = _sizes(q, k, q_ids, offset, options, tiles.q_dkv, tiles.kv_dkv)
    queries, keys, row, ids, grid = _by_key(sizes)
    ins = [queries, keys, keys, queries, row, row, *ids]
    scratch = [pltpu.VMEM((sizes.bk, sizes.H), F32)] * 2
    outs = [(keys, result_struct(x.shape, x.dtype, args)) for x in (k, v)]
    dk, dv = _call(_dkv_kernel, sizes, grid, ins, outs, scratch, args, 4, offset, interpret)
    return dq, dk, dv
