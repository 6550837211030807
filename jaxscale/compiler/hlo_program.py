"""A compiled program as data: its computations and instructions, read from the text that XLA prints.

CPU, GPU and TPU share the format of this text (`compiled.as_text()`). Only what other modules need is read:
names, types and operands of instructions, the computations that they call, and how often a computation runs. Left out:
layouts and the values of constants.
"""

import dataclasses
import math
import re
from collections.abc import Collection, Iterator

_COMPUTATION = re.compile(r"^(ENTRY\s+)?%?([\w.\-]+)\s.*->.*\{\s*$")
_INSTRUCTION = re.compile(r"^\s+(ROOT\s+)?%?([\w.\-]+) = (.*)$", re.DOTALL)
_END = re.compile(r'^\}(, execution_thread="[^"]*")?\s*$')
ARRAY = re.compile(r"\b([a-z]+\d*[a-z0-9]*)\[([\d,]*)\]")
_CALLED = re.compile(r"\b(?:calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"\b(?:branch_computations|called_computations)=\{([^}]*)\}")


@dataclasses.dataclass
class Op:
    """One instruction.

    Args:
        name: name of the instruction, without "%".
        type: type of the result, as XLA prints it.
        opcode: name of the operation, such as "dot".
        operands: names of the operands. For a constant, the value instead; for a parameter, its number.
        attributes: the text after the operands.
        is_root: whether the result is also the result of the computation.
    """

    name: str
    type: str
    opcode: str
    operands: list[str]
    attributes: str
    is_root: bool

    @property
    def arrays(self) -> list[tuple[str, str]]:
        """Type and shape of each array of the result, such as ("bf16", "4,8")."""
        return ARRAY.findall(self.type)

    @property
    def shape(self) -> list[int]:
        """Shape of the result; if the result is a tuple, shape of its first array."""
        return integers(self.arrays[0][1]) if self.arrays else []

    @property
    def bytes(self) -> int:
        """Bytes of the result; if the result is a tuple, bytes of its first array."""
        return array_bytes(self.arrays[0]) if self.arrays else 0

    def attribute(self, pattern: str) -> str | None:
        """Return the first group of a pattern in the attributes; `None` if the pattern does not match."""
        match = re.search(pattern, self.attributes)
        return match[1] if match else None


@dataclasses.dataclass
class Computation:
    """A computation of a program: the entry, the body of a loop, or another function that instructions call.

    Args:
        name: name of the computation.
        is_entry: whether a run of the program starts with the computation.
        instructions: the instructions by name, in order.
    """

    name: str
    is_entry: bool
    instructions: dict[str, Op]

    def users_and_positions(self, name: str) -> list[tuple[Op, int]]:
        """Return each instruction that uses a value, with the value's position among the operands."""
        ops = self.instructions.values()
        return [(op, index) for op in ops for index, operand in enumerate(op.operands) if operand == name]

    @property
    def root(self) -> Op | None:
        """The instruction that computes the computation's result; `None` if the text does not mark it."""
        return next((op for op in self.instructions.values() if op.is_root), None)

    def skip_back(self, op: Op, opcodes: Collection[str]) -> Op:
        """Follow first operands, from `op` on, to the first instruction whose opcode is not in `opcodes`; return it."""
        while op.opcode in opcodes and op.operands[0] in self.instructions:
            op = self.instructions[op.operands[0]]
        return op

    def parameter(self, number: int) -> str:
        """Return the name of the parameter with this number."""
        ops = self.instructions.values()
        return next(op.name for op in ops if op.opcode == "parameter" and op.operands == [str(number)])


class HloProgram:
    """A module's computations, and how often each computation runs.

    Args:
        text: `compiled.as_text()`, or a dumped module.

    Attributes:
        text: the text.
        computations: the computations, by name.
        callers: for each computation's name, the calls of the computation, as pairs (calling computation, instruction).
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.computations: dict[str, Computation] = {}
        # results of `executions`, by the computation's name
        self._executions_by_name: dict[str, tuple[int, bool, bool]] = {}
        open_computation = None
        for line in _whole_lines(text):
            if open_computation is None:
                if (match := _COMPUTATION.match(line)) and not line.startswith((" ", "HloModule")):
                    open_computation = Computation(match[2], bool(match[1]), {})
                    self.computations[match[2]] = open_computation
            elif _END.match(line):
                _add_element_instructions(open_computation)
                open_computation = None
            elif match := _INSTRUCTION.match(line):
                op = _read_instruction(match[2], match[3], bool(match[1]))
                open_computation.instructions[op.name] = op
        self.callers: dict[str, list[tuple[Computation, Op]]] = {}
        for computation, op in self.instructions():
            for callee_name in dict.fromkeys(callees(op.attributes)):
                self.callers.setdefault(callee_name, []).append((computation, op))

    def instructions(self) -> Iterator[tuple[Computation, Op]]:
        """Yield every instruction, as a pair (its computation, the instruction)."""
        for computation in self.computations.values():
            yield from ((computation, op) for op in computation.instructions.values())

    def executions(self, name: str) -> tuple[int, bool, bool]:
        """Count the executions of the computation with this name in one run of the program.

        Returns:
            A tuple: the number of executions; whether they are in a loop; whether the trip counts of all loops around
            them are known.
        """
        if name not in self._executions_by_name:
            caller_executions = [(1, False, True)] if self.computations[name].is_entry else []
            for caller, op in self.callers.get(name, []):
                count, in_loop, trips_known = self.executions(caller.name)
                if op.opcode == "while":
                    trip_count = self.trip_count(op)
                    count, in_loop = count * (trip_count or 1), True
                    trips_known = trips_known and trip_count is not None
                caller_executions.append((count, in_loop, trips_known))
            self._executions_by_name[name] = (
                sum(count for count, _, _ in caller_executions),
                any(in_loop for _, in_loop, _ in caller_executions),
                all(trips_known for _, _, trips_known in caller_executions),
            )
        return self._executions_by_name[name]

    def trip_count(self, loop: Op) -> int | None:
        """Return a while loop's trip count, from XLA's annotation or its counter's bound and step; None if unknown."""
        if trip_count := loop.attribute(r'"known_trip_count":\{"n":"(\d+)"'):
            return int(trip_count)
        condition_name = loop.attribute(r"condition=%?([\w.\-]+)")
        computation_names, bounds, directions = [condition_name] if condition_name else [], set(), set()
        for name in computation_names:  # the loop appends the computations that these call
            for op in self.computations[name].instructions.values():
                computation_names += [callee for callee in callees(op.attributes) if callee not in computation_names]
                if op.opcode == "constant" and re.match(r"[su]\d+\[\]", op.type):
                    bounds.add(int(op.operands[0]))
                if op.opcode == "compare":
                    directions.update(re.findall(r"direction=(\w+)", op.attributes))
        if len(bounds) != 1 or directions != {"LT"}:
            return None
        return math.ceil(bounds.pop() / self._counter_step(loop))

    def _counter_step(self, loop: Op) -> int:
        """Return the step by which each trip of a loop raises the counter in its condition; 1 if it is unreadable.

        XLA:TPU unrolls loops of collectives beside products, and their counters rise by more than 1.
        """
        condition = self.computations[loop.attribute(r"condition=%?([\w.\-]+)") or ""]
        body = self.computations[loop.attribute(r"\bbody=%?([\w.\-]+)") or ""]
        index_texts = [op.attribute(r"index=(\d+)") for op in condition.instructions.values() if "element" in op.opcode]
        if len(index_texts) != 1 or index_texts[0] is None or body.root is None or body.root.opcode != "tuple":
            return 1
        counter = body.skip_back(body.instructions[body.root.operands[int(index_texts[0])]], ("copy", "bitcast"))
        if counter.opcode != "add":
            return 1
        terms = [body.instructions[name] for name in counter.operands]
        constant_terms = [int(term.operands[0]) for term in terms if term.opcode == "constant"]
        return max(1, constant_terms[0]) if len(constant_terms) == 1 else 1


def _whole_lines(text: str) -> Iterator[str]:
    """Yield a module's lines; an instruction is one text, even if its attributes contain line breaks."""
    instruction_lines: list[str] = []
    for line in text.splitlines():
        if instruction_lines and not (_INSTRUCTION.match(line) or _END.match(line)):
            instruction_lines.append(line)
            continue
        if instruction_lines:
            yield "\n".join(instruction_lines)
        instruction_lines = [line] if _INSTRUCTION.match(line) else []
        if not instruction_lines:
            yield line
    if instruction_lines:
        yield "\n".join(instruction_lines)


def _add_element_instructions(computation: Computation) -> None:
    """Add a get-tuple-element instruction for each operand such as `tuple#2`, for which XLA prints no instruction."""
    element_names = [name for op in computation.instructions.values() for name in op.operands if "#" in name]
    for name in dict.fromkeys(element_names):
        tuple_name, *indices = name.split("#")
        for index in indices:
            element_type = split_at_commas(computation.instructions[tuple_name].type[1:-1])[int(index)].strip()
            element_name = f"{tuple_name}#{index}"
            op = Op(element_name, element_type, "get-tuple-element", [tuple_name], f", index={index}", False)
            computation.instructions.setdefault(element_name, op)
            tuple_name = element_name


def _read_instruction(name: str, text: str, is_root: bool) -> Op:
    """Read the instruction with this name from the text after its "="."""
    type_end = _closing_index(text, 0) + 1 if text.startswith("(") else text.index(" ")
    opcode_match = re.match(r"\s*([\w\-]+)\(", text[type_end:])
    assert opcode_match is not None, f"an instruction in an unknown spelling: {text[:80]}"
    opening_index = type_end + opcode_match.end() - 1
    closing_index = _closing_index(text, opening_index)
    operands_text = re.sub(r"/\*index=\d+\*/", "", text[opening_index + 1 : closing_index])
    operands = [operand.split()[-1].lstrip("%") for operand in split_at_commas(operands_text) if operand.strip()]
    return Op(name, text[:type_end], opcode_match[1], operands, text[closing_index + 1 :], is_root)


def _closing_index(text: str, opening_index: int) -> int:
    """Return the index of the bracket that closes the one at `opening_index`."""
    depth = 0
    for i in range(opening_index, len(text)):
        depth += (text[i] in "([{") - (text[i] in ")]}")
        if depth == 0:
            return i
    return len(text) - 1


def split_at_commas(text: str) -> list[str]:
    """Split a text at the commas outside brackets."""
    part_texts, depth, start = [], 0, 0
    for i, letter in enumerate(text):
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and depth == 0:
            part_texts.append(text[start:i])
            start = i + 1
    return [*part_texts, text[start:]]


def callees(attributes: str) -> list[str]:
    """Return the names of the computations that an instruction with these attributes calls."""
    callee_names = _CALLED.findall(attributes)
    for branches_text in _BRANCHES.findall(attributes):
        callee_names += [name.strip().lstrip("%") for name in branches_text.split(",")]
    return callee_names


def array_bytes(array: tuple[str, str]) -> int:
    """Return the bytes of an array such as ("bf16", "4,8"); elements narrower than a byte are packed."""
    dtype, shape = array
    bits_match = re.match(r"[a-z]+(\d+)", dtype)
    element_bits = 8 if bits_match is None else int(bits_match[1])  # "pred" takes a byte
    return math.ceil(math.prod(integers(shape)) * element_bits / 8)


def integers(text: str) -> list[int]:
    """Return every run of digits in a text, as an integer."""
    return [int(number) for number in re.findall(r"\d+", text)]
