"""The forward pass of a foreign module, divided at its blocks: a part before them, the blocks, and a part after them.

The stages of a pipeline and rules that recompute segments of several blocks need the blocks as functions in sequence,
but the user's code calls them one by one. So the forward pass is traced once, with each call of a block as one equation
of the program. The level of a value is the number of blocks that it depends on: values before the blocks have level 0,
and the result of the i-th block and values computed from it have level i. Between two blocks, the program is cut where
the fewest values cross the cut, such as after an addition to a residual stream; of equal cuts, the first one is used.
The blocks form a chain if each part reads only values of level 0 and values of the part before it.

In a pipeline, the module's variables stay unchanged, and each block reads the parameters of its stage.
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
from jaxscale.models.foreign_blocks import BlockWrapper, PureBlock, run_as_one_block, wrap_blocks
from jaxscale.programs.walk import equations_with_runs, inner_jaxprs
from jaxscale.trees import named_leaves
from jaxscale.typing import Array

_NAME_PREFIX = "jaxscale_foreign_block_"
"""Prefix of the names under which the blocks are called in the traced program."""
_ADVICE = "train without a pipeline and with a memory rule that treats each block by itself, such as full or save:BYTES"


def needs_chain() -> bool:
    """Return whether the current plan needs the blocks in sequence: as stages of a pipeline, or in segments."""
    return blocks.stage_view() is not None or blocks.treatment().sequence is not None


def run_chain(forward: Callable[..., Any], module: nnx.Module, batch: Any, paths: Sequence[str]) -> Any:
    """Return `forward(module, batch)`, with the blocks run in sequence by the plan.

    Args:
        forward: function of the module and a batch that calls the blocks.
        module: the module. Its variables are updated as by a plain call, except in a pipeline.
        batch: arrays of the batch.
        paths: paths of the blocks in the order of their calls, such as "layers/0".

    Raises:
        UserError: there are fewer than two blocks, or the blocks do not form a chain.
    """
    if len(paths) < 2:
        block_text = f"one block, {paths[0]}" if paths else "no submodules that repeat"
        raise UserError(
            f"{_purpose()}: got {block_text}, expected at least two blocks in sequence; name them with "
            f"ForeignModel(blocks=...), or {_ADVICE}"
        )
    signatures: list[_Signature] = []

    def make_wrapper(block_path: str) -> BlockWrapper:
        """Return the wrapper that turns a call of the block at `block_path` into one named equation."""

        def wrap(block: PureBlock) -> PureBlock:
            def run(params: Any, state: Any, arrays: Any) -> Any:
                return block(params, state, arrays)

            def call(params: Any, state: Any, arrays: Any) -> Any:
                index = len(signatures)
                run.__name__ = run.__qualname__ = f"{_NAME_PREFIX}{index}"
                is_linen = isinstance(params, dict)
                param_names = tuple(
                    params
                    if is_linen
                    else ("/".join(map(str, param_path[1:])) for param_path, _ in nnx.to_flat_state(params))
                )
                array_paths = [
                    jax.tree_util.keystr(key_path) for key_path, _ in jax.tree_util.tree_leaves_with_path(arrays)
                ]
                signatures.append(_Signature(block_path, param_names, len(jax.tree.leaves(state)), tuple(array_paths)))
                output, new_state = jax.jit(run)(params, state, arrays)
                signatures[index] = dataclasses.replace(signatures[index], result_count=len(jax.tree.leaves(output)))
                return output, new_state

            return call

        return wrap

    def marked_forward(traced_module: nnx.Module, traced_batch: Any) -> Any:
        with wrap_blocks(traced_module, paths, make_wrapper):
            return forward(traced_module, traced_batch)

    def divide(pure_forward: PureBlock) -> PureBlock:
        def run(params: Any, state: Any, arrays: Any) -> Any:
            signatures.clear()
            program, abstract_results = jax.make_jaxpr(pure_forward, return_shape=True)(params, state, arrays)
            input_values = [*program.consts, *jax.tree.leaves((params, state, arrays))]
            abstract_output, abstract_state = abstract_results
            output_count = len(jax.tree.leaves(abstract_output))
            if blocks.stage_view() is None:
                chain = _Chain.of(program.jaxpr, signatures, paths, len(program.jaxpr.outvars))
                result_leaves = chain.run(input_values)
                output_leaves, state_leaves = result_leaves[:output_count], result_leaves[output_count:]
                new_state = jax.tree.unflatten(jax.tree.structure(abstract_state), state_leaves)
            else:
                chain = _Chain.of(program.jaxpr, signatures, paths, output_count)
                output_leaves, new_state = chain.run_stages(input_values), state
            return jax.tree.unflatten(jax.tree.structure(abstract_output), output_leaves), new_state

        return run

    return run_as_one_block(marked_forward, module, batch, wrapper=divide)


@dataclasses.dataclass(frozen=True)
class _Signature:
    """The inputs and results of a call of a block.

    Args:
        path: path of the block.
        param_names: names of the block's parameters, relative to the block.
        state_count: number of the block's other variables.
        array_paths: paths of the arrays among the block's arguments.
        result_count: number of arrays that the block returns. Its new variables follow these arrays.
    """

    path: str
    param_names: tuple[str, ...]
    state_count: int
    array_paths: tuple[str, ...]
    result_count: int = 0

    def param_start(self, eqn: Any) -> int:
        """Return the index of the first parameter among the inputs of the call; constants come before it."""
        return len(eqn.invars) - len(self.param_names) - self.state_count - len(self.array_paths)


@dataclasses.dataclass(frozen=True)
class _Block:
    """A part of the program: a call of a block, with operations around it.

    Args:
        signature: inputs and results of the block.
        eqns_before: equations of this part that precede the call.
        eqn: equation of the call.
        eqns_after: equations of this part that follow the call.
        result_vars: variables of this part that a later part reads: the next block's part, or the part after all
            blocks.
    """

    signature: _Signature
    eqns_before: tuple[Any, ...]
    eqn: Any
    eqns_after: tuple[Any, ...]
    result_vars: tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class _Chain:
    """A program divided at its blocks.

    Args:
        jaxpr: the program.
        eqns_before: equations that run before the first block.
        blocks: the blocks, in sequence.
        eqns_after: equations that run after the last block.
        outputs: the program's outputs (variables or literals) that are needed.
        carried_input_indices: indices of the first block's inputs that each block passes on to the next.
    """

    jaxpr: Any
    eqns_before: tuple[Any, ...]
    blocks: tuple[_Block, ...]
    eqns_after: tuple[Any, ...]
    outputs: tuple[Any, ...]
    carried_input_indices: tuple[int, ...]

    @classmethod
    def of(cls, jaxpr: Any, signatures: Sequence[_Signature], paths: Sequence[str], output_count: int) -> "_Chain":
        """Divide a program.

        Args:
            jaxpr: the program, with a named equation for each call of a block.
            signatures: inputs and results of these calls.
            paths: paths of all blocks.
            output_count: number of results that are needed, which are the first ones.

        Raises:
            UserError: the blocks do not form a chain.
        """
        _check_calls(jaxpr, signatures, paths)
        outputs = tuple(jaxpr.outvars[:output_count])
        live_eqns = _live_equations(jaxpr, outputs)
        level_of: dict[Any, int] = {}
        eqns_of_level: list[list[Any]] = [[] for _ in range(len(paths) + 1)]
        block_eqns: list[Any] = []
        mixed_eqns_and_levels: list[tuple[Any, list[int]]] = []  # equations that read values of several levels
        for eqn in live_eqns:
            levels = {level_of[var] for var in _variables(eqn.invars) if level_of.get(var, 0)}
            level, index = max(levels, default=0), _block_index(eqn)
            if index is not None and level != index:
                raise _chain_error(eqn, sorted(levels), signatures)
            if len(levels) > 1:
                mixed_eqns_and_levels.append((eqn, sorted(levels)))
            if index is None:
                eqns_of_level[level].append(eqn)
            else:
                level = index + 1
                block_eqns.append(eqn)
            level_of.update(dict.fromkeys(eqn.outvars, level))
        state_vars = {
            var
            for eqn, signature in zip(block_eqns, signatures, strict=True)
            for var in eqn.outvars[signature.result_count :]
        }
        for var in _variables(outputs):
            if level_of.get(var, 0) not in (0, len(paths)) and var not in state_vars:
                raise UserError(
                    f"the result of block {signatures[level_of[var] - 1].path} is returned as well as passed to the "
                    f"next block, but {_purpose()} passes it to the next block alone; {_ADVICE}"
                )
        # for each block, the variables that are read after the equations of its level
        later_vars_by_block: list[list[Any]] = [[var for var in _variables(outputs) if var not in state_vars]]
        for eqn, eqns_between in zip(block_eqns[:0:-1], eqns_of_level[:1:-1], strict=True):
            later_vars_by_block.insert(
                0, list(dict.fromkeys([*_variables_read_by(eqn, *eqns_between), *later_vars_by_block[0]]))
            )
        chain_blocks: list[_Block] = []
        earlier_vars: set[Any] = set()  # results of earlier parts
        start_eqns: tuple[Any, ...] = ()  # equations between the cut and the next block
        for index, (eqn, signature) in enumerate(zip(block_eqns, signatures, strict=True)):
            own_vars = {var for own_eqn in (*start_eqns, eqn) for var in own_eqn.outvars}
            if index == len(paths) - 1:
                own_vars -= state_vars
            eqns_between = tuple(eqns_of_level[index + 1])
            cut_index, cut_vars = _best_cut(eqns_between, earlier_vars | own_vars, later_vars_by_block[index])
            if not earlier_vars.isdisjoint(cut_vars):
                raise _chain_error(*mixed_eqns_and_levels[0], signatures)
            chain_blocks.append(_Block(signature, start_eqns, eqn, eqns_between[:cut_index], tuple(cut_vars)))
            earlier_vars |= own_vars.union(*(own_eqn.outvars for own_eqn in eqns_between[:cut_index]))
            start_eqns = eqns_between[cut_index:]
        carried_input_indices = tuple(
            len(block_eqns[0].invars) - len(signatures[0].array_paths) + index
            for index, path in enumerate(signatures[0].array_paths)
            if path in _carried_paths(block_eqns[1], signatures[1], level_of)
        )
        return cls(jaxpr, tuple(eqns_of_level[0]), tuple(chain_blocks), start_eqns, outputs, carried_input_indices)

    def run(self, input_values: Sequence[Any]) -> list[Any]:
        """Run the program, with the blocks run in sequence by the plan, and return its results."""
        value_by_var = self._values_before(input_values)
        calls = [self._call(index, value_by_var) for index in range(len(self.blocks))]
        last_results, new_states = blocks.run(calls, self._first_input(value_by_var))
        for block, new_state in zip(self.blocks, new_states, strict=True):
            value_by_var.update(zip(block.eqn.outvars[block.signature.result_count :], new_state, strict=True))
        return self._values_after(value_by_var, last_results)

    def run_stages(self, input_values: Sequence[Any]) -> list[Any]:
        """Run the program, with the blocks run by a stage of a pipeline, and return its results."""
        self._check_unshared()
        view, value_by_var = blocks.stage_view(), self._values_before(input_values)
        assert view is not None

        def make_stage(start: int, stop: int, params_by_block: Sequence[Any] | None = None) -> Callable[[Any], Any]:
            """Return a function that runs blocks `start` to `stop - 1`, by default with their own parameters."""
            calls = [self._call(index, value_by_var) for index in range(start, stop)]
            if params_by_block is not None:
                calls_and_params = zip(calls, params_by_block, strict=True)
                calls = [
                    call._replace(before=(named_leaves(params), call.before[1])) for call, params in calls_and_params
                ]
            return lambda x: blocks.run(calls, x)[0]

        return self._values_after(value_by_var, view.run_stage(make_stage, self._first_input(value_by_var)))

    def _values_before(self, input_values: Sequence[Any]) -> dict[Any, Any]:
        """Run the equations before the first block; return the program's inputs and these results, by variable."""
        value_by_var = dict(zip((*self.jaxpr.constvars, *self.jaxpr.invars), input_values, strict=True))
        _run_equations(self.eqns_before, value_by_var)
        return value_by_var

    def _values_after(self, value_by_var: dict[Any, Any], last_results: Sequence[Any]) -> list[Any]:
        """Run the equations after the last block, whose results are `last_results`; return the program's outputs."""
        value_by_var.update(zip(self.blocks[-1].result_vars, last_results, strict=True))
        _run_equations(self.eqns_after, value_by_var)
        return [_value_of(value_by_var, atom) for atom in self.outputs]

    def _first_input(self, value_by_var: Mapping[Any, Any]) -> list[Any]:
        """Return the carried inputs of the first block: the values that each block passes to the next."""
        return [_value_of(value_by_var, self.blocks[0].eqn.invars[position]) for position in self.carried_input_indices]

    def _call(self, index: int, value_by_var: Mapping[Any, Any]) -> Call:
        """Return the `Call` of a block as a pure function of (parameters by name, other variables, carried values)."""
        block, signature = self.blocks[index], self.blocks[index].signature
        param_count = len(signature.param_names)
        param_start = signature.param_start(block.eqn)
        param_values = [
            _value_of(value_by_var, atom) for atom in block.eqn.invars[param_start : param_start + param_count]
        ]
        state_start = param_start + param_count
        state = [
            _value_of(value_by_var, atom)
            for atom in block.eqn.invars[state_start : state_start + signature.state_count]
        ]
        carried_vars = self.blocks[index - 1].result_vars if index else ()

        def run(params: dict[str, Array], state: list[Array], x: list[Array]) -> tuple[list[Array], list[Array]]:
            local_value_by_var = (
                {**value_by_var, **dict(zip(carried_vars, x, strict=True))} if index else dict(value_by_var)
            )
            _run_equations(block.eqns_before, local_value_by_var)
            operands = [_value_of(local_value_by_var, atom) for atom in block.eqn.invars]
            if not index:
                for position, carried_value in zip(self.carried_input_indices, x, strict=True):
                    operands[position] = carried_value
            operands[param_start:state_start] = [params[name] for name in signature.param_names]
            operands[state_start : state_start + signature.state_count] = state
            results = jaxpr_as_fun(block.eqn.params["jaxpr"])(*operands)
            local_value_by_var.update(zip(block.eqn.outvars, results, strict=True))
            _run_equations(block.eqns_after, local_value_by_var)
            return [local_value_by_var[var] for var in block.result_vars], results[signature.result_count :]

        return Call(
            blocks.wrap(run, rolled=False), (dict(zip(signature.param_names, param_values, strict=True)), state)
        )

    def _check_unshared(self) -> None:
        """Raise UserError if a block's variables are read outside of it: only the stage that runs it has them."""
        owner_path_by_var: dict[Any, str] = {}
        changing_path_by_var: dict[Any, str] = {}
        eqns_and_atoms: list[tuple[Any, list[Any]]] = []  # (equation, inputs other than its block's parameters)
        for block in self.blocks:
            signature, param_start = block.signature, block.signature.param_start(block.eqn)
            param_stop = param_start + len(signature.param_names)
            for param in block.eqn.invars[param_start:param_stop]:
                if owner_path_by_var.setdefault(param, signature.path) != signature.path:
                    raise _shared_params_error(signature.path)
            changing_path_by_var.update(dict.fromkeys(block.eqn.outvars[signature.result_count :], signature.path))
            eqns_and_atoms.append((block.eqn, [*block.eqn.invars[:param_start], *block.eqn.invars[param_stop:]]))
            eqns_and_atoms += [(eqn, eqn.invars) for eqn in (*block.eqns_before, *block.eqns_after)]
        eqns_and_atoms += [(eqn, eqn.invars) for eqn in (*self.eqns_before, *self.eqns_after)]
        for eqn, atoms in eqns_and_atoms:
            for var in _variables(atoms):
                if var in owner_path_by_var:
                    raise _shared_params_error(owner_path_by_var[var])
                if var in changing_path_by_var:
                    raise UserError(
                        f"pipeline: {eqn.primitive.name} ({source_line(eqn)}) reads a variable that block "
                        f"{changing_path_by_var[var]} changes, such as a sown value, but a stage sends only the "
                        "block's results; return the value from the block, or train without a pipeline"
                    )


def _check_calls(jaxpr: Any, signatures: Sequence[_Signature], paths: Sequence[str]) -> None:
    """Raise an error unless each block is called once, in the order of `paths`, and not inside an inner program."""
    called_paths = [signature.path for signature in signatures]
    if called_paths != list(paths):
        raise UserError(
            f"{_purpose()} needs each block called once, in the order {', '.join(paths)}; this model calls "
            f"{', '.join(called_paths)}: name the blocks with ForeignModel(blocks=...) in the order of their calls, or "
            f"{_ADVICE}"
        )
    outer_indices = [index for eqn in jaxpr.eqns if (index := _block_index(eqn)) is not None]
    if len(outer_indices) < len(paths):
        calling_eqn = next(
            eqn for eqn in jaxpr.eqns if any(_block_index(inner_eqn) is not None for inner_eqn in _equations_in(eqn))
        )
        raise UserError(
            f"{_purpose()}: this model calls its blocks inside of {calling_eqn.primitive.name} "
            f"({source_line(calling_eqn)}), which cannot be divided; call them one after the other, or {_ADVICE}"
        )


def _equations_in(eqn: Any) -> list[Any]:
    """Return the equations in the programs that an equation calls."""
    return [inner_eqn for jaxpr in inner_jaxprs(eqn) for inner_eqn, _ in equations_with_runs(jaxpr)]


def _carried_paths(eqn: Any, signature: _Signature, level_of: Mapping[Any, int]) -> list[str]:
    """Return the paths of a block's arguments that depend on earlier blocks."""
    array_atoms = eqn.invars[len(eqn.invars) - len(signature.array_paths) :]
    paths_and_atoms = zip(signature.array_paths, array_atoms, strict=True)
    return [path for path, atom in paths_and_atoms if not _is_literal(atom) and level_of.get(atom, 0)]


def _chain_error(eqn: Any, levels: Sequence[int], signatures: Sequence[_Signature]) -> UserError:
    """Return the error for an equation that reads results of the wrong blocks, such as of several blocks."""
    index = _block_index(eqn)
    reader = f"block {signatures[index].path}" if index is not None else f"{eqn.primitive.name} ({source_line(eqn)})"
    read_paths = [signatures[level - 1].path for level in levels]
    if index is not None and not read_paths:
        read_text = f"not the result of block {signatures[index - 1].path}"
    elif index is not None and len(read_paths) == 1:
        read_text = f"the result of block {read_paths[0]}, expected that of block {signatures[index - 1].path}"
    else:
        read_text = f"the results of blocks {' and '.join(read_paths)}"
    return UserError(
        f"{_purpose()} needs blocks that each read the result of the block before alone, but in this model {reader} "
        f"reads {read_text}, as in a U-Net or in an encoder and decoder; {_ADVICE}"
    )


def _shared_params_error(path: str) -> UserError:
    """Return the error for a block whose parameters are read outside of it."""
    return UserError(
        f"pipeline: the parameters of block {path} are also read outside of the block, but only the stage of the block "
        "has them; give each block parameters of its own, or train without a pipeline"
    )


def _purpose() -> str:
    """Return the name of the feature that needs the blocks in sequence, for error messages."""
    return "a pipeline" if blocks.stage_view() is not None else "a memory rule of several blocks"


def _live_equations(jaxpr: Any, outputs: Sequence[Any]) -> list[Any]:
    """Return, in order, the equations on which the outputs depend, that have effects, or that call a block."""
    read_vars, live_eqns = set(_variables(outputs)), []
    for eqn in reversed(jaxpr.eqns):
        if eqn.effects or _block_index(eqn) is not None or not read_vars.isdisjoint(eqn.outvars):
            read_vars.update(_variables(eqn.invars))
            live_eqns.append(eqn)
    return live_eqns[::-1]


def _best_cut(
    eqns_between: Sequence[Any], earlier_vars: Iterable[Any], later_vars: Sequence[Any]
) -> tuple[int, Sequence[Any]]:
    """Return the cut that the fewest variables cross: (number of equations before the cut, these variables).

    Args:
        eqns_between: equations among which to cut.
        earlier_vars: variables computed before these equations.
        later_vars: variables read after these equations.
    """
    made_vars, passed_vars_by_cut = set(earlier_vars), []
    for cut_index in range(len(eqns_between) + 1):
        read_vars = dict.fromkeys([*_variables_read_by(*eqns_between[cut_index:]), *later_vars])
        passed_vars_by_cut.append([var for var in read_vars if var in made_vars])
        made_vars.update(eqns_between[cut_index].outvars if cut_index < len(eqns_between) else ())
    return min(enumerate(passed_vars_by_cut), key=lambda pair: len(pair[1]))


def _variables_read_by(*eqns: Any) -> list[Any]:
    """Return the variables that equations read."""
    return [var for eqn in eqns for var in _variables(eqn.invars)]


def _run_equations(eqns: Sequence[Any], value_by_var: dict[Any, Any]) -> None:
    """Run equations in order, and add their results to `value_by_var`."""
    for eqn in eqns:
        value_by_var.update(
            zip(eqn.outvars, rebind(eqn, [_value_of(value_by_var, atom) for atom in eqn.invars]), strict=True)
        )


def _block_index(eqn: Any) -> int | None:
    """Return the index of the block that an equation calls; `None` for other equations."""
    name = eqn.params.get("name")
    is_block = isinstance(name, str) and name.startswith(_NAME_PREFIX)
    return int(name.removeprefix(_NAME_PREFIX)) if is_block else None


def _variables(atoms: Sequence[Any]) -> list[Any]:
    """Return the variables among variables and literals."""
    return [atom for atom in atoms if not _is_literal(atom)]


def _is_literal(atom: Any) -> bool:
    """Return whether an input of an equation is a literal: a constant in the program."""
    return hasattr(atom, "val")


def _value_of(value_by_var: Mapping[Any, Any], atom: Any) -> Any:
    """Return the value of a variable or of a literal."""
    return jax.numpy.asarray(atom.val, atom.aval.dtype) if _is_literal(atom) else value_by_var[atom]
