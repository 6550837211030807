"""Generation on CPUs by a program of one layer, which the host calls once for each layer.

The time to compile does not depend on the number of layers. A program with a loop over the layers would copy the
weights of each layer out of the stacked array before it multiplies by them (`unrolled.py`). A call of one layer reads
the weights in place. Each call takes the host some time, so a model with few layers runs a step as one program.

Processor time on one core of an Intel Xeon, 2026-11-28. With 30 layers, 576 wide, and 144 tokens, `Session.prefill`
takes 0.33 s layer by layer and 0.34 s by a loop; a step of `Session.advance` takes 0.047 s and 0.075 s. With 8 layers,
512 wide, a step takes 9.7 ms layer by layer, 8.2 ms as one program and 20 ms by a loop.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxscale.blocks import Context
from jaxscale.generation.draw import DrawKind, DrawSettings
from jaxscale.generation.programs import DecodingRows, Programs, RowKeys, draw_next, with_slots_once
from jaxscale.layers.cache import KVCache
from jaxscale.layers.layer_group import unstack
from jaxscale.layers.stack import Stack, in_one_stack


class LayeredParams(NamedTuple):
    """The parameters of a model whose layers are called one by one.

    Args:
        outer_params: parameters outside of the layers.
        layer_params: parameters of each layer, which share the memory of the stacked arrays.
    """

    outer_params: Any
    layer_params: tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class LayeredModule:
    """The definition of a model whose layers are called one by one.

    Args:
        outer_graphdef: definition of the module without its layers.
        layer_graphdef: definition of a layer.
        cycle_settings: for each layer of a cycle, the names and values of its own keyword arguments. The cycle repeats
            over the layers.
    """

    outer_graphdef: Any
    layer_graphdef: Any
    cycle_settings: tuple[tuple[tuple[str, Any], ...], ...]

    @classmethod
    def of(cls, module: Any) -> "LayeredModule | None":
        """Return the definition of a module; `None` if its layers cannot be called one by one.

        They can if the module has the attributes of a `models.decoder_module.DecoderModule` (`embed`, `norm`, `logits`
        and `block_cycle`), and its only `Stack` is its attribute `blocks`.
        """
        stack = getattr(module, "blocks", None)
        stack_count = sum(isinstance(node, Stack) for _, node in nnx.iter_modules(module))
        if not isinstance(stack, Stack) or stack_count > 1 or not hasattr(module, "block_cycle"):
            return None
        layer_graphdefs = [nnx.graphdef(getattr(stack, name)) for name in stack.group_names]
        if any(layer_graphdef != layer_graphdefs[0] for layer_graphdef in layer_graphdefs):
            return None
        outer_module = nnx.merge(*nnx.split(module))
        del outer_module.blocks
        return cls(
            nnx.graphdef(outer_module),
            layer_graphdefs[0],
            tuple(tuple(settings.items()) for settings in module.block_cycle),
        )


def layered_params(split_params: Any) -> LayeredParams:
    """Convert the result of `unrolled.split_layers` to the parameters that the programs of a `LayeredModule` take."""
    starts_and_layer_params = sorted(
        (in_one_stack(name)[1], layer_params) for name, layer_params in split_params["blocks"].items()
    )
    outer_params = {name: part for name, part in split_params.items() if name != "blocks"}
    return LayeredParams(
        outer_params, tuple(params for _, layer_params in starts_and_layer_params for params in layer_params)
    )


@functools.lru_cache(maxsize=32)
def layer_programs(layered: LayeredModule, model: Any, context: Context, dtype: Any, kind: DrawKind) -> Programs:
    """Return the programs of a model whose layers are called one by one.

    Args:
        layered: definition of the module.
        model: the model value, which has `context` and `init_cache`.
        context: context of the forward pass.
        dtype: type of the cached keys and values.
        kind: static settings of the draws.
    """

    def outer_module(outer_params: Any) -> Any:
        """Return the module without its layers."""
        return nnx.merge(layered.outer_graphdef, outer_params, copy=True)

    @jax.jit
    def embed_chunk(outer_params: Any, tokens: Any, start: Any, lengths: Any) -> tuple[Any, Any]:
        """Return the first layer's input for a chunk of prompts [R, T], and the keyword arguments of all layers."""
        positions = start + jnp.arange(tokens.shape[1], dtype=jnp.int32)[None, :]
        shared_arguments = {"positions": jnp.minimum(positions, model.context - 1)}
        x = outer_module(outer_params).embed(tokens, context=context, **shared_arguments)
        return x, shared_arguments | {"segments": (positions < lengths[:, None]).astype(jnp.int32)}

    @jax.jit
    def embed_tokens(outer_params: Any, tokens: Any, positions: Any) -> tuple[Any, Any]:
        """Return the first layer's input for the newest token of each row, and the keyword arguments of all layers."""
        shared_arguments = {"positions": jnp.minimum(positions, model.context - 1)[:, None]}
        return outer_module(outer_params).embed(tokens[:, None], context=context, **shared_arguments), shared_arguments

    @functools.partial(jax.jit, static_argnames="own_settings", donate_argnums=(1, 2))
    def call_layer(
        params: Any, keys_and_values: Any, x: Any, slot_fields: Any, shared_arguments: Any, *, own_settings: Any
    ) -> Any:
        """Return the output of a layer, and its new cache."""
        layer = nnx.merge(layered.layer_graphdef, params, copy=True)
        return layer(
            x, cache=KVCache(*keys_and_values, *slot_fields), context=context, **shared_arguments, **dict(own_settings)
        )

    def call_layers(
        layer_params: Sequence[Any], layer_caches: Sequence[KVCache], x: Any, shared_arguments: Any
    ) -> tuple[Any, tuple[Any, ...]]:
        """Return the last layer's output, and the new cache of each layer. Only the first cache describes the slots."""
        slot_fields = (layer_caches[0].positions, layer_caches[0].valid, layer_caches[0].length)
        new_caches = []
        for index, (params, cache) in enumerate(zip(layer_params, layer_caches, strict=True)):
            own_settings = layered.cycle_settings[index % len(layered.cycle_settings)]
            x, new_cache = call_layer(
                params, (cache.k, cache.v), x, slot_fields, shared_arguments, own_settings=own_settings
            )
            new_caches.append(new_cache)
        return x, with_slots_once(new_caches)

    @jax.jit
    def last_states_of(x: Any, last_states: Any, start: Any, lengths: Any) -> Any:
        """Return the state of each prompt's last token; `last_states` if the prompt ended in an earlier chunk."""
        last_token_indices = jnp.clip(lengths - 1 - start, 0, x.shape[1] - 1)
        last_states_in_chunk = jnp.take_along_axis(x, last_token_indices[:, None, None], 1)
        if last_states is None:
            return last_states_in_chunk
        return jnp.where((lengths > start)[:, None, None], last_states_in_chunk, last_states)

    @functools.partial(jax.jit, static_argnames="copy_count")
    def draw_tokens(
        outer_params: Any,
        states: Any,
        positions: Any,
        keys_and_settings: tuple[RowKeys, DrawSettings],
        *,
        copy_count: int,
    ) -> tuple[Any, Any]:
        """Draw a token after the states [R, 1, D] for R * copy_count rows; return (tokens, whether each is a stop)."""
        module = outer_module(outer_params)
        logits = jnp.repeat(module.logits(module.norm(states))[:, -1], copy_count, 0)
        row_keys, settings = keys_and_settings
        return draw_next(logits, positions, row_keys, kind, settings)

    def prefill(
        params: LayeredParams,
        prompts: np.ndarray,
        lengths: np.ndarray,
        row_keys: RowKeys,
        settings: DrawSettings,
        *,
        slot_count: int,
        copy_count: int,
    ) -> DecodingRows:
        """Feed the prompts, int32 [chunks, R, T], and draw the first token of each of R * copy_count rows."""
        chunk_count, prompt_count, chunk_length = prompts.shape
        layer_caches, last_states = _empty_caches(model, prompt_count, slot_count, dtype), None
        for chunk_index in range(chunk_count):
            start = np.int32(chunk_index * chunk_length)
            x, shared_arguments = embed_chunk(params.outer_params, prompts[chunk_index], start, lengths)
            x, layer_caches = call_layers(params.layer_params, layer_caches, x, shared_arguments)
            last_states = last_states_of(x, last_states, start, lengths)
        row_lengths = np.repeat(lengths, copy_count)
        tokens, is_done = draw_tokens(
            params.outer_params, last_states, row_lengths - 1, (row_keys, settings), copy_count=copy_count
        )
        if copy_count > 1:
            layer_caches = tuple(
                _repeat_rows(cache, row_count=prompt_count, copy_count=copy_count) for cache in layer_caches
            )
        # drawn tokens take the slots after the longest prompt
        first_cache = dataclasses.replace(layer_caches[0], length=lengths.max())
        return DecodingRows((first_cache, *layer_caches[1:]), tokens, row_lengths, is_done)

    def advance(
        params: LayeredParams, rows: DecodingRows, row_keys: RowKeys, settings: DrawSettings, step_count: Any
    ) -> tuple[DecodingRows, Any]:
        """Draw `step_count` tokens for each row, or stop when all rows are done; return (new rows, drawn ids)."""
        tokens_by_step = []
        can_stop = bool(np.any(settings.stop_ids >= 0))
        for _ in range(int(step_count)):
            if can_stop and np.all(rows.is_done):
                break
            x, shared_arguments = embed_tokens(params.outer_params, rows.tokens, rows.positions)
            x, layer_caches = call_layers(params.layer_params, rows.cache, x, shared_arguments | {"segments": None})
            tokens, is_stop = draw_tokens(params.outer_params, x, rows.positions, (row_keys, settings), copy_count=1)
            rows = DecodingRows(layer_caches, tokens, rows.positions + 1, rows.is_done | is_stop)
            tokens_by_step.append(tokens)
        drawn_ids = np.full((int(step_count), rows.tokens.shape[0]), -1, np.int32)
        for step_index, tokens in enumerate(tokens_by_step):
            drawn_ids[step_index] = tokens
        return rows, drawn_ids

    return Programs(prefill, advance)


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _empty_caches(model: Any, row_count: int, slot_count: int, dtype: Any) -> tuple[KVCache, ...]:
    """Return the empty cache of each layer. Only the first cache describes the slots."""
    stacked_cache = model.init_cache(row_count, slot_count, dtype)
    return with_slots_once(
        [cache.with_heads_as_rows() for cache in unstack(stacked_cache, stacked_cache.length.shape[0])]
    )


@functools.partial(jax.jit, static_argnames=("row_count", "copy_count"))
def _repeat_rows(cache: KVCache, *, row_count: int, copy_count: int) -> KVCache:
    """Return the cache of a layer with `copy_count` adjacent copies of each of its `row_count` rows."""

    def repeat(array: Any) -> Any:
        array_by_row = array.reshape(row_count, -1, *array.shape[1:])
        return jnp.repeat(array_by_row, copy_count, 0).reshape(-1, *array.shape[1:])

    array_by_name = {name: getattr(cache, name) for name in ("k", "v", "positions", "valid")}
    return dataclasses.replace(cache, **jax.tree.map(repeat, array_by_name))
