"""Find tiles of a kernel on a chip: `python -m pallas_kernels.tune KERNEL --chip CHIP [--write]`.

Every case tagged "bench" or "aot" is tried with every tiling that the kernel proposes. Those that the chip's compiler
refuses, or for which it needs temporary memory, are dropped; that needs no device, only libtpu. The rest are timed
where the chip is at hand: random data, everything compiled and warm, the median of ten rounds of each, in turns. Where
it is not, nothing is claimed to be fast: the first tiling by the kernel's rule that compiles is told and marked
"static". `--write` puts the outcome into `tiles/<chip>.json`, with date, JAX version and command.

It leaves out GPU kernels whose tiles are fixed by registers (adam8, quantize, top_k), and never runs in a user's run.
"""

import argparse
import dataclasses
import datetime
import functools
import importlib
import json
import os
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pallas_kernels import tiles as files

TOPOLOGIES = {"v4": "v4:2x2x1", "v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2"}
"""The smallest slice that libtpu compiles for, by chip."""
ROUNDS = 10


@dataclasses.dataclass(frozen=True)
class Tuned:
    """How a kernel is tuned.

    Args:
        facts: of a case: what `tiles.tiles` looks it up by.
        shapes: of a case: trees of shapes of its arguments.
        run: of a case and tiles: the function of these arguments.
        donated: positions of arguments that are changed in place.
    """

    facts: Callable[[Any], dict[str, int | str]]
    shapes: Callable[[Any], tuple[Any, ...]]
    run: Callable[[Any, Any], Callable[..., Any]]
    donated: tuple[int, ...] = ()


def adam8() -> Tuned:
    """Of 8-bit AdamW."""
    import jax
    import jax.numpy as jnp

    from pallas_kernels.adam8 import api
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

    return Tuned(api.facts, shapes, run, donated=(0, 2, 3))


def quantize() -> Tuned:
    """Of quantization."""
    from pallas_kernels.quantize import api

    def run(case: Any, tiles: Any) -> Callable[..., Any]:
        return lambda x: api.quantize(
            x, bits=case.bits, block=case.block, axis=case.axis, implementation="tpu", tiles=tiles
        )

    return Tuned(api.facts, _matrix, run)


def top_k() -> Tuned:
    """Of block top-k."""
    from pallas_kernels.top_k import api

    def run(case: Any, tiles: Any) -> Callable[..., Any]:
        return lambda x: api.top_k(x, case.k, block=case.block, axis=case.axis, implementation="tpu", tiles=tiles)

    return Tuned(api.facts, _matrix, run)


def _matrix(case: Any) -> tuple[Any, ...]:
    import jax
    import jax.numpy as jnp

    return (jax.ShapeDtypeStruct((case.rows, case.cols), jnp.dtype(case.dtype)),)


KERNELS: dict[str, Callable[[], Tuned]] = {"adam8": adam8, "quantize": quantize, "top_k": top_k}
"""By the name of their folder."""


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
    left = [one for one in tried if one.refused is None]
    timed = [one for one in left if one.seconds is not None]
    return min(timed, key=lambda one: one.seconds or 0.0) if timed else (left[0] if left else None)


def entry(kernel: str, facts: dict[str, int | str], found: Tried, count: int, command: str) -> dict[str, Any]:
    """What `tiles/<chip>.json` says of a case.

    Args:
        kernel: its name.
        facts: of the case.
        found: the best.
        count: tilings tried.
        command: that gave it.
    """
    import jax

    measured = (
        f"static: the first of {count} tilings by rule that compiles; not timed"
        if found.seconds is None
        else f"median of {ROUNDS}: {found.seconds * 1e6:.1f} us, the fastest of {count} tilings"
    )
    return {
        "kernel": kernel,
        "case": facts,
        "tiles": dataclasses.asdict(found.tiles),
        "measured": measured,
        "date": datetime.date.today().isoformat(),
        "jax": jax.__version__,
        "command": command,
    }


def written(entries: Sequence[Mapping[str, Any]], more: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Entries of a file with others added; one of the same kernel and case is replaced, unless it was timed and the
    new one was not.

    Example:
        >>> old = {"kernel": "a", "case": {"C": 8}, "measured": "median of 10: 3.0 us", "tiles": {"n": 1}}
        >>> new = {**old, "measured": "static: ..", "tiles": {"n": 2}}
        >>> written([old], [new]) == [old], written([new], [old]) == [old]
        (True, True)
    """

    def key(one: Mapping[str, Any]) -> str:
        return json.dumps([one["kernel"], one["case"]], sort_keys=True)

    found = {key(one): one for one in entries}
    for one in more:
        before = found.get(key(one))
        if before is None or before["measured"].startswith("static") or not one["measured"].startswith("static"):
            found[key(one)] = one
    return list(found.values())


def _device(chip: str) -> tuple[Any, bool]:
    """A device of the chip, and whether it is here."""
    import jax

    from pallas_kernels.target import target

    here = jax.devices()[0]
    if here.platform == "tpu" and target(f"tpu {here.device_kind}").chip == chip:
        return here, True
    from jax.experimental import topologies

    described: Any = topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGIES[chip])
    return described.devices[0], False


def _compiled(tuned: Tuned, case: Any, tiles: Any, device: Any) -> Any:
    """The compiled kernel, or why it is dropped."""
    import jax
    from jax.sharding import AxisType, NamedSharding

    mesh = jax.make_mesh((1,), ("x",), axis_types=(AxisType.Auto,), devices=[device])
    place = NamedSharding(mesh, jax.P())
    given = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=place), tuned.shapes(case))
    try:
        with jax.set_mesh(mesh):
            made = jax.jit(tuned.run(case, tiles), donate_argnums=tuned.donated).lower(*given).compile()
    except Exception as error:  # a refusal is an answer
        return f"{type(error).__name__}: {str(error).splitlines()[0][:160]}"
    memory: Any = made.memory_analysis()
    temporary = memory.temp_size_in_bytes
    return f"{temporary} bytes of temporary memory" if temporary else made


def _timed(tuned: Tuned, case: Any, made: Sequence[Any], device: Any) -> list[float]:
    """Median seconds of each compiled kernel, in turns on the same random numbers."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    rng = np.random.default_rng(0)

    def random(a: Any) -> Any:
        low, high = (-1.0, 1.0) if jnp.issubdtype(a.dtype, jnp.floating) else (0, 127)
        return jax.device_put(jnp.asarray(rng.uniform(low, high, a.shape)).astype(a.dtype), device)

    args = list(jax.tree.map(random, tuned.shapes(case)))
    times: list[list[float]] = [[] for _ in made]
    for turn in range(ROUNDS + 1):
        for i, run in enumerate(made):
            start = time.perf_counter()
            out = jax.block_until_ready(run(*args))
            times[i].append(time.perf_counter() - start)
            for position, new in zip(tuned.donated, out, strict=False):
                args[position] = new
        if turn == 0:
            times = [[] for _ in made]
    return [statistics.median(one) for one in times]


def tune(kernel: str, chip: str, command: str) -> list[dict[str, Any]]:
    """Try every tiling of every case, and say what came of it.

    Args:
        kernel: a name of `KERNELS`.
        chip: a TPU's name.
        command: that gave it, for the file.

    Raises:
        ValueError: an unknown kernel or chip.
    """
    if kernel not in KERNELS:
        raise ValueError(f"tune: got kernel {kernel!r}, expected one of {', '.join(KERNELS)}")
    if chip not in TOPOLOGIES:
        raise ValueError(
            f"tune: got chip {chip!r}, expected one of {', '.join(TOPOLOGIES)}; on GPUs the tiles of these kernels are "
            "fixed by registers"
        )
    tuned = KERNELS[kernel]()
    cases = importlib.import_module(f"pallas_kernels.{kernel}.cases").CASES
    module = importlib.import_module(f"pallas_kernels.{kernel}.tpu")
    device, here = _device(chip)
    found = []
    for case in (one for one in cases if {"bench", "aot"} & set(one.tags) and module.supports(None, one) is None):
        every = module.candidates(case)
        made = [_compiled(tuned, case, tiles, device) for tiles in every]
        works = [one for one in made if not isinstance(one, str)]
        seconds = iter(_timed(tuned, case, works, device) if here else [None] * len(works))
        tried = [
            Tried(tiles, one) if isinstance(one, str) else Tried(tiles, seconds=next(seconds))
            for tiles, one in zip(every, made, strict=True)
        ]
        chosen = best(tried)
        for one in tried:
            said = one.refused or ("compiles; not timed" if one.seconds is None else f"{one.seconds * 1e6:.1f} us")
            print(f"{kernel} {case.name} on {chip}: {one.tiles}: {said}{' <-' if one is chosen else ''}", flush=True)
        if chosen is not None:
            found.append(entry(kernel, tuned.facts(case), chosen, len(every), command))
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kernel", help=f"one of {', '.join(KERNELS)}")
    parser.add_argument("--chip", required=True, help=f"one of {', '.join(TOPOLOGIES)}")
    parser.add_argument("--write", action="store_true", help="into tiles/CHIP.json")
    given = parser.parse_args(arguments)
    for name, value in (("TPU_SKIP_MDS_QUERY", "1"), ("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")):
        os.environ.setdefault(name, value)
    command = shlex.join(["python", "-m", "pallas_kernels.tune", *(sys.argv[1:] if arguments is None else arguments)])
    try:
        found = tune(given.kernel, given.chip, command)
    except ValueError as error:
        parser.error(str(error))
    if given.write:
        file = files.FOLDER / f"{given.chip}.json"
        file.parent.mkdir(exist_ok=True)
        file.write_text(json.dumps(written(files.entries(given.chip), found), indent=1) + "\n")
        print(f"wrote {file.name}")


if __name__ == "__main__":
    main()
