"""Trains on from weights in Hugging Face's form: speeches of Shakespeare, given who speaks.

    jaxscale train experiments/finetune_huggingface.py

For chats there is a command, which needs no file: `jaxscale finetune FOLDER --data chats.jsonl --lora 16`. This file is
an experiment of one's own, on text that is no chat. A speech is a document, its prompt the line that names the speaker:
what the model is asked weighs 0 in the loss, what it should answer weighs 1. The weights are those of
`tests/golden/llama` (a Llama of 106,816 random parameters over bytes), so that this runs anywhere: 1,000 steps took
30 s on two cores (AMD EPYC), the loss fell from 5.65 at the first step to 1.75 held out, in nats per byte of the
answers (`jaxscale evaluate`, which takes all of them; the 20 batches of an evaluation on the way said 1.75 too). With
a real folder, of any architecture that `jaxscale.models.huggingface` knows:

    jaxscale train experiments/finetune_huggingface.py --model.folder PATH --data.tokenizer PATH/tokenizer.json \
        --data.context 512 --optimizer.learning-rate 2e-5 --plan.precision bfloat16
    jaxscale export RUN_DIR DIR       # and back: a folder that transformers reads
"""

from pathlib import Path

from jaxscale import Evaluation, Experiment, Optimizer, Samples
from jaxscale.data import Text
from jaxscale.models import Pretrained

HERE = Path(__file__).parent
FOLDER = HERE.parent / "tests" / "golden" / "llama"
TEXT = HERE / "data" / "shakespeare.txt"


def experiment() -> Experiment:
    """Full fine-tuning of every parameter, documents packed into rows."""
    return Experiment(
        name="finetune_huggingface",
        model=Pretrained(str(FOLDER)),
        data=Text(
            path=str(TEXT),
            tokenizer="byte",
            context=64,
            layout="packed",
            separator="\n\n",
            prompt_end="\n",
            ending="\n\n",
        ),
        optimizer=Optimizer(learning_rate=3e-3, warmup=50),
        steps=1000,
        batch=32,
        evaluation=Evaluation(every=250, batches=20),
        samples=Samples(every=500, prompts=("HAMLET\n",), tokens=100, temperature=0.8),
    )
