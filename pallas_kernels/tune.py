"""Find tiles of a kernel on a chip: `python -m pallas_kernels.tune KERNEL --chip CHIP [--case CASE] [--write]`.

Every case tagged "bench" or "aot" is tried with every tiling that the kernel proposes. Those that the chip's compiler
refuses, or (of adam8, quantize, top_k) for which it needs temporary memory, are dropped; that needs no device, only the
compiler. The rest are timed where the chip is at hand: random data, everything compiled and warm, the median of ten
rounds of each, in turns. Where it is not, nothing is claimed to be fast, and what is found is marked "static":

    attention on a TPU   cycles of the compiler's schedule, pass by pass; the rule's tiles, but for a pass that others
                         take at least 3 % fewer cycles for
    attention on a GPU   the rule's tiles, unless ptxas spills less with others
    other kernels        the first tiling by the kernel's rule that compiles

`--write` puts the outcome into `tiles/<chip>.json`, with date, JAX version and command; where attention's rule is kept
there is nothing to write, and an older entry of the case goes unless it was timed. GPU kernels but attention have tiles
fixed by registers. Nothing is tuned in a user's run. A tiling of attention on an absent TPU takes
about a minute on a busy machine, for libtpu writes all stages of its schedule.
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


@dataclasses.dataclass(frozen=True)
class Tuned:
    """How a kernel is tuned.

    Args:
        facts: of a case: what `tiles.tiles` looks it up by.
        shapes: of a case: trees of shapes of its arguments.
        run: of a case and tiles: the function of these arguments.
        tilings: of a case and a chip: what to try, the first by rule.
        donated: positions of arguments that are changed in place.
    """

    facts: Callable[[Any], dict[str, int | str]]
    shapes: Callable[[Any], tuple[Any, ...]]
    run: Callable[[Any, Any], Callable[..., Any]]
    tilings: Callable[[Any, str], Sequence[Any]]
    donated: tuple[int, ...] = ()


def adam8() -> Tuned:
    """Of 8-bit AdamW."""
    import jax
    import jax.numpy as jnp

    from pallas_kernels.adam8 import api, tpu
    from pallas_kernels.adam8.maps import MAPS
    from pallas_kernels.adam8.reference import HYPER

    def shapes(case: Any) -> tuple[Any, ...]:
        make, shape = jax.ShapeDtypeStruct, (case.layers, case.rows, case.cols)
        scale = make((case.layers, case.rows // case.block, case.cols), jnp.float32)
        moments = [(make(shape, dtype), scale) for dtype in (MAPS[case.map].m_dtype, jnp.uint8)]
        return make(shape, jnp.float32), make(shape, jnp.dtype(case.gradient)), *moments, make((HYPER,), jnp.float32)

    def run(case: Any, tiles: Any) -> Callable[..., Any]:
        settings = api.Settings(case.block, weight_decay=case.weight_decay, map=case.map)
        return functools.partial(api.adam8, settings=settings, implementation="tpu", tiles=tiles)

    return Tuned(api.facts, shapes, run, tpu.candidates, donated=(0, 2, 3))


def quantize() -> Tuned:
    """Of quantization."""
    from pallas_kernels.quantize import api, tpu

    def run(case: Any, tiles: Any) -> Callable[..., Any]:
        return lambda x: api.quantize(
            x, bits=case.bits, block=case.block, axis=case.axis, implementation="tpu", tiles=tiles
        )

    return Tuned(api.facts, _matrix, run, lambda case, chip: tpu.candidates(case))


def top_k() -> Tuned:
    """Of block top-k."""
    from pallas_kernels.top_k import api, tpu

    def run(case: Any, tiles: Any) -> Callable[..., Any]:
        return lambda x: api.top_k(x, case.k, block=case.block, axis=case.axis, implementation="tpu", tiles=tiles)

    return Tuned(api.facts, _matrix, run, lambda case, chip: tpu.candidates(case))


def _matrix(case: Any) -> tuple[Any, ...]:
    import jax
    import jax.numpy as jnp

    return (jax.ShapeDtypeStruct((case.rows, case.cols), jnp.dtype(case.dtype)),)


KERNELS: dict[str, Callable[[], Tuned]] = {"adam8": adam8, "quantize": quantize, "top_k": top_k}
"""Those with tiles for one pass, by the name of their folder."""
NAMES = ("attention", *KERNELS)
CHIPS = (*ahead.TPUS, *ahead.GPUS)


@dataclasses.dataclass(frozen=True)
class Tried:
    """One tiling of one case.

    Args:
        tiles: the kernel's `Tiles`.
        refused: why it was dropped; `None` where it was not.
        seconds: median of a call; `None` where nothing was timed.
    """

    tiles: Any
    refused: str | None = None
    seconds: float | None = None


def best(tried: Sequence[Tried]) -> Tried | None:
    """The fastest; where nothing was timed, the first that compiles; `None` where nothing does.

    Example:
        >>> best([Tried("a", "too large"), Tried("b"), Tried("c")]).tiles
        'b'
        >>> best([Tried("a", seconds=2.0), Tried("b", seconds=1.0)]).tiles
        'b'
    """
    compiled = [one for one in tried if one.refused is None]
    timed_ones = [one for one in compiled if one.seconds is not None]
    return min(timed_ones, key=lambda one: one.seconds or 0.0) if timed_ones else (compiled[0] if compiled else None)


def entry(kernel: str, facts: dict[str, int | str], tiles: Any, measured: str, command: str) -> dict[str, Any]:
    """The entry of `tiles/<chip>.json` for a case.

    Args:
        kernel: its name.
        facts: of the case.
        tiles: the best.
        measured: how that was found.
        command: that gave it.
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


def measured(found: Tried, count: int) -> str:
    """How the best of `count` tilings was found."""
    if found.seconds is None:
        return f"static: the first of {count} tilings by rule that compiles; not timed"
    return f"median of {ROUNDS}: {found.seconds * 1e6:.1f} us, the fastest of {count} tilings"


def written(entries: Sequence[Mapping[str, Any]], more: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Entries of a file with others added; one of the same kernel and case is replaced, unless it was timed and the
    new one was not. One without tiles takes its place and is left out.

    Example:
        >>> old = {"kernel": "a", "case": {"C": 8}, "measured": "median of 10: 3.0 us", "tiles": {"n": 1}}
        >>> new = {**old, "measured": "static: ..", "tiles": {"n": 2}}
        >>> written([old], [new]) == [old], written([new], [old]) == [old]
        (True, True)
    """

    def key(one: Mapping[str, Any]) -> str:
        return json.dumps([one["kernel"], one["case"]], sort_keys=True)

    by_case = {key(one): one for one in entries}
    for one in more:
        earlier = by_case.get(key(one))
        if earlier is None or earlier["measured"].startswith("static") or not one["measured"].startswith("static"):
            by_case[key(one)] = one
    return [one for one in by_case.values() if one["tiles"] is not None]


def _timed(shapes: tuple[Any, ...], programs: Sequence[Any], device: Any, donated: tuple[int, ...] = ()) -> list[float]:
    """Median seconds of each compiled kernel, in turns on the same random numbers."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    rng = np.random.default_rng(0)

    def random(a: Any) -> Any:
        low, high = (-1.0, 1.0) if jnp.issubdtype(a.dtype, jnp.floating) else (0, 127)
        return jax.device_put(jnp.asarray(rng.uniform(low, high, a.shape)).astype(a.dtype), device)

    args = list(jax.tree.map(random, shapes))
    times: list[list[float]] = [[] for _ in programs]
    for turn in range(ROUNDS + 1):
        for i, run in enumerate(programs):
            start = time.perf_counter()
            out = jax.block_until_ready(run(*args))
            times[i].append(time.perf_counter() - start)
            for position, changed in zip(donated, out, strict=False):
                args[position] = changed
        if turn == 0:
            times = [[] for _ in programs]
    return [statistics.median(seconds) for seconds in times]


def tune(kernel: str, chip: str, command: str, only: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Try every tiling of every case, and print the results.

    Args:
        kernel: a name of `NAMES`.
        chip: a name of `CHIPS`; a TPU for kernels but attention.
        command: that gave it, for the file.
        only: names of cases; all of them by default.

    Returns:
        Entries of the chip's file; one with tiles `None` means that the rule's tiles are best.

    Raises:
        ValueError: an unknown kernel, chip or case; a chip that is not here, and whose compiler is not installed.
    """
    _known("kernel", kernel, NAMES)
    _known("chip", chip, CHIPS)
    platform = "tpu" if chip in ahead.TPUS else "gpu"
    if platform == "gpu" and kernel != "attention":
        raise ValueError(
            f"tune: got chip {chip!r}, expected one of {', '.join(ahead.TPUS)}: on GPUs the tiles of {kernel} are "
            "fixed by registers"
        )
    cases = importlib.import_module(f"pallas_kernels.{kernel}.cases").CASES
    cases = {case.name: case for case in cases if {"bench", "aot"} & set(case.tags)}
    for name in only:
        _known("case", name, tuple(cases))
    selected_cases = [case for name, case in cases.items() if not only or name in only]
    dumping = ahead.dumping() if platform == "tpu" and kernel == "attention" else contextlib.nullcontext()
    with dumping as folder:
        device, here = ahead.device(chip)
        if kernel == "attention":
            tuned_entries = [
                _attention(case, chip, device, folder if not here else None, command, here) for case in selected_cases
            ]
        else:
            tuned_entries = [_one_pass(kernel, case, chip, device, command, here) for case in selected_cases]
    return [tuned_entry for tuned_entry in tuned_entries if tuned_entry is not None]


def _known(what: str, name: str, names: Sequence[str]) -> None:
    if name not in names:
        near = difflib.get_close_matches(name, names, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"tune: got {what} {name!r}, expected one of {', '.join(names)}{hint}")


def _one_pass(kernel: str, case: Any, chip: str, device: Any, command: str, here: bool) -> dict[str, Any] | None:
    """Of a kernel of `KERNELS`."""
    tuned, module = KERNELS[kernel](), importlib.import_module(f"pallas_kernels.{kernel}.tpu")
    refusal = module.supports(Target("tpu", chip), case)
    if refusal is not None:
        print(f"{kernel} {case.name} on {chip}: {refusal}", flush=True)
        return None
    tilings, shapes = tuned.tilings(case, chip), tuned.shapes(case)
    results = [ahead.compiled(tuned.run(case, tiles), shapes, device, donated=tuned.donated) for tiles in tilings]
    refusals = [
        one.refused or (f"{one.temporary} bytes of temporary memory" if one.temporary else None) for one in results
    ]
    programs = [one.program for one, refused in zip(results, refusals, strict=True) if refused is None]
    seconds = iter(_timed(shapes, programs, device, tuned.donated) if here else [None] * len(programs))
    tried = [
        Tried(tiles, refused) if refused else Tried(tiles, seconds=next(seconds))
        for tiles, refused in zip(tilings, refusals, strict=True)
    ]
    chosen = best(tried)
    for one in tried:
        outcome = one.refused or ("compiles; not timed" if one.seconds is None else f"{one.seconds * 1e6:.1f} us")
        print(f"{kernel} {case.name} on {chip}: {one.tiles}: {outcome}{' <-' if one is chosen else ''}", flush=True)
    if chosen is None:
        return None
    return entry(kernel, tuned.facts(case), chosen.tiles, measured(chosen, len(tilings)), command)


def _attention(case: Any, chip: str, device: Any, folder: Any, command: str, here: bool) -> dict[str, Any] | None:
    """Of attention, pass by pass."""
    from pallas_kernels.attention import tuning

    platform = "tpu" if chip in ahead.TPUS else "gpu"
    if tuning.supports(case, platform) is not None:
        return None
    problem = tuning.problem(case, platform)
    tried = tuning.candidates(problem, platform)
    unit = "us" if here else "cycles" if platform == "tpu" else "bytes spilled"
    costs = tuning.timed(case, tried, device, platform, _timed) if here else []
    for i, candidate in enumerate(tried):
        cost = costs[i] if here else tuning.static(case, candidate, device, platform, folder)
        costs += [] if here else [cost]
        for name, sizes in candidate.passes.items():
            cost_text = cost if isinstance(cost, str) else f"{cost[name] * (1e6 if here else 1):,.0f} {unit}"
            print(f"attention {case.name} on {chip}: {name} {sizes}: {cost_text}", flush=True)
    tiles, costs_by_pass = tuning.best(tried, costs, platform, 0.0 if here else tuning.GAIN)
    how = ", ".join(
        f"{name} {cost * (1e6 if here else 1):.0f} (by rule {rule * (1e6 if here else 1):.0f}) {unit}"
        for name, (cost, rule) in costs_by_pass.items()
    )
    method = (
        f"median of {ROUNDS}, the fastest"
        if here
        else "static: cycles of the compiler's schedule, the fewest"
        if platform == "tpu"
        else "static: bytes that ptxas spills, the fewest"
    )
    rule_is_best = tiles == tried[0].tiles
    print(f"attention {case.name} on {chip}: {tiles}{', the rule' if rule_is_best else ''}: {how} <-", flush=True)
    tuned_entry = entry("attention", problem.case, tiles, f"{method} of {len(tried)} tilings: {how}", command)
    return tuned_entry | ({"tiles": None} if rule_is_best and not here else {})


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python -m pallas_kernels.tune",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("kernel", help=f"one of {', '.join(NAMES)}")
    parser.add_argument("--chip", required=True, help=f"one of {', '.join(CHIPS)}; a GPU for attention alone")
    parser.add_argument("--case", action="append", default=[], help="of the kernel's cases.py; may be repeated; all")
    parser.add_argument("--write", action="store_true", help="into tiles/CHIP.json")
    options = parser.parse_args(arguments)
    ahead.prepare()
    command = shlex.join(["python", "-m", "pallas_kernels.tune", *(sys.argv[1:] if arguments is None else arguments)])
    try:
        tuned_entries = tune(options.kernel, options.chip, command, options.case)
    except ValueError as error:
        parser.error(str(error))
    if options.write:
        write(options.chip, tuned_entries)


def write(chip: str, tuned_entries: Sequence[Mapping[str, Any]]) -> None:
    """Write entries into a chip's file, and print whether it changed.

    Args:
        chip: its name.
        tuned_entries: by `tune`.
    """
    before = files.entries(chip)
    after = written(before, tuned_entries)
    if after == list(before):
        print(f"nothing to write: the rule's tiles are the best that was found on {chip}")
        return
    file = files.FOLDER / f"{chip}.json"
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(after, indent=1) + "\n")
    print(f"wrote {file.name}")


if __name__ == "__main__":
    main()
