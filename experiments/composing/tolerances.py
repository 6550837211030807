"""What codes in blocks change alone, where their blocks end elsewhere: the figures of `judge.CODING`.

Codecs, states in few bits and split weights round the numbers of a block together, and a block ends where a shard ends:
the same technique on another layout rounds other numbers together. Each is trained alone on replicas and on replicas
that split their gradients and state further, on four batches, with SGD and AdamW.
"""

import contextlib
import itertools

from composing.draws import Draw
from composing.judge import relative
from composing.twins import train

from jaxscale.errors import UserError

TECHNIQUES: dict[str, tuple[dict[str, str], ...]] = {
    "reduce=int8": ({"reduce": "int8"},),
    "reduce=int4": ({"reduce": "int4"},),
    "reduce=onebit": ({"reduce": "onebit"},),
    "reduce=qsgd": ({"reduce": "qsgd:4bit"}, {"reduce": "qsgd:8bit"}),
    "reduce=topk": ({"reduce": "topk:0.05,warmup=0"}, {"reduce": "topk:0.25,warmup=0"}),
    "reduce=dgc": ({"reduce": "dgc:0.05,warmup=0"}, {"reduce": "dgc:0.25,warmup=0"}),
    "reduce=powersgd": ({"reduce": "powersgd:1"}, {"reduce": "powersgd:4"}),
    "reduce=gradzip": ({"reduce": "gradzip:1"}, {"reduce": "gradzip:4"}),
    "state=int8": ({"state": "int8"},),
    "state=dynamic8": ({"state": "dynamic8"},),
    "state=int4": ({"state": "int4"},),
    "state=fp8": ({"state": "fp8"},),
    "master=split": ({"master": "split", "precision": "bfloat16"},),
}
LAYOUTS: tuple[dict[str, str], ...] = (
    {"mesh": "replica:2,data:4"},
    {"mesh": "replica:2,fsdp:2", "zero": "1"},
    {"mesh": "replica:2,tensor:2"},
)
RULES = {
    "sgd": {"optimizer.name": "sgd", "optimizer.momentum": "0.9", "optimizer.learning_rate": "0.1"},
    "adamw": {"optimizer.name": "adamw", "optimizer.learning_rate": "0.003"},
}


def shown(fields: dict[str, str], rule: dict[str, str], seed: int) -> list[tuple[float, ...]]:
    """Relative differences of loss and norm, of the first step and the second, between layouts."""
    one = Draw(tuple(rule.items()), rows=0, batch=16, seed=seed)
    alone = train(one, {"mesh": "replica:2", **fields})
    differences = []
    for layout in LAYOUTS:
        other = train(one, {**layout, **fields})
        pairs = zip((*alone.losses, *alone.norms), (*other.losses, *other.norms), strict=True)
        first, second, first_norm, second_norm = (relative(a, b) for a, b in pairs)
        differences.append((first, first_norm, second, second_norm))
    return differences


def measure() -> None:
    """Print the largest differences of each technique, a line each."""
    for name, variants in TECHNIQUES.items():
        figures: list[tuple[float, ...]] = []
        for fields in variants:
            for rule, seed in itertools.product(RULES.values(), range(4)):
                with contextlib.suppress(UserError):
                    figures += shown(fields, rule, seed)
        largest = ", ".join(f"{max(column):.1e}" for column in zip(*figures, strict=True))
        print(f'    "{name}": ({largest}),', flush=True)
