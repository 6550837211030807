"""Products of a user's own layers, whose rows stay split like the rows of the batch.

Under ZeRO 3 the fsdp axis splits weights and the rows of activations. Of a product of the two, XLA can split the rows
or the columns. Layers of this package place their activations, so that XLA gathers weights. Between two products of a
user's layer nothing may be placed: then XLA:GPU split columns in some products, and exchanged activations beside
weights. With `with_split_rows` it gathers weights alone. A mixture of experts (`experts_large` of
`experiments/benchmarks/fit_models.py`, 8 microbatches, batch 64) on 8 H100 sends 0.55 (fsdp:4,tensor:2) and 0.67
(fsdp:8) times the bytes, and holds 0.91 and 0.92 times the bytes.

If a block's weights are larger than the activations that would be exchanged, nothing is placed: XLA exchanges
activations alone then, and gathered weights would be more (`experts_many` in float32 with 2048 tokens a device sends
0.63 times the bytes of gathered weights). The figures are in docs/techniques/zero.md.

Left out: convolutions, and products in loops, branches and functions with derivatives of their own.

References:
    Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", arXiv 1910.02054.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from jaxscale.blocks import BlockFunction
from jaxscale.programs.dims import links_of, shape_of
from jaxscale.programs.inline import InlinedProgram, Step, inline
from jaxscale.programs.walk import inner_jaxprs
from jaxscale.sharding import place
from jaxscale.sharding.partition import shard_count
from jaxscale.sharding.rules import AxisRules
from jaxscale.sharding.zero import ZERO_AXIS
from jaxscale.typing import Array, PyTree

_PRODUCTS = ("dot_general", "ragged_dot_general")
_ACTIVATIONS = 2
"""Index of a block's activations among its arguments, which begin with parameters and other state."""


def with_split_rows(block: BlockFunction) -> BlockFunction:
    """Return a block in which the rows of every matrix product are placed like those of the batch.

    Nothing is placed if the block's weights have more elements than the activations that would be exchanged.

    Args:
        block: function of parameters, other state, activations and further arguments. The first dim of the largest
            activation is the rows of the batch; activations with another first dim have no rows.

    Example:
        >>> import jax.numpy as jnp
        >>> block = with_split_rows(lambda weight, state, x: x @ weight)  # outside of a layout, nothing is placed
        >>> block(jnp.ones((2, 3)), (), jnp.ones((4, 2))).shape
        (4, 3)
    """

    def run(*arguments: PyTree) -> PyTree:
        """Run the block's program, with its products placed."""
        mesh_and_rules = place.current()
        if mesh_and_rules is None:
            return block(*arguments)
        rows = _Rows.of(arguments[_ACTIVATIONS], *mesh_and_rules)
        if rows is None:
            return block(*arguments)
        closed_jaxpr, abstract_results = jax.make_jaxpr(block, return_shape=True)(*arguments)
        program = inline(closed_jaxpr)
        weights, _, activations = (
            program.inputs[start : start + len(jax.tree.leaves(argument))]
            for start, argument in _starts(arguments[: _ACTIVATIONS + 1], len(closed_jaxpr.consts))
        )
        sharding_by_value = rows.product_shardings(program, weights, activations)
        names = {step.outputs[0]: step.eqn.params["name"] for step in program.steps if step.primitive == "name"}

        def place_rows(value: int, array: Array) -> Array:
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
        group_count: number of groups of devices between which neither weights nor activations move.
        are_positions_split: whether other mesh axes split the positions of a row. A dim of rows and positions is then
            left to the compiler.
        mesh: the mesh.
    """

    count: int
    axes: tuple[str, ...]
    group_count: int
    are_positions_split: bool
    mesh: Mesh | AbstractMesh

    @classmethod
    def of(cls, activations: PyTree, mesh: Mesh | AbstractMesh, rules: AxisRules) -> "_Rows | None":
        """Return the rows of a block's activations; `None` if no mesh axes split them evenly."""
        shapes = [leaf.shape for leaf in jax.tree.leaves(activations) if getattr(leaf, "ndim", 0)]
        axes = tuple(axis for axis in rules.axes("batch") if mesh.shape[axis] > 1)
        row_count = max(shapes, key=math.prod)[0] if shapes else 0
        if not axes or not row_count or row_count % shard_count(mesh, axes):
            return None
        group_count = shard_count(mesh, (axis for axis in axes if axis != ZERO_AXIS))
        return cls(row_count, axes, group_count, any(mesh.shape[axis] > 1 for axis in rules.axes("seq")), mesh)

    def product_shardings(
        self, program: InlinedProgram, weights: Sequence[int], activations: Sequence[int]
    ) -> dict[int, NamedSharding]:
        """Return the sharding of each matrix product with rows, by number; none if exchanged activations are smaller.

        Args:
            program: program of a block.
            weights: numbers of the block's weights.
            activations: numbers of the block's activations.
        """
        weight_values = set(weights)
        dim_by_value = {value: 0 for value in activations if shape_of(program.avals[value])[:1] == (self.count,)}
        sharding_by_value: dict[int, NamedSharding] = {}
        exchanged_count, gathered_count = 0.0, 0  # elements
        for step in program.steps:
            operands = [atom for atom in step.inputs if isinstance(atom, int)]
            if operands and weight_values.issuperset(operands):
                weight_values.update(value for value in step.outputs if value is not None)
                continue
            has_program = bool(inner_jaxprs(step.eqn)) and not step.primitive.startswith("custom_")
            for value in step.outputs:
                dim = None if value is None or has_program else _row_dim(step, program, value, dim_by_value)
                if value is None or dim is None:
                    continue
                dim_by_value[value] = dim
                shape = shape_of(program.avals[value])
                if step.primitive not in _PRODUCTS or (shape[dim] != self.count and self.are_positions_split):
                    continue
                entries: list[Any] = [PartitionSpec.UNCONSTRAINED] * len(shape)
                entries[dim] = self.axes
                sharding_by_value[value] = NamedSharding(self.mesh, PartitionSpec(*entries))
                if not weight_values.isdisjoint(operands):
                    # the smaller of the operand and the result moves: one is gathered, or the other is scattered
                    counts = {operand: math.prod(shape_of(program.avals[operand])) for operand in operands}
                    weight_count = sum(count for operand, count in counts.items() if operand in weight_values)
                    exchanged_count += min(sum(counts.values()) - weight_count, math.prod(shape)) / self.group_count
                    gathered_count += weight_count
        return sharding_by_value if 0 < gathered_count <= exchanged_count else {}


def _starts(arguments: Sequence[PyTree], start: int) -> Iterator[tuple[int, PyTree]]:
    """Yield each argument of a block with the index of its first leaf among the inputs of the block's program."""
    for argument in arguments:
        yield start, argument
        start += len(jax.tree.leaves(argument))


def _row_dim(step: Step, program: InlinedProgram, value: int, dim_by_value: Mapping[int, int]) -> int | None:
    """Return the dim of a step's result that corresponds to the rows of an operand; `None` if there is none."""
    operand_shapes = [shape_of(program.avals[atom] if isinstance(atom, int) else atom.value) for atom in step.inputs]
    links = links_of(step.primitive, step.eqn.params, operand_shapes, shape_of(program.avals[value]))
    row_dims = [dim_by_value.get(atom) if isinstance(atom, int) else None for atom in step.inputs]
    return next((result_dim for index, dim, result_dim in links if dim == row_dims[index]), None)
