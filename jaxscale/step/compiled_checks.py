"""Checks of a compiled step: a request that took no effect is an error, not a surprise.

The program shows what the compiler does with a plan: where the state lies, what is sent between devices and in which
type, and how many bytes are on the host. It does not show speed.
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
from jaxscale.offload.weights import belongs_to_block
from jaxscale.recipe.plan import Plan
from jaxscale.replicas import Codec, wire
from jaxscale.replicas.low_communication import Diloco
from jaxscale.replicas.reduce import GradientExchange
from jaxscale.sharding.memory_space import HOST_KIND, rehearses
from jaxscale.state.extra import CompiledProgram, StateExtra, Unreadable
from jaxscale.state.layout import BATCH_AXES, REPLICA_AXIS, Layout, device_of, local_bytes
from jaxscale.state.train_state import TrainState
from jaxscale.trees import leaf_bytes, named_leaves
from jaxscale.typing import PyTree

SCALARS = 256
"""Most bytes that a step sends in single numbers: sums of losses and weights, norms, whether a step is good."""
PADDED = 4096
"""Most bytes that a step sends in single numbers on a TPU, whose network sends at least 512 bytes for each."""


class NoEffect(AssertionError):
    """The compiled program does not do what the plan asked for: a defect of jaxscale or of the compiler."""


@dataclasses.dataclass(frozen=True)
class Compiled:
    """Bytes and FLOP of a compiled train step, per device.

    Args:
        seconds: seconds that compilation took.
        argument_bytes: bytes of the arguments: the train state and the batch.
        output_bytes: bytes of the outputs: the next state and the metrics.
        alias_bytes: bytes of the outputs that reuse the memory of donated arguments.
        temp_bytes: bytes of all that lives only within the step: gradients, activations, gathered weights.
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
        """Read the bytes and FLOP of a program, as the compiler reports them.

        Args:
            executable: the compiled program.
            seconds: seconds that its compilation took.
        """
        memory, cost = executable.memory_analysis(), executable.cost_analysis() or {}
        assert memory is not None, "CPU, GPU and TPU all report it"
        return cls(
            seconds=seconds,
            argument_bytes=memory.argument_size_in_bytes,
            output_bytes=memory.output_size_in_bytes,
            alias_bytes=memory.alias_size_in_bytes,
            temp_bytes=memory.temp_size_in_bytes,
            flop=float(cost.get("flops", 0.0)),
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
        extras: what techniques add to the train state.
        executable: the compiled step.

    Raises:
        NoEffect: ZeRO left state whole or gradients unscattered, moments are kept in more bits than the plan asks for,
            or gradients are reduced in another type than the plan asks for.
    """
    plan, mesh = layout.plan, layout.mesh
    check_state(layout, optimizer, executable.output_shardings[0])
    check_state_bits(plan, executable.out_info[0].optimizer)
    scatters = plan.zero > 1 and mesh.shape["fsdp"] > 1
    is_narrow = plan.precision == "bfloat16" and math.prod(mesh.shape[axis] for axis in BATCH_AXES) > 1
    program = CompiledProgram(mesh, executable.as_text)
    try:
        if scatters or is_narrow:
            check_wires(plan, layout.platform, program.collectives, scatters)
        for extra in extras:
            extra.check(program)
    except Unreadable as error:  # an unknown notation in the program's text must not stop a run
        warnings.warn(f"what the compiled step sends is not checked, as its text is unreadable: {error}", stacklevel=2)


def check_kept_on_host(layout: Layout, decision: Decision | None, temp_bytes: int) -> None:
    """Compare what a compiled step keeps on the host for its backward pass with the memory plan's decision.

    On a CPU, which has no memory beside the host's, offload moves nothing (a rehearsal), and nothing is checked.

    Args:
        layout: layout of the train state, under the plan.
        decision: what the blocks keep; `None` if the memory rule does not depend on them.
        temp_bytes: bytes of temporaries of the compiled step that are on the host.

    Raises:
        NoEffect: less is on the host than the decision puts there.
    """
    planned_bytes = 0 if decision is None else decision.host_bytes
    if not planned_bytes or rehearses([device_of(layout.mesh)]):
        return
    if temp_bytes < planned_bytes:
        raise NoEffect(
            f"memory {layout.plan.memory}: the compiled step keeps {temp_bytes} bytes on the host for its backward "
            f"pass, but the plan requires {planned_bytes} bytes there"
        )


def check_host_bytes(layout: Layout, argument_bytes: int, as_text: Callable[[], str | None]) -> None:
    """Compare what a compiled step has on the host with its plan.

    Args:
        layout: layout of the train state.
        argument_bytes: bytes of arguments of the compiled step that are on the host.
        as_text: function that returns the text of the compiled step.

    Raises:
        NoEffect: less lies on the host than the plan puts there, or the step copies a whole stacked array from the
            host to the device at once, which saves no memory.
    """
    if not layout.plan.offload.any or rehearses([device_of(layout.mesh)]):
        return
    planned_bytes = local_bytes(layout.abstract, is_on_host=True)
    if argument_bytes < planned_bytes:
        raise NoEffect(
            f"{layout.plan.offload}: {argument_bytes} bytes of the compiled step's arguments lie on the host, but the "
            f"plan requires {planned_bytes} bytes there"
        )
    if layout.plan.offload.weights == "device" and layout.plan.offload.optimizer_state == "host":
        return  # the passes read a whole copy of the weights
    text = as_text() or ""
    # weights outside of blocks are copied to the device for the step
    copied_shapes = {
        leaf.sharding.shard_shape(leaf.shape)
        for name, leaf in named_leaves(layout.abstract.params).items()
        if layout.plan.offload.masters and not belongs_to_block(name)
    }
    for leaf in jax.tree.leaves(layout.abstract):
        local_shape = leaf.sharding.shard_shape(leaf.shape)
        if leaf.sharding.memory_kind != HOST_KIND or local_shape in copied_shapes:
            continue
        pieces = cut(leaf.shape, leaf.dtype.itemsize, leaf.sharding).pieces
        if pieces > 1 and brought_whole(text, local_shape):
            raise NoEffect(
                f"{layout.plan.offload}: the compiled step brings a whole array of shape {local_shape} to the device "
                f"at once, which saves no memory; expected {pieces} slices, one by one"
            )


def brought_whole(text: str, shape: Sequence[int]) -> bool:
    """Whether a compiled program copies an array of this shape from host memory to the device.

    Example:
        >>> start = "%c = (f32[4,8]{1,0:T(8,128)}, f32[4,8]{1,0:T(8,128)S(5)}, u32[]{:S(2)}) copy-start(%p)"
        >>> brought_whole(start, (4, 8)), brought_whole(start, (4, 4))
        (True, False)
    """
    dims = re.escape(f"[{','.join(map(str, shape))}]")
    on_device = rf"\w+{dims}\{{(?![^}}]*S\(5\))[^}}]*\}}"
    on_host = rf"\w+{dims}\{{[^}}]*S\(5\)[^}}]*\}}"
    return re.search(rf"= \({on_device}, {on_host}, [^=]*\) copy-start\(", text) is not None


def check_state(layout: Layout, optimizer: GradientTransformation, shardings: TrainState) -> None:
    """Compare where the compiled step leaves its state with the placement of each parameter.

    Args:
        layout: layout of the train state.
        optimizer: the whole optimizer, clipping included.
        shardings: shardings of the state that the compiled step returns.

    Raises:
        NoEffect: the shards of a tensor have another shape than ZeRO's stage gives them.
    """
    if not layout.plan.zero or layout.mesh.shape["fsdp"] == 1:
        return
    owners, state_leaves = layout.owners(optimizer), jax.tree.leaves(layout.abstract.optimizer)
    tensors = [
        (f"optimizer state of {name}", leaf.shape, layout.placements[name].state, sharding)
        for name, leaf, sharding in zip(owners, state_leaves, jax.tree.leaves(shardings.optimizer), strict=True)
        if name
    ]
    params = named_leaves(layout.abstract.params)
    tensors += [
        (f"parameter {name}", params[name].shape, layout.placements[name].master, sharding)
        for name, sharding in named_leaves(shardings.params).items()
    ]
    for description, shape, spec, sharding in tensors:
        expected_shape = NamedSharding(layout.mesh, spec).shard_shape(shape)
        shard_shape = sharding.shard_shape(shape)
        if shard_shape != expected_shape:
            raise NoEffect(
                f"zero {layout.plan.zero}: the compiled step keeps the {description} in shards of shape {shard_shape}, "
                f"but the plan requires shards of shape {expected_shape}"
            )


def check_state_bits(plan: Plan, state: PyTree) -> None:
    """Compare the bytes that a compiled step keeps the optimizer's moments in with its plan.

    Args:
        plan: the plan, which specifies the bits of a moment.
        state: shapes and dtypes of the optimizer's state that the compiled step returns.

    Raises:
        NoEffect: no array is quantized, or one has more bytes than its codes and a scale for each block of them.
    """
    if plan.state.moments == "float32":
        return
    bits = 4 if plan.state.moments == "int4" else 8
    moments = [leaf for leaf in jax.tree.leaves(state, is_leaf=is_quantized) if is_quantized(leaf)]
    if not moments:
        raise NoEffect(f"state {plan.state.moments}: the compiled step keeps no moment in {bits} bits")
    for array in moments:
        array_bytes, bytes_per_number = leaf_bytes(array.codes) + leaf_bytes(array.scale), bits / 8 + 4 / array.block
        if array_bytes > 1.01 * bytes_per_number * array.size:
            raise NoEffect(
                f"state {plan.state.moments}: the compiled step keeps a moment of shape {array.shape} in "
                f"{array_bytes / array.size:.2f} bytes a number, but the plan requires {bytes_per_number:.2f}"
            )


def check_wires(plan: Plan, platform: str, sends: Sequence[Collective], scatters: bool) -> None:
    """Compare what a compiled step sends with its plan.

    Args:
        plan: the plan of the step.
        platform: kind of its devices: "cpu", "gpu" or "tpu".
        sends: the collectives of the compiled step.
        scatters: whether ZeRO 2 or 3 shards over more than one device, so that gradients are to be scattered.

    Raises:
        NoEffect: no gradient is scattered over fsdp, or gradients are reduced in another type than asked for.
    """
    if scatters:
        kinds = {"reduce-scatter"}
        # a TPU computes the product of a sharded weight around a ring
        kinds |= {"collective-permute", "all-to-all"} if platform == "tpu" and plan.zero == 3 else set()
        if not any(send.kind in kinds and (send.axes is None or "fsdp" in send.axes) for send in sends):
            raise NoEffect(f"zero {plan.zero}: the compiled step scatters no gradient over fsdp")
    if plan.precision == "bfloat16" and platform != "cpu":  # XLA:CPU reduces nothing in less than float32
        reduced_bytes = {"bf16": 0, "f32": 0}  # by dtype
        # `check_codec` checks what a codec sends over the replicas
        data_axes = {*BATCH_AXES} - ({REPLICA_AXIS} if isinstance(plan.reduce, Codec) else set())
        for send in sends:
            if send.kind in ("all-reduce", "reduce-scatter") and send.axes is not None and set(send.axes) & data_axes:
                reduced_bytes[send.dtype] = reduced_bytes.get(send.dtype, 0) + send.bytes * send.count
        wanted, unwanted = ("f32", "bf16") if plan.reduce == "float32" else ("bf16", "f32")
        if reduced_bytes[unwanted] > reduced_bytes[wanted]:
            raise NoEffect(
                f"reduce {plan.reduce or plan.precision}: of what the compiled step reduces over the data axes, "
                f"{reduced_bytes[unwanted]} bytes are {unwanted}, and only {reduced_bytes[wanted]} bytes are {wanted}"
            )


def bytes_over(sends: Sequence[Collective], axis: str, n: int, *, slices: int = 1) -> int:
    """Bytes that one device sends over an axis of n devices, by the formulas of `replicas/wire.py`.

    Args:
        sends: collectives of a compiled program.
        axis: name of the mesh axis.
        n: number of devices along it.
        slices: number of TPU slices that the program sends between. An all-gather between slices is listed with the
            bytes of a device's input, any other with those of its output.
    """
    total = 0
    for send in sends:
        if send.axes is None or axis not in send.axes:
            continue
        if send.kind == "all-gather":
            sent_bytes = wire.all_gather(send.bytes if slices > 1 else send.bytes // n, n)
        elif send.kind == "all-reduce":
            sent_bytes = wire.all_reduce(send.bytes, n)
        else:
            sent_bytes = send.bytes if send.kind == "collective-permute" else wire.all_to_all(send.bytes, n)
        total += sent_bytes * send.count
    return total


def check_codec(exchange: GradientExchange, sent_bytes: int, *, slices: int = 1) -> None:
    """Compare what a compiled step sends over a codec's axis with the bytes that the codec computes.

    Args:
        exchange: the exchange of gradients by the codec.
        sent_bytes: bytes that one device of the compiled step sends.
        slices: number of TPU slices that the program sends between; single numbers take more bytes there.

    Raises:
        NoEffect: more bytes are sent than the codec computes, such as gradients in full precision; or fewer.
    """
    codec_bytes = exchange.program_bytes
    # single numbers come on top; between slices one may fill a tile, of 4096 bytes, behind the codes
    scalar_bytes = SCALARS if slices == 1 else 2 * PADDED
    if not 0.98 * codec_bytes - scalar_bytes <= sent_bytes <= 1.02 * codec_bytes + scalar_bytes:
        raise NoEffect(
            f"reduce {exchange.codec}: a device of the compiled step sends {sent_bytes} bytes over {exchange.axis}, "
            f"but the codec computes {codec_bytes} bytes (and {exchange.exact_bytes} for float32)"
        )


def check_alone(diloco: Diloco, sent_bytes: int) -> None:
    """Check that a compiled inner step of DiLoCo sends nothing but single numbers over the replica axis.

    Args:
        diloco: when replicas synchronise.
        sent_bytes: bytes that one device of the compiled inner step sends over the replica axis.

    Raises:
        NoEffect: more is sent, such as a gradient.
    """
    if sent_bytes > PADDED:
        raise NoEffect(
            f"diloco {diloco}: a device of the compiled inner step sends {sent_bytes} bytes over {REPLICA_AXIS}; "
            f"replicas should train alone, and send only single numbers, at most {PADDED} bytes"
        )


def check_meeting(diloco: Diloco, exchange: GradientExchange | None, exact: int, program: CompiledProgram) -> None:
    """Compare what a compiled meeting (`meetings.py`) sends over the replica axis with the bytes expected of it.

    Args:
        diloco: when replicas meet.
        exchange: the exchange by the codec; `None` without a codec.
        exact: bytes that one device is to send in float32; used without a codec.
        program: the compiled meeting.

    Raises:
        NoEffect: more bytes are sent, or fewer.
    """
    axis = REPLICA_AXIS
    try:
        sent_bytes = bytes_over(program.collectives, axis, program.mesh.shape[axis], slices=program.slices)
    except Unreadable as error:
        warnings.warn(f"what a meeting sends is not checked, as its text is unreadable: {error}", stacklevel=2)
        return
    if exchange is not None:
        check_codec(exchange, sent_bytes, slices=program.slices)
    elif not 0.98 * exact - PADDED <= sent_bytes <= 1.02 * exact + PADDED:
        sent_text = f"a device sends {sent_bytes} bytes over {axis} in a compiled meeting"
        raise NoEffect(f"diloco {diloco}: {sent_text}, but {exact} bytes were expected")
