"""All kernels on the Hopper GPU of this machine: are they right, and how long do they take against XLA and cuDNN.

    python experiments/benchmarks/kernels_on_device.py [--only norm,adam8] [--part values] [--tiny]

First every case tagged "small" or "bench" is run by our kernel, values and gradients, and compared with the reference
on the same numbers in float32. Then cases tagged "bench" are timed on random data: seconds of the device from JAX's
profiler over 10 warm runs (where the profiler says nothing, the wall clock over 10 runs without a pause, and the table
says so), beside the reference compiled by XLA, `jax.lax.ragged_dot`, or cuDNN. The bars are those of first acceptance.
It needs JAX 0.11 or newer and an H100 or H200; `pip install jax[cuda13]` is enough, cuDNN included. Where there is no
such GPU it says so and runs nothing.

On an H200, JAX 0.11.2, 2026-11-26: values of norms, AdamW, codes and grouped matmul hold (grouped matmul was wrong with
uneven groups before its copies started at multiples of 8 rows). Attention reaches 312 to 561 TFLOP/s forward, 0.84 to
0.88 of cuDNN's speed. Grouped matmul reaches 344 to 642 TFLOP/s, 5.6 to 35 times the speed of `jax.lax.ragged_dot`, but
with 64 groups less than its bar of 400. Norms, codes and AdamW have not been timed.
"""

import argparse
import dataclasses
import functools
import math
import pathlib
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from figures import Figure, show

sys.path.insert(0, str(pathlib.Path(__file__).parents[2]))  # the package need not be installed

from pallas_kernels.target import target

RUNS = 10
TOLERANCE = 5e-3
"""Largest difference as a part of the largest value."""
OTHER_CODES = 1e-3
"""Part of the codes that may differ, where two are as near."""


@dataclasses.dataclass(frozen=True)
class Program:
    """Something to run.

    Args:
        name: in the table.
        make: its arrays, from a key.
        ways: functions of the arrays, by implementation; the first is ours, the last is the definition.
        flop, bytes: of the work; 0 where it is not told.
        timed: whether it is large enough to be timed.
        carry: (arrays, result) to the arrays of the next run, for what runs in place.
        donate: positions of donated arrays.
        faster: implementation to the least factor by which ours is to be faster.
        least: the least part of the copy's bandwidth (with bytes), or FLOP/s (with flop).
        wide: the definition is given the numbers in float32.
    """

    name: str
    make: Callable[[Any], tuple[Any, ...]]
    ways: Mapping[str, Callable[..., Any]]
    flop: float = 0.0
    bytes: float = 0.0
    timed: bool = False
    carry: Callable[[Any, Any], tuple[Any, ...]] = lambda arrays, result: arrays
    donate: tuple[int, ...] = ()
    faster: Mapping[str, float] = dataclasses.field(default_factory=dict)
    least: float = 0.0
    wide: bool = True


def wanted(cases: Any, explain: Any = None) -> list[Any]:
    """Cases that run here: by the kernel for Hopper, where `explain` tells what runs."""
    tagged = [case for case in cases if {"small", "bench"} & set(case.tags)]
    return [case for case in tagged if explain is None or explain(case, "gpu h200").chosen == "gpu"]


def normals(key: Any, *shapes: tuple[int, ...], dtype: str = "float32", scale: float = 1.0) -> list[Any]:
    """Random arrays."""
    keys = jax.random.split(key, len(shapes))
    return [scale * jax.random.normal(one, shape, dtype) for one, shape in zip(keys, shapes, strict=True)]


def size(*arrays: Any) -> float:
    """Bytes of arrays or of their shapes."""
    return float(sum(math.prod(a.shape) * a.dtype.itemsize for a in jax.tree.leaves(arrays)))


def gradients(function: Callable[..., Any], count: int) -> Callable[..., Any]:
    """Gradients by the first `count` arrays; the others come after them, and the result's gradient last."""

    def run(*arrays: Any) -> Any:
        *given, dy = arrays
        return jax.vjp(lambda *chosen: function(*chosen, *given[count:]), *given[:count])[1](dy)

    return run


def norm() -> Iterator[Program]:
    """RMS norm and layer norm."""
    from pallas_kernels.norm.api import explain, layer_norm, rms_norm
    from pallas_kernels.norm.cases import CASES

    def run(case: Any, name: str, x: Any, weight: Any, *rest: Any) -> Any:
        bias = rest[0] if case.bias else None
        residual = rest[-1] if case.residual else None
        if case.center:
            return layer_norm(x, weight, bias, residual, implementation=name)
        return rms_norm(x, weight, residual, implementation=name)

    def make(case: Any, backward: bool, key: Any) -> tuple[Any, ...]:
        x, residual, dy, dh = normals(key, *[(case.rows, case.width)] * 4, dtype=case.dtype)
        weight, bias = 1 + 0.3 * jax.random.normal(key, (2, case.width))
        arrays = [x, weight, *([bias] if case.bias else []), *([residual] if case.residual else [])]
        return (*arrays, (dy, dh) if case.residual else dy) if backward else tuple(arrays)

    for case in wanted(CASES, explain):
        ways = {name: functools.partial(run, case, name) for name in ("gpu", "reference")}
        whole = case.rows * case.width * jnp.dtype(case.dtype).itemsize
        bench = "bench" in case.tags
        moved = whole * (4 if case.residual else 2)
        forward = functools.partial(make, case, False)
        yield Program(f"norm {case.name}", forward, ways, bytes=moved, timed=bench, faster={"reference": 1}, least=0.75)
        back = {name: gradients(way, 2 + case.bias + case.residual) for name, way in ways.items()}
        # with a residual the forward runs too, for the sum
        moved = whole * (7 if case.residual else 3)
        yield Program(f"norm {case.name} backward", functools.partial(make, case, True), back, bytes=moved, timed=bench)


def cross_entropy() -> Iterator[Program]:
    """The loss and both gradients, by chunks."""
    from pallas_kernels.cross_entropy.api import cross_entropy as function
    from pallas_kernels.cross_entropy.cases import CASES

    def run(case: Any, name: str, x: Any, head: Any, labels: Any) -> Any:
        def total(x: Any, head: Any) -> Any:
            options = {"vocab": case.vocab, "soft_cap": case.soft_cap, "z_loss": case.z_loss}
            return function(x, head, labels, implementation=name, **options)[0]

        return jax.value_and_grad(total, (0, 1))(x, head)

    def make(case: Any, key: Any) -> tuple[Any, ...]:
        x, head = normals(key, (case.rows, case.width), (case.head, case.width), dtype=case.dtype)
        labels = jax.random.randint(key, (case.rows,), 0, case.vocab or case.head)
        head = (head / math.sqrt(case.width)).astype(case.dtype)
        return x, head, jnp.where(jnp.arange(case.rows) % 7 == 0, -1, labels) if case.ignored else labels

    for case in wanted(CASES):
        ways = {name: functools.partial(run, case, name) for name in ("chunked", "reference")}
        flop = 6.0 * case.rows * case.width * case.head
        bench = "bench" in case.tags
        made = functools.partial(make, case)
        yield Program(f"cross_entropy {case.name}", made, ways, flop=flop, timed=bench, least=0.7 * 790e12)


def grouped_matmul() -> Iterator[Program]:
    """Rows times their group's matrix, and gradients."""
    from pallas_kernels.grouped_matmul.api import explain
    from pallas_kernels.grouped_matmul.api import grouped_matmul as function
    from pallas_kernels.grouped_matmul.cases import CASES

    def make(case: Any, backward: bool, key: Any) -> tuple[Any, ...]:
        shapes = (case.rows, case.inner), (len(case.sizes), case.inner, case.outer), (case.rows, case.outer)
        x, w, dy = normals(key, *shapes, dtype=case.dtype)
        sizes = jnp.array(case.sizes, jnp.int32)
        return (x, w, sizes, dy) if backward else (x, w, sizes)

    for case in wanted(CASES, explain):
        ways = {
            name: functools.partial(function, implementation=name)
            for name in ("gpu", "ragged", "reference")
            if name != "ragged" or "bench" in case.tags
        }
        flop = 2.0 * sum(case.sizes) * case.inner * case.outer
        options: dict[str, Any] = {"timed": "bench" in case.tags, "faster": {"ragged": 4}, "least": 400e12}
        yield Program(f"grouped_matmul {case.name}", functools.partial(make, case, False), ways, flop=flop, **options)
        back = {name: gradients(way, 2) for name, way in ways.items()}
        made = functools.partial(make, case, True)
        yield Program(f"grouped_matmul {case.name} backward", made, back, flop=2 * flop, **options)


def attention() -> Iterator[Program]:
    """Attention, forward, and forward and backward together."""
    from pallas_kernels.attention.api import attention as function
    from pallas_kernels.attention.cases import CASES

    def make(case: Any, backward: bool, key: Any) -> tuple[Any, ...]:
        keys = (case.B, case.S, case.K, case.H)
        queries = (case.B, case.T, case.N, case.H)
        q, k, v, dy = normals(key, queries, keys, keys, queries, dtype=case.dtype)
        ids = ()
        if case.segments:
            ids = ((jnp.arange(case.T) * case.segments // case.T, jnp.arange(case.S) * case.segments // case.S),)
            ids = (tuple(jnp.tile(one[None], (case.B, 1)) for one in ids[0]),)
        return (q, k, v, *ids, dy) if backward else (q, k, v, *ids)

    def run(case: Any, name: str, q: Any, k: Any, v: Any, ids: Any = None) -> Any:
        return function(q, k, v, segment_ids=ids, implementation=name, **case.options)

    for case in wanted(CASES):
        if case.dtype == "float32":
            continue
        # the definition holds T x S scores, of which large cases have too many
        last = "reference" if case.T * case.S * case.N * case.B <= 2**31 else "chunked"
        plain = not case.segments and case.soft_cap is None
        names = ["gpu", *(["cudnn"] if plain and "bench" in case.tags else []), last]
        ways = {name: functools.partial(run, case, name) for name in names}
        seen = visible(case.T, case.S, case.causal, case.window)
        flop = 4.0 * case.B * case.N * case.H * seen
        bench = "bench" in case.tags
        yield Program(
            f"attention {case.name}",
            functools.partial(make, case, False),
            ways,
            flop=flop,
            timed=bench,
            faster={"cudnn": 0.6},
            least=320e12 if case.causal and case.window is None and case.H == 128 else 0,
        )
        both = {name: gradients(way, 3) for name, way in ways.items()}
        made = functools.partial(make, case, True)
        yield Program(f"attention {case.name} both ways", made, both, flop=3.5 * flop, timed=bench)


def visible(T: int, S: int, causal: bool, window: int | None) -> int:
    """Pairs of a query and a key that it sees.

    Example:
        >>> visible(4, 4, True, None), visible(4, 4, True, 2), visible(4, 4, False, None)
        (10, 7, 16)
    """
    if not causal:
        return T * S
    return sum(min(t + 1, S) - max(0, t + 1 - (window or T)) for t in range(T) if max(0, t + 1 - (window or T)) < S)


def adam8() -> Iterator[Program]:
    """8-bit AdamW in place."""
    from pallas_kernels.adam8.api import Settings, explain, hyper
    from pallas_kernels.adam8.api import adam8 as function
    from pallas_kernels.adam8.cases import CASES
    from pallas_kernels.adam8.maps import MAPS

    def make(case: Any, key: Any) -> tuple[Any, ...]:
        shape, scales = (case.layers, case.rows, case.cols), (case.layers, case.rows // case.block, case.cols)
        p, g = normals(key, shape, shape)
        codes = MAPS[case.map].m_dtype
        low = -127 if codes == jnp.int8 else 0
        m = jax.random.randint(key, shape, low, low + 255).astype(codes), 1e-2 * jax.random.uniform(key, scales)
        v = jax.random.randint(key, shape, 0, 256).astype(jnp.uint8), 1e-4 * jax.random.uniform(key, scales)
        return p, (1e-2 * g).astype(case.gradient), m, v, hyper(1e-3, 3, Settings())

    for case in wanted(CASES, explain):
        settings = Settings(case.block, weight_decay=case.weight_decay, map=case.map)
        ways = {
            name: functools.partial(function, settings=settings, implementation=name) for name in ("gpu", "reference")
        }
        numbers = case.layers * case.rows * case.cols
        yield Program(
            f"adam8 {case.name}",
            functools.partial(make, case),
            ways,
            bytes=numbers * (12 + 16 / case.block + jnp.dtype(case.gradient).itemsize),
            timed="bench" in case.tags,
            carry=lambda arrays, result: (result[0], arrays[1], *result[1:], arrays[4]),
            donate=(0, 2, 3),
            faster={"reference": 1},
            least=0.75,
            wide=False,
        )


def codes() -> Iterator[Program]:
    """Quantization and block top-k."""
    from pallas_kernels.quantize.api import explain as explain_quantize
    from pallas_kernels.quantize.api import quantize
    from pallas_kernels.quantize.cases import CASES as QUANTIZE
    from pallas_kernels.top_k.api import explain as explain_top_k
    from pallas_kernels.top_k.api import top_k
    from pallas_kernels.top_k.cases import CASES as TOP_K

    def make(case: Any, key: Any) -> tuple[Any, ...]:
        return tuple(normals(key, (case.rows, case.cols), dtype=case.dtype))

    quantized, largest = wanted(QUANTIZE, explain_quantize), wanted(TOP_K, explain_top_k)
    for kind, cases in (("quantize", quantized), ("top_k", largest)):
        for case in cases:
            options = {"block": case.block, "axis": case.axis}
            function = (
                functools.partial(quantize, bits=case.bits, **options)
                if kind == "quantize"
                else functools.partial(top_k, k=case.k, **options)
            )
            ways = {name: functools.partial(function, implementation=name) for name in ("gpu", "reference")}
            x = jax.ShapeDtypeStruct((case.rows, case.cols), jnp.dtype(case.dtype))
            yield Program(
                f"{kind} {case.name}",
                functools.partial(make, case),
                ways,
                bytes=size(x, jax.eval_shape(ways["reference"], x)),
                timed="bench" in case.tags,
                faster={"reference": 5 if kind == "top_k" else 1},
                least=0.75 if kind == "quantize" else 1.6 / case.k,  # each of k rounds looks at every number
                wide=False,
            )


KERNELS = {
    "attention": attention,
    "adam8": adam8,
    "codes": codes,
    "grouped_matmul": grouped_matmul,
    "norm": norm,
    "cross_entropy": cross_entropy,
}


def off(got: Any, want: Any) -> float:
    """The largest difference of floats as a part of the largest value; of codes the part that differs, over its bar."""
    worst = 0.0
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        if jnp.issubdtype(a.dtype, jnp.integer):
            worst = max(worst, float(jnp.mean(a != b)) / OTHER_CODES * TOLERANCE)
            continue
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
        difference = float(jnp.max(jnp.abs(a - b)) / jnp.maximum(jnp.max(jnp.abs(b)), 1e-30))
        worst = max(worst, difference if difference == difference else math.inf)
    return worst


def values(program: Program) -> float:
    """How far our result is from the definition's."""
    arrays = program.make(jax.random.key(0))
    ours, *_, definition = program.ways.values()
    got = jax.block_until_ready(jax.jit(ours)(*arrays))
    if program.wide:
        half = (jnp.bfloat16, jnp.float16)
        arrays = jax.tree.map(lambda a: a.astype(jnp.float32) if a.dtype in half else a, arrays)
    with jax.default_matmul_precision("highest"):
        return off(got, jax.jit(definition)(*arrays))


def seconds(program: Program, way: Callable[..., Any]) -> tuple[float, str]:
    """Of one warm run, and by which clock: "device" or "wall"."""
    run = jax.jit(way, donate_argnums=program.donate)
    arrays = program.make(jax.random.key(1))
    for _ in range(3):
        arrays = program.carry(arrays, jax.block_until_ready(run(*arrays)))
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            begin, result = time.perf_counter(), None
            for _ in range(RUNS):
                result = run(*arrays)
                arrays = program.carry(arrays, result)
            jax.block_until_ready(result)
            wall = (time.perf_counter() - begin) / RUNS
        busy = device_seconds(pathlib.Path(folder)) / RUNS
    return (busy, "device") if busy else (wall, "wall")


def device_seconds(folder: pathlib.Path) -> float:
    """Seconds that the first GPU's streams were at work, of a trace; 0 where it tells nothing of them."""
    total = 0.0
    for file in folder.rglob("*.xplane.pb"):
        for plane in jax.profiler.ProfileData.from_file(str(file)).planes:
            if plane.name == "/device:GPU:0":
                streams = [line for line in plane.lines if line.name.startswith("Stream")]
                total += sum(event.duration_ns for line in streams for event in line.events) * 1e-9
    return total


def copy_bandwidth() -> float:
    """Bytes read and written per second by XLA, over 2 GiB: the ceiling of what is memory-bound."""
    x = Program("copy", lambda key: (jnp.ones((2**29,), jnp.float32),), {"xla": lambda x: x + 1})
    return 2 * 2**31 / seconds(x, x.ways["xla"])[0]


def times(program: Program, copy: float) -> Iterator[Figure]:
    """Ours, and every other way but the definition of what it would not fit."""
    taken: dict[str, float] = {}
    for name, way in program.ways.items():
        try:
            taken[name], clock = seconds(program, way)
        except Exception as error:  # one way that cannot run is told, and the others are timed
            print(f"{program.name} by {name}: {type(error).__name__}: {str(error)[:300]}")
            continue
        label = f"{program.name} {name}" + ("" if clock == "device" else " (wall clock)")
        yield Figure(label, taken[name] * 1e3, "ms")
    ours = next(iter(program.ways))
    if ours not in taken:
        return
    least = program.least or None
    if program.flop:
        yield Figure(f"{program.name} FLOP/s", program.flop / taken[ours], "FLOP/s", least, ">=")
    if program.bytes:
        yield Figure(f"{program.name} of copy", program.bytes / taken[ours] / copy, "x", least, ">=")
    for name, factor in program.faster.items():
        if name in taken:
            yield Figure(f"{program.name} against {name}", taken[name] / taken[ours], "x", factor, ">=")


def compile_only(program: Program) -> None:
    """Compile every way of a program, into JAX's compile cache if there is one."""
    for name, way in program.ways.items():
        try:
            shapes = jax.eval_shape(program.make, jax.random.key(1))
            jax.jit(way, donate_argnums=program.donate).lower(*shapes).compile()
        except Exception as error:
            print(f"{program.name} by {name}: {type(error).__name__}: {str(error)[:300]}")


def shown(figure: Figure) -> Figure:
    """Print a figure at once, since the table comes after the last one."""
    print(*figure.columns(), sep="  ", file=sys.stderr, flush=True)
    return figure


def measure(chosen: list[str], part: str, share: str, tiny: bool) -> Iterator[Figure]:
    """Values of every program, then times, or a part of both; if `tiny`, values of small ones alone."""
    index, count = map(int, share.split("/"))
    programs = [program for name in chosen for program in KERNELS[name]() if not (tiny and program.timed)]
    programs = programs[index::count]
    if part == "compile":
        for program in programs:
            if program.timed:
                compile_only(program)
        yield Figure("compiled", sum(program.timed for program in programs), "programs")
        return
    for program in programs if part != "times" else []:
        try:
            found = values(program)
        except Exception as error:  # a kernel that fails is a figure that does not hold; the others are run
            print(f"{program.name}: {type(error).__name__}: {str(error)[:600]}")
            found = math.inf
        yield shown(Figure(f"{program.name} is off by", found, "of max", TOLERANCE))
    if tiny or part == "values":
        return
    copy = copy_bandwidth()
    yield Figure("copy", copy, "bytes/s")
    for program in programs:
        if program.timed:
            yield from map(shown, times(program, copy))


def main() -> int:
    """The command line; 0 where every bar holds, or nothing could be run."""
    parser = argparse.ArgumentParser(description="Kernels on the Hopper GPU of this machine")
    parser.add_argument("--only", default=",".join(KERNELS), help=f"some of {', '.join(KERNELS)}")
    parser.add_argument("--part", choices=("all", "values", "compile", "times"), default="all", help="what to do")
    parser.add_argument("--share", default="0/1", metavar="I/N", help="every N-th program, from the I-th on")
    parser.add_argument("--tiny", action="store_true", help="values of small cases alone, no times")
    asked = parser.parse_args()
    chosen = asked.only.split(",")
    if unknown := set(chosen) - set(KERNELS):
        parser.error(f"--only: got {', '.join(sorted(unknown))}, expected some of {', '.join(KERNELS)}")
    device = jax.devices()[0]
    here = target(f"gpu {device.device_kind}" if device.platform == "gpu" else "cpu")
    if not here.hopper:
        title = f"No H100 or H200 here ({device.device_kind}): nothing was run, and nothing is measured"
        show([Figure("hopper_gpus", 0, "devices")], title)
        return 0
    title = f"Kernels on {device.device_kind}, JAX {jax.__version__}, {time.strftime('%Y-%m-%d')}"
    return 0 if show(measure(chosen, asked.part, asked.share, asked.tiny), title) else 1


if __name__ == "__main__":
    sys.exit(main())
