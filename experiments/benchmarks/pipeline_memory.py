"""Memory of a pipelined step as microbatches grow, read off programs compiled for TPU v5e and H100.

    python experiments/benchmarks/pipeline_memory.py [--tiny]

Stages of two residual MLP layers (d 2048, ff 8192, bfloat16, 2048 tokens a microbatch) on p=4 devices; temporary bytes
of one device, which leave out weights, batch and the returned float32 gradients. Beside our schedules stands what is
usual in JAX, `jax.grad` over a scan of `vmap` over stages and a roll, which keeps every microbatch's activations.

Compiled for v5e on 2026-11-22 (JAX 0.12.0.1, libtpu 0.0.51), MiB: 1F1B that keeps a stage's input 209 at m = 4, 8, 16
and 32, one that keeps residuals 785 at m = 4, 8 and 32; lock-step 226 and 225; GPipe 209 and 433 (input), 777 and
5,257 (residuals) at m = 4 and 32, 0.01 and 0.4 % off slots x bytes. The usual way: 2,161 and 6,289 at m = 8 and 32,
1,529 with remat: 1F1B takes 0.36, 0.125 and 0.14 of it. No pool is copied in device memory; a lock-step program without
branches carries its pool of 3 messages in fast memory, and moves it out and in again around its work.

For H100, likewise: 1F1B 296 and 816 at every m, lock-step 376 and 392, GPipe 296 and 520 (input) and 808 and 5,288
(residuals), both growing by slots x bytes to 0.01 %. The usual way 2,044, 6,348 and 1,532: 0.40, 0.13 and 0.19 of it.
No pool is copied. The CUDA compiler of JAX 0.10.2 copies, in each branch of 1F1B that keeps residuals, their seven
pools; with the option that `build` sets for pipelined steps, 7 of these 28 copies remain (2026-11-30). Zeros written
into the slot that was read, and a barrier between the reading and the pool that is handed on, change nothing.
"""

import argparse
import dataclasses
import functools
import pathlib
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from figures import Figure, show
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxscale.compiler.compile import compile_report
from jaxscale.compiler.hlo_program import ARRAY, HloProgram
from jaxscale.pipeline.run.execute import At, StageFunction, execute
from jaxscale.pipeline.run.held import held_shapes
from jaxscale.pipeline.run.lifetimes import Stash
from jaxscale.pipeline.run.tables import tabulate
from jaxscale.pipeline.schedules import METHODS
from jaxscale.platforms.compiler_options import IN_PLACE_BRANCHES
from jaxscale.platforms.platform import Platform
from jaxscale.trees import tree_bytes

RANKS = 4
PLATFORMS = ("tpu v5e:2x2", "gpu h100 x 4")
MIB = 2**20
STASHES: tuple[Stash, ...] = ("input", "residuals")
UPDATES = frozenset(
    {"parameter", "tuple", "get-tuple-element", "bitcast", "while", "conditional", "call", "opt-barrier", "fusion"}
    | {"dynamic-update-slice"}
)
"""Instructions that hand a pool on, or put something into it in place."""
FAST = "S(1)"
"""How a TPU's compiler marks what lies in VMEM."""


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Of a stage, and of a microbatch."""

    width: int = 2048
    hidden: int = 8192
    tokens: int = 2048
    layers: int = 2

    @property
    def message_bytes(self) -> int:
        """Bytes of an activation between stages."""
        return 2 * self.tokens * self.width


def layers(weights: Any, x: Any, sizes: Sizes) -> Any:
    """The layers of a stage."""
    for number in range(sizes.layers):
        x = x + jnp.maximum(x @ weights["up"][number], 0) @ weights["down"][number]
    return x


def distance(y: Any, target: Any) -> Any:
    """The loss."""
    return jnp.square((y - target).astype(jnp.float32)).mean()


def stage(sizes: Sizes) -> StageFunction:
    """One stage of the pipeline."""

    def run(weights: Any, shared: Any, x: Any, microbatch: Any, at: At, key: Any) -> Any:
        del shared, key
        y = layers(weights, jnp.where(at.stage == 0, microbatch["inputs"], x), sizes)
        loss = jnp.where(at.stage == RANKS - 1, distance(y, microbatch["targets"]), 0.0)
        return y, loss, {"loss": loss}

    return run


def message(sizes: Sizes) -> jax.ShapeDtypeStruct:
    """What goes from stage to stage."""
    return jax.ShapeDtypeStruct((sizes.tokens, sizes.width), jnp.bfloat16)


def pools(name: str, microbatches: int, stash: Stash, sizes: Sizes) -> list[jax.ShapeDtypeStruct]:
    """The slot pools of a schedule, as a device holds them."""
    tables = tabulate(METHODS[name].schedule(RANKS, microbatches), stash)
    mesh = jax.sharding.AbstractMesh((RANKS,), ("pipe",), axis_types=(AxisType.Auto,))
    weights, batch = shapes(mesh, sizes, microbatches, 1)
    plain = functools.partial(jax.tree.map, lambda leaf: jax.ShapeDtypeStruct(leaf.shape[leaf.ndim > 3 :], leaf.dtype))
    found = held_shapes(tables, stage(sizes), plain(weights), {}, plain(batch), None, message(sizes))
    return jax.tree.leaves((found.messages, found.stashes))


def shapes(mesh: Any, sizes: Sizes, microbatches: int, chunks: int) -> tuple[Any, Any]:
    """Weights (p, v, layers, ...) over the pipe axis, and a batch (m, ...) on every device."""
    up = (RANKS, chunks, sizes.layers, sizes.width, sizes.hidden)
    down = (*up[:3], up[4], up[3])
    spread = NamedSharding(mesh, P("pipe"))
    struct = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
    weights = {name: struct(shape, sharding=spread) for name, shape in (("up", up), ("down", down))}
    tokens = (microbatches, sizes.tokens, sizes.width)
    whole = struct(tokens, sharding=NamedSharding(mesh, P()))
    return weights, {"inputs": whole, "targets": whole}


def ours(name: str, microbatches: int, stash: Stash, lowering: Any, sizes: Sizes, devices: Sequence[Any]) -> Any:
    """The gradients of a schedule, for these devices."""
    mesh = Mesh(np.array(devices)[:RANKS], ("pipe",), axis_types=(AxisType.Auto,))
    schedule = METHODS[name].schedule(RANKS, microbatches)
    tables = tabulate(schedule, stash)

    def body(weights: Any, batch: Any) -> Any:
        own = jax.tree.map(lambda leaf: leaf[0], weights)
        found = execute(tables, stage(sizes), own, {}, batch, None, message(sizes), lowering=lowering)
        return found.sums["loss"][None], jax.tree.map(lambda leaf: leaf[None], found.weight_gradients)

    mapped = jax.shard_map(body, mesh=mesh, in_specs=(P("pipe"), P()), out_specs=P("pipe"), axis_names={"pipe"})
    return jax.jit(mapped).lower(*shapes(mesh, sizes, microbatches, schedule.chunks))


def usual(microbatches: int, remat: bool, sizes: Sizes, devices: Sequence[Any]) -> Any:
    """`jax.grad` over a scan of `vmap` over stages and a roll."""
    mesh = Mesh(np.array(devices)[:RANKS], ("pipe",), axis_types=(AxisType.Auto,))
    spread = NamedSharding(mesh, P("pipe"))
    one = functools.partial(layers, sizes=sizes)
    stages = jax.vmap(jax.checkpoint(one) if remat else one)

    def objective(weights: Any, batch: Any) -> Any:
        def tick(shift: Any, over: Any) -> Any:
            number, x, target = over
            first = (lax.broadcasted_iota(jnp.int32, (RANKS,), 0) == 0)[:, None, None]
            out = stages(weights, lax.with_sharding_constraint(jnp.where(first, x[None], shift), spread))
            out = lax.with_sharding_constraint(out, spread)
            loss = jnp.where(number >= RANKS - 1, distance(out[-1], target), 0.0)
            return lax.with_sharding_constraint(jnp.roll(out, 1, 0), spread), loss

        wait = [(0, RANKS - 1), (0, 0), (0, 0)]
        inputs, targets = jnp.pad(batch["inputs"], wait), jnp.pad(batch["targets"], [wait[0][::-1], *wait[1:]])
        start = lax.with_sharding_constraint(jnp.zeros((RANKS, sizes.tokens, sizes.width), jnp.bfloat16), spread)
        return lax.scan(tick, start, (jnp.arange(microbatches + RANKS - 1), inputs, targets))[1].sum()

    def step(weights: Any, batch: Any) -> Any:
        loss, gradients = jax.value_and_grad(objective)(jax.tree.map(lambda leaf: leaf[:, 0], weights), batch)
        return loss, jax.tree.map(lambda leaf: leaf.astype(jnp.float32), gradients)

    return jax.jit(step, out_shardings=(NamedSharding(mesh, P()), spread)).lower(*shapes(mesh, sizes, microbatches, 1))


def in_place_options(platform: str) -> dict[str, bool]:
    """Return the option of XLA that `build` sets for pipelined steps on a platform."""
    option = IN_PLACE_BRANCHES.get(Platform.parse(platform).chip.kind)
    return {} if option is None else {option: True}


def full_copies(text: str, shapes: frozenset[str]) -> tuple[int, int]:
    """Instructions inside loops, and in what they call, that make something of a pool's shape without updating it.

    Args:
        text: a compiled program.
        shapes: of the pools, as XLA prints them: "4,2048,8192".

    Returns:
        How many copy within device memory, and how many move a pool into a TPU's fast memory, or out of it.
    """
    program, copied, staged = HloProgram(text), 0, 0
    for computation in program.computations.values():
        if not program.executions(computation.name)[1]:
            continue
        for op in computation.instructions.values():
            if op.opcode not in UPDATES and any(dims in shapes for _, dims in ARRAY.findall(op.type)):
                # the second half of a move names one side alone
                start = computation.instructions.get(op.operands[0], op) if op.operands else op
                fast = FAST in op.type or FAST in start.type
                copied, staged = copied + (not fast), staged + fast
    return copied, staged


def copies(platform: str, name: str, stash: Stash, lowering: str, sizes: Sizes) -> tuple[int, int]:
    """Pools copied in the loop of a schedule, and moved."""
    # a pool of flags has the shape of much else, and no bytes
    shapes = frozenset(",".join(map(str, leaf.shape)) for leaf in pools(name, 8, stash, sizes) if leaf.ndim > 1)
    with tempfile.TemporaryDirectory() as folder:
        options = in_place_options(platform) | {"xla_dump_to": folder, "xla_dump_hlo_as_text": True}
        report = compile_report(
            functools.partial(ours, name, 8, stash, lowering, sizes), platform, options=options, cache=False
        )
        assert report.temp_bytes is not None, report
        texts = [file.read_text() for file in pathlib.Path(folder).glob("*after_optimizations.txt")]
    return full_copies(max(texts, key=len), shapes)


def chip(platform: str) -> str:
    """A short name: "v5e"."""
    return platform.split()[0] if platform.startswith("cpu") else platform.split()[1].split(":")[0]


def count_copies(platform: str, sizes: Sizes) -> list[Figure]:
    """Pools copied by a program with branches, and by one without."""
    found = []
    for name, lowering in (("1f1b", "switch"), ("lockstep", "phased")):
        for stash in STASHES:
            copied, staged = copies(platform, name, stash, lowering, sizes)
            label = f"{chip(platform)}: {name} {stash}: pools"
            found.append(Figure(f"{label} copied in the loop", copied, "copies", 0))
            found.append(Figure(f"{label} in and out of fast memory", staged, "instructions"))
            print(*found[-2:], file=sys.stderr)
    return found


def measure(platform: str, sizes: Sizes) -> list[Figure]:
    """Bytes as microbatches grow."""
    known: dict[Any, int] = {}
    told: list[Figure] = []
    barred: list[Figure] = []
    few, many = 4, 32

    def ask(program: Any, label: str) -> int:
        if label not in known:
            report = compile_report(program, platform, options=in_place_options(platform))
            assert report.temp_bytes is not None, report
            known[label] = report.temp_bytes
            told.append(Figure(f"{chip(platform)}: {label}", report.temp_bytes / MIB, "MiB"))
            print(told[-1], file=sys.stderr)
        return known[label]

    def one(name: str, microbatches: int, stash: Stash, lowering: str = "switch") -> int:
        label = f"{name} {stash} m={microbatches}"
        return ask(functools.partial(ours, name, microbatches, stash, lowering, sizes), label)

    def roll(microbatches: int, remat: bool) -> int:
        label = f"vmap and roll{', remat' if remat else ''} m={microbatches}"
        return ask(functools.partial(usual, microbatches, remat, sizes), label)

    def bar(label: str, value: float, limit: float, unit: str = "x") -> None:
        barred.append(Figure(f"{chip(platform)}: {label}", value, unit, limit))

    flat = [one("1f1b", m, "input") for m in (few, 8, 16, many)]
    bar("1f1b input, most / least", max(flat) / min(flat), 1.01)
    flat = [one("1f1b", m, "residuals") for m in (few, 8, many)]
    bar("1f1b residuals, most / least", max(flat) / min(flat), 1.01)
    locked = [one("lockstep", m, "input", "phased") for m in (few, many)]
    bar("lockstep input, most / least", max(locked) / min(locked), 1.10)
    for stash in STASHES:
        grown = one("gpipe", many, stash) - one("gpipe", few, stash)
        slots = tree_bytes(pools("gpipe", many, stash, sizes)) - tree_bytes(pools("gpipe", few, stash, sizes))
        bar(f"gpipe {stash}, growth / slots x bytes, off 1 by", abs(grown / slots - 1), 0.05)
    for m, limit in ((8, 0.45), (many, 1 / 6)):
        bar(f"1f1b residuals / vmap and roll, m={m}", one("1f1b", m, "residuals") / roll(m, False), limit)
    bar(f"1f1b input / vmap and roll, remat, m={many}", one("1f1b", many, "input") / roll(many, True), 1 / 5)
    return [*told, *barred]


PARTS = {"bytes": measure, "copies": count_copies}


def main() -> None:
    """Print the table; exit with 1 if a bar does not hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="small stages, on virtual CPU devices: does it run?")
    parser.add_argument("--platform", action="append", help="only these (v5e:2x2 and h100 x 4 by default)")
    parser.add_argument("--only", choices=PARTS)
    options = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    sizes = Sizes(width=64, hidden=128, tokens=32) if options.tiny else Sizes()
    platforms = options.platform or (["cpu x 4"] if options.tiny else PLATFORMS)
    parts = [part for name, part in PARTS.items() if options.only in (None, name)]
    figures = [figure for platform in platforms for part in parts for figure in part(platform, sizes)]
    held_all = show(figures, f"Temporary memory of a pipelined step, p={RANKS}")
    if not options.tiny and not held_all:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
