"""The compiled programs of generation: `prefill` feeds the prompts, `advance` draws one token after another.

Prompts of unequal lengths share a prefill, padded to the right; a row's own positions go on from its own length, in the
slots that follow the longest prompt. The number of steps of `advance` is an argument, not a shape, and its loop ends
early when every row has drawn a stop id. So one pair of programs serves every number of tokens that fits in the cache,
and streaming runs the same programs as a call for the whole text.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jaxscale import blocks
from jaxscale.blocks import Context
from jaxscale.generation.draw import DrawKind, DrawSettings, draw
from jaxscale.generation.unrolled import Paths, merge_unrolled
from jaxscale.layers.layer_group import restack, unstack
from jaxscale.sharding import place
from jaxscale.sharding.place import MeshAndRules, constrain

CHUNK = 1024
"""Largest number of positions of a prompt that are fed at once; more are fed in chunks of equal size."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodingRows:
    """The rows of a batch between two steps.

    Args:
        cache: the `KVCache` of all layers and rows, or a tuple with one for each layer, of which only the first has
            positions, `valid` and the length.
        tokens: int32 [B], the newest token of each row, which is not in the cache yet.
        positions: int32 [B], the position of that token in its window.
        is_done: bool [B], whether the row has drawn a stop id.
    """

    cache: Any
    tokens: Any
    positions: Any
    is_done: Any


class RowKeys(NamedTuple):
    """What determines the random draws of each row besides the seed.

    Args:
        keys: a random key for each row, [B]; `None` if every draw takes the most likely token.
        offsets: int32 [B], number of tokens of the text before the window.
    """

    keys: Any
    offsets: Any


class Programs(NamedTuple):
    """The functions `prefill` and `advance`, compiled for each shape at its first use.

    Args:
        prefill: `prefill(params, prompts, lengths, row_keys, settings, slots=, copies=)` returns the `DecodingRows`
            after the first draw.
        advance: `advance(params, rows, row_keys, settings, step_count)` returns the rows after at most `step_count`
            draws, and the drawn ids int32 [slots, B], with -1 where nothing was drawn.
    """

    prefill: Callable[..., DecodingRows]
    advance: Callable[..., tuple[DecodingRows, Any]]


def padded_length(count: int) -> int:
    """Return a number of positions, rounded up to one of few values: by at most 15 or an eighth.

    Example:
        >>> [padded_length(count) for count in (1, 40, 130, 1025)]
        [16, 48, 144, 1152]
    """
    step = max(16, 1 << max((count - 1).bit_length() - 4, 0))
    return -(-count // step) * step


def chunk_sizes(longest_length: int, context: int) -> tuple[int, int]:
    """Return (number of chunks, positions in each) for prompts of at most `longest_length` ids."""
    count = -(-longest_length // CHUNK)
    if count == 1:
        return 1, min(padded_length(longest_length), context)
    return count, -(-padded_length(longest_length) // count)


@functools.lru_cache(maxsize=32)
def programs(
    graphdef: Any,
    model: Any,
    context: Context,
    layout: MeshAndRules | None,
    dtype: Any,
    kind: DrawKind,
    paths: Paths,
) -> Programs:
    """Return the programs of a model.

    Args:
        graphdef: definition of the module, from `nnx.split`.
        model: the model value, which has `context` and `init_cache`.
        context: context of the forward pass.
        layout: the mesh and the rules that place rows and caches; `None` for one device.
        dtype: type of the cached keys and values: the one that the model computes in.
        kind: static settings of the draws.
        paths: paths of the layers that `advance` takes one by one (`unrolled.stack_paths`); `()` scans over them.
    """

    def traced(function: Callable[..., Any], **settings: Any) -> Any:
        """Return the jitted function, traced under the layout."""

        @functools.wraps(function)
        def run(*arguments: Any, **named: Any) -> Any:
            with contextlib.nullcontext() if layout is None else place.layout(*layout):
                return function(*arguments, **named)

        return jax.jit(run, **settings)

    def carried(cache: Any) -> Any:
        """Return the cache as the loop carries it: a tuple with a cache for each layer, or one for all layers."""
        if not paths:
            return _placed(cache)
        layer_caches = [_placed(layer_cache) for layer_cache in unstack(cache, cache.length.shape[0])]
        if layout is None or layout[0].size == 1:  # two dims that axes may shard cannot be one
            layer_caches = [layer_cache.with_heads_as_rows() for layer_cache in layer_caches]
        return with_slots_once(layer_caches)

    def prefill(
        params: Any, prompts: Any, lengths: Any, row_keys: RowKeys, settings: DrawSettings, *, slots: int, copies: int
    ) -> DecodingRows:
        """Feed the prompts, int32 [chunks, R, T], and draw the first token of each of R * copies rows."""
        module = nnx.merge(graphdef, params, copy=True)
        chunk_count, prompt_count, chunk_length = prompts.shape
        cache = _placed(model.init_cache(prompt_count, slots, dtype))
        starts = jnp.arange(chunk_count, dtype=jnp.int32) * chunk_length

        def fed(tokens: Any, start: Any, cache: Any) -> tuple[Any, Any]:
            """Return the states after a chunk of tokens [R, T], and the cache with them."""
            positions = start + jnp.arange(chunk_length, dtype=jnp.int32)[None, :]
            settings = {
                "positions": jnp.minimum(positions, model.context - 1),
                "segments": (positions < lengths[:, None]).astype(jnp.int32),
                "context": context,
            }
            states, cache = _states(module, tokens, cache=cache, **settings)
            return states, _placed(cache)

        def feed(carry: Any, inputs: Any) -> tuple[Any, None]:
            """Feed a chunk; the carry is the cache and the state after the last token of each prompt."""
            (cache, last_states), (tokens, start) = carry, inputs
            states, cache = fed(tokens, start, cache)
            indices = jnp.clip(lengths - 1 - start, 0, chunk_length - 1)
            chunk_states = jnp.take_along_axis(states, indices[:, None, None], 1)
            is_here = (lengths > start)[:, None, None]
            return (cache, jnp.where(is_here, chunk_states, last_states)), None

        if chunk_count == 1:
            states, cache = fed(prompts[0], starts[0], cache)
            last_states = jnp.take_along_axis(states, (lengths - 1)[:, None, None], 1)
        else:
            shape = jax.eval_shape(lambda: fed(prompts[0], starts[0], cache)[0])
            no_states = jnp.zeros((prompt_count, 1, shape.shape[-1]), shape.dtype)
            (cache, last_states), _ = jax.lax.scan(feed, (cache, no_states), (prompts, starts))
        # what is drawn follows the longest prompt, in the slots of its padding
        cache = dataclasses.replace(cache, length=jnp.full_like(cache.length, jnp.max(lengths)))
        logits = _logits(module, last_states)[:, 0]
        if copies > 1:
            cache, logits, lengths = _copied(cache, copies), jnp.repeat(logits, copies, 0), jnp.repeat(lengths, copies)
        tokens, is_done = draw_next(logits, lengths - 1, row_keys, kind, settings)
        return DecodingRows(carried(cache), tokens, lengths.astype(jnp.int32), is_done)

    def advance(
        params: Any, rows: DecodingRows, row_keys: RowKeys, settings: DrawSettings, step_count: Any
    ) -> tuple[DecodingRows, Any]:
        """Draw at most `step_count` tokens for each row; fewer if every row draws a stop id."""
        slots = (rows.cache[0] if paths else rows.cache).valid.shape[-1]

        def is_going_on(carry: Any) -> Any:
            index, rows, _ = carry
            return (index < step_count) & ~jnp.all(rows.is_done)

        def step(carry: Any) -> Any:
            """Feed the newest tokens, and draw the next ones."""
            index, rows, drawn_ids = carry
            module = merge_unrolled(graphdef, params, paths)
            fed = {"positions": jnp.minimum(rows.positions, model.context - 1)[:, None], "segments": None}
            cache = _stacked(rows.cache) if paths else rows.cache
            with blocks.wrapping(_traced_once):
                states, cache = _states(module, rows.tokens[:, None], cache=cache, context=context, **fed)
            logits = _logits(module, states)[:, -1]
            tokens, is_stop = draw_next(logits, rows.positions, row_keys, kind, settings)
            drawn_ids = jax.lax.dynamic_update_index_in_dim(drawn_ids, tokens, index, 0)
            rows = DecodingRows(carried(cache), tokens, rows.positions + 1, rows.is_done | is_stop)
            return index + 1, rows, drawn_ids

        first_carry = (jnp.int32(0), rows, jnp.full((slots, rows.tokens.shape[0]), -1, jnp.int32))
        _, rows, drawn_ids = jax.lax.while_loop(is_going_on, step, first_carry)
        return rows, drawn_ids

    return Programs(traced(prefill, static_argnames=("slots", "copies")), traced(advance, donate_argnums=(1,)))


def draw_next(
    logits: Any, positions: Any, row_keys: RowKeys, kind: DrawKind, settings: DrawSettings
) -> tuple[Any, Any]:
    """Draw the tokens that follow those at `positions` of the windows; return them and whether each is a stop id."""
    keys = row_keys.keys
    if not kind.is_greedy:
        keys = jax.vmap(jax.random.fold_in)(keys, row_keys.offsets + positions)
    # every device has all tokens, so that every process can read them
    tokens = constrain(draw(logits, keys, kind, settings), None)
    return tokens, jnp.any(tokens[:, None] == settings.stop_ids[None, :], -1)


def with_slots_once(layer_caches: Sequence[Any]) -> tuple[Any, ...]:
    """Return the caches of the layers, of which the first alone describes the slots."""
    no_slots = dict.fromkeys(_SLOT_FIELDS)
    return layer_caches[0], *(dataclasses.replace(layer_cache, **no_slots) for layer_cache in layer_caches[1:])


def _states(module: Any, tokens: Any, **settings: Any) -> tuple[Any, Any]:
    """Return what `_logits` takes for each token, and the new cache."""
    return module.hidden(tokens, **settings) if hasattr(module, "hidden") else module(tokens, **settings)


def _logits(module: Any, states: Any) -> Any:
    """Return the logits of what `_states` returned: a module without a `hidden` method has computed them there."""
    return module.logits(states) if hasattr(module, "hidden") else states


def _traced_once(block: Any, rolled: bool) -> Any:
    """Return a block that is traced and lowered once for all layers that are equal."""
    return block if rolled else jax.jit(block)


def _placed(cache: Any) -> Any:
    """Return the cache of all layers, or of one, with its rows and heads placed by the layout in force."""
    layer_axes = ("layers",) if cache.k.ndim == 5 else ()
    axes = (*layer_axes, "batch", "kv_heads", "head_dim", "kv_seq")
    arrays = {name: constrain(getattr(cache, name), *axes) for name in ("k", "v")}
    arrays |= {name: constrain(getattr(cache, name), *layer_axes, "batch", "kv_seq") for name in ("positions", "valid")}
    return dataclasses.replace(cache, **arrays)


_SLOT_FIELDS = ("positions", "valid", "length")
"""The fields of a cache that describe its slots, and that are the same in all layers."""


def _stacked(layer_caches: Any) -> Any:
    """Return the cache of all layers, of which the first describes the slots of all."""
    slot_fields = {name: getattr(layer_caches[0], name) for name in _SLOT_FIELDS}
    return restack([dataclasses.replace(layer_cache, **slot_fields) for layer_cache in layer_caches])


def _copied(cache: Any, copies: int) -> Any:
    """Return the cache with `copies` rows for each row, next to one another."""
    arrays = {name: jnp.repeat(getattr(cache, name), copies, 1) for name in ("k", "v", "positions", "valid")}
    return dataclasses.replace(cache, **arrays)
