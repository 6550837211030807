"""Tuning of attention: which tilings are worth trying on TPU and Hopper, and what each of their passes costs.

If the chip is on this machine, the cost of a pass is its time in seconds. For an absent TPU it is the cycles of
libtpu's schedule: the bundles of each visited tile (with or without comparing positions), of the start and end of each
row of tiles, and of each step of the grid. For an absent GPU it is the bytes of registers that ptxas spills.
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

MIN_GAIN = 0.03
"""Tiles replace the rule's tiles for a pass only if they save at least this share of the pass's cost."""
MAX_EXCESS = 0.25
"""A tiling is tried only if its estimated work exceeds the least work by at most this share."""
_TPU: Mapping[str, tuple[str, ...]] = {"forward": ("q", "kv"), "dq": ("q_dq", "kv_dq"), "dkv": ("q_dkv", "kv_dkv")}
_GPU: Mapping[str, tuple[str, ...]] = {"forward": ("kv", "stages"), "backward": ("kv_dq", "q_dkv", "stages_backward")}
FIELDS = {"tpu": _TPU, "gpu": _GPU}
"""The fields of `Tiles` on which each pass depends, by platform and by name of the pass."""


@dataclasses.dataclass(frozen=True)
class Candidate:
    """Tiles to try for some passes.

    Args:
        tiles: the kernel's `Tiles`; the sizes for all other passes are the rule's.
        passes: the sizes in `tiles` for each of the passes to try, by name of the pass.
    """

    tiles: Any
    passes: Mapping[str, tuple[int, ...]]


def problem_of(case: Case, platform: str) -> Problem:
    """Return the problem, after padding, that the kernel of a platform runs for a case."""
    options = Options(case.causal, case.window, case.soft_cap, 1 / math.sqrt(case.H))
    sizes = case.B, case.T, case.S, case.N, case.K, case.H
    problem = Problem(*sizes, case.dtype, case.segments > 0, options, case.causal and case.offset > 0)
    return api.padded_problem(problem, tpu_sizes if platform == "tpu" else gpu_sizes)


def why_unsupported(case: Case, platform: str) -> str | None:
    """Return the reason why the kernel of a platform cannot run a case, or None if it can."""
    module: Any = tpu_sizes if platform == "tpu" else gpu_sizes
    return module.why_unsupported(Target(platform), problem_of(case, platform))


def candidates_for(problem: Problem, platform: str) -> list[Candidate]:
    """List the tilings worth trying; the first is the rule's, and no pass gets the same sizes twice.

    Example:
        >>> case = Case("x", 512, 512, 1, 1, 256)
        >>> [candidate.passes for candidate in candidates_for(problem_of(case, "tpu"), "tpu")][:2]
        [{'forward': (512, 512), 'dq': (512, 512), 'dkv': (512, 512)}, {'forward': (512, 256), 'dq': (512, 256), \
'dkv': (512, 256)}]
    """
    candidates, listed_passes = list[Candidate](), set[tuple[str, tuple[int, ...]]]()
    for candidate in _tpu_candidates(problem) if platform == "tpu" else _gpu_candidates(problem):
        new_passes = {name: sizes for name, sizes in candidate.passes.items() if (name, sizes) not in listed_passes}
        listed_passes |= set(new_passes.items())
        candidates += [Candidate(candidate.tiles, new_passes)] if new_passes else []
    return candidates


def _sizes_by_pass(tiles: Any, fields_by_pass: Mapping[str, tuple[str, ...]]) -> dict[str, tuple[int, ...]]:
    """The sizes in `tiles` for each pass, by name of the pass."""
    return {name: tuple(getattr(tiles, field) for field in fields) for name, fields in fields_by_pass.items()}


def _tpu_candidates(problem: Problem) -> Iterator[Candidate]:
    """The rule's tiles on TPU, then one candidate per tile (queries, keys) for all passes that may take it."""
    rule_tiles = tpu_sizes.choose_tiles(None, problem)
    yield Candidate(rule_tiles, _sizes_by_pass(rule_tiles, _TPU))
    forward_tilings, backward_tilings = (
        tpu_sizes.tilings(problem, q * kv, MAX_EXCESS) for q, kv in tpu_sizes.largest_tiles(problem)
    )
    for sizes in dict.fromkeys([*forward_tilings, *backward_tilings]):
        passes = {name: sizes for name in _TPU if sizes in (forward_tilings if name == "forward" else backward_tilings)}
        fields = {field: size for name in passes for field, size in zip(_TPU[name], sizes, strict=True)}
        yield Candidate(dataclasses.replace(rule_tiles, **fields), passes)


def _gpu_candidates(problem: Problem) -> Iterator[Candidate]:
    """The rule's tiles on GPU, then all sizes of each pass that fit the shared memory."""
    rule_tiles = gpu_sizes.choose_tiles(None, problem)
    yield Candidate(rule_tiles, _sizes_by_pass(rule_tiles, _GPU))
    for name, sizes_to_try in (
        ("forward", itertools.product((128, 64), (2, 3, 4))),
        ("backward", itertools.product((64, 128), (64, 128), (2, 1, 3))),
    ):
        for sizes in sizes_to_try:
            tiles = dataclasses.replace(rule_tiles, **dict(zip(_GPU[name], sizes, strict=True)))
            if gpu_sizes.fits(problem, tiles):
                yield Candidate(tiles, {name: sizes})


def arg_shapes(case: Case) -> tuple[Any, ...]:
    """Return the shapes of q, k and v, and of the segment ids of queries and of keys if the case has them."""
    lengths_and_heads = ((case.T, case.N), (case.S, case.K), (case.S, case.K))
    array_shapes = [
        jax.ShapeDtypeStruct((case.B, length, heads, case.H), jnp.dtype(case.dtype))
        for length, heads in lengths_and_heads
    ]
    id_shapes = [jax.ShapeDtypeStruct((case.B, length), jnp.int32) for length in (case.T, case.S)]
    return *array_shapes, *(id_shapes if case.segments else [])


def attention_function(case: Case, tiles: Any, platform: str, has_gradient: bool) -> Callable[..., Any]:
    """Return a function of `arg_shapes(case)`: attention with these tiles, or the gradient of the sum of its output."""

    def forward(q: Any, k: Any, v: Any, *ids: Any) -> Any:
        options: Any = case.options
        return api.attention(q, k, v, segment_ids=ids or None, implementation=platform, tiles=tiles, **options)

    def output_sum(*args: Any) -> Any:
        return forward(*args).astype(jnp.float32).sum()

    return jax.grad(output_sum, (0, 1, 2)) if has_gradient else forward


def count_cycles(schedule: ahead.Schedule, problem: Problem, pass_name: str, tile: tuple[int, ...]) -> int:
    """Count the cycles of a pass over the whole grid; with an offset, the mean over the parts of a sequence.

    Args:
        schedule: the schedule of the pass's kernel.
        problem: the problem; whole tiles make up its lengths.
        pass_name: "forward", "dq" or "dkv".
        tile: numbers of queries and of keys in a tile.
    """
    B, T, S, N, K, options = problem.B, problem.T, problem.S, problem.N, problem.K, problem.options
    bq, bk = min(tile[0], T), min(tile[1], S)
    sizes = tpu_sizes.Sizes(B, T, S, N, K, problem.H, bq, bk, problem.has_segments, options, problem.has_offset)
    by_key = pass_name == "dkv"
    tile_count = S // bk if by_key else T // bq
    visited_tiles = sizes.query_tiles if by_key else sizes.key_tiles
    part_count = -(-S // T) if problem.has_offset else 1
    positions = list[tuple[int, int]]()  # of the first query and of the first key of each visited tile
    for offset in range(0, part_count * T, T):
        first, end = visited_tiles(np.arange(tile_count), offset, np)
        visits = [(i, j) for i in range(tile_count) for j in range(first[i], end[i])]
        positions += [(offset + visit[by_key] * bq, visit[not by_key] * bk) for visit in visits]
    masked_count = sum(sizes.hides_pairs(*pair) for pair in positions) if options.causal else 0
    # the longest regions are the code of a tile, with and without comparing positions
    tile_regions = schedule.longest_regions(2 if options.causal else 1)
    row_cycles = sum(schedule.regions) - sum(tile_regions)
    masked_cycles, clear_cycles = ([*tile_regions, 0, 0] if options.causal else [0, *tile_regions, 0])[:2]
    heads, row_count = B * N, B * (K if by_key else N) * tile_count
    step_count = heads * tile_count * sizes.max_visits(by_key)
    tile_cycles = heads * (masked_count * masked_cycles + (len(positions) - masked_count) * clear_cycles)
    return step_count * schedule.always + row_count * row_cycles + tile_cycles // part_count


def static_costs(
    case: Case, candidate: Candidate, device: Any, platform: str, folder: pathlib.Path
) -> dict[str, float] | str:
    """Compute the costs of a candidate's passes on an absent chip.

    Args:
        case: the case to run.
        candidate: the tiles to compile.
        device: the description of the chip's device.
        platform: "tpu" or "gpu".
        folder: where libtpu dumps its schedules.

    Returns:
        The cost of each pass, by name of the pass: cycles on TPU, spilled bytes on GPU. Or the compiler's refusal.
    """
    problem = problem_of(case, platform)
    compiled = ahead.compile_for(device, attention_function(case, candidate.tiles, platform, True), arg_shapes(case))
    if compiled.refusal is not None:
        return compiled.refusal
    if platform == "gpu":
        return dict.fromkeys(candidate.passes, float(compiled.spilled_bytes))
    schedules = ahead.take_schedules(folder)
    return {
        name: float(count_cycles(schedules[f"attention_{name}_kernel"], problem, name, sizes))
        for name, sizes in candidate.passes.items()
    }


def time_passes(
    case: Case,
    candidates: Sequence[Candidate],
    device: Any,
    platform: str,
    time_programs: Callable[[tuple[Any, ...], list[Any], Any], list[float]],
) -> list[dict[str, float] | str]:
    """Measure the seconds of every candidate's passes; for a backward pass, of a gradient with the rule's forward pass.

    Args:
        case: the case to run.
        candidates: the candidates; the first has the rule's tiles.
        device: the device to run on.
        platform: "tpu" or "gpu".
        time_programs: a function of shapes, compiled programs and a device that returns the seconds of each program.

    Returns:
        For each candidate, the seconds of its passes by name of the pass; or the compiler's refusal.
    """
    forward_fields = FIELDS[platform]["forward"]
    rule_forward = {field: getattr(candidates[0].tiles, field) for field in forward_fields}
    costs: list[dict[str, float] | str] = [{} for _ in candidates]
    for has_gradient in (False, True):
        program_by_index = dict[int, Any]()
        for i, candidate in enumerate(candidates):
            has_such_pass = any((name != "forward") == has_gradient for name in candidate.passes)
            if not has_such_pass or isinstance(costs[i], str):
                continue
            tiles = dataclasses.replace(candidate.tiles, **rule_forward) if has_gradient else candidate.tiles
            compiled = ahead.compile_for(
                device, attention_function(case, tiles, platform, has_gradient), arg_shapes(case)
            )
            if compiled.refusal is None:
                program_by_index[i] = compiled.program
            else:
                costs[i] = compiled.refusal
        seconds_by_program = time_programs(arg_shapes(case), list(program_by_index.values()), device)
        for i, seconds in zip(program_by_index, seconds_by_program, strict=True):
            cost = costs[i]
            assert not isinstance(cost, str), "a refusal has no program"
            costs[i] = cost | {name: seconds for name in candidates[i].passes if (name != "forward") == has_gradient}
    return costs


def best_tiles(
    candidates: Sequence[Candidate], costs: Sequence[dict[str, float] | str], platform: str, min_gain: float
) -> tuple[Any, dict[str, tuple[float, float]]]:
    """Choose the cheapest tiles of each pass.

    Args:
        candidates: the candidates; the first has the rule's tiles.
        costs: for each candidate, the costs of its passes by name of the pass, or the compiler's refusal.
        platform: "tpu" or "gpu".
        min_gain: the share of the cost that tiles must save to replace the rule's tiles.

    Returns:
        The tiles; and for each pass, by name, a pair: its cost with these tiles, and its cost with the rule's tiles.

    Raises:
        ValueError: the compiler refused all candidates.
    """
    tiles, costs_by_pass = candidates[0].tiles, dict[str, tuple[float, float]]()
    for name, fields in FIELDS[platform].items():
        costs_and_sizes = [
            (cost[name], candidate.passes[name])
            for candidate, cost in zip(candidates, costs, strict=True)
            if not isinstance(cost, str) and name in cost
        ]
        if not costs_and_sizes:
            raise ValueError(f"attention: none of the tilings that were tried compiles: {costs[0]}")
        rule_costs = costs[0]
        rule_cost = math.inf if isinstance(rule_costs, str) else rule_costs[name]
        least_cost, sizes = min(costs_and_sizes, key=lambda pair: pair[0])
        is_cheaper = least_cost < rule_cost * (1 - min_gain)
        tiles = dataclasses.replace(tiles, **dict(zip(fields, sizes, strict=True))) if is_cheaper else tiles
        costs_by_pass[name] = least_cost if is_cheaper else rule_cost, rule_cost
    return tiles, costs_by_pass
