"""The character-level Shakespeare model with its optimizer's state in 8 and 4 bits: a variant for each way to keep it.

    jaxscale train experiments/low_bit_states.py                     (int8; or :float32, :dynamic8, :int4, :fp8, ...)
    python experiments/low_bit_states.py [--steps 2000] [--only float32 int8] [-o RUNS]            # all, and a table

The recipe of `shakespeare.py`, in float32 on one device. A state in few bits has codes of the moments of matrices and a
scale for each block of a column; embeddings, gains and biases stay float32. `split-int8` also keeps the weights as
bfloat16 and 8 bits of correction, and `lion-int8` and `muon-int8` have one moment instead of two. The loss should stay
within 0.02 nats of the same rule's in float32, and within 0.03 in 4 bits. `--steps 400` gave, on XLA:CPU, JAX 0.12.0.1,
22 November 2026 (2,000 steps of all have not been run):

                  held-out loss  state, bytes a parameter
    float32              2.4108         8.00
    int8                 2.4110         2.12
    dynamic8             2.4110         2.12
    fp8                  2.4132         2.12
    int4                 2.4035         1.15
    split-int8           2.4108         3.12
    lion-float32         2.4857         4.00
    lion-int8            2.4856         1.06
    muon-float32         2.3816         4.09
    muon-int8            2.3827         1.12
"""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import jax

from jaxscale import Evaluation, Experiment, Optimizer, Plan, Run, Samples, build, override
from jaxscale.data import Text
from jaxscale.models import Decoder

TEXT = Path(__file__).parent / "data" / "shakespeare.txt"
CONTEXT = 64

ADAMW = Optimizer(learning_rate=1e-3, final_learning_rate=1e-4, warmup=100, b2=0.99)
"""The recipe's."""
LION = Optimizer("lion", learning_rate=2e-4, final_learning_rate=2e-5, warmup=100, b2=0.99)
MUON = dataclasses.replace(ADAMW, name="muon")

WAYS: dict[str, tuple[Optimizer, dict[str, str]]] = {
    "float32": (ADAMW, {}),
    "int8": (ADAMW, {"state.moments": "int8"}),
    "dynamic8": (ADAMW, {"state.moments": "dynamic8"}),
    "fp8": (ADAMW, {"state.moments": "fp8"}),
    "int4": (ADAMW, {"state.moments": "int4"}),
    "split-int8": (ADAMW, {"state.moments": "int8", "state.master": "split", "precision": "bfloat16"}),
    "lion-float32": (LION, {}),
    "lion-int8": (LION, {"state.moments": "int8"}),
    "muon-float32": (MUON, {}),
    "muon-int8": (MUON, {"state.moments": "int8"}),
}
"""Rule and changes of the plan, in the order of the table."""


def by(name: str) -> Experiment:
    """The recipe with a state of a row of the table."""
    optimizer, changes = WAYS[name]
    return Experiment(
        name=f"low_bit_states_{name}",
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
        plan=override(Plan(mesh="1"), changes),
    )


def experiment() -> Experiment:
    """Eight bits, companded: the map to begin with."""
    return by("int8")


def _variant(name: str) -> Callable[[], Experiment]:
    def variant() -> Experiment:
        return by(name)

    variant.__doc__ = f"The table's {name}."
    return variant


VARIANTS = {name: _variant(name) for name in WAYS}


def _bytes(made: Experiment, run: Run) -> str:
    step = build(made)
    return f"{sum(leaf.nbytes for leaf in jax.tree.leaves(step.init().optimizer)) / step.parameters:12.2f}"


def main() -> None:
    """Train every way, and print a table."""
    from comparison import compare

    compare(__doc__, VARIANTS, "state, bytes a parameter", _bytes)


if __name__ == "__main__":
    main()
