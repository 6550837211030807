"""Generation on CPUs by programs of one layer, which the host calls layer after layer.

The time to compile does not depend on the number of layers. A program with a loop over the layers would copy the
weights of each one out of the stacked array before it multiplies by them (`unrolled.py`); a call takes them where they
are. Each call takes the host some time, so the steps of a model of few layers are one program.

Processor seconds of `Session.prefill` and of a step of `Session.advance` on one core of an Intel Xeon, 2026-11-28: 0.33
and 0.047 by layers, 0.34 and 0.075 by a loop (30 layers, 576 wide, 144 tokens); a step of 8 layers, 512 wide, takes 9.7
ms by layers, 8.2 as one program and 20 by a loop.
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
        outer: those outside of the layers.
        layers: those of each layer; they share the memory of the stacked arrays.
    """

    outer: Any
    layers: tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class LayeredModule:
    """The definition of a model whose layers are called one by one.

    Args:
        outer: definition of the module without its layers.
        layer: definition of a layer.
        cycle: names and values of each layer's own keyword arguments; they repeat over the layers.
    """

    outer: Any
    layer: Any
    cycle: tuple[tuple[tuple[str, Any], ...], ...]

    @classmethod
    def of(cls, module: Any) -> "LayeredModule | None":
        """Return the definition of a module; `None` unless its layers can be called one by one.

        They can if the module has `embed`, one `Stack`, named `blocks`, with its `block_cycle`, `norm` and `logits`, as
        `models.decoder_module.DecoderModule` has.
        """
        stack = getattr(module, "blocks", None)
        stack_count = sum(isinstance(part, Stack) for _, part in nnx.iter_modules(module))
        if not isinstance(stack, Stack) or stack_count > 1 or not hasattr(module, "block_cycle"):
            return None
        layers = [nnx.graphdef(getattr(stack, name)) for name in stack.group_names]
        if any(layer != layers[0] for layer in layers):
            return None
        outer = nnx.merge(*nnx.split(module))
        del outer.blocks
        return cls(nnx.graphdef(outer), layers[0], tuple(tuple(settings.items()) for settings in module.block_cycle))


def layered_params(split_params: Any) -> LayeredParams:
    """Return parameters as the programs of a `LayeredModule` take them, from the result of `unrolled.split_layers`."""
    groups = sorted((in_one_stack(name)[1], layers) for name, layers in split_params["blocks"].items())
    outer = {name: part for name, part in split_params.items() if name != "blocks"}
    return LayeredParams(outer, tuple(layer for _, layers in groups for layer in layers))


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
        return nnx.merge(layered.outer, outer_params, copy=True)

    @jax.jit
    def embed_chunk(outer_params: Any, tokens: Any, start: Any, lengths: Any) -> tuple[Any, Any]:
        """Return the input of the first layer for a chunk of prompts [R, T], and the settings of all layers."""
        positions = start + jnp.arange(tokens.shape[1], dtype=jnp.int32)[None, :]
        fed = {"positions": jnp.minimum(positions, model.context - 1)}
        x = outer_module(outer_params).embed(tokens, context=context, **fed)
        return x, fed | {"segments": (positions < lengths[:, None]).astype(jnp.int32)}

    @jax.jit
    def embed_tokens(outer_params: Any, tokens: Any, positions: Any) -> tuple[Any, Any]:
        """Return the input of the first layer for the newest token of each row, and the settings of all layers."""
        fed = {"positions": jnp.minimum(positions, model.context - 1)[:, None]}
        return outer_module(outer_params).embed(tokens[:, None], context=context, **fed), fed

    @functools.partial(jax.jit, static_argnames="own_settings", donate_argnums=(1, 2))
    def call_layer(params: Any, keys_values: Any, x: Any, slots: Any, fed: Any, *, own_settings: Any) -> Any:
        """Return the output of a layer, and its cache."""
        layer = nnx.merge(layered.layer, params, copy=True)
        return layer(x, cache=KVCache(*keys_values, *slots), context=context, **fed, **dict(own_settings))

    def call_layers(layers: Sequence[Any], caches: Sequence[KVCache], x: Any, fed: Any) -> tuple[Any, tuple[Any, ...]]:
        """Return the output of the last layer, and the caches of all layers, of which the first describes the slots."""
        slots = (caches[0].positions, caches[0].valid, caches[0].length)
        new_caches = []
        for index, (params, cache) in enumerate(zip(layers, caches, strict=True)):
            own_settings = layered.cycle[index % len(layered.cycle)]
            x, new_cache = call_layer(params, (cache.k, cache.v), x, slots, fed, own_settings=own_settings)
            new_caches.append(new_cache)
        return x, with_slots_once(new_caches)

    @jax.jit
    def last_states_of(x: Any, last_states: Any, start: Any, lengths: Any) -> Any:
        """Return the state after the last token of each prompt; one that is not in this chunk stays as it was."""
        indices = jnp.clip(lengths - 1 - start, 0, x.shape[1] - 1)
        chunk_states = jnp.take_along_axis(x, indices[:, None, None], 1)
        if last_states is None:
            return chunk_states
        return jnp.where((lengths > start)[:, None, None], chunk_states, last_states)

    @functools.partial(jax.jit, static_argnames="copies")
    def draw_tokens(
        outer_params: Any, states: Any, positions: Any, draws: tuple[RowKeys, DrawSettings], *, copies: int
    ) -> tuple[Any, Any]:
        """Draw the tokens that follow the states [R, 1, D] of R * copies rows; return also which are stop ids."""
        module = outer_module(outer_params)
        logits = jnp.repeat(module.logits(module.norm(states))[:, -1], copies, 0)
        row_keys, settings = draws
        return draw_next(logits, positions, row_keys, kind, settings)

    def prefill(
        params: LayeredParams,
        prompts: np.ndarray,
        lengths: np.ndarray,
        row_keys: RowKeys,
        settings: DrawSettings,
        *,
        slots: int,
        copies: int,
    ) -> DecodingRows:
        """Feed the prompts, int32 [chunks, R, T], and draw the first token of each of R * copies rows."""
        chunk_count, prompt_count, chunk_length = prompts.shape
        caches, last_states = _empty_caches(model, prompt_count, slots, dtype), None
        for chunk in range(chunk_count):
            start = np.int32(chunk * chunk_length)
            x, fed = embed_chunk(params.outer, prompts[chunk], start, lengths)
            x, caches = call_layers(params.layers, caches, x, fed)
            last_states = last_states_of(x, last_states, start, lengths)
        row_lengths = np.repeat(lengths, copies)
        tokens, is_done = draw_tokens(params.outer, last_states, row_lengths - 1, (row_keys, settings), copies=copies)
        if copies > 1:
            caches = tuple(_repeated(cache, row_count=prompt_count, copies=copies) for cache in caches)
        # what is drawn follows the longest prompt, in the slots of its padding
        first_cache = dataclasses.replace(caches[0], length=lengths.max())
        return DecodingRows((first_cache, *caches[1:]), tokens, row_lengths, is_done)

    def advance(
        params: LayeredParams, rows: DecodingRows, row_keys: RowKeys, settings: DrawSettings, step_count: Any
    ) -> tuple[DecodingRows, Any]:
        """Draw at most `step_count` tokens for each row; fewer if every row draws a stop id."""
        steps_tokens = []
        can_stop = bool(np.any(settings.stop_ids >= 0))
        for _ in range(int(step_count)):
            if can_stop and np.all(rows.is_done):
                break
            x, fed = embed_tokens(params.outer, rows.tokens, rows.positions)
            x, caches = call_layers(params.layers, rows.cache, x, fed | {"segments": None})
            tokens, is_stop = draw_tokens(params.outer, x, rows.positions, (row_keys, settings), copies=1)
            rows = DecodingRows(caches, tokens, rows.positions + 1, rows.is_done | is_stop)
            steps_tokens.append(tokens)
        drawn_ids = np.full((int(step_count), rows.tokens.shape[0]), -1, np.int32)
        for index, tokens in enumerate(steps_tokens):
            drawn_ids[index] = tokens
        return rows, drawn_ids

    return Programs(prefill, advance)


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _empty_caches(model: Any, row_count: int, slots: int, dtype: Any) -> tuple[KVCache, ...]:
    """Return the empty cache of each layer, of which the first describes the slots."""
    stacked = model.init_cache(row_count, slots, dtype)
    return with_slots_once([cache.with_heads_as_rows() for cache in unstack(stacked, stacked.length.shape[0])])


@functools.partial(jax.jit, static_argnames=("row_count", "copies"))
def _repeated(cache: KVCache, *, row_count: int, copies: int) -> KVCache:
    """Return the cache of a layer of `row_count` rows with `copies` rows for each, next to one another."""

    def repeated(array: Any) -> Any:
        rows = array.reshape(row_count, -1, *array.shape[1:])
        return jnp.repeat(rows, copies, 0).reshape(-1, *array.shape[1:])

    arrays = {name: getattr(cache, name) for name in ("k", "v", "positions", "valid")}
    return dataclasses.replace(cache, **jax.tree.map(repeated, arrays))
