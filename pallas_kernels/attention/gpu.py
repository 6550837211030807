"""Flash attention on Hopper (Mosaic GPU): forward, and the backward in deterministic passes (dq; dk and dv).

A block has three warpgroups: one copies by TMA into a ring of buffers, two multiply (wgmma) on 64 rows each. The loop
over keys has three parts, of which only the outer ones compare positions. Scores are kept in base 2.
After FlashAttention-2 (arXiv 2307.08691) and 3 (2407.08608). Left out: warpgroups that take turns (ping-pong), the
softmax of one tile under the product of the next, fp8, dropout.
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
"""Stands for -inf: a row with nothing to see never makes a NaN."""
LOG2E = math.log2(math.e)


def _scores(
    sizes: Sizes, s: Any, q0: Any, k0: Any, q_ids: Any, k_ids: Any, *, hide: bool = True, transposed: bool = False
) -> tuple[Any, Any]:
    """Raw products to base-2 scores, NEG where hidden; and the cap's derivative, or None."""
    options, slope = sizes.options, None
    if options.soft_cap is None:
        s = s * (options.scale * LOG2E)
    else:
        capped = jnp.tanh(s * (options.scale / options.soft_cap))
        s, slope = capped * (options.soft_cap * LOG2E), 1 - capped * capped
    along_q, along_k = (mg.along_columns, mg.along_rows) if transposed else (mg.along_rows, mg.along_columns)
    if hide and options.causal:
        at = [plgpu.broadcasted_iota(jnp.int32, s.shape, dim, layout=mg.WGMMA) for dim in (0, 1)]
        t, u = reversed(at) if transposed else at
        back = (t + q0) - (u + k0)
        s = jnp.where(back >= 0, s, NEG)
        if options.window is not None:
            s = jnp.where(back < options.window, s, NEG)
    if q_ids is not None:
        s = jnp.where(along_q(q_ids, s.shape) == along_k(k_ids, s.shape), s, NEG)
    return s, slope


def _block() -> tuple[Any, Any, Any, Any]:
    """Head, tile, row of the batch and warpgroup."""
    h, i, b, wg = (lax.axis_index(axis) for axis in ("h", "i", "b", "wg"))
    return h, i, b, wg


def _launch(
    body: Any, sizes: Sizes, name: str, args: Sequence[Any], kinds: Any, scratch: Any, interpret: Interpret
) -> Any:
    by_query = name in ("attention_forward", "attention_dq")
    heads, length = (sizes.N, sizes.T) if by_query else (sizes.K, sizes.S)
    products = {"attention_forward": 2, "attention_dq": 3, "attention_dkdv": 4, "attention_dk": 3, "attention_dv": 2}
    # where queries have an offset, the mean over a sequence's parts
    pairs = sizes.B * sizes.N * sizes.options.pairs(sizes.T, sizes.S, anywhere=sizes.offset)
    moved = sum(math.prod(x.shape) * x.dtype.itemsize for x in (*args, *kinds))
    return mg.launch(
        body,
        args,
        out_type=kinds,
        grid=(heads, length // LENGTH, sizes.B),
        grid_names=("h", "i", "b"),
        name=name,
        scratch=scratch,
        warpgroups=GROUPS + 1,
        cost=pl.CostEstimate(flops=2 * products[name] * sizes.H * pairs, transcendentals=pairs, bytes_accessed=moved),
        interpret=interpret,
    )


def _beside(rest: Sequence[Any], sizes: Sizes) -> tuple[Any, Any, Any, Sequence[Any]]:
    """References of segment ids and the position of the first query, where there are any, and what follows them."""
    start, rest = (rest[0][0], rest[1:]) if sizes.offset else (None, rest)
    return (*rest[:2], start, rest[2:]) if sizes.segments else (None, None, start, rest)


def _copies(
    sources: tuple[Any, Any, Any], slots: tuple[Any, Any, Any], b: Any, head: Any, bk: int
) -> tuple[Callable[[Any, Any], list[Any]], Callable[[Any, Any], list[Any]]]:
    """What fills a slot with the keys of a step, their segment ids (`None`: there are none), and with its values."""
    (k_g, ids_g, v_g), (k_s, ids_s, v_s) = sources, slots

    def keys(step: Any, slot: Any) -> list[Any]:
        rows = pl.ds(step * bk, bk)
        ids = [] if ids_g is None else [(ids_g.at[b, rows], ids_s.at[slot])]
        return [(k_g.at[b, rows, head], k_s.at[slot]), *ids]

    def values(step: Any, slot: Any) -> list[Any]:
        return [(v_g.at[b, pl.ds(step * bk, bk), head], v_s.at[slot])]

    return keys, values


def _args_beside(q_ids: Any, kv_ids: Any, offset: Any) -> tuple[Any, ...]:
    return *(() if offset is None else (offset[None],)), *(() if q_ids is None else (q_ids, kv_ids))


def _position(index: Any, start: Any) -> Any:
    """Of the query at an index."""
    return index if start is None else index + start


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
    """As `reference.forward`.

    Args:
        q, k, v, q_ids, kv_ids, offset, options: as there; T and S multiples of LENGTH, H of WIDTHS.
        tiles: sizes of steps.
        interpret: see `compat.interpret_params`.
    """
    sizes = sizes_of(q, k, q_ids, offset, options, tiles, interpret)
    bk, stages, segments, H = tiles.kv, tiles.stages, sizes.segments, sizes.H

    def body(q_g: Any, k_g: Any, v_g: Any, *rest: Any) -> None:
        q_ids_g, k_ids_g, start, (out_g, lse_g, *own) = _beside(rest, sizes)
        q_s, k_s, v_s, lse_s, q_ids_s, k_ids_s, q_ready, k_ready, v_ready, k_free, v_free = own
        n, i, b, wg = _block()
        block = i * LENGTH
        begin, _, _, end = sizes.keys(_position(block, start), LENGTH, bk)

        @pl.when(wg == GROUPS)
        def copy() -> None:
            keys, values = _copies((k_g, k_ids_g, v_g), (k_s, k_ids_s, v_s), b, lax.div(n, sizes.G), bk)
            mg.feed(begin, end, stages, [(keys, k_ready, k_free), (values, v_ready, v_free)])

        @pl.when(wg < GROUPS)
        def multiply() -> None:
            plgpu.set_max_registers(232, action="increase")
            q0 = block + wg * ROWS
            rows, mine = pl.ds(q0, ROWS), q_s.at[wg]  # the queries' memory takes the output in the end
            plgpu.copy_gmem_to_smem(q_g.at[b, rows, n], mine, q_ready.at[wg])
            if segments:
                plgpu.copy_gmem_to_smem(q_ids_g.at[b, rows], q_ids_s.at[wg], q_ready.at[wg])
            plgpu.barrier_wait(q_ready.at[wg])
            own_ids = mg.load(q_ids_s.at[wg], mg.ROW) if segments else None
            # a query with infinite values may hide all its keys: it must not come out as a blind one
            broken = (mg.load(mine).astype(jnp.float32) * 0.0).sum(axis=1)

            def one(step: Any, carry: Any, hide: bool) -> Any:
                acc, top, total = carry
                slot = lax.rem(step - begin, stages)
                plgpu.barrier_wait(k_ready.at[slot])
                s = mg.matmul(mine, k_s.at[slot], (ROWS, bk), plain=sizes.plain, flip=True)
                ids = mg.load(k_ids_s.at[slot], mg.COL) if segments else None
                mg.release(k_free.at[slot], read=segments or sizes.plain)
                s, _ = _scores(sizes, s, _position(q0, start), step * bk, own_ids, ids, hide=hide)
                new = jnp.maximum(top, s.max(axis=1))
                p = jnp.exp2(s - mg.along_rows(new, s.shape))
                fade = jnp.exp2(top - new)
                total = total * fade + p.sum(axis=1)
                acc = acc * mg.along_rows(fade, acc.shape)
                plgpu.barrier_wait(v_ready.at[slot])
                acc = mg.matmul_add(acc, p.astype(v.dtype), v_s.at[slot], plain=sizes.plain)
                mg.release(v_free.at[slot], read=sizes.plain)
                return acc, new, total

            # tiles outside the warpgroup's own range are all hidden, and change nothing
            _, a, clear, _ = sizes.keys(_position(q0, start), ROWS, bk)
            a, clear = lax.clamp(begin, a, end), lax.clamp(begin, clear, end)
            masked, unmasked = functools.partial(one, hide=True), functools.partial(one, hide=False)
            carry = mg.full((ROWS, H)), mg.full((ROWS,), mg.ROW, NEG), mg.full((ROWS,), mg.ROW)
            carry = lax.fori_loop(begin, a, masked, carry)
            carry = lax.fori_loop(a, clear, unmasked, carry)
            acc, top, total = lax.fori_loop(clear, end, masked, carry)
            blind = top <= NEG / 2
            inverse = jnp.where(blind, jnp.nan if sizes.sighted else 0.0, 1 / jnp.maximum(total, 1e-30))
            out = acc * mg.along_rows(inverse, acc.shape) + mg.along_rows(broken, acc.shape)
            mine[...] = out.astype(q.dtype)
            unseen = jnp.nan if sizes.sighted else -jnp.inf
            lse_s.at[wg][...] = jnp.where(blind, unseen, top * (1 / LOG2E) + jnp.log(total))
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(mine, out_g.at[b, rows, n])
            plgpu.copy_smem_to_gmem(lse_s.at[wg], lse_g.at[b, n, rows])
            plgpu.wait_smem_to_gmem(0)

    args = (q, k, v, *_args_beside(q_ids, kv_ids, offset))
    ring = plgpu.Barrier(num_arrivals=GROUPS, num_barriers=stages)
    scratch = [
        mg.wide((GROUPS, ROWS, H), q.dtype),
        mg.wide((stages, bk, H), k.dtype),
        mg.wide((stages, bk, H), v.dtype),
        plgpu.SMEM((GROUPS, ROWS), jnp.float32),
        plgpu.SMEM((GROUPS, ROWS), jnp.int32),
        plgpu.SMEM((stages, bk), jnp.int32),
        plgpu.Barrier(num_arrivals=1 + segments, num_barriers=GROUPS),
        plgpu.Barrier(num_arrivals=1 + segments, num_barriers=stages),
        plgpu.Barrier(num_barriers=stages),
        ring,
        ring,
    ]
    kinds = [result_struct(q.shape, q.dtype, args), result_struct((sizes.B, sizes.N, sizes.T), jnp.float32, args)]
    return tuple(_launch(body, sizes, "attention_forward", args, kinds, scratch, interpret))


def _probabilities(s: Any, lse: Any, along: Any) -> Any:
    """exp2(s - lse), 0 on rows that saw nothing."""
    lse = jnp.where(lse > NEG / 2, lse * LOG2E, -NEG)
    return jnp.exp2(s - along(lse, s.shape))


def _dq(args: tuple[Any, ...], sizes: Sizes, interpret: Interpret) -> Any:
    q, k, v, d_out = args[:4]
    bk, stages, segments, H = sizes.tiles.kv_dq, sizes.tiles.stages_backward, sizes.segments, sizes.H

    def body(q_g: Any, k_g: Any, v_g: Any, d_g: Any, lse_g: Any, delta_g: Any, *rest: Any) -> None:
        q_ids_g, k_ids_g, start, (dq_g, *own) = _beside(rest, sizes)
        q_s, d_s, k_s, v_s, lse_s, delta_s, q_ids_s, k_ids_s, q_ready, k_ready, v_ready, k_free, v_free = own
        n, i, b, wg = _block()
        block = i * LENGTH
        begin, _, _, end = sizes.keys(_position(block, start), LENGTH, bk)

        @pl.when(wg == GROUPS)
        def copy() -> None:
            keys, values = _copies((k_g, k_ids_g, v_g), (k_s, k_ids_s, v_s), b, lax.div(n, sizes.G), bk)
            mg.feed(begin, end, stages, [(values, v_ready, v_free), (keys, k_ready, k_free)])

        @pl.when(wg < GROUPS)
        def multiply() -> None:
            plgpu.set_max_registers(232, action="increase")
            q0 = block + wg * ROWS
            rows = pl.ds(q0, ROWS)
            pairs = [(q_g.at[b, rows, n], q_s), (d_g.at[b, rows, n], d_s)]
            pairs += [(lse_g.at[b, n, rows], lse_s), (delta_g.at[b, n, rows], delta_s)]
            pairs += [(q_ids_g.at[b, rows], q_ids_s)] if segments else []
            for source, to in pairs:
                plgpu.copy_gmem_to_smem(source, to.at[wg], q_ready.at[wg])
            plgpu.barrier_wait(q_ready.at[wg])
            lse, delta = mg.load(lse_s.at[wg], mg.ROW), mg.load(delta_s.at[wg], mg.ROW)
            own_ids = mg.load(q_ids_s.at[wg], mg.ROW) if segments else None

            def one(step: Any, acc: Any) -> Any:
                slot = lax.rem(step - begin, stages)
                plgpu.barrier_wait(v_ready.at[slot])
                dp = mg.matmul(d_s.at[wg], v_s.at[slot], (ROWS, bk), plain=sizes.plain, flip=True)
                mg.release(v_free.at[slot], read=sizes.plain)
                plgpu.barrier_wait(k_ready.at[slot])
                s = mg.matmul(q_s.at[wg], k_s.at[slot], (ROWS, bk), plain=sizes.plain, flip=True)
                ids = mg.load(k_ids_s.at[slot], mg.COL) if segments else None
                s, slope = _scores(sizes, s, _position(q0, start), step * bk, own_ids, ids)
                ds = _probabilities(s, lse, mg.along_rows) * (dp - mg.along_rows(delta, s.shape))
                ds = ds if slope is None else ds * slope
                acc = mg.matmul_add(acc, ds.astype(k.dtype), k_s.at[slot], plain=sizes.plain)
                mg.release(k_free.at[slot], read=segments or sizes.plain)
                return acc

            acc = lax.fori_loop(begin, end, one, mg.full((ROWS, H)))
            q_s.at[wg][...] = (acc * sizes.options.scale).astype(q.dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(q_s.at[wg], dq_g.at[b, rows, n])
            plgpu.wait_smem_to_gmem(0)

    ring = plgpu.Barrier(num_arrivals=GROUPS, num_barriers=stages)
    scratch = [
        mg.wide((GROUPS, ROWS, H), q.dtype),
        mg.wide((GROUPS, ROWS, H), d_out.dtype),
        mg.wide((stages, bk, H), k.dtype),
        mg.wide((stages, bk, H), v.dtype),
        plgpu.SMEM((GROUPS, ROWS), jnp.float32),
        plgpu.SMEM((GROUPS, ROWS), jnp.float32),
        plgpu.SMEM((GROUPS, ROWS), jnp.int32),
        plgpu.SMEM((stages, bk), jnp.int32),
        plgpu.Barrier(num_arrivals=4 + segments, num_barriers=GROUPS),
        plgpu.Barrier(num_arrivals=1 + segments, num_barriers=stages),
        plgpu.Barrier(num_barriers=stages),
        ring,
        ring,
    ]
    return _launch(body, sizes, "attention_dq", args, [result_struct(q.shape, q.dtype, args)], scratch, interpret)[0]


def _by_key(args: tuple[Any, ...], sizes: Sizes, wanted: str, interpret: Interpret) -> list[Any]:
    """Gradients of keys and values that `wanted` ("dkdv", "dk", "dv") asks for, summed over a key head's queries."""
    q, k, v, d_out = args[:4]
    bq, stages, segments, H = sizes.tiles.q_dkv, sizes.tiles.stages_backward, sizes.segments, sizes.H
    dk_wanted, dv_wanted = "dk" in wanted, "dv" in wanted

    def body(q_g: Any, k_g: Any, v_g: Any, d_g: Any, lse_g: Any, delta_g: Any, *rest: Any) -> None:
        q_ids_g, k_ids_g, start, left = _beside(rest, sizes)
        outs_g, own = left[: dk_wanted + dv_wanted], left[dk_wanted + dv_wanted :]
        k_s, v_s, q_s, d_s, lse_s, delta_s, q_ids_s, k_ids_s, k_ready, q_ready, d_ready, q_free, d_free = own
        h, i, b, wg = _block()
        block = i * LENGTH
        first, end = sizes.queries(block, LENGTH, bq, start)
        each = end - first  # steps run over the query heads of this key head

        @pl.when(wg == GROUPS)
        def copy() -> None:
            def at(step: Any) -> tuple[Any, Any]:
                head, tile = lax.div(step, lax.max(each, 1)), lax.rem(step, lax.max(each, 1))
                return h * sizes.G + head, pl.ds((first + tile) * bq, bq)

            def queries(step: Any, slot: Any) -> list[Any]:
                n, rows = at(step)
                ids = [(q_ids_g.at[b, rows], q_ids_s.at[slot])] if segments else []
                return [(q_g.at[b, rows, n], q_s.at[slot]), (lse_g.at[b, n, rows], lse_s.at[slot]), *ids]

            def gradients(step: Any, slot: Any) -> list[Any]:
                n, rows = at(step)
                return [(d_g.at[b, rows, n], d_s.at[slot]), (delta_g.at[b, n, rows], delta_s.at[slot])]

            streams = [(queries, q_ready, q_free), (gradients, d_ready, d_free)]
            mg.feed(jnp.int32(0), each * sizes.G, stages, streams)

        @pl.when(wg < GROUPS)
        def multiply() -> None:
            plgpu.set_max_registers(232, action="increase")
            k0 = block + wg * ROWS
            rows = pl.ds(k0, ROWS)
            u0 = k0 if start is None else k0 - start  # counted from the first query's position
            pairs = [(k_g.at[b, rows, h], k_s), (v_g.at[b, rows, h], v_s)]
            pairs += [(k_ids_g.at[b, rows], k_ids_s)] if segments else []
            for source, to in pairs:
                plgpu.copy_gmem_to_smem(source, to.at[wg], k_ready.at[wg])
            plgpu.barrier_wait(k_ready.at[wg])
            own_ids = mg.load(k_ids_s.at[wg], mg.ROW) if segments else None

            def one(step: Any, sums: Any) -> Any:
                slot = lax.rem(step, stages)
                q0 = (first + lax.rem(step, lax.max(each, 1))) * bq
                plgpu.barrier_wait(q_ready.at[slot])
                s = mg.matmul(k_s.at[wg], q_s.at[slot], (ROWS, bq), plain=sizes.plain, flip=True)
                ids = mg.load(q_ids_s.at[slot], mg.COL) if segments else None
                s, slope = _scores(sizes, s, q0, u0, ids, own_ids, transposed=True)
                p = _probabilities(s, mg.load(lse_s.at[slot], mg.COL), mg.along_columns)
                plgpu.barrier_wait(d_ready.at[slot])
                sums = list(sums)
                ds: Any = None
                if dv_wanted:
                    sums[-1] = mg.matmul_add(sums[-1], p.astype(d_out.dtype), d_s.at[slot], plain=sizes.plain)
                if dk_wanted:
                    dp = mg.matmul(v_s.at[wg], d_s.at[slot], (ROWS, bq), plain=sizes.plain, flip=True)
                    ds = p * (dp - mg.along_columns(mg.load(delta_s.at[slot], mg.COL), s.shape))
                    ds = ds if slope is None else ds * slope
                mg.release(d_free.at[slot], read=True)
                if dk_wanted:
                    sums[0] = mg.matmul_add(sums[0], ds.astype(q.dtype), q_s.at[slot], plain=sizes.plain)
                mg.release(q_free.at[slot], read=True)
                return tuple(sums)

            zeros = tuple(mg.full((ROWS, H)) for _ in range(dk_wanted + dv_wanted))
            sums = lax.fori_loop(0, each * sizes.G, one, zeros)
            held, scales = (k_s, v_s), (sizes.options.scale, 1.0)
            chosen = [index for index, is_wanted in enumerate((dk_wanted, dv_wanted)) if is_wanted]
            for index, total in zip(chosen, sums, strict=True):
                held[index].at[wg][...] = (total * scales[index]).astype(k.dtype)
            plgpu.commit_smem()
            for index, to in zip(chosen, outs_g, strict=True):
                plgpu.copy_smem_to_gmem(held[index].at[wg], to.at[b, rows, h])
            plgpu.wait_smem_to_gmem(0)

    ring = plgpu.Barrier(num_arrivals=GROUPS, num_barriers=stages)
    scratch = [
        mg.wide((GROUPS, ROWS, H), k.dtype),
        mg.wide((GROUPS, ROWS, H), v.dtype),
        mg.wide((stages, bq, H), q.dtype),
        mg.wide((stages, bq, H), d_out.dtype),
        plgpu.SMEM((stages, bq), jnp.float32),
        plgpu.SMEM((stages, bq), jnp.float32),
        plgpu.SMEM((stages, bq), jnp.int32),
        plgpu.SMEM((GROUPS, ROWS), jnp.int32),
        plgpu.Barrier(num_arrivals=2 + segments, num_barriers=GROUPS),
        plgpu.Barrier(num_arrivals=2 + segments, num_barriers=stages),
        plgpu.Barrier(num_arrivals=2, num_barriers=stages),
        ring,
        ring,
    ]
    kinds = [result_struct(x.shape, x.dtype, args) for x, is_wanted in ((k, dk_wanted), (v, dv_wanted)) if is_wanted]
    return list(_launch(body, sizes, f"attention_{wanted}", args, kinds, scratch, interpret))


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
    """As `reference.backward`: seven products where five would do (eight for heads of 256, whose dk and dv together
    exceed the registers), but no atomics, and the same bits each time.

    Args:
        q, k, v, q_ids, kv_ids, offset, out, lse, d_out, options: as there.
        tiles, interpret: as of `forward`.
    """
    delta = jnp.einsum("btnh,btnh->bnt", out.astype(jnp.float32), d_out.astype(jnp.float32))
    sizes = sizes_of(q, k, q_ids, offset, options, tiles, interpret)
    args = (q, k, v, d_out, lse, delta, *_args_beside(q_ids, kv_ids, offset))
    passes = ("dkdv",) if sizes.H <= 128 else ("dk", "dv")
    dk, dv = [grad for wanted in passes for grad in _by_key(args, sizes, wanted, interpret)]
    return _dq(args, sizes, interpret), dk, dv
