"""Layout: the mesh of a plan, and where every leaf of the train state lies on it."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Protocol, TypeAlias, TypeVar, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec, Sharding
from jax.tree_util import KeyPath

from jaxscale.blocks import Model
from jaxscale.errors import UserError
from jaxscale.lowbit.few_bit_weight import FORMATS
from jaxscale.lowbit.products import RECIPES
from jaxscale.lowbit.quantized import map_params
from jaxscale.model_traits import ModelTraits
from jaxscale.recipe.plan import Plan
from jaxscale.sharding.memory_space import HOST_KIND
from jaxscale.sharding.partition import axes_of
from jaxscale.sharding.rules import AxisRules
from jaxscale.sharding.zero import Placement, placement, split_further, stack_placement
from jaxscale.state.few_bit_loading import encoded_arrays
from jaxscale.state.pure_model import LazyArray, PureModel, in_groups
from jaxscale.state.train_state import TrainState, Watch
from jaxscale.trees import leaf_bytes, named_leaves, path_name
from jaxscale.typing import Array, Params, PyTree

AbstractArrays: TypeAlias = PyTree[jax.ShapeDtypeStruct]
"""A tree of abstract arrays with shardings."""
Shardings: TypeAlias = PyTree[NamedSharding]
Label = TypeVar("Label", NamedSharding, str)
BATCH_AXES = ("replica", "data", "fsdp")
"""Mesh axes over which the rows of a batch are split."""
PIPE_AXIS = "pipe"
"""Mesh axis over which the stages of a pipeline are divided."""
REPLICA_AXIS = "replica"
"""Mesh axis along which the whole model is replicated, over the slowest links: those between slices or nodes."""


@runtime_checkable
class Device(Protocol):
    """A device that is present, or a description of a device that a plan is made for."""

    @property
    def platform(self) -> str:
        """Kind of the device: "cpu", "gpu" or "tpu"."""
        ...

    @property
    def device_kind(self) -> str:
        """Name of the chip."""
        ...


def effective_rules(plan: Plan) -> AxisRules:
    """Return the plan's axis rules, with the axes that Megatron's sequence parallelism and a pipeline add."""
    rules = plan.rules
    if plan.sequence_parallel:
        rules = dataclasses.replace(rules, seq=(*rules.seq, "tensor"))
    return rules if plan.pipeline is None else dataclasses.replace(rules, layers=(*rules.layers, PIPE_AXIS))


def vocab_multiple(plan: Plan) -> int:
    """Return the number of shards of the vocabulary; the padded size of the vocabulary is a multiple of this number."""
    assert plan.mesh is not None
    return math.prod(plan.mesh.sizes[axis] for axis in plan.rules.vocab)


def check_model(plan: Plan, model: Model) -> None:
    """Refuse a plan that cannot split the model evenly, or that has settings which the model does not use.

    Args:
        plan: the plan, with its mesh settled.
        model: the model.

    Raises:
        UserError: a dim of the model cannot be split evenly over its mesh axes, or a setting has no effect.
    """
    assert plan.mesh is not None
    rules, axis_sizes = effective_rules(plan), plan.mesh.sizes
    if set(rules.batch) != set(BATCH_AXES):
        raise UserError(
            f"rules.batch: got {', '.join(rules.batch) or 'none'}, expected {', '.join(BATCH_AXES)}, because the rows "
            "of a batch are split over all of them; change the mesh instead"
        )
    for logical_axis, dim_size in model.logical_sizes().items():
        axes = rules.axes(logical_axis)
        shard_count = math.prod(axis_sizes[axis] for axis in axes)
        if logical_axis != "vocab" and dim_size % shard_count:
            axes_text = " x ".join(f"{axis}:{axis_sizes[axis]}" for axis in axes if axis_sizes[axis] > 1)
            raise UserError(
                f"{logical_axis}: {dim_size} cannot be split evenly over {axes_text}; change the mesh or the model, "
                f"or keep {logical_axis} whole with --plan.rules.{logical_axis.replace('_', '-')} none"
            )
    kernels, traits = plan.kernels, ModelTraits.of(model)
    if traits.foreign:
        if plan.matmul in RECIPES:
            raise UserError(
                f"matmul {plan.matmul}: this model has its own layers, and only jaxscale.layers support this recipe; "
                "build it of jaxscale.layers, or leave matmul out"
            )
        if plan.reduce == "float32" and plan.precision != "float32":
            raise UserError(
                "reduce float32 with precision bfloat16: only jaxscale.layers support this, and this model has its own "
                "layers, which reduce in bfloat16; leave reduce out"
            )
        if kernels.loss_chunk is not None:
            raise UserError(
                "loss_chunk: this model computes its own loss, which jaxscale can't chunk; leave loss_chunk out"
            )
        if kernels.scores != "auto":
            raise UserError(
                f"kernels cross_entropy={kernels.scores}: this model computes its own loss; leave cross_entropy out"
            )
        if kernels.names_attention:
            raise UserError(f"attention {kernels.attends}: this model has its own layers; leave attention out")
    context_length = traits.context
    if context_length is not None:
        shard_count = math.prod(axis_sizes[axis] for axis in rules.seq)
        if context_length % shard_count:
            raise UserError(
                f"context {context_length}: mesh {plan.mesh} splits the context {shard_count} ways; take a multiple of "
                f"{shard_count}"
            )


def placements_of(pure_model: PureModel, plan: Plan, mesh: Mesh | AbstractMesh) -> dict[str, Placement]:
    """Return the `Placement` of each parameter, by name: of its master, optimizer state, gradient and copy."""
    rules, has_copy = effective_rules(plan), plan.precision != "float32"
    placements = {}
    for name, abstract_param in named_leaves(pure_model.abstract_params).items():
        shape = abstract_param.shape[1:] if name in pure_model.copy_numbers else abstract_param.shape
        param_placement = placement(shape, pure_model.axis_names.get(name), plan.zero, has_copy, mesh, rules)
        if name in pure_model.copy_numbers:  # each stage's copy of a shared parameter stays on its device
            param_placement = stack_placement(param_placement, PIPE_AXIS)
        elif plan.pipeline is not None and not pure_model.is_stacked(name):
            # a parameter that stages share is gathered when it is read, and split over the stages between steps
            param_placement = split_further(param_placement, PIPE_AXIS, shape, mesh)
        placements[name] = param_placement
    return placements


def frozen_specs_of(pure_model: PureModel, plan: Plan, mesh: Mesh | AbstractMesh) -> dict[str, PartitionSpec]:
    """Return the placement in which passes read each frozen parameter, by the parameter's name."""
    rules = effective_rules(plan)
    return {
        name: placement(leaf.shape, pure_model.axis_names.get(name), plan.zero, True, mesh, rules).compute
        for name, leaf in named_leaves(pure_model.abstract_model_state).items()
        if name in pure_model.frozen
    }


@dataclasses.dataclass(frozen=True, eq=False)
class Layout:
    """The mesh, and the placement of every leaf of the train state on it.

    Args:
        plan: the plan, with its mesh settled.
        mesh: the mesh of the devices.
        rules: the mesh axes of each logical axis, from `effective_rules`.
        placements: the `Placement` of each parameter, by name: of its master, optimizer state, gradient and copy.
        master_shardings: the `NamedSharding` of each float32 master weight, in a tree like the parameters.
        gradient_shardings: the `NamedSharding` of each gradient, in a tree like the parameters.
        compute_shardings: the `NamedSharding` of the copy of each parameter that forward and backward passes read, in a
            tree like the parameters.
        state_shardings: a train state with the `NamedSharding` of every leaf.
        abstract: a train state with the shape, dtype and sharding of every leaf.
        streamed_names: names of the parameters of blocks. If the plan keeps weights on the host, each block copies its
            parameters to the device.
    """

    plan: Plan
    mesh: Mesh | AbstractMesh
    rules: AxisRules
    placements: dict[str, Placement]
    master_shardings: Shardings
    gradient_shardings: Shardings
    compute_shardings: Shardings
    state_shardings: TrainState
    abstract: TrainState
    streamed_names: frozenset[str]

    @classmethod
    def of(
        cls, pure_model: PureModel, optimizer: optax.GradientTransformation, plan: Plan, mesh: Mesh | AbstractMesh
    ) -> "Layout":
        """Return the layout of a train state; nothing is allocated.

        Args:
            pure_model: the model as pure functions.
            optimizer: the whole optimizer, clipping included.
            plan: the plan, with its mesh settled.
            mesh: the mesh of the devices.
        """
        rules, placements = effective_rules(plan), placements_of(pure_model, plan, mesh)

        def shardings_by_param(kind: str, is_on_host: Callable[[str], bool] = lambda name: False) -> Shardings:
            """Return the sharding of one kind of tensor for each parameter; `kind` is a field of `Placement`."""

            def sharding_of(path: KeyPath, _: jax.ShapeDtypeStruct) -> NamedSharding:
                name = path_name(path)
                sharding = NamedSharding(mesh, getattr(placements[name], kind))
                return sharding.with_memory_kind(HOST_KIND) if is_on_host(name) else sharding

            return jax.tree_util.tree_map_with_path(sharding_of, pure_model.abstract_params)

        master_shardings = shardings_by_param("master", lambda _: plan.offload.masters)
        gradient_shardings = shardings_by_param(
            "gradient", lambda name: plan.offload.gradients == "host" and name in pure_model.block_param_names
        )
        whole_sharding = NamedSharding(mesh, PartitionSpec())
        abstract_params = pure_model.abstract_params
        if plan.state.master == "split":  # masters are kept in bfloat16, with corrections in the optimizer's state
            abstract_bfloat16 = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
            abstract_params = jax.tree.map(
                lambda p: abstract_bfloat16(p.shape) if jnp.issubdtype(p.dtype, jnp.floating) else p, abstract_params
            )
        abstract_optimizer = jax.eval_shape(optimizer.init, abstract_params)
        optimizer_shardings = map_params(
            # factored and scalar states, whose shape is not the parameter's, stay whole; codes and scales of a
            # quantized state have one sharding, because blocks divide a shard
            lambda leaf, param, sharding: _label_tree(leaf, sharding if leaf.shape == param.shape else whole_sharding),
            optimizer,
            abstract_optimizer,
            abstract_params,
            shardings_by_param("state", lambda _: plan.offload.optimizer_state != "device"),
            transform_non_params=lambda _: whole_sharding,
        )
        abstract_step, abstract_watch = jax.eval_shape(lambda: (jnp.zeros((), jnp.int32), Watch.start()))
        unplaced_state = TrainState(
            abstract_step, abstract_params, abstract_optimizer, pure_model.abstract_model_state, abstract_watch
        )
        whole_shardings = jax.tree.map(lambda _: whole_sharding, unplaced_state)
        frozen_specs = frozen_specs_of(pure_model, plan, mesh)
        model_state_shardings = jax.tree_util.tree_map_with_path(
            lambda path, _: NamedSharding(mesh, frozen_specs.get(path_name(path), PartitionSpec())),
            pure_model.abstract_model_state,
        )
        state_shardings = dataclasses.replace(
            whole_shardings, params=master_shardings, optimizer=optimizer_shardings, rest=model_state_shardings
        )
        abstract_state = jax.tree.map(
            lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
            unplaced_state,
            state_shardings,
        )
        return cls(
            plan,
            mesh,
            rules,
            placements,
            master_shardings,
            gradient_shardings,
            shardings_by_param("compute"),
            state_shardings,
            abstract_state,
            pure_model.block_param_names,
        )

    def with_extra(self, name: str, abstract: AbstractArrays) -> "Layout":
        """Return the layout of the train state with an extra added.

        Args:
            name: name of the extra.
            abstract: shapes, dtypes and shardings of the value of the extra.
        """
        extra_shardings = {**self.state_shardings.extra, name: shardings_of(abstract)}
        return dataclasses.replace(
            self,
            state_shardings=dataclasses.replace(self.state_shardings, extra=extra_shardings),
            abstract=dataclasses.replace(self.abstract, extra={**self.abstract.extra, name: abstract}),
        )

    @property
    def platform(self) -> str:
        """Kind of the devices of the mesh: "cpu", "gpu" or "tpu"."""
        return device_of(self.mesh).platform

    @property
    def batch_sharding(self) -> NamedSharding:
        """Sharding of every array of a batch: its rows are split over `BATCH_AXES`."""
        return NamedSharding(self.mesh, PartitionSpec(BATCH_AXES))

    def check_axes_used(self, model: Model) -> None:
        """Refuse a mesh axis over which nothing is split, because such an axis has no effect."""
        param_axes = {axis for placement in self.placements.values() for axis in axes_of(placement.compute)}
        used_axes = param_axes | set(BATCH_AXES)
        used_axes |= set() if self.plan.pipeline is None else {PIPE_AXIS}
        if ModelTraits.of(model).context is not None:
            used_axes |= set(self.rules.seq)
        for axis, device_count in self.mesh.shape.items():
            if device_count > 1 and axis not in used_axes:
                raise UserError(
                    f"mesh {self.plan.mesh}: no parameter or activation of this model is split over {axis}, so its "
                    f"{device_count} devices would repeat the same work; use data or fsdp instead"
                )

    def check_blocks_split(self, pure_model: PureModel) -> None:
        """Refuse a mesh that splits the inputs of a quantized weight, but cannot split its blocks evenly."""
        for name, weight in pure_model.few_bit_weights.items():
            in_axes = self.rules.axes(weight.axes[0])
            shard_count = math.prod(self.mesh.shape[axis] for axis in in_axes)
            if weight.shape[-2] // weight.block % shard_count:
                smaller_block = FORMATS[weight.format].block_of(weight.shape[-2] // shard_count, weight.block)
                advice = f"take base_block {smaller_block}, or " if smaller_block else "take "
                raise UserError(
                    f"mesh {self.plan.mesh}: {name} has {weight.shape[-2]} inputs in blocks of {weight.block} that "
                    f"share a scale, and {weight.shape[-2] // weight.block} blocks cannot be split evenly over "
                    f"{shard_count} devices; {advice}fewer devices along {' and '.join(in_axes)}"
                )

    def check_zero_used(self, optimizer: optax.GradientTransformation) -> None:
        """Refuse a ZeRO stage that splits nothing, because such a stage has no effect."""
        if not self.plan.zero or self.mesh.shape["fsdp"] == 1:
            return
        zero_stage, fsdp_size = self.plan.zero, self.mesh.shape["fsdp"]
        if len(self.unsplit_names()) == len(self.placements):
            raise UserError(
                f"zero {zero_stage}: no parameter has a dim that can be split evenly over fsdp:{fsdp_size}, so nothing "
                "would be split; take fewer devices along fsdp, or zero 0"
            )
        if zero_stage == 1 and self.plan.precision == "float32" and not any(self.owner_names(optimizer)):
            raise UserError(
                "zero 1 splits the optimizer's state, and this optimizer keeps no state in the shapes of the "
                "parameters; take zero 2 or 3, or zero 0"
            )

    def owner_names(self, optimizer: optax.GradientTransformation) -> list[str]:
        """Return, for each leaf of the optimizer's state, the name of the parameter whose shape the leaf has, or "".

        The codes and the scales of a quantized array are two leaves, which get the same name.
        """
        abstract_params = self.abstract.params
        name_tree = jax.tree_util.tree_map_with_path(lambda path, _: path_name(path), abstract_params)
        owner_name_tree = map_params(
            lambda leaf, param, name: _label_tree(leaf, name if leaf.shape == param.shape else ""),
            optimizer,
            self.abstract.optimizer,
            abstract_params,
            name_tree,
            transform_non_params=lambda _: "",
        )
        return jax.tree.leaves(owner_name_tree)

    def unsplit_names(self) -> list[str]:
        """Return the names of the parameters that ZeRO cannot split, because no dim can be split evenly."""
        if not self.plan.zero or self.mesh.shape["fsdp"] == 1:
            return []
        return [name for name, placement in self.placements.items() if "fsdp" not in axes_of(placement.state)]

    def table(self) -> dict[str, PyTree]:
        """Return the layout as plain data for the report: the mesh, and the placements, largest parameter first."""
        param_rows = []
        for name, leaf in named_leaves(self.abstract.params).items():
            shard_element_count = math.prod(leaf.sharding.shard_shape(leaf.shape))
            param_rows.append(
                {
                    "name": name,
                    "shape": list(leaf.shape),
                    "dtype": str(leaf.dtype),
                    "spec": [list(axes) if isinstance(axes, tuple) else axes for axes in leaf.sharding.spec],
                    "bytes": leaf_bytes(leaf),
                    "bytes_per_device": leaf_bytes(leaf) * shard_element_count // max(math.prod(leaf.shape), 1),
                }
            )
        device = device_of(self.mesh)
        return {
            "mesh": {axis: size for axis, size in self.mesh.shape.items() if size > 1},
            "devices": self.mesh.size,
            "kind": device.device_kind,
            "parameters": sorted(param_rows, key=lambda row: -row["bytes"]),
            "unsplit": self.unsplit_names(),
        }


def device_of(mesh: Mesh | AbstractMesh) -> Device:
    """Return one device of a mesh; all devices of a mesh are alike."""
    return mesh.abstract_device if isinstance(mesh, AbstractMesh) else mesh.devices.flat[0]


def shardings_of(abstract: AbstractArrays) -> Shardings:
    """Return a tree with the sharding of each leaf of `abstract`."""
    return jax.tree.map(lambda leaf: leaf.sharding, abstract)


def _label_tree(leaf: PyTree, label: Label) -> PyTree[Label]:
    """Return a tree with the structure of a leaf and a label for each of its arrays; a quantized leaf has two."""
    return jax.tree.map(lambda _: label, leaf)


def first_weights(pure_model: PureModel, layout: Layout) -> tuple[Params, Params]:
    """Create the initial parameters and the model's other initial state, and return both.

    Parameters are drawn at random, or loaded if the model has `initial_params`. Every leaf is created in its sharding,
    so no device ever holds a sharded leaf whole.
    """
    load = getattr(pure_model.model, "initial_params", None)
    loaded_arrays: dict[str, LazyArray] = {}
    if load is not None:
        file_arrays = named_leaves(pure_model.in_rows(in_groups(load(), pure_model.group_depths)))
        loaded_arrays = encoded_arrays(pure_model, file_arrays)

    def without_loaded(tree: PyTree) -> PyTree:
        """Return a tree with `None` for the parameters that are loaded, so that no values are drawn for them."""
        return jax.tree_util.tree_map_with_path(
            lambda path, leaf: None if path_name(path) in loaded_arrays else leaf, tree
        )

    abstract_weights = jax.eval_shape(pure_model.create)
    shardings = (layout.master_shardings, layout.state_shardings.rest)
    drawn_weights = jax.jit(
        lambda: tuple(map(without_loaded, pure_model.create())), out_shardings=tuple(map(without_loaded, shardings))
    )()
    drawn_leaves_by_name = [named_leaves(tree) for tree in drawn_weights]

    def place_array(array: LazyArray, abstract_array: jax.ShapeDtypeStruct, sharding: Sharding) -> Array:
        """Put a host array on the devices shard by shard; dims that are padded in the model get zeros."""
        padding = [(0, padded_size - size) for size, padded_size in zip(array.shape, abstract_array.shape, strict=True)]
        padded_array = np.pad(np.asarray(array), padding) if array.shape != abstract_array.shape else array
        return jax.make_array_from_callback(
            abstract_array.shape, sharding, lambda index: np.asarray(padded_array[index or ()], abstract_array.dtype)
        )

    def weights_of(abstract_tree: PyTree, sharding_tree: Shardings, drawn_leaf_by_name: dict[str, Array]) -> Params:
        """Return a tree of arrays: each loaded array, and the initial value that was drawn for each other leaf."""

        def leaf_of(path: KeyPath, leaf: jax.ShapeDtypeStruct, sharding: NamedSharding) -> Array:
            name = path_name(path)
            if name in loaded_arrays:
                return place_array(loaded_arrays.pop(name), leaf, sharding)
            is_param = name in layout.placements or name in pure_model.frozen
            assert load is None or not is_param or "lora" in name.split("/"), f"{name} was not loaded"
            return drawn_leaf_by_name[name]

        return jax.tree_util.tree_map_with_path(leaf_of, abstract_tree, sharding_tree)

    params, model_state = map(weights_of, abstract_weights, shardings, drawn_leaves_by_name)
    assert not loaded_arrays, f"loaded, but not parameters of the model: {', '.join(loaded_arrays)}"
    return params, model_state


def local_bytes(tree: PyTree, *, is_on_host: bool = False) -> int:
    """Return the number of bytes that a tree of abstract arrays with shardings takes on each device.

    Args:
        tree: tree of abstract arrays with shardings.
        is_on_host: whether to count arrays in host memory instead of those in device memory.
    """
    total_bytes = 0
    for leaf in jax.tree.leaves(tree):
        if (leaf.sharding.memory_kind == HOST_KIND) == is_on_host:
            shard_element_count = math.prod(leaf.sharding.shard_shape(leaf.shape))
            total_bytes += leaf_bytes(leaf) * shard_element_count // max(math.prod(leaf.shape), 1)
    return total_bytes
