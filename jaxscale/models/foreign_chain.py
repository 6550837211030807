"""The forward pass of a foreign module, divided at its blocks: a part before them, the blocks, and a part after them.

The stages of a pipeline and rules that recompute segments of several blocks need the blocks as functions in sequence,
but the user's code calls them one by one. So the forward pass is traced once, with each call of a block as one equation
of the program. The level of a value is the number of blocks that it depends on: values before the blocks have level 0,
and the result of block i and what follows from it have level i. Between two blocks, the program is cut where the fewest
values are read later: behind an addition to a residual stream, else right behind the first block. The blocks form a
chain if, besides values of level 0, each part reads values of the part before it alone.

In a pipeline, the module's variables stay as they are, and each block reads the parameters of its stage.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
from flax import nnx
from jax.extend.core import jaxpr_as_fun

from jaxscale import blocks
from jaxscale.blocks import Call
from jaxscale.compat import rebind, source_line
from jaxscale.errors import UserError
from jaxscale.models.foreign_blocks import BlockWrapper, PureBlock, blocks_wrapped, run_as_one_block
from jaxscale.programs.walk import equations, inner_jaxprs
from jaxscale.trees import named_leaves
from jaxscale.typing import Array

_NAME_PREFIX = "jaxscale_foreign_block_"
"""Prefix of the names under which the blocks are called in the traced program."""
_ADVICE = "train without a pipeline and with a memory rule that treats each block by itself, such as full or save:BYTES"


def needs_chain() -> bool:
    """Return whether the current plan needs the blocks in sequence: as stages of a pipeline, or in segments."""
    return blocks.stage_view() is not None or blocks.treatment().sequence is not None


def run_chain(forward: Callable[..., Any], module: nnx.Module, batch: Any, paths: Sequence[str]) -> Any:
    """Return `forward(module, batch)`, in which the plan runs the blocks in sequence.

    Args:
        forward: function of the module and a batch that calls the blocks.
        module: the module; its variables are updated as by a plain call, but not in a pipeline.
        batch: arrays of the batch.
        paths: paths of the blocks in the order of their calls, such as "layers/0".

    Raises:
        UserError: there are fewer than two blocks, or the blocks form no chain.
    """
    if len(paths) < 2:
        block_text = f"one block, {paths[0]}" if paths else "no submodules that repeat"
        raise UserError(
            f"{_purpose()}: got {block_text}, expected at least two blocks in sequence; name them with "
            f"ForeignModel(blocks=...), or {_ADVICE}"
        )
    signatures: list[_Signature] = []

    def mark(path: str) -> BlockWrapper:
        """Return the wrapper that turns a call of the block at `path` into one named equation."""

        def wrap(block: PureBlock) -> PureBlock:
            def run(params: Any, state: Any, arrays: Any) -> Any:
                return block(params, state, arrays)

            def call(params: Any, state: Any, arrays: Any) -> Any:
                index = len(signatures)
                run.__name__ = run.__qualname__ = f"{_NAME_PREFIX}{index}"
                is_linen = isinstance(params, dict)
                names = tuple(params if is_linen else ("/".join(map(str, n[1:])) for n, _ in nnx.to_flat_state(params)))
                array_paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(arrays)]
                signatures.append(_Signature(path, names, len(jax.tree.leaves(state)), tuple(array_paths)))
                output, new_state = jax.jit(run)(params, state, arrays)
                signatures[index] = dataclasses.replace(signatures[index], result_count=len(jax.tree.leaves(output)))
                return output, new_state

            return call

        return wrap

    def marked_forward(module: nnx.Module, batch: Any) -> Any:
        with blocks_wrapped(module, paths, mark):
            return forward(module, batch)

    def divide(forward: PureBlock) -> PureBlock:
        def run(params: Any, state: Any, arrays: Any) -> Any:
            signatures.clear()
            program, shapes = jax.make_jaxpr(forward, return_shape=True)(params, state, arrays)
            inputs = [*program.consts, *jax.tree.leaves((params, state, arrays))]
            output_shapes, state_shapes = shapes
            output_count = len(jax.tree.leaves(output_shapes))
            if blocks.stage_view() is None:
                chain = _Chain.of(program.jaxpr, signatures, paths, len(program.jaxpr.outvars))
                outputs = chain.run(inputs)
                new_state = jax.tree.unflatten(jax.tree.structure(state_shapes), outputs[output_count:])
            else:
                chain = _Chain.of(program.jaxpr, signatures, paths, output_count)
                outputs, new_state = chain.run_stages(inputs), state
            return jax.tree.unflatten(jax.tree.structure(output_shapes), outputs[:output_count]), new_state

        return run

    return run_as_one_block(marked_forward, module, batch, wrapper=divide)


@dataclasses.dataclass(frozen=True)
class _Signature:
    """The inputs and results of a call of a block.

    Args:
        path: path of the block.
        param_names: names of its parameters, within the block.
        state_count: number of its other variables.
        array_paths: paths of the arrays that it is called with, among its arguments.
        result_count: number of arrays that it returns; its new variables follow them.
    """

    path: str
    param_names: tuple[str, ...]
    state_count: int
    array_paths: tuple[str, ...]
    result_count: int = 0

    def start(self, eqn: Any) -> int:
        """Return the index of the first parameter among the inputs of the call, which begin with constants."""
        return len(eqn.invars) - len(self.param_names) - self.state_count - len(self.array_paths)


@dataclasses.dataclass(frozen=True)
class _Block:
    """A part of the program: a call of a block, with operations around it.

    Args:
        signature: inputs and results of the block.
        before: equations of the part before the call.
        eqn: equation of the call.
        after: equations of the part after the call.
        results: variables of the part that the next part reads, or the part after the blocks.
    """

    signature: _Signature
    before: tuple[Any, ...]
    eqn: Any
    after: tuple[Any, ...]
    results: tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class _Chain:
    """A program divided at its blocks.

    Args:
        jaxpr: the program.
        before: equations of level 0.
        blocks: the blocks, in sequence.
        after: equations of the last level.
        outputs: the results that are computed.
        first_positions: indices of the inputs of the first block's equation that later blocks read from a block.
    """

    jaxpr: Any
    before: tuple[Any, ...]
    blocks: tuple[_Block, ...]
    after: tuple[Any, ...]
    outputs: tuple[Any, ...]
    first_positions: tuple[int, ...]

    @classmethod
    def of(cls, jaxpr: Any, signatures: Sequence[_Signature], paths: Sequence[str], output_count: int) -> "_Chain":
        """Divide a program.

        Args:
            jaxpr: the program, with a named equation for each call of a block.
            signatures: inputs and results of these calls.
            paths: paths of all blocks.
            output_count: number of results that are computed, from the first on.

        Raises:
            UserError: the blocks form no chain.
        """
        _check_calls(jaxpr, signatures, paths)
        outputs = tuple(jaxpr.outvars[:output_count])
        live_eqns = _live_equations(jaxpr, outputs)
        level_of: dict[Any, int] = {}
        eqns_of_level: list[list[Any]] = [[] for _ in range(len(paths) + 1)]
        block_eqns: list[Any] = []
        mixed_reads: list[tuple[Any, list[int]]] = []  # equations that read values of several levels
        for eqn in live_eqns:
            levels = {level_of[var] for var in _variables(eqn.invars) if level_of.get(var, 0)}
            level, index = max(levels, default=0), _block_index(eqn)
            if index is not None and level != index:
                raise _no_chain(eqn, sorted(levels), signatures)
            if len(levels) > 1:
                mixed_reads.append((eqn, sorted(levels)))
            if index is None:
                eqns_of_level[level].append(eqn)
            else:
                level = index + 1
                block_eqns.append(eqn)
            level_of.update(dict.fromkeys(eqn.outvars, level))
        state_vars = {
            var for eqn, block in zip(block_eqns, signatures, strict=True) for var in eqn.outvars[block.result_count :]
        }
        for var in _variables(outputs):
            if level_of.get(var, 0) not in (0, len(paths)) and var not in state_vars:
                raise UserError(
                    f"the result of block {signatures[level_of[var] - 1].path} is returned as well as passed to the "
                    f"next block, but {_purpose()} passes it to the next block alone; {_ADVICE}"
                )
        # the variables read behind each block and what follows it
        later_vars: list[list[Any]] = [[var for var in _variables(outputs) if var not in state_vars]]
        for eqn, between in zip(block_eqns[:0:-1], eqns_of_level[:1:-1], strict=True):
            later_vars.insert(0, list(dict.fromkeys([*_read_by(eqn, *between), *later_vars[0]])))
        chain_blocks: list[_Block] = []
        earlier_vars: set[Any] = set()  # made in earlier parts
        start: tuple[Any, ...] = ()  # equations between the cut and the next block
        for index, (eqn, signature) in enumerate(zip(block_eqns, signatures, strict=True)):
            own_vars = {var for step in (*start, eqn) for var in step.outvars}
            if index == len(paths) - 1:
                own_vars -= state_vars
            between = tuple(eqns_of_level[index + 1])
            cut, results = _best_cut(between, earlier_vars | own_vars, later_vars[index])
            if not earlier_vars.isdisjoint(results):
                raise _no_chain(*mixed_reads[0], signatures)
            chain_blocks.append(_Block(signature, start, eqn, between[:cut], tuple(results)))
            earlier_vars |= own_vars.union(*(step.outvars for step in between[:cut]))
            start = between[cut:]
        first_positions = tuple(
            len(block_eqns[0].invars) - len(signatures[0].array_paths) + index
            for index, path in enumerate(signatures[0].array_paths)
            if path in _carried_paths(block_eqns[1], signatures[1], level_of)
        )
        return cls(jaxpr, tuple(eqns_of_level[0]), tuple(chain_blocks), start, outputs, first_positions)

    def run(self, inputs: Sequence[Any]) -> list[Any]:
        """Return the results of the program, with the blocks run by the plan's runner of sequences."""
        values = self._values_before(inputs)
        calls = [self._call(index, values) for index in range(len(self.blocks))]
        last, new_states = blocks.run(calls, self._first_input(values))
        for block, new_state in zip(self.blocks, new_states, strict=True):
            values.update(zip(block.eqn.outvars[block.signature.result_count :], new_state, strict=True))
        return self._values_after(values, last)

    def run_stages(self, inputs: Sequence[Any]) -> list[Any]:
        """Return the results of the program, with the blocks run by a stage of a pipeline."""
        self._check_unshared()
        view, values = blocks.stage_view(), self._values_before(inputs)
        assert view is not None

        def make_stage(start: int, stop: int, params_by_block: Sequence[Any] | None = None) -> Callable[[Any], Any]:
            """Return a function that runs blocks `start` to `stop - 1`, by default with their own parameters."""
            calls = [self._call(index, values) for index in range(start, stop)]
            if params_by_block is not None:
                pairs = zip(calls, params_by_block, strict=True)
                calls = [call._replace(before=(named_leaves(params), call.before[1])) for call, params in pairs]
            return lambda x: blocks.run(calls, x)[0]

        return self._values_after(values, view.run_stage(make_stage, self._first_input(values)))

    def _values_before(self, inputs: Sequence[Any]) -> dict[Any, Any]:
        """Return the values of level 0 by variable, from the program's inputs."""
        values = dict(zip((*self.jaxpr.constvars, *self.jaxpr.invars), inputs, strict=True))
        _run_equations(self.before, values)
        return values

    def _values_after(self, values: dict[Any, Any], last: Sequence[Any]) -> list[Any]:
        """Return the results of the program, from the values of level 0 and the result of the last block."""
        values.update(zip(self.blocks[-1].results, last, strict=True))
        _run_equations(self.after, values)
        return [_read(values, atom) for atom in self.outputs]

    def _first_input(self, values: Mapping[Any, Any]) -> list[Any]:
        """Return the first block's input, which the blocks pass on."""
        return [_read(values, self.blocks[0].eqn.invars[position]) for position in self.first_positions]

    def _call(self, index: int, values: Mapping[Any, Any]) -> Call:
        """Return a block as a pure function of (parameters by name, other variables, carried values)."""
        block, signature = self.blocks[index], self.blocks[index].signature
        param_count = len(signature.param_names)
        start = signature.start(block.eqn)
        own_values = [_read(values, atom) for atom in block.eqn.invars[start : start + param_count]]
        state_start = start + param_count
        state = [_read(values, atom) for atom in block.eqn.invars[state_start : state_start + signature.state_count]]
        carried = self.blocks[index - 1].results if index else ()

        def run(params: dict[str, Array], state: list[Array], x: list[Array]) -> tuple[list[Array], list[Array]]:
            local_values = {**values, **dict(zip(carried, x, strict=True))} if index else dict(values)
            _run_equations(block.before, local_values)
            operands = [_read(local_values, atom) for atom in block.eqn.invars]
            if not index:
                for position, value in zip(self.first_positions, x, strict=True):
                    operands[position] = value
            operands[start:state_start] = [params[name] for name in signature.param_names]
            operands[state_start : state_start + signature.state_count] = state
            results = jaxpr_as_fun(block.eqn.params["jaxpr"])(*operands)
            local_values.update(zip(block.eqn.outvars, results, strict=True))
            _run_equations(block.after, local_values)
            return [local_values[var] for var in block.results], results[signature.result_count :]

        return Call(blocks.wrap(run, rolled=False), (dict(zip(signature.param_names, own_values, strict=True)), state))

    def _check_unshared(self) -> None:
        """Refuse blocks whose variables are read elsewhere: only the stage that runs a block has them."""
        owner_by_param: dict[Any, str] = {}
        changed_by: dict[Any, str] = {}
        reads: list[tuple[Any, list[Any]]] = []  # equations, and the variables that they read besides own parameters
        for block in self.blocks:
            signature, start = block.signature, block.signature.start(block.eqn)
            stop = start + len(signature.param_names)
            for param in block.eqn.invars[start:stop]:
                if owner_by_param.setdefault(param, signature.path) != signature.path:
                    raise _shared_params(signature.path)
            changed_by.update(dict.fromkeys(block.eqn.outvars[signature.result_count :], signature.path))
            reads.append((block.eqn, [*block.eqn.invars[:start], *block.eqn.invars[stop:]]))
            reads += [(eqn, eqn.invars) for eqn in (*block.before, *block.after)]
        reads += [(eqn, eqn.invars) for eqn in (*self.before, *self.after)]
        for eqn, atoms in reads:
            for var in _variables(atoms):
                if var in owner_by_param:
                    raise _shared_params(owner_by_param[var])
                if var in changed_by:
                    raise UserError(
                        f"pipeline: {eqn.primitive.name} ({source_line(eqn)}) reads a variable that block "
                        f"{changed_by[var]} changes, such as a sown value, but a stage sends only the block's results; "
                        "return the value from the block, or train without a pipeline"
                    )


def _check_calls(jaxpr: Any, signatures: Sequence[_Signature], paths: Sequence[str]) -> None:
    """Raise an error unless each block is called once, in the order of `paths`, and in no inner program."""
    called_paths = [signature.path for signature in signatures]
    if called_paths != list(paths):
        raise UserError(
            f"{_purpose()} needs each block called once, in the order {', '.join(paths)}; this model calls "
            f"{', '.join(called_paths)}: name the blocks with ForeignModel(blocks=...) in the order of their calls, or "
            f"{_ADVICE}"
        )
    outer_indices = [index for eqn in jaxpr.eqns if (index := _block_index(eqn)) is not None]
    if len(outer_indices) < len(paths):
        inner = next(eqn for eqn in jaxpr.eqns if any(_block_index(inner) is not None for inner in _equations_in(eqn)))
        raise UserError(
            f"{_purpose()}: this model calls its blocks inside of {inner.primitive.name} ({source_line(inner)}), which "
            f"cannot be divided; call them one after the other, or {_ADVICE}"
        )


def _equations_in(eqn: Any) -> list[Any]:
    """Return the equations in the programs that an equation calls."""
    return [inner_eqn for jaxpr in inner_jaxprs(eqn) for inner_eqn, _ in equations(jaxpr)]


def _carried_paths(eqn: Any, signature: _Signature, level_of: Mapping[Any, int]) -> list[str]:
    """Return the paths of the arrays that a block is called with and that depend on the block before."""
    arrays = eqn.invars[len(eqn.invars) - len(signature.array_paths) :]
    pairs = zip(signature.array_paths, arrays, strict=True)
    return [path for path, atom in pairs if not _is_literal(atom) and level_of.get(atom, 0)]


def _no_chain(eqn: Any, levels: Sequence[int], signatures: Sequence[_Signature]) -> UserError:
    """Return the error for an equation that reads the results of several blocks, or of none."""
    index = _block_index(eqn)
    reader = f"block {signatures[index].path}" if index is not None else f"{eqn.primitive.name} ({source_line(eqn)})"
    read_paths = [signatures[level - 1].path for level in levels]
    if index is not None and not read_paths:
        reads = f"not the result of block {signatures[index - 1].path}"
    elif index is not None and len(read_paths) == 1:
        reads = f"the result of block {read_paths[0]}, expected that of block {signatures[index - 1].path}"
    else:
        reads = f"the results of blocks {' and '.join(read_paths)}"
    return UserError(
        f"{_purpose()} needs blocks that each read the result of the block before alone, but in this model {reader} "
        f"reads {reads}, as in a U-Net or in an encoder and decoder; {_ADVICE}"
    )


def _shared_params(path: str) -> UserError:
    """Return the error for a block whose parameters are read outside of it."""
    return UserError(
        f"pipeline: the parameters of block {path} are also read outside of the block, but only the stage of the block "
        "has them; give each block parameters of its own, or train without a pipeline"
    )


def _purpose() -> str:
    """Return what needs the blocks in sequence."""
    return "a pipeline" if blocks.stage_view() is not None else "a memory rule of several blocks"


def _live_equations(jaxpr: Any, outputs: Sequence[Any]) -> list[Any]:
    """Return the equations on which the outputs depend, and those with effects, in order."""
    read_vars, live_eqns = set(_variables(outputs)), []
    for eqn in reversed(jaxpr.eqns):
        if eqn.effects or _block_index(eqn) is not None or not read_vars.isdisjoint(eqn.outvars):
            read_vars.update(_variables(eqn.invars))
            live_eqns.append(eqn)
    return live_eqns[::-1]


def _best_cut(
    between: Sequence[Any], earlier_vars: Iterable[Any], later_vars: Sequence[Any]
) -> tuple[int, Sequence[Any]]:
    """Return how many of the equations stand before the cut that the fewest variables pass, and these variables.

    Args:
        between: equations among which to cut.
        earlier_vars: variables made before them.
        later_vars: variables read behind them.
    """
    made_vars, passed_by_cut = set(earlier_vars), []
    for cut in range(len(between) + 1):
        read_vars = dict.fromkeys([*_read_by(*between[cut:]), *later_vars])
        passed_by_cut.append([var for var in read_vars if var in made_vars])
        made_vars.update(between[cut].outvars if cut < len(between) else ())
    return min(enumerate(passed_by_cut), key=lambda pair: len(pair[1]))


def _read_by(*eqns: Any) -> list[Any]:
    """Return the variables that equations read."""
    return [var for eqn in eqns for var in _variables(eqn.invars)]


def _run_equations(eqns: Sequence[Any], values: dict[Any, Any]) -> None:
    """Run equations in order; `values` has the values of variables, and their results join it."""
    for eqn in eqns:
        values.update(zip(eqn.outvars, rebind(eqn, [_read(values, atom) for atom in eqn.invars]), strict=True))


def _block_index(eqn: Any) -> int | None:
    """Return the index of the block that an equation calls; `None` for other equations."""
    name = eqn.params.get("name")
    is_block = isinstance(name, str) and name.startswith(_NAME_PREFIX)
    return int(name.removeprefix(_NAME_PREFIX)) if is_block else None


def _variables(atoms: Sequence[Any]) -> list[Any]:
    """Return the variables among variables and literals."""
    return [atom for atom in atoms if not _is_literal(atom)]


def _is_literal(atom: Any) -> bool:
    """Return whether an input of an equation is a constant that is written in the program."""
    return hasattr(atom, "val")


def _read(values: Mapping[Any, Any], atom: Any) -> Any:
    """Return the value of a variable or of a literal."""
    return jax.numpy.asarray(atom.val, atom.aval.dtype) if _is_literal(atom) else values[atom]
