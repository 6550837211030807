"""Bytes that our memory-bound kernels move, against XLA's program of the same definition, ahead of time.

    python experiments/benchmarks/kernel_bytes.py [--chip v5e] [--only adam8]
    python experiments/benchmarks/kernel_bytes.py --cycles [--chip v5e] [--write]

XLA's of adam8 is the optimizer's own, `quantize_state(optax.adamw)`; of the others the kernel's reference. Both are
compiled for a chip that need not be here (`pip install jaxscale[aot-tpu]`, `[aot-gpu]`), at the shapes tagged
"aot" in each kernel's `cases.py`. A kernel reads each argument once and writes each result once, in place for adam8:
its bytes are those of arguments and results, and the compiler must have added nothing temporary. XLA's are what its
cost analysis of the compiled program says, which it does for TPUs alone; for GPUs only the temporary bytes are told.
Nothing here is a time.

Measured on 22 November 2026 with JAX 0.10.2 and libtpu 0.0.51, for v5e (bytes of adam8 per parameter, else in MB):

    kernel, case                  ours   XLA's    XLA's temporary
    adam8, f32 gradient           16.1   107.7    638 MB
    adam8, bf16 gradient          14.1   102.8    604 MB
    adam8, dynamic map            16.1   104.8    571 MB
    adam8, blocks of 256, 3 x     16.1   55.5     0
    quantize 8, down columns      102    445      0
    quantize 4, down columns      85     696      134 MB
    quantize 8, along rows        168    306      0
    quantize 4, along rows        152    558      134 MB
    top 4 of 128, down columns    73     71,899   269 MB
    top 10 of 1024, along rows    138    19,133   268 MB
    RMS norm                      134    470      0
    RMS norm, residual            268    604      0
    layer norm, residual          268    672      0

For H200, where XLA tells no bytes, ours need nothing temporary and XLA's 5.8 MB (adam8), 239 MB (its dynamic map), 0.5
to 1 MB (quantize), 470 MB (top 4 of 128), 134 MB (top 10 of 1024), 0 (norm).

`--cycles` says whether adam8's arithmetic fits into the time of its bytes on TPUs, by libtpu's schedule: one bundle of
instructions issues in a cycle, so a step of the grid takes its loop's bundles for each block, and those around the loop
once. Waits for DMA are not seen. `--write` keeps the cycles in tests/golden/kernels/adam8, which a slow test compares.
Cycles of a block of 128 x 128 (256 x 256), and the time of its steps as a part of that of its bytes; same versions:

                        v5e           v5p           v6e
    f32 gradient      295  0.62     298  0.93     221  0.82
    bf16 gradient     298  0.72     301  1.07     223  0.94
    blocks of 256    1255  0.68    1228  0.96     838  0.79
    dynamic map       431  0.91     436  1.34     400  1.45

The dynamic map misses the bar of 1.1 on v5p and v6e: it takes 96 and 86 instructions of the vector unit, four of which
issue in a cycle, for each register of numbers, and the bar leaves room for 88 and 75 if none waits. With comparisons
for every decade it took 879, 877 and 773 cycles; with values of all 256 codes along lanes, which the vector unit need
not compute, 548, 561 and 470, as the schedule has it wait for them.
"""

import argparse
import dataclasses
import functools
import importlib.metadata
import json
import pathlib
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

from figures import Figure, show

from jaxscale.compiler.compile import compile_report

PLATFORMS = {"v5e": "tpu v5e:2x2", "v6e": "tpu v6e:2x2", "h200": "gpu h200 x 1"}
BARS = {"adam8": 0.65, "quantize": 0.6, "top_k": 0.01, "norm": 0.5}
"""Our bytes as a part of XLA's."""
CLOCKS = {"v5e": 1.5e9, "v5p": 2 * 1.75e9, "v6e": 1.75e9}
"""Cycles a second of a chip's cores together, so that its matrix units give the FLOP/s that it is sold with."""
TIME = 1.1
"""Adam's time by its schedule as a part of that of its bytes."""
GOLDEN = pathlib.Path(__file__).parents[2] / "tests" / "golden" / "kernels" / "adam8"
POINTERS = 0.001
"""MB: a GPU's compiler counts the pointers of a tuple of results as temporary."""


@dataclasses.dataclass(frozen=True)
class Asked:
    """One program.

    Args:
        kernel: "adam8", "quantize", "top_k", "norm".
        case: its name in `cases.py`.
        reference: XLA's program instead of ours.
    """

    kernel: str
    case: str
    reference: bool = False


def program(devices: Sequence[Any], asked: Asked, file: str) -> Any:
    """The recipe: what a kernel's case compiles to on one device."""
    import jax
    from jax.sharding import AbstractMesh, NamedSharding

    from jaxscale.compiler.described import abstract_device, lower_for

    function, shapes, donated = _made(asked)
    mesh = AbstractMesh((1,), ("x",), abstract_device=abstract_device(devices[0]))
    place = NamedSharding(mesh, jax.P())
    given = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=place), shapes)
    name = devices[0].platform
    run = function
    if not (asked.reference and asked.kernel == "adam8"):
        chosen = "reference" if asked.reference else name
        run = functools.partial(function, implementation=chosen, platform=f"{name} {devices[0].device_kind}")

    def mapped(*args: Any) -> Any:
        return jax.shard_map(run, mesh=mesh, in_specs=jax.P(), out_specs=jax.P(), check_vma=False)(*args)

    return _Told(lower_for(devices[:1], jax.jit(mapped, donate_argnums=donated).trace(*given)), file)


class _Told:
    """A lowered program that leaves what its compiler says of bytes in a file."""

    def __init__(self, lowered: Any, file: str) -> None:
        self.lowered, self.file = lowered, file

    def __getattr__(self, name: str) -> Any:
        return getattr(self.lowered, name)

    def compile(self, *args: Any, **options: Any) -> Any:
        """As `jax.stages.Lowered` has it."""
        compiled = self.lowered.compile(*args, **options)
        memory, cost = compiled.memory_analysis(), compiled.cost_analysis() or {}
        told = {
            "accessed": cost.get("bytes accessed", 0.0),
            "least": memory.argument_size_in_bytes + memory.output_size_in_bytes,
            "temporary": memory.temp_size_in_bytes,
        }
        pathlib.Path(self.file).write_text(json.dumps(told))
        return compiled


def _made(asked: Asked) -> tuple[Callable[..., Any], tuple[Any, ...], tuple[int, ...]]:
    """The kernel's function, the shapes that it takes, and which of them are donated."""
    import jax
    import jax.numpy as jnp

    make, case = jax.ShapeDtypeStruct, cases(asked.kernel)[asked.case]
    if asked.kernel == "norm":
        return _norm(case)
    if asked.kernel == "adam8":
        from pallas_kernels.adam8.api import Settings, adam8
        from pallas_kernels.adam8.maps import MAPS

        shape = (case.layers, case.rows, case.cols)
        scale = make((case.layers, case.rows // case.block, case.cols), jnp.float32)
        moments = [(make(shape, dtype), scale) for dtype in (MAPS[case.map].m_dtype, jnp.uint8)]
        gradient = make(shape, jnp.dtype(case.gradient))
        settings = Settings(case.block, weight_decay=case.weight_decay, map=case.map)
        given = (make(shape, jnp.float32), gradient, *moments, make((5,), jnp.float32))
        run = _optimizer(case) if asked.reference else functools.partial(adam8, settings=settings)
        return run, given, (0, 2, 3)
    x = make((case.rows, case.cols), jnp.dtype(case.dtype))
    if asked.kernel == "quantize":
        from pallas_kernels.quantize.api import quantize

        return functools.partial(quantize, bits=case.bits, block=case.block, axis=case.axis), (x,), ()
    from pallas_kernels.top_k.api import top_k

    return functools.partial(top_k, k=case.k, block=case.block, axis=case.axis), (x,), ()


def _norm(case: Any) -> tuple[Callable[..., Any], tuple[Any, ...], tuple[int, ...]]:
    """The forward pass of a norm: x, a gain, a bias if any, what is added first if anything."""
    import jax
    import jax.numpy as jnp

    from pallas_kernels.norm.api import layer_norm, rms_norm

    rows, gain = jax.ShapeDtypeStruct((case.rows, case.width), jnp.dtype(case.dtype)), (case.width,)
    given = [rows, jax.ShapeDtypeStruct(gain, jnp.float32)]
    given += [jax.ShapeDtypeStruct(gain, jnp.float32)] * case.bias + [rows] * case.residual

    def run(x: Any, weight: Any, *more: Any, **options: Any) -> Any:
        residual = more[-1] if case.residual else None
        if case.center:
            return layer_norm(x, weight, more[0] if case.bias else None, residual, **options)
        return rms_norm(x, weight, residual, **options)

    return run, tuple(given), ()


def _optimizer(case: Any) -> Callable[..., Any]:
    """A step of the optimizer, with the arguments and results of `adam8`."""
    import jax.numpy as jnp
    import optax

    from jaxscale.lowbit.quantize import Quantized
    from jaxscale.lowbit.quantized import quantize_state

    names = {"soft8": ("soft8", "sqrt8"), "dynamic8": ("dynamic8", "dynamic8_unsigned")}[case.map]
    rule = quantize_state(optax.adamw(1e-3, 0.9, 0.999, weight_decay=case.weight_decay), platform="gpu")

    def step(p: Any, g: Any, m: Any, v: Any, hyper: Any) -> Any:
        first, second = (Quantized(one[0], one[1], name, case.block) for one, name in zip((m, v), names, strict=True))
        adam: Any = optax.ScaleByAdamState
        state: Any = (adam(hyper[0].astype(jnp.int32), first, second), optax.EmptyState(), optax.EmptyState())
        found: Any = rule.update(g, state, p)
        updates, (after, *_) = found
        return p + updates, (after.mu.codes, after.mu.scale), (after.nu.codes, after.nu.scale)

    return step


def cases(kernel: str) -> dict[str, Any]:
    """Cases of a kernel that are compiled, by name."""
    import importlib

    found = importlib.import_module(f"pallas_kernels.{kernel}.cases").CASES
    return {case.name: case for case in found if "aot" in case.tags}


def measure(chip: str, asked: Asked) -> dict[str, float] | None:
    """What the compiler says of one program; `None` where no kernel of ours takes the case on this chip."""
    if not asked.reference:
        import importlib

        platform, case = PLATFORMS[chip].split(":")[0].split(" x")[0], cases(asked.kernel)[asked.case]
        chosen = importlib.import_module(f"pallas_kernels.{asked.kernel}.api").explain(case, platform).chosen
        if chosen == "reference":
            return None
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder) / "told"
        report = compile_report(functools.partial(program, asked=asked, file=str(file)), PLATFORMS[chip], cache=False)
        if not file.is_file():
            raise SystemExit(f"{asked} on {chip}: {report}")
        return json.loads(file.read_text())


def cycles(chip: str, case: str) -> dict[str, float]:
    """What libtpu's schedule of adam8 takes.

    Args:
        chip: "v5e", "v5p", "v6e".
        case: its name in `cases.py`.

    Returns:
        `block`: cycles of a block of its tile's columns, `around`: those around the loop over blocks, `time`: of both
        as a part of the time of their bytes.
    """
    from jaxscale.platforms.tpu import TPUS
    from pallas_kernels import ahead
    from pallas_kernels.adam8 import api, tpu
    from pallas_kernels.target import target

    given = cases("adam8")[case]
    with ahead.schedule_folder() as folder:
        recipe = functools.partial(program, asked=Asked("adam8", case), file=str(folder / "told"))
        report = compile_report(recipe, PLATFORMS.get(chip, f"tpu {chip}:2x2x1"), cache=False)
        found = [one for name, one in ahead.take_schedules(folder).items() if name.startswith("adam8")]
    if len(found) != 1:
        raise SystemExit(f"adam8 {case} on {chip}: {len(found)} schedules; {report}")
    block, around = max(found[0].loops, default=0), found[0].step - sum(found[0].loops)
    tiles = api.tiles_for(given, target(f"tpu {chip}"))
    bytes_ = tpu.cost(given).bytes_accessed / (given.layers * given.rows * given.cols) * given.block * tiles.cols
    seconds = (block + around / tiles.blocks) / CLOCKS[chip]
    (bandwidth,) = (one.memory_bandwidth or 0.0 for one in TPUS if one.name == chip)
    return {"block": block, "around": around, "time": seconds * bandwidth / bytes_}


def timed(chips: Sequence[str], write: bool) -> bool:
    """Show cycles of every case of adam8; whether all fit into the time of their bytes."""
    found = {chip: {case: cycles(chip, case) for case in cases("adam8")} for chip in chips}
    for chip, facts in found.items() if write else ():
        GOLDEN.mkdir(parents=True, exist_ok=True)
        versions = {one: importlib.metadata.version(one) for one in ("jax", "libtpu")}
        (GOLDEN / f"{chip}.json").write_text(json.dumps({"versions": versions, "cycles": facts}, indent=1) + "\n")
    told = [
        Figure(f"{chip} {case}: {name}", value, "x" if name == "time" else "cycles", TIME if name == "time" else None)
        for chip, facts in found.items()
        for case, one in facts.items()
        for name, value in one.items()
    ]
    return show(told, "Static cycles of adam8")


def figures(chip: str, kernel: str, case: str) -> list[Figure]:
    """Figures of one case on one chip."""
    ours, theirs = measure(chip, Asked(kernel, case)), measure(chip, Asked(kernel, case, reference=True))
    assert theirs is not None
    if ours is None:
        return []
    name = f"{chip} {kernel} {case}"
    found = [
        Figure(f"{name}: bytes", ours["least"] / 1e6, "MB"),
        Figure(f"{name}: temporary", ours["temporary"] / 1e6, "MB", POINTERS),
        Figure(f"{name}: XLA's temporary", theirs["temporary"] / 1e6, "MB"),
    ]
    if kernel == "adam8":
        given = cases(kernel)[case]
        per = ours["least"] / (given.layers * given.rows * given.cols)
        found.append(Figure(f"{name}: bytes a parameter", per, "bytes/param"))
    if theirs["accessed"]:
        found.append(Figure(f"{name}: XLA's bytes", theirs["accessed"] / 1e6, "MB"))
        found.append(Figure(f"{name}: ours / XLA's", ours["least"] / theirs["accessed"], "x", BARS[kernel]))
    return found


def main() -> None:
    """Print the table; exit with 1 if a bar does not hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="one case on one chip")
    parser.add_argument("--chip", choices=sorted({*PLATFORMS, *CLOCKS}), help="only this one")
    parser.add_argument("--only", choices=sorted(BARS), help="only this kernel")
    parser.add_argument("--cycles", action="store_true", help="of adam8 on TPUs, instead of bytes")
    parser.add_argument("--write", action="store_true", help="with --cycles: keep them in tests/golden/kernels/adam8")
    args = parser.parse_args()
    known = CLOCKS if args.cycles else PLATFORMS
    if args.chip not in (None, *known):
        parser.error(f"argument --chip: got {args.chip}, expected one of {', '.join(known)}")
    if args.write and not args.cycles:
        parser.error("--write keeps cycles: add --cycles, or leave it out")
    if args.cycles and (args.tiny or args.only not in (None, "adam8")):
        parser.error("--cycles is of every case of adam8: leave out --tiny, and --only of other kernels")
    if args.cycles:
        if not timed([chip for chip in CLOCKS if args.chip in (None, chip)], args.write):
            raise SystemExit(1)
        return
    asked = [(kernel, case) for kernel in BARS if args.only in (None, kernel) for case in cases(kernel)]
    chips = [chip for chip in PLATFORMS if args.chip in (None, chip)]
    if args.tiny:
        asked, chips = [("quantize", "columns8_4k")], ["v5e"]
    if not show([f for chip in chips for one in asked for f in figures(chip, *one)], "Bytes of kernels"):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
