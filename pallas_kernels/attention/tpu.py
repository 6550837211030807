"""Flash attention on TPU (Mosaic): forward, and the backward in two passes (dq; dk and dv).

Scores are kept transposed, (keys, queries), and in base 2: running maxima, sums, log-sum-exps and segment ids of
queries are rows along the lanes, reductions over keys run over sublanes, and no number per query is padded to 128
lanes. The grid's last axis has as many steps as the longest visible range of tiles; index maps stop at its end, so that
a step with nothing to do copies nothing. After FlashAttention-2 (arXiv 2307.08691).
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import tiles as tuned
from pallas_kernels.attention.problem import Problem
from pallas_kernels.attention.reference import Options
from pallas_kernels.compat import Interpret, interpreter, like
from pallas_kernels.target import Target

LANES = 128
WIDEST = 256
"""Width of heads up to which kernels were compiled."""
NEG = -1e30
"""Stands for -inf: a row with nothing to see never makes a NaN."""
LOG2E = math.log2(math.e)
_LENGTHS = (2048, 1024, 512, 256, 128)
"""Queries or keys of a tile, to choose from."""
F32 = jnp.float32


_ROWS, _COLS, _FLIP = ((1,), (1,)), ((1,), (0,)), ((0,), (0,))
"""Contractions a @ b.T, a @ b, a.T @ b."""


@dataclasses.dataclass(frozen=True)
class Tiles:
    """Queries and keys of a tile, in each pass: multiples of 128.

    Raises:
        ValueError: other sizes.
    """

    q: int = 512
    kv: int = 512
    q_dq: int = 512
    kv_dq: int = 512
    q_dkv: int = 512
    kv_dkv: int = 512

    def __post_init__(self) -> None:
        for name, value in dataclasses.asdict(self).items():
            if value < LANES or value % LANES:
                raise ValueError(f"attention on TPU: tile {name}={value}, expected a multiple of {LANES}")

    def divide(self, T: int, S: int) -> bool:
        """Whether whole tiles (those that are not longer than the sequence) make up T queries and S keys."""
        queries, keys = (self.q, self.q_dq, self.q_dkv), (self.kv, self.kv_dq, self.kv_dkv)
        return all(T % min(q, T) == 0 for q in queries) and all(S % min(kv, S) == 0 for kv in keys)


def supports(target: Target, problem: Problem) -> str | None:
    """Why this cannot run; None if it can."""
    if problem.dtype not in ("bfloat16", "float32"):
        return f"it needs bfloat16 or float32, not {problem.dtype}"
    if problem.H > WIDEST:
        return f"it needs heads at most {WIDEST} wide, not {problem.H}"
    return None


def padded_width(H: int) -> int:
    """The width of heads that runs heads of width H: 64, or a multiple of 128."""
    return 64 if H <= 64 else -(-H // LANES) * LANES


def choose_tiles(chip: str | None, problem: Problem) -> Tiles:
    """Tuned tiles, else those of the least work in each pass (`_best`)."""

    def rule() -> Tiles:
        forward, backward = (_best(problem, *longest) for longest in _longest(problem))
        return Tiles(*forward, *backward, *backward)

    def fits(found: Tiles) -> bool:
        return found.divide(problem.T, problem.S)

    return tuned.tiles("attention", chip, problem.case, Tiles, rule, fits)


def _longest(problem: Problem) -> tuple[tuple[int, int], tuple[int, int]]:
    """Most queries and keys of a tile, in the forward and in the backward: what libtpu 0.0.51 has compiled.

    That was for v5e, v5p and v6e. In bfloat16 with heads of 128, causal: 1024 x 1024 in each pass; with a soft cap and
    segments together 1024 x 1024 in the forward and 512 x 512 in the backward; with all pairs visible and neither cap
    nor segments 1024 x 2048 and 1024 x 1024. In float32 with heads of 128 and 256, and in bfloat16 with heads of 256,
    each causal with a soft cap and segments: 512 x 512.
    """
    plain = problem.options.soft_cap is None and not problem.segments
    if problem.dtype != "bfloat16" or problem.H > LANES:
        return (512, 512), (512, 512)
    keys = 2048 if plain and not problem.options.causal else 1024
    return (1024, keys), (1024, 1024) if plain else (512, 512)


def _best(problem: Problem, queries: int, keys: int) -> tuple[int, int]:
    """The tile, of at most so many queries and keys, that divides the lengths and costs least: by the pairs of all
    tiles that are visited, and what small tiles add to each pair in libtpu's schedules for v5e.
    """

    def work(q: int, kv: int) -> float:
        sizes = _Sizes(1, problem.T, problem.S, 1, 1, problem.H, q, kv, False, problem.options)
        first, end = sizes.key_tiles(np.arange(problem.T // q), np)
        return int(np.sum(np.maximum(end - first, 0))) * q * kv * (1 + 128 / q + 160 / kv)

    def divisors(length: int, most: int) -> list[int]:
        return [tile for tile in _LENGTHS if tile <= most and length % tile == 0]

    pairs = itertools.product(divisors(problem.T, queries), divisors(problem.S, keys))
    return min(pairs, key=lambda one: work(*one))


def check_tiles(tiles: Any, problem: Problem) -> None:
    """Refuse tiles that cannot run a problem.

    Raises:
        ValueError: they are another kernel's, or whole ones do not make up T and S.
    """
    if not isinstance(tiles, Tiles):
        raise ValueError(f"attention: got tiles {tiles!r}, expected pallas_kernels.attention.tpu.Tiles")
    if not tiles.divide(problem.T, problem.S):
        raise ValueError(f"attention: T={problem.T} and S={problem.S} are no multiples of {tiles}: take shorter ones")


@dataclasses.dataclass(frozen=True)
class _Sizes:
    """What is static in a kernel: sizes of the problem and of a tile, and the options."""

    B: int
    T: int
    S: int
    N: int
    K: int
    H: int
    bq: int
    bk: int
    segments: bool
    options: Options

    @property
    def factor(self) -> float:
        """What makes scores (or their capped tanh) those of base 2."""
        options = self.options
        return LOG2E * (options.scale if options.soft_cap is None else options.soft_cap)

    @property
    def unit(self) -> float:
        """What a kept score still lacks: `factor`, spared until the maximum is taken off; 1 where NEG would not hide
        any more, or the maximum would be a minimum."""
        return self.factor if 1e-6 < self.factor < 1e6 else 1.0

    def key_tiles(self, i: Any, xp: Any = jnp) -> tuple[Any, Any]:
        """First and past-the-last tile of keys that query tile i may see."""
        first, end = i * 0, i * 0 + self.S // self.bk
        if self.options.causal:
            end = xp.minimum(end, _div(i * self.bq + (self.bq + self.bk - 1), self.bk))
        if self.options.window is not None:
            first = _div(xp.maximum(i * self.bq - (self.options.window - 1), 0), self.bk)
        return first, end

    def query_tiles(self, j: Any, xp: Any = jnp) -> tuple[Any, Any]:
        """First and past-the-last tile of queries that may see key tile j."""
        first, end = j * 0, j * 0 + self.T // self.bq
        if self.options.causal:
            first = xp.minimum(_div(j * self.bk, self.bq), end)
        if self.options.window is not None:
            last = j * self.bk + (self.bk - 1 + self.options.window)
            end = xp.minimum(end, _div(last + (self.bq - 1), self.bq))
        return first, end

    def steps(self, tiles: Callable[..., tuple[Any, Any]], count: int) -> int:
        """The longest range of tiles."""
        first, end = tiles(np.arange(count), np)
        return max(1, int(np.max(end - first)))


def _div(a: Any, b: int) -> Any:
    """a // b of what is not negative: without the code for signs, which knows no chip but the one at hand."""
    return a // b if isinstance(a, np.ndarray) else lax.div(a, jnp.int32(b))


def _dot(a: Any, b: Any, contract: Any) -> Any:
    return lax.dot_general(a, b, (contract, ((), ())), preferred_element_type=F32)


def _scores(sizes: _Sizes, q: Any, k: Any, q0: Any, k0: Any, ids: Any, hide: bool) -> tuple[Any, Any]:
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


def _with_or_without_mask(sizes: _Sizes, visited: Any, q0: Any, k0: Any, run: Callable[[bool], None]) -> None:
    """Run a tile's code; without the comparison of positions where all its pairs are visible by position."""
    options = sizes.options
    if not options.causal:
        pl.when(visited)(lambda: run(False))
        return
    partly = q0 < k0 + sizes.bk - 1
    if options.window is not None:
        partly = partly | (q0 + sizes.bq - 1 - k0 >= options.window)
    pl.when(visited & partly)(lambda: run(True))
    pl.when(visited & ~partly)(lambda: run(False))


def _tile_ids(sizes: _Sizes, refs: Sequence[Any]) -> tuple[Any, Sequence[Any]]:
    """Segment ids' references of a tile, read where they are used; and what follows them."""
    return (refs[:2], refs[2:]) if sizes.segments else (None, refs)


def _read(ids: Any) -> Any:
    return None if ids is None else (ids[0][...], ids[1][...])


def _forward_kernel(*refs: Any, sizes: _Sizes) -> None:
    q, k, v, *rest = refs
    ids, (out, lse, acc, top, total) = _tile_ids(sizes, rest)
    i, j = pl.program_id(2), pl.program_id(3)
    first, end = sizes.key_tiles(i)
    q0, k0 = i * sizes.bq, (first + j) * sizes.bk

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
        inverse = jnp.where(blind, 0.0, 1 / jnp.maximum(total[...], 1e-30))
        # a query with infinite values may hide all its keys: it must not come out as a blind one
        broken = _dot(jnp.ones((8, q.shape[1]), q.dtype), q[...] * jnp.zeros((), q.dtype), _ROWS)[:1]
        out[...] = (acc[...] * inverse + broken).T.astype(out.dtype)
        lse[...] = jnp.where(blind, -jnp.inf, top[...] * (sizes.unit / LOG2E) + jnp.log(jnp.maximum(total[...], 1e-30)))


def _probabilities(sizes: _Sizes, s: Any, lse: Any) -> Any:
    return jnp.exp2(s * sizes.unit - jnp.where(lse > NEG / 2, lse * LOG2E, -NEG))


def _dq_kernel(*refs: Any, sizes: _Sizes) -> None:
    q, k, v, d_out, lse, delta, *rest = refs
    ids, (dq, acc) = _tile_ids(sizes, rest)
    i, j = pl.program_id(2), pl.program_id(3)
    first, end = sizes.key_tiles(i)
    q0, k0 = i * sizes.bq, (first + j) * sizes.bk

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


def _dkv_kernel(*refs: Any, sizes: _Sizes) -> None:
    q, k, v, d_out, lse, delta, *rest = refs
    ids, (dk, dv, dk_acc, dv_acc) = _tile_ids(sizes, rest)
    j, g, i = pl.program_id(2), pl.program_id(3), pl.program_id(4)
    first, end = sizes.query_tiles(j)
    q0, k0 = (first + i) * sizes.bq, j * sizes.bk

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
    """FLOP of the visible pairs alone, and bytes.

    Args:
        sizes: with B, T, S, N, H and options.
        products: matrix products per pair of tiles.
        moved: bytes of operands and results.
    """
    pairs = sizes.B * sizes.N * sizes.options.pairs(sizes.T, sizes.S)
    return pl.CostEstimate(flops=2 * products * sizes.H * pairs, transcendentals=pairs, bytes_accessed=moved)


def _call(
    kernel: Callable[..., None],
    sizes: _Sizes,
    grid: tuple[int, ...],
    ins: Sequence[Any],
    outs: Sequence[tuple[Any, jax.ShapeDtypeStruct]],
    scratch: Sequence[Any],
    args: Sequence[Any],
    products: int,
    interpret: Interpret,
) -> Any:
    kinds = [kind for _, kind in outs]
    moved = sum(math.prod(x.shape) * x.dtype.itemsize for x in (*args, *kinds))
    parallel: Any = ("parallel",) * 3 + ("arbitrary",) * (len(grid) - 3)
    return pl.pallas_call(
        functools.partial(kernel, sizes=sizes),
        grid=grid,
        in_specs=list(ins),
        out_specs=[spec for spec, _ in outs],
        out_shape=kinds,
        scratch_shapes=list(scratch),
        interpret=interpreter("tpu", interpret),
        name=f"attention{kernel.__name__}",
        compiler_params=pltpu.CompilerParams(dimension_semantics=parallel),
        cost_estimate=cost(sizes, products, moved),
    )(*args)


def _sizes(q: Any, k: Any, q_ids: Any, options: Options, bq: int, bk: int) -> _Sizes:
    (B, N, T, H), (K, S) = q.shape, k.shape[1:3]
    return _Sizes(B, T, S, N, K, H, min(bq, T), min(bk, S), q_ids is not None, options)


def _by_query(sizes: _Sizes) -> tuple[Any, Any, Any, list[Any], tuple[int, ...]]:
    """Specs of queries, keys, numbers per query and segment ids, and the grid, of a pass over tiles of queries."""
    G = sizes.N // sizes.K

    def key(i: Any, j: Any) -> Any:
        first, end = sizes.key_tiles(i)
        return jnp.clip(first + j, 0, jnp.maximum(end - 1, 0))

    queries = pl.BlockSpec((None, None, sizes.bq, sizes.H), lambda b, n, i, j: (b, n, i, 0))
    keys = pl.BlockSpec((None, None, sizes.bk, sizes.H), lambda b, n, i, j: (b, _div(n, G), key(i, j), 0))
    row = pl.BlockSpec((None, None, 1, sizes.bq), lambda b, n, i, j: (b, n, 0, i))
    ids = [
        pl.BlockSpec((None, 1, sizes.bq), lambda b, n, i, j: (b, 0, i)),
        pl.BlockSpec((None, sizes.bk, 1), lambda b, n, i, j: (b, key(i, j), 0)),
    ]
    count = sizes.T // sizes.bq
    grid = (sizes.B, sizes.N, count, sizes.steps(sizes.key_tiles, count))
    return queries, keys, row, ids if sizes.segments else [], grid


def _by_key(sizes: _Sizes) -> tuple[Any, Any, Any, list[Any], tuple[int, ...]]:
    """As `_by_query`, of the pass over tiles of keys, which sums over the query heads of a key head."""
    G = sizes.N // sizes.K

    def query(j: Any, i: Any) -> Any:
        first, end = sizes.query_tiles(j)
        return jnp.clip(first + i, 0, jnp.maximum(end - 1, 0))

    queries = pl.BlockSpec((None, None, sizes.bq, sizes.H), lambda b, h, j, g, i: (b, h * G + g, query(j, i), 0))
    keys = pl.BlockSpec((None, None, sizes.bk, sizes.H), lambda b, h, j, g, i: (b, h, j, 0))
    row = pl.BlockSpec((None, None, 1, sizes.bq), lambda b, h, j, g, i: (b, h * G + g, 0, query(j, i)))
    ids = [
        pl.BlockSpec((None, 1, sizes.bq), lambda b, h, j, g, i: (b, 0, query(j, i))),
        pl.BlockSpec((None, sizes.bk, 1), lambda b, h, j, g, i: (b, j, 0)),
    ]
    count = sizes.S // sizes.bk
    grid = (sizes.B, sizes.K, count, G, sizes.steps(sizes.query_tiles, count))
    return queries, keys, row, ids if sizes.segments else [], grid


def _id_args(q_ids: Any, kv_ids: Any) -> tuple[Any, ...]:
    return () if q_ids is None else (q_ids[:, None], kv_ids[:, :, None])


def forward(
    q: Any, k: Any, v: Any, q_ids: Any, kv_ids: Any, options: Options, tiles: Tiles, interpret: Interpret = False
) -> tuple[Any, Any]:
    """As `reference.forward`, heads before positions.

    Args:
        q: queries (B,N,T,H).
        k, v: keys and values (B,K,S,H).
        q_ids, kv_ids: segment ids, or None.
        options: what to compute.
        tiles: of which T and S are multiples.
        interpret: see `compat.interpreter`.

    Returns:
        (B,N,T,H) in the type of `q`, and the log-sum-exp (B,N,T).
    """
    sizes = _sizes(q, k, q_ids, options, tiles.q, tiles.kv)
    queries, keys, row, ids, grid = _by_query(sizes)
    args = (q, k, v, *_id_args(q_ids, kv_ids))
    outs = [(queries, like(q.shape, q.dtype, args)), (row, like((sizes.B, sizes.N, 1, sizes.T), F32, args))]
    line = pltpu.VMEM((1, sizes.bq), F32)
    scratch = [pltpu.VMEM((sizes.H, sizes.bq), F32), line, line]
    out, lse = _call(_forward_kernel, sizes, grid, [queries, keys, keys, *ids], outs, scratch, args, 2, interpret)
    return out, lse[:, :, 0]


def backward(
    q: Any,
    k: Any,
    v: Any,
    q_ids: Any,
    kv_ids: Any,
    out: Any,
    lse: Any,
    d_out: Any,
    options: Options,
    tiles: Tiles,
    interpret: Interpret = False,
) -> tuple[Any, Any, Any]:
    """As `reference.backward`, heads before positions: seven products where five would do, and no atomics.

    Args:
        q, k, v, q_ids, kv_ids, options, tiles, interpret: as of `forward`.
        out, lse: what it returned.
        d_out: the gradient of `out`, (B,N,T,H).
    """
    delta = jnp.sum(out.astype(F32) * d_out.astype(F32), -1)[:, :, None]
    args = (q, k, v, d_out, lse[:, :, None], delta, *_id_args(q_ids, kv_ids))

    sizes = _sizes(q, k, q_ids, options, tiles.q_dq, tiles.kv_dq)
    queries, keys, row, ids, grid = _by_query(sizes)
    ins = [queries, keys, keys, queries, row, row, *ids]
    scratch = [pltpu.VMEM((sizes.H, sizes.bq), F32)]
    outs = [(queries, like(q.shape, q.dtype, args))]
    (dq,) = _call(_dq_kernel, sizes, grid, ins, outs, scratch, args, 3, interpret)

    sizes = _sizes(q, k, q_ids, options, tiles.q_dkv, tiles.kv_dkv)
    queries, keys, row, ids, grid = _by_key(sizes)
    ins = [queries, keys, keys, queries, row, row, *ids]
    scratch = [pltpu.VMEM((sizes.bk, sizes.H), F32)] * 2
    outs = [(keys, like(x.shape, x.dtype, args)) for x in (k, v)]
    dk, dv = _call(_dkv_kernel, sizes, grid, ins, outs, scratch, args, 4, interpret)
    return dq, dk, dv
