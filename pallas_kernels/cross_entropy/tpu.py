"""Cross-entropy on TPU without logits in memory: they live as (words, rows) tiles in VMEM, transposed so that what
belongs to a row of x lies along lanes. The backward makes them again, once for dx and once for the head.

A tile is worked off in a loop over parts of its words: code is as long as a part, and so is the time to compile it.

FLOP in units of 2*M*D*V: 1 forward, 4 backward, against 3 in all with chunks: it is for memory, and is run by name.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.compat import Interpret, cost_estimate, interpret_params, product_precision, result_struct
from pallas_kernels.cross_entropy.cases import Case
from pallas_kernels.cross_entropy.reference import F32
from pallas_kernels.target import Target

NEG = -1e30
"""Stands for -inf: a tile without a word makes no NaN."""
IGNORED = -(2**31)
"""Label of a row that gives 0, whatever it holds."""
LANES = 128
PARTS = {"row": 512, "x": 512, "head": 256}
"""Words of a tile that are worked on at once, by what the results are of. A loop over them takes at most 1.02 of the
cycles of the whole tile at once (by libtpu's schedule; with fewer the forward and dx take 1.08), and less for dx and
the head's gradient."""
VMEM = 96 << 20
"""Bytes of the 128 MiB of a v5e's, v5p's or v6e's core that a kernel may take."""


@dataclasses.dataclass(frozen=True)
class Tiles:
    """Rows of x and rows of the head of a tile, both multiples of 128."""

    rows: int = 512
    words: int = 1024

    def __post_init__(self):
        if self.rows % LANES or self.words % LANES or min(self.rows, self.words) < LANES:
            raise ValueError(f"cross_entropy: got {self}, expected multiples of {LANES}")

    def bytes(self, width: int, itemsize: int) -> int:
        """Of VMEM: operands and result twice, sums and about four tiles of logits in float32."""
        most = max(self.rows, self.words)
        return width * (2 * itemsize * (self.rows + self.words + most) + 4 * most) + 16 * self.rows * self.words


def default_tiles(case: Case) -> Tiles | None:
    """The largest that divides the rows and fits; None where none does.

    Example:
        >>> default_tiles(Case("", 8192, 4096, 128256)), default_tiles(Case("", 100, 4096, 128256))
        (Tiles(rows=512, words=1024), None)
    """
    for words in (1024, 512, 256, 128):
        for rows in (512, 256, 128):
            tiles = Tiles(rows, words)
            longer_than_head = words >= case.head + LANES
            if (
                case.rows % rows == 0
                and not longer_than_head
                and tiles.bytes(case.width, jnp.dtype(case.dtype).itemsize) <= VMEM
            ):
                return tiles
    return None


def why_unsupported(target: Target, case: Case) -> str | None:
    """Why this cannot run a case; None if it can."""
    if case.dtype not in ("bfloat16", "float32"):
        return f"it needs bfloat16 or float32, not {case.dtype}"
    if case.rows % LANES or case.width % LANES:
        return f"it needs rows and a width that are multiples of {LANES}, not {case.rows} and {case.width}"
    if default_tiles(case) is None:
        return f"no tile of a width of {case.width} fits {VMEM} bytes of VMEM"
    return None


def cost(units: int, ins: Any, outs: Any) -> pl.CostEstimate:
    """`units` products of M*D*V, an exponential a logit; each operand counted once."""
    (rows, width), words = ins[0].shape, ins[1].shape[0]
    return cost_estimate(units * 2 * rows * width * words, ins, outs, rows * words)


def _dot(a: Any, b: Any, contract: tuple[tuple[int], tuple[int]]) -> Any:
    return lax.dot_general(a, b, (contract, ((), ())), precision=product_precision(a), preferred_element_type=F32)


def _logits(x: Any, head: Any, first: Any, words: Any, soft_cap: float | None) -> tuple[Any, Any, Any]:
    """(words, rows) logits, NEG where there is no word; the words; the soft cap's derivative."""
    z, slope = _dot(head, x, ((1,), (1,))), None
    if soft_cap is not None:
        t = jnp.tanh(z * (1 / soft_cap))
        z, slope = t * soft_cap, 1 - t * t
    word = lax.broadcasted_iota(jnp.int32, z.shape, 0) + first
    return (z if words is None else jnp.where(word < words, z, NEG)), word, slope


def _by_parts(rows: int, most: int, body: Callable[[Any], None]) -> None:
    """A loop over parts of so many rows, `most` of them or a divisor; the body takes their index."""
    part = math.gcd(rows, most)

    def one(i: Any, _: None) -> None:
        body(pl.ds(pl.multiple_of(i * part, part), part))

    lax.fori_loop(0, rows // part, one, None)


def _clear(total: Any) -> None:
    def clear(at: Any) -> None:
        total[at, :] = jnp.zeros((at.size, total.shape[1]), total.dtype)

    _by_parts(total.shape[0], LANES, clear)


def _cast(total: Any, out: Any) -> None:
    def cast(at: Any) -> None:
        out[at, :] = total[at, :].astype(out.dtype)

    _by_parts(total.shape[0], LANES, cast)


def _forward_kernel(
    words: Any, x: Any, head: Any, label: Any, lse: Any, hit: Any, top: Any, total: Any, *, masked: bool, soft_cap: Any
) -> None:
    j, tile = pl.program_id(1), head.shape[0]

    @pl.when(j == 0)
    def _start() -> None:
        top[...], total[...] = jnp.full_like(top, NEG), jnp.zeros_like(total)
        hit[...] = jnp.zeros_like(hit)

    def add(at: Any) -> None:
        z, word, _ = _logits(x[...], head[at, :], j * tile + at.start, words[0] if masked else None, soft_cap)
        highest = jnp.maximum(top[...], jnp.max(z, 0, keepdims=True))
        total[...] = total[...] * jnp.exp(top[...] - highest) + jnp.sum(jnp.exp(z - highest), 0, keepdims=True)
        top[...] = highest
        hit[...] += jnp.sum(jnp.where(word == label[...], z, 0.0), 0, keepdims=True)

    _by_parts(tile, PARTS["row"], add)

    @pl.when(j == pl.num_programs(1) - 1)
    def _end() -> None:
        lse[...] = top[...] + jnp.log(total[...])


def _d_logits(x: Any, head: Any, rows: Any, first: Any, words: Any, soft_cap: Any) -> Any:
    """`share * softmax - weight * (word is the label)`, times the soft cap's derivative."""
    label, lse, share, weight = (row[...] for row in rows)
    z, word, slope = _logits(x, head, first, words, soft_cap)
    d = share * jnp.exp(z - lse) - jnp.where(word == label, weight, 0.0)
    d = jnp.where(label == IGNORED, 0.0, d if slope is None else d * slope)
    # past the end the head is garbage, and 0 * NaN is NaN
    return (d if words is None else jnp.where(word < words, d, 0.0)).astype(x.dtype)


def _dx_kernel(words: Any, *refs: Any, masked: bool, soft_cap: Any) -> None:
    (x, head, *rows), (dx, total) = refs[:-2], refs[-2:]
    j, tile = pl.program_id(1), head.shape[0]
    pl.when(j == 0)(lambda: _clear(total))

    def add(at: Any) -> None:
        w, limit, first = head[at, :], words[0] if masked else None, j * tile + at.start
        if masked:
            real = lax.broadcasted_iota(jnp.int32, w.shape, 0) + first < limit
            w = jnp.where(real, w, jnp.zeros((), w.dtype))
        d = _d_logits(x[...], w, rows, first, limit, soft_cap)
        total[...] += _dot(d, w, ((0,), (0,)))

    _by_parts(tile, PARTS["x"], add)
    pl.when(j == pl.num_programs(1) - 1)(lambda: _cast(total, dx))


def _d_head_kernel(words: Any, *refs: Any, masked: bool, soft_cap: Any) -> None:
    (x, head, *rows), (d_head, total) = refs[:-2], refs[-2:]
    i, tile = pl.program_id(1), head.shape[0]
    start = pl.program_id(0) * tile
    pl.when(i == 0)(lambda: _clear(total))
    live = jnp.where(rows[0][...] == IGNORED, 0.0, 1.0)
    some = jnp.min(live) == 0

    def add(at: Any, ignored: bool) -> None:
        first, limit = start + at.start, words[0] if masked else None
        d = _d_logits(x[...], head[at, :], rows, first, limit, soft_cap)
        rows_of_x = x[...]
        if ignored:  # where d is 0 a NaN still is one
            real = jnp.broadcast_to(jnp.broadcast_to(live, (8, x.shape[0])).T[:, :1], x.shape) > 0
            rows_of_x = jnp.where(real, rows_of_x, jnp.zeros((), x.dtype))
        total[at, :] += _dot(d, rows_of_x, ((1,), (0,)))

    for ignored in (False, True):
        pl.when(some == ignored)(
            functools.partial(_by_parts, tile, PARTS["head"], functools.partial(add, ignored=ignored))
        )
    pl.when(i == pl.num_programs(1) - 1)(lambda: _cast(total, d_head))


def _call(
    kernel: Any, ins: Any, outs: Any, scratch: Any, kind: str, tiles: Tiles, units: int, name: str, interpret: Interpret
) -> Any:
    """A kernel over tiles of rows and of words, the latter fastest unless results are of the head.

    `kind` of results: "x", "head", or "row" for a number per row of x.
    """
    words, *ins = ins
    (rows, width), head = ins[0].shape, ins[1].shape[0]
    by_word = kind == "head"
    grid = (rows // tiles.rows, pl.cdiv(head, tiles.words))

    def at(i: Any, j: Any) -> tuple[Any, Any]:
        return (j, i) if by_word else (i, j)

    spec = {
        "x": pl.BlockSpec((tiles.rows, width), lambda i, j: (at(i, j)[0], 0)),
        "head": pl.BlockSpec((tiles.words, width), lambda i, j: (at(i, j)[1], 0)),
        "row": pl.BlockSpec((1, tiles.rows), lambda i, j: (0, at(i, j)[0])),
    }
    return pl.pallas_call(
        kernel,
        grid=grid[::-1] if by_word else grid,
        in_specs=[
            pl.BlockSpec(memory_space=pltpu.SMEM),
            spec["x"],
            spec["head"],
            *[spec["row"]] * (len(ins) - 2),
        ],
        out_specs=[spec[kind]] * len(outs),
        out_shape=outs,
        scratch_shapes=scratch,
        name=name,
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=VMEM),
        cost_estimate=cost(units, ins, outs),
        interpret=interpret_params("tpu", interpret),
    )(words, *ins)


def forward(
    x: Any,
    head: Any,
    labels: Any,
    words: Any,
    *,
    masked: bool,
    soft_cap: float | None,
    tiles: Tiles,
    interpret: Interpret = False,
) -> tuple[Any, Any]:
    """Log-sum-exp of each row over this device's words, and the label's logit if it is among them.

    Args:
        x: (M, D).
        head: (V, D), this device's rows.
        labels: (M,) int32, counted from this device's first row of the head; or IGNORED.
        words: (1,) int32: how many rows of the head are words.
        masked: fewer than V may be, or the last tile is not full.
        soft_cap: of the logits.
        tiles: see `Tiles`.
        interpret: see `compat.interpret_params`.

    Returns:
        Two (M,), float32; of ignored rows anything.
    """
    row = result_struct((1, x.shape[0]), F32, x, head, labels)
    scratch = [pltpu.VMEM((1, tiles.rows), F32)] * 2
    masked = masked or head.shape[0] % tiles.words != 0
    kernel = functools.partial(_forward_kernel, masked=masked, soft_cap=soft_cap)
    ins = (words, x, head, labels[None])
    lse, hit = _call(kernel, ins, [row, row], scratch, "row", tiles, 1, "cross_entropy", interpret)
    return lse[0], hit[0]


def backward(
    x: Any,
    head: Any,
    labels: Any,
    words: Any,
    lse: Any,
    share: Any,
    weights: Any,
    *,
    masked: bool,
    soft_cap: float | None,
    tiles: Tiles,
    interpret: Interpret = False,
) -> tuple[Any, Any]:
    """Gradients of x (this device's part) and of the head.

    Args:
        x, head, labels, words, masked, soft_cap, tiles, interpret: as of the forward.
        lse: (M,), over all words.
        share: (M,) float32, factor of the softmax.
        weights: (M,) float32, taken off at the label.
    """
    ins = (words, x, head, *(one[None] for one in (labels, lse, share, weights)))
    masked = masked or head.shape[0] % tiles.words != 0

    def run(kernel: Any, wanted: Any, tile: int, kind: str) -> Any:
        out, scratch = result_struct(wanted.shape, wanted.dtype, *ins), pltpu.VMEM((tile, x.shape[1]), F32)
        kernel = functools.partial(kernel, masked=masked, soft_cap=soft_cap)
        return _call(kernel, ins, [out], [scratch], kind, tiles, 2, f"cross_entropy_d_{kind}", interpret)[0]

    return run(_dx_kernel, x, tiles.rows, "x"), run(_d_head_kernel, head, tiles.words, "head")
