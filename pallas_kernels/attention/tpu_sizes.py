"""Static facts of the TPU kernels: sizes of tiles, and which tiles of queries see which tiles of keys."""

import dataclasses
import functools
import itertools
import math
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels import tiles as tuned
from pallas_kernels.attention.problem import Problem
from pallas_kernels.attention.reference import Options
from pallas_kernels.target import Target

LANES = 128
"""Lanes of a vector register."""
WIDEST = 256
"""The largest width of heads for which the kernels were compiled."""
LOG2E = math.log2(math.e)
_LENGTHS = (2048, 1024, 512, 256, 128)
"""The numbers of queries that a tile may have; the same numbers for keys."""


@dataclasses.dataclass(frozen=True)
class Tiles:
    """Sizes of the tiles of each pass, all multiples of 128.

    Args:
        q, kv: queries and keys of a tile in the forward pass.
        q_dq, kv_dq: queries and keys of a tile in the pass for dq.
        q_dkv, kv_dkv: queries and keys of a tile in the pass for dk and dv.

    Raises:
        ValueError: a size is not a positive multiple of 128.
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

    def can_divide(self, T: int, S: int) -> bool:
        """Whether whole tiles make up T queries and S keys; a tile longer than T or S is shortened first."""
        query_sizes, key_sizes = (self.q, self.q_dq, self.q_dkv), (self.kv, self.kv_dq, self.kv_dkv)
        return all(T % min(q, T) == 0 for q in query_sizes) and all(S % min(kv, S) == 0 for kv in key_sizes)


def why_unsupported(target: Target, problem: Problem) -> str | None:
    """Return the reason why the TPU kernels cannot run a problem, or None if they can."""
    if problem.dtype not in ("bfloat16", "float32"):
        return f"it needs bfloat16 or float32, not {problem.dtype}"
    if problem.H > WIDEST:
        return f"it needs heads at most {WIDEST} wide, not {problem.H}"
    return None


def padded_width(H: int) -> int:
    """The width to which the kernels pad heads of width H: 64, or a multiple of 128."""
    return 64 if H <= 64 else -(-H // LANES) * LANES


def choose_tiles(chip: str | None, problem: Problem) -> Tiles:
    """Choose the tiles for a problem: tuned tiles if there are any, else those with the least work in each pass."""

    def rule() -> Tiles:
        forward, backward = (_cheapest_tile(problem, *largest) for largest in largest_tiles(problem))
        return Tiles(*forward, *backward, *backward)

    return tuned.tiles("attention", chip, problem.case, Tiles, rule, functools.partial(fits, problem))


def fits(problem: Problem, tiles: Tiles) -> bool:
    """Whether whole tiles make up the problem's lengths, and are not larger than tiles that were compiled."""
    max_forward, max_backward = (q * kv for q, kv in largest_tiles(problem))
    is_small_enough = (
        tiles.q * tiles.kv <= max_forward
        and tiles.q_dq * tiles.kv_dq <= max_backward
        and tiles.q_dkv * tiles.kv_dkv <= max_backward
    )
    return tiles.can_divide(problem.T, problem.S) and is_small_enough


def largest_tiles(problem: Problem) -> tuple[tuple[int, int], tuple[int, int]]:
    """The largest tile, (queries, keys), in the forward pass and in a backward pass.

    Larger tiles were not compiled. The following were compiled, by libtpu 0.0.51 for v5e, v5p and v6e:

    - bfloat16, heads of 128, causal: 1024 x 1024 in every pass;
    - the same with a soft cap and segments: 1024 x 1024 in the forward and 512 x 512 in the backward passes;
    - bfloat16, heads of 128, not causal, neither cap nor segments: 1024 x 2048 and 1024 x 1024;
    - float32 with heads of 128 and 256, and bfloat16 with heads of 256, all causal with a soft cap and segments:
      512 x 512.
    """
    has_plain_scores = problem.options.soft_cap is None and not problem.has_segments
    if problem.dtype != "bfloat16" or problem.H > LANES:
        return (512, 512), (512, 512)
    keys = 2048 if has_plain_scores and not problem.options.causal else 1024
    return (1024, keys), (1024, 1024) if has_plain_scores else (512, 512)


def _cheapest_tile(problem: Problem, max_queries: int, max_keys: int) -> tuple[int, int]:
    """The tile (queries, keys) with the least work among those that divide the problem's lengths."""
    tiles = itertools.product(_tile_lengths(problem.T, max_queries), _tile_lengths(problem.S, max_keys))
    return min(tiles, key=functools.partial(_tile_work, problem))


def work(problem: Problem) -> float:
    """Work of the forward pass plus a backward pass with their cheapest tiles, for the comparison of padded lengths."""
    return sum(_tile_work(problem, _cheapest_tile(problem, *largest)) for largest in largest_tiles(problem))


def tilings(problem: Problem, max_area: int, max_excess: float) -> list[tuple[int, int]]:
    """Tiles (queries, keys) worth trying in a pass: those whose work is at most a little more than the least work.

    Args:
        problem: the problem; the tiles divide its lengths.
        max_area: the largest product of queries and keys.
        max_excess: how much the work may exceed the least work, as a share of the least work.
    """
    length_choices = [_tile_lengths(length, _LENGTHS[0]) for length in (problem.T, problem.S)]
    tiles = [(q, kv) for q, kv in itertools.product(*length_choices) if q * kv <= max_area]
    work_by_tile = {tile: _tile_work(problem, tile) for tile in tiles}
    least_work = min(work_by_tile.values())
    return [tile for tile, tile_work in work_by_tile.items() if tile_work <= (1 + max_excess) * least_work]


def _tile_lengths(length: int, max_length: int) -> list[int]:
    """The numbers of queries or of keys that a tile may have to divide `length`."""
    return [tile_length for tile_length in _LENGTHS if tile_length <= max_length and length % tile_length == 0]


def _tile_work(problem: Problem, tile: tuple[int, int]) -> float:
    """Number of pairs in all visited tiles, times the overhead of small tiles in libtpu's schedules for v5e."""
    q, kv = tile
    sizes = Sizes(1, problem.T, problem.S, 1, 1, problem.H, q, kv, False, problem.options)
    # with an unknown offset, count the tiles of every part of the sequence
    part_count = -(-problem.S // problem.T) if problem.has_offset else 1
    first, end = sizes.key_tiles(np.arange(part_count * problem.T // q), xp=np)
    return int(np.sum(np.maximum(end - first, 0))) * q * kv * (1 + 128 / q + 160 / kv)


def check_tiles(tiles: Any, problem: Problem) -> None:
    """Refuse tiles that cannot run a problem.

    Raises:
        ValueError: the tiles belong to another kernel, or whole tiles do not make up T and S.
    """
    if not isinstance(tiles, Tiles):
        raise ValueError(f"attention: got tiles {tiles!r}, expected pallas_kernels.attention.tpu.Tiles")
    if not tiles.can_divide(problem.T, problem.S):
        raise ValueError(
            f"attention: got {tiles}, expected divisors of T={problem.T} and S={problem.S}: take shorter tiles"
        )


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The static facts of a kernel's call. The position of the first query is passed separately, as `start`.

    Args:
        B, T, S, N, K, H: numbers of rows, queries, keys, query heads and key heads, and the width of a head.
        bq, bk: numbers of queries and of keys in a tile.
        has_segments: whether the call has segment ids.
        options: what to compute.
        has_offset: whether `start` is an array; if not, it is None, and the first query is at position 0.
    """

    B: int
    T: int
    S: int
    N: int
    K: int
    H: int
    bq: int
    bk: int
    has_segments: bool
    options: Options
    has_offset: bool = False

    @property
    def is_never_blind(self) -> bool:
        """Whether every query sees a key; if so, a query without a finite score has only scores of -inf."""
        return not self.has_segments and self.options.is_never_blind(self.T, self.S, any_offset=self.has_offset)

    @property
    def factor(self) -> float:
        """The factor that turns raw products (with a soft cap: the tanh) into scores for exp2."""
        options = self.options
        return LOG2E * (options.scale if options.soft_cap is None else options.soft_cap)

    @property
    def unit(self) -> float:
        """The unit of the stored scores: a kernel multiplies by `factor` only after it has subtracted the maximum.

        If `factor` is negative (a maximum would become a minimum), or so small or large that NEG would no longer hide
        a score, the kernel multiplies the scores at once, and the unit is 1.
        """
        return self.factor if 1e-6 < self.factor < 1e6 else 1.0

    def position(self, i: Any, start: Any = None) -> Any:
        """Position of the first query of tile i."""
        return i * self.bq if start is None else i * self.bq + start

    def key_tiles(self, i: Any, start: Any = None, xp: Any = jnp) -> tuple[Any, Any]:
        """Indices of the first tile of keys that query tile i may see, and of the end (exclusive); `xp`: jnp or np."""
        first, end = i * 0, i * 0 + self.S // self.bk
        if self.options.causal:
            end = xp.minimum(end, div(self.position(i, start) + (self.bq + self.bk - 1), self.bk))
        if self.options.window is not None:
            first = div(xp.maximum(self.position(i, start) - (self.options.window - 1), 0), self.bk)
        return first, end

    def query_tiles(self, j: Any, start: Any = None, xp: Any = jnp) -> tuple[Any, Any]:
        """Indices of the first tile of queries that may see key tile j, and of the end (exclusive); `xp`: jnp or np."""
        first, end = j * 0, j * 0 + self.T // self.bq

        def query_index(position: Any) -> Any:
            return position if start is None else xp.maximum(position - start, 0)

        if self.options.causal:
            first = xp.minimum(div(query_index(j * self.bk), self.bq), end)
        if self.options.window is not None:
            end_query = query_index(j * self.bk + (self.bk - 1 + self.options.window))
            end = xp.minimum(end, div(end_query + (self.bq - 1), self.bq))
        return first, end

    def hides_pairs(self, q_position: Any, k_position: Any) -> Any:
        """Whether a causal mask hides a pair of a tile, given the positions of the tile's first query and first key."""
        hides = q_position < k_position + self.bk - 1
        if self.options.window is not None:
            hides = hides | (q_position + self.bq - 1 - k_position >= self.options.window)
        return hides

    def max_visits(self, by_key: bool) -> int:
        """The largest number of tiles that one tile visits; if the call has an offset, the largest over all offsets.

        A tile of keys visits tiles of queries if `by_key`; else a tile of queries visits tiles of keys.
        """
        length, tile, other_length, other_tile = self.T, self.bq, self.S, self.bk
        if by_key:
            length, tile, other_length, other_tile = other_length, other_tile, length, tile
        if not self.has_offset:
            first, end = (self.query_tiles if by_key else self.key_tiles)(np.arange(length // tile), xp=np)
            return max(1, int(np.max(end - first)))
        if self.options.window is None:
            return other_length // other_tile
        visible_length = tile + self.options.window - 1
        return min(other_length // other_tile, (visible_length + other_tile - 2) // other_tile + 1)


def div(a: Any, b: int) -> Any:
    """a // b for numbers that are not negative, without the code for signs."""
    return a // b if isinstance(a, np.ndarray) else lax.div(a, jnp.int32(b))
