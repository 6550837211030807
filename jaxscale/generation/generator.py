"""Generator: a model's parameters and its compiled programs. Session: one window in which rows are decoded."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxscale.blocks import Context
from jaxscale.generation.draw import DrawKind, kind_of, settings_of
from jaxscale.generation.layer_programs import LayeredModule, layer_programs, layered_params
from jaxscale.generation.programs import Programs, RowKeys, chunk_count_and_length, module_programs, padded_length
from jaxscale.generation.sampling import Sampling
from jaxscale.generation.unrolled import (
    copy_to_first_device,
    has_few_layers,
    is_on_cpus,
    join_projections,
    layer_group_paths,
    split_layers,
)
from jaxscale.sharding.partition import shard_count
from jaxscale.sharding.place import MeshAndRules


class Generator:
    """A model that decodes: its parameters, and the settings and the layout of its forward pass.

    Args:
        module: the model's module with its parameters.
        model: the model value, which has `context`, `vocab` and `init_cache`.
        context: context of the forward pass.
        layout: the mesh and the rules that place rows and caches; `None` for the device of the parameters.
    """

    def __init__(
        self, module: Any, model: Any, context: Context = Context(), layout: MeshAndRules | None = None
    ) -> None:
        self.model, self.context, self.layout = model, context, layout
        if context.matmul is None:  # a low-bit recipe has separate scales for each projection
            module = join_projections(module)
        self.graphdef, state = nnx.split(module)
        self.params = nnx.to_pure_dict(state)
        self.split_paths, self.is_unrolled = layer_group_paths(module), has_few_layers(module)
        can_call_layers = layout is None and bool(self.split_paths)
        self.layered_module = LayeredModule.of(module) if can_call_layers else None
        self.dtype = jnp.dtype(context.dtype or jax.tree.leaves(nnx.state(module, nnx.Param))[0].dtype)

    @classmethod
    def of_step(cls, step: Any, state: Any) -> "Generator":
        """Return the generator of a train state, with the step's precision and mesh.

        On CPUs, the generator uses one device of the process. One device computes a row on all cores; several devices
        would each compute the row, or gather the weights for each token.
        """
        context, module = step.objective.planned.context(None), step.module(state)
        layout = (step.layout.mesh, step.layout.rules)
        if is_on_cpus(module):
            module, layout = copy_to_first_device(module), None
        return cls(module, step.experiment.model, context, layout)

    @functools.cached_property
    def split_params(self) -> Any:
        """The parameters. Those of the layers are split by layer if each layer can be a view of the stacked arrays."""
        return split_layers(self.params, self.split_paths)

    @property
    def prefill_params(self) -> Any:
        """The parameters as `Programs.prefill` takes them."""
        return self.params if self.layered_module is None else layered_params(self.split_params)

    @property
    def step_params(self) -> Any:
        """The parameters as `Programs.advance` takes them."""
        return self.split_params if self.is_unrolled else self.prefill_params

    def programs(self, kind: DrawKind) -> Programs:
        """Return the programs of the model. They call the layers one by one, unroll all layers, or loop over them."""
        layer_paths = self.split_paths if self.is_unrolled else ()
        whole_programs = module_programs(
            self.graphdef, self.model, self.context, self.layout, self.dtype, kind, layer_paths
        )
        if self.layered_module is None:
            return whole_programs
        layerwise_programs = layer_programs(self.layered_module, self.model, self.context, self.dtype, kind)
        return layerwise_programs._replace(advance=whole_programs.advance) if self.is_unrolled else layerwise_programs

    @property
    def devices(self) -> list[Any]:
        """The devices that hold the parameters."""
        arrays = [leaf for leaf in jax.tree.leaves(self.params) if isinstance(leaf, jax.Array)]
        return list(arrays[0].devices()) if self.layout is None else list(self.layout[0].local_devices)

    @property
    def row_shard_count(self) -> int:
        """Number of row shards in the layout. Rows are sharded only if their number is a multiple of this number."""
        return 1 if self.layout is None else shard_count(self.layout[0], self.layout[1].batch)

    def start(
        self,
        prompts: Sequence[np.ndarray],
        copy_count: int,
        token_count: int,
        sampling_and_id_limit: tuple[Sampling, int],
    ) -> "Session":
        """Return a session that draws `token_count` tokens after each prompt, for `copy_count` rows of each prompt.

        Args:
            prompts: int32 ids of each prompt.
            copy_count: number of rows that continue each prompt.
            token_count: number of tokens to draw.
            sampling_and_id_limit: what to draw, and the exclusive upper limit of the drawn ids.
        """
        return Session(self, prompts, copy_count, token_count, sampling_and_id_limit)


class Session:
    """One window: `prefill` feeds the prompts and draws a token for each row, `advance` draws more.

    Args:
        generator: the model.
        prompts: int32 ids of each prompt.
        copy_count: number of rows that continue each prompt.
        token_count: number of tokens to draw.
        sampling_and_id_limit: what to draw, and the exclusive upper limit of the drawn ids.
    """

    def __init__(
        self,
        generator: Generator,
        prompts: Sequence[np.ndarray],
        copy_count: int,
        token_count: int,
        sampling_and_id_limit: tuple[Sampling, int],
    ) -> None:
        sampling, id_limit = sampling_and_id_limit
        self.generator, self.copy_count = generator, copy_count
        self.draw_settings, self.seed = settings_of(sampling), sampling.seed
        self.kind = kind_of(sampling, id_limit)
        self.programs = generator.programs(self.kind)
        self.prompt_lengths = np.array([len(prompt) for prompt in prompts], np.int32)
        longest_length = int(self.prompt_lengths.max())
        chunk_count, chunk_length = chunk_count_and_length(longest_length, generator.model.context)
        self.slot_count = max(padded_length(longest_length + token_count - 1), chunk_count * chunk_length)
        padded_prompts = np.zeros((len(prompts), chunk_count * chunk_length), np.int32)
        for padded_prompt, prompt in zip(padded_prompts, prompts, strict=True):
            padded_prompt[: len(prompt)] = prompt
        self.prompt_chunks = padded_prompts.reshape(len(prompts), chunk_count, chunk_length).swapaxes(0, 1)

    def prefill(self, prompt_and_sample_indices: Sequence[tuple[int, int]], offsets: np.ndarray) -> np.ndarray:
        """Feed the prompts and return the first drawn id of each row.

        Args:
            prompt_and_sample_indices: for each row, the index of its prompt and the index of its sample. The random
                draws depend on them.
            offsets: int32 [B], number of tokens of each row's text that come before the window.
        """
        keys = None if self.kind.is_greedy else row_keys(self.seed, np.asarray(prompt_and_sample_indices, np.int32))
        self.row_keys = RowKeys(keys, offsets)
        size_arguments = {"slot_count": self.slot_count, "copy_count": self.copy_count}
        arguments = (
            self.generator.prefill_params,
            self.prompt_chunks,
            self.prompt_lengths,
            self.row_keys,
            self.draw_settings,
        )
        self.rows = self.programs.prefill(*arguments, **size_arguments)
        return np.asarray(self.rows.tokens)

    def advance(self, step_count: int) -> np.ndarray:
        """Draw at most `step_count` more tokens and return their ids [step_count, B], with -1 where none was drawn."""
        arguments = (self.generator.step_params, self.rows, self.row_keys, self.draw_settings, np.int32(step_count))
        self.rows, drawn_ids = self.programs.advance(*arguments)
        return np.asarray(drawn_ids)[:step_count]


@jax.jit
def row_keys(seed: Any, prompt_and_sample_indices: Any) -> Any:
    """Return the random key of each row, from the seed and the indices of its prompt and sample [B, 2]."""
    prompt_keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(seed), prompt_and_sample_indices[:, 0])
    return jax.vmap(jax.random.fold_in)(prompt_keys, prompt_and_sample_indices[:, 1])
