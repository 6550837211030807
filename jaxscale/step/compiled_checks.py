"""What a compiled step must show: a request that took no effect is an error, not a surprise.

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
from jaxscale.offload.weights import of_a_block
from jaxscale.recipe.plan import Plan
from jaxscale.replicas import Codec, wire
from jaxscale.replicas.diloco import Diloco
from jaxscale.replicas.reduce import GradientExchange
from jaxscale.sharding.memory_space import HOST_KIND, rehearses
from jaxscale.state.extra import CompiledProgram, StateExtra, Unreadable
from jaxscale.state.layout import BATCH_AXES, REPLICA_AXIS, Layout, device_of, local_bytes
from jaxscale.state.train_state import TrainState
from jaxscale.trees import leaf_bytes, named_leaves
from jaxscale.typing import PyTree

SCALARS = 256
"""Bytes of single numbers that a step sends: sums of losses and weights, norms, agreements."""
PADDED = 4096
"""The same where each takes as much as a TPU's network sends at least, 512 bytes."""


class NoEffect(AssertionError):
    """The compiled program does not do what the plan asked for: a defect of jaxscale or of the compiler."""


@dataclasses.dataclass(frozen=True)
class Compiled:
    """Bytes and FLOP of a compiled train step, per device.

    Args:
        seconds: that compiling took.
        argument_bytes: of the train state and the batch.
        output_bytes: of what the step gives back.
        alias_bytes: of outputs that take the place of donated arguments.
        temp_bytes: of everything that lives within the step: gradients, activations, gathered weights.
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
        """Bytes and FLOP of a program, which took so many seconds to compile."""
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
        layout: of the train state, under the plan.
        optimizer: clipping and all.
        extras: what techniques add to the train state.
        executable: the compiled step.

    Raises:
        NoEffect: ZeRO left state whole or gradients unscattered, moments are kept in more bits, or gradients are
            reduced in another type.
    """
    plan, mesh = layout.plan, layout.mesh
    check_state(layout, optimizer, executable.output_shardings[0])
    check_state_bits(plan, executable.out_info[0].optimizer)
    scatters = plan.zero > 1 and mesh.shape["fsdp"] > 1
    narrow = plan.precision == "bfloat16" and math.prod(mesh.shape[axis] for axis in BATCH_AXES) > 1
    program = CompiledProgram(mesh, executable.as_text)
    try:
        if scatters or narrow:
            check_wires(plan, layout.platform, program.collectives, scatters)
        for extra in extras:
            extra.check(program)
    except Unreadable as error:  # a spelling that nobody has met must not stop a run
        warnings.warn(f"what the compiled step sends is not checked: its text could not be read: {error}", stacklevel=2)


def check_kept_on_host(layout: Layout, decision: Decision | None, temp_bytes: int) -> None:
    """Compare what a compiled step keeps on the host for its backward pass with the memory plan's decision.

    A backend without a memory of the host's own (a CPU) rehearses: there is nothing to see.

    Args:
        layout: of the train state, under the plan.
        decision: of the memory rule, where it looks at the blocks.
        temp_bytes: temporaries of the compiled step that are on the host.

    Raises:
        NoEffect: less is on the host than the decision puts there.
    """
    planned = 0 if decision is None else decision.host_bytes
    if not planned or rehearses([device_of(layout.mesh)]):
        return
    if temp_bytes < planned:
        raise NoEffect(
            f"memory {layout.plan.memory}: {temp_bytes} bytes of the compiled step are kept on the "
            f"host, and {planned} should"
        )


def check_host_bytes(layout: Layout, argument_bytes: int, as_text: Callable[[], str | None]) -> None:
    """Compare what a compiled step has on the host with its plan.

    Args:
        layout: of the train state.
        argument_bytes: arguments of the compiled step that are on the host.
        as_text: gives the text of the compiled step.

    Raises:
        NoEffect: less lies on the host than the plan puts there, or the step brings a whole stack of it to the device
            at once, which saves nothing.
    """
    if not layout.plan.offload.any or rehearses([device_of(layout.mesh)]):
        return
    planned = local_bytes(layout.abstract, host=True)
    if argument_bytes < planned:
        raise NoEffect(
            f"{layout.plan.offload}: {argument_bytes} bytes of the compiled step lie on the host, and {planned} should"
        )
    if layout.plan.offload.weights == "device" and layout.plan.offload.optimizer_state == "host":
        return  # the passes read a whole copy of the weights
    text = as_text() or ""
    # weights outside of blocks are copied to the device for the step
    copied = {
        leaf.sharding.shard_shape(leaf.shape)
        for name, leaf in named_leaves(layout.abstract.params).items()
        if layout.plan.offload.masters and not of_a_block(name)
    }
    for leaf in jax.tree.leaves(layout.abstract):
        local = leaf.sharding.shard_shape(leaf.shape)
        if leaf.sharding.memory_kind != HOST_KIND or local in copied:
            continue
        pieces = cut(leaf.shape, leaf.dtype.itemsize, leaf.sharding).pieces
        if pieces > 1 and brought_whole(text, local):
            raise NoEffect(
                f"{layout.plan.offload}: the compiled step brings a whole array of shape {local} to the device "
                f"at once, where {pieces} slices should come one by one: it saves nothing"
            )


def brought_whole(text: str, shape: Sequence[int]) -> bool:
    """Whether a compiled program copies an array of this shape from host memory to the device.

    Example:
        >>> start = "%c = (f32[4,8]{1,0:T(8,128)}, f32[4,8]{1,0:T(8,128)S(5)}, u32[]{:S(2)}) copy-start(%p)"
        >>> brought_whole(start, (4, 8)), brought_whole(start, (4, 4))
        (True, False)
    """
    dims = re.escape(f"[{','.join(map(str, shape))}]")
    array = rf"\w+{dims}\{{(?![^}}]*S\(5\))[^}}]*\}}"
    there = rf"\w+{dims}\{{[^}}]*S\(5\)[^}}]*\}}"
    return re.search(rf"= \({array}, {there}, [^=]*\) copy-start\(", text) is not None


def check_state(layout: Layout, optimizer: GradientTransformation, shardings: TrainState) -> None:
    """Compare where the compiled step leaves its state with the placement of each parameter.

    Args:
        layout: of the train state.
        optimizer: clipping and all.
        shardings: of the state that the compiled step returns.

    Raises:
        NoEffect: a tensor is in bigger parts than ZeRO's stage says.
    """
    if not layout.plan.zero or layout.mesh.shape["fsdp"] == 1:
        return
    owners, state = layout.owners(optimizer), jax.tree.leaves(layout.abstract.optimizer)
    tensors = [
        (f"optimizer state of {name}", leaf.shape, layout.placements[name].state, sharding)
        for name, leaf, sharding in zip(owners, state, jax.tree.leaves(shardings.optimizer), strict=True)
        if name
    ]
    params = named_leaves(layout.abstract.params)
    tensors += [
        (f"parameter {name}", params[name].shape, layout.placements[name].master, sharding)
        for name, sharding in named_leaves(shardings.params).items()
    ]
    for what, shape, spec, sharding in tensors:
        expected = NamedSharding(layout.mesh, spec).shard_shape(shape)
        part = sharding.shard_shape(shape)
        if part != expected:
            raise NoEffect(
                f"zero {layout.plan.zero}: the compiled step keeps the {what} in parts of {part}, "
                f"and {expected} was asked for"
            )


def check_state_bits(plan: Plan, state: PyTree) -> None:
    """Compare the bytes that a compiled step keeps the optimizer's moments in with its plan.

    Args:
        plan: what was asked for.
        state: shapes and dtypes of the optimizer's state, as the compiled step gives it back.

    Raises:
        NoEffect: no array is quantized, or one takes more than its bits and a scale for each block.
    """
    if plan.state.moments == "float32":
        return
    bits = 4 if plan.state.moments == "int4" else 8
    moments = [leaf for leaf in jax.tree.leaves(state, is_leaf=is_quantized) if is_quantized(leaf)]
    if not moments:
        raise NoEffect(f"state {plan.state.moments}: the compiled step keeps no moment in {bits} bits")
    for array in moments:
        taken, asked = leaf_bytes(array.codes) + leaf_bytes(array.scale), bits / 8 + 4 / array.block
        if taken > 1.01 * asked * array.size:
            raise NoEffect(
                f"state {plan.state.moments}: the compiled step keeps a moment of shape {array.shape} in "
                f"{taken / array.size:.2f} bytes a number, and {asked:.2f} was asked for"
            )


def check_wires(plan: Plan, platform: str, sends: Sequence[Collective], scatters: bool) -> None:
    """Compare what a compiled step sends with its plan.

    Args:
        plan: what was asked for.
        platform: kind of its devices: "cpu", "gpu" or "tpu".
        sends: its collectives.
        scatters: ZeRO 2 or 3 over more than one device.

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
        sums = {"bf16": 0, "f32": 0}
        # what a codec sends over the replicas is `check_codec`'s to judge
        axes = {*BATCH_AXES} - ({REPLICA_AXIS} if isinstance(plan.reduce, Codec) else set())
        for send in sends:
            if send.kind in ("all-reduce", "reduce-scatter") and send.axes is not None and set(send.axes) & axes:
                sums[send.dtype] = sums.get(send.dtype, 0) + send.bytes * send.count
        wanted, other = ("f32", "bf16") if plan.reduce == "float32" else ("bf16", "f32")
        if sums[other] > sums[wanted]:
            raise NoEffect(
                f"reduce {plan.reduce or plan.precision}: of what the compiled step reduces over the data axes, "
                f"{sums[other]} bytes are {other} and {sums[wanted]} bytes {wanted}"
            )


def bytes_over(sends: Sequence[Collective], axis: str, n: int, *, slices: int = 1) -> int:
    """Bytes that one device sends over an axis of n devices, by the formulas of `replicas/wire.py`.

    Args:
        sends: collectives of a compiled program.
        axis: of the mesh.
        n: devices along it.
        slices: that the program sends between; what crosses them is listed with what a device hands over.
    """
    total = 0
    for send in sends:
        if send.axes is None or axis not in send.axes:
            continue
        if send.kind == "all-gather":
            sent = wire.all_gather(send.bytes if slices > 1 else send.bytes // n, n)
        elif send.kind == "all-reduce":
            sent = wire.all_reduce(send.bytes, n)
        else:
            sent = send.bytes if send.kind == "collective-permute" else wire.all_to_all(send.bytes, n)
        total += sent * send.count
    return total


def check_codec(stage: GradientExchange, sent: int, *, slices: int = 1) -> None:
    """Compare what a compiled step sends over a codec's axis with what the codec promises.

    Args:
        stage: of the codec.
        sent: bytes of one device and step.
        slices: that the program sends between: single numbers take more there.

    Raises:
        NoEffect: more crosses than the codec promises, such as gradients in full precision; or less.
    """
    promised = stage.program_bytes
    numbers = SCALARS if slices == 1 else 2 * PADDED  # one may fill a tile, of 4096 bytes, behind the codes
    if not 0.98 * promised - numbers <= sent <= 1.02 * promised + numbers:
        raise NoEffect(
            f"reduce {stage.codec}: a device of the compiled step sends {sent} bytes over {stage.axis}, and the codec "
            f"says {promised} (float32: {stage.exact_bytes})"
        )


def check_alone(diloco: Diloco, sent: int) -> None:
    """Compare the bytes of a compiled inner step of DiLoCo over the replica axis with those of single numbers.

    Raises:
        NoEffect: more crosses, such as a gradient.
    """
    if sent > PADDED:
        raise NoEffect(
            f"diloco {diloco}: a device of the compiled inner step sends {sent} bytes over {REPLICA_AXIS}, where "
            f"replicas should train alone (single numbers: {PADDED} at most)"
        )


def check_meeting(diloco: Diloco, stage: GradientExchange | None, promised: int, program: CompiledProgram) -> None:
    """Compare what a compiled meeting of DiLoCo sends over the replica axis with what it promises.

    Args:
        diloco: how replicas meet.
        stage: of the codec; `None` without one.
        promised: bytes of one device.
        program: the compiled meeting.

    Raises:
        NoEffect: more crosses, or less.
    """
    try:
        sent = bytes_over(program.collectives, REPLICA_AXIS, program.mesh.shape[REPLICA_AXIS], slices=program.slices)
    except Unreadable as error:
        warnings.warn(f"what a meeting sends is not checked: its text could not be read: {error}", stacklevel=2)
        return
    if stage is not None:
        check_codec(stage, sent, slices=program.slices)
    elif not 0.98 * promised - PADDED <= sent <= 1.02 * promised + PADDED:
        raise NoEffect(
            f"diloco {diloco}: a device sends {sent} bytes over {REPLICA_AXIS} in a compiled meeting, and {promised} "
            "was to be sent"
        )
