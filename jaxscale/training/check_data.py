"""A check, before a batch is read, that a model can be trained on the data."""

from typing import Any

from jaxscale.errors import UserError
from jaxscale.recipe.experiment import Experiment


def check_data(experiment: Experiment, data: Any) -> None:
    """Raise an error for data that the model cannot be trained on.

    Args:
        experiment: the experiment, with the model.
        data: the opened data.

    Raises:
        UserError: tokens beyond the vocabulary, prompts of samples that the tokenizer cannot encode, labels beyond
            the classes, images of another shape, or sequences longer than the model's positions.
    """
    tokenizer = getattr(data, "tokenizer", None)
    vocab, context = (getattr(experiment.model, name, None) for name in ("vocab", "context"))
    if tokenizer is not None and vocab is not None and tokenizer.size > vocab:
        raise UserError(
            f"the tokenizer has {tokenizer.size} tokens, but model.vocab is {vocab}: "
            f"set model.vocab to {tokenizer.size} or more"
        )
    if tokenizer is not None:
        for prompt in experiment.samples.prompts:
            try:
                has_tokens = len(tokenizer.encode(prompt)) > 0
            except UserError as error:
                raise UserError(f"samples.prompts: {prompt!r}: {error}") from None
            if not has_tokens:
                raise UserError(f"samples.prompts: {prompt!r} has no token: give text to continue, or no prompt")
    facts, classes = getattr(data, "facts", {}), getattr(experiment.model, "classes", None)
    if classes is not None and facts.get("classes", 0) > classes:
        raise UserError(
            f"the data has {facts['classes']} classes, but model.classes is {classes}: set it to {facts['classes']}"
        )
    image_size = getattr(experiment.model, "image", None)
    # a size of `None` in the model's shape accepts any size
    shape, model_shape = facts.get("shape"), (image_size, image_size, getattr(experiment.model, "channels", None))
    if shape is not None and any(other not in (None, size) for size, other in zip(shape, model_shape, strict=True)):
        data_text, model_text = (" x ".join(str(size or "any") for size in dims) for dims in (shape, model_shape))
        raise UserError(f"the images are {data_text}, but the model takes {model_text}: set its image and channels")
    data_context = getattr(experiment.data, "context", None)
    if context is not None and data_context is not None and data_context > context:
        raise UserError(
            f"data.context is {data_context}, but model.context is {context} positions: set data.context to {context}"
        )
