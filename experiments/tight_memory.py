"""A deep and narrow decoder that takes three times the memory it is given: 649 MiB, of which 216 MiB are there.

    jaxscale train experiments/tight_memory.py --plan.memory fit --limit 216MiB

24 layers, 64 wide, batches of 16 x 128 characters: kept activations outweigh parameters and optimizer by 33 to 1. On
this machine's CPU `fit` finds `save:180MiB`, which the compiler says takes 215 MiB (212.5 on JAX 0.12) at 1.033 times
the FLOP; `--plan.memory full` would take 72 MiB at 1.27 times. `benchmarks/real_use.py` measures it. One device,
however many cores there are, so that the bytes are the same everywhere.
"""

from pathlib import Path

from jaxscale import Experiment, Optimizer, Plan
from jaxscale.data import Text
from jaxscale.models import Decoder

TEXT = Path(__file__).parent / "data" / "shakespeare.txt"
CONTEXT = 128


def experiment() -> Experiment:
    """Activations of 24 layers, and few parameters."""
    return Experiment(
        name="tight_memory",
        model=Decoder(vocab=66, context=CONTEXT, layers=24, heads=4, embed=64),
        data=Text(path=str(TEXT), tokenizer="char", context=CONTEXT),
        optimizer=Optimizer(learning_rate=1e-3, final_learning_rate=1e-4, warmup=20),
        steps=200,
        batch=16,
        plan=Plan(mesh="1"),
    )
