"""Generate text with a trained model: whole continuations, or pieces of text as the tokens are drawn."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from jaxscale.data.chat.chat_template import ChatTemplate
from jaxscale.errors import UserError
from jaxscale.generation.decode import Decoding, check_prompt
from jaxscale.generation.sampling import Sampling
from jaxscale.generation.text_model import TextModel, can_generate, check_can_generate, data_stops
from jaxscale.generation.text_stream import TextStream, check_stop_texts
from jaxscale.recipe.experiment import Experiment
from jaxscale.training.check_data import prompts_of

Encode = Callable[[str], np.ndarray]
"""A function that returns the ids of a prompt."""
_BURST = 8
"""Number of tokens that are drawn between two searches for stop texts."""


def generate(
    run: Any,
    prompt: str | Sequence[str],
    tokens: int = 200,
    *,
    best: bool = False,
    chat: bool | None = None,
    **settings: Any,
) -> Any:
    """Generate text after a prompt with the model of a run, or of a Hugging Face folder.

    A continuation ends after `tokens` tokens, or before a stop text or a stop id. There are also stops that need not be
    given: the ending of the data's documents (`data.Text(ending=)`), the end of an answer in the chat template, and the
    end-of-text tokens of a folder's model.

    Args:
        run: the run directory, or a folder that transformers saved.
        prompt: the text to continue, or several texts; each has at most as many tokens as the model has positions.
        tokens: largest number of tokens to generate for each prompt; it may exceed the model's positions.
        best: whether to take the checkpoint with the lowest held-out loss instead of the newest one.
        chat: whether to render each prompt by the chat template as a user message, and generate the answer. By default,
            that is true if the run was trained on chats, or the folder has a template.
        settings: `temperature`, `seed`, `top_k`, `top_p`, `min_p`, `stop`, `stop_ids` and `samples`, as in `Sampling`.

    Returns:
        The continuation without the prompt, or a list of continuations if `samples` is given; for several prompts, a
        list with one such result for each.

    Raises:
        UserError: the directory has no run or checkpoint, the model cannot generate text, a setting is not valid, a
            prompt is empty or too long, or the continuations need more memory than there is.

    Example:
        >>> generate("no/such/run", "To be")
        Traceback (most recent call last):
        jaxscale.errors.UserError: no/such/run holds no run: expected experiment.json there; give the directory of a run
    """
    return model_continuations(TextModel.open(run, best), prompt, make_sampling(tokens, settings), chat)


def stream(
    run: Any, prompt: str, tokens: int = 200, *, best: bool = False, chat: bool | None = None, **settings: Any
) -> Iterator[str]:
    """Generate text after a prompt with the model of a run, and yield pieces of the text as they are drawn.

    The pieces joined are the text that `generate` returns. A piece never ends within a character.

    Args:
        run, prompt, tokens, best, chat, settings: as in `generate`, with one prompt and one sample.

    Raises:
        UserError: as in `generate`.
    """
    return model_stream(TextModel.open(run, best), prompt, make_sampling(tokens, settings), chat)


def model_continuations(model: TextModel, prompt: str | Sequence[str], sampling: Sampling, chat: bool | None) -> Any:
    """Return the continuation of a prompt, or a list of the continuations of several prompts, as `generate` does."""
    rendered_prompt, encode = model.render_prompts(prompt, chat), functools.partial(model.encode, chat=chat)
    return continuations(model.generator, model.tokenizer, rendered_prompt, model.with_stops(sampling), encode)


def model_stream(model: TextModel, prompt: str, sampling: Sampling, chat: bool | None) -> Iterator[str]:
    """Return an iterator of the pieces of a prompt's continuation, as `stream` does."""
    rendered_prompt, encode = model.render_prompts(prompt, chat), functools.partial(model.encode, chat=chat)
    return stream_text(model.generator, model.tokenizer, rendered_prompt, model.with_stops(sampling), encode)


def make_sampling(tokens: int, settings: dict[str, Any]) -> Sampling:
    """Return the `Sampling` with these settings, or raise UserError for an unknown one."""
    names = {field.name for field in dataclasses.fields(Sampling)} - {"tokens"}
    for name in settings:
        if name not in names:
            from jaxscale.errors import unknown

            raise unknown("setting of generate", name, sorted(names))
    return Sampling(tokens, **settings)


def _encoded_prompts(
    generator: Any, tokenizer: Any, prompts: Sequence[str], sampling: Sampling, encode: Encode | None
) -> list[np.ndarray]:
    """Check the prompts and the stop texts, and return the int32 ids of each prompt."""
    check_can_generate(generator.model, tokenizer)
    check_stop_texts(tokenizer, sampling.stop)
    ids_by_prompt = []
    for prompt in prompts:
        prompt_ids = np.asarray((encode or tokenizer.encode)(prompt), np.int32)
        if not len(prompt_ids):
            raise UserError(f"prompt {prompt!r} has no tokens: give at least one character, such as a line break")
        check_prompt(generator.model, len(prompt_ids), f"prompt {_quoted_prompt(prompt)}")
        ids_by_prompt.append(prompt_ids)
    if not ids_by_prompt:
        raise UserError("prompt: got no prompts, expected one or more texts to continue")
    return ids_by_prompt


def _quoted_prompt(prompt: str) -> str:
    """Return the prompt, or its beginning, in quotes."""
    return repr(prompt if len(prompt) <= 40 else prompt[:37] + "...")


def continuations(
    generator: Any, tokenizer: Any, prompt: str | Sequence[str], sampling: Sampling, encode: Encode | None = None
) -> Any:
    """Return the continuation of a prompt, as `generate` does; several prompts are decoded together.

    Args:
        generator: the model and its parameters (`generation.generator.Generator`).
        tokenizer: tokenizer of the training data; `None` if the data is not text.
        prompt: the text to continue, or several texts, each of at least one token.
        sampling: what to draw.
        encode: function that returns the ids of a prompt; by default, that of the tokenizer.

    Raises:
        UserError: the model cannot generate text, or a prompt or a stop text is not valid.
    """
    prompts = (prompt,) if isinstance(prompt, str) else tuple(prompt)
    ids_by_prompt = _encoded_prompts(generator, tokenizer, prompts, sampling, encode)
    tokens_per_yield = _BURST if sampling.stop else None
    decoding = Decoding(generator, ids_by_prompt, sampling, id_limit=tokenizer.size, tokens_per_yield=tokens_per_yield)
    streams = [TextStream(tokenizer, sampling.stop) for _ in decoding.rows]
    for ids_by_row in decoding:
        if sampling.stop:
            for row_index, (row_stream, ids) in enumerate(zip(streams, ids_by_row, strict=True)):
                row_stream.push(ids)
                if row_stream.is_stopped:
                    decoding.stop(row_index)
    for row_stream, row in zip(streams, decoding.rows, strict=True):
        row_stream.push((), is_last=True) if sampling.stop else row_stream.push(row.drawn_ids, is_last=True)
    row_texts = [row_stream.text for row_stream in streams]
    continuations_by_prompt: list[Any] = row_texts
    if sampling.samples > 1:
        continuations_by_prompt = [
            row_texts[start : start + sampling.samples] for start in range(0, len(row_texts), sampling.samples)
        ]
    return continuations_by_prompt[0] if isinstance(prompt, str) else continuations_by_prompt


def stream_text(
    generator: Any, tokenizer: Any, prompt: str, sampling: Sampling, encode: Encode | None = None
) -> Iterator[str]:
    """Check the arguments, and return an iterator of the pieces of a prompt's continuation, as `stream` does."""
    if sampling.samples > 1 or not isinstance(prompt, str):
        raise UserError("stream: got several continuations, expected one prompt and one sample; call generate for more")
    ids_by_prompt = _encoded_prompts(generator, tokenizer, (prompt,), sampling, encode)
    decoding = Decoding(generator, ids_by_prompt, sampling, id_limit=tokenizer.size, tokens_per_yield=1)

    def pieces() -> Iterator[str]:
        text_stream = TextStream(tokenizer, sampling.stop)
        for (ids,) in decoding:
            piece = text_stream.push(ids)
            if piece:
                yield piece
            if text_stream.is_stopped:
                return
        last_piece = text_stream.push((), is_last=True)
        if last_piece:
            yield last_piece

    return pieces()


def draw_samples(
    experiment: Experiment, tokenizer: Any, get_generator: Callable[[], Any], template: ChatTemplate | None = None
) -> list[tuple[str, str]]:
    """Draw the samples that an experiment specifies, and return pairs of a prompt and its continuation.

    Args:
        experiment: the experiment; its `model`, `seed` and `samples` are used.
        tokenizer: tokenizer of the experiment's data; `None` if the data is not text.
        get_generator: function that returns the model with its parameters; called only if there is a sample to draw.
        template: chat template of the data, which renders each prompt as a user message; `None` if there is none.
    """
    settings = experiment.samples
    if not settings.prompts or not can_generate(experiment.model, tokenizer):
        return []
    prompts = prompts_of(experiment, tokenizer)
    sampling = Sampling(settings.tokens, settings.temperature, experiment.seed)
    stops = data_stops(experiment.data, tokenizer, template)
    model = TextModel(get_generator(), tokenizer, template, stops, experiment.name)
    return list(zip(prompts, model_continuations(model, prompts, sampling, None), strict=True))


def decode(
    generator: Any, ids_by_prompt: Sequence[np.ndarray], sampling: Sampling, *, id_limit: int | None = None
) -> list[np.ndarray]:
    """Draw tokens after each prompt.

    Args:
        generator: the model and its parameters (`generation.generator.Generator`).
        ids_by_prompt: int32 ids [length] of each prompt; lengths may differ, and are at least 1.
        sampling: what to draw; its stop texts are not used.
        id_limit: exclusive upper limit of the drawn ids; by default, the model's vocabulary size.

    Returns:
        For each sample of each prompt, the int32 ids that were drawn after it: `sampling.tokens` ids, or fewer up to a
        stop id.
    """
    decoding = Decoding(generator, ids_by_prompt, sampling, id_limit=id_limit)
    for _ in decoding:
        pass
    return [row.drawn_ids for row in decoding.rows]
