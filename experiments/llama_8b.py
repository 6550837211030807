"""Llama 3.1 8B: its configuration, without its weights, to ask what it takes to train it.

    jaxscale fit experiments/llama_8b.py --platform "tpu v5e:4x4"

On these 16 chips it does not fit unchanged, and the command says how it would:

    does not fit: 23.6 GiB of 15.8 GiB per device, by estimate
    it fits with --plan.microbatches 4, narrowly: 13.4 GiB by estimate; --verify asks the compiler

Of the 23.6 GiB, 12 are logits and their gradient. With --plan.microbatches 4 --verify the compiler of v5e says
13.6 GiB: it fits, and the estimate is 1.2 % too low (JAX 0.12.0.1, libtpu 0.0.51; 75 s of one core, 2026-11-25).
--compile-block, in a seventh of that time, says 14.9 GiB, 9.6 % too much.

The data are bytes of Shakespeare: they stand for text of the same shape, and no file is read for an estimate.
"""

from pathlib import Path

from jaxscale import Experiment, Optimizer, Plan
from jaxscale.data import Text
from jaxscale.models import Decoder, Llama3Scaling

TEXT = Path(__file__).parent / "data" / "shakespeare.txt"
CONTEXT = 4096


def experiment() -> Experiment:
    """A global batch of 64 rows of 4,096 tokens, AdamW in float32, everything sharded, blocks recomputed."""
    model = Decoder(
        vocab=128_256,
        context=CONTEXT,
        layers=32,
        embed=4_096,
        heads=32,
        kv_heads=8,
        head_dim=128,
        mlp=14_336,
        tied=False,
        rotary_base=500_000.0,
        rotary_scaling=Llama3Scaling(factor=8.0),
    )
    return Experiment(
        name="llama_8b",
        model=model,
        data=Text(path=str(TEXT), tokenizer="byte", context=CONTEXT),
        optimizer=Optimizer(learning_rate=3e-4, warmup=2000),
        steps=100_000,
        batch=64,
        plan=Plan(zero=3, precision="bfloat16", memory="full"),
    )
