"""Flash attention on TPU (Mosaic): a forward pass, and two backward passes (one for dq, one for dk and dv).

Scores are stored transposed, (keys, queries), and scaled for exp2. Maxima, sums, log-sum-exps and segment ids of
queries therefore lie along the lanes, reductions over keys run over sublanes, and a number per query is not padded to
128 lanes. The last axis of the grid has as many steps as the longest range of tiles that a tile visits. Index maps stop
at the end of each range, so a step that has nothing to do copies nothing. After FlashAttention-2 (arXiv 2307.08691).

In a kernel, the names of arguments and results are references to tiles in VMEM, i and j are the indices of a tile of
queries and of a tile of keys, q0 and k0 the positions of their first query and key, g is a query head of the key head's
group, s are scores, p probabilities, ds the gradients of scores, and `delta` is the sum of `out * d_out` of a query.
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
"""Stands for a score of -inf; it is finite, so that a query that sees no key never makes a NaN."""
F32 = jnp.float32

_ROWS, _COLS, _FLIP = ((1,), (1,)), ((1,), (0,)), ((0,), (0,))
"""Contracted dims of `_matmul` for a @ b.T, a @ b and a.T @ b."""


def _matmul(a: Any, b: Any, contracted_dims: Any) -> Any:
    """A matrix product in float32."""
    return lax.dot_general(
        a, b, (contracted_dims, ((), ())), precision=product_precision(a), preferred_element_type=F32
    )


def _scores(sizes: Sizes, q: Any, k: Any, q0: Any, k0: Any, ids: Any, compares_positions: bool) -> tuple[Any, Any]:
    """The scores of a tile.

    Args:
        sizes: the static facts of the call.
        q, k: queries (queries, H) and keys (keys, H) of the tile.
        q0, k0: positions of the first query and of the first key.
        ids: segment ids of the queries (1, queries) and of the keys (keys, 1); or None.
        compares_positions: whether to hide scores because of positions.

    Returns:
        The scores (keys, queries) in the unit `sizes.unit`, NEG where hidden; and the derivative of the cap, or None.
    """
    options = sizes.options
    s, slope = _matmul(k, q, _ROWS), None
    if options.soft_cap is not None:
        s = jnp.tanh(s * (options.scale / options.soft_cap))
        slope = 1 - s * s
    if sizes.unit == 1:
        s = s * sizes.factor
    if compares_positions:
        distance = lax.broadcasted_iota(jnp.int32, s.shape, 1) - lax.broadcasted_iota(jnp.int32, s.shape, 0) + (q0 - k0)
        is_visible = distance >= 0
        s = jnp.where(is_visible if options.window is None else is_visible & (distance < options.window), s, NEG)
    if ids is not None:
        q_ids, k_ids = ids
        s = jnp.where(q_ids == k_ids, s, NEG)
    return s, slope


def _run_if_visited(sizes: Sizes, is_visited: Any, q0: Any, k0: Any, run: Callable[[bool], None]) -> None:
    """Call `run` for a visited tile, with True if positions hide some of its pairs and must be compared, else False."""
    if not sizes.options.causal:
        pl.when(is_visited)(lambda: run(False))
        return
    hides_pairs = sizes.hides_pairs(q0, k0)
    pl.when(is_visited & hides_pairs)(lambda: run(True))
    pl.when(is_visited & ~hides_pairs)(lambda: run(False))


def _split_start(sizes: Sizes, refs: Sequence[Any]) -> tuple[Any, Sequence[Any]]:
    """Read the position of the first query (or None) from a kernel's references; return it and the other references."""
    return (refs[0][0], refs[1:]) if sizes.has_offset else (None, refs)


def _split_ids(sizes: Sizes, refs: Sequence[Any]) -> tuple[Any, Sequence[Any]]:
    """Split references into those of the segment ids of queries and keys (or None), and the references after these."""
    return (refs[:2], refs[2:]) if sizes.has_segments else (None, refs)


def _load_ids(id_refs: Any) -> Any:
    """The segment ids of the queries and of the keys of a tile; None if there are none."""
    return None if id_refs is None else (id_refs[0][...], id_refs[1][...])


def _forward_kernel(*refs: Any, sizes: Sizes) -> None:
    """Compute `out` and `lse` of a tile of queries; `acc`, `max_score` and `total` are scratch, kept between steps."""
    start, (q, k, v, *other_refs) = _split_start(sizes, refs)
    id_refs, (out, lse, acc, max_score, total) = _split_ids(sizes, other_refs)
    i, j = pl.program_id(2), pl.program_id(3)
    first, end = sizes.key_tiles(i, start)
    q0, k0 = sizes.position(i, start), (first + j) * sizes.bk

    @pl.when(j == 0)
    def _() -> None:
        acc[...] = jnp.zeros_like(acc)
        max_score[...] = jnp.full_like(max_score, NEG)
        total[...] = jnp.zeros_like(total)

    def add_key_tile(compares_positions: bool) -> None:
        part_count = 2 if sizes.bk % (2 * LANES) == 0 else 1
        part_size = sizes.bk // part_count

        def part_scores(part: int) -> Any:
            rows = pl.ds(part * part_size, part_size)
            ids = None if id_refs is None else (id_refs[0][...], id_refs[1][rows])
            return _scores(sizes, q[...], k[rows], q0, k0 + part * part_size, ids, compares_positions)[0]

        next_scores, part_max, part_total = part_scores(0), max_score[...], total[...]
        for part in range(part_count):
            # start the next part's product first: it overlaps with this part's softmax
            s, next_scores = next_scores, part_scores(part + 1) if part + 1 < part_count else next_scores
            new_max = jnp.maximum(part_max, jnp.max(s, 0, keepdims=True))
            p = jnp.exp2((s - new_max) * sizes.unit)
            decay = jnp.exp2((part_max - new_max) * sizes.unit)
            part_total = part_total * decay + jnp.sum(p, 0, keepdims=True)
            rows = pl.ds(part * part_size, part_size)
            acc[...] = acc[...] * decay + _matmul(v[rows], p.astype(v.dtype), _FLIP)
            part_max = new_max
        max_score[...], total[...] = part_max, part_total

    _run_if_visited(sizes, first + j < end, q0, k0, add_key_tile)

    @pl.when(j == pl.num_programs(3) - 1)
    def _() -> None:
        is_blind = max_score[...] <= NEG / 2
        inverse = jnp.where(is_blind, jnp.nan if sizes.is_never_blind else 0.0, 1 / jnp.maximum(total[...], 1e-30))
        # infinite elements may hide all keys of a query: its output must be NaN, and not that of a blind query
        nan_or_zero = _matmul(jnp.ones((8, q.shape[1]), q.dtype), q[...] * jnp.zeros((), q.dtype), _ROWS)[:1]
        out[...] = (acc[...] * inverse + nan_or_zero).T.astype(out.dtype)
        blind_lse = jnp.nan if sizes.is_never_blind else -jnp.inf
        seeing_lse = max_score[...] * (sizes.unit / LOG2E) + jnp.log(jnp.maximum(total[...], 1e-30))
        lse[...] = jnp.where(is_blind, blind_lse, seeing_lse)


def _probabilities(sizes: Sizes, s: Any, lse: Any) -> Any:
    """The softmax of scores in the unit `sizes.unit`, by the log-sum-exp; 0 for queries that see no key."""
    return jnp.exp2(s * sizes.unit - jnp.where(lse > NEG / 2, lse * LOG2E, -NEG))


def _dq_kernel(*refs: Any, sizes: Sizes) -> None:
    """Compute `dq` of a tile of queries, summed over tiles of keys in the scratch `acc`."""
    start, (q, k, v, d_out, lse, delta, *other_refs) = _split_start(sizes, refs)
    id_refs, (dq, acc) = _split_ids(sizes, other_refs)
    i, j = pl.program_id(2), pl.program_id(3)
    first, end = sizes.key_tiles(i, start)
    q0, k0 = sizes.position(i, start), (first + j) * sizes.bk

    @pl.when(j == 0)
    def _() -> None:
        acc[...] = jnp.zeros_like(acc)

    def add_key_tile(compares_positions: bool) -> None:
        s, slope = _scores(sizes, q[...], k[...], q0, k0, _load_ids(id_refs), compares_positions)
        ds = _probabilities(sizes, s, lse[...]) * (_matmul(v[...], d_out[...], _ROWS) - delta[...])
        ds = ds if slope is None else ds * slope
        acc[...] += _matmul(k[...], ds.astype(k.dtype), _FLIP)

    _run_if_visited(sizes, first + j < end, q0, k0, add_key_tile)

    @pl.when(j == pl.num_programs(3) - 1)
    def _() -> None:
        dq[...] = (acc[...] * sizes.options.scale).T.astype(dq.dtype)


def _dkv_kernel(*refs: Any, sizes: Sizes) -> None:
    """Compute `dk` and `dv` of a tile of keys; the scratch `dk_acc` and `dv_acc` sums over queries and query heads."""
    start, (q, k, v, d_out, lse, delta, *other_refs) = _split_start(sizes, refs)
    id_refs, (dk, dv, dk_acc, dv_acc) = _split_ids(sizes, other_refs)
    j, g, i = pl.program_id(2), pl.program_id(3), pl.program_id(4)
    first, end = sizes.query_tiles(j, start)
    q0, k0 = sizes.position(first + i, start), j * sizes.bk

    @pl.when((g == 0) & (i == 0))
    def _() -> None:
        dk_acc[...] = jnp.zeros_like(dk_acc)
        dv_acc[...] = jnp.zeros_like(dv_acc)

    def add_query_tile(compares_positions: bool) -> None:
        s, slope = _scores(sizes, q[...], k[...], q0, k0, _load_ids(id_refs), compares_positions)
        p = _probabilities(sizes, s, lse[...])
        dv_acc[...] += _matmul(p.astype(d_out.dtype), d_out[...], _COLS)
        ds = p * (_matmul(v[...], d_out[...], _ROWS) - delta[...])
        ds = ds if slope is None else ds * slope
        dk_acc[...] += _matmul(ds.astype(q.dtype), q[...], _COLS)

    _run_if_visited(sizes, first + i < end, q0, k0, add_query_tile)

    @pl.when((g == pl.num_programs(3) - 1) & (i == pl.num_programs(4) - 1))
    def _() -> None:
        dk[...] = (dk_acc[...] * sizes.options.scale).astype(dk.dtype)
        dv[...] = dv_acc[...].astype(dv.dtype)


def cost(sizes: Sizes, matmuls: int, bytes_accessed: int) -> pl.CostEstimate:
    """Estimate the cost of a pass; FLOP are those of visible pairs (with an offset, the mean over a sequence's parts).

    Args:
        sizes: the static facts of the call.
        matmuls: matrix products per tile of queries and keys.
        bytes_accessed: bytes of operands and results.
    """
    pair_count = sizes.B * sizes.N * sizes.options.count_pairs(sizes.T, sizes.S, any_offset=sizes.has_offset)
    flop = 2 * matmuls * sizes.H * pair_count
    return pl.CostEstimate(flops=flop, transcendentals=pair_count, bytes_accessed=bytes_accessed)


def _call(
    kernel: Callable[..., None],
    sizes: Sizes,
    grid: tuple[int, ...],
    in_specs: Sequence[Any],
    out_specs_and_shapes: Sequence[tuple[Any, jax.ShapeDtypeStruct]],
    scratch: Sequence[Any],
    args: Sequence[Any],
    matmuls: int,
    offset: Any,
    interpret: Interpret,
) -> Any:
    """Run a kernel on `args`; return its results, a list of arrays of the shapes in `out_specs_and_shapes`."""
    out_shapes = [shape for _, shape in out_specs_and_shapes]
    bytes_accessed = sum(math.prod(x.shape) * x.dtype.itemsize for x in (*args, *out_shapes))
    dimension_semantics: Any = ("parallel",) * 3 + ("arbitrary",) * (len(grid) - 3)
    grid_options: dict[str, Any] = {
        "grid": grid,
        "in_specs": list(in_specs),
        "out_specs": [spec for spec, _ in out_specs_and_shapes],
        "scratch_shapes": list(scratch),
    }
    if offset is not None:  # the offset lies in scalar memory, where index maps can read it, too
        grid_options = {"grid_spec": pltpu.PrefetchScalarGridSpec(num_scalar_prefetch=1, **grid_options)}
        args = offset[None], *args
    return pl.pallas_call(
        functools.partial(kernel, sizes=sizes),
        out_shape=out_shapes,
        **grid_options,
        interpret=interpret_params("tpu", interpret),
        name=f"attention{kernel.__name__}",
        compiler_params=pltpu.CompilerParams(dimension_semantics=dimension_semantics),
        cost_estimate=cost(sizes, matmuls, bytes_accessed),
    )(*args)


def _sizes_of(q: Any, k: Any, q_ids: Any, offset: Any, options: Options, bq: int, bk: int) -> Sizes:
    """The static facts of a pass with tiles of at most `bq` queries and `bk` keys."""
    (B, N, T, H), (K, S) = q.shape, k.shape[1:3]
    return Sizes(B, T, S, N, K, H, min(bq, T), min(bk, S), q_ids is not None, options, offset is not None)


def _query_pass(sizes: Sizes) -> tuple[Any, Any, Any, list[Any], tuple[int, ...]]:
    """The block specs and the grid of a pass in which each tile of queries visits tiles of keys.

    Returns:
        The specs of queries, of keys, of an array with a number per query and of segment ids (an empty list without
        segments), and the grid: rows, query heads, tiles of queries, visited tiles of keys.
    """
    G = sizes.N // sizes.K

    def key_tile(i: Any, j: Any, start_refs: Sequence[Any]) -> Any:
        first, end = sizes.key_tiles(i, _split_start(sizes, start_refs)[0])
        return jnp.clip(first + j, 0, jnp.maximum(end - 1, 0))

    query_spec = pl.BlockSpec((None, None, sizes.bq, sizes.H), lambda b, n, i, j, *refs: (b, n, i, 0))
    key_spec = pl.BlockSpec(
        (None, None, sizes.bk, sizes.H), lambda b, n, i, j, *refs: (b, div(n, G), key_tile(i, j, refs), 0)
    )
    row_spec = pl.BlockSpec((None, None, 1, sizes.bq), lambda b, n, i, j, *refs: (b, n, 0, i))
    id_specs = [
        pl.BlockSpec((None, 1, sizes.bq), lambda b, n, i, j, *refs: (b, 0, i)),
        pl.BlockSpec((None, sizes.bk, 1), lambda b, n, i, j, *refs: (b, key_tile(i, j, refs), 0)),
    ]
    grid = (sizes.B, sizes.N, sizes.T // sizes.bq, sizes.max_visits(by_key=False))
    return query_spec, key_spec, row_spec, id_specs if sizes.has_segments else [], grid


def _key_pass(sizes: Sizes) -> tuple[Any, Any, Any, list[Any], tuple[int, ...]]:
    """The block specs and the grid of the pass in which each tile of keys visits tiles of queries.

    Returns:
        The specs of queries, of keys, of an array with a number per query and of segment ids (an empty list without
        segments), and the grid: rows, key heads, tiles of keys, query heads per key head, visited tiles of queries.
    """
    G = sizes.N // sizes.K

    def query_tile(j: Any, i: Any, start_refs: Sequence[Any]) -> Any:
        first, end = sizes.query_tiles(j, _split_start(sizes, start_refs)[0])
        return jnp.clip(first + i, 0, jnp.maximum(end - 1, 0))

    query_spec = pl.BlockSpec(
        (None, None, sizes.bq, sizes.H), lambda b, h, j, g, i, *refs: (b, h * G + g, query_tile(j, i, refs), 0)
    )
    key_spec = pl.BlockSpec((None, None, sizes.bk, sizes.H), lambda b, h, j, g, i, *refs: (b, h, j, 0))
    row_spec = pl.BlockSpec(
        (None, None, 1, sizes.bq), lambda b, h, j, g, i, *refs: (b, h * G + g, 0, query_tile(j, i, refs))
    )
    id_specs = [
        pl.BlockSpec((None, 1, sizes.bq), lambda b, h, j, g, i, *refs: (b, 0, query_tile(j, i, refs))),
        pl.BlockSpec((None, sizes.bk, 1), lambda b, h, j, g, i, *refs: (b, j, 0)),
    ]
    grid = (sizes.B, sizes.K, sizes.S // sizes.bk, G, sizes.max_visits(by_key=True))
    return query_spec, key_spec, row_spec, id_specs if sizes.has_segments else [], grid


def _ids_as_args(q_ids: Any, kv_ids: Any) -> tuple[Any, ...]:
    """The segment ids in the shapes that a kernel takes, (B,1,T) and (B,S,1); an empty tuple if there are none."""
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
    """Compute what `reference.forward` computes, from arrays that have heads before positions.

    Args:
        q: queries (B,N,T,H).
        k, v: keys and values (B,K,S,H).
        q_ids, kv_ids: segment ids (B,T) and (B,S), int32, or None.
        offset: position of the first query, an int32 scalar; None for 0.
        options: what to compute.
        tiles: sizes of the tiles, which divide T and S.
        interpret: how to run the kernel, see `compat.interpret_params`.

    Returns:
        The output (B,N,T,H) in the dtype of `q`, and the log-sum-exp (B,N,T) in float32.
    """
    sizes = _sizes_of(q, k, q_ids, offset, options, tiles.q, tiles.kv)
    query_spec, key_spec, row_spec, id_specs, grid = _query_pass(sizes)
    args = (q, k, v, *_ids_as_args(q_ids, kv_ids))
    outs = [
        (query_spec, result_struct(q.shape, q.dtype, args)),
        (row_spec, result_struct((sizes.B, sizes.N, 1, sizes.T), F32, args)),
    ]
    row_scratch = pltpu.VMEM((1, sizes.bq), F32)
    scratch = [pltpu.VMEM((sizes.H, sizes.bq), F32), row_scratch, row_scratch]
    in_specs = [query_spec, key_spec, key_spec, *id_specs]
    out, lse = _call(_forward_kernel, sizes, grid, in_specs, outs, scratch, args, 2, offset, interpret)
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
    """Compute what `reference.backward` computes, from arrays that have heads before positions.

    The two passes take seven matrix products per tile. A single pass would take five, but would need atomics.

    Args:
        q, k, v, q_ids, kv_ids, offset, options, tiles, interpret: the arguments of `forward`.
        out, lse: the results of `forward`.
        d_out: the gradient of `out`, (B,N,T,H).

    Returns:
        The gradients of q, k and v, each with the shape and dtype of its array.
    """
    delta = jnp.sum(out.astype(F32) * d_out.astype(F32), -1)[:, :, None]
    args = (q, k, v, d_out, lse[:, :, None], delta, *_ids_as_args(q_ids, kv_ids))

    sizes = _sizes_of(q, k, q_ids, offset, options, tiles.q_dq, tiles.kv_dq)
    query_spec, key_spec, row_spec, id_specs, grid = _query_pass(sizes)
    in_specs = [query_spec, key_spec, key_spec, query_spec, row_spec, row_spec, *id_specs]
    scratch = [pltpu.VMEM((sizes.H, sizes.bq), F32)]
    outs = [(query_spec, result_struct(q.shape, q.dtype, args))]
    (dq,) = _call(_dq_kernel, sizes, grid, in_specs, outs, scratch, args, 3, offset, interpret)

    sizes = _sizes_of(q, k, q_ids, offset, options, tiles.q_dkv, tiles.kv_dkv)
    query_spec, key_spec, row_spec, id_specs, grid = _key_pass(sizes)
    in_specs = [query_spec, key_spec, key_spec, query_spec, row_spec, row_spec, *id_specs]
    scratch = [pltpu.VMEM((sizes.bk, sizes.H), F32)] * 2
    outs = [(key_spec, result_struct(x.shape, x.dtype, args)) for x in (k, v)]
    dk, dv = _call(_dkv_kernel, sizes, grid, in_specs, outs, scratch, args, 4, offset, interpret)
    return dq, dk, dv
