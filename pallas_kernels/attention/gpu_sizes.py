"""What is static in the GPU's kernels: sizes of tiles, and which tiles of keys and queries see each other."""

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
"""Warpgroups that multiply."""
ROWS = 64
"""Rows of one of them: with 128, ptxas spills and serializes wgmma (C7512)."""
LENGTH = GROUPS * ROWS
"""What T and S must be multiples of."""
WIDTHS = (64, 128, 256)
"""Widths of heads."""


@dataclasses.dataclass(frozen=True)
class Tiles:
    """What a step of each pass takes in, and how many steps ahead are copied.

    Args:
        kv: keys of the forward.
        kv_dq: keys of the pass for dq.
        q_dkv: queries of the pass for dk and dv.
        stages, stages_backward: buffers of a ring.

    Raises:
        ValueError: sizes that wgmma and the layout of LENGTH do not allow.
    """

    kv: int = 128
    kv_dq: int = 64
    q_dkv: int = 64
    stages: int = 2
    stages_backward: int = 2

    def __post_init__(self) -> None:
        for name in ("kv", "kv_dq", "q_dkv"):
            value = getattr(self, name)
            if value not in (64, 128):  # wgmma wants 64 rows of its second operand, and LENGTH is 128
                raise ValueError(f"attention on GPU: tile {name}={value}, expected 64 or 128")
        for name in ("stages", "stages_backward"):
            if getattr(self, name) < 1:
                raise ValueError(f"attention on GPU: {name}={getattr(self, name)}, expected at least 1")

    def shared(self, H: int, bytes_each: int = 2) -> int:
        """Bytes of shared memory of the largest pass, but for barriers.

        Args:
            H: width of a head.
            bytes_each: of a value.
        """
        rows = LENGTH * (H * bytes_each)
        pair = 2 * H * bytes_each
        forward = rows + self.stages * self.kv * (pair + 4) + 8 * LENGTH
        dq = 2 * rows + self.stages_backward * self.kv_dq * (pair + 4) + 12 * LENGTH
        dkv = 2 * rows + self.stages_backward * self.q_dkv * (pair + 12) + 4 * LENGTH
        return max(forward, dq, dkv)


def why_unsupported(target: Target, problem: Problem) -> str | None:
    """Why this cannot run; None if it can."""
    if problem.dtype not in ("bfloat16", "float16"):
        return f"it needs bfloat16 or float16, not {problem.dtype}"
    if WIDTHS[-1] < problem.H:
        return f"it needs heads at most {WIDTHS[-1]} wide, not {problem.H}"
    return None


def padded_width(H: int) -> int:
    """The width of heads that runs heads of width H."""
    return next(width for width in WIDTHS if width >= H)


def choose_tiles(chip: str | None, problem: Problem) -> Tiles:
    """Tuned tiles, else what fits the shared memory."""

    def rule() -> Tiles:
        return Tiles(kv=64, stages_backward=1) if problem.H > 128 else Tiles()

    return tuned.tiles("attention", chip, problem.case, Tiles, rule, functools.partial(fits, problem))


def fits(problem: Problem, tiles: Tiles) -> bool:
    """Whether the shared memory holds what tiles take."""
    return tiles.shared(problem.H) <= mg.MAX_SHARED


def check_tiles(tiles: Any, problem: Problem) -> None:
    """Refuse tiles that cannot run a problem.

    Raises:
        ValueError: they are another kernel's, or need more shared memory than there is.
    """
    if not isinstance(tiles, Tiles):
        raise ValueError(f"attention: got tiles {tiles!r}, expected pallas_kernels.attention.gpu.Tiles")
    if not fits(problem, tiles):
        needed = tiles.shared(problem.H)
        raise ValueError(
            f"attention: {tiles} need {needed} bytes of shared memory for heads of {problem.H}, and a block has "
            f"{mg.MAX_SHARED}: take shorter ones, or fewer stages"
        )


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What is static in a kernel; whether queries have an offset, too, which itself is `start`; None for 0."""

    B: int
    T: int
    S: int
    N: int
    K: int
    H: int
    segments: bool
    options: Options
    tiles: Tiles
    plain: bool
    offset: bool

    @property
    def sighted(self) -> bool:
        """Whether every query sees a key: a row without a score is then one of scores that are all -inf."""
        return not self.segments and self.options.sighted(self.T, self.S, anywhere=self.offset)

    @property
    def G(self) -> int:
        """Query heads of a key head."""
        return self.N // self.K

    def keys(self, t0: Any, rows: int, tile: int) -> tuple[Any, Any, Any, Any]:
        """Tiles of keys for queries at positions t0 .. t0 + rows: first, a, b, end; hidden pairs lie outside a .. b."""
        first, end = jnp.int32(0), jnp.int32(self.S // tile)
        a, b = first, end
        if self.options.causal:
            end = lax.min(end, lax.div(t0 + (rows + tile - 1), tile))
            b = lax.min(end, lax.div(t0, tile))
        if self.options.window is not None:
            window = self.options.window
            first = lax.min(lax.div(lax.max(t0 - (window - 1), 0), tile), end)
            a = lax.min(lax.div(lax.max(t0 + (rows - window), 0) + (tile - 1), tile), end)
            b = lax.max(a, b)
        return first, a, b, end

    def queries(self, k0: Any, rows: int, tile: int, start: Any = None) -> tuple[Any, Any]:
        """First and past-the-last tile of queries that see any of the keys k0 .. k0 + rows."""
        first, end = jnp.int32(0), jnp.int32(self.T // tile)

        def index(t: Any, least: int = 0) -> Any:
            return t if start is None else lax.max(t - start, least)

        if self.options.causal:
            first = lax.min(lax.div(index(k0), tile), end)
        if self.options.window is not None:
            last = index(k0 + (rows - 1 + self.options.window + tile - 1), tile - 1)
            end = lax.max(first, lax.min(end, lax.div(last, tile)))
        return first, end


def sizes_of(q: Any, k: Any, q_ids: Any, offset: Any, options: Options, tiles: Tiles, interpret: Interpret) -> Sizes:
    """The sizes of a call, see `gpu.forward`."""
    (B, T, N, H), (S, K) = q.shape, k.shape[1:3]
    return Sizes(B, T, S, N, K, H, q_ids is not None, options, tiles, bool(interpret), offset is not None)
