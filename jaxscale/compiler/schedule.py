"""The schedule of a compiled TPU program, as events with the cycles that libtpu estimates.

libtpu prints instructions in the order in which they run, and estimates the cycles of products, fusions and copies. It
gives no cycles for collectives, asynchronous copies, gathers and Pallas kernels; of these, the schedule lists what is
known: bytes, mesh axes, and the FLOP that a kernel declares. Other compilers print no cycles; their programs have no
schedule.

A collective starts and ends in one of four spellings:

    all-reduce                               the program waits for it
    collective-permute-start, -done          the instructions in between run beside it
    fusion with AsyncCollectiveStart, ...    the same; the fusions in between each do a part of it
    fusion of an all-reduce and a slice      a reduce-scatter, for which the program waits
"""

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from jaxscale.compiler.collectives import Collective, collectives_by_instruction, permuted_pairs
from jaxscale.compiler.hlo_program import Computation, HloProgram, Op, callees
from jaxscale.platforms.megascale import CollectiveKind

ProgramEventKind = Literal["compute", "kernel", "memory", "start", "done", "loop"]
TransferKind = Literal[CollectiveKind, "memory copy", "host copy"]
_CYCLES_PATTERN = r'"estimated_cycles":"(\d+)"'
_HOST = "S(5)"  # memory space of the host, in the layout of an array
# instructions that take no time, or whose time counts for other instructions
_FREE = {"parameter", "constant", "get-tuple-element", "tuple", "bitcast", "partition-id", "replica-id", "after-all"}
_FREE |= {"opt-barrier", "optimization-barrier", "async-update", "iota", "send-done", "recv", "recv-done"}
_COPY_OPCODES = {"copy", "slice", "dynamic-slice", "dynamic-update-slice", "async"}


@dataclasses.dataclass(frozen=True)
class ProgramEvent:
    """One event of a schedule.

    Args:
        kind: "compute", the device computes for `cycles`; "kernel", a kernel runs; "memory", an instruction without an
            estimate moves `bytes`; "start", a transfer starts; "done", the program waits for the transfers that
            started under this `name`; "loop", the computation `name` runs `trips` times.
        cycles: estimated cycles of the device.
        flop: FLOP that a kernel declares.
        bytes: bytes of the whole array of a collective, as in `Collective`; bytes that a copy moves, or that an
            instruction or kernel reads and writes.
        name: name of the instruction that started a transfer, or of the computation of a loop.
        trips: number of executions of a loop's body.
        transfer: kind of collective; "host copy" between device and host, "memory copy" within the device; `None` if
            the event does not start a transfer.
        axes: mesh axes of a collective; `None` if no set of axes matches its groups.
        direction: 1 or -1 if a permute sends to the next or the previous device; 0 for any other transfer.
    """

    kind: ProgramEventKind
    cycles: int = 0
    flop: int = 0
    bytes: int = 0
    name: str = ""
    trips: int = 1
    transfer: TransferKind | None = None
    axes: tuple[str, ...] | None = ()
    direction: int = 0


@dataclasses.dataclass(frozen=True)
class ProgramSchedule:
    """The events of a compiled program, in the order in which one device runs them.

    Args:
        entry: name of the computation with which a run starts.
        computations: events by the name of their computation; bodies of fusions are left out.
    """

    entry: str
    computations: Mapping[str, tuple[ProgramEvent, ...]]

    def cycles(self, name: str | None = None) -> int:
        """Return the estimated cycles of one run of a computation, loops included; by default those of the program."""
        events = self.computations[self.entry if name is None else name]
        return sum(e.trips * self.cycles(e.name) if e.kind == "loop" else e.cycles for e in events)


def schedule_of(program: HloProgram, mesh: Any) -> ProgramSchedule | None:
    """Return the schedule of a compiled program; `None` if its compiler estimates no cycles.

    Args:
        program: the program, with its instructions in the order of their execution.
        mesh: the mesh that the program was compiled for, or a mapping from axis name to size.

    Example:
        >>> text = '''
        ... ENTRY %main (x: f32[512,512]) -> f32[512,512] {
        ...   %x = f32[512,512]{1,0} parameter(0)
        ...   %y = f32[512,512]{1,0} fusion(%x), kind=kOutput, backend_config={"estimated_cycles":"900"}
        ...   ROOT %z = f32[512,512]{1,0} all-reduce(%y), replica_groups=[1,2]<=[2], to_apply=%add
        ... }
        ... '''
        >>> schedule = schedule_of(HloProgram(text), {"data": 2})
        >>> [(event.kind, event.cycles or event.bytes) for event in schedule.computations["main"]]
        [('compute', 900), ('start', 1048576), ('done', 0)]
    """
    entry_name = next((computation.name for computation in program.computations.values() if computation.is_entry), None)
    if entry_name is None or re.search(_CYCLES_PATTERN, program.text) is None:
        return None
    reader = _Reader(program, collectives_by_instruction(program, mesh))
    computations: dict[str, tuple[ProgramEvent, ...]] = {}
    computation_names = [entry_name]
    for name in computation_names:  # the loop appends the bodies of the loops in these computations
        computations[name] = tuple(_join_neighbors(reader.events(program.computations[name])))
        computation_names += [
            event.name for event in computations[name] if event.kind == "loop" and event.name not in computation_names
        ]
    return ProgramSchedule(entry_name, computations)


@dataclasses.dataclass(frozen=True)
class _Reader:
    """A program, with its collectives by the names of their computation and instruction."""

    program: HloProgram
    collectives_by_instruction: Mapping[tuple[str, str], Sequence[Collective]]

    def events(self, computation: Computation) -> Iterator[ProgramEvent]:
        """Yield the events of a computation."""
        start_name_by_channel: dict[str, str] = {}  # names of the fusions that start a collective
        for op in computation.instructions.values():
            if op.opcode == "while":
                yield ProgramEvent("loop", name=_loop_body(op), trips=self.program.trip_count(op) or 1)
                continue
            if op.opcode in ("call", "conditional"):
                branch_names = [name for name in callees(op.attributes) if name in self.program.computations]
                yield ProgramEvent("loop", name=max(branch_names, key=self._cycles_within))
                continue
            is_done, is_start = op.opcode.endswith("-done"), op.opcode.endswith("-start")
            is_copy = op.opcode.removesuffix("-start") in _COPY_OPCODES
            if is_done and op.opcode not in _FREE:
                yield ProgramEvent("done", name=op.operands[0])
                continue
            collectives_and_ops, marker = self._collectives_and_marker(computation, op)
            if marker == "AsyncCollectiveDone":
                channel = next(iter(self._channels(op)), "")
                yield ProgramEvent("done", name=start_name_by_channel.get(channel, op.name))
                continue
            if collectives_and_ops:
                yield from (
                    self._collective_start(op, collective, program_op) for collective, program_op in collectives_and_ops
                )
                start_name_by_channel |= dict.fromkeys(self._channels(op), op.name)
                if not is_start and marker != "AsyncCollectiveStart":
                    yield ProgramEvent("done", name=op.name)
            elif is_start and is_copy:
                yield _copy_start(computation, op)
            else:
                yield from _work_events(computation, op)

    def _collectives_and_marker(self, computation: Computation, op: Op) -> tuple[list[tuple[Collective, Op]], str]:
        """Return the collectives of an instruction and of those it fuses, and the marker of an asynchronous fusion.

        The collectives are pairs (collective, its instruction). The marker is "" if the fusion is not asynchronous.
        """
        names_and_ops = [(computation.name, op), *self._fused_names_and_ops(op)]
        collectives_and_ops = [
            (collective, inner_op)
            for name, inner_op in names_and_ops
            for collective in self.collectives_by_instruction.get((name, inner_op.name), ())
        ]
        call_targets = [
            inner_op.attribute(r'custom_call_target="(AsyncCollective\w+)"') for _, inner_op in names_and_ops
        ]
        return collectives_and_ops, next((call_target for call_target in call_targets if call_target), "")

    def _channels(self, op: Op) -> set[str]:
        """Return the channels of the collectives that a fusion contains."""
        channels = [fused_op.attribute(r"\bchannel_id=(\d+)") for _, fused_op in self._fused_names_and_ops(op)]
        return {channel for channel in channels if channel is not None}

    def _fused_names_and_ops(self, op: Op) -> list[tuple[str, Op]]:
        """Return a pair (computation's name, instruction) for each instruction inside a fusion or asynchronous call."""
        if op.opcode not in ("fusion", "async-start"):
            return []
        computation_names = [name for name in callees(op.attributes) if name in self.program.computations]
        return [
            (name, fused_op)
            for name in computation_names
            for fused_op in self.program.computations[name].instructions.values()
        ]

    @staticmethod
    def _collective_start(op: Op, collective: Collective, program_op: Op) -> ProgramEvent:
        """Return the start of an instruction's collective; `program_op` lists the pairs of devices."""
        device_pairs = [(source, target) for source, target in permuted_pairs(program_op) if source != target]
        direction = 0 if not device_pairs else 1 if device_pairs[0][1] > device_pairs[0][0] else -1
        return ProgramEvent(
            "start",
            bytes=collective.bytes,
            name=op.name,
            transfer=collective.kind,
            axes=collective.axes,
            direction=direction,
        )

    def _cycles_within(self, name: str) -> int:
        """Return the estimated cycles of a computation, with the loops and calls in it."""
        total = 0
        for op in self.program.computations[name].instructions.values():
            total += int(op.attribute(_CYCLES_PATTERN) or 0)
            if op.opcode in ("while", "call", "conditional"):
                trip_count = (self.program.trip_count(op) or 1) if op.opcode == "while" else 1
                body_names = [_loop_body(op)] if op.opcode == "while" else callees(op.attributes)
                total += trip_count * max(map(self._cycles_within, body_names), default=0)
        return total


def _loop_body(op: Op) -> str:
    """Return the name of the body of a while loop."""
    name = op.attribute(r"\bbody=%?([\w.\-]+)")
    assert name is not None, f"a loop in an unknown spelling: {op.attributes[:80]}"
    return name


def _copy_start(computation: Computation, op: Op) -> ProgramEvent:
    """Return the start of an asynchronous copy."""
    is_update = op.opcode.startswith("dynamic-update-slice")
    done_op = next((use for use, _ in computation.users_and_positions(op.name) if use.opcode.endswith("-done")), op)
    moved_op = computation.instructions[op.operands[1]] if is_update and len(op.operands) > 1 else done_op
    transfer: TransferKind = "host copy" if _HOST in op.type else "memory copy"
    return ProgramEvent("start", bytes=moved_op.bytes, name=op.name, transfer=transfer)


def _work_events(computation: Computation, op: Op) -> Iterator[ProgramEvent]:
    """Yield the event of an instruction that is neither a loop nor a transfer, if it takes time."""
    cycles_text = op.attribute(_CYCLES_PATTERN)
    if cycles_text is not None:
        yield ProgramEvent("compute", cycles=int(cycles_text))
    elif op.opcode == "custom-call":
        flop_text = op.attribute(r'"cost_estimate":\{[^}]*?"flops":"?(\d+)')
        bytes_text = op.attribute(r'"cost_estimate":\{[^}]*?"bytes_accessed":"?(\d+)')
        if flop_text is not None or bytes_text is not None:
            yield ProgramEvent("kernel", flop=int(flop_text or 0), bytes=int(bytes_text or 0))
        elif 'custom_call_target="tpu_custom_call"' in op.attributes:  # a kernel that declares nothing
            yield ProgramEvent("kernel", bytes=2 * op.bytes)
    elif op.opcode not in _FREE and "S(6)" not in op.type:  # a scalar in the memory of the control unit
        yield ProgramEvent("memory", bytes=2 * op.bytes)


def _join_neighbors(events: Iterator[ProgramEvent]) -> Iterator[ProgramEvent]:
    """Yield the events, with consecutive compute events merged into one, and likewise consecutive memory events."""
    last_event: ProgramEvent | None = None
    for event in events:
        if last_event is not None and last_event.kind == event.kind and event.kind in ("compute", "memory"):
            last_event = dataclasses.replace(
                last_event, cycles=last_event.cycles + event.cycles, bytes=last_event.bytes + event.bytes
            )
            continue
        if last_event is not None:
            yield last_event
        last_event = event
    if last_event is not None:
        yield last_event
