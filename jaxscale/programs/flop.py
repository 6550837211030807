"""FLOP of a program, counted in its jaxpr. Nothing is compiled and no device is needed.

XLA's `cost_analysis` counts the body of a loop once and returns None on a GPU; here the body of a scan counts `length`
times. `mfu` is relative to `model_flop`, which counts only matrix products and convolutions, with 2 FLOP for a multiply
and an add. Operations that no result depends on do not count, because a compiler drops them. Recomputation
(`jax.checkpoint`, a chunked loss) is part of the trace and counts, so pass `model_flop` a function that recomputes
nothing.

Left out: elementwise work, bytes, and savings by sparsity or causality.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxscale.compat import scan_counts
from jaxscale.programs.flat import PIPE
from jaxscale.programs.known_values import Known, callee_of, known_values, selecting_input_indices, value_of
from jaxscale.programs.walk import is_jaxpr, open_jaxpr


@dataclasses.dataclass(frozen=True)
class Flop:
    """The FLOP of a program's matrix products, convolutions and kernels.

    Args:
        by_primitive: FLOP of each primitive, by the primitive's name.
        unknown_loops: number of while loops with an unknown number of trips; their bodies count once.
    """

    by_primitive: Mapping[str, int] = dataclasses.field(default_factory=dict)
    unknown_loops: int = 0

    @property
    def total(self) -> int:
        """The FLOP of all primitives."""
        return sum(self.by_primitive.values())

    def __add__(self, other: "Flop") -> "Flop":
        names = dict.fromkeys([*self.by_primitive, *other.by_primitive])
        flop_by_name = {name: self.by_primitive.get(name, 0) + other.by_primitive.get(name, 0) for name in names}
        return Flop(flop_by_name, self.unknown_loops + other.unknown_loops)

    def __mul__(self, factor: int) -> "Flop":
        return Flop({name: flop * factor for name, flop in self.by_primitive.items()}, self.unknown_loops)


def count_flop(fn: Callable[..., Any], *args: Any) -> Flop:
    """Count the FLOP of the matrix products, convolutions and kernels of `fn(*args)`, all devices together.

    The body of a scan counts once per trip, and a `shard_map` once per device along its manual axes. If constants and
    the device's index along the pipe axis select the branch of a `cond`, that branch counts. Otherwise the most
    expensive branch counts.

    Args:
        fn: a function of arrays that JAX can trace.
        args: arguments of the function, as arrays or shapes (`jax.ShapeDtypeStruct`).

    Example:
        >>> import jax, jax.numpy as jnp
        >>> x = jax.ShapeDtypeStruct((4, 8), jnp.float32)
        >>> count_flop(lambda x: jax.lax.fori_loop(0, 3, lambda _, y: y @ x.T @ x, x), x).total
        1536
    """
    import jax

    return jaxpr_flop(jax.make_jaxpr(fn)(*args))


def model_flop(fn: Callable[..., Any], *args: Any) -> int:
    """Return the FLOP of the matrix products and convolutions of `fn(*args)`; `mfu` is relative to this number.

    Args:
        fn: a function of arrays that JAX can trace, such as the gradient of a loss.
        args: arguments of the function, as arrays or shapes (`jax.ShapeDtypeStruct`).

    Returns:
        The FLOP of all devices together. The product of an (M, K) and a (K, N) matrix counts 2MNK.

    Raises:
        ValueError: a matrix product is in a while loop with an unknown number of trips.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> w, x = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in [(8, 16), (4, 8)])
        >>> model_flop(lambda w, x: x @ w, w, x), model_flop(jax.grad(lambda w, x: (x @ w).sum()), w, x)
        (1024, 1024)
    """
    flop = count_flop(fn, *args)
    if flop.unknown_loops:
        raise ValueError(
            f"{flop.unknown_loops} while loop(s) with matrix products have an unknown number of trips; "
            "use lax.scan, or fori_loop with fixed bounds (count_flop counts one trip of each loop)"
        )
    return flop.total


def equation_flop(eqn: Any) -> int:
    """Return the FLOP of an equation's matrix products, convolutions and kernels, all devices together.

    Args:
        eqn: equation of a jaxpr; all its outputs count as used.
    """
    return _FlopCounter({}).equation_flop(eqn, [True] * len(eqn.outvars), [None] * len(eqn.invars)).total


def jaxpr_flop(jaxpr: Any, used_flags: Sequence[bool] | None = None) -> Flop:
    """Return the FLOP of the operations that a jaxpr's used outputs depend on.

    Args:
        jaxpr: a jaxpr, open or closed.
        used_flags: for each output, whether it is used; by default all are used.
    """
    return _FlopCounter({}).jaxpr_flop(jaxpr, used_flags)


@dataclasses.dataclass(frozen=True)
class _FlopCounter:
    """A counter of FLOP on a device whose indices along some mesh axes are known.

    Args:
        axis_indices: index of the device along each mesh axis for which it is known.
        flop_by_key: FLOP of each jaxpr counted so far, by the jaxpr, its used outputs and the values that select
            branches.
    """

    axis_indices: Mapping[str, int]
    flop_by_key: dict[Any, Flop] = dataclasses.field(default_factory=dict)

    def jaxpr_flop(
        self, jaxpr: Any, used_flags: Sequence[bool] | None = None, known_inputs: Sequence[Known] = ()
    ) -> Flop:
        """Return the FLOP of a jaxpr, given its used outputs and the known values of its arguments."""
        opened_jaxpr = open_jaxpr(jaxpr)
        used_flags = [True] * len(opened_jaxpr.outvars) if used_flags is None else used_flags
        known_inputs = known_inputs or [None] * len(opened_jaxpr.invars)
        selecting_value_by_index = {
            i: value for i in selecting_input_indices(jaxpr) if (value := known_inputs[i]) is not None
        }
        key = (
            id(opened_jaxpr),
            *used_flags,
            *((index, value.tobytes()) for index, value in sorted(selecting_value_by_index.items())),
        )
        if key not in self.flop_by_key:
            selecting_values = [selecting_value_by_index.get(index) for index in range(len(known_inputs))]
            self.flop_by_key[key] = self._uncached_jaxpr_flop(jaxpr, used_flags, selecting_values)
        return self.flop_by_key[key]

    def _uncached_jaxpr_flop(self, jaxpr: Any, used_flags: Sequence[bool], known_inputs: Sequence[Known]) -> Flop:
        """Return the sum of the FLOP of a jaxpr's operations, given the known values of its arguments."""
        opened_jaxpr = open_jaxpr(jaxpr)
        value_by_var = known_values(jaxpr, known_inputs, self.axis_indices)
        used_vars = [var for var, is_used in zip(opened_jaxpr.outvars, used_flags, strict=True) if is_used]
        live_vars = {var for var in used_vars if not hasattr(var, "val")}
        total = Flop()
        for eqn in reversed(opened_jaxpr.eqns):
            needed_flags = [var in live_vars for var in eqn.outvars]
            if any(needed_flags) or eqn.effects:
                total += self.equation_flop(eqn, needed_flags, [value_of(atom, value_by_var) for atom in eqn.invars])
                live_vars.update(var for var in eqn.invars if not hasattr(var, "val"))  # literals are not hashable
        return total

    def equation_flop(self, eqn: Any, used_flags: Sequence[bool], known_operands: Sequence[Known]) -> Flop:
        """Return the FLOP of an equation, given its used outputs and the known values of its operands."""
        name, params = eqn.primitive.name, eqn.params
        if name in FORMULAS:
            return Flop({name: FORMULAS[name](eqn)})
        if name in ("pallas_call", "mpmd_map"):  # a TPU or Triton kernel; a Mosaic GPU kernel
            return _kernel_flop(eqn)
        if name == "scan":
            return self._scan_flop(params, known_operands)
        if name == "while":
            flop = self.jaxpr_flop(params["body_jaxpr"])  # of one trip
            return dataclasses.replace(flop, unknown_loops=flop.unknown_loops + 1) if flop.total else flop
        if name == "cond":
            branches = params["branches"]
            if known_operands[0] is not None:
                branches = [branches[min(max(int(known_operands[0]), 0), len(branches) - 1)]]
            return max(
                (self.jaxpr_flop(branch, None, known_operands[1:]) for branch in branches), key=lambda flop: flop.total
            )
        if name == "shard_map":
            return self._shard_map_flop(params, known_operands)
        callee_jaxprs = [value for value in params.values() if is_jaxpr(value)]
        # jit, remat, custom_vjp and similar calls run one program, with the outputs of the equation
        has_same_outputs = len(callee_jaxprs) == 1 and len(open_jaxpr(callee_jaxprs[0]).outvars) == len(used_flags)
        known_inputs = () if callee_of(eqn) is None else known_operands
        return sum(
            (self.jaxpr_flop(jaxpr, used_flags if has_same_outputs else None, known_inputs) for jaxpr in callee_jaxprs),
            Flop(),
        )

    def _scan_flop(self, params: Mapping[str, Any], known_operands: Sequence[Known]) -> Flop:
        """Return the FLOP of a scan; if the scanned arrays select branches, each trip is counted separately."""
        body, length = params["jaxpr"], params["length"]
        const_count, state_count = scan_counts(params)
        known_consts = [*known_operands[:const_count], *[None] * state_count]
        scanned_start = len(known_consts)
        known_scanned_arrays = known_operands[scanned_start:]
        selecting_indices = [index for index in selecting_input_indices(body) if index >= scanned_start]
        if all(known_operands[index] is None for index in selecting_indices):
            return self.jaxpr_flop(body, None, [*known_consts, *[None] * len(known_scanned_arrays)]) * length
        trips = reversed(range(length)) if params["reverse"] else range(length)
        slices_by_trip = (
            [None if array is None else np.asarray(array[trip]) for array in known_scanned_arrays] for trip in trips
        )
        return sum((self.jaxpr_flop(body, None, [*known_consts, *slices]) for slices in slices_by_trip), Flop())

    def _shard_map_flop(self, params: Mapping[str, Any], known_operands: Sequence[Known]) -> Flop:
        """Return the FLOP of all devices along the manual axes; branches may differ along the pipe axis."""
        body, axis_sizes = params["jaxpr"], {axis: params["mesh"].shape[axis] for axis in params["newly_manual_axes"]}
        known_local_operands = [
            None if any(spec) else value for value, spec in zip(known_operands, params["in_specs"], strict=True)
        ]
        if PIPE not in axis_sizes:
            return self.jaxpr_flop(body, None, known_local_operands) * math.prod(axis_sizes.values())
        rank_count = axis_sizes.pop(PIPE)
        rank_counters = (_FlopCounter({**self.axis_indices, PIPE: rank}) for rank in range(rank_count))
        flop = sum((counter.jaxpr_flop(body, None, known_local_operands) for counter in rank_counters), Flop())
        return flop * math.prod(axis_sizes.values())


def _dot_flop(eqn: Any) -> int:
    """Return the FLOP of a matrix product."""
    return _product_flop(eqn, eqn.params["dimension_numbers"][0][0])


def _product_flop(eqn: Any, contracted_dims: Sequence[int]) -> int:
    """Return the FLOP of a matrix product that sums over these dims of its left operand."""
    left_shape = eqn.invars[0].aval.shape
    return 2 * math.prod(eqn.outvars[0].aval.shape) * math.prod(left_shape[dim] for dim in contracted_dims)


def _ragged_dot_flop(eqn: Any) -> int:
    """Return the FLOP of a ragged matrix product: each row is multiplied only by the matrix of its group."""
    dim_numbers = eqn.params["ragged_dot_dimension_numbers"]
    (contracted_dims, _), _ = dim_numbers.dot_dimension_numbers
    group_count = eqn.invars[2].aval.shape[-1] if set(dim_numbers.lhs_ragged_dimensions) <= set(contracted_dims) else 1
    return _product_flop(eqn, contracted_dims) // group_count


def _scaled_matmul_flop(eqn: Any) -> int:
    """Return the FLOP of a scaled matrix product, whose operands have shape (batch, rows, contracted)."""
    return _product_flop(eqn, [2])


def _conv_flop(eqn: Any) -> int:
    """Return the FLOP of a convolution; kernel taps on padding or on zeros of a dilated input do not count."""
    dim_numbers = eqn.params["dimension_numbers"]  # `jax.lax.ConvDimensionNumbers`
    lhs_shape, rhs_shape, output_shape = (var.aval.shape for var in (*eqn.invars[:2], eqn.outvars[0]))
    shapes_and_specs = (
        (lhs_shape, dim_numbers.lhs_spec), (rhs_shape, dim_numbers.rhs_spec), (output_shape, dim_numbers.out_spec),
    )  # fmt: skip
    spatial_sizes = ([shape[dim] for dim in spec[2:]] for shape, spec in shapes_and_specs)
    # strides, padding and dilations, each with one entry per spatial dim
    window_params = (eqn.params[name] for name in ("window_strides", "padding", "lhs_dilation", "rhs_dilation"))
    tap_count = math.prod(map(_valid_tap_count, *spatial_sizes, *window_params))
    input_channel_count = rhs_shape[dim_numbers.rhs_spec[1]]  # number of one feature group's channels
    batch_size, output_channel_count = (output_shape[dim] for dim in dim_numbers.out_spec[:2])
    return 2 * batch_size * output_channel_count * input_channel_count * tap_count


def _valid_tap_count(
    input_size: int, kernel_size: int, output_size: int, stride: int, padding: Any, lhs_dilation: int, rhs_dilation: int
) -> int:
    """Return the number of pairs (output position o, kernel tap k) along one dim that meet an element of the input."""
    last_position = (input_size - 1) * lhs_dilation
    positions = (o * stride + k * rhs_dilation - padding[0] for o in range(output_size) for k in range(kernel_size))
    return sum(0 <= position <= last_position and position % lhs_dilation == 0 for position in positions)


def _kernel_flop(eqn: Any) -> Flop:
    """Return the FLOP of a Pallas kernel by its `CostEstimate`; without one, its body's FLOP times its grid's steps."""
    estimate = eqn.params.get("cost_estimate")
    if estimate is not None:
        return Flop({"pallas_call": int(estimate.flops)})
    if "grid_mapping" not in eqn.params:
        return Flop()  # a Mosaic GPU kernel without an estimate: its products are in loops of unknown length
    step_count = math.prod(eqn.params["grid_mapping"].grid)
    return Flop({"pallas_call": jaxpr_flop(eqn.params["jaxpr"]).total * step_count})


FORMULAS: Mapping[str, Callable[[Any], int]] = {
    "dot_general": _dot_flop,
    "ragged_dot_general": _ragged_dot_flop,
    "scaled_matmul": _scaled_matmul_flop,
    "conv_general_dilated": _conv_flop,
}
"""For each primitive that is a matrix product or a convolution, a function that counts the FLOP of an equation."""
