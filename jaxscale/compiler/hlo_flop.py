"""FLOP of a compiled program, read from its text; recomputation and all iterations of loops count.

XLA's `cost_analysis()` counts the body of a loop once and is None on a GPU. Here the body counts once per iteration.
Matrix products and convolutions count, with 2 FLOP per multiply-add, and so do kernels that declare their FLOP
(`pl.CostEstimate`). In the text for a TPU, matrix products are convolutions; in the text for a GPU, both are library
calls. The program is one device's share.

Left out: elementwise work, and kernels that declare no cost.
"""

import dataclasses
import functools
import itertools
import math
import re

from jaxscale.compiler.hlo_program import Computation, HloProgram, Op, callees, integers


@dataclasses.dataclass(frozen=True)
class ProgramFlop:
    """FLOP of one run of a compiled program on one device.

    Args:
        total: FLOP of matrix products, convolutions and kernels with a known cost, iterations of loops included.
        unknown_loops: number of loops with such operations whose trip count is unknown; their bodies count once.
        silent_kernels: number of custom kernels that declare no cost; they add nothing to `total`.
    """

    total: int = 0
    unknown_loops: int = 0
    silent_kernels: int = 0

    def __add__(self, other: "ProgramFlop") -> "ProgramFlop":
        return ProgramFlop(
            self.total + other.total,
            self.unknown_loops + other.unknown_loops,
            self.silent_kernels + other.silent_kernels,
        )


def program_flop(program: HloProgram) -> ProgramFlop:
    """Return the FLOP of one run of a program on one device; a conditional counts as its most expensive branch.

    Example:
        >>> text = '''
        ... ENTRY %main (x: f32[4,8]) -> f32[4,4] {
        ...   %x = f32[4,8]{1,0} parameter(0)
        ...   ROOT %y = f32[4,4]{1,0} dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={1}
        ... }
        ... '''
        >>> program_flop(HloProgram(text)).total
        256
    """

    @functools.cache
    def computation_flop(name: str) -> ProgramFlop:
        """Return the FLOP of one run of the computation with this name."""
        computation = program.computations[name]
        return sum((instruction_flop(computation, op) for op in computation.instructions.values()), ProgramFlop())

    def instruction_flop(computation: Computation, op: Op) -> ProgramFlop:
        """Return the FLOP of an instruction, including those of the computations that it calls."""
        # an asynchronous op counts at its start, not again at its end
        callee_names = [] if op.opcode.endswith(("-done", "-update")) else callees(op.attributes)
        callee_flops = [computation_flop(name) for name in callee_names]
        if op.opcode == "conditional":
            return max(callee_flops, key=lambda branch: branch.total, default=ProgramFlop())
        op_flop = sum(callee_flops, _flop_without_callees(computation, op))
        if op.opcode != "while":
            return op_flop
        trip_count = program.trip_count(op)
        unknown_loops = op_flop.unknown_loops + (trip_count is None and op_flop.total > 0)
        return ProgramFlop(op_flop.total * (trip_count or 1), unknown_loops, op_flop.silent_kernels)

    entry_names = [computation.name for computation in program.computations.values() if computation.is_entry]
    return computation_flop(entry_names[0]) if entry_names else ProgramFlop()


def _flop_without_callees(computation: Computation, op: Op) -> ProgramFlop:
    """Return the FLOP of an instruction, excluding those of the computations that it calls."""
    if op.opcode == "dot":
        return ProgramFlop(_product_flop(computation, op, _listed_dims(op, "lhs_contracting_dims")))
    if op.opcode == "ragged-dot":
        contracted_dims, ragged_dims = _listed_dims(op, "lhs_contracting_dims"), _listed_dims(op, "lhs_ragged_dims")
        has_groups = bool(ragged_dims) and {*ragged_dims} <= {*contracted_dims}
        group_count = computation.instructions[op.operands[2]].shape[-1] if has_groups else 1
        return ProgramFlop(_product_flop(computation, op, contracted_dims) // group_count)
    if op.opcode == "convolution":
        input_shape, kernel_shape = (computation.instructions[name].shape for name in op.operands[:2])
        return ProgramFlop(_convolution_flop(op, input_shape, kernel_shape, op.shape))
    if op.opcode == "custom-call":
        return _custom_call_flop(computation, op)
    return ProgramFlop()


def _custom_call_flop(computation: Computation, op: Op) -> ProgramFlop:
    """Return the FLOP of a library call or a kernel."""
    target_name = op.attribute(r'custom_call_target="([^"]*)"') or ""
    if target_name.startswith(("__cublas$", "__hipblas", "__triton_gemm", "__onednn$matmul")):
        dims_text = op.attribute(r'"lhs_contracting_dimensions":\[([^\]]*)\]')
        return ProgramFlop(_product_flop(computation, op, [-1] if dims_text is None else integers(dims_text)))
    if target_name.startswith("__cudnn$conv"):
        input_shape, kernel_shape = (computation.instructions[name].shape for name in op.operands[:2])
        output_shape = op.shape  # shape of the first element of the tuple (result, workspace)
        # the text describes the forward convolution: input, kernel, output
        if "BackwardInput" in target_name:
            input_shape, output_shape = output_shape, input_shape
        elif "BackwardFilter" in target_name:
            kernel_shape, output_shape = output_shape, kernel_shape
        return ProgramFlop(_convolution_flop(op, input_shape, kernel_shape, output_shape))
    if declared_flop := op.attribute(r'"cost_estimate":\{[^}]*?"flops":"?(\d+)'):
        return ProgramFlop(int(declared_flop))
    is_kernel = target_name in ("tpu_custom_call", "__gpu$xla.gpu.triton", "mosaic_gpu", "mosaic_gpu_v2")
    return ProgramFlop(silent_kernels=int(is_kernel))


def _product_flop(computation: Computation, op: Op, contracting_dims: list[int]) -> int:
    """Return the FLOP of a matrix product that contracts these dims of its first operand."""
    left_shape = computation.instructions[op.operands[0]].shape
    return 2 * math.prod(op.shape) * math.prod(left_shape[dim] for dim in contracting_dims)


def _convolution_flop(op: Op, input_shape: list[int], kernel_shape: list[int], output_shape: list[int]) -> int:
    """Return the FLOP of a convolution of these three shapes; products with padding or dilation zeros do not count."""
    match = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", op.attributes)
    assert match is not None, f"a convolution in an unknown spelling: {op.attributes[:80]}"
    input_labels, kernel_labels, output_labels = match.groups()
    window_text = op.attribute(r"window=\{([^}]*)\}") or ""
    spatial_labels = sorted(set(output_labels) - {"b", "f"})
    default_by_field = {"size": 1, "stride": 1, "rhs_dilate": 1, "lhs_dilate": 1, "pad": 0}
    window_number_lists = (
        _window_numbers(window_text, field_name, default, len(spatial_labels))
        for field_name, default in default_by_field.items()
    )
    tap_count = 1
    for label, kernel_size, stride, dilation, input_dilation, low_pad in zip(
        spatial_labels, *window_number_lists, strict=True
    ):
        last_position = (input_shape[input_labels.index(label)] - 1) * input_dilation
        index_pairs = itertools.product(range(output_shape[output_labels.index(label)]), range(kernel_size))
        positions = [output_index * stride + tap * dilation - low_pad for output_index, tap in index_pairs]
        tap_count *= sum(0 <= position <= last_position and position % input_dilation == 0 for position in positions)
    channels_per_group = kernel_shape[kernel_labels.index("i")]  # those of one feature group
    batch_groups_text = op.attribute(r"batch_group_count=(\d+)")
    batch_size = output_shape[output_labels.index("b")]
    # with batch groups an output feature uses one group's part of the batch, which is the output's whole batch
    assert batch_groups_text is None or input_shape[input_labels.index("b")] == batch_size * int(batch_groups_text)
    return 2 * batch_size * output_shape[output_labels.index("f")] * channels_per_group * tap_count


def _window_numbers(window_text: str, field_name: str, default: int, spatial_count: int) -> list[int]:
    """Return the numbers of a window's field, one for each spatial dim; a padding "1_2" gives its first number."""
    match = re.search(rf"\b{field_name}=(\S+)", window_text)
    return [int(number.split("_")[0]) for number in match[1].split("x")] if match else [default] * spatial_count


def _listed_dims(op: Op, attribute_name: str) -> list[int]:
    """Return the dims listed in an attribute, such as `lhs_contracting_dims={0}`."""
    return integers(op.attribute(rf"\b{attribute_name}=\{{([\d,]*)\}}") or "")
