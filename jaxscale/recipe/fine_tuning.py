"""fine_tuning: the experiment that fine-tunes a model in a Hugging Face folder on chats, with common settings."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxscale.data.chat.chats import Chats
from jaxscale.errors import UserError
from jaxscale.model_traits import ModelTraits
from jaxscale.models.huggingface import Pretrained
from jaxscale.models.lora import LoRA
from jaxscale.optim.optimizer import Optimizer
from jaxscale.platforms.detect import accelerators
from jaxscale.recipe.experiment import Checkpointing, Evaluation, Experiment, Samples
from jaxscale.recipe.plan import Plan

MAX_CONTEXT = 1024
"""Longest context that is chosen by default. A longer context needs more memory, so the user has to request it."""
LEARNING_RATE, LORA_LEARNING_RATE = 2e-5, 2e-4
"""Peak learning rates: for all parameters as in Alpaca, for adapters as in QLoRA (Dettmers et al. 2023, table 9)."""
EPOCHS = 3.0
_EVALUATIONS = 4


def fine_tuning(
    folder: str | Path,
    chats: str | Path | Sequence[str | Path],
    *,
    held_out: str | Path | Sequence[str | Path] | None = None,
    lora: int | None = None,
    epochs: float | None = None,
    steps: int | None = None,
    batch: int = 8,
    context: int | None = None,
) -> Experiment:
    """Return the experiment that fine-tunes the model in a Hugging Face folder on chats. The loss counts answers only.

    The chats are read and encoded here, because the number of steps depends on them. The held-out loss is measured
    before the first step, and after each quarter of the run. Accelerators compute in bfloat16. To change a setting, use
    `dataclasses.replace` or `jx.override` on the result.

    Args:
        folder: folder with config.json, safetensors, tokenizer.json and a chat template.
        chats: JSONL file of chats, a glob, or a sequence of these. `data.Chats` describes the formats of a row.
        held_out: files of the chats to evaluate, in the same format; `None` holds out the last tenth of `chats`.
        lora: rank of the adapters; only the adapters are trained. `None` trains all parameters.
        epochs: number of passes over the chats, 3 by default.
        steps: number of updates, instead of `epochs`.
        batch: number of rows of the global batch.
        context: number of tokens per row. By default, it is the length of the longest chat, rounded up to a multiple of
            64, but at most 1,024, and at most the context of the model.

    Raises:
        UserError: a file is not as described, the folder's model is not a language model, or a number is out of range.

    References:
        Dettmers et al. 2023, "QLoRA: Efficient Finetuning of Quantized LLMs", for the learning rate of adapters.
    """
    if epochs is not None and (steps is not None or not 0 < epochs < float("inf")):
        expected_text = "steps or epochs, not both" if steps is not None else "a number above 0"
        raise UserError(f"epochs: got {epochs}, expected {expected_text}")
    pretrained = Pretrained(folder)
    model = pretrained if lora is None else LoRA(pretrained, rank=lora)
    traits = ModelTraits.of(pretrained)
    if not traits.generates or traits.context is None:
        architecture = type(pretrained.model).__name__
        raise UserError(
            f"{folder} holds a {architecture}, which reads no chats: expected a language model. Train it from an "
            "experiment file, with models.Pretrained and data of its own"
        )
    chat_paths, held_out_paths = _path_or_paths(chats), None if held_out is None else _path_or_paths(held_out)
    data = Chats(chat_paths, folder, context or min(MAX_CONTEXT, traits.context), held_out_path=held_out_paths)
    facts = data.open(batch, 0).facts
    vocab = traits.vocab
    if vocab is not None and facts["vocabulary"] > vocab:
        raise UserError(
            f"{folder}: tokenizer.json has {facts['vocabulary']} tokens, but the model {vocab}: resize its embeddings "
            "with transformers (resize_token_embeddings), or remove the tokens that were added"
        )
    if context is None:
        fitting_context = -(-(facts["longest"] - 1) // 64) * 64
        data = Chats(chat_paths, folder, max(1, min(data.context, fitting_context)), held_out_path=held_out_paths)
        facts = data.open(batch, 0).facts
    if steps is None:
        steps = max(1, round((EPOCHS if epochs is None else epochs) * facts["rows"] / batch))
    learning_rate = LEARNING_RATE if lora is None else LORA_LEARNING_RATE
    return Experiment(
        name=f"{Path(folder).resolve().name or 'folder'}-{'tuned' if lora is None else f'lora{lora}'}",
        model=model,
        data=data,
        optimizer=Optimizer(learning_rate=learning_rate, warmup=min(100, steps // 20), weight_decay=0.0),
        steps=steps,
        batch=batch,
        evaluation=Evaluation(every=max(1, steps // _EVALUATIONS), batches=100, at_start=True),
        samples=Samples(prompts=()),
        checkpoint=Checkpointing(every=0, keep=1),
        plan=Plan(precision="bfloat16") if accelerators() else Plan(),
    )


def _path_or_paths(paths: Any) -> Any:
    """Return a single path unchanged; return several paths as a tuple."""
    return paths if isinstance(paths, str | Path) else tuple(paths)
