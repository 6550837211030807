"""Tuning of attention: tilings worth trying on TPU and Hopper, and what each pass of them costs.

A pass costs seconds where its chip is at hand. On a TPU that is not, it costs the cycles of libtpu's schedule: bundles
of a tile's code, once for each tile that is visited (with and without comparing positions), of the code that starts and
ends a row of tiles, and of each step of the grid. On a GPU that is not, it costs the bytes that ptxas spills.
"""

import dataclasses
import itertools
import math
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import ahead
from pallas_kernels.attention import api, gpu_sizes, tpu_sizes
from pallas_kernels.attention.cases import Case
from pallas_kernels.attention.problem import Problem
from pallas_kernels.attention.reference import Options
from pallas_kernels.target import Target

GAIN = 0.03
"""Tiles are taken instead of the rule's for a pass that costs less by at least this part."""
TRIED = 0.25
"""Tilings whose work by the rule's estimate is at most this part above the least are tried."""
_TPU: Mapping[str, tuple[str, ...]] = {"forward": ("q", "kv"), "dq": ("q_dq", "kv_dq"), "dkv": ("q_dkv", "kv_dkv")}
_GPU: Mapping[str, tuple[str, ...]] = {"forward": ("kv", "stages"), "backward": ("kv_dq", "q_dkv", "stages_backward")}
FIELDS = {"tpu": _TPU, "gpu": _GPU}
"""By platform and pass: names of the tiles that it depends on."""


@dataclasses.dataclass(frozen=True)
class Candidate:
    """Tiles that differ from the rule's in some passes.

    Args:
        tiles: the kernel's `Tiles`.
        passes: by name, the sizes that they have for it.
    """

    tiles: Any
    passes: Mapping[str, tuple[int, ...]]


def problem(case: Case, platform: str) -> Problem:
    """What a case poses to the kernel of a platform."""
    options = Options(case.causal, case.window, case.soft_cap, 1 / math.sqrt(case.H))
    sizes = case.B, case.T, case.S, case.N, case.K, case.H
    unpadded = Problem(*sizes, case.dtype, case.segments > 0, options, case.causal and case.offset > 0)
    return api._padded(unpadded, tpu_sizes if platform == "tpu" else gpu_sizes)


def why_unsupported(case: Case, platform: str) -> str | None:
    """Why the kernel of a platform cannot run a case; None if it can."""
    module: Any = tpu_sizes if platform == "tpu" else gpu_sizes
    return module.why_unsupported(Target(platform), problem(case, platform))


def candidates(asked: Problem, platform: str) -> list[Candidate]:
    """What is worth trying, the rule's tiles first.

    Example:
        >>> [one.passes for one in candidates(problem(Case("x", 512, 512, 1, 1, 256), "tpu"), "tpu")][:2]
        [{'forward': (512, 512), 'dq': (512, 512), 'dkv': (512, 512)}, {'forward': (512, 256), 'dq': (512, 256), \
'dkv': (512, 256)}]
    """
    kept, seen = list[Candidate](), set[tuple[str, tuple[int, ...]]]()
    for one in _on_tpu(asked) if platform == "tpu" else _on_gpu(asked):
        new = {name: sizes for name, sizes in one.passes.items() if (name, sizes) not in seen}
        seen |= set(new.items())
        kept += [Candidate(one.tiles, new)] if new else []
    return kept


def _sizes(tiles: Any, fields: Mapping[str, tuple[str, ...]]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(getattr(tiles, field) for field in of) for name, of in fields.items()}


def _on_tpu(asked: Problem) -> Iterator[Candidate]:
    rule = tpu_sizes.choose_tiles(None, asked)
    yield Candidate(rule, _sizes(rule, _TPU))
    forward, backward = (tpu_sizes.tilings(asked, q * kv, TRIED) for q, kv in tpu_sizes.longest(asked))
    for pair in dict.fromkeys([*forward, *backward]):
        passes = {name: pair for name in _TPU if pair in (forward if name == "forward" else backward)}
        fields = {field: size for name in passes for field, size in zip(_TPU[name], pair, strict=True)}
        yield Candidate(dataclasses.replace(rule, **fields), passes)


def _on_gpu(asked: Problem) -> Iterator[Candidate]:
    rule = gpu_sizes.choose_tiles(None, asked)
    yield Candidate(rule, _sizes(rule, _GPU))
    for name, values in (
        ("forward", itertools.product((128, 64), (2, 3, 4))),
        ("backward", itertools.product((64, 128), (64, 128), (2, 1, 3))),
    ):
        for sizes in values:
            tiles = dataclasses.replace(rule, **dict(zip(_GPU[name], sizes, strict=True)))
            if gpu_sizes.fits(asked, tiles):
                yield Candidate(tiles, {name: sizes})


def shapes(case: Case) -> tuple[Any, ...]:
    """Types of q, k, v, and of segment ids where the case has them."""
    rows = ((case.T, case.N), (case.S, case.K), (case.S, case.K))
    arrays = [jax.ShapeDtypeStruct((case.B, length, heads, case.H), jnp.dtype(case.dtype)) for length, heads in rows]
    ids = [jax.ShapeDtypeStruct((case.B, length), jnp.int32) for length in (case.T, case.S)]
    return *arrays, *(ids if case.segments else [])


def run(case: Case, tiles: Any, platform: str, gradient: bool) -> Callable[..., Any]:
    """The forward, or the gradient by q, k and v of the sum of its results."""

    def forward(q: Any, k: Any, v: Any, *ids: Any) -> Any:
        options: Any = case.options
        return api.attention(q, k, v, segment_ids=ids or None, implementation=platform, tiles=tiles, **options)

    def total(*args: Any) -> Any:
        return forward(*args).astype(jnp.float32).sum()

    return jax.grad(total, (0, 1, 2)) if gradient else forward


def cycles(found: ahead.Schedule, asked: Problem, name: str, tile: tuple[int, ...]) -> int:
    """Cycles of a pass by its kernel's schedule, over the whole grid; with an offset, the mean over a sequence's parts.

    Args:
        found: of the kernel.
        asked: the problem, of which whole tiles are made up.
        name: "forward", "dq", "dkv".
        tile: queries and keys.
    """
    T, S, options = asked.T, asked.S, asked.options
    bq, bk = min(tile[0], T), min(tile[1], S)
    sizes = tpu_sizes.Sizes(asked.B, T, S, asked.N, asked.K, asked.H, bq, bk, asked.segments, options, asked.offset)
    by_key = name == "dkv"
    count = S // bk if by_key else T // bq
    visible = sizes.query_tiles if by_key else sizes.key_tiles
    parts, starts = -(-S // T) if asked.offset else 1, list[tuple[int, int]]()
    for offset in range(0, parts * T, T):
        first, end = visible(np.arange(count), offset, np)
        pairs = [(i, j) for i in range(count) for j in range(first[i], end[i])]
        starts += [(offset + pair[by_key] * bq, pair[not by_key] * bk) for pair in pairs]
    masked = sum(sizes.partly(q, k) for q, k in starts) if options.causal else 0
    tiles = found.longest(2 if options.causal else 1)
    by_row = sum(found.regions) - sum(tiles)
    each = ([*tiles, 0, 0] if options.causal else [0, *tiles, 0])[:2]
    heads, rows = asked.B * asked.N, asked.B * (asked.K if by_key else asked.N) * count
    steps = heads * count * sizes.steps(by_key)
    work = heads * (masked * each[0] + (len(starts) - masked) * each[1])
    return steps * found.always + rows * by_row + work // parts


def static(case: Case, candidate: Candidate, at: Any, platform: str, folder: pathlib.Path) -> dict[str, float] | str:
    """What each pass of a candidate costs on a chip that is not here, or why it is refused."""
    tuned_problem = problem(case, platform)
    result = ahead.compiled(run(case, candidate.tiles, platform, True), shapes(case), at)
    if result.refused is not None:
        return result.refused
    if platform == "gpu":
        return dict.fromkeys(candidate.passes, float(result.spilled))
    schedules = ahead.schedules(folder)
    return {
        name: float(cycles(schedules[f"attention_{name}_kernel"], tuned_problem, name, sizes))
        for name, sizes in candidate.passes.items()
    }


def timed(
    case: Case,
    tried: Sequence[Candidate],
    at: Any,
    platform: str,
    seconds: Callable[[tuple[Any, ...], list[Any], Any], list[float]],
) -> list[dict[str, float] | str]:
    """Seconds of each pass of every candidate; the backward's are those of a gradient, with the rule's forward.

    Args:
        case: what to run.
        tried: candidates, the rule's first.
        at: the device.
        platform: its kind.
        seconds: of shapes, compiled programs and the device, to the seconds of each program.
    """
    rule = _sizes(tried[0].tiles, FIELDS[platform])["forward"]
    rule_forward = dict(zip(FIELDS[platform]["forward"], rule, strict=True))
    costs: list[dict[str, float] | str] = [{} for _ in tried]
    for gradient in (False, True):
        programs = dict[int, Any]()
        for i, candidate in enumerate(tried):
            if not any((name != "forward") == gradient for name in candidate.passes) or isinstance(costs[i], str):
                continue
            tiles = dataclasses.replace(candidate.tiles, **rule_forward) if gradient else candidate.tiles
            result = ahead.compiled(run(case, tiles, platform, gradient), shapes(case), at)
            if result.refused is None:
                programs[i] = result.program
            else:
                costs[i] = result.refused
        for i, program_seconds in zip(programs, seconds(shapes(case), list(programs.values()), at), strict=True):
            cost = costs[i]
            assert not isinstance(cost, str), "a refusal has no program"
            costs[i] = cost | {name: program_seconds for name in tried[i].passes if (name != "forward") == gradient}
    return costs


def best(
    tried: Sequence[Candidate], costs: Sequence[dict[str, float] | str], platform: str, gain: float
) -> tuple[Any, dict[str, tuple[float, float]]]:
    """The cheapest tiles of each pass, else the rule's.

    Args:
        tried: candidates, the rule's first.
        costs: of each, by pass, or why it was refused.
        platform: "tpu" or "gpu".
        gain: the part by which tiles must be cheaper than the rule's.

    Returns:
        The tiles, and by pass what they cost and what the rule's cost.

    Raises:
        ValueError: all were refused.
    """
    tiles, costs_by_pass = tried[0].tiles, dict[str, tuple[float, float]]()
    for name, fields in FIELDS[platform].items():
        cost_and_sizes = [
            (cost[name], candidate.passes[name])
            for candidate, cost in zip(tried, costs, strict=True)
            if not isinstance(cost, str) and name in cost
        ]
        if not cost_and_sizes:
            raise ValueError(f"attention: nothing that was tried compiles: {costs[0]}")
        rule_costs = costs[0]
        rule = math.inf if isinstance(rule_costs, str) else rule_costs[name]
        cost, sizes = min(cost_and_sizes, key=lambda pair: pair[0])
        is_cheaper = cost < rule * (1 - gain)
        tiles = dataclasses.replace(tiles, **dict(zip(fields, sizes, strict=True))) if is_cheaper else tiles
        costs_by_pass[name] = cost if is_cheaper else rule, rule
    return tiles, costs_by_pass
