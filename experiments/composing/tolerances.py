"""What codes in blocks change alone, where their blocks end elsewhere: the figures of `judge.CODING`.

Codecs, states in few bits and split weights round the numbers of a block together, and a block ends where a shard ends:
the same technique on another layout rounds other numbers together. Each is trained alone on replicas and on replicas
that split their gradients and state further, on four batches, with SGD and AdamW.
"""

import contextlib
import itertools

from composing.draws import CODEC_VALUES, Draw
from composing.judge import relative, row_name
from composing.twins import train

from jaxscale.errors import UserError

TECHNIQUES: tuple[dict[str, str], ...] = (
    *({"reduce": text} for text in ("int8", "int4", "onebit", "qsgd:4bit", "qsgd:8bit")),
    *({"reduce": f"{name}:{share},warmup=0"} for name in ("topk", "dgc") for share in CODEC_VALUES["fraction"]),
    *({"reduce": f"{name}:{rank}"} for name in ("powersgd", "gradzip") for rank in CODEC_VALUES["rank"]),
    *({"state": text} for text in ("int8", "dynamic8", "int4", "fp8")),
    {"master": "split", "precision": "bfloat16"},
)
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
    for fields in TECHNIQUES:
        figures: list[tuple[float, ...]] = []
        for rule, seed in itertools.product(RULES.values(), range(4)):
            with contextlib.suppress(UserError):
                figures += shown(fields, rule, seed)
        largest = ", ".join(f"{max(column):.1e}" for column in zip(*figures, strict=True))
        print(f'    "{row_name(next(iter(fields.items())))}": ({largest}),', flush=True)
