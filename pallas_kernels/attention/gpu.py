"""Flash attention on Hopper (Mosaic GPU): a forward pass, and a deterministic backward pass each for dq and (dk, dv).

A block has three warpgroups: one copies tiles by TMA into a ring of buffers, two multiply (wgmma), 64 rows each. The
loop over tiles of keys has three parts; only the first and the last compare positions. Scores are scaled for exp2.
After FlashAttention-2 (arXiv 2307.08691) and 3 (2407.08608). Left out: warpgroups that take turns (ping-pong), softmax
that overlaps with the next tile's product, fp8, dropout.

In a kernel, names with `_g` are references to global memory and names with `_s` to shared memory; `_ready` and `_free`
are barriers, one per slot of a ring. n is a query head, h a key head, b a row of the batch, i a block of LENGTH rows,
wg a warpgroup; q0 and k0 are indices of the first query and key. s are scores, p probabilities, dp and ds gradients of
p and s, and `delta` is the sum of `out * d_out` of a query.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import mosaic_gpu as mg
from pallas_kernels.attention.gpu_sizes import (
    GROUPS,
    LENGTH,
    ROWS,
    Sizes,
    Tiles,
    check_tiles,
    choose_tiles,
    padded_width,
    sizes_of,
    why_unsupported,
)
from pallas_kernels.attention.reference import Options
from pallas_kernels.compat import Interpret, result_struct

__all__ = ["Tiles", "backward", "check_tiles", "choose_tiles", "forward", "padded_width", "why_unsupported"]

NEG = -1e30
"""Stands for a score of -inf; it is finite, so that a query that sees no key never makes a NaN."""
LOG2E = math.log2(math.e)


def _scores(
    sizes: Sizes,
    qk: Any,
    q0: Any,
    k0: Any,
    q_ids: Any,
    k_ids: Any,
    *,
    compares_positions: bool = True,
    is_transposed: bool = False,
) -> tuple[Any, Any]:
    """Compute the scores of a tile from the product of its queries and keys.

    Args:
        sizes: the static facts of the call.
        qk: raw products (queries, keys), or (keys, queries) if `is_transposed`.
        q0, k0: positions of the first query and of the first key.
        q_ids, k_ids: segment ids of the queries and of the keys, or None.
        compares_positions: whether to hide scores because of positions, if causal.
        is_transposed: whether `qk` has keys as rows.

    Returns:
        The scores in the shape of `qk`, scaled for exp2, NEG where hidden; and the derivative of the cap, or None.
    """
    options, slope = sizes.options, None
    if options.soft_cap is None:
        s = qk * (options.scale * LOG2E)
    else:
        capped = jnp.tanh(qk * (options.scale / options.soft_cap))
        s, slope = capped * (options.soft_cap * LOG2E), 1 - capped * capped
    along_q, along_k = (mg.along_columns, mg.along_rows) if is_transposed else (mg.along_rows, mg.along_columns)
    if compares_positions and options.causal:
        row_and_column = [plgpu.broadcasted_iota(jnp.int32, s.shape, dim, layout=mg.WGMMA) for dim in (0, 1)]
        query_index, key_index = reversed(row_and_column) if is_transposed else row_and_column
        distance = (query_index + q0) - (key_index + k0)
        s = jnp.where(distance >= 0, s, NEG)
        if options.window is not None:
            s = jnp.where(distance < options.window, s, NEG)
    if q_ids is not None:
        s = jnp.where(along_q(q_ids, s.shape) == along_k(k_ids, s.shape), s, NEG)
    return s, slope


def _launch(
    body: Any, sizes: Sizes, name: str, args: Sequence[Any], out_types: Any, scratch: Any, interpret: Interpret
) -> Any:
    """Run the pass called `name` on `args`; return the pass's results, a list of arrays of `out_types`."""
    has_query_blocks = name in ("attention_forward", "attention_dq")
    heads, length = (sizes.N, sizes.T) if has_query_blocks else (sizes.K, sizes.S)
    matmuls = {"attention_forward": 2, "attention_dq": 3, "attention_dkdv": 4, "attention_dk": 3, "attention_dv": 2}
    # visible pairs; with an offset, their mean over a sequence's parts
    pair_count = sizes.B * sizes.N * sizes.options.count_pairs(sizes.T, sizes.S, any_offset=sizes.has_offset)
    flop = 2 * matmuls[name] * sizes.H * pair_count
    bytes_accessed = sum(math.prod(x.shape) * x.dtype.itemsize for x in (*args, *out_types))
    return mg.launch(
        body,
        args,
        out_type=out_types,
        grid=(heads, length // LENGTH, sizes.B),
        grid_names=("h", "i", "b"),
        name=name,
        scratch=scratch,
        warpgroups=GROUPS + 1,
        cost=pl.CostEstimate(flops=flop, transcendentals=pair_count, bytes_accessed=bytes_accessed),
        interpret=interpret,
    )


def _split_optional_refs(refs: Sequence[Any], sizes: Sizes) -> tuple[Any, Any, Any, Sequence[Any]]:
    """Split references into what `_optional_args` passes and the references after it.

    Returns:
        The references of the queries' and of the keys' segment ids, or None; the position of the first query (its
        value, not a reference), or None; and the other references.
    """
    start, refs_after_start = (refs[0][0], refs[1:]) if sizes.has_offset else (None, refs)
    if not sizes.has_segments:
        return None, None, start, refs_after_start
    q_ids_g, k_ids_g, *other_refs = refs_after_start
    return q_ids_g, k_ids_g, start, other_refs


def _copies(
    sources: tuple[Any, Any, Any], slots: tuple[Any, Any, Any], b: Any, h: Any, bk: int
) -> tuple[Callable[[Any, Any], list[Any]], Callable[[Any, Any], list[Any]]]:
    """Two functions of (step, slot) that list the copies, pairs (from, to), of a tile of keys and of a tile of values.

    Args:
        sources: keys, their segment ids (`None` without segments) and values in global memory.
        slots: the rings of buffers for the sources, in shared memory.
        b, h: row of the batch and key head.
        bk: number of keys in a tile.
    """
    (k_g, ids_g, v_g), (k_s, ids_s, v_s) = sources, slots

    def key_copies(step: Any, slot: Any) -> list[Any]:
        rows = pl.ds(step * bk, bk)
        id_copies = [] if ids_g is None else [(ids_g.at[b, rows], ids_s.at[slot])]
        return [(k_g.at[b, rows, h], k_s.at[slot]), *id_copies]

    def value_copies(step: Any, slot: Any) -> list[Any]:
        return [(v_g.at[b, pl.ds(step * bk, bk), h], v_s.at[slot])]

    return key_copies, value_copies


def _optional_args(q_ids: Any, kv_ids: Any, offset: Any) -> tuple[Any, ...]:
    """The offset (1,) and the segment ids of queries and of keys, without those that are None."""
    return *(() if offset is None else (offset[None],)), *(() if q_ids is None else (q_ids, kv_ids))


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
    """Compute what `reference.forward` computes.

    Args:
        q, k, v, q_ids, kv_ids, offset, options: as in `reference.forward`; T and S must be multiples of LENGTH, and H
            one of WIDTHS.
        tiles: sizes of the tiles.
        interpret: how to run the kernel, see `compat.interpret_params`.

    Returns:
        The output (B,T,N,H) in the dtype of `q`, and the log-sum-exp (B,N,T) in float32.
    """
    sizes = sizes_of(q, k, q_ids, offset, options, tiles, interpret)
    bk, stages, has_segments, H = tiles.kv, tiles.stages, sizes.has_segments, sizes.H

    def body(q_g: Any, k_g: Any, v_g: Any, *other_refs: Any) -> None:
        q_ids_g, k_ids_g, start, (out_g, lse_g, *scratch_refs) = _split_optional_refs(other_refs, sizes)
        q_s, k_s, v_s, lse_s, q_ids_s, k_ids_s, q_ready, k_ready, v_ready, k_free, v_free = scratch_refs
        n, i, b, wg = map(lax.axis_index, ("h", "i", "b", "wg"))
        block_start = i * LENGTH
        first_tile, _, _, end_tile = sizes.key_tiles(sizes.position(block_start, start), LENGTH, bk)

        @pl.when(wg == GROUPS)
        def copy() -> None:
            keys, values = _copies((k_g, k_ids_g, v_g), (k_s, k_ids_s, v_s), b, lax.div(n, sizes.G), bk)
            mg.feed(first_tile, end_tile, stages, [(keys, k_ready, k_free), (values, v_ready, v_free)])

        @pl.when(wg < GROUPS)
        def multiply() -> None:
            plgpu.set_max_registers(232, action="increase")
            q0 = block_start + wg * ROWS
            rows, q_buffer = pl.ds(q0, ROWS), q_s.at[wg]  # in the end, the output takes the queries' memory
            plgpu.copy_gmem_to_smem(q_g.at[b, rows, n], q_buffer, q_ready.at[wg])
            if has_segments:
                plgpu.copy_gmem_to_smem(q_ids_g.at[b, rows], q_ids_s.at[wg], q_ready.at[wg])
            plgpu.barrier_wait(q_ready.at[wg])
            q_ids = mg.load(q_ids_s.at[wg], mg.ROW) if has_segments else None
            # infinite elements may hide all keys of a query: its output must be NaN, and not that of a blind query
            nan_or_zero = (mg.load(q_buffer).astype(jnp.float32) * 0.0).sum(axis=1)

            def add_key_tile(tile: Any, carry: Any, compares_positions: bool) -> Any:
                acc, max_score, total = carry
                slot = lax.rem(tile - first_tile, stages)
                plgpu.barrier_wait(k_ready.at[slot])
                qk = mg.matmul(q_buffer, k_s.at[slot], (ROWS, bk), is_interpreted=sizes.is_interpreted, flip=True)
                k_ids = mg.load(k_ids_s.at[slot], mg.COL) if has_segments else None
                mg.release(k_free.at[slot], was_loaded=has_segments or sizes.is_interpreted)
                q_position = sizes.position(q0, start)
                s, _ = _scores(sizes, qk, q_position, tile * bk, q_ids, k_ids, compares_positions=compares_positions)
                new_max = jnp.maximum(max_score, s.max(axis=1))
                p = jnp.exp2(s - mg.along_rows(new_max, s.shape))
                decay = jnp.exp2(max_score - new_max)
                total = total * decay + p.sum(axis=1)
                acc = acc * mg.along_rows(decay, acc.shape)
                plgpu.barrier_wait(v_ready.at[slot])
                acc = mg.matmul_add(acc, p.astype(v.dtype), v_s.at[slot], is_interpreted=sizes.is_interpreted)
                mg.release(v_free.at[slot], was_loaded=sizes.is_interpreted)
                return acc, new_max, total

            # the block's tiles that only its other warpgroup sees are hidden here, and change nothing
            _, clear_first, clear_end, _ = sizes.key_tiles(sizes.position(q0, start), ROWS, bk)
            clear_first, clear_end = (lax.clamp(first_tile, tile, end_tile) for tile in (clear_first, clear_end))
            add_masked_tile = functools.partial(add_key_tile, compares_positions=True)
            add_clear_tile = functools.partial(add_key_tile, compares_positions=False)
            carry = (
                mg.full_registers((ROWS, H)),
                mg.full_registers((ROWS,), mg.ROW, NEG),
                mg.full_registers((ROWS,), mg.ROW),
            )
            carry = lax.fori_loop(first_tile, clear_first, add_masked_tile, carry)
            carry = lax.fori_loop(clear_first, clear_end, add_clear_tile, carry)
            acc, max_score, total = lax.fori_loop(clear_end, end_tile, add_masked_tile, carry)
            is_blind = max_score <= NEG / 2
            inverse = jnp.where(is_blind, jnp.nan if sizes.is_never_blind else 0.0, 1 / jnp.maximum(total, 1e-30))
            out = acc * mg.along_rows(inverse, acc.shape) + mg.along_rows(nan_or_zero, acc.shape)
            q_buffer[...] = out.astype(q.dtype)
            blind_lse = jnp.nan if sizes.is_never_blind else -jnp.inf
            lse_s.at[wg][...] = jnp.where(is_blind, blind_lse, max_score * (1 / LOG2E) + jnp.log(total))
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(q_buffer, out_g.at[b, rows, n])
            plgpu.copy_smem_to_gmem(lse_s.at[wg], lse_g.at[b, n, rows])
            plgpu.wait_smem_to_gmem(0)

    args = (q, k, v, *_optional_args(q_ids, kv_ids, offset))
    ring = plgpu.Barrier(num_arrivals=GROUPS, num_barriers=stages)
    scratch = [
        mg.tiled_smem((GROUPS, ROWS, H), q.dtype),
        mg.tiled_smem((stages, bk, H), k.dtype),
        mg.tiled_smem((stages, bk, H), v.dtype),
        plgpu.SMEM((GROUPS, ROWS), jnp.float32),
        plgpu.SMEM((GROUPS, ROWS), jnp.int32),
        plgpu.SMEM((stages, bk), jnp.int32),
        plgpu.Barrier(num_arrivals=1 + has_segments, num_barriers=GROUPS),
        plgpu.Barrier(num_arrivals=1 + has_segments, num_barriers=stages),
        plgpu.Barrier(num_barriers=stages),
        ring,
        ring,
    ]
    out_types = [result_struct(q.shape, q.dtype, args), result_struct((sizes.B, sizes.N, sizes.T), jnp.float32, args)]
    return tuple(_launch(body, sizes, "attention_forward", args, out_types, scratch, interpret))


def _probabilities(s: Any, lse: Any, along_keys: Any) -> Any:
    """The softmax exp2(s - lse) of scores; 0 for queries that see no key.

    Args:
        s: scores of a tile, scaled for exp2.
        lse: log-sum-exp (base e) of each query's scores.
        along_keys: `mg.along_rows` if queries are the rows of `s`, `mg.along_columns` if they are its columns.
    """
    base2_lse = jnp.where(lse > NEG / 2, lse * LOG2E, -NEG)
    return jnp.exp2(s - along_keys(base2_lse, s.shape))


def _query_gradients(args: tuple[Any, ...], sizes: Sizes, interpret: Interpret) -> Any:
    """The gradient of the queries; `args` are q, k, v, d_out, lse, delta and the optional arguments."""
    q, k, v, d_out = args[:4]
    bk, stages, has_segments, H = sizes.tiles.kv_dq, sizes.tiles.stages_backward, sizes.has_segments, sizes.H

    def body(q_g: Any, k_g: Any, v_g: Any, d_g: Any, lse_g: Any, delta_g: Any, *other_refs: Any) -> None:
        q_ids_g, k_ids_g, start, (dq_g, *scratch_refs) = _split_optional_refs(other_refs, sizes)
        q_s, d_s, k_s, v_s, lse_s, delta_s, q_ids_s, k_ids_s, q_ready, k_ready, v_ready, k_free, v_free = scratch_refs
        n, i, b, wg = map(lax.axis_index, ("h", "i", "b", "wg"))
        block_start = i * LENGTH
        first_tile, _, _, end_tile = sizes.key_tiles(sizes.position(block_start, start), LENGTH, bk)

        @pl.when(wg == GROUPS)
        def copy() -> None:
            keys, values = _copies((k_g, k_ids_g, v_g), (k_s, k_ids_s, v_s), b, lax.div(n, sizes.G), bk)
            mg.feed(first_tile, end_tile, stages, [(values, v_ready, v_free), (keys, k_ready, k_free)])

        @pl.when(wg < GROUPS)
        def multiply() -> None:
            plgpu.set_max_registers(232, action="increase")
            q0 = block_start + wg * ROWS
            rows = pl.ds(q0, ROWS)
            copies = [(q_g.at[b, rows, n], q_s), (d_g.at[b, rows, n], d_s)]
            copies += [(lse_g.at[b, n, rows], lse_s), (delta_g.at[b, n, rows], delta_s)]
            copies += [(q_ids_g.at[b, rows], q_ids_s)] if has_segments else []
            for source, destination in copies:
                plgpu.copy_gmem_to_smem(source, destination.at[wg], q_ready.at[wg])
            plgpu.barrier_wait(q_ready.at[wg])
            lse, delta = mg.load(lse_s.at[wg], mg.ROW), mg.load(delta_s.at[wg], mg.ROW)
            q_ids = mg.load(q_ids_s.at[wg], mg.ROW) if has_segments else None

            def add_key_tile(tile: Any, acc: Any) -> Any:
                slot = lax.rem(tile - first_tile, stages)
                plgpu.barrier_wait(v_ready.at[slot])
                dp = mg.matmul(d_s.at[wg], v_s.at[slot], (ROWS, bk), is_interpreted=sizes.is_interpreted, flip=True)
                mg.release(v_free.at[slot], was_loaded=sizes.is_interpreted)
                plgpu.barrier_wait(k_ready.at[slot])
                qk = mg.matmul(q_s.at[wg], k_s.at[slot], (ROWS, bk), is_interpreted=sizes.is_interpreted, flip=True)
                k_ids = mg.load(k_ids_s.at[slot], mg.COL) if has_segments else None
                s, slope = _scores(sizes, qk, sizes.position(q0, start), tile * bk, q_ids, k_ids)
                ds = _probabilities(s, lse, mg.along_rows) * (dp - mg.along_rows(delta, s.shape))
                ds = ds if slope is None else ds * slope
                acc = mg.matmul_add(acc, ds.astype(k.dtype), k_s.at[slot], is_interpreted=sizes.is_interpreted)
                mg.release(k_free.at[slot], was_loaded=has_segments or sizes.is_interpreted)
                return acc

            acc = lax.fori_loop(first_tile, end_tile, add_key_tile, mg.full_registers((ROWS, H)))
            q_s.at[wg][...] = (acc * sizes.options.scale).astype(q.dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(q_s.at[wg], dq_g.at[b, rows, n])
            plgpu.wait_smem_to_gmem(0)

    ring = plgpu.Barrier(num_arrivals=GROUPS, num_barriers=stages)
    scratch = [
        mg.tiled_smem((GROUPS, ROWS, H), q.dtype),
        mg.tiled_smem((GROUPS, ROWS, H), d_out.dtype),
        mg.tiled_smem((stages, bk, H), k.dtype),
        mg.tiled_smem((stages, bk, H), v.dtype),
        plgpu.SMEM((GROUPS, ROWS), jnp.float32),
        plgpu.SMEM((GROUPS, ROWS), jnp.float32),
        plgpu.SMEM((GROUPS, ROWS), jnp.int32),
        plgpu.SMEM((stages, bk), jnp.int32),
        plgpu.Barrier(num_arrivals=4 + has_segments, num_barriers=GROUPS),
        plgpu.Barrier(num_arrivals=1 + has_segments, num_barriers=stages),
        plgpu.Barrier(num_barriers=stages),
        ring,
        ring,
    ]
    return _launch(body, sizes, "attention_dq", args, [result_struct(q.shape, q.dtype, args)], scratch, interpret)[0]


def _key_value_gradients(args: tuple[Any, ...], sizes: Sizes, outputs: str, interpret: Interpret) -> list[Any]:
    """The gradients of the keys and values, summed over the query heads of each key head.

    Args:
        args: q, k, v, d_out, lse, delta and the optional arguments.
        sizes: the static facts of the call.
        outputs: what to compute: "dkdv" for both gradients, "dk" or "dv" for one.
        interpret: how to run the kernel.

    Returns:
        The gradients that `outputs` names, the gradient of the keys first.
    """
    q, k, v, d_out = args[:4]
    bq, stages, has_segments, H = sizes.tiles.q_dkv, sizes.tiles.stages_backward, sizes.has_segments, sizes.H
    has_dk, has_dv = "dk" in outputs, "dv" in outputs

    def body(q_g: Any, k_g: Any, v_g: Any, d_g: Any, lse_g: Any, delta_g: Any, *other_refs: Any) -> None:
        q_ids_g, k_ids_g, start, output_and_scratch_refs = _split_optional_refs(other_refs, sizes)
        outputs_g = output_and_scratch_refs[: has_dk + has_dv]
        scratch_refs = output_and_scratch_refs[has_dk + has_dv :]
        k_s, v_s, q_s, d_s, lse_s, delta_s, q_ids_s, k_ids_s, k_ready, q_ready, d_ready, q_free, d_free = scratch_refs
        h, i, b, wg = map(lax.axis_index, ("h", "i", "b", "wg"))
        block_start = i * LENGTH
        first_tile, end_tile = sizes.query_tiles(block_start, LENGTH, bq, start)
        head_steps = end_tile - first_tile  # steps per query head; the loop runs over all query heads of this key head

        @pl.when(wg == GROUPS)
        def copy() -> None:
            def head_and_rows(step: Any) -> tuple[Any, Any]:
                group_head, tile = lax.div(step, lax.max(head_steps, 1)), lax.rem(step, lax.max(head_steps, 1))
                return h * sizes.G + group_head, pl.ds((first_tile + tile) * bq, bq)

            def query_copies(step: Any, slot: Any) -> list[Any]:
                n, rows = head_and_rows(step)
                id_copies = [(q_ids_g.at[b, rows], q_ids_s.at[slot])] if has_segments else []
                return [(q_g.at[b, rows, n], q_s.at[slot]), (lse_g.at[b, n, rows], lse_s.at[slot]), *id_copies]

            def gradient_copies(step: Any, slot: Any) -> list[Any]:
                n, rows = head_and_rows(step)
                return [(d_g.at[b, rows, n], d_s.at[slot]), (delta_g.at[b, n, rows], delta_s.at[slot])]

            streams = [(query_copies, q_ready, q_free), (gradient_copies, d_ready, d_free)]
            mg.feed(jnp.int32(0), head_steps * sizes.G, stages, streams)

        @pl.when(wg < GROUPS)
        def multiply() -> None:
            plgpu.set_max_registers(232, action="increase")
            k0 = block_start + wg * ROWS
            rows = pl.ds(k0, ROWS)
            relative_k0 = k0 if start is None else k0 - start  # position relative to that of the first query
            copies = [(k_g.at[b, rows, h], k_s), (v_g.at[b, rows, h], v_s)]
            copies += [(k_ids_g.at[b, rows], k_ids_s)] if has_segments else []
            for source, destination in copies:
                plgpu.copy_gmem_to_smem(source, destination.at[wg], k_ready.at[wg])
            plgpu.barrier_wait(k_ready.at[wg])
            k_ids = mg.load(k_ids_s.at[wg], mg.ROW) if has_segments else None

            def add_query_tile(step: Any, sums: Any) -> Any:
                slot = lax.rem(step, stages)
                q0 = (first_tile + lax.rem(step, lax.max(head_steps, 1))) * bq
                plgpu.barrier_wait(q_ready.at[slot])
                qk = mg.matmul(k_s.at[wg], q_s.at[slot], (ROWS, bq), is_interpreted=sizes.is_interpreted, flip=True)
                q_ids = mg.load(q_ids_s.at[slot], mg.COL) if has_segments else None
                s, slope = _scores(sizes, qk, q0, relative_k0, q_ids, k_ids, is_transposed=True)
                p = _probabilities(s, mg.load(lse_s.at[slot], mg.COL), mg.along_columns)
                plgpu.barrier_wait(d_ready.at[slot])
                sums = list(sums)
                ds: Any = None
                if has_dv:
                    narrow_p = p.astype(d_out.dtype)
                    sums[-1] = mg.matmul_add(sums[-1], narrow_p, d_s.at[slot], is_interpreted=sizes.is_interpreted)
                if has_dk:
                    dp = mg.matmul(v_s.at[wg], d_s.at[slot], (ROWS, bq), is_interpreted=sizes.is_interpreted, flip=True)
                    ds = p * (dp - mg.along_columns(mg.load(delta_s.at[slot], mg.COL), s.shape))
                    ds = ds if slope is None else ds * slope
                mg.release(d_free.at[slot], was_loaded=True)
                if has_dk:
                    narrow_ds = ds.astype(q.dtype)
                    sums[0] = mg.matmul_add(sums[0], narrow_ds, q_s.at[slot], is_interpreted=sizes.is_interpreted)
                mg.release(q_free.at[slot], was_loaded=True)
                return tuple(sums)

            zeros = tuple(mg.full_registers((ROWS, H)) for _ in range(has_dk + has_dv))
            sums = lax.fori_loop(0, head_steps * sizes.G, add_query_tile, zeros)
            # in the end, the gradients take the memory of the keys and values
            buffers_and_scales = [(k_s, sizes.options.scale)] * has_dk + [(v_s, 1.0)] * has_dv
            for (buffer_s, scale), total in zip(buffers_and_scales, sums, strict=True):
                buffer_s.at[wg][...] = (total * scale).astype(k.dtype)
            plgpu.commit_smem()
            for (buffer_s, _), output_g in zip(buffers_and_scales, outputs_g, strict=True):
                plgpu.copy_smem_to_gmem(buffer_s.at[wg], output_g.at[b, rows, h])
            plgpu.wait_smem_to_gmem(0)

    ring = plgpu.Barrier(num_arrivals=GROUPS, num_barriers=stages)
    scratch = [
        mg.tiled_smem((GROUPS, ROWS, H), k.dtype),
        mg.tiled_smem((GROUPS, ROWS, H), v.dtype),
        mg.tiled_smem((stages, bq, H), q.dtype),
        mg.tiled_smem((stages, bq, H), d_out.dtype),
        plgpu.SMEM((stages, bq), jnp.float32),
        plgpu.SMEM((stages, bq), jnp.float32),
        plgpu.SMEM((stages, bq), jnp.int32),
        plgpu.SMEM((GROUPS, ROWS), jnp.int32),
        plgpu.Barrier(num_arrivals=2 + has_segments, num_barriers=GROUPS),
        plgpu.Barrier(num_arrivals=2 + has_segments, num_barriers=stages),
        plgpu.Barrier(num_arrivals=2, num_barriers=stages),
        ring,
        ring,
    ]
    out_types = [result_struct(x.shape, x.dtype, args) for x in [k] * has_dk + [v] * has_dv]
    return list(_launch(body, sizes, f"attention_{outputs}", args, out_types, scratch, interpret))


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
    """Compute what `reference.backward` computes, without atomics, so that every run gives the same bits.

    This takes seven matrix products per tile; a single pass would take five. For heads of 256 it takes eight, because
    the sums for dk and dv together would exceed the registers.

    Args:
        q, k, v, q_ids, kv_ids, offset, options, tiles, interpret: the arguments of `forward`.
        out, lse: the results of `forward`.
        d_out: the gradient of `out`, (B,T,N,H).

    Returns:
        The gradients of q, k and v, each with the shape and dtype of its array.
    """
    delta = jnp.einsum("btnh,btnh->bnt", out.astype(jnp.float32), d_out.astype(jnp.float32))
    sizes = sizes_of(q, k, q_ids, offset, options, tiles, interpret)
    args = (q, k, v, d_out, lse, delta, *_optional_args(q_ids, kv_ids, offset))
    outputs_by_pass = ("dkdv",) if sizes.H <= 128 else ("dk", "dv")
    dk, dv = [
        gradient for outputs in outputs_by_pass for gradient in _key_value_gradients(args, sizes, outputs, interpret)
    ]
    return _query_gradients(args, sizes, interpret), dk, dv
