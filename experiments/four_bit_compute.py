"""4-bit training, Sun et al. 2020: every product of the layers of INT4 and radix-4 FP4 numbers.

    jaxscale train experiments/four_bit_compute.py
    jaxscale train experiments/four_bit_compute.py --plan.matmul int8      (or fp8; default: as bfloat16 computes)

2 layers, 4 heads, 64 wide, 400 steps of AdamW on 16 windows of 48 characters of fourteen plays: small enough to see on
a CPU, which has no such products and emulates them, what a recipe costs in loss; nothing here is faster.
`benchmarks/low_precision.py` trains it by every recipe and has the figures: after 400 steps, seeds 0 and 1, held-out
loss is 2.481 and 2.484 nats per character in int4, 2.333 and 2.342 in bfloat16 (JAX 0.10.2).
"""

from pathlib import Path

from jaxscale import Evaluation, Experiment, Optimizer, Plan, Samples
from jaxscale.data import Text
from jaxscale.models import Decoder

TEXT = Path(__file__).parent / "data" / "shakespeare.txt"
CONTEXT = 48


def experiment() -> Experiment:
    """The recipe, in INT4 and FP4."""
    return Experiment(
        name="four_bit_compute",
        model=Decoder(
            vocab=66,
            context=CONTEXT,
            layers=2,
            heads=4,
            embed=64,
            mlp_kind="gelu_tanh",
            positions="learned",
            init_std=0.125,
        ),
        data=Text(path=str(TEXT), tokenizer="char", context=CONTEXT),
        optimizer=Optimizer(
            learning_rate=3e-3, final_learning_rate=1.5e-4, warmup=50, b2=0.99, weight_decay=0.01, clip=None
        ),
        steps=400,
        batch=16,
        evaluation=Evaluation(every=100, batches=32),
        samples=Samples(every=0, prompts=()),
        plan=Plan(precision="bfloat16", matmul="int4", unroll=2),
    )
