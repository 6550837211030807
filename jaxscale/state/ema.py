"""The exponential moving average of weights, which evaluation, samples and export read.

    a_n = d_n a_(n-1) + (1 - d_n) w_n,    d_n = min(d, (1 + n) / (10 + n)),    a_0 = w_0

The average is a `StateExtra`: float32 arrays, placed like optimizer state, and divided in a checkpoint like parameters.
Until the decay d_n reaches d, the average covers roughly the last tenth of the updates.
"""

import dataclasses
from collections.abc import Callable, Container, Iterable
from typing import TypeAlias, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.tree_util import KeyPath

from jaxscale.state.extra import CompiledProgram, lacks
from jaxscale.state.layout import Layout
from jaxscale.state.naming import Naming, Part
from jaxscale.state.train_state import TrainState
from jaxscale.trees import path_name
from jaxscale.typing import Array, Bool, Params, PyTree

Gradients = TypeVar("Gradients")
_UpdateFn: TypeAlias = Callable[[Gradients, TrainState, Bool[Array, ""]], tuple[TrainState, Bool[Array, ""]]]
"""A function from (gradients, state, whether the step is good so far) to (next state, whether the step is good)."""
EMA = "ema"
"""Key of the average in `TrainState.extra`, and prefix of its arrays' names in a checkpoint."""


@dataclasses.dataclass(frozen=True)
class WeightAverage:
    """The `StateExtra` of the average of weights.

    Args:
        decay: d, the decay of the average after many updates.
        name: key of this extra in `TrainState.extra`.
        label: name of this extra in tables of memory.
    """

    decay: float
    name: str = dataclasses.field(default=EMA, init=False)
    label: str = dataclasses.field(default="average of weights", init=False)

    def add_to_layout(self, layout: Layout) -> Layout:
        """Return the layout of a train state with the average, given the layout without it."""

        def abstract_average(path: KeyPath, leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            sharding = NamedSharding(layout.mesh, layout.placements[path_name(path)].state)
            return jax.ShapeDtypeStruct(leaf.shape, jnp.float32, sharding=sharding)

        return layout.with_extra(self.name, jax.tree_util.tree_map_with_path(abstract_average, layout.abstract.params))

    def init(self, state: TrainState) -> Params:
        """Return the initial average: the weights in float32."""
        return jax.tree.map(lambda weight: weight.astype(jnp.float32), state.params)

    def update_fn_with_average(self, update_fn: _UpdateFn[Gradients]) -> _UpdateFn[Gradients]:
        """Return a function like `update_fn` that also updates the average; a bad step leaves it unchanged."""

        def update(
            gradients: Gradients, state: TrainState, is_good: Bool[Array, ""]
        ) -> tuple[TrainState, Bool[Array, ""]]:
            next_state, is_good = update_fn(gradients, state, is_good)
            update_count = state.watch.good.astype(jnp.float32) + 1.0
            decay = jnp.minimum(self.decay, (1.0 + update_count) / (10.0 + update_count))
            rate = jnp.where(is_good, 1.0 - decay, 0.0)
            average = jax.tree.map(
                lambda mean, weight: mean + rate * (weight.astype(jnp.float32) - mean),
                state.extra[self.name],
                next_state.params,
            )
            return dataclasses.replace(next_state, extra={**next_state.extra, self.name: average}), is_good

        return update

    def to_saved(self, state: TrainState) -> TrainState:
        """Return the state itself, because a checkpoint holds the average unchanged."""
        return state

    def to_saved_abstract(self, abstract: TrainState) -> TrainState:
        """Return the abstract state itself, because a checkpoint holds the average unchanged."""
        return abstract

    def from_saved(self, state: TrainState) -> TrainState:
        """Return the state from a checkpoint; an average that the checkpoint lacks starts from the weights."""
        average = state.extra[self.name]
        if not lacks(average):
            return state
        return dataclasses.replace(state, extra={**state.extra, self.name: jax.jit(self.init)(state)})

    def checkpoint_parts(self, naming: Naming, abstract: TrainState) -> PyTree[Part]:
        """Return the `Part` of each leaf; a checkpoint divides the average into arrays as it does the parameters."""
        return jax.tree_util.tree_map_with_path(
            lambda path, leaf: naming.part_of_param(self.name, path, path_name(path), leaf), abstract.extra[self.name]
        )

    def note_on_missing(self, saved_names: Container[str], step_names: Iterable[str]) -> str:
        """Return a note for the user if the checkpoint lacks the average; otherwise an empty text."""
        is_missing = any(name.startswith(f"{self.name}/") and name not in saved_names for name in step_names)
        return "; it has no average of weights, which starts from the weights" if is_missing else ""

    def describe(self) -> list[str]:
        """Return a line for the user on the average and its decay."""
        return [f"average of weights with decay {self.decay:g}, which evaluation, samples and export read"]

    def check(self, program: CompiledProgram) -> None:
        """Check nothing: the step returns the average, so it takes effect."""


def with_average(state: TrainState) -> TrainState:
    """Return the state with the average as its weights; without an average, the state itself."""
    average = state.extra.get(EMA)
    if average is None:
        return state
    weights = jax.tree.map(lambda mean, weight: mean.astype(weight.dtype), average, state.params)
    return dataclasses.replace(state, params=weights)
