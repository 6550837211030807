"""A foreign module that scans over its blocks: the user's own `nnx.scan`, `linen.scan` or `jax.lax.scan`.

The parameters of such blocks are stacked along a first dim, and the module's program has one `scan` that reads them row
by row. The body of this scan is the block. The program is traced, and run with `LayerGroup` in place of the scan, so
that a plan treats the blocks like those of `layers.Stack`: it recomputes, offloads and unrolls them, and divides them
into the stages of a pipeline. A `jax.checkpoint` that the user put inside the body stays there.

Left out: a scan inside of another loop, of a branch or of a checkpoint, a scan in reverse order, and stacked parameters
that an operation other than a cast reads before the scan, as for a stack along a dim other than the first.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.extend.core import jaxpr_as_fun

from jaxscale import blocks
from jaxscale.blocks import STACK_SHAPE, BlockFunction
from jaxscale.compat import prune, rebind, scan_counts, source_line
from jaxscale.errors import UserError
from jaxscale.layers.layer_group import LayerGroup, concatenate_layers, restack, slice_layers, stage_runner
from jaxscale.models.foreign_blocks import PureBlock, run_as_one_block
from jaxscale.programs.inline import INLINED_CALLS
from jaxscale.programs.walk import open_jaxpr

_CASTS = frozenset({"convert_element_type", "copy", "reduce_precision"})
"""Operations that may read stacked parameters before the scan, because they treat all rows alike."""


def scanned_param_names(program: Any, param_names: Sequence[str]) -> tuple[str, ...]:
    """Return the names of the parameters that a scan of a program reads row by row.

    Args:
        program: the program, a closed jaxpr.
        param_names: names of the parameters, which are the first inputs of the program.
    """
    scanned_names: set[str] = set()

    def walk(jaxpr: Any, name_by_var: Mapping[Any, str]) -> None:
        name_by_atom = dict(name_by_var)
        for eqn in jaxpr.eqns:
            name_by_index = {
                index: name_by_atom[atom]
                for index, atom in enumerate(eqn.invars)
                if not _is_literal(atom) and atom in name_by_atom
            }
            if eqn.primitive.name in _CASTS and name_by_index:
                name_by_atom[eqn.outvars[0]] = name_by_index[0]
            elif eqn.primitive.name in INLINED_CALLS:
                inner_jaxpr = open_jaxpr(eqn.params.get("jaxpr") or eqn.params["call_jaxpr"])
                walk(inner_jaxpr, {inner_jaxpr.invars[index]: name for index, name in name_by_index.items()})
            elif _is_block_scan(eqn):
                first_row_index = sum(scan_counts(eqn.params))
                scanned_names.update(name for index, name in name_by_index.items() if index >= first_row_index)

    walk(program.jaxpr, dict(zip(program.jaxpr.invars, param_names, strict=False)))
    return tuple(sorted(scanned_names))


def needs_scan() -> bool:
    """Return whether the current plan treats blocks, so that it must run the scan over them."""
    treatment = dataclasses.replace(blocks.treatment(), is_held_back=False)
    return blocks.stage_view() is not None or blocks.is_adapting() or treatment != blocks.Treatment()


def run_scanned(forward: Callable[..., Any], module: nnx.Module, batch: Any, names: Sequence[str]) -> Any:
    """Return `forward(module, batch)`, with the blocks of the module's scans run by the plan.

    Args:
        forward: function of the module and a batch.
        module: the module. Its variables are updated as by a plain call, except in a pipeline, where the module has
            only the rows of one stage.
        batch: arrays of the batch.
        names: names of the parameters that scans read row by row, which have the metadata `STACK_SHAPE`.

    Raises:
        UserError: in a pipeline, something other than a single scan reads the stacked parameters.
    """

    def divide(pure_forward: PureBlock) -> PureBlock:
        def run(params: Any, state: Any, arrays: Any) -> Any:
            names_and_variables = [
                ("/".join(map(str, path[1:])), variable) for path, variable in nnx.to_flat_state(params)
            ]
            whole_params = nnx.from_flat_state(
                {path: _with_whole_shape(variable) for path, variable in nnx.to_flat_state(params)}
            )
            program, abstract_results = jax.make_jaxpr(pure_forward, return_shape=True)(whole_params, state, arrays)
            abstract_output, abstract_state = abstract_results
            output_count = len(jax.tree.leaves(abstract_output))
            is_staged = blocks.stage_view() is not None
            is_result_used = [not is_staged or index < output_count for index in range(len(program.jaxpr.outvars))]
            program, is_input_used = prune(program, is_result_used)
            rows_or_variables = [
                _Rows(name, variable.get_value()) if name in names else variable
                for name, variable in names_and_variables
            ]
            inputs = [each if isinstance(each, _Rows) else each.get_value() for each in rows_or_variables]
            inputs += jax.tree.leaves((state, arrays))
            used_inputs = [value for value, is_used in zip(inputs, is_input_used, strict=True) if is_used]
            stage_scan = _StageScan(names) if is_staged else None
            results = _run_program(program.jaxpr, [*program.consts, *used_inputs], stage_scan)
            new_state = state if is_staged else jax.tree.unflatten(_structure(abstract_state), results[output_count:])
            return jax.tree.unflatten(_structure(abstract_output), results[:output_count]), new_state

        return run

    return run_as_one_block(forward, module, batch, wrapper=divide)


@dataclasses.dataclass(frozen=True)
class _Rows:
    """A stacked parameter that a scan reads row by row, in place of its value during the run of a program.

    Args:
        name: name of the parameter.
        rows: the rows that this device has; in a pipeline, those of one stage.
        casts: the casts between the parameter and the scan, in order.
    """

    name: str
    rows: Any
    casts: tuple[Any, ...] = ()


@dataclasses.dataclass
class _StageScan:
    """What a pipeline requires of a program: that exactly one scan reads the stacked parameters, and reads all of them.

    Args:
        names: names of the stacked parameters.
        is_run: whether the scan has run.
    """

    names: Sequence[str]
    is_run: bool = False


def _with_whole_shape(variable: Any) -> Any:
    """Return a parameter with the shape that it has in the user's module: with all layers, not only one stage's."""
    shape = variable.get_metadata().get(STACK_SHAPE)
    if shape is None:
        return variable
    value = variable.get_value()
    dtype = getattr(value, "dtype", None) or jax.tree.leaves(value)[0].dtype  # of the type in which a block reads it
    return variable.replace(jax.ShapeDtypeStruct(shape, dtype))


def _run_program(jaxpr: Any, inputs: Sequence[Any], stage_scan: _StageScan | None) -> list[Any]:
    """Run a program, with the scans over stacked parameters run by the plan, and return its results.

    Args:
        jaxpr: an open jaxpr.
        inputs: a value, or `_Rows`, for each constant of the jaxpr, and then for each of its arguments.
        stage_scan: what a pipeline requires of the program's scans; `None` if there is no pipeline.
    """
    value_by_var: dict[Any, Any] = dict(zip((*jaxpr.constvars, *jaxpr.invars), inputs, strict=True))
    read_atoms = {id(atom) for eqn in jaxpr.eqns for atom in eqn.invars} | set(map(id, jaxpr.outvars))

    def value_of(atom: Any) -> Any:
        return jnp.asarray(atom.val, atom.aval.dtype) if _is_literal(atom) else value_by_var[atom]

    for eqn in jaxpr.eqns:
        operands = [value_of(atom) for atom in eqn.invars]
        is_row_flags = [isinstance(operand, _Rows) for operand in operands]
        if not any(is_row_flags):
            results = rebind(eqn, operands)
        elif eqn.primitive.name in _CASTS:
            results = [dataclasses.replace(operands[0], casts=(*operands[0].casts, eqn))]
        elif eqn.primitive.name in INLINED_CALLS:
            inner_program = eqn.params["jaxpr"] if "jaxpr" in eqn.params else eqn.params["call_jaxpr"]
            inner_consts = getattr(inner_program, "consts", ())
            results = _run_program(open_jaxpr(inner_program), [*inner_consts, *operands], stage_scan)
        elif _is_block_scan(eqn) and not any(is_row_flags[: sum(scan_counts(eqn.params))]):
            if stage_scan is not None:
                first_output_index = scan_counts(eqn.params)[1]
                _check_stage_scan(
                    eqn, stage_scan, operands, any(id(var) in read_atoms for var in eqn.outvars[first_output_index:])
                )
            results = _run_scan(eqn, operands, is_staged=stage_scan is not None)
        else:
            name = next(operand.name for operand in operands if isinstance(operand, _Rows))
            if stage_scan is not None:
                raise UserError(
                    f"pipeline: {eqn.primitive.name} ({source_line(eqn)}) reads the stacked parameter {name} outside "
                    "of the scan over the blocks, but a stage has only some of its rows; read it in the scan alone, or "
                    "train without a pipeline"
                )
            results = rebind(
                eqn, [_cast_rows(operand) if isinstance(operand, _Rows) else operand for operand in operands]
            )
        value_by_var.update(zip(eqn.outvars, results, strict=True))
    return [_cast_rows(value) if isinstance(value, _Rows) else value for value in map(value_of, jaxpr.outvars)]


def _cast_rows(param_rows: _Rows) -> Any:
    """Return all rows of a stacked parameter, with its casts applied."""
    cast_rows = param_rows.rows
    for cast_eqn in param_rows.casts:
        (cast_rows,) = rebind(cast_eqn, [cast_rows])
    return cast_rows


def _run_scan(eqn: Any, operands: Sequence[Any], *, is_staged: bool) -> list[Any]:
    """Run the blocks of a scan under the current plan, and return the results of the scan.

    Args:
        eqn: equation of the scan.
        operands: inputs of the scan, among which stacked parameters are `_Rows`.
        is_staged: whether a stage of a pipeline runs the blocks.
    """
    const_count, carry_count = scan_counts(eqn.params)
    first_row_index = const_count + carry_count
    consts, x, row_inputs = (
        operands[:const_count],
        list(operands[const_count:first_row_index]),
        operands[first_row_index:],
    )
    rows_by_index = {
        str(index): row_input for index, row_input in enumerate(row_inputs) if isinstance(row_input, _Rows)
    }
    params = {param_rows.name: param_rows.rows for param_rows in rows_by_index.values()}
    other_rows_by_index = {
        str(index): row_input for index, row_input in enumerate(row_inputs) if not isinstance(row_input, _Rows)
    }
    run_body = jaxpr_as_fun(eqn.params["jaxpr"])

    def block(row_by_name: Any, state: Any, x: Any, index: Any, layer_row_by_index: Any) -> Any:
        """Run the body of the scan for one layer."""
        layer_rows = []
        for position in range(len(row_inputs)):
            param_rows = rows_by_index.get(str(position))
            layer_row = layer_row_by_index[str(position)] if param_rows is None else row_by_name[param_rows.name]
            for cast_eqn in () if param_rows is None else param_rows.casts:
                (layer_row,) = rebind(cast_eqn, [layer_row])
            layer_rows.append(layer_row)
        results = run_body(*consts, *x, *layer_rows)
        outputs = None if is_staged else results[carry_count:]
        return list(results[:carry_count]), (state, outputs)

    view = blocks.stage_view()
    if is_staged:
        assert view is not None
        # this device has the stage's rows of the parameters, but the rows of all layers of the other inputs
        stage_rows_by_index = jax.tree.map(lambda leaf: leaf[jnp.maximum(view.layer_numbers, 0)], other_rows_by_index)
        run_stage = stage_runner(view, [block], (params, {}, view.layer_numbers, stage_rows_by_index))
        return [*view.run_stage(run_stage, x), *(None,) * (len(eqn.outvars) - carry_count)]
    layer_count = eqn.params["length"]
    layer_inputs = (params, {}, jnp.arange(layer_count, dtype=jnp.int32), other_rows_by_index)
    x, (_, outputs) = run_layers(block, layer_inputs, x, layer_count)
    return [*x, *outputs]


def run_layers(block: BlockFunction, inputs: Any, x: Any, layer_count: int) -> tuple[Any, Any]:
    """Run blocks of one structure under the current plan; return the last `x`, and the stacked results of all blocks.

    Args:
        block: function of one layer, called as `LayerGroup` calls it.
        inputs: the inputs of `LayerGroup`, with a row for each layer.
        x: input of the first block.
        layer_count: number of layers.
    """
    treatment = blocks.treatment()
    calls, stacked_results = [], []
    for start, stop, wrapper in treatment.wrapped_ranges(layer_count):
        group = LayerGroup([block], wrapper, treatment.unroll, treatment.segment)
        range_inputs = slice_layers(inputs, slice(start, stop), layer_count)
        if treatment.sequence is not None:
            calls += group.calls(range_inputs, stop - start)
        else:
            x, range_results = group.scan_layers(x, range_inputs, stop - start)
            stacked_results.append(range_results)
    if treatment.sequence is not None:
        x, layer_results = blocks.run(calls, x)
        stacked_results.append(restack(layer_results))
    return x, concatenate_layers(stacked_results)


def _check_stage_scan(eqn: Any, stage_scan: _StageScan, operands: Sequence[Any], has_outputs: bool) -> None:
    """Raise UserError if a scan cannot be cut into stages; otherwise mark the scan as run.

    Args:
        eqn: equation of the scan.
        stage_scan: what the pipeline requires of the program.
        operands: inputs of the scan, among which stacked parameters are `_Rows`.
        has_outputs: whether the program reads outputs that the scan returns for each layer.
    """
    const_count, carry_count = scan_counts(eqn.params)
    names = [operand.name for operand in operands if isinstance(operand, _Rows)]
    unread_names = [name for name in stage_scan.names if name not in names]
    if stage_scan.is_run or unread_names:
        raise UserError(
            f"pipeline: this model scans over several stacks of blocks ({source_line(eqn)} reads {names[0]}, but not "
            f"{unread_names[0] if unread_names else 'those of the scan before'}), and only one can be cut into stages; "
            "name its module with ForeignModel(blocks='decoder'), or train without a pipeline"
        )
    stage_scan.is_run = True
    if has_outputs:
        raise UserError(
            f"pipeline: the blocks that {source_line(eqn)} scans over return outputs of each layer, but a stage sends "
            "only the carry to the next stage; put them into the carry, or train without a pipeline"
        )
    carry_types = [jax.typeof(operand) for operand in operands[const_count : const_count + carry_count]]
    if any(jnp.issubdtype(carry_type.dtype, jax.dtypes.prng_key) for carry_type in carry_types):
        raise UserError(
            f"pipeline: the blocks that {source_line(eqn)} scans over pass on a random key, which no stage can send; "
            "split the key into one for each layer before the scan, or train without a pipeline"
        )


def _is_block_scan(eqn: Any) -> bool:
    """Return whether an equation is a forward scan, of at least two iterations, with a carry."""
    if eqn.primitive.name != "scan" or eqn.params["reverse"]:
        return False
    return eqn.params["length"] > 1 and scan_counts(eqn.params)[1] > 0


def _is_literal(atom: Any) -> bool:
    """Return whether an input of an equation is a literal: a constant in the program."""
    return hasattr(atom, "val")


def _structure(tree: Any) -> Any:
    """Return the structure of a tree."""
    return jax.tree.structure(tree)
