"""Products of a user's own layers, whose rows stay split like the rows of the batch.

Under ZeRO 3 the fsdp axis splits weights and the rows of activations. Of a product of the two, XLA can split the rows
or the columns. Layers of this package place their activations, so that XLA gathers weights. Between two products of a
user's layer nothing may be placed: then XLA:GPU split columns in the backward pass, and exchanged activations. With
`with_split_rows` it gathers weights there, too. A mixture of experts (`experts_large` of
`experiments/benchmarks/fit_models.py`, 8 microbatches, batch 64) on 8 H100 sends 0.55 (fsdp:4,tensor:2) and 0.67
(fsdp:8) times the bytes, and holds 0.91 and 0.92 times the bytes.

Left out: convolutions, and products in loops, branches and functions with derivatives of their own.

References:
    Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", arXiv 1910.02054.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding, PartitionSpec

from jaxscale.blocks import BlockFunction
from jaxscale.programs.dims import links_of, shape_of
from jaxscale.programs.inline import InlinedProgram, Step, inline
from jaxscale.programs.walk import inner_jaxprs
from jaxscale.sharding import place
from jaxscale.sharding.partition import shard_count
from jaxscale.sharding.rules import AxisRules

_PRODUCTS = ("dot_general", "ragged_dot_general")
_ACTIVATIONS = 2
"""Index of a block's activations among its arguments, which begin with parameters and other state."""


def with_split_rows(block: BlockFunction) -> BlockFunction:
    """Return a block in which the rows of every matrix product are placed like those of the batch.

    Args:
        block: function of parameters, other state, activations and further arguments. The first dim of the largest
            activation is the rows of the batch; activations with another first dim have no rows.

    Example:
        >>> import jax.numpy as jnp
        >>> block = with_split_rows(lambda weight, state, x: x @ weight)  # outside of a layout, nothing is placed
        >>> block(jnp.ones((2, 3)), (), jnp.ones((4, 2))).shape
        (4, 3)
    """

    def run(*arguments: Any) -> Any:
        """Run the block's program, with its products placed."""
        mesh_and_rules = place.current()
        if mesh_and_rules is None:
            return block(*arguments)
        rows = _Rows.of(arguments[_ACTIVATIONS], *mesh_and_rules)
        if rows is None:
            return block(*arguments)
        closed_jaxpr, abstract_results = jax.make_jaxpr(block, return_shape=True)(*arguments)
        program = inline(closed_jaxpr)
        start = len(closed_jaxpr.consts) + len(jax.tree.leaves(arguments[:_ACTIVATIONS]))
        activations = program.inputs[start : start + len(jax.tree.leaves(arguments[_ACTIVATIONS]))]
        sharding_by_value = rows.product_shardings(program, activations)
        names = {step.outputs[0]: step.eqn.params["name"] for step in program.steps if step.primitive == "name"}

        def place_rows(value: int, array: Any) -> Any:
            """Return the array of a value: with its name in the block, and placed if it is a product with rows."""
            if value in names:
                return checkpoint_name(array, names[value])
            sharding = sharding_by_value.get(value)
            return array if sharding is None else jax.lax.with_sharding_constraint(array, sharding)

        results = program.run((*closed_jaxpr.consts, *jax.tree.leaves(arguments)), place_rows)
        return jax.tree.unflatten(jax.tree.structure(abstract_results), results)

    return run


@dataclasses.dataclass(frozen=True)
class _Rows:
    """The rows of a batch, and their placement.

    Args:
        count: number of rows.
        axes: mesh axes that split the rows.
        are_positions_split: whether other mesh axes split the positions of a row. A dim of rows and positions is then
            left to the compiler.
        mesh: the mesh.
    """

    count: int
    axes: tuple[str, ...]
    are_positions_split: bool
    mesh: Any

    @classmethod
    def of(cls, activations: Any, mesh: Any, rules: AxisRules) -> "_Rows | None":
        """Return the rows of a block's activations; `None` if no mesh axes split them evenly."""
        shapes = [leaf.shape for leaf in jax.tree.leaves(activations) if getattr(leaf, "ndim", 0)]
        axes = tuple(axis for axis in rules.axes("batch") if mesh.shape[axis] > 1)
        row_count = max(shapes, key=math.prod)[0] if shapes else 0
        if not axes or not row_count or row_count % shard_count(mesh, axes):
            return None
        return cls(row_count, axes, any(mesh.shape[axis] > 1 for axis in rules.axes("seq")), mesh)

    def product_shardings(self, program: InlinedProgram, activations: Sequence[int]) -> dict[int, NamedSharding]:
        """Return the sharding of each matrix product of a block that has rows, by the product's number.

        Args:
            program: program of the block.
            activations: numbers of the block's activations.
        """
        dim_by_value = {value: 0 for value in activations if shape_of(program.avals[value])[:1] == (self.count,)}
        sharding_by_value: dict[int, NamedSharding] = {}
        for step in program.steps:
            has_program = bool(inner_jaxprs(step.eqn)) and not step.primitive.startswith("custom_")
            for value in step.outputs:
                dim = None if value is None or has_program else _row_dim(step, program, value, dim_by_value)
                if value is None or dim is None:
                    continue
                dim_by_value[value] = dim
                shape = shape_of(program.avals[value])
                if step.primitive in _PRODUCTS and (shape[dim] == self.count or not self.are_positions_split):
                    entries: list[Any] = [PartitionSpec.UNCONSTRAINED] * len(shape)
                    entries[dim] = self.axes
                    sharding_by_value[value] = NamedSharding(self.mesh, PartitionSpec(*entries))
        return sharding_by_value


def _row_dim(step: Step, program: InlinedProgram, value: int, dim_by_value: Mapping[int, int]) -> int | None:
    """Return the dim of a step's result that corresponds to the rows of an operand; `None` if there is none."""
    operand_shapes = [shape_of(program.avals[atom] if isinstance(atom, int) else atom.value) for atom in step.inputs]
    links = links_of(step.primitive, step.eqn.params, operand_shapes, shape_of(program.avals[value]))
    row_dims = [dim_by_value.get(atom) if isinstance(atom, int) else None for atom in step.inputs]
    return next((result_dim for index, dim, result_dim in links if dim == row_dims[index]), None)
