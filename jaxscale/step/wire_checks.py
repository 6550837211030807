"""Bytes that a compiled program sends over an axis, and whether they are what a codec or DiLoCo promises."""

import warnings
from collections.abc import Sequence

from jaxscale.compiler.collectives import Collective
from jaxscale.replicas import wire
from jaxscale.replicas.diloco import Diloco
from jaxscale.replicas.reduce import GradientExchange
from jaxscale.state.extra import CompiledProgram, Unreadable
from jaxscale.state.layout import REPLICA_AXIS

SCALARS = 256
"""Bytes of single numbers that a step sends: sums of losses and weights, norms, agreements."""
PADDED = 4096
"""The same where each takes as much as a TPU's network sends at least, 512 bytes."""


class NoEffect(AssertionError):
    """The compiled program does not do what the plan asked for: a defect of jaxscale or of the compiler."""


def slow_bytes(sends: Sequence[Collective], stage: GradientExchange, *, slices: int = 1) -> int:
    """Bytes that one device of a compiled program sends over a codec's axis, by the formulas of `replicas/wire.py`.

    Args:
        sends: its collectives.
        stage: of the codec.
        slices: that the program sends between; what crosses them is listed with what a device hands over.
    """
    return bytes_over(sends, stage.axis, stage.replicas, slices=slices)


def bytes_over(sends: Sequence[Collective], axis: str, n: int, *, slices: int = 1) -> int:
    """Bytes that one device of a compiled program sends over an axis of n devices."""
    total = 0
    for c in sends:
        if c.axes is None or axis not in c.axes:
            continue
        if c.kind == "all-gather":
            sent = wire.all_gather(c.bytes if slices > 1 else c.bytes // n, n)
        elif c.kind == "all-reduce":
            sent = wire.all_reduce(c.bytes, n)
        else:
            sent = c.bytes if c.kind == "collective-permute" else wire.all_to_all(c.bytes, n)
        total += sent * c.count
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
