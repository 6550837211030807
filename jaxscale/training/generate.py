"""Text from a trained model, by a KV cache and one compiled program that decodes a window in a scan.

A window has as many positions as the model, or fewer if they suffice. When it is full and tokens are missing, its
newer half becomes the prompt of the next window: every token is drawn from at least half a window of preceding text,
and the model never sees a position that it was not trained on.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jaxscale.errors import UserError
from jaxscale.recipe.experiment import Experiment

_PREFILL = 16
"""Prompts up to this length are fed token by token; of a longer prompt, a power of two of tokens is fed at once."""


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How the tokens after a prompt are drawn.

    Args:
        tokens: number of tokens to draw for each prompt.
        temperature: number that logits are divided by; 0 draws the most likely token.
        seed: seed of the draws; the draw in row i at position p depends on the seed, i and p alone.
    """

    tokens: int = 200
    temperature: float = 0.8
    seed: int = 0

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise UserError(f"tokens: got {self.tokens!r}, expected a whole number >= 1")
        if not 0 <= self.temperature < float("inf"):
            raise UserError(f"temperature: got {self.temperature!r}, expected 0 (the most likely token) or more")
        if not -(2**31) <= self.seed < 2**31:
            raise UserError(f"seed: got {self.seed!r}, expected a whole number from -2**31 up to, not including, 2**31")


def generate(
    run: Any,
    prompt: str | Sequence[str],
    tokens: int = 200,
    *,
    temperature: float = 0.8,
    seed: int = 0,
    best: bool = False,
) -> Any:
    """Text that a run's model generates after a prompt.

    Args:
        run: the run directory.
        prompt: the text to continue, or several texts.
        tokens: number of tokens to generate; they may exceed the model's positions.
        temperature: number that logits are divided by; 0 draws the most likely token.
        seed: seed of the draws, which differ from prompt to prompt.
        best: take the checkpoint with the least held-out loss, not the newest.

    Returns:
        The continuation without the prompt; a list of continuations for several prompts.

    Raises:
        UserError: the directory has no run or checkpoint, the model does not generate, or a prompt is empty.
    """
    from jaxscale.checkpoint.restore import read_tokenizer, restore_parameters

    sampling = Sampling(tokens, temperature, seed)
    trained = restore_parameters(run, best=best)
    module = trained.step.module(trained.state)
    return continuations(module, trained.experiment.model, read_tokenizer(run), prompt, sampling)


def can_generate(model: Any, tokenizer: Any) -> bool:
    """Whether the model has a cache for decoding, and its data has a tokenizer."""
    return tokenizer is not None and hasattr(model, "init_cache")


def check_generates(model: Any, tokenizer: Any) -> None:
    """Raise UserError for a model without a cache for decoding, or data without a tokenizer."""
    if not can_generate(model, tokenizer):
        raise UserError(
            f"{type(model).__name__} with this data cannot generate text: it needs a KV cache and a tokenizer"
        )


def continuations(
    module: Any, model: Any, tokenizer: Any, prompt: str | Sequence[str], sampling: Sampling
) -> str | list[str]:
    """The continuation of a prompt, or of each of several prompts, which are decoded together.

    Args:
        module: the model's module with its parameters.
        model: the model value.
        tokenizer: tokenizer of its training data; `None` if they are not text.
        prompt: the text to continue, or several texts, each of at least one token.
        sampling: number of tokens, temperature and seed.

    Raises:
        UserError: the model does not generate, or a prompt is empty.
    """
    check_generates(model, tokenizer)
    sequences = []
    for text in (prompt,) if isinstance(prompt, str) else prompt:
        ids = np.asarray(tokenizer.encode(text), np.int32)
        if not len(ids):
            raise UserError(f"prompt {text!r} has no token: give at least one character, such as a line break")
        sequences.append(ids)
    texts = [tokenizer.decode(ids) for ids in decode(module, model, sequences, sampling, choices=tokenizer.size)]
    return texts[0] if isinstance(prompt, str) else texts


def draw_samples(experiment: Experiment, tokenizer: Any, module: Callable[[], Any]) -> list[tuple[str, str]]:
    """Draw the samples that an experiment specifies, and return pairs of a prompt and its continuation.

    Args:
        experiment: the experiment, of which `model`, `seed` and `samples` are used.
        tokenizer: tokenizer of its data.
        module: function that returns the model's module with its parameters; called only if there is a sample to draw.
    """
    samples = experiment.samples
    if not samples.prompts or not can_generate(experiment.model, tokenizer):
        return []
    sampling = Sampling(samples.tokens, samples.temperature, experiment.seed)
    texts = continuations(module(), experiment.model, tokenizer, samples.prompts, sampling)
    return list(zip(samples.prompts, texts, strict=True))


def decode(
    module: Any, model: Any, prompts: Sequence[np.ndarray], sampling: Sampling, *, choices: int | None = None
) -> list[np.ndarray]:
    """Draw tokens after each prompt.

    Args:
        module: the model's module with its parameters.
        model: the model value, with `context` and `init_cache`.
        prompts: int32 ids of each prompt, of any lengths above 0.
        sampling: number of tokens, temperature and seed.
        choices: number of ids that may be drawn, from 0 on; all by default.

    Returns:
        int32 ids [tokens] for each prompt.
    """
    import jax
    from flax import nnx

    longest_length = max(len(prompt) for prompt in prompts)
    # positions of a window: the least power of two that suffices
    width = min(model.context, 1 << (longest_length + sampling.tokens - 2).bit_length())
    sequences = [np.asarray(prompt, np.int32) for prompt in prompts]
    final_lengths = [len(ids) + sampling.tokens for ids in sequences]
    graphdef, state = nnx.split(module)
    keys = jax.vmap(lambda row: jax.random.fold_in(jax.random.key(sampling.seed), row))(np.arange(len(sequences)))
    temperature = float(sampling.temperature)
    while any(len(ids) < end for ids, end in zip(sequences, final_lengths, strict=True)):
        # a full window keeps its newer half
        prefixes = [ids if len(ids) < width else ids[-max(width // 2, 1) :] for ids in sequences]
        window = np.zeros((len(prefixes), width), np.int32)
        for row, ids in zip(window, prefixes, strict=True):
            row[: len(ids)] = ids
        lengths = np.array([len(ids) for ids in prefixes], np.int32)
        offsets = np.array([len(ids) for ids in sequences], np.int32) - lengths
        shortest = int(lengths.min())
        prefill = 0 if shortest <= _PREFILL else 1 << ((shortest - 1).bit_length() - 1)
        draws = _program()(
            graphdef, state, model, window, lengths, offsets, keys, temperature, prefill, choices or model.vocab
        )
        if jax.process_count() > 1:
            from jax.experimental import multihost_utils

            draws = multihost_utils.process_allgather(draws, tiled=True)
        rows = zip(sequences, np.asarray(draws), lengths, strict=True)
        sequences = [np.concatenate([ids, row[length - 1 :]]) for ids, row, length in rows]
    return [ids[end - sampling.tokens : end] for ids, end in zip(sequences, final_lengths, strict=True)]


@functools.cache
def _program() -> Any:
    """The compiled program that decodes a window."""
    import jax
    import jax.numpy as jnp
    from flax import nnx

    from jaxscale.blocks import Context

    def draw(logits: Any, keys: Any, temperature: Any, choices: int) -> Any:
        """Tokens drawn for each row from the first `choices` ids."""
        logits = logits[:, :choices].astype(jnp.float32)
        top_tokens = jnp.argmax(logits, axis=-1)
        draws = jax.vmap(jax.random.categorical)(keys, logits / jnp.maximum(temperature, 1e-6))
        return jnp.where(temperature > 0, draws, top_tokens).astype(jnp.int32)

    @functools.partial(jax.jit, static_argnums=(0, 2, 8, 9))
    def decode_window(
        graphdef: Any,
        state: Any,
        model: Any,
        prompts: Any,
        lengths: Any,
        offsets: Any,
        keys: Any,
        temperature: Any,
        prefill: int,
        choices: int,
    ) -> Any:
        """int32 [rows, width]: in row i at position t, the token drawn for t + 1, of use if t + 1 >= lengths[i]."""
        module = nnx.merge(graphdef, state, copy=True)
        rows, width = prompts.shape
        context = Context()
        cache = model.init_cache(rows, width, jax.tree.leaves(nnx.state(module, nnx.Param))[0].dtype)
        if prefill:
            _, cache = module(prompts[:, :prefill], cache=cache, context=context)

        def decode_position(carry: Any, position: Any) -> Any:
            """Feed the token at a position, and draw the next one."""
            cache, previous = carry
            token = jnp.where(position < lengths, prompts[:, position], previous)
            logits, cache = module(token[:, None], cache=cache, context=context)
            row_keys = jax.vmap(jax.random.fold_in)(keys, offsets + position)
            next_token = draw(logits[:, -1], row_keys, temperature, choices)
            return (cache, next_token), next_token

        _, draws = jax.lax.scan(decode_position, (cache, jnp.zeros(rows, jnp.int32)), jnp.arange(prefill, width))
        draws = jnp.concatenate([jnp.zeros((prefill, rows), jnp.int32), draws])
        return draws.T

    return decode_window
