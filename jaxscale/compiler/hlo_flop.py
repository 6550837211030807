"""FLOP of a compiled program, read from its text, with recomputation and loops.

XLA's `cost_analysis()` counts the body of a loop once and is None on a GPU. Here a loop counts as often as it runs.
FLOP are those of matrix products, convolutions (a TPU spells both as convolutions), their library calls on a GPU, and
kernels that declare their cost (`pl.CostEstimate`): 2 per multiply and add. The program is one device's share.

Left out: elementwise work, and kernels that declare no cost.
"""

import dataclasses
import functools
import itertools
import math
import re

from jaxscale.compiler.hlo_program import Computation, HloProgram, Op, called, integers


@dataclasses.dataclass(frozen=True)
class ProgramFlop:
    """FLOP of one run of a compiled program on one device.

    Args:
        total: FLOP of matrix products, convolutions and kernels with a known cost, iterations of loops included.
        unknown_loops: number of loops around any of them whose trip count is unknown; their bodies count once.
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
    """FLOP of one run of a compiled program on one device; a conditional counts as its most expensive branch.

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
        """FLOP of one run of a computation, by its name."""
        computation = program.computations[name]
        return sum((instruction_flop(computation, op) for op in computation.instructions.values()), ProgramFlop())

    def instruction_flop(computation: Computation, op: Op) -> ProgramFlop:
        """FLOP of an instruction, with those of the computations that it calls."""
        # an asynchronous op counts at its start, not again at its end
        callee_names = [] if op.opcode.endswith(("-done", "-update")) else called(op.attributes)
        callee_flop = [computation_flop(name) for name in callee_names]
        if op.opcode == "conditional":
            return max(callee_flop, key=lambda branch: branch.total, default=ProgramFlop())
        total = sum(callee_flop, _own_flop(computation, op))
        if op.opcode != "while":
            return total
        trips = program.trips(op)
        unknown_loops = total.unknown_loops + (trips is None and total.total > 0)
        return ProgramFlop(total.total * (trips or 1), unknown_loops, total.silent_kernels)

    entry_names = [computation.name for computation in program.computations.values() if computation.is_entry]
    return computation_flop(entry_names[0]) if entry_names else ProgramFlop()


def _own_flop(computation: Computation, op: Op) -> ProgramFlop:
    """FLOP of an instruction, without those of the computations that it calls."""
    if op.opcode == "dot":
        return ProgramFlop(_product_flop(computation, op, _dims(op, "lhs_contracting_dims")))
    if op.opcode == "ragged-dot":
        contracted, ragged = _dims(op, "lhs_contracting_dims"), _dims(op, "lhs_ragged_dims")
        groups = computation.instructions[op.operands[2]].shape[-1] if {*ragged} <= {*contracted} and ragged else 1
        return ProgramFlop(_product_flop(computation, op, contracted) // groups)
    if op.opcode == "convolution":
        lhs, rhs = (computation.instructions[name].shape for name in op.operands[:2])
        return ProgramFlop(_convolution_flop(op, lhs, rhs, op.shape))
    if op.opcode == "custom-call":
        return _custom_call_flop(computation, op)
    return ProgramFlop()


def _custom_call_flop(computation: Computation, op: Op) -> ProgramFlop:
    """FLOP of a library call or a kernel."""
    target = op.attribute(r'custom_call_target="([^"]*)"') or ""
    if target.startswith(("__cublas$", "__hipblas", "__triton_gemm", "__onednn$matmul")):
        dims_text = op.attribute(r'"lhs_contracting_dimensions":\[([^\]]*)\]')
        return ProgramFlop(_product_flop(computation, op, [-1] if dims_text is None else integers(dims_text)))
    if target.startswith("__cudnn$conv"):
        input_shape, kernel_shape = (computation.instructions[name].shape for name in op.operands[:2])
        output_shape = op.shape  # shape of the first element of the tuple (result, workspace)
        # the text describes the forward convolution: input, kernel, output
        if "BackwardInput" in target:
            input_shape, output_shape = output_shape, input_shape
        elif "BackwardFilter" in target:
            kernel_shape, output_shape = output_shape, kernel_shape
        return ProgramFlop(_convolution_flop(op, input_shape, kernel_shape, output_shape))
    if declared_flop := op.attribute(r'"cost_estimate":\{[^}]*?"flops":"?(\d+)'):
        return ProgramFlop(int(declared_flop))
    is_kernel = target in ("tpu_custom_call", "__gpu$xla.gpu.triton", "mosaic_gpu", "mosaic_gpu_v2")
    return ProgramFlop(silent_kernels=int(is_kernel))


def _product_flop(computation: Computation, op: Op, contracting_dims: list[int]) -> int:
    """FLOP of a matrix product that contracts these dims of its first operand."""
    shape = computation.instructions[op.operands[0]].shape
    return 2 * math.prod(op.shape) * math.prod(shape[dim] for dim in contracting_dims)


def _convolution_flop(op: Op, input_shape: list[int], kernel_shape: list[int], output_shape: list[int]) -> int:
    """FLOP of a convolution of these three shapes, as XLA counts: without padding and the holes of a dilated input."""
    match = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", op.attributes)
    assert match is not None, f"a convolution in an unknown spelling: {op.attributes[:80]}"
    input_labels, kernel_labels, output_labels = match.groups()
    window = op.attribute(r"window=\{([^}]*)\}") or ""
    spatial_labels = sorted(set(output_labels) - {"b", "f"})
    defaults = {"size": 1, "stride": 1, "rhs_dilate": 1, "lhs_dilate": 1, "pad": 0}
    fields = (_window_numbers(window, key, default, len(spatial_labels)) for key, default in defaults.items())
    taps = 1
    for label, kernel_size, stride, dilation, input_dilation, low_pad in zip(spatial_labels, *fields, strict=True):
        last_position = (input_shape[input_labels.index(label)] - 1) * input_dilation
        index_pairs = itertools.product(range(output_shape[output_labels.index(label)]), range(kernel_size))
        positions = [output_index * stride + tap * dilation - low_pad for output_index, tap in index_pairs]
        taps *= sum(0 <= position <= last_position and position % input_dilation == 0 for position in positions)
    input_channels = kernel_shape[kernel_labels.index("i")]  # those of one feature group
    batch_groups = op.attribute(r"batch_group_count=(\d+)")
    batch = output_shape[output_labels.index("b")]
    # with batch groups an output feature uses one group's part of the batch, which is the output's whole batch
    assert batch_groups is None or input_shape[input_labels.index("b")] == batch * int(batch_groups)
    return 2 * batch * output_shape[output_labels.index("f")] * input_channels * taps


def _window_numbers(window: str, field: str, default: int, count: int) -> list[int]:
    """The numbers of a window's field, one for each of `count` spatial dims; of a padding "1_2", the one in front."""
    match = re.search(rf"\b{field}=(\S+)", window)
    return [int(number.split("_")[0]) for number in match[1].split("x")] if match else [default] * count


def _dims(op: Op, key: str) -> list[int]:
    """The dims listed in an attribute, such as `lhs_contracting_dims={0}`."""
    return integers(op.attribute(rf"\b{key}=\{{([\d,]*)\}}") or "")
