"""The graph of one block (`BlockGraph`): the values of its forward pass, their bytes, and the work to recompute them.

The graph also lists the values that the backward pass reads (the residuals). Nothing is compiled and no device is
needed.

JAX determines the residuals: the block is differentiated (`jax.vjp`) with a name (`InlinedProgram.name_by_number`) on
each value, and the graph is made from the program that returns results and residuals. This program contains the forward
rules of functions with custom derivatives (`custom_vjp`, kernels), which name their residuals, and the derivatives that
the forward pass computes.

Left out: fusion by XLA. An operation without FLOP is assumed to move the bytes of its largest result, and a view is
assumed to move none.
"""

import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxscale.compat import source_line
from jaxscale.platforms.platform import Chip
from jaxscale.programs import roofline
from jaxscale.programs.dims import Placement, local_bytes
from jaxscale.programs.flop import equation_flop
from jaxscale.programs.inline import InlinedProgram, Step, inline
from jaxscale.programs.spread import propagate
from jaxscale.sharding import place
from jaxscale.sharding.partition import dim_axes
from jaxscale.values.units import count, size

MARK = "jaxscale:"
"""Prefix of the generated names of a block's values; it prevents collisions with the model's names."""
VIEWS = frozenset(
    {"reshape", "broadcast_in_dim", "squeeze", "transpose", "convert_element_type", "expand_dims", "slice", "iota"}
    | {"split", "name", "sharding_constraint", "reshard", "optimization_barrier", "stop_gradient", "copy", "pvary"}
)
"""Primitives that a compiler fuses into the operations that read their results."""


@dataclasses.dataclass(frozen=True)
class Value:
    """One array of a block's forward pass.

    Args:
        name: unique name of the value in the block; in blocks of one fingerprint it is the same in every process.
        shape: shape of the whole array, over all devices.
        dtype: type of the elements.
        bytes: bytes per device.
        producer: index of the equation that computes the value; -1 for an input of the block.
        mark: name by which JAX's checkpoint policies can keep the value; `None` if no policy can.
        source: line of the user's code that computes the value.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    producer: int
    mark: str | None = None
    source: str = ""


@dataclasses.dataclass(frozen=True)
class Equation:
    """One operation, per device.

    Args:
        name: name of the primitive.
        inputs: indices of the operands among the graph's values.
        outputs: indices of the results among the graph's values.
        flop: FLOP of a matrix product, a convolution or a kernel; 0 for any other operation.
        bytes: bytes moved between memory and chip.
        seconds: modeled seconds (`roofline.seconds`); 0 if the chip's rates are unknown.
        kept_by: names of the policies of `jax.checkpoint_policies` that keep the results.
    """

    name: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    flop: int
    bytes: int
    seconds: float = 0.0
    kept_by: frozenset[str] = frozenset()


@dataclasses.dataclass(frozen=True)
class BlockGraph:
    """Values and equations of a block's forward pass, in the order in which they run.

    Args:
        fingerprint: fingerprint of the block's program.
        values: the values, the block's inputs first.
        equations: the operations, in the order in which they run.
        inputs: indices of the block's inputs among the values.
        carried: indices of the inputs that are activations, which every memory plan keeps.
        outputs: indices of the block's results.
        needed: indices of the values that the backward pass reads, except for the block's inputs.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> w, x = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in [(8, 8), (4, 8)])
        >>> graph = block_graph(lambda w, x: jnp.tanh(x @ w) @ w, w, x)
        >>> [value.name for value in graph.values if value.mark is not None], graph.flop, graph.carried_bytes
        (['dot_general', 'tanh', 'dot_general.2'], 1024, 128)
    """

    fingerprint: str
    values: tuple[Value, ...]
    equations: tuple[Equation, ...]
    inputs: tuple[int, ...]
    carried: tuple[int, ...]
    outputs: tuple[int, ...]
    needed: tuple[int, ...]

    def __repr__(self) -> str:
        return (
            f"<BlockGraph {self.fingerprint}: {len(self.equations)} operations, {count(self.flop)} FLOP, "
            f"{size(self.needed_bytes)} kept without a plan>"
        )

    @functools.cached_property
    def by_name(self) -> Mapping[str, int]:
        """The index of each value, by its name."""
        return {value.name: index for index, value in enumerate(self.values)}

    @property
    def flop(self) -> int:
        """The FLOP of the forward pass, per device."""
        return sum(equation.flop for equation in self.equations)

    @property
    def seconds(self) -> float:
        """The modeled seconds of the forward pass; 0 if the chip's rates are unknown."""
        return sum(equation.seconds for equation in self.equations)

    @property
    def carried_bytes(self) -> int:
        """The bytes of the activations that enter the block, per device."""
        return sum(self.values[index].bytes for index in self.carried)

    @property
    def output_bytes(self) -> int:
        """The bytes of the block's results, per device."""
        return sum(self.values[index].bytes for index in self.outputs)

    @property
    def needed_bytes(self) -> int:
        """The bytes of `needed`, the values kept without a memory plan; a value and its named copy count once."""
        needed_indices = set(self.needed)
        producers = (self.equations[self.values[index].producer] for index in self.needed)
        copy_indices = {eqn.outputs[0] for eqn in producers if eqn.name == "name" and needed_indices & {*eqn.inputs}}
        return sum(self.values[index].bytes for index in needed_indices - copy_indices)


def block_graph(
    fn: Callable[..., Any],
    *args: Any,
    chip: Chip | None = None,
    mesh: Mapping[str, int] | None = None,
    batch: tuple[str, ...] | None = None,
    activations: Sequence[int] = (-1,),
) -> BlockGraph:
    """Make the graph of `fn(*args)`.

    Args:
        fn: the block, a function that JAX can differentiate.
        args: arrays, tracers, or shapes (`jax.ShapeDtypeStruct`), with or without a sharding.
        chip: chip on which the seconds are modeled; if `None`, the seconds are 0.
        mesh: number of devices along each mesh axis; by default the mesh of the current layout
            (`sharding.place.layout`).
        batch: mesh axes along the first dim of activations whose placement is unknown; by default the batch axes of the
            current layout.
        activations: indices of those `args` that are activations, not parameters.
    """
    import jax

    # a new function each time, because JAX could return a cached trace of `fn` under another layout
    closed_jaxpr = jax.make_jaxpr(lambda *args: fn(*args))(*args)
    return graph_of(closed_jaxpr, args, chip=chip, mesh=mesh, batch=batch, activations=activations)


def graph_of(
    closed_jaxpr: Any,
    args: Sequence[Any],
    *,
    chip: Chip | None = None,
    mesh: Mapping[str, int] | None = None,
    batch: tuple[str, ...] | None = None,
    activations: Sequence[int] = (-1,),
) -> BlockGraph:
    """Make the graph of a traced function.

    Args:
        closed_jaxpr: jaxpr of the function.
        args: the arguments for which the function was traced.
        chip, mesh, batch, activations: options of `block_graph`.
    """
    import jax

    mesh_and_rules = place.current()
    if mesh_and_rules is not None:
        layout_mesh, axis_rules = mesh_and_rules
        mesh = dict(layout_mesh.shape) if mesh is None else mesh
        batch = axis_rules.batch if batch is None else batch
    mesh, batch = mesh or {}, batch or ()
    program = inline(closed_jaxpr)
    vjp_program, result_count = _forward_and_residuals(program, closed_jaxpr.consts)
    input_names, carried_indices = _input_names(closed_jaxpr, args, activations)
    input_placements: dict[int, Placement] = {}
    # a leaf for each input; `None` for the values that the function closes over
    input_leaves = [None] * (len(program.inputs) - len(jax.tree.leaves(args))) + jax.tree.leaves(args)
    for index, leaf in enumerate(input_leaves):
        input_number = vjp_program.inputs[index]
        sharding: Any = getattr(leaf, "sharding", None) if isinstance(leaf, jax.ShapeDtypeStruct) else None
        if leaf is not None and hasattr(sharding, "spec"):
            input_placements[input_number] = dim_axes(sharding.spec, len(leaf.shape))
            mesh = dict(sharding.mesh.shape) | dict(mesh)
    has_placements = bool(input_placements) or any(
        step.primitive == "sharding_constraint" for step in vjp_program.steps
    )
    if not has_placements:
        for index in carried_indices:
            shape = getattr(vjp_program.avals[vjp_program.inputs[index]], "shape", ())
            if shape:
                input_placements[vjp_program.inputs[index]] = (batch, *((),) * (len(shape) - 1))
    placement_by_number = propagate(vjp_program, input_placements, mesh)
    return _Builder(vjp_program, placement_by_number, mesh, chip).build(
        program.fingerprint(), input_names, carried_indices, result_count
    )


def _forward_and_residuals(program: InlinedProgram, consts: Sequence[Any]) -> tuple[InlinedProgram, int]:
    """Return a program that computes a block's results, then the backward pass's residuals; and the number of results.

    Args:
        program: program of the block.
        consts: values that the block closes over; the block is differentiated with respect to those that are tracers.
    """
    import jax
    import jax.numpy as jnp
    from jax.ad_checkpoint import checkpoint_name
    from jax.core import Tracer

    name_by_number = program.name_by_number()
    avals = [program.avals[number] for number in program.inputs]
    constant_indices = {index for index, const in enumerate(consts) if not isinstance(const, Tracer)}
    inexact_flags = [jnp.issubdtype(aval.dtype, jnp.inexact) for aval in avals]
    variable_indices = [i for i in range(len(avals)) if i not in constant_indices and inexact_flags[i]]

    def run_forward(*arguments: Any) -> tuple[Any, Any]:
        """Return the block's results, and the list of its backward pass's residuals."""

        def name_array(value_number: int, array: Any) -> Any:
            """Return the array of the value with this number, marked with the value's name if it has one."""
            return (
                checkpoint_name(array, MARK + name_by_number[value_number]) if value_number in name_by_number else array
            )

        def block(*variables: Any) -> Any:
            """Return the block's results, from the inputs with respect to which the block is differentiated."""
            operands = list(arguments)
            for index, variable in zip(variable_indices, variables, strict=True):
                operands[index] = variable
            return program.run(operands, name_array)

        results, pullback = jax.vjp(block, *(arguments[index] for index in variable_indices))
        return results, jax.tree.leaves(pullback)

    abstract_inputs = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals]
    vjp_program = inline(jax.make_jaxpr(run_forward)(*abstract_inputs))
    return vjp_program, len(program.outputs)


def _input_names(closed_jaxpr: Any, args: Sequence[Any], activations: Sequence[int]) -> tuple[list[str], list[int]]:
    """Return the names of a closed jaxpr's inputs, and the indices of the inputs that are activations."""
    import jax

    from jaxscale.trees import path_name

    input_names = [f"closed over {index}" for index in range(len(closed_jaxpr.jaxpr.constvars))]
    carried_indices: list[int] = []
    activation_args = {index % len(args) for index in activations if args and -len(args) <= index < len(args)}
    for arg_index, arg in enumerate(args):
        for path, leaf in jax.tree_util.tree_flatten_with_path(arg)[0]:
            is_inexact = jax.numpy.issubdtype(getattr(leaf, "dtype", int), jax.numpy.inexact)
            if arg_index in activation_args and is_inexact:
                carried_indices.append(len(input_names))
            input_names.append("/".join(filter(None, (f"argument {arg_index}", path_name(path)))))
    return input_names, carried_indices


class _Builder:
    """A builder of the graph of a program that returns a block's results, then its residuals.

    Attributes:
        program, placement_by_number, mesh, chip: the arguments; `placement_by_number` has the mesh axes along each dim
            of each value, by the value's number.
        values, equations: the graph's values and equations, as far as they have been added.
        index_by_number: index of each value in the graph, by its number in the program.
        name_counts: number of values that have been added under each name.
        naming_step_by_number: the first step that names a value, by the number of the value.
        reader_counts: number of times that each value is read, by the value's number.
    """

    def __init__(
        self,
        program: InlinedProgram,
        placement_by_number: Mapping[int, Placement],
        mesh: Mapping[str, int],
        chip: Chip | None,
    ):
        self.program, self.placement_by_number, self.mesh, self.chip = program, placement_by_number, mesh, chip
        self.values: list[Value] = []
        self.equations: list[Equation] = []
        self.index_by_number: dict[int, int] = {}
        self.name_counts: Counter[str] = Counter()
        self.naming_step_by_number: dict[int, Step] = {}
        for step in program.steps:
            if step.primitive == "name":
                self.naming_step_by_number.setdefault(_first_operand(step), step)
        read_atoms = [atom for step in program.steps for atom in step.inputs] + list(program.outputs)
        self.reader_counts = Counter(atom for atom in read_atoms if isinstance(atom, int))

    def build(
        self, fingerprint: str, input_names: Sequence[str], carried_indices: Sequence[int], result_count: int
    ) -> BlockGraph:
        """Build the graph.

        Args:
            fingerprint: fingerprint of the block's program.
            input_names: names of the inputs.
            carried_indices: indices of the inputs that are activations.
            result_count: number of results of the block, which are the program's first outputs.
        """
        for value_number, name in zip(self.program.inputs, input_names, strict=True):
            self._add_value(value_number, name, -1)
        for step in self.program.steps:
            operand = _first_operand(step) if step.primitive == "name" else -1
            if self.reader_counts[operand] == 1 and operand in self.index_by_number:
                # the only reader of the operand names it, so both are one value of the graph
                if step.outputs[0] is not None:
                    self.index_by_number[step.outputs[0]] = self.index_by_number[operand]
            else:
                self._add_equation(step)
        input_indices = tuple(range(len(self.program.inputs)))
        output_indices = [
            self.index_by_number.get(atom) if isinstance(atom, int) else None for atom in self.program.outputs
        ]
        result_indices = [index for index in output_indices[:result_count] if index is not None]
        residual_indices = {i for i in output_indices[result_count:] if i is not None and i >= len(input_indices)}
        return BlockGraph(
            fingerprint,
            tuple(self.values),
            tuple(self.equations),
            input_indices,
            tuple(carried_indices),
            tuple(dict.fromkeys(result_indices)),
            tuple(sorted(residual_indices)),
        )

    def _add_value(self, value_number: int, name: str, producer: int, mark: str | None = None, source: str = "") -> int:
        """Add the value with this number in the program; return its index in the graph.

        `name` gets a counter if another value has the same name; the further arguments are fields of the `Value`.
        """
        aval = self.program.avals[value_number]
        self.name_counts[name] += 1
        unique_name = name if self.name_counts[name] == 1 else f"{name} ({self.name_counts[name]})"
        value_bytes = local_bytes(aval, self.placement_by_number[value_number], self.mesh)
        self.values.append(Value(unique_name, tuple(aval.shape), str(aval.dtype), value_bytes, producer, mark, source))
        self.index_by_number[value_number] = len(self.values) - 1
        return self.index_by_number[value_number]

    def _add_equation(self, step: Step) -> None:
        """Add a step as an equation, and its results as values."""
        equation_index = len(self.equations)
        operand_numbers = [atom for atom in step.inputs if isinstance(atom, int)]
        input_indices = tuple(dict.fromkeys(self.index_by_number[operand] for operand in operand_numbers))
        source = source_line(step.eqn)
        if step.primitive == "name" and input_indices:
            source = self.values[input_indices[0]].source
        output_indices: tuple[int, ...] = ()
        for value_number in step.outputs:
            if value_number is None:
                continue
            naming_step = step if step.primitive == "name" else self.naming_step_by_number.get(value_number)
            name, mark = step.primitive, None
            if naming_step is not None:
                name, mark = naming_step.eqn.params["name"].removeprefix(MARK), naming_step.eqn.params["name"]
            if naming_step is None or (naming_step is not step and self.reader_counts[value_number] > 1):
                name, mark = f"{name} (unnamed)", None
            output_indices += (self._add_value(value_number, name, equation_index, mark, source),)
        flop = -(-equation_flop(step.eqn) // self._shard_count(step))
        moved_bytes = self._moved_bytes(step, flop)
        dtype = str(step.eqn.invars[0].aval.dtype) if step.eqn.invars else "float32"
        seconds = roofline.seconds(self.chip, flop, moved_bytes, dtype)
        self.equations.append(
            Equation(step.primitive, input_indices, output_indices, flop, moved_bytes, seconds, _policy_names(step))
        )

    def _moved_bytes(self, step: Step, flop: int) -> int:
        """Return the bytes that an operation moves between memory and chip, given its FLOP.

        A matrix product or a kernel moves its operands and results. Any other operation moves only its largest result.
        """
        if step.primitive in VIEWS:
            return 0
        result_bytes = [self._bytes_of(value_number) for value_number in step.outputs if value_number is not None]
        if not flop:
            return max(result_bytes, default=0)
        return sum(result_bytes) + sum(self._bytes_of(atom) for atom in step.inputs if isinstance(atom, int))

    def _bytes_of(self, value_number: int) -> int:
        """Return the bytes per device of the value with this number in the program."""
        return self.values[self.index_by_number[value_number]].bytes

    def _shard_count(self, step: Step) -> int:
        """Return the number of devices that share an operation's FLOP, by the axes of its results and summed dims."""
        result_placements = [
            self.placement_by_number[value_number] for value_number in step.outputs if value_number is not None
        ]
        axes = {axis for placement in result_placements for axes_of_dim in placement for axis in axes_of_dim}
        left_operand = step.inputs[0] if step.inputs else None
        if step.primitive == "dot_general" and isinstance(left_operand, int):
            contracted_dims = step.eqn.params["dimension_numbers"][0][0]
            axes |= {axis for dim in contracted_dims for axis in self.placement_by_number[left_operand][dim]}
        return math.prod(self.mesh.get(axis, 1) for axis in axes)


def _first_operand(step: Step) -> int:
    """Return the number of a step's first operand; -1 for a constant."""
    return step.inputs[0] if isinstance(step.inputs[0], int) else -1


def _policy_names(step: Step) -> frozenset[str]:
    """Return the names of the policies of `jax.checkpoint_policies` that keep the results of a step."""
    policy_names = {"everything_saveable"}
    if step.primitive in ("dot_general", "conv_general_dilated"):
        policy_names |= {"dots_saveable", "checkpoint_dots"}
    if step.primitive == "dot_general" and not step.eqn.params["dimension_numbers"][1][0]:
        policy_names |= {"dots_with_no_batch_dims_saveable", "checkpoint_dots_with_no_batch_dims"}
    return frozenset(policy_names)
