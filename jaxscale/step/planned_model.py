"""PlannedModel: a model with its plan; traces of the model follow the plan's placements and precision.

The modules that compute gradients or scores of a batch (`gradients.py`, `pipelined/`) trace a `PlannedModel`.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from jaxscale import blocks
from jaxscale.blocks import Context, Loss
from jaxscale.lowbit.products import RECIPES
from jaxscale.offload.weights import with_deferred_offload, with_streamed_weights
from jaxscale.programs import tiles
from jaxscale.recipe.experiment import Experiment
from jaxscale.recipe.plan import Plan
from jaxscale.sharding import place
from jaxscale.sharding.memory_space import on_host, row_major, to_device
from jaxscale.sharding.rules import AxisRules
from jaxscale.sharding.zero import without_axis
from jaxscale.state.layout import Layout
from jaxscale.state.pure_model import PureModel
from jaxscale.state.split_rows import with_split_rows
from jaxscale.state.train_state import TrainState
from jaxscale.step.host import streamed_weights
from jaxscale.typing import Array, Batch, Float, Key, Params, PyTree

R = TypeVar("R")
FromWeights = Callable[[Params], Params]
"""A function from the differentiated leaves to the parameters of the module."""
Specs: TypeAlias = PyTree[PartitionSpec]
"""A tree of placements; one placement may stand for all leaves of a subtree."""


@dataclasses.dataclass(frozen=True, eq=False)
class PlannedModel:
    """A model under a plan.

    Args:
        experiment: what is trained.
        plan: the plan, with its mesh settled.
        pure_model: the model as pure functions.
        layout: the mesh and every placement.
        treatment: how blocks run in a pass that computes gradients; `None` leaves the blocks unchanged.
    """

    experiment: Experiment
    plan: Plan
    pure_model: PureModel
    layout: Layout
    treatment: blocks.Treatment | None = None

    @contextlib.contextmanager
    def tracing(self, *, is_forward_only: bool = False) -> Iterator[None]:
        """Open a context that applies the plan's placements, treatment of blocks and matrix precision to a trace.

        Args:
            is_forward_only: whether no backward pass follows; if so, blocks keep no values for a backward pass.
        """
        matmul_precision = self.plan.matmul if self.plan.matmul in ("high", "highest") else None
        with (
            jax.default_matmul_precision(matmul_precision) if matmul_precision else contextlib.nullcontext(),
            place.layout(self.layout.mesh, self.layout.rules),
            blocks.treating(self._treatment(is_forward_only)),
            blocks.adapting(with_split_rows if self._splits_rows else None),
        ):
            yield

    @property
    def _splits_rows(self) -> bool:
        """Return whether products of a user's own layers are placed, so that XLA gathers the weights of ZeRO 3."""
        are_weights_split = self.plan.zero == 3 and self.plan.pipeline is None and self.layout.mesh.shape["fsdp"] > 1
        return are_weights_split and self.pure_model.has_foreign_layers

    def _treatment(self, is_forward_only: bool) -> blocks.Treatment:
        """Return how blocks run, with their weights and residuals on the host if the plan places them there."""
        is_plain_treatment = is_forward_only or self.treatment is None
        treatment = blocks.Treatment(unroll=self.plan.unroll) if is_plain_treatment else self.treatment
        assert treatment is not None
        if self.plan.offload.weights == "host":
            treatment = with_streamed_weights(treatment)
        has_pipeline = self.plan.pipeline is not None
        return with_deferred_offload(treatment) if has_pipeline and self.plan.stages_keep == "residuals" else treatment

    def shard_map_of(
        self, body: Callable[..., R], manual_axes: Sequence[str], input_specs: Specs, output_specs: Specs
    ) -> Callable[..., R]:
        """Return a function that runs `body` on every device, in a region that is manual over some mesh axes.

        In the region, `body` computes with this device's shards, and contains all communication along the manual axes.
        The compiler handles the other axes, and `constrain` places arrays along those axes only.

        Args:
            body: function of this device's shards. If `body` receives weights whole, their gradients are not summed
                over the manual axes.
            manual_axes: names of the manual mesh axes.
            input_specs: placements of the arguments of `body` along the manual axes.
            output_specs: placements of the results of `body` along the manual axes.
        """
        automatic_axes_by_field = {
            field.name: tuple(axis for axis in getattr(self.layout.rules, field.name) if axis not in manual_axes)
            for field in dataclasses.fields(AxisRules)
        }

        def body_in_layout(*arguments: PyTree) -> R:
            """Run `body` with a layout in which `constrain` uses the automatic axes only."""
            with place.layout(jax.sharding.get_abstract_mesh(), AxisRules(**automatic_axes_by_field)):
                return body(*arguments)

        return jax.shard_map(
            body_in_layout,
            mesh=self.layout.mesh,
            in_specs=input_specs,
            out_specs=output_specs,
            axis_names=set(manual_axes),
            check_vma=False,
        )

    def context(self, key: Key | None, row_indices: Array | None = None) -> Context:
        """Return the settings of a forward pass.

        Args:
            key: key of the step; `None` if nothing is random.
            row_indices: index in the global batch of every row; `None` if nothing depends on it.
        """
        return Context(
            key=key,
            examples=row_indices,
            dtype=None if self.plan.precision == "float32" else self.plan.precision,
            matmul=self.plan.matmul if self.plan.matmul in RECIPES else None,
            attention=self.plan.kernels.attends,
            loss_chunk=self.plan.kernels.loss_chunk,
            loss=self.plan.kernels.scores,
        )

    def loss(self, module: nnx.Module, batch: Batch, context: Context) -> Loss:
        """Return the sums of the model's loss over a batch."""
        return self.experiment.model.loss(module, batch, context)

    def row_indices(self, batch: Batch) -> Array:
        """Return the index of every row of a global batch."""
        return jnp.arange(next(iter(batch.values())).shape[0], dtype=jnp.int32)

    def key(self, state: TrainState) -> Key:
        """Return the random key of the step that starts from a state."""
        return jax.random.fold_in(jax.random.key(self.experiment.seed), state.step)

    def read_spec(self, name: str) -> PartitionSpec:
        """Return the placement in which a pipeline's loop reads a parameter; fsdp splits only stacked parameters."""
        placement = self.layout.placements[name]
        if not self.pure_model.is_stacked(name):
            return without_axis(placement.compute, "fsdp")
        return placement.master if self.plan.offload.weights == "host" else placement.compute

    # -- weights and gradients -----------------------------------------------------------------------------------------

    def place_gradients(self, gradients: Params, *, is_manual: bool = False) -> Params:
        """Return the gradients in float32, placed by the plan; gradients on the host stay unchanged.

        Args:
            gradients: the gradient of every parameter.
            is_manual: whether this is inside a region that is manual over replicas.
        """

        def place_gradient(gradient: Array, sharding: NamedSharding) -> Array:
            """Constrain one gradient to its sharding, cast it to float32, and return it."""
            if on_host(gradient):
                return gradient
            mesh = jax.sharding.get_abstract_mesh() if is_manual else sharding.mesh
            return jax.lax.with_sharding_constraint(gradient, NamedSharding(mesh, sharding.spec)).astype(jnp.float32)

        return jax.tree.map(place_gradient, gradients, self.layout.gradient_shardings)

    def copies(self, params: Params) -> Params:
        """Return the copies of the parameters that the passes read; the loss is differentiated with respect to them."""
        if self.plan.precision == "float32":
            return params
        are_masters_split, dtype = self.plan.zero in (1, 2), jnp.dtype(self.plan.precision)
        if self.plan.reduce == "float32" and not are_masters_split:
            return params  # the layers cast at the point of use, and return float32 gradients

        def copy(param: Array, master_sharding: NamedSharding, compute_sharding: NamedSharding) -> Array:
            """Return a parameter in `dtype`, moved from its master's sharding to the sharding that the passes read."""
            # masters themselves may lie on the host
            device_master_sharding = NamedSharding(master_sharding.mesh, master_sharding.spec)
            if not jnp.issubdtype(param.dtype, jnp.floating):
                return param
            narrow_param = param.astype(dtype)
            if are_masters_split:
                narrow_param = jax.lax.with_sharding_constraint(narrow_param, device_master_sharding)
                # without the barrier XLA:GPU would gather first and cast later, at twice the bytes
                narrow_param = jax.lax.optimization_barrier(narrow_param)
                narrow_param = jax.lax.with_sharding_constraint(narrow_param, compute_sharding)
                if self.layout.platform == "tpu" and not on_host(narrow_param):
                    # otherwise XLA keeps a gathered weight in the layout that pads its shard least, plus a row-major
                    # copy for the loop over layers; with microbatches it repeats that copy each time
                    pads_shard, pads_whole = (
                        tiles.pads_less_in_other_layout(sharding.shard_shape(param.shape))
                        for sharding in (master_sharding, compute_sharding)
                    )
                    narrow_param = row_major(narrow_param) if pads_shard and not pads_whole else narrow_param
            return narrow_param.astype(param.dtype) if self.plan.reduce == "float32" else narrow_param

        return jax.tree.map(copy, params, self.layout.master_shardings, self.layout.compute_shardings)

    def differentiated_leaves(
        self, params: Params, copies: Params | None = None, *, is_manual: bool = False
    ) -> tuple[Params, FromWeights]:
        """Return the leaves to differentiate with respect to, and a function from them to the module's parameters.

        Args:
            params: the float32 masters, on device or host.
            copies: the copy of each parameter that a pass on the device reads; by default the result of `copies`.
            is_manual: whether this is inside a region that is manual over replicas.
        """
        copies = self.copies(to_device(params)) if copies is None else copies
        if self.plan.offload.weights == "device":
            return copies, leaves_as_params
        shardings = self.layout.gradient_shardings
        if is_manual:
            mesh = jax.sharding.get_abstract_mesh()
            shardings = jax.tree.map(lambda sharding: NamedSharding(mesh, sharding.spec), shardings)
        return streamed_weights(self.layout, params, copies, shardings)


def leaves_as_params(leaves: Params) -> Params:
    """Return the leaves unchanged: the `FromWeights` of a model whose parameters are the differentiated leaves."""
    return leaves


def positive_divisor(weight: Float[Array, ""]) -> Float[Array, ""]:
    """Return a sum of weights as a divisor: 1 in place of 0, so a batch without targets has loss 0."""
    return jnp.where(weight > 0, weight, 1.0)
