"""The compiled programs of generation: `prefill` feeds the prompts, `advance` draws one token after another.

Prompts of unequal lengths are padded on the right and share a prefill. The drawn tokens of a row have the positions
after its own prompt, but are cached in the slots after the longest prompt. The number of steps of `advance` is an
argument, not a shape, and its loop ends early when every row has drawn a stop id. So one pair of programs serves every
number of tokens that fits in the cache, and streaming runs the same programs as a call for the whole text.
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
"""Largest number of positions of a prompt to feed at once; longer prompts are fed in chunks of equal size."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodingRows:
    """The rows of a batch between two steps.

    Args:
        cache: one `KVCache` for all layers, or a tuple with a `KVCache` for each layer. In a tuple, only the first
            cache has `positions`, `valid` and `length`.
        tokens: int32 [B], the newest token of each row, which is not in the cache yet.
        positions: int32 [B], the position of that token in its window.
        is_done: bool [B], whether the row has drawn a stop id.
    """

    cache: Any
    tokens: Any
    positions: Any
    is_done: Any


class RowKeys(NamedTuple):
    """The inputs of each row's random draws.

    Args:
        keys: a random key for each row, [B]; `None` if every draw takes the most likely token.
        offsets: int32 [B], number of tokens of each row's text that come before the window.
    """

    keys: Any
    offsets: Any


class Programs(NamedTuple):
    """The functions `prefill` and `advance`. Each is compiled when it is first called with arrays of new shapes.

    Args:
        prefill: `prefill(params, prompts, lengths, row_keys, settings, slot_count=, copy_count=)` returns the
            `DecodingRows` after the first draw.
        advance: `advance(params, rows, row_keys, settings, step_count)` returns the rows after at most `step_count`
            draws, and the drawn ids, int32 [n, B] with n >= step_count. An id is -1 where nothing was drawn.
    """

    prefill: Callable[..., DecodingRows]
    advance: Callable[..., tuple[DecodingRows, Any]]


def padded_length(position_count: int) -> int:
    """Round a number of positions up, so that few different numbers occur; at most 15 or an eighth are added.

    Example:
        >>> [padded_length(count) for count in (1, 40, 130, 1025)]
        [16, 48, 144, 1152]
    """
    multiple = max(16, 1 << max((position_count - 1).bit_length() - 4, 0))
    return -(-position_count // multiple) * multiple


def chunk_count_and_length(longest_length: int, context: int) -> tuple[int, int]:
    """Return (number of chunks, positions in each) for prompts of at most `longest_length` ids."""
    chunk_count = -(-longest_length // CHUNK)
    if chunk_count == 1:
        return 1, min(padded_length(longest_length), context)
    return chunk_count, -(-padded_length(longest_length) // chunk_count)


@functools.lru_cache(maxsize=32)
def module_programs(
    graphdef: Any,
    model: Any,
    context: Context,
    layout: MeshAndRules | None,
    dtype: Any,
    kind: DrawKind,
    layer_paths: Paths,
) -> Programs:
    """Return the programs of a model.

    Args:
        graphdef: definition of the module, from `nnx.split`.
        model: the model value, which has `context` and `init_cache`.
        context: context of the forward pass.
        layout: the mesh and the rules that place rows and caches; `None` for one device.
        dtype: type of the cached keys and values, which is the type that the model computes in.
        kind: static settings of the draws.
        layer_paths: paths of the layers that `advance` unrolls (`unrolled.layer_group_paths`). With `()`, `advance`
            scans over the layers.
    """

    def jit_under_layout(function: Callable[..., Any], **jit_settings: Any) -> Any:
        """Return the jitted function, traced under the layout."""

        @functools.wraps(function)
        def run(*arguments: Any, **named_arguments: Any) -> Any:
            with contextlib.nullcontext() if layout is None else place.layout(*layout):
                return function(*arguments, **named_arguments)

        return jax.jit(run, **jit_settings)

    def carried_cache(cache: Any) -> Any:
        """Return the cache that the loop carries: a tuple with a cache for each layer, or one cache of all layers."""
        if not layer_paths:
            return _place_cache(cache)
        layer_caches = [_place_cache(layer_cache) for layer_cache in unstack(cache, cache.length.shape[0])]
        if layout is None or layout[0].size == 1:  # two dims cannot be merged if mesh axes may shard them
            layer_caches = [layer_cache.with_heads_as_rows() for layer_cache in layer_caches]
        return with_slots_once(layer_caches)

    def prefill(
        params: Any,
        prompts: Any,
        lengths: Any,
        row_keys: RowKeys,
        settings: DrawSettings,
        *,
        slot_count: int,
        copy_count: int,
    ) -> DecodingRows:
        """Feed the prompts, int32 [chunks, R, T], and draw the first token of each of R * copy_count rows."""
        module = nnx.merge(graphdef, params, copy=True)
        chunk_count, prompt_count, chunk_length = prompts.shape
        cache = _place_cache(model.init_cache(prompt_count, slot_count, dtype))
        starts = jnp.arange(chunk_count, dtype=jnp.int32) * chunk_length

        def feed_chunk(tokens: Any, start: Any, old_cache: Any) -> tuple[Any, Any]:
            """Return the hidden states of a chunk of tokens [R, T], and the cache after the chunk."""
            positions = start + jnp.arange(chunk_length, dtype=jnp.int32)[None, :]
            state_arguments = {
                "positions": jnp.minimum(positions, model.context - 1),
                "segments": (positions < lengths[:, None]).astype(jnp.int32),
                "context": context,
            }
            states, new_cache = _states(module, tokens, cache=old_cache, **state_arguments)
            return states, _place_cache(new_cache)

        def scan_chunk(carry: Any, chunk_inputs: Any) -> tuple[Any, None]:
            """Feed a chunk; the carry is the cache and the state after the last token of each prompt."""
            (old_cache, last_states), (tokens, start) = carry, chunk_inputs
            states, new_cache = feed_chunk(tokens, start, old_cache)
            last_token_indices = jnp.clip(lengths - 1 - start, 0, chunk_length - 1)
            last_states_in_chunk = jnp.take_along_axis(states, last_token_indices[:, None, None], 1)
            reaches_chunk = (lengths > start)[:, None, None]
            return (new_cache, jnp.where(reaches_chunk, last_states_in_chunk, last_states)), None

        if chunk_count == 1:
            states, cache = feed_chunk(prompts[0], starts[0], cache)
            last_states = jnp.take_along_axis(states, (lengths - 1)[:, None, None], 1)
        else:
            abstract_states = jax.eval_shape(lambda: feed_chunk(prompts[0], starts[0], cache)[0])
            initial_states = jnp.zeros((prompt_count, 1, abstract_states.shape[-1]), abstract_states.dtype)
            (cache, last_states), _ = jax.lax.scan(scan_chunk, (cache, initial_states), (prompts, starts))
        # drawn tokens take the slots after the longest prompt
        cache = dataclasses.replace(cache, length=jnp.full_like(cache.length, jnp.max(lengths)))
        logits = _logits(module, last_states)[:, 0]
        if copy_count > 1:
            cache, logits, lengths = (
                _repeat_rows(cache, copy_count),
                jnp.repeat(logits, copy_count, 0),
                jnp.repeat(lengths, copy_count),
            )
        tokens, is_done = draw_next(logits, lengths - 1, row_keys, kind, settings)
        return DecodingRows(carried_cache(cache), tokens, lengths.astype(jnp.int32), is_done)

    def advance(
        params: Any, rows: DecodingRows, row_keys: RowKeys, settings: DrawSettings, step_count: Any
    ) -> tuple[DecodingRows, Any]:
        """Draw `step_count` tokens for each row, or stop when all rows are done; return (new rows, drawn ids)."""
        slot_count = (rows.cache[0] if layer_paths else rows.cache).valid.shape[-1]

        def is_going_on(carry: Any) -> Any:
            step_index, carried_rows, _ = carry
            return (step_index < step_count) & ~jnp.all(carried_rows.is_done)

        def step(carry: Any) -> Any:
            """Feed the newest tokens, and draw the next ones."""
            step_index, old_rows, drawn_ids = carry
            module = merge_unrolled(graphdef, params, layer_paths)
            state_arguments = {
                "positions": jnp.minimum(old_rows.positions, model.context - 1)[:, None],
                "segments": None,
            }
            cache = _stack_caches(old_rows.cache) if layer_paths else old_rows.cache
            with blocks.wrapping(_jit_unrolled):
                states, cache = _states(
                    module, old_rows.tokens[:, None], cache=cache, context=context, **state_arguments
                )
            logits = _logits(module, states)[:, -1]
            tokens, is_stop = draw_next(logits, old_rows.positions, row_keys, kind, settings)
            drawn_ids = jax.lax.dynamic_update_index_in_dim(drawn_ids, tokens, step_index, 0)
            new_rows = DecodingRows(carried_cache(cache), tokens, old_rows.positions + 1, old_rows.is_done | is_stop)
            return step_index + 1, new_rows, drawn_ids

        first_carry = (jnp.int32(0), rows, jnp.full((slot_count, rows.tokens.shape[0]), -1, jnp.int32))
        _, rows, drawn_ids = jax.lax.while_loop(is_going_on, step, first_carry)
        return rows, drawn_ids

    return Programs(
        jit_under_layout(prefill, static_argnames=("slot_count", "copy_count")),
        jit_under_layout(advance, donate_argnums=(1,)),
    )


def draw_next(
    logits: Any, positions: Any, row_keys: RowKeys, kind: DrawKind, settings: DrawSettings
) -> tuple[Any, Any]:
    """Draw the token after the position of each row's window; return (tokens, whether each is a stop id).

    Args:
        logits: logits of the next token [B, V].
        positions: int32 [B], position in the window of each row's newest token.
        row_keys: the inputs of the random draws.
        kind: static settings of the draws.
        settings: the settings that are arguments of the program.
    """
    keys = row_keys.keys
    if not kind.is_greedy:
        keys = jax.vmap(jax.random.fold_in)(keys, row_keys.offsets + positions)
    # every device has all tokens, so that every process can read them
    tokens = constrain(draw(logits, keys, kind, settings), None)
    return tokens, jnp.any(tokens[:, None] == settings.stop_ids[None, :], -1)


def with_slots_once(layer_caches: Sequence[Any]) -> tuple[Any, ...]:
    """Return the layers' caches. All caches after the first have `None` in the fields that describe the slots."""
    empty_slot_fields = dict.fromkeys(_SLOT_FIELDS)
    return layer_caches[0], *(dataclasses.replace(layer_cache, **empty_slot_fields) for layer_cache in layer_caches[1:])


def _states(module: Any, tokens: Any, **arguments: Any) -> tuple[Any, Any]:
    """Return (hidden states of the tokens, new cache). Without a `hidden` method, logits replace the states."""
    return module.hidden(tokens, **arguments) if hasattr(module, "hidden") else module(tokens, **arguments)


def _logits(module: Any, states: Any) -> Any:
    """Return the logits of the states. If the module has no `hidden` method, the states are already logits."""
    return module.logits(states) if hasattr(module, "hidden") else states


def _jit_unrolled(block: Any, rolled: bool) -> Any:
    """Return the block, jitted if its layers are unrolled. Equal layers are then traced and lowered once."""
    return block if rolled else jax.jit(block)


def _place_cache(cache: Any) -> Any:
    """Constrain the rows and heads of a cache to the layout in force; the cache is of one layer or of all layers."""
    layer_axes = ("layers",) if cache.k.ndim == 5 else ()
    axes = (*layer_axes, "batch", "kv_heads", "head_dim", "kv_seq")
    array_by_name = {name: constrain(getattr(cache, name), *axes) for name in ("k", "v")}
    array_by_name |= {
        name: constrain(getattr(cache, name), *layer_axes, "batch", "kv_seq") for name in ("positions", "valid")
    }
    return dataclasses.replace(cache, **array_by_name)


_SLOT_FIELDS = ("positions", "valid", "length")
"""The fields of a cache that describe its slots. Their values are the same in all layers."""


def _stack_caches(layer_caches: Any) -> Any:
    """Stack the caches of the layers into one cache. The first cache describes the slots of all layers."""
    slot_array_by_name = {name: getattr(layer_caches[0], name) for name in _SLOT_FIELDS}
    return restack([dataclasses.replace(layer_cache, **slot_array_by_name) for layer_cache in layer_caches])


def _repeat_rows(cache: Any, copy_count: int) -> Any:
    """Return the cache of all layers with `copy_count` adjacent copies of each row."""
    array_by_name = {name: jnp.repeat(getattr(cache, name), copy_count, 1) for name in ("k", "v", "positions", "valid")}
    return dataclasses.replace(cache, **array_by_name)
