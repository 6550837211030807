"""BlockGraph: one block's price list, from its program: every value of the forward pass, its bytes, what it takes to
make it again, and which of them the backward pass reads. Nothing is compiled and no device is asked.

What the backward pass reads is JAX's own answer: the block is differentiated (`jax.vjp`) with a name on each value, and
the graph is the program that gives results and residuals. So it holds the forward rules of functions with their own
derivative (`custom_vjp`, kernels), whose residuals can be kept by the names they give them, and the derivatives that
the forward pass prepares. Names are those of the program, not of the user (`inline.Program.names`).

Left out: what XLA fuses or merges; every operation that only moves values counts its largest result once, a view
nothing.
"""

import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxscale.costs import roofline
from jaxscale.costs.inline import Program, Step, inline
from jaxscale.costs.spread import Spread, local_bytes, of_spec, propagate
from jaxscale.costs.trace import equation_flop
from jaxscale.platforms.platform import Chip
from jaxscale.sharding import place

MARK = "jaxscale:"
"""What the names that we give values of a block begin with, so that they meet no name of the model."""
VIEWS = frozenset(
    {"reshape", "broadcast_in_dim", "squeeze", "transpose", "convert_element_type", "expand_dims", "slice", "iota"}
    | {"split", "name", "sharding_constraint", "optimization_barrier", "stop_gradient", "copy", "pvary"}
)
"""Primitives that a compiler makes part of what reads them."""


@dataclasses.dataclass(frozen=True)
class Value:
    """One array of a block's forward pass.

    Args:
        name: the same in every process, for blocks of one fingerprint.
        shape: of all devices together.
        dtype: of its elements.
        bytes: per device.
        producer: index of the equation that makes it; -1 for an input of the block.
        mark: the name under which JAX's policies meet it; `None` where it cannot be kept by name.
        source: where the user's code makes it.
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
        name: of the primitive.
        inputs: indices of the values that it reads.
        outputs: indices of those that it makes.
        flop: of matrix products, convolutions and kernels.
        bytes: moved between memory and chip.
        seconds: by roofline; 0 where no chip is known.
        kept_by: policies of `jax.checkpoint_policies` that keep its results.
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
    """Values and equations of a block's forward pass, in the order they run.

    Args:
        fingerprint: of the block's program.
        values: inputs of the block first.
        equations: in order.
        inputs: indices of the values that the block is given.
        carried: those of them that are activations: what a plan keeps of a block in any case.
        outputs: indices of the values that it gives.
        needed: indices of the values that the backward pass reads, inputs left out.

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

    @functools.cached_property
    def by_name(self) -> Mapping[str, int]:
        """Index of each value."""
        return {value.name: index for index, value in enumerate(self.values)}

    @property
    def flop(self) -> int:
        """Of the forward pass, per device."""
        return sum(equation.flop for equation in self.equations)

    @property
    def seconds(self) -> float:
        """Of the forward pass; 0 where no chip is known."""
        return sum(equation.seconds for equation in self.equations)

    @property
    def carried_bytes(self) -> int:
        """Bytes of the activations that enter the block, per device."""
        return sum(self.values[index].bytes for index in self.carried)

    @property
    def output_bytes(self) -> int:
        """Bytes of what the block gives, per device."""
        return sum(self.values[index].bytes for index in self.outputs)

    @property
    def needed_bytes(self) -> int:
        """Bytes that the backward pass reads beside the block's inputs: what is kept without a plan."""
        needed = set(self.needed)
        renamed = (self.equations[self.values[index].producer] for index in self.needed)
        twice = {equation.outputs[0] for equation in renamed if equation.name == "name" and needed & {*equation.inputs}}
        return sum(self.values[index].bytes for index in needed - twice)


def block_graph(
    fn: Callable[..., Any],
    *args: Any,
    chip: Chip | None = None,
    mesh: Mapping[str, int] | None = None,
    batch: tuple[str, ...] | None = None,
    activations: Sequence[int] = (-1,),
) -> BlockGraph:
    """The graph of `fn(*args)`.

    Args:
        fn: the block, a function that JAX can differentiate.
        args: arrays, shapes (`jax.ShapeDtypeStruct`, with a sharding or without) or tracers.
        chip: for seconds.
        mesh: devices along each mesh axis; by default those of the layout in force (`sharding.place.layout`).
        batch: mesh axes along the first dim of activations whose placement nothing else tells; by default those of the
            layout in force.
        activations: which args are activations, not parameters.
    """
    import jax

    # a function of its own: JAX would give a trace made under another layout again
    closed = jax.make_jaxpr(lambda *args: fn(*args))(*args)
    return graph_of(closed, args, chip=chip, mesh=mesh, batch=batch, activations=activations)


def graph_of(
    closed: Any,
    args: Sequence[Any],
    *,
    chip: Chip | None = None,
    mesh: Mapping[str, int] | None = None,
    batch: tuple[str, ...] | None = None,
    activations: Sequence[int] = (-1,),
) -> BlockGraph:
    """As `block_graph`, of a function that is traced already: its closed jaxpr, and the args it was traced with."""
    import jax

    layout = place.current()
    if layout is not None:
        mesh = dict(layout[0].shape) if mesh is None else mesh
        batch = layout[1].batch if batch is None else batch
    mesh, batch = mesh or {}, batch or ()
    program = inline(closed)
    known, results = _forward_and_residuals(program, closed.consts)
    names, moving = _input_names(closed, args, activations)
    given: dict[int, Spread] = {}
    leaves = [None] * (len(program.inputs) - len(jax.tree.leaves(args))) + jax.tree.leaves(args)
    for index, leaf in enumerate(leaves):
        number = known.inputs[index]
        sharding: Any = getattr(leaf, "sharding", None) if isinstance(leaf, jax.ShapeDtypeStruct) else None
        if leaf is not None and hasattr(sharding, "spec"):
            given[number] = of_spec(sharding.spec, len(leaf.shape))
            mesh = dict(sharding.mesh.shape) | dict(mesh)
    stated = bool(given) or any(step.primitive == "sharding_constraint" for step in known.steps)
    if not stated:
        for index in moving:
            shape = getattr(known.avals[known.inputs[index]], "shape", ())
            if shape:
                given[known.inputs[index]] = (batch, *((),) * (len(shape) - 1))
    spread = propagate(known, given, mesh)
    return _Builder(known, spread, mesh, chip).build(program.fingerprint(), names, moving, results)


def _forward_and_residuals(program: Program, consts: Sequence[Any]) -> tuple[Program, int]:
    """The program that gives what a block gives and what its backward pass reads, and how many the former are.

    Args:
        program: of the block.
        consts: what the block closes over; arrays among it are no inputs to differentiate by, tracers may be.
    """
    import jax
    import jax.numpy as jnp
    from jax.ad_checkpoint import checkpoint_name
    from jax.core import Tracer

    names = program.names()
    avals = [program.avals[number] for number in program.inputs]
    fixed = {index for index, const in enumerate(consts) if not isinstance(const, Tracer)}
    trained = [i for i, aval in enumerate(avals) if i not in fixed and jnp.issubdtype(aval.dtype, jnp.inexact)]

    def forward(*given: Any) -> tuple[Any, Any]:
        def block(*moved: Any) -> Any:
            whole = list(given)
            for index, value in zip(trained, moved, strict=True):
                whole[index] = value
            return program.run(
                whole, lambda number, value: checkpoint_name(value, MARK + names[number]) if number in names else value
            )

        made, pull = jax.vjp(block, *(given[index] for index in trained))
        return made, jax.tree.leaves(pull)

    shapes = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals]
    known = inline(jax.make_jaxpr(forward)(*shapes))
    return known, len(program.outputs)


def _input_names(closed: Any, args: Sequence[Any], activations: Sequence[int]) -> tuple[list[str], list[int]]:
    """A name of every input of a closed jaxpr, and which of them are activations."""
    import jax

    from jaxscale.trees import path_name

    names = [f"closed over {index}" for index in range(len(closed.jaxpr.constvars))]
    moving: list[int] = []
    chosen = {index % len(args) for index in activations if args and -len(args) <= index < len(args)}
    for position, arg in enumerate(args):
        for path, leaf in jax.tree_util.tree_flatten_with_path(arg)[0]:
            if position in chosen and jax.numpy.issubdtype(getattr(leaf, "dtype", int), jax.numpy.inexact):
                moving.append(len(names))
            names.append("/".join(filter(None, (f"argument {position}", path_name(path)))))
    return names, moving


class _Builder:
    """The graph of a program whose first outputs are results and whose others are residuals."""

    def __init__(self, known: Program, spread: Mapping[int, Spread], mesh: Mapping[str, int], chip: Chip | None):
        self.known, self.spread, self.mesh, self.chip = known, spread, mesh, chip
        self.values: list[Value] = []
        self.equations: list[Equation] = []
        self.index: dict[int, int] = {}
        self.used: Counter[str] = Counter()

    def build(self, fingerprint: str, names: Sequence[str], moving: Sequence[int], results: int) -> BlockGraph:
        known = self.known
        readers = Counter(atom for step in known.steps for atom in step.inputs if isinstance(atom, int))
        readers.update(atom for atom in known.outputs if isinstance(atom, int))
        for number, name in zip(known.inputs, names, strict=True):
            self._add(number, name, -1)
        # a value whose only reader gives it a name is one with what it names
        named = {_read(step): step for step in known.steps if step.primitive == "name" and readers[_read(step)] == 1}
        for step in known.steps:
            if step.primitive == "name" and named.get(_read(step)) is step and _read(step) in self.index:
                if step.outputs[0] is not None:
                    self.index[step.outputs[0]] = self.index[_read(step)]
                continue
            self._equation(step, named)
        inputs = tuple(range(len(known.inputs)))
        outputs = [self.index[atom] for atom in known.outputs[:results] if isinstance(atom, int)]
        residuals = [self.index[atom] for atom in known.outputs[results:] if isinstance(atom, int)]
        needed = sorted({index for index in residuals if index >= len(inputs)})
        return BlockGraph(
            fingerprint,
            tuple(self.values),
            tuple(self.equations),
            inputs,
            tuple(moving),
            tuple(dict.fromkeys(outputs)),
            tuple(needed),
        )

    def _add(self, number: int, name: str, producer: int, mark: str | None = None, source: str = "") -> int:
        aval = self.known.avals[number]
        self.used[name] += 1
        name = name if self.used[name] == 1 else f"{name} ({self.used[name]})"
        size = local_bytes(aval, self.spread[number], self.mesh)
        self.values.append(Value(name, tuple(aval.shape), str(aval.dtype), size, producer, mark, source))
        self.index[number] = len(self.values) - 1
        return self.index[number]

    def _equation(self, step: Step, named: Mapping[int, Step]) -> None:
        from jaxscale.compat import source_line

        position = len(self.equations)
        inputs = tuple(dict.fromkeys(self.index[atom] for atom in step.inputs if isinstance(atom, int)))
        source = source_line(step.eqn)
        outputs = []
        for number in step.outputs:
            if number is None:
                continue
            namer = step if step.primitive == "name" else named.get(number)
            if namer is None:
                follower = next((s for s in self.known.steps if s.primitive == "name" and s.inputs[0] == number), None)
                word = _word(follower) if follower else step.primitive
                outputs.append(self._add(number, f"{word} (unnamed)", position, None, source))
            else:
                source = self.values[inputs[0]].source if namer is step and inputs else source
                outputs.append(self._add(number, _word(namer), position, namer.eqn.params["name"], source))
        flop = equation_flop(step.eqn)
        flop = -(-flop // self._split(step)) if flop else 0
        moved = self._moved(step, flop)
        dtype = str(step.eqn.invars[0].aval.dtype) if step.eqn.invars else "float32"
        self.equations.append(
            Equation(
                step.primitive,
                inputs,
                tuple(outputs),
                flop,
                moved,
                roofline.seconds(self.chip, flop, moved, dtype),
                _policies(step),
            )
        )

    def _moved(self, step: Step, flop: int) -> int:
        """Bytes: all operands and results of a product or kernel, the largest result of anything else."""
        if step.primitive in VIEWS:
            return 0
        made = [self._bytes(number) for number in step.outputs if number is not None]
        if not flop:
            return max(made, default=0)
        return sum(made) + sum(self._bytes(atom) for atom in step.inputs if isinstance(atom, int))

    def _bytes(self, number: int) -> int:
        return self.values[self.index[number]].bytes

    def _split(self, step: Step) -> int:
        """Over how many devices an operation's FLOP are split: the axes of its results, and of what it sums over."""
        axes = {axis for number in step.outputs if number is not None for dim in self.spread[number] for axis in dim}
        first = step.inputs[0] if step.inputs else None
        if step.primitive == "dot_general" and isinstance(first, int):
            contracted = step.eqn.params["dimension_numbers"][0][0]
            axes |= {axis for dim in contracted for axis in self.spread[first][dim]}
        return math.prod(self.mesh.get(axis, 1) for axis in axes)


def _read(step: Step) -> int:
    """Number of the value that a step with one input reads; -1 for a constant."""
    return step.inputs[0] if isinstance(step.inputs[0], int) else -1


def _word(step: Step) -> str:
    return step.eqn.params["name"].removeprefix(MARK)


def _policies(step: Step) -> frozenset[str]:
    """Which of JAX's policies keep the results of a step."""
    kept = {"everything_saveable"}
    if step.primitive in ("dot_general", "conv_general_dilated"):
        kept |= {"dots_saveable", "checkpoint_dots"}
    if step.primitive == "dot_general" and not step.eqn.params["dimension_numbers"][1][0]:
        kept |= {"dots_with_no_batch_dims_saveable", "checkpoint_dots_with_no_batch_dims"}
    return frozenset(kept)
