"""Every pair of techniques: `composition.py --pairs` judges them, and the table of `docs/` is made of its verdicts.

A pair that goes was traced, compiled, trained a few steps and compared with its twins, at a batch of 16 rows. The
record, `pairs.json`, holds "" for it, and the reason of a refusal. Pairs that set the same field twice are none.
"""

import dataclasses
import fcntl
import itertools
import json
import random
import re
from collections.abc import Iterator
from pathlib import Path

from composing.draws import LAYERS, SGD, WIDTH, Draw, completed

from jaxscale.pipeline.plan import PipelinePlan
from jaxscale.sharding.mesh import MeshSpec

RECORD = Path(__file__).with_suffix(".json")
BATCH, LENGTH = 16, 64


@dataclasses.dataclass(frozen=True)
class Technique:
    """A row and a column of the table.

    Args:
        label: what the table calls it.
        changes: fields of the plan, by name, without the mesh.
        mesh: devices along each axis.
        optimizer: fields of the optimizer.
    """

    label: str
    changes: tuple[tuple[str, str], ...] = ()
    mesh: tuple[tuple[str, int], ...] = ()
    optimizer: tuple[tuple[str, str], ...] = ()


def technique(label: str, mesh: str = "", optimizer: str = "", **changes: str) -> Technique:
    """A technique of its label, axes such as "fsdp:2", the optimizer's name, and fields of the plan."""
    axes = tuple((axis, int(size)) for axis, _, size in (part.partition(":") for part in mesh.split(",") if part))
    chosen = (("optimizer.name", optimizer), ("optimizer.learning_rate", "0.003")) if optimizer else ()
    return Technique(label, tuple(changes.items()), axes, chosen)


TECHNIQUES = (
    technique("data parallel", "data:2"),
    technique("replicas (HSDP's outer axis)", "replica:2"),
    technique("ZeRO 1", "fsdp:2", zero="1"),
    technique("ZeRO 2", "fsdp:2", zero="2"),
    technique("ZeRO 3", "fsdp:2", zero="3"),
    technique("tensor parallel", "tensor:2"),
    technique("sequence-sharded norms", "tensor:2", sequence_parallel="True"),
    technique("context parallel", "sequence:2"),
    technique("microbatches", microbatches="2"),
    technique("bfloat16", precision="bfloat16"),
    technique("products in 8 bits", matmul="fp8"),
    technique("products in 4 bits", matmul="int4"),
    technique("remat per block", memory="full"),
    technique("every K-th input", memory="sqrt"),
    technique("Revolve", memory="revolve:2"),
    technique("Rotor", memory="chain:0.7"),
    technique("optimal save sets", memory="save:2.0"),
    technique("activations on the host", memory="offload:pofo:1.5"),
    technique("1F1B", pipeline="1f1b:2x4"),
    technique("interleaved 1F1B", pipeline="interleaved:2x4,v=2"),
    technique("zero bubble", pipeline="zb-h1:2x4"),
    technique("Chimera", pipeline="chimera:2x4"),
    technique("PipeDream", pipeline="pipedream:2"),
    technique("2BW", pipeline="2bw:2x4"),
    technique("state in 8 bits", **{"state.moments": "int8"}),
    technique("state in 4 bits", **{"state.moments": "int4"}),
    technique("split weights", **{"state.master": "split"}),
    technique("codes in 8 bits", reduce="int8"),
    technique("top-k", reduce="topk:0.25,warmup=0"),
    technique("PowerSGD", reduce="powersgd:4"),
    technique("1-bit Adam", optimizer="one_bit_adam"),
    technique("DiLoCo", diloco="every=2"),
    technique("weights on the host", **{"offload.weights": "host"}),
    technique("gradients on the host", **{"offload.gradients": "host"}),
    technique("state streamed", **{"offload.optimizer_state": "streamed"}),
    technique("state on the host", **{"offload.optimizer_state": "host"}),
    technique("loss in chunks", kernels="loss_chunk=8"),
    technique("attention in chunks", kernels="attention=chunked"),
    technique("Lion", optimizer="lion"),
    technique("Muon", optimizer="muon"),
)
"""Rows and columns, in the table's order: a representative of each family."""


def pairs() -> Iterator[tuple[int, int]]:
    """Numbers of the techniques of each pair that sets no field twice."""
    for i, j in itertools.combinations(range(len(TECHNIQUES)), 2):
        one, other = TECHNIQUES[i], TECHNIQUES[j]
        fields = (dict(one.changes).keys() & dict(other.changes).keys()) - {"kernels"}
        if not fields and not (one.optimizer and other.optimizer):
            yield i, j


def combination(i: int, j: int) -> Draw:
    """Two techniques by their numbers, with what they need."""
    one, other = TECHNIQUES[i], TECHNIQUES[j]
    asked: dict[str, str] = {}
    for name, text in (*one.changes, *other.changes):
        path = f"plan.{name}"  # kernels may be asked for twice
        asked[path] = f"{asked[path]},{text}" if path in asked else text
    asked |= dict((*one.optimizer, *other.optimizer))
    sizes = {**dict(one.mesh), **dict(other.mesh)}
    techniques = completed({**({} if "optimizer.name" in asked else SGD), **asked}, sizes, random.Random(0))
    mesh = MeshSpec.parse(techniques["plan.mesh"])
    assert asked.items() - {("optimizer.learning_rate", "0.003")} <= techniques.items()
    assert all(mesh.sizes[axis] > 1 for axis in sizes)
    rule, _, share = techniques.get("plan.memory", "").rpartition(":")
    if "." in share:
        # a budget is a share of what the inputs of blocks take on a device
        parts = mesh.batch_shards * mesh.sequence * int(techniques.get("plan.microbatches", 1))
        if "plan.pipeline" in techniques:
            parts *= PipelinePlan.parse(techniques["plan.pipeline"]).shape()[1]
        kibibytes = int(float(share) * BATCH / parts * LENGTH * WIDTH * 4 * LAYERS / 1024)
        techniques["plan.memory"] = f"{rule}:{kibibytes}KiB"
    return Draw(tuple(sorted(techniques.items())), length=LENGTH, rows=0, batch=BATCH)


def read() -> dict[str, str]:
    """The verdict on each pair that was judged, by the two labels: "" for one that goes, else why it does not."""
    return json.loads(RECORD.read_text() or "{}") if RECORD.exists() else {}


def key(i: int, j: int) -> str:
    """A pair's key in the record."""
    return f"{TECHNIQUES[i].label} + {TECHNIQUES[j].label}"


def table(record: dict[str, str]) -> str:
    """The documentation's: a line a technique, a sign for each technique before it, and the reasons of refusals."""
    reasons: dict[str, str] = {}
    lines, known = [], set(pairs())
    for j, other in enumerate(TECHNIQUES):
        signs = []
        for i in range(j):
            reason = record.get(key(i, j))
            if (i, j) not in known:
                signs.append(" ")
            elif reason is None:
                signs.append("?")
            elif not reason:
                signs.append("+")
            else:
                signs.append(reasons.setdefault(general(reason), chr(ord("a") + len(reasons))))
        lines.append(f"{j + 1:2} {other.label:28} {''.join(signs)}")
    head = "".join(str((n + 1) % 10) for n in range(len(TECHNIQUES)))
    legend = "\n".join(f"{sign}: {reason}" for reason, sign in reasons.items())
    return "\n".join([f"   {'':28} {head}", *lines, "", legend])


def general(reason: str) -> str:
    """A refusal without its way round: what is the same of all pairs that it refuses."""
    cause = reason.partition(": ")[2] or reason
    return re.split(r"[;,] (?:take|leave|add|keep|choose|or )", cause)[0]


def missing() -> list[tuple[int, int]]:
    """Pairs that the record lacks."""
    judged = read()
    return [pair for pair in pairs() if key(*pair) not in judged]


def record(name: str, reason: str) -> None:
    """Add a verdict to the record: "" for a pair that goes. Several processes may do so at once."""
    with RECORD.open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        judged = {**read(), name: reason}
        order = {key(*pair): n for n, pair in enumerate(pairs())}
        verdicts = dict(sorted(judged.items(), key=lambda item: order.get(item[0], len(order))))
        RECORD.write_text(json.dumps(verdicts, indent=0) + "\n")
