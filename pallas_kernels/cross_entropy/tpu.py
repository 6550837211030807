"""Cross-entropy on TPU without logits in HBM.

Logits exist only as tiles (words, rows) in VMEM; they are transposed, so that a number per row of x lies along lanes.
The backward pass computes them again, once for dx and once for the gradient of the head. A tile is processed in a loop
over parts of its words, because the length of the code, and the time to compile it, grow with the size of a part.

In units of 2*M*D*V FLOP, the forward pass takes 1 and the backward pass 4; in chunks, both together take 3. The kernel
saves memory, not time, and runs only if named.

In the kernels, names of arrays are references to tiles: numbers per row, such as `lse`, are (1, rows). `words` is the
number of words in this device's shard of the head, i and j are indices of tiles of rows and of words.
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
"""Stands for a logit of -inf; it is finite, so that a tile without a word never makes a NaN."""
IGNORED = -(2**31)
"""The label of a row that is ignored, whatever it contains."""
LANES = 128
"""Lanes of a vector register."""
PART_WORDS = {"row": 512, "x": 512, "head": 256}
"""Number of words of a tile that are processed at once, by the kind of results (see `_call`).

In libtpu's schedule, a loop over such parts takes at most 1.02 times the cycles of the whole tile at once; for dx and
the gradient of the head, it takes fewer. With smaller parts, the forward pass and dx would take 1.08 times the cycles.
"""
MAX_VMEM_BYTES = 96 << 20
"""Bytes of VMEM that a kernel may take; a core of v5e, v5p or v6e has 128 MiB."""


@dataclasses.dataclass(frozen=True)
class Tiles:
    """Size of a tile; both numbers are multiples of 128.

    Args:
        rows: number of rows of x.
        words: number of rows of the head.

    Raises:
        ValueError: a number is not a positive multiple of 128.
    """

    rows: int = 512
    words: int = 1024

    def __post_init__(self):
        if self.rows % LANES or self.words % LANES or min(self.rows, self.words) < LANES:
            raise ValueError(f"cross_entropy: got {self}, expected multiples of {LANES}")

    def vmem_bytes(self, width: int, itemsize: int) -> int:
        """Bytes of VMEM: two buffers of operands and results, float32 sums, and about four float32 tiles of logits."""
        longest = max(self.rows, self.words)
        return width * (2 * itemsize * (self.rows + self.words + longest) + 4 * longest) + 16 * self.rows * self.words


def default_tiles(case: Case) -> Tiles | None:
    """Choose the largest tiles that divide the rows of a case and fit VMEM; None if there are none.

    Example:
        >>> default_tiles(Case("", 8192, 4096, 128256)), default_tiles(Case("", 100, 4096, 128256))
        (Tiles(rows=512, words=1024), None)
    """
    for words in (1024, 512, 256, 128):
        for rows in (512, 256, 128):
            tiles = Tiles(rows, words)
            is_longer_than_head = words >= case.head + LANES
            tile_bytes = tiles.vmem_bytes(case.width, jnp.dtype(case.dtype).itemsize)
            if case.rows % rows == 0 and not is_longer_than_head and tile_bytes <= MAX_VMEM_BYTES:
                return tiles
    return None


def why_unsupported(target: Target, case: Case) -> str | None:
    """Return the reason why this kernel cannot run a case, or None if it can."""
    if case.dtype not in ("bfloat16", "float32"):
        return f"it needs bfloat16 or float32, not {case.dtype}"
    if case.rows % LANES or case.width % LANES:
        return f"it needs rows and a width that are multiples of {LANES}, not {case.rows} and {case.width}"
    if default_tiles(case) is None:
        return f"no tile of a width of {case.width} fits {MAX_VMEM_BYTES} bytes of VMEM"
    return None


def cost(matmuls: int, ins: Any, outs: Any) -> pl.CostEstimate:
    """Estimate the cost of a kernel: `matmuls` products of M*D*V, one exponential per logit, each array moved once."""
    (rows, width), words = ins[0].shape, ins[1].shape[0]
    return cost_estimate(matmuls * 2 * rows * width * words, ins, outs, rows * words)


def _matmul(a: Any, b: Any, contracted_dims: tuple[tuple[int], tuple[int]]) -> Any:
    """A matrix product in float32."""
    return lax.dot_general(
        a, b, (contracted_dims, ((), ())), precision=product_precision(a), preferred_element_type=F32
    )


def _logits(x: Any, head: Any, first_word: Any, words: Any, soft_cap: float | None) -> tuple[Any, Any, Any]:
    """Compute the logits of some rows of x and some words.

    Args:
        x: rows of x.
        head: rows of the head.
        first_word: index of the first row of `head` within this device's shard of the head.
        words: number of words in the shard of the head; None if all rows are words.
        soft_cap: as in `forward`.

    Returns:
        The logits (rows of `head`, rows of `x`), NEG for rows of the head that are not words; for each
        logit, the index of its word; and the derivative of the soft cap, or None.
    """
    z, slope = _matmul(head, x, ((1,), (1,))), None
    if soft_cap is not None:
        t = jnp.tanh(z * (1 / soft_cap))
        z, slope = t * soft_cap, 1 - t * t
    word = lax.broadcasted_iota(jnp.int32, z.shape, 0) + first_word
    return (z if words is None else jnp.where(word < words, z, NEG)), word, slope


def _for_each_part(rows: int, max_part_rows: int, body: Callable[[Any], None]) -> None:
    """Call `body` with the slice of each part of `rows` rows; a part has `gcd(rows, max_part_rows)` rows."""
    part_rows = math.gcd(rows, max_part_rows)

    def run_part(i: Any, _: None) -> None:
        body(pl.ds(pl.multiple_of(i * part_rows, part_rows), part_rows))

    lax.fori_loop(0, rows // part_rows, run_part, None)


def _clear(total: Any) -> None:
    """Set the array of a reference to zero, in parts."""

    def clear_part(rows: Any) -> None:
        total[rows, :] = jnp.zeros((rows.size, total.shape[1]), total.dtype)

    _for_each_part(total.shape[0], LANES, clear_part)


def _cast(total: Any, out: Any) -> None:
    """Store the array of the reference `total` in that of `out`, in parts, cast to its dtype."""

    def cast_part(rows: Any) -> None:
        out[rows, :] = total[rows, :].astype(out.dtype)

    _for_each_part(total.shape[0], LANES, cast_part)


def _forward_kernel(
    words: Any,
    x: Any,
    head: Any,
    label: Any,
    lse: Any,
    label_logit: Any,
    max_logit: Any,
    total: Any,
    *,
    has_padding: bool,
    soft_cap: Any,
) -> None:
    """Compute `lse` and `label_logit` of a tile of rows; `max_logit` and `total` are scratch, kept between steps."""
    j, tile_words = pl.program_id(1), head.shape[0]

    @pl.when(j == 0)
    def _start() -> None:
        max_logit[...], total[...] = jnp.full_like(max_logit, NEG), jnp.zeros_like(total)
        label_logit[...] = jnp.zeros_like(label_logit)

    def add_part(part: Any) -> None:
        x_rows, head_rows = x[...], head[part, :]
        first_word, limit = j * tile_words + part.start, words[0] if has_padding else None
        z, word, _ = _logits(x_rows, head_rows, first_word, limit, soft_cap)
        new_max = jnp.maximum(max_logit[...], jnp.max(z, 0, keepdims=True))
        total[...] = total[...] * jnp.exp(max_logit[...] - new_max) + jnp.sum(jnp.exp(z - new_max), 0, keepdims=True)
        max_logit[...] = new_max
        label_logit[...] += jnp.sum(jnp.where(word == label[...], z, 0.0), 0, keepdims=True)

    _for_each_part(tile_words, PART_WORDS["row"], add_part)

    @pl.when(j == pl.num_programs(1) - 1)
    def _end() -> None:
        lse[...] = max_logit[...] + jnp.log(total[...])


def _d_logits(x: Any, head: Any, row_refs: Any, first_word: Any, words: Any, soft_cap: Any) -> Any:
    """The gradients of the products (words, rows) of some rows of x and some words, in the dtype of x.

    They are `softmax_factor * softmax - label_factor * (word == label)`, times the derivative of the soft cap.

    Args:
        x, head, first_word, words, soft_cap: as in `_logits`.
        row_refs: references to the labels, log-sum-exps, softmax factors and label factors of the rows.
    """
    label, lse, softmax_factor, label_factor = (row_ref[...] for row_ref in row_refs)
    z, word, slope = _logits(x, head, first_word, words, soft_cap)
    d = softmax_factor * jnp.exp(z - lse) - jnp.where(word == label, label_factor, 0.0)
    d = jnp.where(label == IGNORED, 0.0, d if slope is None else d * slope)
    # past the end the head is garbage, and 0 * NaN is NaN
    return (d if words is None else jnp.where(word < words, d, 0.0)).astype(x.dtype)


def _dx_kernel(words: Any, *refs: Any, has_padding: bool, soft_cap: Any) -> None:
    """Compute `dx` of a tile of rows, summed over tiles of words in the scratch `total`."""
    x, head, *row_refs, dx, total = refs
    j, tile_words = pl.program_id(1), head.shape[0]
    pl.when(j == 0)(lambda: _clear(total))

    def add_part(part: Any) -> None:
        head_part, limit, first_word = head[part, :], words[0] if has_padding else None, j * tile_words + part.start
        if has_padding:
            is_word = lax.broadcasted_iota(jnp.int32, head_part.shape, 0) + first_word < limit
            head_part = jnp.where(is_word, head_part, jnp.zeros((), head_part.dtype))
        d = _d_logits(x[...], head_part, row_refs, first_word, limit, soft_cap)
        total[...] += _matmul(d, head_part, ((0,), (0,)))

    _for_each_part(tile_words, PART_WORDS["x"], add_part)
    pl.when(j == pl.num_programs(1) - 1)(lambda: _cast(total, dx))


def _d_head_kernel(words: Any, *refs: Any, has_padding: bool, soft_cap: Any) -> None:
    """Compute `d_head` of a tile of words, summed over tiles of rows in the scratch `total`."""
    x, head, *row_refs, d_head, total = refs
    i, tile_words = pl.program_id(1), head.shape[0]
    tile_start = pl.program_id(0) * tile_words
    pl.when(i == 0)(lambda: _clear(total))
    is_row_used = jnp.where(row_refs[0][...] == IGNORED, 0.0, 1.0)
    has_ignored_rows = jnp.min(is_row_used) == 0

    def add_part(part: Any, clears_ignored: bool) -> None:
        first_word, limit = tile_start + part.start, words[0] if has_padding else None
        d = _d_logits(x[...], head[part, :], row_refs, first_word, limit, soft_cap)
        x_rows = x[...]
        if clears_ignored:  # d is 0 there, but 0 * NaN is NaN
            is_used = jnp.broadcast_to(jnp.broadcast_to(is_row_used, (8, x.shape[0])).T[:, :1], x.shape) > 0
            x_rows = jnp.where(is_used, x_rows, jnp.zeros((), x.dtype))
        total[part, :] += _matmul(d, x_rows, ((1,), (0,)))

    for clears_ignored in (False, True):
        add = functools.partial(add_part, clears_ignored=clears_ignored)
        pl.when(has_ignored_rows == clears_ignored)(
            functools.partial(_for_each_part, tile_words, PART_WORDS["head"], add)
        )
    pl.when(i == pl.num_programs(1) - 1)(lambda: _cast(total, d_head))


def _call(
    kernel: Any,
    args: Any,
    out_types: Any,
    scratch: Any,
    result_kind: str,
    tiles: Tiles,
    matmuls: int,
    name: str,
    interpret: Interpret,
) -> Any:
    """Run a kernel over tiles of rows and of words; return its results.

    Args:
        kernel: the kernel.
        args: the number of words, x, the head, and arrays (1, M) with a number per row of x.
        out_types: shapes and dtypes of the results.
        scratch: scratch of the kernel.
        result_kind: "x" or "head" for results like x or the head, "row" for numbers per row of x. Tiles of rows are the
            innermost axis of the grid for "head", tiles of words otherwise.
        tiles: size of a tile.
        matmuls: number of products of M*D*V, for the cost estimate.
        name: name of the kernel in profiles.
        interpret: how to run the kernel.
    """
    words, *ins = args
    (rows, width), head_rows = ins[0].shape, ins[1].shape[0]
    has_rows_inside = result_kind == "head"
    grid = (rows // tiles.rows, pl.cdiv(head_rows, tiles.words))

    def row_and_word_tile(i: Any, j: Any) -> tuple[Any, Any]:
        return (j, i) if has_rows_inside else (i, j)

    specs = {
        "x": pl.BlockSpec((tiles.rows, width), lambda i, j: (row_and_word_tile(i, j)[0], 0)),
        "head": pl.BlockSpec((tiles.words, width), lambda i, j: (row_and_word_tile(i, j)[1], 0)),
        "row": pl.BlockSpec((1, tiles.rows), lambda i, j: (0, row_and_word_tile(i, j)[0])),
    }
    return pl.pallas_call(
        kernel,
        grid=grid[::-1] if has_rows_inside else grid,
        in_specs=[
            pl.BlockSpec(memory_space=pltpu.SMEM),
            specs["x"],
            specs["head"],
            *[specs["row"]] * (len(ins) - 2),
        ],
        out_specs=[specs[result_kind]] * len(out_types),
        out_shape=out_types,
        scratch_shapes=scratch,
        name=name,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=MAX_VMEM_BYTES
        ),
        cost_estimate=cost(matmuls, ins, out_types),
        interpret=interpret_params("tpu", interpret),
    )(words, *ins)


def forward(
    x: Any,
    head: Any,
    labels: Any,
    words: Any,
    *,
    has_padding: bool,
    soft_cap: float | None,
    tiles: Tiles,
    interpret: Interpret = False,
) -> tuple[Any, Any]:
    """Compute the log-sum-exp of each row over the words of this device's shard, and the logit of its label.

    Args:
        x: the inputs of the linear layer (M, D).
        head: this device's rows of the head (V, D).
        labels: row index of each label in `head`, (M,) int32; -1 if it is in another shard; IGNORED to ignore the row.
        words: number of rows of the head that are words, int32 (1,).
        has_padding: whether some rows of the head may not be words.
        soft_cap: the logits z become `c tanh(z / c)`, where c is this number; None for no cap.
        tiles: size of a tile.
        interpret: how to run the kernel, see `compat.interpret_params`.

    Returns:
        The log-sum-exp, and the logit of the label (0 if it is in another shard), both (M,) float32; for ignored rows
        both are undefined.
    """
    row_type = result_struct((1, x.shape[0]), F32, x, head, labels)
    scratch = [pltpu.VMEM((1, tiles.rows), F32)] * 2
    must_mask = has_padding or head.shape[0] % tiles.words != 0
    kernel = functools.partial(_forward_kernel, has_padding=must_mask, soft_cap=soft_cap)
    args = (words, x, head, labels[None])
    lse, label_logit = _call(kernel, args, [row_type] * 2, scratch, "row", tiles, 1, "cross_entropy", interpret)
    return lse[0], label_logit[0]


def backward(
    x: Any,
    head: Any,
    labels: Any,
    words: Any,
    lse: Any,
    softmax_factors: Any,
    label_factors: Any,
    *,
    has_padding: bool,
    soft_cap: float | None,
    tiles: Tiles,
    interpret: Interpret = False,
) -> tuple[Any, Any]:
    """Compute this device's share of the gradient of x, and the gradient of its rows of the head.

    The gradient of the logits is `softmax_factor * softmax`, minus `label_factor` at the label.

    Args:
        x, head, labels, words, has_padding, soft_cap, tiles, interpret: as in `forward`.
        lse: the log-sum-exp over the words of all shards, (M,) float32.
        softmax_factors, label_factors: (M,) float32.

    Returns:
        The gradients of x and of the head, each in the shape and dtype of its array.
    """
    args = (words, x, head, *(numbers[None] for numbers in (labels, lse, softmax_factors, label_factors)))
    must_mask = has_padding or head.shape[0] % tiles.words != 0

    def gradient(kernel: Any, array: Any, tile_length: int, kind: str) -> Any:
        out_type = result_struct(array.shape, array.dtype, *args)
        scratch = pltpu.VMEM((tile_length, x.shape[1]), F32)
        kernel_with_options = functools.partial(kernel, has_padding=must_mask, soft_cap=soft_cap)
        name = f"cross_entropy_d_{kind}"
        return _call(kernel_with_options, args, [out_type], [scratch], kind, tiles, 2, name, interpret)[0]

    return gradient(_dx_kernel, x, tiles.rows, "x"), gradient(_d_head_kernel, head, tiles.words, "head")
