"""Who is alive when device memory is fullest, in the user's own names: read from what XLA dumps of a compilation.

XLA writes which buffer every value got and from which instruction to which it lives (`xla_dump_to`); its own list of
the peak counts a TPU's on-chip memory as well, so the peak is found again here, in device memory alone. Arguments,
outputs and constants take their place for the whole run. A value carried by a loop is named after what the loop's body
puts there; what a scan stacks up, after what is stacked.

It leaves out what lies between buffers: a heap is packed, so the device bytes of a program are a little more than what
is alive at its peak.
"""

import dataclasses
import pathlib
import re
from collections import defaultdict
from typing import Literal

from jaxscale.platforms.hlo_program import ARRAY, Computation, Op, Program, array_bytes, called, integers
from jaxscale.platforms.hlo_source import Sources
from jaxscale.platforms.report import KINDS, Kind, LiveTensor, Moment

Phase = Literal["forward", "backward", "recompute"]

MOMENTS = 400
"""Moments of a timeline, about."""

# memory spaces that are device memory: 1 is VMEM on a TPU, memory for collectives on a GPU; 5 is the host
_SPACES = {"tpu": {0}, "gpu": {0, 1}, "cpu": {0}}
_VALUE = re.compile(r" value: <\d+ (\S+?)(\{[\d,]*\})?( \(phi\))? @\d+> \(size=(\d+),offset=(\d+)\): (.*)")
_RANGE = re.compile(r"    (\S+?)(\{[\d,]*\}):(\d+)-(\d+)$")
_PLACE = re.compile(r"    (\d+):(\S+)$")
_ARGUMENT = "argument "  # and its number: no instruction is called so
# what JAX adds to an operation's scopes
_ADDED = re.compile(
    r"while|body|cond|branch_\d+_fun|eval_jaxpr|closed_call|checkpoint|rematted_computation|remat\d?|pjit|core_call"
    r"|custom_vjp_call(_jaxpr)?|custom_jvp_call|shard_map|named_call|cond_branch"
)


@dataclasses.dataclass(frozen=True)
class Live:
    """Who is alive at the peak, and how live bytes go along the schedule.

    Args:
        tensors: the buffers alive at the peak, largest first, without those below a thousandth of it.
        timeline: live bytes by kind, along the schedule.
    """

    tensors: tuple[LiveTensor, ...]
    timeline: tuple[Moment, ...]


@dataclasses.dataclass(frozen=True)
class _Value:
    """A value, its buffer (allocation and offset), and the first and last instruction that it is alive at."""

    name: str
    index: tuple[int, ...]
    place: tuple[int, int]
    bytes: int
    shape: str
    start: int
    end: int
    whole_run: Kind | None


def live_at_the_peak(folder: pathlib.Path, kind: str) -> Live | None:
    """Who is alive at the peak of the program whose compilation was dumped to a folder; None where nothing was.

    Args:
        folder: what `xla_dump_to` named, with `xla_dump_hlo_as_text`.
        kind: "tpu", "gpu" or "cpu".
    """
    # a compilation may compile small helpers as well: the program has the longest text
    ending = "after_optimizations-buffer-assignment.txt"
    found = sorted(folder.glob(f"*{ending}"), key=lambda path: path.stat().st_size)
    if not found:
        return None
    stem = str(found[-1]).removesuffix("-buffer-assignment.txt")
    texts = [pathlib.Path(f"{stem}{end}") for end in ("-buffer-assignment.txt", "-live-range.txt", ".txt")]
    if not all(path.exists() for path in texts):
        return None
    assignment, ranges, text = (path.read_text("utf-8", "replace") for path in texts)
    return _live(assignment, ranges, text, _SPACES[kind])


def clean_name(op_name: str) -> str:
    """An operation's scopes as the user wrote them.

    Example:
        >>> clean_name("jit(step)/transpose(jvp(layers))/while/body/checkpoint/rematted_computation/mlp/jit(silu)/mul")
        'layers/mlp/silu/mul'
    """
    parts = op_name.split("/")
    if len(parts) > 1 and re.fullmatch(r"p?jit\(.*\)", parts[0]):
        parts = parts[1:]
    kept = []
    for part in parts:
        while wrapped := re.fullmatch(r"(?:transpose|jvp|vmap|jit|pjit|remat|checkpoint)\((.*)\)", part):
            part = wrapped[1]
        if part and not _ADDED.fullmatch(part):
            kept.append(part)
    return "/".join(kept)


def has_scopes(op_name: str) -> bool:
    """Whether the user gave an operation a scope (`jax.named_scope`), beyond what JAX and its own functions add."""
    for part in op_name.split("/")[1:-1]:
        while wrapped := re.fullmatch(r"(?:transpose|jvp|vmap|remat|checkpoint)\((.*)\)", part):
            part = wrapped[1]
        if part and not _ADDED.fullmatch(part) and not re.match(r"p?jit\(|.*(->|,)", part):
            return True
    return False


def phase_of(op_name: str) -> Phase | None:
    """The pass of an operation, from its scopes."""
    if "rematted_computation" in op_name:
        return "recompute"
    if "transpose(" in op_name:
        return "backward"
    return "forward" if "jvp(" in op_name else None


def _live(assignment: str, ranges: str, text: str, spaces: set[int]) -> Live:
    names = _Names(Program(text), Sources(text))
    order, values = _values(assignment, ranges, spaces)
    values = [_replaced(value, names.arguments) for value in values]
    backward = next((at for at, name in enumerate(order) if "transpose(" in names.op_name(name)), len(order))
    lasts = _last_uses(values)
    kinds = {}
    for value in values:
        phase = phase_of(names.own(value.name, value.index))
        kept = phase == "forward" and lasts[value.place, value.start] >= backward
        kinds[value] = value.whole_run or ("kept" if kept else "transient")
    peak, timeline = _sweep(order, values, kinds, names)
    tensors = [
        LiveTensor(
            names.called(value.name, value.index),
            value.bytes,
            kinds[value],
            value.shape.split("{")[0],
            None if value.whole_run in ("argument", "constant") else phase_of(names.own(value.name, value.index)),
            value.whole_run is None and names.in_loop(value.name),
            names.place(value.name, value.index) if value.whole_run is None else None,
        )
        for value in peak
    ]
    small = sum(tensor.bytes for tensor in tensors) // 1000
    tensors = [tensor for tensor in tensors if tensor.bytes > small]
    return Live(tuple(sorted(tensors, key=lambda one: (-one.bytes, one.name))), timeline)


def _values(assignment: str, ranges: str, spaces: set[int]) -> tuple[list[str], list[_Value]]:
    """Instructions in the order of the schedule, and the values that lie in device memory."""
    order: list[str] = []
    lives: dict[tuple[str, str], tuple[int, int]] = {}
    for line in ranges.splitlines():
        if match := _PLACE.match(line):
            order.append(match[2])
        elif match := _RANGE.match(line):
            lives[match[1], match[2]] = (int(match[3]), int(match[4]))
        elif line.startswith("  Live ranges at"):
            break
    values: list[_Value] = []
    number, kind, size, counted = -1, None, 0, False
    for line in assignment.splitlines():
        if line.startswith("allocation "):
            number += 1
            color = re.search(r", color (\d+)", line)
            counted = int(color[1] if color else 0) in spaces and "thread-local" not in line
            size = integers(line)[1]
            kind = _whole_run(line)
            if kind is not None and counted:
                given = re.search(r", parameter (\d+), shape \|(.*?)\|", line)
                # a donated argument's place holds other values after it; all else is named after its first value
                name, shape = (f"{_ARGUMENT}{given[1]}", given[2]) if given else ("", "")
                values.append(_Value(name, (), (number, 0), size, shape, 0, len(order), kind))
        elif counted and (match := _VALUE.match(line)):
            name, index, _, bytes_, offset, shape = match.groups()
            path = tuple(integers(index or ""))
            if kind is not None:
                if not values[-1].name:
                    values[-1] = dataclasses.replace(values[-1], name=name, index=path, shape=shape)
            elif (life := lives.get((name, index or "{}"))) and not shape.startswith("("):
                values.append(_Value(name, path, (number, int(offset)), int(bytes_), shape, *life, None))
        elif not line.strip() and number >= 0:
            break
    return order, values


def _replaced(value: _Value, arguments: dict[str, str]) -> _Value:
    """A value whose argument's number has become the argument's instruction."""
    return dataclasses.replace(value, name=arguments.get(value.name, value.name))


def _whole_run(allocation: str) -> Kind | None:
    """What an allocation is that stays for the whole run; None for temporaries."""
    if ", parameter " in allocation:
        return "argument"
    if "constant" in allocation:
        return "constant"
    return "output" if "output shape" in allocation or "maybe-live-out" in allocation else None


def _last_uses(values: list[_Value]) -> dict[tuple[tuple[int, int], int], int]:
    """Where the buffer of each (place, start) ends, the values of one shape that touch being one."""
    places: dict[tuple[tuple[int, int], str], list[_Value]] = defaultdict(list)
    for value in values:
        places[value.place, value.shape].append(value)
    lasts: dict[tuple[tuple[int, int], int], int] = {}
    for chain in places.values():
        chain.sort(key=lambda value: value.start, reverse=True)
        starts: list[tuple[int, int]] = []  # (start, last use) of the values after this one
        for value in chain:
            last = max([value.end, *(end for start, end in starts if start <= value.end)])
            starts.append((value.start, last))
            key = (value.place, value.start)
            lasts[key] = max(last, lasts.get(key, 0))
    return lasts


def _sweep(
    order: list[str], values: list[_Value], kinds: dict[_Value, Kind], names: "_Names"
) -> tuple[list[_Value], tuple[Moment, ...]]:
    """The values alive at the peak, one a buffer, and the timeline."""
    begins: dict[int, list[_Value]] = defaultdict(list)
    ends: dict[int, list[_Value]] = defaultdict(list)
    for value in values:
        begins[value.start].append(value)
        ends[value.end + 1].append(value)
    alive: dict[tuple[int, int], list[_Value]] = defaultdict(list)
    totals: dict[Kind, int] = dict.fromkeys(KINDS, 0)
    moments: list[Moment] = []
    best, peak = -1, []

    def change(value: _Value, there: bool) -> None:
        here = alive[value.place]
        if here:
            first = max(here, key=_rank)
            totals[kinds[first]] -= first.bytes
        here.append(value) if there else here.remove(value)
        if here:
            first = max(here, key=_rank)
            totals[kinds[first]] += first.bytes

    for at in range(len(order) + 1):
        for value in ends[at]:
            change(value, False)
        for value in begins[at]:
            change(value, True)
        phase = phase_of(names.op_name(order[at])) if at < len(order) else None
        moments.append(Moment(at, {kind: count for kind, count in totals.items() if count}, phase))
        if sum(totals.values()) > best:
            best, peak = sum(totals.values()), [max(here, key=_rank) for here in alive.values() if here]
    return peak, _thinned(moments)


def _rank(value: _Value) -> tuple[int, int]:
    """Of several values in one buffer, the one to name it after: the largest, then the latest."""
    return value.bytes, value.start


def _thinned(moments: list[Moment]) -> tuple[Moment, ...]:
    """The fullest moment of each stretch: peaks stay, and the list stays short."""
    stretch = -(-len(moments) // MOMENTS)
    return tuple(
        max(moments[i : i + stretch], key=lambda moment: moment.total) for i in range(0, len(moments), stretch or 1)
    )


def _bytes(computation: Computation, name: str) -> int:
    op = computation.instructions.get(name)
    found = ARRAY.search(op.type) if op is not None else None
    return array_bytes((found[1], found[2])) if found else 0


class _Names:
    """What the values of a program are called, in the user's terms."""

    def __init__(self, program: Program, sources: Sources) -> None:
        self.program = program
        self.sources = sources
        self.arguments = {
            f"{_ARGUMENT}{op.operands[0]}": op.name
            for computation in program.computations.values()
            if computation.is_entry
            for op in computation.instructions.values()
            if op.opcode == "parameter"
        }
        self.ops: dict[str, tuple[Computation, Op]] = {
            op.name: (computation, op)
            for computation in program.computations.values()
            for op in computation.instructions.values()
        }

    def op_name(self, name: str) -> str:
        """An instruction's scopes, as JAX noted them; empty where it did not."""
        if name not in self.ops:
            return ""
        found = re.search(r'op_name="((?:[^"\\]|\\.)*)"', self.ops[name][1].attributes)
        return found[1].replace("\\'", "'").replace('\\"', '"') if found else ""

    def in_loop(self, name: str) -> bool:
        """Whether an instruction is inside a loop."""
        return name in self.ops and self.program.runs(self.ops[name][0].name)[1]

    def own(self, name: str, index: tuple[int, ...]) -> str:
        """Scopes of the operation that writes a value, with those of the loop where it is a loop's carry."""
        written = self._source(name, index, through_stacks=False)
        return self.op_name(written) or self.op_name(name)

    def called(self, name: str, index: tuple[int, ...]) -> str:
        """A value's name for the user."""
        source = self._source(name, index, through_stacks=True)
        named = source if self.op_name(source) else name
        cleaned = clean_name(self.op_name(named))
        if not cleaned:
            return source
        if self.ops[named][1].opcode == "parameter" or has_scopes(self.op_name(named)):
            return cleaned
        return "/".join((*self.sources.chain(self.ops[named][1]), cleaned))

    def place(self, name: str, index: tuple[int, ...]) -> str | None:
        """File and line that a value comes from."""
        source = self._source(name, index, through_stacks=True)
        return self.sources.place(self.ops[source][1]) if source in self.ops else None

    def _source(self, name: str, index: tuple[int, ...], through_stacks: bool) -> str:
        """The instruction that makes a value: past copies, tuples, loops' carries, and stacking where asked for."""
        seen = set()
        while name in self.ops and (name, index) not in seen:
            seen.add((name, index))
            computation, op = self.ops[name]
            step = self._step(computation, op, index, through_stacks)
            if step is None:
                break
            name, index = step
        return name

    def _step(
        self, computation: Computation, op: Op, index: tuple[int, ...], through_stacks: bool
    ) -> tuple[str, tuple[int, ...]] | None:
        """Where a value comes from, one step back; None where it is made here."""
        if op.opcode == "get-tuple-element":
            element = re.search(r"index=(\d+)", op.attributes)
            assert element is not None, "it says which element"
            return op.operands[0], (int(element[1]), *index)
        if op.opcode == "tuple" and index:
            return op.operands[index[0]], index[1:]
        if op.opcode == "while" and index:
            body = re.search(r"body=%?([\w.\-]+)", op.attributes)
            assert body is not None, "a loop has one"
            root = next(one for one in self.program.computations[body[1]].instructions.values() if one.is_root)
            handed_on = root.opcode == "tuple" and self._is_element(root.operands[index[0]], index[0])
            # what a loop only hands on comes from before it
            return (op.operands[0], index) if handed_on else (root.name, index)
        if op.opcode == "parameter" and not computation.is_entry:
            return self._argument(computation, op, index)
        plain = ("bitcast", "copy", "copy-start", "copy-done", "optimization-barrier", "opt-barrier", "reshape")
        unnamed = bool(op.operands) and not self.op_name(op.name)
        if op.opcode in plain or (unnamed and op.opcode.endswith(("-start", "-done", "convert"))):
            return op.operands[0], ()
        if unnamed and op.opcode == "fusion":
            widest = max(op.operands, key=lambda name: _bytes(computation, name))
            return (self._stacked(op, index) if through_stacks else None) or self._root(op) or (widest, ())
        if not through_stacks:
            return None
        if op.opcode in ("dynamic-update-slice", "dynamic-slice"):
            return op.operands[1 if op.opcode == "dynamic-update-slice" else 0], ()
        if op.opcode in ("async-done", "async-update"):
            return op.operands[0], ()
        return self._stacked(op, index) if op.opcode in ("fusion", "async-start", "call") else None

    def _is_element(self, name: str, index: int) -> bool:
        """Whether a value is an element of its computation's one parameter, taken out unchanged."""
        if name not in self.ops:
            return False
        computation, op = self.ops[name]
        while op.opcode in ("bitcast", "copy") and op.operands[0] in computation.instructions:
            op = computation.instructions[op.operands[0]]
        if op.opcode != "get-tuple-element" or not op.attributes.lstrip(", ").startswith(f"index={index}"):
            return False
        return computation.instructions[op.operands[0]].opcode == "parameter"

    def _argument(self, computation: Computation, op: Op, index: tuple[int, ...]) -> tuple[str, tuple[int, ...]] | None:
        """What a computation's caller gives for a parameter; of a loop, what the iteration before leaves."""
        call = next((call for _, call in self.program.callers.get(computation.name, [])), None)
        if call is None or call.opcode not in ("while", "fusion", "call", "async-start"):
            return None
        return (call.name if call.opcode == "while" else call.operands[int(op.operands[0])]), index

    def _root(self, op: Op) -> tuple[str, tuple[int, ...]] | None:
        """Of a fusion without a name, its last instruction that has one."""
        inner = self.program.computations[called(op.attributes)[0]].instructions
        named = [name for name, one in inner.items() if self.op_name(name) and one.opcode != "constant"]
        return (named[-1], ()) if named else None

    def _stacked(self, op: Op, index: tuple[int, ...]) -> tuple[str, tuple[int, ...]] | None:
        """Of an operation that writes a slice into a stack, or takes one out, where the slice comes from."""
        inner = self.program.computations[called(op.attributes)[0]]
        root = next(one for one in inner.instructions.values() if one.is_root)
        if root.opcode == "tuple" and index:
            root, index = inner.instructions[root.operands[index[0]]], index[1:]
        while root.opcode in ("bitcast", "copy", "convert") and root.operands[0] in inner.instructions:
            root = inner.instructions[root.operands[0]]
        if root.opcode == "fusion":
            return self._stacked(root, index)
        if root.opcode not in ("dynamic-update-slice", "dynamic-slice"):
            return None
        part = inner.instructions[root.operands[1 if root.opcode == "dynamic-update-slice" else 0]]
        while part.opcode in ("bitcast", "copy", "reshape", "convert") and part.operands[0] in inner.instructions:
            part = inner.instructions[part.operands[0]]
        return part.name, ()
