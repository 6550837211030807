"""Llama 3.2 1B: its configuration, without its weights, to ask what it takes to train it.

    jaxscale fit experiments/llama_1b.py --platform "tpu v5e:4x4"

On these 16 chips it fits by estimate: 7.95 GiB of 15.8 GiB per device, of which 5.93 are logits and their gradient.
The data are bytes of Shakespeare: they stand for text of the same shape, and no file is read for an estimate.
"""

from pathlib import Path

from jaxscale import Experiment, Optimizer, Plan
from jaxscale.data import Text
from jaxscale.models import Decoder, Llama3Scaling

TEXT = Path(__file__).parent / "data" / "shakespeare.txt"
CONTEXT = 2048


def experiment() -> Experiment:
    """A global batch of 64 rows of 2,048 tokens, AdamW in float32, everything sharded, blocks recomputed."""
    model = Decoder(
        vocab=128_256,
        context=CONTEXT,
        layers=16,
        embed=2_048,
        heads=32,
        kv_heads=8,
        head_dim=64,
        mlp=8_192,
        tied=True,
        rotary_base=500_000.0,
        rotary_scaling=Llama3Scaling(factor=32.0),
    )
    return Experiment(
        name="llama_1b",
        model=model,
        data=Text(path=str(TEXT), tokenizer="byte", context=CONTEXT),
        optimizer=Optimizer(learning_rate=3e-4, warmup=2000),
        steps=100_000,
        batch=64,
        plan=Plan(zero=3, precision="bfloat16", memory="full"),
    )
