"""Generator: a model's parameters with its compiled programs, and Session: one window of rows that are decoded."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxscale.blocks import Context
from jaxscale.generation.draw import kind_of, settings_of
from jaxscale.generation.programs import RowKeys, chunk_sizes, padded_length, programs
from jaxscale.generation.sampling import Sampling
from jaxscale.generation.unrolled import is_on_cpus, join_projections, on_first_device, split_layers, stack_paths
from jaxscale.sharding.partition import shard_count
from jaxscale.sharding.place import MeshAndRules


class Generator:
    """A model that decodes: its parameters, and how a forward pass runs and is placed.

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
        if context.matmul is None:  # the scales of a narrow type are those of one projection
            module = join_projections(module)
        self.graphdef, state = nnx.split(module)
        self.params = nnx.to_pure_dict(state)
        self.split_paths = stack_paths(module)
        self.dtype = jnp.dtype(context.dtype or jax.tree.leaves(nnx.state(module, nnx.Param))[0].dtype)

    @classmethod
    def of_step(cls, step: Any, state: Any) -> "Generator":
        """Return the generator of a train state, with the step's precision and mesh.

        The CPUs of a process are one device to it: one device computes a row on all cores, and several would each
        compute it, or gather the weights for each token.
        """
        context, module = step.objective.planned.context(None), step.module(state)
        layout = (step.layout.mesh, step.layout.rules)
        if is_on_cpus(module):
            module, layout = on_first_device(module), None
        return cls(module, step.experiment.model, context, layout)

    @functools.cached_property
    def step_params(self) -> Any:
        """The parameters as the steps take them: those of the layers one by one, if the layers are not scanned."""
        return split_layers(self.params, self.split_paths) if self.split_paths else self.params

    @property
    def devices(self) -> list[Any]:
        """The devices that hold the parameters."""
        leaves = [leaf for leaf in jax.tree.leaves(self.params) if isinstance(leaf, jax.Array)]
        return list(leaves[0].devices()) if self.layout is None else list(self.layout[0].local_devices)

    @property
    def row_shards(self) -> int:
        """Number of parts of the rows that lie on different devices, if the number of rows is a multiple of it."""
        return 1 if self.layout is None else shard_count(self.layout[0], self.layout[1].batch)

    def start(
        self, prompts: Sequence[np.ndarray], copies: int, token_count: int, draws: tuple[Sampling, int]
    ) -> "Session":
        """Return a session that draws `token_count` tokens after each prompt, for `copies` rows of each prompt.

        Args:
            prompts: int32 ids of each prompt.
            copies: number of rows of each prompt.
            token_count: number of tokens to draw.
            draws: what to draw, and the exclusive upper limit of the drawn ids.
        """
        return Session(self, prompts, copies, token_count, draws)


class Session:
    """One window: `prefill` feeds the prompts and draws a token for each row, `advance` draws more.

    Args:
        generator: the model.
        prompts: int32 ids of each prompt.
        copies: number of rows of each prompt.
        token_count: number of tokens to draw.
        draws: what to draw, and the exclusive upper limit of the drawn ids.
    """

    def __init__(
        self,
        generator: Generator,
        prompts: Sequence[np.ndarray],
        copies: int,
        token_count: int,
        draws: tuple[Sampling, int],
    ) -> None:
        sampling, choice_count = draws
        self.generator, self.copies = generator, copies
        self.settings, self.seed = settings_of(sampling), sampling.seed
        settings = (generator.graphdef, generator.model, generator.context, generator.layout)
        self.kind = kind_of(sampling, choice_count)
        self.programs = programs(*settings, self.kind, generator.split_paths)
        self.lengths = np.array([len(prompt) for prompt in prompts], np.int32)
        longest_length = int(self.lengths.max())
        chunk_count, chunk_length = chunk_sizes(longest_length, generator.model.context)
        self.slots = max(padded_length(longest_length + token_count - 1), chunk_count * chunk_length)
        padded_prompts = np.zeros((len(prompts), chunk_count * chunk_length), np.int32)
        for padded_prompt, prompt in zip(padded_prompts, prompts, strict=True):
            padded_prompt[: len(prompt)] = prompt
        self.prompts = padded_prompts.reshape(len(prompts), chunk_count, chunk_length).swapaxes(0, 1)

    def prefill(self, indices: Sequence[tuple[int, int]], offsets: np.ndarray) -> np.ndarray:
        """Feed the prompts and return the first drawn id of each row.

        Args:
            indices: for each row, the number of its prompt and of its sample, which determine its random draws.
            offsets: int32 [B], number of tokens of each text before the window.
        """
        keys = None if self.kind.is_greedy else _row_keys(self.seed, np.asarray(indices, np.int32))
        self.row_keys = RowKeys(keys, offsets)
        named = {"slots": self.slots, "copies": self.copies}
        arguments = (self.generator.params, self.prompts, self.lengths, self.row_keys, self.settings)
        self.rows = self.programs.prefill(*arguments, **named)
        return np.asarray(self.rows.tokens)

    def advance(self, step_count: int) -> np.ndarray:
        """Draw at most `step_count` more tokens and return their ids [step_count, B], with -1 where none was drawn."""
        arguments = (self.generator.step_params, self.rows, self.row_keys, self.settings, np.int32(step_count))
        self.rows, drawn_ids = self.programs.advance(*arguments)
        return np.asarray(drawn_ids)[:step_count]


@jax.jit
def _row_keys(seed: Any, indices: Any) -> Any:
    """Return the random key of each row, from the seed and the row's indices [B, 2]."""
    prompt_keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(seed), indices[:, 0])
    return jax.vmap(jax.random.fold_in)(prompt_keys, indices[:, 1])
