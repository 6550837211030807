"""What few bits change alone from layout to layout: the figures of `tolerances.json`.

Codecs, states in few bits and split weights round the numbers of a block together, and a block ends where a shard ends;
sums of few bits are rounded in another order where a batch or a row is split. Each technique is trained alone, on
replicas and on replicas that split their batch, gradients and state further, on batches of 1 to 16 rows (of 1 on one
device and on some that split it, where the technique sends nothing), with SGD, AdamW and AdEMAMix, whose slow momentum
keeps what an early step has rounded otherwise.
"""

import contextlib
import fcntl
import itertools
import json
from collections.abc import Iterator
from pathlib import Path

from composing.comparing import IN_BFLOAT16, relative, row_name
from composing.draws import CODEC_VALUES, ONE_BIT_NEEDS, SGD, Draw
from composing.twins import train

from jaxscale.errors import UserError

TECHNIQUES: tuple[dict[str, str], ...] = (
    *({"plan.reduce": text} for text in ("int8", "int4", "onebit", "qsgd:4bit", "qsgd:8bit")),
    *({"plan.reduce": f"{name}:{share},warmup=0"} for name in ("topk", "dgc") for share in CODEC_VALUES["fraction"]),
    *({"plan.state.moments": text} for text in ("int8", "dynamic8", "int4", "fp8")),
    {"plan.precision": "bfloat16"},
    {"plan.state.master": "split", "plan.precision": "bfloat16"},
    *({"plan.matmul": text} for text in ("fp8", "int8", "int4")),
    *({"plan.matmul": text, "plan.precision": "bfloat16"} for text in ("fp8", "int8", "int4")),
    *({"optimizer.name": f"one_bit_{rule}", **ONE_BIT_NEEDS} for rule in ("adam", "lamb")),
    *({"plan.reduce": f"{name}:{rank}"} for name in ("powersgd", "gradzip") for rank in CODEC_VALUES["rank"]),
)
LAYOUTS: tuple[dict[str, str], ...] = (
    {"mesh": "replica:2,data:4"},
    {"mesh": "replica:2,fsdp:2", "zero": "1"},
    {"mesh": "replica:2,tensor:2"},
    {"mesh": "replica:2,tensor:4"},
    {"mesh": "replica:2,sequence:2"},
    {"mesh": "replica:2,fsdp:2,tensor:2", "zero": "2"},
    {"mesh": "replica:2", "microbatches": "2"},
    {"mesh": "replica:2", "microbatches": "4"},
    {"mesh": "replica:2", "kernels": "attention=chunked"},
)
RULES = (SGD, *({"optimizer.name": name, "optimizer.learning_rate": "0.003"} for name in ("adamw", "ademamix")))
SEEDS = range(6)
RECORD = Path(__file__).with_suffix(".json")
BATCHES = (1, 2, 4, 16)
"""Rows: of few targets gradients are steeper, and codes farther apart."""
REPLICAS = "replica:2"


def shown(one: Draw) -> Iterator[tuple[float, ...]]:
    """Relative differences of loss and norm, of the first step and the last, between layouts."""
    alone = train(one, one.plan)
    for layout in LAYOUTS:
        mesh = layout["mesh"].replace(REPLICAS, one.plan["mesh"]).removeprefix("1,")
        with contextlib.suppress(UserError):
            other = train(one, {**one.plan, **layout, "mesh": mesh})
            yield tuple(
                relative(getattr(other, kind)[at], getattr(alone, kind)[at])
                for at in (0, -1)
                for kind in ("losses", "norms")
            )


def measure(techniques: tuple[dict[str, str], ...] = TECHNIQUES) -> None:
    """Record the largest differences of each technique by each rule, and print them, a line each."""
    for technique, rule in itertools.product(techniques, RULES):
        if "optimizer.name" in technique and rule is not RULES[1]:
            continue
        figures: list[tuple[float, ...]] = []
        for batch, seed in itertools.product(BATCHES, SEEDS):
            fields = {**rule, **technique, "plan.mesh": REPLICAS if batch > 1 else "1"}
            with contextlib.suppress(UserError):
                figures += shown(Draw(tuple(fields.items()), rows=0, batch=batch, seed=seed))
        path, text = next(iter(technique.items()))
        name = row_name((path.removeprefix("plan.").removesuffix(".name"), text))
        name += IN_BFLOAT16 * ("matmul" in name and "plan.precision" in technique)
        largest = [float(f"{max(column):.1e}") for column in zip(*figures, strict=True)]
        print(name, rule["optimizer.name"], *largest, flush=True)
        record(name, rule["optimizer.name"], largest)


def record(name: str, rule: str, figures: list[float]) -> None:
    """Write a row's figures into the record, where larger ones stay. Several processes may do so at once."""
    with RECORD.open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        table = json.loads(RECORD.read_text())
        before = table.get(name, {})
        largest = list(map(max, figures, before.get(rule, figures)))
        table[name] = {**before, rule: largest}
        lines = (f" {json.dumps(name)}: {json.dumps(row)}" for name, row in table.items())
        RECORD.write_text("{\n" + ",\n".join(lines) + "\n}\n")
