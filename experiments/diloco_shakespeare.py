"""The character-level Shakespeare model on two replicas that seldom meet: DiLoCo, beside what sends in every step.

    jaxscale train experiments/diloco_shakespeare.py
    jaxscale train experiments/diloco_shakespeare.py:every-200-int4
    python experiments/diloco_shakespeare.py [--steps 2000] [--only exact every-20] [-o RUNS]      # all, and a table

The recipe of `shakespeare.py` on the two devices that a CPU of two cores shows, each a replica of half the batch. With
`every-50` both train alone, with AdamW of their own, and every 50 steps the weights that they share make a step of
Nesterov's SGD towards them (0.7, 0.9): a fiftieth of the bytes, or a 400th in int4. `exact` steps together, `int8` too
with gradients in few bits, `one-bit-adam` with momenta in a bit a number after a quarter of the run.

A run from scratch of so few outer steps is not what DiLoCo is for (its paper begins with a model trained for 24,000
steps, and an outer momentum of 0.9 takes ten steps to grow): expect it behind `exact` here. `--steps 400` gave, on
XLA:CPU, JAX 0.12.0.1, 22 November 2026 (2,000 steps of all have not been run):

                       held-out loss  bytes a step     fewer
    exact                     2.4108     3,216,896       1.0
    int8                      2.4108       820,488       3.9
    one-bit-adam              2.3847       883,124       3.6
    every-20                  2.4487       160,845      20.0
    every-50                  2.4614        64,338      50.0
    every-50-int4             2.4617         8,376     384.0
    every-50-in-parts         2.4702        69,759      46.1
    every-50-mean             2.4591        64,338      50.0
    every-200-int4            2.7136         2,094    1536.2

`one-bit-adam` sends gradients in full for the first 100 of those.
"""

import dataclasses
from collections.abc import Callable
from pathlib import Path

from jaxscale import Evaluation, Experiment, Optimizer, Plan, Samples
from jaxscale.data import Text
from jaxscale.models import Decoder
from jaxscale.replicas import Diloco

TEXT = Path(__file__).parent / "data" / "shakespeare.txt"
CONTEXT = 64

ADAMW = Optimizer(learning_rate=1e-3, final_learning_rate=1e-4, warmup=100, b2=0.99)
"""The recipe's."""
ONE_BIT = Optimizer("one_bit_adam", learning_rate=1e-3, final_learning_rate=1e-4, warmup=100, b2=0.99, freeze=0.25)


def by(name: str, diloco: Diloco | None = None, codec: str | None = None, optimizer: Optimizer = ADAMW) -> Experiment:
    """The recipe on two replicas."""
    return Experiment(
        name=f"diloco_shakespeare_{name}",
        model=Decoder(
            vocab=66,
            context=CONTEXT,
            layers=4,
            heads=4,
            embed=128,
            norm="layer_no_bias",
            mlp_kind="gelu",
            positions="learned",
            tied=True,
        ),
        data=Text(path=str(TEXT), tokenizer="char", context=CONTEXT),
        optimizer=optimizer,
        steps=2000,
        batch=12,
        evaluation=Evaluation(every=500, batches=64),
        samples=Samples(every=0, prompts=()),
        plan=Plan(mesh="replica:2", diloco=diloco, reduce=codec or None),
    )


def experiment() -> Experiment:
    """Replicas that meet every 50 steps."""
    return by("every-50", Diloco(50))


WAYS: dict[str, Callable[[], Experiment]] = {
    "exact": lambda: by("exact"),
    "int8": lambda: by("int8", codec="int8"),
    "one-bit-adam": lambda: by("one-bit-adam", optimizer=ONE_BIT),
    "every-20": lambda: by("every-20", Diloco(20)),
    "every-50": experiment,
    "every-50-int4": lambda: by("every-50-int4", Diloco(50), "int4"),
    "every-50-in-parts": lambda: by("every-50-in-parts", Diloco(50, fragments=4)),
    "every-50-mean": lambda: by("every-50-mean", Diloco(50, lr=1.0, momentum=0.0)),
    "every-200-int4": lambda: by("every-200-int4", Diloco(200), "int4"),
}
"""In the order of the table; every-50-mean takes the replicas' mean in place of an outer optimizer."""


def _variant(name: str) -> Callable[[], Experiment]:
    def variant() -> Experiment:
        return WAYS[name]()

    variant.__doc__ = f"The table's {name}."
    return variant


VARIANTS = {name: _variant(name) for name in WAYS}


def _shortened(made: Experiment, steps: int) -> Experiment:
    """With a meeting, at the end at the latest."""
    if (seldom := made.plan.diloco) is None:
        return made
    often = dataclasses.replace(seldom, every=min(seldom.every, steps))
    return dataclasses.replace(made, plan=dataclasses.replace(made.plan, diloco=often))


def main() -> None:
    """Train every way, and print a table."""
    from comparison import WIRE, compare, wire

    compare(__doc__, VARIANTS, WIRE, wire, _shortened)


if __name__ == "__main__":
    main()
