"""Bytes that each codec sends over the slow axis, counted in train steps compiled for two TPU slices and two GPU nodes.

    python experiments/benchmarks/wire_bytes.py [--tiny] [--platform tpu] [--codec gradzip:4]

Two residual MLP layers (d 2048, ff 8192: four matrices, 67 M numbers), ZeRO 2 in bfloat16 over fsdp inside a slice or a
node, a codec over n of them; every program is a whole train step with AdamW. Bytes are those that one device sends over
the replica axis, by the rings' formulas, of what the compiler's own text lists. Beside them: float32's, by the same
stage with a codec that sends the mean as it is; how far the count is off what the codec says, single numbers aside
(losses, norms, agreements: on a TPU each takes 512 bytes, or fills a tile of 4096 behind codes); and by how many bytes
what stays within a replica differs from that of the float32 stage, kind by kind. Top-k and DGC are compiled without
their warm-up, whose program holds a message for each of its fractions.

Compiled for two and eight slices of v5e 4x4 on 2026-11-22 (JAX 0.12.0.1, libtpu 0.0.51):

| codec | n | bytes | times fewer than float32 | bar | off what it says |
|---|---|---|---|---|---|
| float32 | 2 | 16,778,752 | | | |
| int8 | 2 | 4,261,376 | 3.94 | 3.9 | 0.0 % |
| int4 | 2 | 2,164,224 | 7.76 | 7.7 | 0.0 % |
| onebit | 2 | 525,856 | 32.0 | 31 | 0.0 % |
| powersgd:4 | 2 | 165,888 | 102 | 47 | 0.0 % |
| topk:0.01 | 2 | 247,296 | 68.3 | 68 | 0.0 % |
| topk:0.01 | 8 | 1,723,008 | 17.1 | 17 | 0.0 % |
| int8 | 8 | 7,457,408 | 3.94 | 3.9 | 0.0 % |
| qsgd:4bit | 2 | 2,163,712 | 7.76 | | 0.0 % |
| gradzip:4 | 2 | 169,472 | 99.9 | | 0.0 % |
| dgc:0.01 | 2 | 247,296 | 68.3 | | 0.0 % |

Within a slice all are equal to the float32 stage's: 134 MB scattered, 134 MB gathered in bfloat16. With gradzip the
compiler gathers one of the new weights beside the products of its factors: the text then has that gather in four
fusions, of one channel, and it counts once. Single numbers are 2,048 of powersgd's bytes and 5,632 of gradzip's: the
step's loss, which has nothing to wait for, is packed with gradzip's second factors, and a tile of 4096 is sent for it.
A planted float32 reduction is found.

Compiled for two and eight nodes of 8 H100 on the same day, with the CUDA 13 compiler:

| codec | n | bytes | times fewer than float32 | off what it says |
|---|---|---|---|---|
| float32 | 2 | 33,554,448 | | |
| int8 | 2 | 8,519,696 | 3.94 | 0.0 % |
| int4 | 2 | 4,325,392 | 7.76 | 0.0 % |
| onebit | 2 | 1,048,624 | 32.0 | 0.003 % |
| powersgd:4 | 2 | 196,624 | 171 | 0.0 % |
| topk:0.01 | 2 | 491,536 | 68.3 | 0.0 % |
| topk:0.01 | 8 | 3,440,668 | 17.1 | 0.0 % |
| int8 | 8 | 14,909,468 | 3.94 | 0.0 % |
| qsgd:4bit | 2 | 4,325,392 | 7.76 | 0.0 % |
| gradzip:4 | 2 | 196,624 | 171 | 0.0 % |
| dgc:0.01 | 2 | 491,536 | 68.3 | 0.0 % |

Within a node all are equal to the float32 stage's, gradzip's too. A planted float32 reduction is found.
"""

import argparse
import collections
import dataclasses
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from figures import Figure, show
from flax import nnx

from jaxscale.blocks import Context, Loss
from jaxscale.compiler.collectives import Collective
from jaxscale.compiler.compile import compile_report
from jaxscale.compiler.described import abstract_device, lacks_memories, lower_for
from jaxscale.layers.mlp import MLP
from jaxscale.layers.stack import Stack
from jaxscale.planning.program import described_step
from jaxscale.platforms.platform import Platform
from jaxscale.recipe.experiment import Experiment
from jaxscale.recipe.plan import Plan
from jaxscale.replicas import Codec, wire
from jaxscale.replicas.codec import CodecState
from jaxscale.sharding.mesh import MeshSpec
from jaxscale.state.batches import batch_shapes
from jaxscale.state.train_state import TrainState
from jaxscale.step.build import build
from jaxscale.step.compiled_checks import NoEffect, bytes_over, check_codec
from jaxscale.step.gradients import LossAndGradients
from jaxscale.step.synchronous import SynchronousStep
from jaxscale.step.train_step import TrainStep
from jaxscale.typing import Array, Batch, Key

BARS: dict[tuple[str, int], float | None] = {
    ("int8", 2): 3.9,
    ("int4", 2): 7.7,
    ("onebit", 2): 31.0,
    ("powersgd:4", 2): 47.0,
    ("topk:0.01,warmup=0", 2): 68.0,
    ("topk:0.01,warmup=0", 8): 17.0,
    ("qsgd:4bit", 2): None,
    ("gradzip:4", 2): None,
    ("dgc:0.01,warmup=0", 2): None,
    ("int8", 8): 3.9,
}
"""How many times fewer bytes than float32 a codec must send, by itself and the number of replicas."""
WITHIN = 0.02
"""Part of what a codec says that the count may be off by."""
NUMBERS = 4096
"""Bytes below which a collective is of single numbers (losses, norms, agreements), each of which takes 512 on a TPU; or
of what fills up a tile of 4096 for one that is packed with codes."""


@dataclasses.dataclass(frozen=True)
class Exact(Codec):
    """The mean in float32, by the same stage: what codecs are measured against."""

    name: ClassVar[str] = "exact"
    feedback: bool = dataclasses.field(default=False, kw_only=True)

    def _reduce(self, gradient: Array, state: CodecState, axis: str, key: Key | None) -> tuple[Array, CodecState]:
        return jax.lax.pmean(gradient, axis), state

    def _wire_bytes(self, shape: tuple[int, ...], n: int) -> int:
        return wire.exact(shape, n) - 1  # a codec that saves nothing is for no leaf


@dataclasses.dataclass(frozen=True)
class Where:
    """Machines that a slow network joins.

    Args:
        name: in the table.
        text: of the platform, with a place for its replicas.
        fsdp: devices of one replica.
        of: chips of one replica, where the text counts them all.
    """

    name: str
    text: str
    fsdp: int
    of: int = 1

    def platform(self, replicas: int) -> Platform:
        """So many of them."""
        return Platform.parse(self.text.format(replicas * self.of))


PLACES = {
    "tpu": Where("v5e", "tpu v5e:4x4 x {}", 16),
    "gpu": Where("h100", "gpu h100 x {}", 8, of=8),
}


class Block(nnx.Module):
    """A feed-forward layer and its residual."""

    def __init__(self, width: int, *, rngs: nnx.Rngs):
        self.mlp = MLP(width, 4 * width, kind="relu", rngs=rngs)

    def __call__(self, x: Any, *, context: Context = Context()) -> Any:
        """What the next block takes."""
        return x + self.mlp(x, context=context)


class Blocks(nnx.Module):
    """Two of them."""

    def __init__(self, width: int, rngs: nnx.Rngs):
        self.blocks = Stack(lambda rngs: Block(width, rngs=rngs), 2, rngs=rngs)


@dataclasses.dataclass(frozen=True)
class Matrices:
    """Four matrices, of which each gradient crosses the slow axis: 67 M numbers."""

    width: int = 2048
    layers: int = 2

    def build(self, rngs: nnx.Rngs, *, vocab_multiple: int = 1) -> Blocks:
        """The module."""
        return Blocks(self.width, rngs)

    def logical_sizes(self) -> dict[str, int]:
        """What a mesh may divide."""
        return {"mlp": 4 * self.width, "embed": self.width}

    def loss(self, module: Blocks, batch: Any, context: Context) -> Loss:
        """Squares of what is off."""
        y = module.blocks(batch["inputs"].astype(context.dtype or jnp.float32), context=context)
        off = y.astype(jnp.float32) - batch["targets"].astype(jnp.float32)
        return Loss(jnp.square(off).sum(), jnp.float32(off.size))


@dataclasses.dataclass(frozen=True)
class Batches:
    """Shapes of them."""

    width: int

    def shapes(self, rows: int) -> Mapping[str, Any]:
        """By name."""
        return dict.fromkeys(("inputs", "targets"), ((rows, 16, self.width), "bfloat16"))


@dataclasses.dataclass(frozen=True)
class Case:
    """A program to compile.

    Args:
        codec: of its plan.
        replicas: slices or nodes.
        fsdp: devices of each.
        width: of the model.
        fault: gradients are reduced in float32 before the codec sees them.
    """

    codec: Codec
    replicas: int
    fsdp: int
    width: int = 2048
    fault: bool = False

    @property
    def experiment(self) -> Experiment:
        """What is trained."""
        rows = 4 * self.replicas * self.fsdp
        return Experiment("wire", Matrices(self.width), Batches(self.width), batch=rows, steps=100)

    @property
    def plan(self) -> Plan:
        """How."""
        mesh = MeshSpec(replica=self.replicas, fsdp=self.fsdp)
        return Plan(mesh=mesh, zero=2, precision="bfloat16", reduce=self.codec)


def program(devices: Sequence[Any], case: Case) -> Any:
    """The recipe: the lowered step."""
    on = [abstract_device(device) for device in devices] if lacks_memories(devices) else devices
    step = build(case.experiment, case.plan, devices=on)
    if case.fault:
        function = step.parts.step_function
        assert isinstance(function, SynchronousStep)
        apart = function.gradient_fn

        def reduced(state: TrainState, batch: Batch) -> LossAndGradients:
            loss, gradients, rest = apart(state, batch)
            return loss, jax.tree.map(lambda g: jnp.broadcast_to(g.mean(0), g.shape), gradients), rest

        function = dataclasses.replace(function, gradient_fn=reduced)
        step = TrainStep(dataclasses.replace(step.parts, step_function=function))
    traced = step.step_fn.trace(step.layout.abstract, step.abstract_batch(batch_shapes(case.experiment)))
    return traced.lower() if on is devices else lower_for(devices[: step.devices], traced)


@dataclasses.dataclass(frozen=True)
class Counted:
    """What the compiled program of a case sends.

    Args:
        step: that was compiled.
        slow: bytes of one device over the replicas.
        told: what the codec says.
        numbers: those of the slow ones that are of single numbers, such as the loss and norms.
        fast: bytes of the arrays of each kind and type that stay within a replica, and are more than single numbers.
    """

    step: TrainStep
    slow: int
    told: int
    numbers: int
    fast: Mapping[tuple[str, str], int]


def counted(case: Case, platform: Platform) -> Counted:
    """Ask the platform's compiler."""
    report = compile_report(partial(program, case=case), platform)
    if report.crashed or report.argument_bytes is None or report.unread:
        raise SystemExit(f"{case} on {platform}: {report} {report.unread or ''}")
    step = described_step(case.experiment, platform, case.plan)
    stage = step.gradient_exchange
    assert stage is not None, "the plan has a codec"
    single = [one for one in report.collectives if one.bytes < NUMBERS]
    slow, numbers = (
        bytes_over(sends, stage.axis, stage.replicas, slice_count=platform.slices)
        for sends in (report.collectives, single)
    )
    return Counted(step, slow, stage.wire_bytes, numbers, within(report.collectives))


def within(found: Sequence[Collective]) -> Mapping[tuple[str, str], int]:
    """Bytes by kind and type of the collectives inside a replica, single numbers aside."""
    sums: collections.Counter[tuple[str, str]] = collections.Counter()
    for one in found:
        if one.axes is not None and "replica" not in one.axes and one.bytes >= NUMBERS:
            sums[one.kind, one.dtype] += one.bytes * one.count
    return dict(sums)


def compared(where: Where, tiny: bool, codecs: Sequence[str] = ()) -> list[Figure]:
    """The figures of one kind of machine, of all codecs or of some."""
    width = 512 if tiny else 2048
    figures: list[Figure] = []
    exact: dict[int, Counted] = {}
    for (text, replicas), bar in BARS.items():
        if (tiny and (text, replicas) != ("int8", 2)) or (codecs and text not in codecs):
            continue
        platform = where.platform(replicas)
        case = partial(Case, replicas=replicas, fsdp=where.fsdp, width=width)
        if replicas not in exact:
            exact[replicas] = counted(case(Exact()), platform)
            figures.append(Figure(f"{where.name} n={replicas} float32: bytes", exact[replicas].slow, "B"))
        base, found = exact[replicas], counted(case(Codec.parse(text)), platform)
        assert found.step.gradient_exchange is not None
        float32 = min(base.slow - base.numbers, found.step.gradient_exchange.exact_bytes)
        name = f"{where.name} n={replicas} {text}"
        figures += [
            Figure(f"{name}: bytes", found.slow, "B"),
            Figure(f"{name}: fewer than float32", float32 / (found.slow - base.numbers), "x", bar, ">="),
            Figure(f"{name}: off what it says", abs((found.slow - found.numbers) / found.told - 1), "", WITHIN),
            Figure(
                f"{name}: unlike the exact stage within a replica",
                unlike(base.fast, found.fast),
                "B",
                0,
            ),
        ]
        print(f"{name}: {found.slow} of {base.slow}, told {found.told}; within {dict(found.fast)}", file=sys.stderr)
    fault = Case(Codec.parse("int8"), 2, where.fsdp, width, fault=True)
    found = counted(fault, where.platform(2))
    figures.append(Figure(f"{where.name} n=2: a planted float32 reduction is found", caught(found), "", 1, ">="))
    return figures


def unlike(one: Mapping[Any, int], other: Mapping[Any, int]) -> int:
    """Bytes by which two programs differ, kind by kind."""
    return sum(abs(one.get(key, 0) - other.get(key, 0)) for key in {*one, *other})


def caught(found: Counted) -> bool:
    """Whether the check of a compiled step fails."""
    assert found.step.gradient_exchange is not None
    try:
        check_codec(found.step.gradient_exchange, found.slow)
    except NoEffect:
        return True
    return False


def main() -> None:
    """Print the table; exit with 1 if a bar does not hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="one codec, a small model")
    parser.add_argument("--platform", choices=PLACES, help="one of them alone")
    parser.add_argument("--codec", action="append", default=[], help="one of them alone; more than once for more")
    given = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    names = [given.platform] if given.platform else list(PLACES)
    figures = [figure for name in names for figure in compared(PLACES[name], given.tiny, given.codec)]
    if not show(figures, "Wire: bytes of a device and step over the replicas") and not given.tiny:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
