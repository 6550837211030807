"""Llama 3.1 70B: its configuration, without its weights, to ask what it takes to train it.

    jaxscale fit experiments/llama_70b.py --platform "tpu v5p:4x8x8"

On these 256 chips it fits by estimate: 10.8 GiB of 95.7 per device.
The data are bytes of Shakespeare: they stand for text of the same shape, and no file is read for an estimate.
"""

from pathlib import Path

from jaxscale import Experiment, Optimizer, Plan
from jaxscale.data import Text
from jaxscale.models import Decoder, Llama3Scaling

TEXT = Path(__file__).parent / "data" / "shakespeare.txt"
CONTEXT = 4096


def experiment() -> Experiment:
    """A global batch of 256 rows of 4,096 tokens, AdamW in float32, everything sharded, blocks recomputed."""
    model = Decoder(
        vocab=128_256,
        context=CONTEXT,
        layers=80,
        embed=8_192,
        heads=64,
        kv_heads=8,
        head_dim=128,
        mlp=28_672,
        tied=False,
        rotary_base=500_000.0,
        rotary_scaling=Llama3Scaling(factor=8.0),
    )
    return Experiment(
        name="llama_70b",
        model=model,
        data=Text(path=str(TEXT), tokenizer="byte", context=CONTEXT),
        optimizer=Optimizer(learning_rate=3e-4, warmup=2000),
        steps=100_000,
        batch=256,
        plan=Plan(zero=3, precision="bfloat16", memory="full"),
    )
