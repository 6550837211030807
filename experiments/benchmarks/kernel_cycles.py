"""Cycles of our attention kernels on TPU against JAX's splash attention, with no TPU: libtpu's own schedule.

    python experiments/benchmarks/kernel_cycles.py --chip v5e --chip v6e            # the table
    python experiments/benchmarks/kernel_cycles.py --chip v5e --write               # and tests/golden/kernels/v5e.json
    python experiments/benchmarks/kernel_cycles.py --compile --chip v5e             # seconds that compilers take

libtpu compiles for chips that are not here and dumps its final schedule. One VLIW bundle issues in a cycle, so a kernel
whose vector code is unrolled (all of these) takes about its bundles per step of the grid; each unit's demand over what
it could take says what bounds it. It does not see waits for DMA, and counts the code that starts and ends a row of
tiles as if every step ran it. All pairs are visible, so that a kernel has one copy of its loop body.

Every pass is compiled with tiles of 512 x 512, of 1024 x 1024, and of 1024 queries x 2048 keys (the backward: 512 x
2048); splash takes 2048 keys in two parts where it can. What counts is the tile with the fewest cycles.

JAX 0.10.2, libtpu 0.0.51 (2026-11-22), by the first command; cycles per 512 x 512 pairs, heads of 128:

                                v5e                                          v6e
                512         1024         2048         512         1024         2048     ours / splash at the best tile
             ours splash  ours splash  ours splash  ours splash  ours splash  ours splash      v5e      v6e
    forward  1548  1990   1336  1471   1226  1240   1154  1321    906   942    737   776      0.989    0.949
    dq       1726  1722   1506  1492   1464  1442   1140  1185    776   908    744   883      1.015    0.843
    dk, dv   2135  2360   1971  2054   2078  2188   1341  1476   1134  1173   1192  1257      0.960    0.967

Forward and backward together are at 0.984 of splash on v5e, at 0.923 on v6e.

`--compile` tells how long each kernel's program takes to compile at the tiles that it chooses: a gradient's has the
forward in it.

On two cores, nothing else of ours running; same versions, v5e:

    attention causal_4k      2.8 s, gradient 4.1     adam8 soft_4k, dynamic_4k       0.5, 0.4
    attention full_4k        1.8    gradient 4.0     quantize columns8_4k, rows4_32m 0.4, 0.4
    attention window_4k      0.9    gradient 4.4     top_k columns_4k, rows_32m      0.4, 0.5
    attention narrow_4k      1.9    gradient 5.0     norm rms_residual_4k            0.6
    attention wide_4k        1.0    gradient 3.3     cross_entropy llama3            1.8, gradient 6.7

On a noisier day the causal case took 3.6 and 14.2 s, and 6.1 and 17.4, beyond the bars, with tests beside it.

For H200, JAX 0.12.0.1: attention 1.3 s at most, gradients 2.7, adam8 0.7 and 1.1, all others 0.5 at most.

With its rounds and blocks unrolled top_k took 1.1 s of columns_4k (k of 4), 4.6 with a k of 16, 20.3 with 64, 53.0 with
128; as loops 0.7, 0.5, 0.1 and 0.2, one after another in a process (`pallas_kernels.ahead.compile_for`). By libtpu's
schedule of v5e a round takes at most 137 bundles, unrolled 119. Whether XLA's sort is as fast for many rounds was not
measured.

Before it went through its tiles in parts the TPU kernel of cross-entropy took 6.5 and 37.9 s, and by libtpu's schedule
28,136, 56,698 and 59,066 cycles a tile (forward, dx, the head's gradient; v5e), now 28,290, 55,428 and 56,540; on v6e
9,439, 18,184 and 19,023, now 9,630, 17,542 and 18,164. (Since then tiles with ignored labels clear their rows, in a
copy of the head gradient's code.)
"""

import argparse
import functools
import importlib.metadata
import json
import math
import re
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from figures import Figure, show

from pallas_kernels import ahead

GOLDEN = Path(__file__).parents[2] / "tests" / "golden" / "kernels"
TPUS = {"v5e": "tpu v5e:2x2", "v5p": "tpu v5p:2x2x1", "v6e": "tpu v6e:2x2"}
SHOWN = ("MATMUL", "VALU", "EUP", "VSTORE:SPILL")
"""Units whose busy shares are told."""
TILES = {
    "512": ((512, 512), (512, 512)),
    "1024": ((1024, 1024), (1024, 1024)),
    "2048": ((1024, 2048), (512, 2048)),
}
"""Queries and keys of a tile in the forward and in the backward."""
B, T, N, K, H = 1, 4096, 8, 8, 128
PASSES = {
    "forward": (r"attention_forward", r"splash.*fwd"),
    "dq": (r"attention_dq", r"splash.*dq"),
    "dkv": (r"attention_dkv", r"splash.*dkv"),
}
"""Names of the kernels of each pass: ours, and splash's."""


def ours(devices: Sequence[Any], tile: str) -> Any:
    """The gradient of our attention, lowered."""
    from pallas_kernels.attention import tpu
    from pallas_kernels.attention.api import attention

    forward, backward = TILES[tile]
    tiles = tpu.Tiles(*forward, *backward, *backward)
    return _lowered(devices, functools.partial(attention, causal=False, implementation="tpu", tiles=tiles))


def splash(devices: Sequence[Any], tile: str) -> Any:
    """The gradient of JAX's splash attention, lowered."""
    import jax
    import jax.numpy as jnp
    from jax.experimental.pallas.ops.tpu import splash_attention

    (q, kv), (back_q, back_kv) = TILES[tile]
    part, back_part = min(kv, 1024), min(back_kv, 1024)
    forward: dict[str, Any] = {"block_q": q, "block_kv": kv, "block_kv_compute": part}
    dkv: dict[str, Any] = {"block_q_dkv": back_q, "block_kv_dkv": back_kv, "block_kv_dkv_compute": back_part}
    sizes = splash_attention.BlockSizes(**forward, **dkv, block_q_dq=back_q, block_kv_dq=back_kv)
    mask = splash_attention.MultiHeadMask([splash_attention.FullMask((T, T))] * N)
    kernel = splash_attention.make_splash_mha_single_device(mask, block_sizes=sizes)

    def run(q: Any, k: Any, v: Any) -> Any:
        swapped = [jnp.swapaxes(x, 1, 2) for x in (q * H**-0.5, k, v)]
        out: Any = jax.vmap(kernel)(*swapped)
        return jnp.swapaxes(out, 1, 2)

    return _lowered(devices, run)


def _lowered(devices: Sequence[Any], run: Any) -> Any:
    import jax
    import jax.numpy as jnp
    from jax.sharding import AxisType, NamedSharding

    mesh = jax.make_mesh((1,), ("x",), axis_types=(AxisType.Auto,), devices=devices[:1])
    place = NamedSharding(mesh, jax.P())
    q, k = (jax.ShapeDtypeStruct((B, T, heads, H), jnp.bfloat16, sharding=place) for heads in (N, K))
    with jax.set_mesh(mesh):
        return jax.jit(jax.grad(lambda *x: run(*x).astype(jnp.float32).sum(), (0, 1, 2))).lower(q, k, k)


def schedules(recipe: Any, chip: str) -> Mapping[str, ahead.Schedule]:
    """Schedules of a program's kernels, by their names.

    Args:
        recipe: a function of devices that pickles and returns a lowered program.
        chip: "v5e", "v5p", "v6e".

    Raises:
        RuntimeError: the compiler refused the program.
    """
    from jaxscale.compiler.compile import compile_report

    with ahead.schedule_folder() as folder:
        report = compile_report(recipe, TPUS[chip], cache=False)
        if report.crashed or report.oom:
            raise RuntimeError(f"{recipe} for {chip}: {report.crashed or report.oom}")
        return ahead.take_schedules(folder)


def cycles(who: str, chip: str, tile: str) -> dict[str, dict[str, Any]]:
    """By pass: cycles per 512 x 512 pairs, and the units' busy shares.

    Args:
        who: "ours" or "splash".
        chip: "v5e", "v5p", "v6e".
        tile: a name of `TILES`.

    Raises:
        RuntimeError: the compiler refused the program.
    """
    recipe = {"ours": ours, "splash": splash}[who]
    found = schedules(functools.partial(recipe, tile=tile), chip)
    passes = {}
    for one, patterns in PASSES.items():
        kernels = [one for name, one in found.items() if re.search(patterns[who == "splash"], name)]
        if not kernels:
            raise RuntimeError(f"no kernel of {who} for {one} among {sorted(found)}")
        kernel = max(kernels, key=lambda kernel: kernel.total)
        shares = {unit: round(kernel.load_by_unit.get(unit, 0), 3) for unit in SHOWN}
        pairs = math.prod(TILES[tile][one != "forward"])
        passes[one] = {"cycles": kernel.total * 512**2 / pairs, "tile": tile, **shares}
    return passes


def measure(chip: str, tiles: Sequence[str] = tuple(TILES)) -> dict[str, dict[str, Any]]:
    """By pass, ours and splash's: `cycles` at the best tile.

    Args:
        chip: "v5e", "v5p", "v6e".
        tiles: names of `TILES`, to choose from.
    """
    best: dict[str, dict[str, Any]] = {one: {} for one in PASSES}
    for who in ("ours", "splash"):
        for tile in tiles:
            try:
                found = cycles(who, chip, tile)
            except RuntimeError as error:  # a tile too large for the chip
                print(f"{chip} {who} {tile}: {str(error)[:100]}")
                continue
            for one, facts in found.items():
                print(f"{chip} {who:6} {one:7} tile {tile:4}: {facts['cycles']:.0f}", flush=True)
                if facts["cycles"] < best[one].get(who, {"cycles": math.inf})["cycles"]:
                    best[one][who] = facts
    return best


PROGRAMS = {
    "attention": ("causal_4k", "full_4k", "window_4k", "narrow_4k", "wide_4k"),
    "cross_entropy": ("llama3",),
    "adam8": ("soft_4k", "dynamic_4k"),
    "quantize": ("columns8_4k", "rows4_32m"),
    "top_k": ("columns_4k", "rows_32m"),
    "norm": ("rms_residual_4k",),
}
"""Cases that are compiled for their seconds, by kernel."""


def program(devices: Sequence[Any], kernel: str, case: str, gradient: bool) -> Any:
    """A kernel's case at the tiles that it chooses, lowered."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import AxisType, NamedSharding

    from pallas_kernels.attention.api import attention
    from pallas_kernels.cross_entropy.api import cross_entropy

    found = next(one for one in importlib.import_module(f"pallas_kernels.{kernel}.cases").CASES if one.name == case)
    make, dtype = jax.ShapeDtypeStruct, jnp.dtype(found.dtype)
    if kernel == "attention":
        rows = [
            (found.B, length, n, found.H) for length, n in ((found.T, found.N), (found.S, found.K), (found.S, found.K))
        ]
        more = [make((found.B, length), jnp.int32) for length in (found.T, found.S)] if found.segments else []
        args = (*(make(shape, dtype) for shape in rows), *more)

        def run(q: Any, k: Any, v: Any, *ids: Any) -> Any:
            return attention(q, k, v, segment_ids=ids or None, **found.options).astype(jnp.float32).sum()
    else:
        sizes = (found.rows, found.width), (found.head, found.width)
        args = (*(make(shape, dtype) for shape in sizes), make((found.rows,), jnp.int32))

        def run(q: Any, k: Any, v: Any, *ids: Any) -> Any:
            return cross_entropy(q, k, v, implementation="tpu")[0]

    mesh = jax.make_mesh((1,), ("x",), axis_types=(AxisType.Auto,), devices=devices[:1])
    place = NamedSharding(mesh, jax.P())
    given = [make(one.shape, one.dtype, sharding=place) for one in args]
    with jax.set_mesh(mesh):
        return jax.jit(jax.grad(run, (0, 1)) if gradient else run).lower(*given)


def compile_times(chip: str, kernels: Sequence[str]) -> list[Figure]:
    """Seconds in which a chip's compiler makes each kernel's programs.

    Args:
        chip: "v5e", "v5p", "v6e", "h200".
        kernels: names of `PROGRAMS`.
    """
    import kernel_bytes

    from jaxscale.compiler.compile import compile_report

    figures = []
    for kernel, case in [(one, case) for one in kernels for case in PROGRAMS[one]]:
        if chip == "h200" and kernel == "cross_entropy":  # it has no kernel there
            continue
        for gradient in (False, True) if kernel in ("attention", "cross_entropy") else (False,):
            with tempfile.TemporaryDirectory() as folder:
                asked = kernel_bytes.Asked(kernel, case), f"{folder}/told"
                recipe = (
                    functools.partial(program, kernel=kernel, case=case, gradient=gradient)
                    if kernel in ("attention", "cross_entropy")
                    else functools.partial(kernel_bytes.program, asked=asked[0], file=asked[1])
                )
                report = compile_report(recipe, TPUS.get(chip, "gpu h200 x 1"), cache=False)
            which = " gradient" if gradient else ""
            if report.crashed or report.oom:
                print(f"{chip} {kernel} {case}{which}: {report.crashed or report.oom}", flush=True)
                continue
            print(f"{chip} {kernel} {case}{which}: {report.seconds:.1f} s", flush=True)
            name = f"{chip}_{kernel}_{case}{'_gradient' * gradient}"
            figures.append(Figure(name, report.seconds, "s", 15 if gradient else 5))
    return figures


def versions() -> dict[str, str]:
    """Of what decides a schedule."""
    return {package: importlib.metadata.version(package) for package in ("jax", "libtpu")}


def main() -> None:
    """Measure, print, and write what tests hold kernels to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chip", action="append", choices=(*TPUS, "h200"), help="may be repeated; v5e and v6e")
    parser.add_argument("--tile", action="append", choices=tuple(TILES), help="may be repeated; all")
    parser.add_argument("--write", action="store_true", help="write tests/golden/kernels/CHIP.json")
    parser.add_argument("--compile", action="store_true", help="tell the seconds that compilers take")
    parser.add_argument("--only", action="append", choices=tuple(PROGRAMS), help="kernels to compile; all")
    parser.add_argument("--tiny", action="store_true", help="show what tests/golden keeps: no compiler needed")
    asked = parser.parse_args()
    if asked.compile and (asked.write or asked.tile):
        parser.error("--compile takes the tiles that kernels choose and keeps nothing: leave out --write and --tile")
    if not asked.compile and "h200" in (asked.chip or ()):
        parser.error("--chip h200: cycles are told of TPUs alone; add --compile for seconds, or name v5e, v5p or v6e")
    if not asked.compile and asked.only:
        parser.error("--only names kernels to compile: add --compile, or leave it out")
    figures = []
    if asked.tiny:
        for file in sorted(GOLDEN.glob("*.json")):
            kept = json.loads(file.read_text())["attention"]
            figures += [Figure(f"{file.stem}_{one}_ours", facts["cycles"], "cycles") for one, facts in kept.items()]
        show(figures, "static cycles of attention, as kept")
        return
    if asked.compile:
        for chip in asked.chip or ("v5e",):
            figures += compile_times(chip, asked.only or tuple(PROGRAMS))
        show(figures, f"seconds of compilers, {versions()}")
        return
    for chip in asked.chip or ("v5e", "v6e"):
        found = measure(chip, asked.tile or tuple(TILES))
        print(f"{chip}: cycles per 512 x 512 pairs, at the best tile")
        for one, rows in found.items():
            for who, facts in rows.items():
                shares = " ".join(f"{unit} {facts[unit]:4.0%}" for unit in SHOWN)
                print(f"  {one:8} {who:7} {facts['cycles']:7.0f}  tile {facts['tile']:5}  {shares}")
                figures.append(Figure(f"{chip}_{one}_{who}", facts["cycles"], "cycles"))
            ratio = rows["ours"]["cycles"] / rows["splash"]["cycles"]
            figures.append(Figure(f"{chip}_{one}_ours_over_splash", ratio, "x", 1.05))
        if asked.write:
            GOLDEN.mkdir(exist_ok=True)
            kept = {one: {key: rows["ours"][key] for key in ("cycles", "tile")} for one, rows in found.items()}
            text = json.dumps({"versions": versions(), "attention": kept}, indent=1)
            (GOLDEN / f"{chip}.json").write_text(text + "\n")
    show(figures, f"static cycles of attention, {versions()}")


if __name__ == "__main__":
    main()
