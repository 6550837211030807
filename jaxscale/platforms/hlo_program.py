"""A compiled program as data: its computations and instructions, read from the text that XLA prints.

CPU, GPU and TPU share this text (`compiled.as_text()`). It is read line by line, with only as much grammar as others
here ask for: names, types, operands, what an instruction calls, and how often a computation runs. It leaves out layouts
and the values of constants.
"""

import dataclasses
import math
import re
from collections.abc import Iterator

_COMPUTATION = re.compile(r"^(ENTRY\s+)?%?([\w.\-]+)\s.*->.*\{\s*$")
_INSTRUCTION = re.compile(r"^\s+(ROOT\s+)?%?([\w.\-]+) = (.*)$", re.DOTALL)
_END = re.compile(r'^\}(, execution_thread="[^"]*")?\s*$')
ARRAY = re.compile(r"\b([a-z]+\d*[a-z0-9]*)\[([\d,]*)\]")
_CALLED = re.compile(r"\b(?:calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"\b(?:branch_computations|called_computations)=\{([^}]*)\}")


@dataclasses.dataclass
class Op:
    """One instruction: `type` is its result's, `operands` are names (a constant's value, a parameter's number)."""

    name: str
    type: str
    opcode: str
    operands: list[str]
    attributes: str
    is_root: bool


@dataclasses.dataclass
class Computation:
    """A computation and its instructions, by name in order."""

    name: str
    is_entry: bool
    instructions: dict[str, Op]

    def uses(self, name: str) -> list[tuple[Op, int]]:
        """Instructions that take a value, each with its place among their operands."""
        return [
            (op, i) for op in self.instructions.values() for i, operand in enumerate(op.operands) if operand == name
        ]

    @property
    def root(self) -> Op | None:
        """The instruction whose result is the computation's; `None` where the text does not show it."""
        return next((op for op in self.instructions.values() if op.is_root), None)

    def parameter(self, number: int) -> str:
        """Name of the parameter with this number."""
        return next(
            op.name for op in self.instructions.values() if (op.opcode, op.operands) == ("parameter", [str(number)])
        )


class Program:
    """A module's computations, and how often each runs.

    Args:
        text: `compiled.as_text()`, or a dumped module.
    """

    def __init__(self, text: str) -> None:
        self.computations: dict[str, Computation] = {}
        self._runs: dict[str, tuple[int, bool, bool]] = {}
        current = None
        for line in _whole_lines(text):
            if current is None:
                if (match := _COMPUTATION.match(line)) and not line.startswith((" ", "HloModule")):
                    current = Computation(match[2], bool(match[1]), {})
                    self.computations[match[2]] = current
            elif _END.match(line):
                _name_elements(current)
                current = None
            elif match := _INSTRUCTION.match(line):
                op = _instruction(match[2], match[3], bool(match[1]))
                current.instructions[op.name] = op
        self.callers: dict[str, list[tuple[Computation, Op]]] = {}
        for computation in self.computations.values():
            for op in computation.instructions.values():
                for inner in dict.fromkeys(called(op.attributes)):
                    self.callers.setdefault(inner, []).append((computation, op))

    def runs(self, name: str) -> tuple[int, bool, bool]:
        """How often a computation runs, whether inside a loop, and whether every trip count is known."""
        if name not in self._runs:
            if self.computations[name].is_entry:
                self._runs[name] = (1, False, True)
                return self._runs[name]
            total, looped, known = 0, False, True
            for caller, op in self.callers.get(name, []):
                count, in_loop, sure = self.runs(caller.name)
                if op.opcode == "while":
                    trips = self.trips(op)
                    count, in_loop, sure = count * (trips or 1), True, sure and trips is not None
                total, looped, known = total + count, looped or in_loop, known and sure
            self._runs[name] = (total, looped, known)
        return self._runs[name]

    def trips(self, loop: Op) -> int | None:
        """Trips of a while loop: what the compiler noted, else the one bound that its condition compares with."""
        noted = re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.attributes)
        if noted:
            return int(noted[1])
        condition = re.search(r"condition=%?([\w.\-]+)", loop.attributes)
        reached, bounds, directions = [condition[1]] if condition else [], set(), set()
        for name in reached:
            for op in self.computations[name].instructions.values():
                reached += [inner for inner in called(op.attributes) if inner not in reached]
                if op.opcode == "constant" and re.match(r"[su]\d+\[\]", op.type):
                    bounds.add(int(op.operands[0]))
                if op.opcode == "compare":
                    directions.update(re.findall(r"direction=(\w+)", op.attributes))
        return bounds.pop() if len(bounds) == 1 and directions == {"LT"} else None


def _whole_lines(text: str) -> Iterator[str]:
    """Lines of a module, an instruction's put together: a kernel's attributes may hold line breaks."""
    held: list[str] = []
    for line in text.splitlines():
        if held and not (_INSTRUCTION.match(line) or _END.match(line)):
            held.append(line)
            continue
        if held:
            yield "\n".join(held)
        held = [line] if _INSTRUCTION.match(line) else []
        if not held:
            yield line
    if held:
        yield "\n".join(held)


def _name_elements(computation: Computation) -> None:
    """Give each operand `tuple#2`, short for an element that no instruction takes out, an instruction."""
    operands = [name for op in computation.instructions.values() for name in op.operands if "#" in name]
    for name in dict.fromkeys(operands):
        whole, *path = name.split("#")
        for index in path:
            type_ = split(computation.instructions[whole].type[1:-1])[int(index)].strip()
            element = f"{whole}#{index}"
            op = Op(element, type_, "get-tuple-element", [whole], f", index={index}", False)
            computation.instructions.setdefault(element, op)
            whole = element


def _instruction(name: str, rest: str, is_root: bool) -> Op:
    """An instruction from what stands right of its "="."""
    end = _closing(rest, 0) + 1 if rest.startswith("(") else rest.index(" ")
    head = re.match(r"\s*([\w\-]+)\(", rest[end:])
    assert head is not None, f"an instruction in a spelling that is not known: {rest[:80]}"
    opening = end + head.end() - 1
    closing = _closing(rest, opening)
    inside = re.sub(r"/\*index=\d+\*/", "", rest[opening + 1 : closing])
    operands = [part.split()[-1].lstrip("%") for part in split(inside) if part.strip()]
    return Op(name, rest[:end], head[1], operands, rest[closing + 1 :], is_root)


def _closing(text: str, opening: int) -> int:
    """Where the bracket at `opening` closes."""
    depth = 0
    for i in range(opening, len(text)):
        depth += (text[i] in "([{") - (text[i] in ")]}")
        if depth == 0:
            return i
    return len(text) - 1


def split(text: str) -> list[str]:
    """Split at the commas outside brackets."""
    parts, depth, start = [], 0, 0
    for i, letter in enumerate(text):
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and depth == 0:
            parts.append(text[start:i])
            start = i + 1
    return [*parts, text[start:]]


def called(attributes: str) -> list[str]:
    """Names of the computations that an instruction calls."""
    names = _CALLED.findall(attributes)
    for branches in _BRANCHES.findall(attributes):
        names += [name.strip().lstrip("%") for name in branches.split(",")]
    return names


def elements(type_: str) -> int:
    """Elements of the first array of a type."""
    match = ARRAY.search(type_)
    return math.prod(integers(match[2])) if match else 0


def array_bytes(array: tuple[str, str]) -> int:
    """Bytes of ("bf16", "4,8"); types narrower than a byte are rounded up as a whole."""
    dtype, shape = array
    bits = re.match(r"[a-z]+(\d+)", dtype)
    width = 8 if bits is None else int(bits[1])  # "pred" takes a byte
    return math.ceil(math.prod(integers(shape)) * width / 8)


def integers(text: str) -> list[int]:
    """Every run of digits in a text, as a number."""
    return [int(number) for number in re.findall(r"\d+", text)]
