"""Text from a trained model: a KV cache, one compiled program that decodes a window in a scan, prompts of any lengths.

A window has as many positions as the model, or fewer where they suffice. When it is full and tokens are missing, its
newer half becomes the prompt of the next window: every token is drawn from at least half a window of preceding text,
and the model never sees a position that it was not trained on.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jaxscale.errors import UserError
from jaxscale.recipe.experiment import Experiment

_PREFILL = 16
"""Shorter prompts are fed token by token; of longer ones a power of two of their tokens at once."""


def generate(
    run: Any,
    prompt: str | Sequence[str],
    tokens: int = 200,
    *,
    temperature: float = 0.8,
    seed: int = 0,
    best: bool = False,
) -> Any:
    """Text that a run's model draws after a prompt.

    Args:
        run: the run directory.
        prompt: the text to continue, or several.
        tokens: number of tokens to add; beyond the model's positions, see the module's docstring.
        temperature: logits are divided by it; 0 takes the most likely token.
        seed: seed of the draws, which differ from prompt to prompt.
        best: take the checkpoint with the least held-out loss, not the newest.

    Returns:
        The continuation without the prompt; a list of them for several prompts.

    Raises:
        UserError: no run or checkpoint there, a model that does not generate, an empty prompt.
    """
    from jaxscale.checkpoint.restore import restore_parameters

    check(tokens, temperature, seed)
    restored = restore_parameters(run, best=best)
    model = restored.experiment.model
    tokenizer = restored.tokenizer()
    if not can_generate(model, tokenizer):
        raise UserError(
            f"{type(model).__name__} with this data does not generate text: that takes a KV cache and a tokenizer"
        )
    prompts = (prompt,) if isinstance(prompt, str) else tuple(prompt)
    module = restored.step.module(restored.state)
    texts = continuations(module, model, tokenizer, prompts, tokens=tokens, temperature=temperature, seed=seed)
    return texts[0] if isinstance(prompt, str) else texts


def check(tokens: int, temperature: float, seed: int = 0) -> None:
    """Refuse settings that are out of range.

    Raises:
        UserError: naming the setting.
    """
    if tokens < 1:
        raise UserError(f"tokens: got {tokens!r}, expected a whole number >= 1")
    if not (temperature >= 0 and temperature < float("inf")):
        raise UserError(f"temperature: got {temperature!r}, expected 0 (the most likely token) or more")
    if not -(2**31) <= seed < 2**31:
        raise UserError(f"seed: got {seed!r}, expected a whole number from -2**31 up to, not including, 2**31")


def can_generate(model: Any, tokenizer: Any) -> bool:
    """Whether the model has a cache for decoding, and the data a tokenizer."""
    return tokenizer is not None and hasattr(model, "init_cache")


def continuations(
    module: Any,
    model: Any,
    tokenizer: Any,
    prompts: Sequence[str],
    *,
    tokens: int,
    temperature: float = 0.8,
    seed: int = 0,
) -> list[str]:
    """A continuation of each prompt, all decoded together.

    Args:
        module: the model's module with its parameters.
        model: the model value.
        tokenizer: tokenizer of its training data.
        prompts: texts of at least one token.
        tokens: tokens to add to each.
        temperature: 0 is greedy.
        seed: seed of the draws.
    """
    sequences = []
    for prompt in prompts:
        ids = np.asarray(tokenizer.encode(prompt), np.int32)
        if not len(ids):
            raise UserError(f"prompt {prompt!r} has no token: give at least one character, such as a line break")
        sequences.append(ids)
    rows = decode(module, model, sequences, tokens=tokens, temperature=temperature, seed=seed, choices=tokenizer.size)
    return [tokenizer.decode(row) for row in rows]


def draw_samples(experiment: Experiment, tokenizer: Any, module: Callable[[], Any]) -> list[tuple[str, str]]:
    """The samples that an experiment specifies: prompt and continuation of each.

    Args:
        experiment: its model, seed and `samples` are read.
        tokenizer: tokenizer of its data.
        module: returns the model's module with its parameters; called only if there is a sample to draw.
    """
    samples = experiment.samples
    if not samples.prompts or not can_generate(experiment.model, tokenizer):
        return []
    texts = continuations(
        module(),
        experiment.model,
        tokenizer,
        samples.prompts,
        tokens=samples.tokens,
        temperature=samples.temperature,
        seed=experiment.seed,
    )
    return list(zip(samples.prompts, texts, strict=True))


def decode(
    module: Any,
    model: Any,
    prompts: Sequence[np.ndarray],
    *,
    tokens: int,
    temperature: float = 0.8,
    seed: int = 0,
    choices: int | None = None,
) -> list[np.ndarray]:
    """Tokens drawn after each prompt.

    Args:
        module: the model's module with its parameters.
        model: the model value: `context` positions, `init_cache`.
        prompts: int32 ids, of any lengths above 0.
        tokens: number of tokens to draw for each.
        temperature: 0 is greedy.
        seed: seed of the draws, which in row i at position p depend on seed, i and p alone.
        choices: ids below this may be drawn; all by default.

    Returns:
        int32 [tokens] for each prompt.
    """
    import jax
    from flax import nnx

    longest = max(len(prompt) for prompt in prompts)
    width = min(model.context, _power_of_two_from(longest + tokens - 1))
    sequences = [np.asarray(prompt, np.int32) for prompt in prompts]
    starts = [len(ids) for ids in sequences]
    graphdef, state = nnx.split(module)
    keys = jax.vmap(lambda row: jax.random.fold_in(jax.random.key(seed), row))(np.arange(len(sequences)))
    while any(len(ids) - start < tokens for ids, start in zip(sequences, starts, strict=True)):
        # a full window keeps its newer half
        prefixes = [ids if len(ids) < width else ids[-max(width // 2, 1) :] for ids in sequences]
        window = np.zeros((len(prefixes), width), np.int32)
        for row, ids in zip(window, prefixes, strict=True):
            row[: len(ids)] = ids
        lengths = np.array([len(ids) for ids in prefixes], np.int32)
        offsets = np.array([len(ids) for ids in sequences], np.int32) - lengths
        shortest = int(lengths.min())
        prefill = 0 if shortest <= _PREFILL else 1 << ((shortest - 1).bit_length() - 1)
        draws = _window(
            graphdef, state, model, window, lengths, offsets, keys, float(temperature), prefill, choices or model.vocab
        )
        sequences = [
            np.concatenate([ids, row[length - 1 :]]) for ids, row, length in zip(sequences, draws, lengths, strict=True)
        ]
    return [ids[start : start + tokens] for ids, start in zip(sequences, starts, strict=True)]


def _power_of_two_from(count: int) -> int:
    return 1 << max(count - 1, 0).bit_length()


@functools.cache
def _program() -> Any:
    import jax
    import jax.numpy as jnp
    from flax import nnx

    from jaxscale.blocks import Context

    def draw(logits: Any, keys: Any, temperature: Any, choices: int) -> Any:
        logits = logits[:, :choices].astype(jnp.float32)
        top_tokens = jnp.argmax(logits, axis=-1)
        draws = jax.vmap(jax.random.categorical)(keys, logits / jnp.maximum(temperature, 1e-6))
        return jnp.where(temperature > 0, draws, top_tokens).astype(jnp.int32)

    @functools.partial(jax.jit, static_argnums=(0, 2, 8, 9))
    def window(
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
        """Row i, position t: the token at t + 1; the prompt's where t + 1 < lengths[i], else drawn."""
        module = nnx.merge(graphdef, state, copy=True)
        rows, width = prompts.shape
        context = Context()
        cache = model.init_cache(rows, width, jax.tree.leaves(nnx.state(module, nnx.Param))[0].dtype)
        if prefill:
            _, cache = module(prompts[:, :prefill], cache=cache, context=context)

        def decode_position(carry: Any, position: Any) -> Any:
            cache, previous = carry
            token = jnp.where(position < lengths, prompts[:, position], previous)
            logits, cache = module(token[:, None], cache=cache, context=context)
            row_keys = jax.vmap(jax.random.fold_in)(keys, offsets + position)
            next_token = draw(logits[:, -1], row_keys, temperature, choices)
            return (cache, next_token), next_token

        _, draws = jax.lax.scan(decode_position, (cache, jnp.zeros(rows, jnp.int32)), jnp.arange(prefill, width))
        draws = jnp.concatenate([jnp.zeros((prefill, rows), jnp.int32), draws])
        return draws.T

    return window


def _window(*arguments: Any) -> np.ndarray:
    import jax

    tokens = _program()(*arguments)
    if jax.process_count() > 1:
        from jax.experimental import multihost_utils

        return np.asarray(multihost_utils.process_allgather(tokens, tiled=True))
    return np.asarray(tokens)
