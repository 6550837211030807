"""Static facts of the GPU kernels: sizes of tiles, and which tiles of queries see which tiles of keys."""

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp
from jax import lax

from pallas_kernels import mosaic_gpu as mg
from pallas_kernels import tiles as tuned
from pallas_kernels.attention.problem import Problem
from pallas_kernels.attention.reference import Options
from pallas_kernels.compat import Interpret
from pallas_kernels.target import Target

GROUPS = 2
"""Number of warpgroups in a block that multiply."""
ROWS = 64
"""Rows (queries or keys) per warpgroup: with 128, ptxas would spill registers and serialize wgmma (C7512)."""
LENGTH = GROUPS * ROWS
"""Rows per block; T and S must be multiples of it."""
WIDTHS = (64, 128, 256)
"""Widths of heads for which the kernels are written."""


@dataclasses.dataclass(frozen=True)
class Tiles:
    """Sizes of the tiles that one step of each pass reads, and the number of steps that are copied ahead.

    Args:
        kv: keys per step of the forward pass.
        kv_dq: keys per step of the pass for dq.
        q_dkv: queries per step of the pass for dk and dv.
        stages, stages_backward: buffers in a ring, in the forward pass and in the two backward passes.

    Raises:
        ValueError: a tile is neither 64 nor 128, or a number of buffers is less than 1.
    """

    kv: int = 128
    kv_dq: int = 64
    q_dkv: int = 64
    stages: int = 2
    stages_backward: int = 2

    def __post_init__(self) -> None:
        for name in ("kv", "kv_dq", "q_dkv"):
            value = getattr(self, name)
            if value not in (64, 128):  # wgmma needs 64 rows of its second operand, and T and S are multiples of 128
                raise ValueError(f"attention on GPU: tile {name}={value}, expected 64 or 128")
        for name in ("stages", "stages_backward"):
            if getattr(self, name) < 1:
                raise ValueError(f"attention on GPU: {name}={getattr(self, name)}, expected at least 1")

    def shared_bytes(self, H: int, itemsize: int = 2) -> int:
        """Bytes of shared memory that the largest pass takes, without its barriers.

        Args:
            H: width of a head.
            itemsize: bytes of an element of the queries, keys and values.
        """
        block_bytes = LENGTH * (H * itemsize)
        pair_bytes = 2 * H * itemsize
        forward = block_bytes + self.stages * self.kv * (pair_bytes + 4) + 8 * LENGTH
        dq = 2 * block_bytes + self.stages_backward * self.kv_dq * (pair_bytes + 4) + 12 * LENGTH
        dkv = 2 * block_bytes + self.stages_backward * self.q_dkv * (pair_bytes + 12) + 4 * LENGTH
        return max(forward, dq, dkv)


def why_unsupported(target: Target, problem: Problem) -> str | None:
    """Return the reason why the GPU kernels cannot run a problem, or None if they can."""
    if problem.dtype not in ("bfloat16", "float16"):
        return f"it needs bfloat16 or float16, not {problem.dtype}"
    if WIDTHS[-1] < problem.H:
        return f"it needs heads at most {WIDTHS[-1]} wide, not {problem.H}"
    return None


def padded_width(H: int) -> int:
    """The width to which the kernels pad heads of width H."""
    return next(width for width in WIDTHS if width >= H)


def choose_tiles(chip: str | None, problem: Problem) -> Tiles:
    """Choose the tiles for a problem: tuned tiles if there are any, else tiles that fit the shared memory."""

    def rule() -> Tiles:
        return Tiles(kv=64, stages_backward=1) if problem.H > 128 else Tiles()

    return tuned.tiles("attention", chip, problem.case, Tiles, rule, functools.partial(fits, problem))


def fits(problem: Problem, tiles: Tiles) -> bool:
    """Whether the tiles fit a block's shared memory."""
    return tiles.shared_bytes(problem.H) <= mg.MAX_SHARED_BYTES


def check_tiles(tiles: Any, problem: Problem) -> None:
    """Refuse tiles that cannot run a problem.

    Raises:
        ValueError: the tiles belong to another kernel, or need more shared memory than a block has.
    """
    if not isinstance(tiles, Tiles):
        raise ValueError(f"attention: got tiles {tiles!r}, expected pallas_kernels.attention.gpu.Tiles")
    if not fits(problem, tiles):
        raise ValueError(
            f"attention: {tiles} need {tiles.shared_bytes(problem.H)} bytes of shared memory for heads of {problem.H}, "
            f"and a block has {mg.MAX_SHARED_BYTES}: take shorter tiles, or fewer stages"
        )


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The static facts of a kernel's call. The position of the first query is passed separately, as `start`.

    Args:
        B, T, S, N, K, H: numbers of rows, queries, keys, query heads and key heads, and the width of a head.
        has_segments: whether the call has segment ids.
        options: what to compute.
        tiles: sizes of the tiles.
        is_interpreted: whether Pallas' interpreter runs the kernel.
        has_offset: whether `start` is an array; if not, it is None, and the first query is at position 0.
    """

    B: int
    T: int
    S: int
    N: int
    K: int
    H: int
    has_segments: bool
    options: Options
    tiles: Tiles
    is_interpreted: bool
    has_offset: bool

    @property
    def is_never_blind(self) -> bool:
        """Whether every query sees a key; if so, a query without a finite score has only scores of -inf."""
        return not self.has_segments and self.options.is_never_blind(self.T, self.S, any_offset=self.has_offset)

    @property
    def G(self) -> int:
        """Number of query heads per key head."""
        return self.N // self.K

    def position(self, index: Any, start: Any) -> Any:
        """Position of the query at an index; `start` is the position of the first query, None for 0."""
        return index if start is None else index + start

    def key_tiles(self, first_position: Any, rows: int, tile: int) -> tuple[Any, Any, Any, Any]:
        """Which tiles of keys some consecutive queries see.

        Args:
            first_position: position of the first of the queries.
            rows: number of queries.
            tile: number of keys in a tile.

        Returns:
            Four indices of tiles: the first visible tile, the first tile without a hidden pair, the end of the tiles
            without a hidden pair, and the end of the visible tiles; ends are exclusive.
        """
        first, end = jnp.int32(0), jnp.int32(self.S // tile)
        clear_first, clear_end = first, end
        if self.options.causal:
            end = lax.min(end, lax.div(first_position + (rows + tile - 1), tile))
            clear_end = lax.min(end, lax.div(first_position, tile))
        if self.options.window is not None:
            window = self.options.window
            first = lax.min(lax.div(lax.max(first_position - (window - 1), 0), tile), end)
            clear_first = lax.min(lax.div(lax.max(first_position + (rows - window), 0) + (tile - 1), tile), end)
            clear_end = lax.max(clear_first, clear_end)
        return first, clear_first, clear_end, end

    def query_tiles(self, first_key: Any, rows: int, tile: int, start: Any = None) -> tuple[Any, Any]:
        """Which tiles of queries see any of some consecutive keys.

        Args:
            first_key: index of the first of the keys.
            rows: number of keys.
            tile: number of queries in a tile.
            start: position of the first query of the call; None for 0.

        Returns:
            The index of the first tile that sees one of the keys, and the end of these tiles (exclusive).
        """
        first, end = jnp.int32(0), jnp.int32(self.T // tile)

        def query_index(position: Any, minimum: int = 0) -> Any:
            return position if start is None else lax.max(position - start, minimum)

        if self.options.causal:
            first = lax.min(lax.div(query_index(first_key), tile), end)
        if self.options.window is not None:
            rounded_end = query_index(first_key + (rows - 1 + self.options.window + tile - 1), tile - 1)
            end = lax.max(first, lax.min(end, lax.div(rounded_end, tile)))
        return first, end


def sizes_of(q: Any, k: Any, q_ids: Any, offset: Any, options: Options, tiles: Tiles, interpret: Interpret) -> Sizes:
    """The static facts of a call of `gpu.forward` or `gpu.backward` with these arguments."""
    (B, T, N, H), (S, K) = q.shape, k.shape[1:3]
    return Sizes(B, T, S, N, K, H, q_ids is not None, options, tiles, bool(interpret), offset is not None)
