"""Find the best tiles of a kernel: `python -m pallas_kernels.tune KERNEL --chip CHIP [--case CASE] [--write]`.

Every case tagged "bench" or "aot" is compiled with every tiling that the kernel proposes. A tiling is dropped if the
chip's compiler refuses it or (for adam8, quantize and top_k) needs temporary memory for it. Compiling needs no device.
If this machine has the chip, the remaining tilings are timed on random data, after compiling and a warm-up. The tilings
take turns in ten rounds, and the median time of each tiling counts. Without the chip, no tiling is claimed to be fast,
and the result is marked "static":

    attention on a TPU   for each pass, the tiles with the fewest cycles in the compiler's schedule, if they save at
                         least 3 % of the cycles of the kernel's rule; else the rule's tiles
    attention on a GPU   the rule's tiles, unless ptxas spills less with other tiles
    other kernels        the first tiling, in the order of the kernel's rule, that compiles

`--write` puts the result into `tiles/<chip>.json`, with the date, the JAX version and the command. If the rule's tiles
are the best for attention, no entry is written, and an older entry for the case is deleted unless it was timed. On GPUs
only attention can be tuned: registers determine the tiles of the other kernels. A user's run never tunes anything. One
tiling of attention for an absent TPU takes about a minute on a busy machine, because libtpu dumps every stage of its
schedule.
"""

import argparse
import contextlib
import dataclasses
import datetime
import difflib
import functools
import importlib
import json
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pallas_kernels import ahead
from pallas_kernels import tiles as files
from pallas_kernels.target import Target

ROUNDS = 10
"""Timed calls of each tiling."""


@dataclasses.dataclass(frozen=True)
class KernelTuning:
    """What `tune` needs from a kernel.

    Args:
        facts_of: returns the facts of a case by which `tiles.tiles` looks up the case's entry.
        shapes_of: returns the shapes of a case's arguments, one tree per argument.
        function_of: a function of (case, tiles); returns a function of these arguments that runs the case.
        tilings_of: a function of (case, chip); returns the tilings to try, first the tiling of the kernel's rule.
        donated: indices of the arguments that are changed in place.
    """

    facts_of: Callable[[Any], dict[str, int | str]]
    shapes_of: Callable[[Any], tuple[Any, ...]]
    function_of: Callable[[Any, Any], Callable[..., Any]]
    tilings_of: Callable[[Any, str], Sequence[Any]]
    donated: tuple[int, ...] = ()


def adam8() -> KernelTuning:
    """Return how to tune 8-bit AdamW."""
    import jax
    import jax.numpy as jnp

    from pallas_kernels.adam8 import api, tpu
    from pallas_kernels.adam8.maps import MAPS
    from pallas_kernels.adam8.reference import HYPER

    def shapes_of(case: Any) -> tuple[Any, ...]:
        shape, struct = (case.layers, case.rows, case.cols), jax.ShapeDtypeStruct
        scales = struct((case.layers, case.rows // case.block, case.cols), jnp.float32)
        mu, nu = ((struct(shape, dtype), scales) for dtype in (MAPS[case.map].m_dtype, jnp.uint8))
        weight, gradient = struct(shape, jnp.float32), struct(shape, jnp.dtype(case.gradient))
        return weight, gradient, mu, nu, struct((HYPER,), jnp.float32)

    def function_of(case: Any, tiles: Any) -> Callable[..., Any]:
        settings = api.Settings(case.block, weight_decay=case.weight_decay, map=case.map)
        return functools.partial(api.adam8, settings=settings, implementation="tpu", tiles=tiles)

    return KernelTuning(api.tile_facts, shapes_of, function_of, tpu.candidates, donated=(0, 2, 3))


def quantize() -> KernelTuning:
    """Return how to tune quantization."""
    from pallas_kernels.quantize import api, tpu

    def function_of(case: Any, tiles: Any) -> Callable[..., Any]:
        return lambda x: api.quantize(
            x, bits=case.bits, block=case.block, axis=case.axis, implementation="tpu", tiles=tiles
        )

    return KernelTuning(api.tile_facts, _matrix_shapes, function_of, lambda case, chip: tpu.candidates(case))


def top_k() -> KernelTuning:
    """Return how to tune block top-k."""
    from pallas_kernels.top_k import api, tpu

    def function_of(case: Any, tiles: Any) -> Callable[..., Any]:
        return lambda x: api.top_k(x, case.k, block=case.block, axis=case.axis, implementation="tpu", tiles=tiles)

    return KernelTuning(api.tile_facts, _matrix_shapes, function_of, lambda case, chip: tpu.candidates(case))


def _matrix_shapes(case: Any) -> tuple[Any, ...]:
    """The shape of the only argument of a kernel that reads one matrix, as a tuple of one."""
    import jax
    import jax.numpy as jnp

    return (jax.ShapeDtypeStruct((case.rows, case.cols), jnp.dtype(case.dtype)),)


KERNELS: dict[str, Callable[[], KernelTuning]] = {"adam8": adam8, "quantize": quantize, "top_k": top_k}
"""How to tune each kernel with a single pass, by the name of the kernel's folder."""
NAMES = ("attention", *KERNELS)
"""Names of all kernels that can be tuned."""
CHIPS = (*ahead.TPUS, *ahead.GPUS)
"""Names of all chips that kernels can be tuned for."""


@dataclasses.dataclass(frozen=True)
class TilingResult:
    """The result of compiling, and perhaps timing, a case with one tiling.

    Args:
        tiles: the tiling, a value of the kernel's `Tiles`.
        refusal: why the tiling was dropped; `None` if it was not.
        seconds: median time of a call; `None` if nothing was timed.
    """

    tiles: Any
    refusal: str | None = None
    seconds: float | None = None


def fastest(results: Sequence[TilingResult]) -> TilingResult | None:
    """Return the fastest tiling. If none was timed, return the first one that compiles; `None` if none compiles.

    Example:
        >>> fastest([TilingResult("a", "too large"), TilingResult("b"), TilingResult("c")]).tiles
        'b'
        >>> fastest([TilingResult("a", seconds=2.0), TilingResult("b", seconds=1.0)]).tiles
        'b'
    """
    usable = [result for result in results if result.refusal is None]
    timed = [result for result in usable if result.seconds is not None]
    return min(timed, key=lambda result: result.seconds or 0.0) if timed else next(iter(usable), None)


def entry(kernel: str, facts: dict[str, int | str], tiles: Any, measured: str, command: str) -> dict[str, Any]:
    """Make the entry of `tiles/<chip>.json` for a case.

    Args:
        kernel: name of the kernel.
        facts: the facts by which `tiles.tiles` looks up the case's entry.
        tiles: the best tiles.
        measured: how the tiles were found to be the best.
        command: the command that found them.
    """
    import jax

    return {
        "kernel": kernel,
        "case": facts,
        "tiles": dataclasses.asdict(tiles),
        "measured": measured,
        "date": datetime.date.today().isoformat(),
        "jax": jax.__version__,
        "command": command,
    }


def measurement_text(result: TilingResult, count: int) -> str:
    """Describe how a result was found to be the best of `count` tilings."""
    if result.seconds is None:
        return f"static: the first tiling that compiles, of {count} in the rule's order; not timed"
    return f"median of {ROUNDS}: {result.seconds * 1e6:.1f} us, the fastest of {count} tilings"


def merged_entries(
    old_entries: Sequence[Mapping[str, Any]], new_entries: Sequence[Mapping[str, Any]]
) -> list[Mapping[str, Any]]:
    """Merge new entries into the entries of a file.

    A new entry replaces an old one for the same kernel and case, unless only the old one was timed. A new entry whose
    tiles are None deletes the old entry that it would replace.

    Example:
        >>> old = {"kernel": "a", "case": {"C": 8}, "measured": "median of 10: 3.0 us", "tiles": {"n": 1}}
        >>> new = {**old, "measured": "static: ..", "tiles": {"n": 2}}
        >>> merged_entries([old], [new]) == [old], merged_entries([new], [old]) == [old]
        (True, True)
    """

    def key(entry: Mapping[str, Any]) -> str:
        return json.dumps([entry["kernel"], entry["case"]], sort_keys=True)

    entry_by_key = {key(entry): entry for entry in old_entries}
    for new_entry in new_entries:
        old_entry = entry_by_key.get(key(new_entry))
        only_old_was_timed = (
            old_entry is not None
            and not old_entry["measured"].startswith("static")
            and new_entry["measured"].startswith("static")
        )
        if not only_old_was_timed:
            entry_by_key[key(new_entry)] = new_entry
    return [entry for entry in entry_by_key.values() if entry["tiles"] is not None]


def median_seconds(
    arg_structs: tuple[Any, ...], programs: Sequence[Any], device: Any, donated: tuple[int, ...] = ()
) -> list[float]:
    """Time compiled programs in turns on the same random arguments; return the median seconds of each program."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    rng = np.random.default_rng(0)

    def random_array(struct: Any) -> Any:
        low, high = (-1.0, 1.0) if jnp.issubdtype(struct.dtype, jnp.floating) else (0, 127)
        return jax.device_put(jnp.asarray(rng.uniform(low, high, struct.shape)).astype(struct.dtype), device)

    args = list(jax.tree.map(random_array, arg_structs))
    seconds_by_program: list[list[float]] = [[] for _ in programs]
    for round_index in range(ROUNDS + 1):
        for program, program_seconds in zip(programs, seconds_by_program, strict=True):
            start = time.perf_counter()
            results = jax.block_until_ready(program(*args))
            program_seconds.append(time.perf_counter() - start)
            for arg_index, updated_arg in zip(donated, results, strict=False):
                args[arg_index] = updated_arg
        if round_index == 0:  # the first round only warms up
            seconds_by_program = [[] for _ in programs]
    return [statistics.median(program_seconds) for program_seconds in seconds_by_program]


def tune(kernel: str, chip: str, command: str, case_names: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Try every tiling of every case, and print the results.

    Args:
        kernel: a name of `NAMES`.
        chip: a name of `CHIPS`; a TPU unless the kernel is attention.
        command: the command line of the tuning, which each entry records.
        case_names: names of the cases to tune; by default all.

    Returns:
        New entries of the chip's file; an entry whose tiles are `None` means that the rule's tiles are the best.

    Raises:
        ValueError: the kernel, the chip or a case is unknown; or the chip is not on this machine, and its compiler is
            not installed.
    """
    _check_known("kernel", kernel, NAMES)
    _check_known("chip", chip, CHIPS)
    platform = "tpu" if chip in ahead.TPUS else "gpu"
    if platform == "gpu" and kernel != "attention":
        raise ValueError(
            f"tune: got chip {chip!r}, expected one of {', '.join(ahead.TPUS)}: on GPUs the tiles of {kernel} are "
            "fixed by registers"
        )
    tagged_cases = {
        case.name: case
        for case in importlib.import_module(f"pallas_kernels.{kernel}.cases").CASES
        if {"bench", "aot"} & set(case.tags)
    }
    for name in case_names:
        _check_known("case", name, tuple(tagged_cases))
    selected_cases = [tagged_cases[name] for name in tagged_cases if not case_names or name in case_names]
    needs_schedules = platform == "tpu" and kernel == "attention"
    with ahead.schedule_folder() if needs_schedules else contextlib.nullcontext() as folder:
        device, is_local = ahead.device(chip)
        if kernel == "attention":
            entries = [_tune_attention(case, chip, device, is_local, folder, command) for case in selected_cases]
        else:
            entries = [_tune_one_pass(kernel, case, chip, device, is_local, command) for case in selected_cases]
    return [entry for entry in entries if entry is not None]


def _check_known(kind: str, name: str, names: Sequence[str]) -> None:
    """Refuse a name that is not one of `names`; `kind` is "kernel", "chip" or "case"."""
    if name not in names:
        similar_names = difflib.get_close_matches(name, names, n=1)
        hint = f"; did you mean {similar_names[0]!r}?" if similar_names else ""
        raise ValueError(f"tune: got {kind} {name!r}, expected one of {', '.join(names)}{hint}")


def _tune_one_pass(
    kernel: str, case: Any, chip: str, device: Any, is_local: bool, command: str
) -> dict[str, Any] | None:
    """Tune a case of a kernel of `KERNELS`; return its entry, or None if the kernel or its compiler refuses the case.

    Args:
        kernel, chip, command: as in `tune`.
        case: the case to tune.
        device: the device to compile for, or the description of a device.
        is_local: whether the device is on this machine, so that the tilings are timed.
    """
    tuning, module = KERNELS[kernel](), importlib.import_module(f"pallas_kernels.{kernel}.tpu")
    reason = module.why_unsupported(Target("tpu", chip), case)
    if reason is not None:
        print(f"{kernel} {case.name} on {chip}: {reason}", flush=True)
        return None
    tilings, arg_shapes = tuning.tilings_of(case, chip), tuning.shapes_of(case)
    compiled_tilings = [
        ahead.compile_for(device, tuning.function_of(case, tiles), arg_shapes, donated=tuning.donated)
        for tiles in tilings
    ]
    refusals = [
        compiled.refusal
        or (f"{compiled.temporary_bytes} bytes of temporary memory" if compiled.temporary_bytes else None)
        for compiled in compiled_tilings
    ]
    programs = [
        compiled.program for compiled, refusal in zip(compiled_tilings, refusals, strict=True) if refusal is None
    ]
    seconds = iter(median_seconds(arg_shapes, programs, device, tuning.donated) if is_local else [None] * len(programs))
    results = [
        TilingResult(tiles, refusal) if refusal else TilingResult(tiles, seconds=next(seconds))
        for tiles, refusal in zip(tilings, refusals, strict=True)
    ]
    best = fastest(results)
    for result in results:
        time_text = "compiles; not timed" if result.seconds is None else f"{result.seconds * 1e6:.1f} us"
        mark = " <-" if result is best else ""
        print(f"{kernel} {case.name} on {chip}: {result.tiles}: {result.refusal or time_text}{mark}", flush=True)
    if best is None:
        return None
    return entry(kernel, tuning.facts_of(case), best.tiles, measurement_text(best, len(tilings)), command)


def _tune_attention(
    case: Any, chip: str, device: Any, is_local: bool, folder: Any, command: str
) -> dict[str, Any] | None:
    """Tune a case of attention, pass by pass; return the case's entry, or None if the kernel refuses the case.

    Args:
        case: the case to tune.
        chip, command: as in `tune`.
        device: the device to compile for, or the description of a device.
        is_local: whether the device is on this machine, so that the tilings are timed.
        folder: where libtpu dumps its schedules; read for a TPU that is not on this machine.
    """
    from pallas_kernels.attention import tuning

    platform = "tpu" if chip in ahead.TPUS else "gpu"
    if tuning.why_unsupported(case, platform) is not None:
        return None
    problem = tuning.problem_of(case, platform)
    candidates = tuning.candidates_for(problem, platform)
    # costs are in seconds, cycles or bytes
    unit, units_per_cost = ("us", 1e6) if is_local else ("cycles" if platform == "tpu" else "bytes spilled", 1)
    costs = tuning.time_passes(case, candidates, device, platform, median_seconds) if is_local else []
    for i, candidate in enumerate(candidates):
        cost = costs[i] if is_local else tuning.static_costs(case, candidate, device, platform, folder)
        costs += [] if is_local else [cost]
        for name, sizes in candidate.passes.items():
            cost_text = cost if isinstance(cost, str) else f"{cost[name] * units_per_cost:,.0f} {unit}"
            print(f"attention {case.name} on {chip}: {name} {sizes}: {cost_text}", flush=True)
    tiles, costs_by_pass = tuning.best_tiles(candidates, costs, platform, 0.0 if is_local else tuning.MIN_GAIN)
    costs_text = ", ".join(
        f"{name} {cost * units_per_cost:.0f} (by rule {rule_cost * units_per_cost:.0f}) {unit}"
        for name, (cost, rule_cost) in costs_by_pass.items()
    )
    method = (
        f"median of {ROUNDS}, the fastest"
        if is_local
        else "static: cycles of the compiler's schedule, the fewest"
        if platform == "tpu"
        else "static: bytes that ptxas spills, the fewest"
    )
    rule_is_best = tiles == candidates[0].tiles
    print(
        f"attention {case.name} on {chip}: {tiles}{', the rule' if rule_is_best else ''}: {costs_text} <-", flush=True
    )
    measured = f"{method} of {len(candidates)} tilings: {costs_text}"
    case_entry = entry("attention", problem.case, tiles, measured, command)
    return case_entry | ({"tiles": None} if rule_is_best and not is_local else {})


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command; `arguments` are the words after its name, by default those of this process's command line."""
    parser = argparse.ArgumentParser(
        prog="python -m pallas_kernels.tune",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("kernel", help=f"the kernel to tune: one of {', '.join(NAMES)}")
    parser.add_argument(
        "--chip",
        required=True,
        help=f"the chip to tune for: one of {', '.join(CHIPS)}; a GPU only for attention",
    )
    parser.add_argument(
        "--case",
        action="append",
        default=[],
        help="name of a case in the kernel's cases.py; may be repeated (default: all cases)",
    )
    parser.add_argument("--write", action="store_true", help="write the best tiles into tiles/CHIP.json")
    options = parser.parse_args(arguments)
    ahead.prepare()
    command = shlex.join(["python", "-m", "pallas_kernels.tune", *(sys.argv[1:] if arguments is None else arguments)])
    try:
        new_entries = tune(options.kernel, options.chip, command, options.case)
    except ValueError as error:
        parser.error(str(error))
    if options.write:
        write(options.chip, new_entries)


def write(chip: str, new_entries: Sequence[Mapping[str, Any]]) -> None:
    """Write new entries into a chip's file, and print whether it changed.

    Args:
        chip: name of the chip.
        new_entries: what `tune` returned.
    """
    old_entries = files.entries(chip)
    entries = merged_entries(old_entries, new_entries)
    if entries == list(old_entries):
        print(f"nothing to write: the rule's tiles are the best that were found on {chip}")
        return
    file = files.FOLDER / f"{chip}.json"
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(entries, indent=1) + "\n")
    print(f"wrote {file.name}")


if __name__ == "__main__":
    main()
