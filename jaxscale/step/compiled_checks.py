"""Checks of a compiled step: a setting of the plan that has no effect on the program is an error.

The compiled program shows where the train state lies, how many bytes of which dtype the devices send to one another,
and how many bytes lie on the host. It does not show the speed of the step.
"""

import dataclasses
import math
import re
import warnings
from collections.abc import Callable, Sequence

import jax
from jax.sharding import NamedSharding
from optax import GradientTransformation

from jaxscale.compiler.collectives import Collective
from jaxscale.lowbit.quantize import is_quantized
from jaxscale.memory.decision import Decision
from jaxscale.offload.slices import cut
from jaxscale.recipe.plan import Plan
from jaxscale.replicas import Codec, wire
from jaxscale.replicas.low_communication import Diloco
from jaxscale.replicas.reduce import GradientExchange
from jaxscale.sharding.memory_space import HOST_KIND, is_rehearsal
from jaxscale.state.extra import CompiledProgram, StateExtra, Unreadable
from jaxscale.state.layout import BATCH_AXES, REPLICA_AXIS, Layout, device_of, local_bytes
from jaxscale.state.train_state import TrainState
from jaxscale.trees import leaf_bytes, named_leaves
from jaxscale.typing import PyTree

SCALAR_BYTES = 256
"""Upper bound on the bytes of a step's scalars: loss sums, weights, norms, and whether the step is good."""
PADDED_SCALAR_BYTES = 4096
"""Upper bound on the bytes of a step's scalars on a TPU, which sends at least 512 bytes for each scalar."""

LEAST_KEPT_ON_HOST = 0.5
"""Least share of the planned bytes that a compiled step must keep on the host. It is below 1 because the compiler keeps
only one copy of a value that is equal in all blocks, such as a table of rotary positions."""


class NoEffect(AssertionError):
    """The compiled program does not do what the plan specifies: a defect of jaxscale or of the compiler."""


@dataclasses.dataclass(frozen=True)
class Compiled:
    """Bytes and FLOP of a compiled train step, per device.

    Args:
        seconds: seconds that compilation took.
        argument_bytes: bytes of the arguments: the train state and the batch.
        output_bytes: bytes of the outputs: the next state and the metrics.
        alias_bytes: bytes of the outputs that reuse the memory of donated arguments.
        temp_bytes: bytes of arrays that exist only within the step: gradients, activations, gathered weights.
        flop: floating-point operations as the compiler counts them; a loop's body counts once.
    """

    seconds: float
    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    temp_bytes: int
    flop: float

    @classmethod
    def of(cls, executable: jax.stages.Compiled, seconds: float) -> "Compiled":
        """Return the bytes and FLOP of a program, as the compiler reports them.

        Args:
            executable: the compiled program.
            seconds: seconds that its compilation took.
        """
        memory_stats, costs = executable.memory_analysis(), executable.cost_analysis() or {}
        assert memory_stats is not None, "compilers for CPU, GPU and TPU all report memory"
        return cls(
            seconds=seconds,
            argument_bytes=memory_stats.argument_size_in_bytes,
            output_bytes=memory_stats.output_size_in_bytes,
            alias_bytes=memory_stats.alias_size_in_bytes,
            temp_bytes=memory_stats.temp_size_in_bytes,
            flop=float(costs.get("flops", 0.0)),
        )


def check_compiled(
    layout: Layout,
    optimizer: GradientTransformation,
    extras: Sequence[StateExtra],
    executable: jax.stages.Compiled,
) -> None:
    """Compare a compiled step with its plan.

    Args:
        layout: layout of the train state, under the plan.
        optimizer: the whole optimizer, clipping included.
        extras: the extras of the train state; each has a check of its own.
        executable: the compiled step.

    Raises:
        NoEffect: the state is not sharded or gradients are not scattered as ZeRO requires, moments take more bits than
            the plan specifies, or gradients are reduced in a type other than the plan's.
    """
    plan, mesh = layout.plan, layout.mesh
    check_state(layout, optimizer, executable.output_shardings[0])
    check_state_bits(plan, executable.out_info[0].optimizer)
    are_gradients_scattered = plan.zero > 1 and mesh.shape["fsdp"] > 1
    has_bfloat16_reduction = plan.precision == "bfloat16" and math.prod(mesh.shape[axis] for axis in BATCH_AXES) > 1
    program = CompiledProgram(mesh, executable.as_text)
    try:
        if are_gradients_scattered or has_bfloat16_reduction:
            check_wires(plan, layout.platform, program.collectives, are_gradients_scattered)
        for extra in extras:
            extra.check(program)
    except Unreadable as error:  # an unknown notation in the program's text must not stop a run
        message = f"the bytes that the compiled step sends are not checked, because its text is unreadable: {error}"
        warnings.warn(message, stacklevel=2)


def check_kept_on_host(layout: Layout, decision: Decision | None, temp_bytes: int) -> None:
    """Check that a compiled step keeps as many bytes on the host as the memory rule's decision requires.

    On a CPU, whose only memory is the host's, offload moves nothing (a rehearsal), and nothing is checked.

    Args:
        layout: layout of the train state, under the plan.
        decision: the values that the blocks keep; `None` if the memory rule does not depend on the blocks.
        temp_bytes: bytes of temporaries of the compiled step that are on the host.

    Raises:
        NoEffect: the step keeps less than `LEAST_KEPT_ON_HOST` of the planned bytes on the host.
    """
    planned_bytes = 0 if decision is None else decision.host_bytes
    if not planned_bytes or is_rehearsal([device_of(layout.mesh)]):
        return
    if temp_bytes < LEAST_KEPT_ON_HOST * planned_bytes:
        raise NoEffect(
            f"memory {layout.plan.memory}: the compiled step keeps {temp_bytes} bytes on the host for its backward "
            f"pass, but the plan requires {planned_bytes} bytes there"
        )


def check_host_bytes(layout: Layout, argument_bytes: int, as_text: Callable[[], str | None]) -> None:
    """Check that a compiled step has as many bytes on the host as the plan requires, and reads arrays in slices.

    Args:
        layout: layout of the train state.
        argument_bytes: bytes of arguments of the compiled step that are on the host.
        as_text: function that returns the text of the compiled step, or `None` if the backend provides no text.

    Raises:
        NoEffect: fewer bytes lie on the host than the plan requires, or the step copies a whole stacked array from the
            host to the device at once, which saves no memory.
    """
    if not layout.plan.offload.any or is_rehearsal([device_of(layout.mesh)]):
        return
    planned_bytes = local_bytes(layout.abstract, is_on_host=True)
    if argument_bytes < planned_bytes:
        raise NoEffect(
            f"{layout.plan.offload}: {argument_bytes} bytes of the compiled step's arguments lie on the host, but the "
            f"plan requires {planned_bytes} bytes there"
        )
    if layout.plan.offload.weights == "device" and layout.plan.offload.optimizer_state == "host":
        return  # the passes read a whole copy of the weights
    program_text = as_text() or ""
    # weights outside of blocks are copied to the device for the step
    copied_shapes = {
        leaf.sharding.shard_shape(leaf.shape)
        for name, leaf in named_leaves(layout.abstract.params).items()
        if layout.plan.offload.masters and name not in layout.streamed_names
    }
    for leaf in jax.tree.leaves(layout.abstract):
        local_shape = leaf.sharding.shard_shape(leaf.shape)
        if leaf.sharding.memory_kind != HOST_KIND or local_shape in copied_shapes:
            continue
        slice_count = cut(leaf.shape, leaf.dtype.itemsize, leaf.sharding).pieces
        if slice_count > 1 and copies_to_device(program_text, local_shape):
            raise NoEffect(
                f"{layout.plan.offload}: the compiled step brings a whole array of shape {local_shape} to the device "
                f"at once, which saves no memory; expected {slice_count} slices, one by one"
            )


def copies_to_device(program_text: str, shape: Sequence[int]) -> bool:
    """Return whether a compiled program copies an array of shape `shape` from host memory to the device.

    Args:
        program_text: text of the program.
        shape: shape of the array's shard on one device.

    Example:
        >>> text = "%c = (f32[4,8]{1,0:T(8,128)}, f32[4,8]{1,0:T(8,128)S(5)}, u32[]{:S(2)}) copy-start(%p)"
        >>> copies_to_device(text, (4, 8)), copies_to_device(text, (4, 4))
        (True, False)
    """
    shape_pattern = re.escape(f"[{','.join(map(str, shape))}]")
    device_pattern = rf"\w+{shape_pattern}\{{(?![^}}]*S\(5\))[^}}]*\}}"
    host_pattern = rf"\w+{shape_pattern}\{{[^}}]*S\(5\)[^}}]*\}}"
    return re.search(rf"= \({device_pattern}, {host_pattern}, [^=]*\) copy-start\(", program_text) is not None


def check_state(layout: Layout, optimizer: GradientTransformation, output_shardings: TrainState) -> None:
    """Compare the shardings of the state that a compiled step returns with the placements of the layout.

    Args:
        layout: layout of the train state.
        optimizer: the whole optimizer, clipping included.
        output_shardings: shardings of the state that the compiled step returns.

    Raises:
        NoEffect: the shards of a tensor have a shape other than the one that the plan's ZeRO stage requires.
    """
    if not layout.plan.zero or layout.mesh.shape["fsdp"] == 1:
        return
    owner_names, state_leaves = layout.owner_names(optimizer), jax.tree.leaves(layout.abstract.optimizer)
    # (description, shape, expected placement, actual sharding) of each tensor
    tensor_rows = [
        (f"optimizer state of {owner_name}", leaf.shape, layout.placements[owner_name].state, sharding)
        for owner_name, leaf, sharding in zip(
            owner_names, state_leaves, jax.tree.leaves(output_shardings.optimizer), strict=True
        )
        if owner_name
    ]
    abstract_params = named_leaves(layout.abstract.params)
    tensor_rows += [
        (f"parameter {name}", abstract_params[name].shape, layout.placements[name].master, sharding)
        for name, sharding in named_leaves(output_shardings.params).items()
    ]
    for description, shape, spec, sharding in tensor_rows:
        expected_shape = NamedSharding(layout.mesh, spec).shard_shape(shape)
        shard_shape = sharding.shard_shape(shape)
        if shard_shape != expected_shape:
            raise NoEffect(
                f"zero {layout.plan.zero}: the compiled step keeps the {description} in shards of shape {shard_shape}, "
                f"but the plan requires shards of shape {expected_shape}"
            )


def check_state_bits(plan: Plan, abstract_state: PyTree) -> None:
    """Check that the optimizer's moments in a compiled step take the bits that the plan specifies.

    Args:
        plan: the plan, which specifies the bits of a moment.
        abstract_state: shapes and dtypes of the optimizer's state that the compiled step returns.

    Raises:
        NoEffect: no array is quantized, or a quantized array takes more bytes than its codes and the scale of each
            block of codes.
    """
    if plan.state.moments == "float32":
        return
    bit_count = 4 if plan.state.moments == "int4" else 8
    moments = [leaf for leaf in jax.tree.leaves(abstract_state, is_leaf=is_quantized) if is_quantized(leaf)]
    if not moments:
        raise NoEffect(f"state {plan.state.moments}: the compiled step keeps no moment in {bit_count} bits")
    for moment in moments:
        moment_bytes = leaf_bytes(moment.codes) + leaf_bytes(moment.scale)
        bytes_per_number = bit_count / 8 + 4 / moment.block
        if moment_bytes > 1.01 * bytes_per_number * moment.size:
            raise NoEffect(
                f"state {plan.state.moments}: the compiled step keeps a moment of shape {moment.shape} in "
                f"{moment_bytes / moment.size:.2f} bytes a number, but the plan requires {bytes_per_number:.2f}"
            )


def check_wires(plan: Plan, platform: str, collectives: Sequence[Collective], are_gradients_scattered: bool) -> None:
    """Compare the collectives of a compiled step with its plan.

    Args:
        plan: the plan of the step.
        platform: kind of the devices: "cpu", "gpu" or "tpu".
        collectives: the collectives of the compiled step.
        are_gradients_scattered: whether the plan requires scattered gradients: ZeRO 2 or 3 over more than one device.

    Raises:
        NoEffect: no gradient is scattered over fsdp, or gradients are reduced in a type other than the plan's.
    """
    if are_gradients_scattered:
        scatter_kinds = {"reduce-scatter"}
        # a TPU computes the matrix product of a sharded weight in steps around a ring
        scatter_kinds |= {"collective-permute", "all-to-all"} if platform == "tpu" and plan.zero == 3 else set()
        if not any(
            collective.kind in scatter_kinds and (collective.axes is None or "fsdp" in collective.axes)
            for collective in collectives
        ):
            raise NoEffect(f"zero {plan.zero}: the compiled step scatters no gradient over fsdp")
    if plan.precision == "bfloat16" and platform != "cpu":  # XLA:CPU reduces in float32 or wider
        reduced_bytes_by_dtype = {"bf16": 0, "f32": 0}
        # `check_codec` checks what a codec sends over the replicas
        data_axes = {*BATCH_AXES} - ({REPLICA_AXIS} if isinstance(plan.reduce, Codec) else set())
        for collective in collectives:
            if (
                collective.kind in ("all-reduce", "reduce-scatter")
                and collective.axes is not None
                and set(collective.axes) & data_axes
            ):
                reduced_bytes_by_dtype[collective.dtype] = (
                    reduced_bytes_by_dtype.get(collective.dtype, 0) + collective.bytes * collective.count
                )
        planned_dtype, other_dtype = ("f32", "bf16") if plan.reduce == "float32" else ("bf16", "f32")
        planned_bytes, other_bytes = reduced_bytes_by_dtype[planned_dtype], reduced_bytes_by_dtype[other_dtype]
        if other_bytes > planned_bytes:
            raise NoEffect(
                f"reduce {plan.reduce or plan.precision}: over the data axes, the compiled step reduces "
                f"{other_bytes} bytes in {other_dtype}, and only {planned_bytes} bytes in {planned_dtype}"
            )


def bytes_over(collectives: Sequence[Collective], axis: str, n: int, *, slice_count: int = 1) -> int:
    """Return the bytes that one device sends over an axis of n devices, by the formulas of `replicas/wire.py`.

    Args:
        collectives: collectives of a compiled program.
        axis: name of the mesh axis.
        n: number of devices along the axis.
        slice_count: number of TPU slices between which the program sends; 1 for a single slice. The program lists an
            all-gather between slices with the bytes of a device's input, and any other all-gather with the bytes of a
            device's output.
    """
    total_bytes = 0
    for collective in collectives:
        if collective.axes is None or axis not in collective.axes:
            continue
        if collective.kind == "all-gather":
            sent_bytes = wire.all_gather(collective.bytes if slice_count > 1 else collective.bytes // n, n)
        elif collective.kind == "all-reduce":
            sent_bytes = wire.all_reduce(collective.bytes, n)
        else:
            sent_bytes = (
                collective.bytes if collective.kind == "collective-permute" else wire.all_to_all(collective.bytes, n)
            )
        total_bytes += sent_bytes * collective.count
    return total_bytes


def check_codec(gradient_exchange: GradientExchange, sent_bytes: int, *, slice_count: int = 1) -> None:
    """Compare the bytes that a compiled step sends over the axis of a codec with the bytes that the codec should send.

    Args:
        gradient_exchange: the exchange of gradients by the codec.
        sent_bytes: bytes that one device of the compiled step sends over the axis.
        slice_count: number of TPU slices between which the program sends. Between slices, scalars take more bytes.

    Raises:
        NoEffect: the step sends fewer bytes than the codec should send, or more, such as gradients in full precision.
    """
    codec_bytes, float32_bytes = gradient_exchange.program_bytes, gradient_exchange.exact_bytes
    # scalars are sent in addition; between slices, a scalar may fill a tile of 4096 bytes after the codes
    scalar_bytes = SCALAR_BYTES if slice_count == 1 else 2 * PADDED_SCALAR_BYTES
    if not 0.98 * codec_bytes - scalar_bytes <= sent_bytes <= 1.02 * codec_bytes + scalar_bytes:
        raise NoEffect(
            f"reduce {gradient_exchange.codec}: a device of the compiled step sends {sent_bytes} bytes over "
            f"{gradient_exchange.axis}, but the codec should send {codec_bytes} bytes (float32: {float32_bytes})"
        )


def check_inner_step(diloco: Diloco, sent_bytes: int) -> None:
    """Check that a compiled inner step of DiLoCo sends only scalars over the replica axis.

    Args:
        diloco: settings of DiLoCo, for the message.
        sent_bytes: bytes that one device of the compiled inner step sends over the replica axis.

    Raises:
        NoEffect: the step sends more bytes than its scalars take; for example, it sends a gradient.
    """
    if sent_bytes > PADDED_SCALAR_BYTES:
        raise NoEffect(
            f"diloco {diloco}: a device of the compiled inner step sends {sent_bytes} bytes over {REPLICA_AXIS}; "
            f"replicas should train alone, and send only single numbers, at most {PADDED_SCALAR_BYTES} bytes"
        )


def check_meeting(
    diloco: Diloco, exchange: GradientExchange | None, float32_bytes: int, program: CompiledProgram
) -> None:
    """Compare the bytes that a compiled meeting (`meetings.py`) sends over the replica axis with the expected bytes.

    Args:
        diloco: settings of DiLoCo, for the message.
        exchange: the exchange of displacements by the codec; `None` without a codec.
        float32_bytes: bytes that one device is expected to send in float32; unused with a codec.
        program: the compiled meeting.

    Raises:
        NoEffect: the meeting sends more bytes than expected, or fewer.
    """
    axis = REPLICA_AXIS
    try:
        sent_bytes = bytes_over(program.collectives, axis, program.mesh.shape[axis], slice_count=program.slice_count)
    except Unreadable as error:
        message = f"the bytes that a meeting sends are not checked, because its program's text is unreadable: {error}"
        warnings.warn(message, stacklevel=2)
        return
    if exchange is not None:
        check_codec(exchange, sent_bytes, slice_count=program.slice_count)
        return
    least_bytes = 0.98 * float32_bytes - PADDED_SCALAR_BYTES
    most_bytes = 1.02 * float32_bytes + PADDED_SCALAR_BYTES
    if not least_bytes <= sent_bytes <= most_bytes:
        raise NoEffect(
            f"diloco {diloco}: a device sends {sent_bytes} bytes over {axis} in a compiled meeting, but "
            f"{float32_bytes} bytes were expected"
        )
