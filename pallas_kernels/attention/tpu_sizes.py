"""What is static in the TPU's kernels: sizes of tiles, and which tiles of keys and queries see each other."""

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
WIDEST = 256
"""Width of heads up to which kernels were compiled."""
LOG2E = math.log2(math.e)
_LENGTHS = (2048, 1024, 512, 256, 128)
"""Queries or keys of a tile, to choose from."""


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


def why_unsupported(target: Target, problem: Problem) -> str | None:
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
        forward, backward = (_best(problem, *most) for most in longest(problem))
        return Tiles(*forward, *backward, *backward)

    return tuned.tiles("attention", chip, problem.case, Tiles, rule, functools.partial(fits, problem))


def fits(problem: Problem, tiles: Tiles) -> bool:
    """Whether tiles that were tuned for other lengths can run these, and are not larger than what was compiled."""
    forward, backward = (q * kv for q, kv in longest(problem))
    areas = (tiles.q * tiles.kv, forward), (tiles.q_dq * tiles.kv_dq, backward), (tiles.q_dkv * tiles.kv_dkv, backward)
    return tiles.divide(problem.T, problem.S) and all(area <= most for area, most in areas)


def longest(problem: Problem) -> tuple[tuple[int, int], tuple[int, int]]:
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
    """The tile, of at most so many queries and keys, that divides the lengths and costs least."""
    pairs = itertools.product(_divisors(problem.T, queries), _divisors(problem.S, keys))
    return min(pairs, key=functools.partial(_work, problem))


def work(problem: Problem) -> float:
    """Of the forward and a pass of the backward, by the rule's tiles; to compare lengths that are filled up."""
    return sum(_work(problem, _best(problem, *most)) for most in longest(problem))


def tilings(problem: Problem, area: int, above: float) -> list[tuple[int, int]]:
    """Tiles worth trying in a pass: those of at most so many pairs whose work is hardly above the least.

    Args:
        problem: whose lengths they divide.
        area: queries times keys.
        above: the part of the least work by which theirs may be larger.
    """
    both = [_divisors(length, _LENGTHS[0]) for length in (problem.T, problem.S)]
    work = {(q, kv): _work(problem, (q, kv)) for q, kv in itertools.product(*both) if q * kv <= area}
    least = min(work.values())
    return [tile for tile, one in work.items() if one <= (1 + above) * least]


def _divisors(length: int, most: int) -> list[int]:
    return [tile for tile in _LENGTHS if tile <= most and length % tile == 0]


def _work(problem: Problem, tile: tuple[int, int]) -> float:
    """By the pairs of all tiles that are visited, and what small tiles add to each in libtpu's schedules for v5e."""
    q, kv = tile
    sizes = Sizes(1, problem.T, problem.S, 1, 1, problem.H, q, kv, False, problem.options)
    # where queries may start anywhere, those of all parts of the sequence count
    parts = -(-problem.S // problem.T) if problem.offset else 1
    first, end = sizes.key_tiles(np.arange(parts * problem.T // q), xp=np)
    return int(np.sum(np.maximum(end - first, 0))) * q * kv * (1 + 128 / q + 160 / kv)


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
class Sizes:
    """What is static in a kernel: sizes of the problem and of a tile, the options, and whether queries have an offset.

    The offset itself, the position of the first query, is `start`; None for 0.
    """

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
    offset: bool = False

    @property
    def sighted(self) -> bool:
        """Whether every query sees a key: a row without a score is then one of scores that are all -inf."""
        return not self.segments and self.options.sighted(self.T, self.S, anywhere=self.offset)

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

    def position(self, i: Any, start: Any = None) -> Any:
        """Of the first query of tile i."""
        return i * self.bq if start is None else i * self.bq + start

    def key_tiles(self, i: Any, start: Any = None, xp: Any = jnp) -> tuple[Any, Any]:
        """First and past-the-last tile of keys that query tile i may see."""
        first, end = i * 0, i * 0 + self.S // self.bk
        if self.options.causal:
            end = xp.minimum(end, div(self.position(i, start) + (self.bq + self.bk - 1), self.bk))
        if self.options.window is not None:
            first = div(xp.maximum(self.position(i, start) - (self.options.window - 1), 0), self.bk)
        return first, end

    def query_tiles(self, j: Any, start: Any = None, xp: Any = jnp) -> tuple[Any, Any]:
        """First and past-the-last tile of queries that may see key tile j."""
        first, end = j * 0, j * 0 + self.T // self.bq

        def index(t: Any) -> Any:
            return t if start is None else xp.maximum(t - start, 0)

        if self.options.causal:
            first = xp.minimum(div(index(j * self.bk), self.bq), end)
        if self.options.window is not None:
            last = index(j * self.bk + (self.bk - 1 + self.options.window))
            end = xp.minimum(end, div(last + (self.bq - 1), self.bq))
        return first, end

    def partly(self, q0: Any, k0: Any) -> Any:
        """Whether a tile that starts at query q0 and key k0 has pairs that are hidden by position; causal only."""
        hidden = q0 < k0 + self.bk - 1
        if self.options.window is not None:
            hidden = hidden | (q0 + self.bq - 1 - k0 >= self.options.window)
        return hidden

    def steps(self, by_key: bool) -> int:
        """The longest range of tiles that a tile of keys, else of queries, visits; of any offset where there is one."""
        length, tile, other_length, other_tile = self.T, self.bq, self.S, self.bk
        if by_key:
            length, tile, other_length, other_tile = other_length, other_tile, length, tile
        if not self.offset:
            first, end = (self.query_tiles if by_key else self.key_tiles)(np.arange(length // tile), xp=np)
            return max(1, int(np.max(end - first)))
        if self.options.window is None:
            return other_length // other_tile
        reach = tile + self.options.window - 1
        return min(other_length // other_tile, (reach + other_tile - 2) // other_tile + 1)


def div(a: Any, b: int) -> Any:
    """a // b of numbers that are not negative, without the code for signs."""
    return a // b if isinstance(a, np.ndarray) else lax.div(a, jnp.int32(b))
