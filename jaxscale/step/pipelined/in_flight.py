"""InFlight: what an asynchronous pipeline keeps between steps, and how it is placed on the mesh."""

import dataclasses
import hashlib
import json
import math
from collections.abc import Container, Iterable, Mapping, Sequence

import jax
from jax.sharding import NamedSharding, PartitionSpec

from jaxscale.programs.dims import Placement, placement_of
from jaxscale.programs.flat import flatten
from jaxscale.programs.placements import place
from jaxscale.recipe.plan import version_1_fields
from jaxscale.state.extra import CompiledProgram, lacks
from jaxscale.state.layout import Layout
from jaxscale.state.naming import Naming, Part, part_of_whole
from jaxscale.state.train_state import TrainState
from jaxscale.step.exchange import describe_codec
from jaxscale.step.pipelined.asynchronous import DEVICE_SPEC, IN_FLIGHT, AsyncPipeline, Flight
from jaxscale.step.pipelined.gradients import MANUAL
from jaxscale.trees import path_name
from jaxscale.typing import Batch, PyTree


@dataclasses.dataclass(frozen=True, eq=False)
class InFlight:
    """The `StateExtra` of an asynchronous pipeline: messages, batches, older weights, gradient sums, watches of stages.

    Args:
        pipeline: the asynchronous pipeline.
        name: key of this extra in `TrainState.extra`.
        label: name of this extra in tables of memory.
    """

    pipeline: AsyncPipeline
    name: str = dataclasses.field(default=IN_FLIGHT, init=False)
    label: str = dataclasses.field(default="in flight", init=False)

    def add_to_layout(self, layout: Layout) -> Layout:
        """Return the layout of the train state with this extra; each array has a first dim over the devices.

        Other dims are split over axes such as tensor as they are at the end of a step, so that no device keeps the
        parts of others between steps.
        """
        abstract_flight = jax.eval_shape(self.pipeline.in_flight, layout.abstract)
        leaves = jax.tree.leaves(abstract_flight)
        specs = [DEVICE_SPEC] * len(leaves)
        if any(size > 1 and axis not in MANUAL for axis, size in layout.mesh.shape.items()):
            placements = self._placements_after_step(self._with_flight(layout, abstract_flight, specs))
            specs = [
                _split_spec(leaf.shape, placement, layout.mesh.shape)
                for leaf, placement in zip(leaves, placements, strict=True)
            ]
        return self._with_flight(layout, abstract_flight, specs)

    def _with_flight(self, layout: Layout, abstract_flight: Flight, specs: Sequence[PartitionSpec]) -> Layout:
        """Return a layout with this extra, whose arrays have these specs."""
        leaves, treedef = jax.tree.flatten(abstract_flight)
        placed_leaves = [
            jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(layout.mesh, spec))
            for leaf, spec in zip(leaves, specs, strict=True)
        ]
        return layout.with_extra(self.name, treedef.unflatten(placed_leaves))

    def _placements_after_step(self, layout: Layout) -> list[Placement]:
        """Return the placement of each array of this extra at the end of a step whose arguments have this layout."""

        def flight_after_step(state: TrainState, batch: Batch) -> Flight:
            """Return the state in flight after a step."""
            next_state, _ = self.pipeline.step_in_stream(state, batch)
            return next_state.extra[self.name]

        program = flatten(jax.make_jaxpr(flight_after_step)(layout.abstract, self.pipeline.batch_shapes))
        input_placements = [placement_of(leaf.sharding, len(leaf.shape)) for leaf in jax.tree.leaves(layout.abstract)]
        input_placements += [
            placement_of(layout.batch_sharding, len(leaf.shape)) for leaf in jax.tree.leaves(self.pipeline.batch_shapes)
        ]
        by_value = place(program, input_placements, layout.mesh.shape).by_value
        return [() if value is None else by_value[value] for value in program.outputs]

    def init(self, state: TrainState) -> Flight:
        """Return the state in flight of an empty pipeline."""
        return self.pipeline.in_flight(state)

    def to_saved(self, state: TrainState) -> TrainState:
        """Return the state itself, because a checkpoint holds this extra unchanged."""
        return state

    def to_saved_abstract(self, abstract: TrainState) -> TrainState:
        """Return the abstract state itself, because a checkpoint holds this extra unchanged."""
        return abstract

    def from_saved(self, state: TrainState) -> TrainState:
        """Return the state from a checkpoint; the pipeline starts empty if an array of this extra is missing."""
        if not lacks(state.extra[self.name]):
            return state
        other_extras = {name: tree for name, tree in state.extra.items() if name != self.name}
        shardings = self.add_to_layout(self.pipeline.layout).state_shardings.extra[self.name]
        flight = jax.jit(self.pipeline.in_flight, out_shardings=shardings)(
            dataclasses.replace(state, extra=other_extras)
        )
        return dataclasses.replace(state, extra={**other_extras, self.name: flight})

    def checkpoint_parts(self, naming: Naming, abstract: TrainState) -> PyTree[Part]:
        """Return a tree with a `Part` for each array; the names contain a hash, so that other plans ignore the arrays.

        The hash is of the plan, the layers of each stage, the batch size, the version of JAX, and the arrays' shapes.
        """
        pipeline, abstract_flight = self.pipeline, abstract.extra[self.name]
        shapes_and_dtypes = [(leaf.shape, str(leaf.dtype)) for leaf in jax.tree.leaves(abstract_flight)]
        planned = pipeline.planned
        hashed_values = [
            version_1_fields(planned.plan),
            pipeline.stages.layer_counts,
            planned.experiment.batch,
            jax.__version__,
            shapes_and_dtypes,
        ]
        plan_hash = hashlib.sha256(json.dumps(hashed_values, sort_keys=True).encode()).hexdigest()[:12]
        prefix = f"{self.name}/{pipeline.method.name}-{plan_hash}"
        return jax.tree_util.tree_map_with_path(
            lambda path, leaf: part_of_whole(f"{prefix}/{path_name(path)}", leaf), abstract_flight
        )

    def note_on_missing(self, saved_names: Container[str], step_names: Iterable[str]) -> str:
        """Return a note for the user if the checkpoint lacks arrays of this extra; empty if it lacks none.

        Args:
            saved_names: names of the arrays in the checkpoint.
            step_names: names of the arrays that the step restores.
        """
        if all(name in saved_names for name in step_names if name.startswith(f"{self.name}/")):
            return ""
        return f"; it has nothing in flight for {self.pipeline.pipeline_text}, which starts empty"

    def describe(self) -> list[str]:
        """Return lines for the user on the pipeline and on its codec."""
        optimizer = self.pipeline.planned.experiment.optimizer
        codec_lines = (
            []
            if self.pipeline.gradient_exchange is None
            else describe_codec(self.pipeline.gradient_exchange, optimizer)
        )
        return [str(self.pipeline), *codec_lines]

    def check(self, program: CompiledProgram) -> None:
        """Check nothing: the text of the program does not show how often stages update."""


def _split_spec(shape: tuple[int, ...], placement: Placement, axis_sizes: Mapping[str, int]) -> PartitionSpec:
    """Return the spec of an array in flight: its first dim over the devices, the others over automatic mesh axes.

    A dim that its axes cannot split evenly stays whole.
    """
    axes_by_dim: list[tuple[str, ...] | None] = []
    for dim_size, axes in zip(shape[1:], placement[1:], strict=False):
        split_axes = tuple(axis for axis in axes if axis not in MANUAL and axis_sizes[axis] > 1)
        is_even = dim_size % math.prod(axis_sizes[axis] for axis in split_axes) == 0
        axes_by_dim.append(split_axes if split_axes and is_even else None)
    while axes_by_dim and axes_by_dim[-1] is None:
        axes_by_dim.pop()
    return PartitionSpec(*DEVICE_SPEC, *axes_by_dim)
