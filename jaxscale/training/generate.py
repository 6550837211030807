"""Generate text with a trained model, using a KV cache and one compiled program that decodes a window in a scan.

A window has as many positions as the model's context, or fewer if they suffice. When a window is full and more tokens
are to be drawn, its newer half becomes the prompt of the next window. So every later token is drawn from at least half
a window of preceding text, and the model never runs at a position that it was not trained on.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jaxscale.errors import UserError
from jaxscale.model_traits import ModelTraits
from jaxscale.recipe.experiment import Experiment
from jaxscale.training.check_data import prompts_of

_LONGEST_STEPWISE = 16
"""Largest number of tokens in a prompt that is fed one token at a time.

Of a longer prompt, the first tokens are fed at once: as many as the largest power of two below the prompt's length.
"""


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How the tokens after a prompt are drawn.

    Args:
        tokens: number of tokens to draw for each prompt.
        temperature: divisor of the logits; 0 draws the most likely token.
        seed: seed of the draws; the random draw for prompt number i at position p uses only the seed, i and p.
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
            raise UserError(f"seed: got {self.seed!r}, expected a whole number from -2**31 to 2**31 - 1")


def generate(
    run: Any,
    prompt: str | Sequence[str],
    tokens: int = 200,
    *,
    temperature: float = 0.8,
    seed: int = 0,
    best: bool = False,
) -> Any:
    """Generate text after a prompt with the model of a run.

    Args:
        run: the run directory.
        prompt: the text to continue, or several texts.
        tokens: number of tokens to generate for each prompt; it may exceed the model's context.
        temperature: divisor of the logits; 0 draws the most likely token.
        seed: seed of the draws, which differ from prompt to prompt.
        best: whether to take the checkpoint with the lowest held-out loss instead of the newest one.

    Returns:
        The continuation without the prompt; for several prompts, a list of continuations.

    Raises:
        UserError: the directory has no run or checkpoint, the model cannot generate text, or a prompt is empty.
    """
    from jaxscale.checkpoint.restore import read_tokenizer, restore_parameters

    sampling = Sampling(tokens, temperature, seed)
    trained_run = restore_parameters(run, best=best)
    module = trained_run.step.module(trained_run.state)
    return continuations(module, trained_run.experiment.model, read_tokenizer(run), prompt, sampling)


def can_generate(model: Any, tokenizer: Any) -> bool:
    """Return whether the model has a KV cache for decoding, and the tokenizer is not `None`."""
    return tokenizer is not None and ModelTraits.of(model).generates


def check_can_generate(model: Any, tokenizer: Any) -> None:
    """Raise UserError for a model without a KV cache for decoding, or data without a tokenizer."""
    if not can_generate(model, tokenizer):
        raise UserError(
            f"{type(model).__name__} with this data cannot generate text: that needs a KV cache and a tokenizer"
        )


def continuations(
    module: Any, model: Any, tokenizer: Any, prompt: str | Sequence[str], sampling: Sampling
) -> str | list[str]:
    """Return the continuation of a prompt; for several prompts, decode them together and return a list.

    Args:
        module: the model's module with its parameters.
        model: the experiment's `model`.
        tokenizer: tokenizer of the training data; `None` if the data is not text.
        prompt: the text to continue, or several texts, each of at least one token.
        sampling: number of tokens, temperature and seed.

    Raises:
        UserError: the model cannot generate text, or a prompt is empty.
    """
    check_can_generate(model, tokenizer)
    encoded_prompts = []
    for prompt_text in (prompt,) if isinstance(prompt, str) else prompt:
        prompt_ids = np.asarray(tokenizer.encode(prompt_text), np.int32)
        if not len(prompt_ids):
            raise UserError(f"prompt {prompt_text!r} has no tokens: give at least one character, such as a line break")
        encoded_prompts.append(prompt_ids)
    encoded_continuations = decode(module, model, encoded_prompts, sampling, choice_count=tokenizer.size)
    texts = [tokenizer.decode(ids) for ids in encoded_continuations]
    return texts[0] if isinstance(prompt, str) else texts


def draw_samples(experiment: Experiment, tokenizer: Any, get_module: Callable[[], Any]) -> list[tuple[str, str]]:
    """Draw the samples that an experiment specifies, and return pairs of a prompt and its continuation.

    Args:
        experiment: the experiment; its `model`, `seed` and `samples` are used.
        tokenizer: tokenizer of the experiment's data; `None` if the data is not text.
        get_module: returns the model's module with its parameters; called only if there is a sample to draw.
    """
    settings = experiment.samples
    if not settings.prompts or not can_generate(experiment.model, tokenizer):
        return []
    prompts = prompts_of(experiment, tokenizer)
    sampling = Sampling(settings.tokens, settings.temperature, experiment.seed)
    continuation_texts = continuations(get_module(), experiment.model, tokenizer, prompts, sampling)
    return list(zip(prompts, continuation_texts, strict=True))


def decode(
    module: Any, model: Any, prompts: Sequence[np.ndarray], sampling: Sampling, *, choice_count: int | None = None
) -> list[np.ndarray]:
    """Draw tokens after each prompt.

    Args:
        module: the model's module with its parameters.
        model: the experiment's `model`, which has `context` and `init_cache`.
        prompts: int32 ids [length] of each prompt; lengths may differ, and are at least 1.
        sampling: number of tokens, temperature and seed.
        choice_count: exclusive upper limit of the drawn ids; by default, the model's vocabulary size.

    Returns:
        For each prompt, the int32 ids [sampling.tokens] that were drawn after it.
    """
    import jax
    from flax import nnx

    longest_length = max(len(prompt) for prompt in prompts)
    # number of positions in a window: the smallest power of two that suffices
    width = min(model.context, 1 << (longest_length + sampling.tokens - 2).bit_length())
    # for each prompt, its ids and those drawn so far; the last window may draw a few too many
    sequences = [np.asarray(prompt, np.int32) for prompt in prompts]
    final_lengths = [len(ids) + sampling.tokens for ids in sequences]
    graphdef, state = nnx.split(module)
    keys = jax.vmap(lambda row: jax.random.fold_in(jax.random.key(sampling.seed), row))(np.arange(len(sequences)))
    temperature, id_count = float(sampling.temperature), choice_count or model.vocab
    while any(len(ids) < length for ids, length in zip(sequences, final_lengths, strict=True)):
        # of a full window, the newer half is kept
        window_prompts = [ids if len(ids) < width else ids[-max(width // 2, 1) :] for ids in sequences]
        window = np.zeros((len(window_prompts), width), np.int32)
        for window_row, ids in zip(window, window_prompts, strict=True):
            window_row[: len(ids)] = ids
        lengths = np.array([len(ids) for ids in window_prompts], np.int32)
        offsets = np.array([len(ids) for ids in sequences], np.int32) - lengths
        shortest_length = int(lengths.min())
        prefill_count = 0 if shortest_length <= _LONGEST_STEPWISE else 1 << ((shortest_length - 1).bit_length() - 1)
        inputs = (graphdef, state, model, window, lengths, offsets, keys, temperature, prefill_count, id_count)
        draws = _window_program()(*inputs)
        if jax.process_count() > 1:
            from jax.experimental import multihost_utils

            draws = multihost_utils.process_allgather(draws, tiled=True)
        sequences = [
            np.concatenate([ids, row_draws[length - 1 :]])
            for ids, row_draws, length in zip(sequences, np.asarray(draws), lengths, strict=True)
        ]
    return [ids[length - sampling.tokens : length] for ids, length in zip(sequences, final_lengths, strict=True)]


@functools.cache
def _window_program() -> Any:
    """Return the compiled function `decode_window`."""
    import jax
    import jax.numpy as jnp
    from flax import nnx

    from jaxscale.blocks import Context

    def draw(logits: Any, keys: Any, temperature: Any, choice_count: int) -> Any:
        """Draw int32 tokens [rows] below `choice_count`, by the logits [rows, V] and the random keys [rows]."""
        choice_logits = logits[:, :choice_count].astype(jnp.float32)
        top_tokens = jnp.argmax(choice_logits, axis=-1)
        random_tokens = jax.vmap(jax.random.categorical)(keys, choice_logits / jnp.maximum(temperature, 1e-6))
        return jnp.where(temperature > 0, random_tokens, top_tokens).astype(jnp.int32)

    @functools.partial(jax.jit, static_argnums=(0, 2, 8, 9))
    def decode_window(
        graphdef: Any,
        state: Any,
        model: Any,
        window: Any,
        lengths: Any,
        offsets: Any,
        keys: Any,
        temperature: Any,
        prefill_count: int,
        choice_count: int,
    ) -> Any:
        """Draw the tokens of a window after its prompts.

        Args:
            graphdef: definition of the module, from `nnx.split`.
            state: the module's parameters, from `nnx.split`.
            model: the experiment's `model`.
            window: int32 [rows, width], the ids of a prompt at the start of each row.
            lengths: int32 [rows], number of ids of each prompt in the window.
            offsets: int32 [rows], number of ids of each sequence before the window.
            keys: [rows], a random key for each row.
            temperature: divisor of the logits; 0 draws the most likely token.
            prefill_count: number of positions at the start of the window that are fed at once.
            choice_count: exclusive upper limit of the drawn ids.

        Returns:
            int32 [rows, width]: at position t, the token drawn for position t + 1. The caller uses this token only if
            the prompt ends before position t + 1.
        """
        module = nnx.merge(graphdef, state, copy=True)
        row_count, width = window.shape
        context = Context()
        cache = model.init_cache(row_count, width, jax.tree.leaves(nnx.state(module, nnx.Param))[0].dtype)
        if prefill_count:
            _, cache = module(window[:, :prefill_count], cache=cache, context=context)

        def decode_position(carry: Any, position: Any) -> Any:
            """Feed the tokens at a position, and draw the next ones; the carry is the cache and drawn tokens [rows]."""
            cache, drawn_tokens = carry
            tokens = jnp.where(position < lengths, window[:, position], drawn_tokens)
            logits, cache = module(tokens[:, None], cache=cache, context=context)
            position_keys = jax.vmap(jax.random.fold_in)(keys, offsets + position)
            next_tokens = draw(logits[:, -1], position_keys, temperature, choice_count)
            return (cache, next_tokens), next_tokens

        first_carry = cache, jnp.zeros(row_count, jnp.int32)
        _, draws = jax.lax.scan(decode_position, first_carry, jnp.arange(prefill_count, width))
        return jnp.concatenate([jnp.zeros((prefill_count, row_count), jnp.int32), draws]).T

    return decode_window
