"""Sampling without a run: tokens from the user's own logits, and continuations from a function or a module.

A function has no cache, so each token costs a forward pass over the whole text. A module of `models.Decoder` decodes
with its cache, by the programs that `jaxscale generate` runs.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxscale.errors import UserError
from jaxscale.generation.decode import Decoding
from jaxscale.generation.draw import DrawKind, DrawSettings, draw, kind_of, settings_of
from jaxscale.generation.generator import Generator, row_keys
from jaxscale.generation.sampling import Sampling
from jaxscale.model_traits import ModelTraits
from jaxscale.typing import Array, Float, Int, Key

LogitsFunction = Callable[[Any, Int[Array, "B T"]], Float[Array, "B T V"]]
"""`logits(weights, tokens)` returns the logits of the token after each position, computed without later tokens."""


def sample(
    logits: Float[Array, "..."],
    key: Key,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
) -> Int[Array, "..."]:
    """Draw one token for each row of logits.

    The logits are divided by `temperature`; then `top_k`, `top_p` and `min_p` remove unlikely tokens, in this order.

    Args:
        logits: logits of the next token [..., V], of any float dtype.
        key: random key of the draws; each row gets a separate key.
        temperature: divisor of the logits, a Python number; 0 draws the most likely token.
        top_k: number of most likely tokens to draw from; `None` for all.
        top_p: draw from the fewest most likely tokens whose probabilities sum to `top_p` or more; `None` for all.
        min_p: draw from tokens with at least `min_p` times the probability of the most likely one; `None` for all.

    Returns:
        The ids of the drawn tokens, int32 [...]. The function may be called inside `jax.jit`.

    Raises:
        UserError: a setting is out of range, or the last dim of the logits is missing or empty.

    Example:
        >>> logits = jnp.log(jnp.array([[0.6, 0.3, 0.1], [0.1, 0.1, 0.8]]))
        >>> sample(logits, jax.random.key(0), temperature=0).tolist()
        [0, 2]
        >>> sample(logits, jax.random.key(0), top_k=1).tolist()
        [0, 2]

    References:
        Holtzman et al., "The Curious Case of Neural Text Degeneration", 2019 (https://arxiv.org/abs/1904.09751);
        Nguyen et al., "Turning Up the Heat: Min-p Sampling", 2024 (https://arxiv.org/abs/2407.01082).
    """
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    if not logits.ndim or not logits.shape[-1]:
        raise UserError(f"sample: got logits of shape {logits.shape}, expected the tokens as their last dim")
    logit_rows = jnp.reshape(logits, (-1, logits.shape[-1]))
    drawn_ids = draw(
        logit_rows,
        jax.random.split(key, len(logit_rows)),
        kind_of(sampling, logit_rows.shape[-1]),
        settings_of(sampling),
    )
    return jnp.reshape(drawn_ids, logits.shape[:-1])


def generate(model: Any, weights: Any, prompts: Sequence[Any], sampling: Sampling = Sampling()) -> list[np.ndarray]:
    """Continue prompts of tokens with the user's own function of logits, or with the module of a jaxscale model.

    Args:
        model: a function `logits(weights, tokens)` that maps int32 tokens [B, T] to the logits [B, T, V] of the token
            after each position, computed without later tokens; or a model value that decodes with a cache, such as a
            `models.Decoder`.
        weights: for a function, its first argument, any tree of arrays; for a model value, the model's module.
        prompts: ids of each prompt, at least one.
        sampling: how many tokens to draw, from which distribution, and the ids that end a text.

    Returns:
        int32 ids of each continuation, without its prompt and without the id that ended it. The `sampling.samples`
        continuations of the first prompt come first, then those of the second prompt, and so on. A draw depends only on
        the seed, the index of the prompt, the index of the sample, and the position.

    Raises:
        UserError: there are no prompts; a prompt is empty, is not a sequence of ids, or is longer than the model's
            context; or `sampling` has stop texts, which need a tokenizer.

    Example:
        >>> def logits(table, tokens):
        ...     return table[tokens]
        >>> successor = jnp.eye(5)[jnp.array([1, 2, 3, 4, 0])]
        >>> [ids.tolist() for ids in generate(logits, successor, [[0], [1, 2]], Sampling(tokens=3, temperature=0))]
        [[1, 2, 3], [3, 4, 0]]
    """
    if sampling.stop:
        raise UserError("generate: stop is a text, which needs a tokenizer: give the ids that end a text as stop_ids")
    prompt_ids = _checked_prompts(prompts)
    if isinstance(weights, nnx.Module):
        if not ModelTraits.of(model).generates:
            raise UserError(
                f"generate: got the model {type(model).__name__} with a module, expected one that decodes with a "
                "cache, such as Decoder; for another, give a function logits(weights, tokens) and the module's state"
            )
        decoding = Decoding(Generator(weights, model), prompt_ids, sampling)
        for _ in decoding:
            pass
        return [row.drawn_ids for row in decoding.rows]
    if not callable(model):
        raise UserError(
            f"generate: got {type(model).__name__}, expected a function logits(weights, tokens), or a model such as a "
            "Decoder with its module"
        )
    function: Any = model
    return _continue(function, weights, prompt_ids, sampling)


def _checked_prompts(prompts: Sequence[Any]) -> list[np.ndarray]:
    """Check that there are prompts and that none is empty, and return the ids of each one as int32 [T]."""
    if not len(prompts):
        raise UserError("prompts: got none, expected at least one list of ids")
    prompt_ids = []
    for index, prompt in enumerate(prompts):
        ids = np.asarray(prompt)
        if ids.ndim != 1 or not ids.size or not np.issubdtype(ids.dtype, np.integer):
            raise UserError(
                f"prompts[{index}]: got {prompt!r:.80}, expected a list of at least one id; a text is encoded by a "
                "tokenizer first"
            )
        prompt_ids.append(ids.astype(np.int32))
    return prompt_ids


def _continue(
    function: LogitsFunction, weights: Any, prompts: list[np.ndarray], sampling: Sampling
) -> list[np.ndarray]:
    """Draw each continuation from the logits of a function, and return the ids as `generate` describes them."""
    row_prompts = [prompt for prompt in prompts for _ in range(sampling.samples)]
    prompt_lengths = np.array([len(row_prompt) for row_prompt in row_prompts], np.int32)
    token_ids = np.zeros((len(row_prompts), prompt_lengths.max() + sampling.tokens), np.int32)
    for ids, row_prompt in zip(token_ids, row_prompts, strict=True):
        ids[: len(row_prompt)] = row_prompt
    prompt_and_sample_indices = [
        (prompt_index, sample_index) for prompt_index in range(len(prompts)) for sample_index in range(sampling.samples)
    ]
    keys = row_keys(sampling.seed, np.array(prompt_and_sample_indices, np.int32))
    logits_shape = jax.eval_shape(function, weights, token_ids).shape
    if len(logits_shape) != 3 or logits_shape[:2] != token_ids.shape:
        raise UserError(
            f"generate: the function returns {logits_shape} for tokens {token_ids.shape}, expected logits of "
            f"{(*token_ids.shape, 'V')}, those of the token after each position"
        )
    kind = kind_of(sampling, logits_shape[-1])
    token_ids, end_indices = _fill_rows(
        function, kind, weights, token_ids, prompt_lengths, keys, settings_of(sampling), sampling.tokens
    )
    return [
        ids[prompt_length:end_index]
        for ids, prompt_length, end_index in zip(
            np.asarray(token_ids), prompt_lengths, np.asarray(end_indices), strict=True
        )
    ]


@functools.partial(jax.jit, static_argnums=(0, 1, 7))
def _fill_rows(
    function: LogitsFunction,
    kind: DrawKind,
    weights: Any,
    padded_prompts: Int[Array, "B T"],
    prompt_lengths: Int[Array, "B"],
    keys: Any,
    settings: DrawSettings,
    token_count: int,
) -> tuple[Int[Array, "B T"], Int[Array, "B"]]:
    """Draw tokens after each prompt until a stop id; return (token ids of each row, end index of each row).

    A row ends at its end index: before it are the prompt and the drawn ids, without the stop id.
    """
    row_indices = jnp.arange(len(padded_prompts))

    def is_any_open(carry: Any) -> Any:
        """Return whether tokens remain to be drawn for some row."""
        step_index, _, _, is_done = carry
        return (step_index < token_count) & ~is_done.all()

    def add_tokens(carry: Any) -> Any:
        """Draw a token for each row that is not done."""
        step_index, token_ids, end_indices, is_done = carry
        positions = prompt_lengths + step_index - 1  # of the last token of each row
        logits = function(weights, token_ids)[row_indices, positions]
        drawn_ids = draw(logits, jax.vmap(jax.random.fold_in)(keys, positions), kind, settings)
        is_done = is_done | (drawn_ids[:, None] == settings.stop_ids[None, :]).any(-1)
        token_ids = token_ids.at[row_indices, positions + 1].set(jnp.where(is_done, 0, drawn_ids))
        return step_index + 1, token_ids, end_indices + ~is_done, is_done

    first_carry = (
        jnp.int32(0),
        jnp.asarray(padded_prompts),
        jnp.asarray(prompt_lengths),
        jnp.zeros(len(padded_prompts), bool),
    )
    _, token_ids, end_indices, _ = jax.lax.while_loop(is_any_open, add_tokens, first_carry)
    return token_ids, end_indices
