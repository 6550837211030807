"""Names for the values of a compiled program, in the user's terms.

An argument is named after its path. A computed value is named after its scopes (`jax.named_scope`), or, without scopes,
after the modules that compute it. A carry of a loop is named after the value that the loop's body returns for it. The
stacked outputs of a scan, and their slices, are named after the value that was stacked.
"""

import re

from jaxscale.compiler.hlo_program import Computation, HloProgram, Op, callees
from jaxscale.compiler.hlo_source import Sources
from jaxscale.compiler.report import StepPhase

BufferIndex = tuple[int, ...]
Element = tuple[str, BufferIndex]
"""Name of an instruction, and index of one element of its result; `()` for the whole result."""

# index of the operand that is the slice written into a stack, or the stack that a slice is read from
_SLICE_OR_STACK_INDEX = {"dynamic-update-slice": 1, "dynamic-slice": 0}
# opcodes of instructions that pass on their operand
_PASSING_OPCODES = ("bitcast", "copy", "copy-start", "copy-done", "optimization-barrier", "opt-barrier", "reshape")
# scopes that JAX adds to an operation
_ADDED_SCOPE = re.compile(
    r"while|body|cond|branch_\d+_fun|eval_jaxpr|closed_call|checkpoint|rematted_computation|remat\d?|pjit|core_call"
    r"|custom_vjp_call(_jaxpr)?|custom_jvp_call|shard_map|named_call|cond_branch"
)


def clean_name(op_name: str) -> str:
    """Return an operation's scopes as the user wrote them, without those that JAX adds.

    Example:
        >>> clean_name("jit(step)/transpose(jvp(layers))/while/body/checkpoint/rematted_computation/mlp/jit(silu)/mul")
        'layers/mlp/silu/mul'
    """
    scopes = op_name.split("/")
    if len(scopes) > 1 and re.fullmatch(r"p?jit\(.*\)", scopes[0]):
        scopes = scopes[1:]
    user_scopes = []
    for scope in scopes:
        while wrapper_match := re.fullmatch(r"(?:transpose|jvp|vmap|jit|pjit|remat|checkpoint)\((.*)\)", scope):
            scope = wrapper_match[1]
        if scope and not _ADDED_SCOPE.fullmatch(scope):
            user_scopes.append(scope)
    return "/".join(user_scopes)


def has_scopes(op_name: str) -> bool:
    """Return whether an operation has a scope of the user (`jax.named_scope`), not only those that JAX adds."""
    for scope in op_name.split("/")[1:-1]:
        while wrapper_match := re.fullmatch(r"(?:transpose|jvp|vmap|remat|checkpoint)\((.*)\)", scope):
            scope = wrapper_match[1]
        if scope and not _ADDED_SCOPE.fullmatch(scope) and not re.match(r"p?jit\(|.*(->|,)", scope):
            return True
    return False


def phase_of(op_name: str) -> StepPhase | None:
    """Return the pass to which an operation belongs, by its scopes; `None` in a program without gradients."""
    if "rematted_computation" in op_name:
        return "recompute"
    if "transpose(" in op_name:
        return "backward"
    return "forward" if "jvp(" in op_name else None


class ValueNames:
    """Names for the values of a program, in the user's terms.

    Attributes:
        program: the program.
        sources: the program's stack frames.
        computation_and_op_by_name: a pair (computation, instruction) for each name of an instruction.
        argument_name_by_number: the name of the instruction that stands for each argument, by the argument's number
            as text.
    """

    def __init__(self, program: HloProgram, sources: Sources) -> None:
        self.program = program
        self.sources = sources
        self.computation_and_op_by_name = {op.name: (computation, op) for computation, op in program.instructions()}
        self.argument_name_by_number = {
            op.operands[0]: op.name
            for computation, op in program.instructions()
            if computation.is_entry and op.opcode == "parameter"
        }

    def op_name(self, name: str) -> str:
        """Return the scopes of the instruction with this name, as JAX recorded them; "" if there are none."""
        escaped_op_name = (
            self.computation_and_op_by_name[name][1].attribute(r'op_name="((?:[^"\\]|\\.)*)"')
            if name in self.computation_and_op_by_name
            else None
        )
        return (escaped_op_name or "").replace("\\'", "'").replace('\\"', '"')

    def in_loop(self, name: str) -> bool:
        """Return whether the instruction with this name is inside a loop."""
        return (
            name in self.computation_and_op_by_name
            and self.program.executions(self.computation_and_op_by_name[name][0].name)[1]
        )

    def writer_scopes(self, name: str, index: BufferIndex) -> str:
        """Return the scopes of the operation that writes a value; if it has none, those of the instruction `name`."""
        writer = self._origin(name, index, through_stacks=False)
        return self.op_name(writer) or self.op_name(name)

    def user_name(self, name: str, index: BufferIndex) -> str:
        """Return the name of a value in the user's terms."""
        origin = self._origin(name, index, through_stacks=True)
        source_name = origin if self.op_name(origin) else name
        user_name = clean_name(self.op_name(source_name))
        if not user_name:
            return origin
        if self.computation_and_op_by_name[source_name][1].opcode == "parameter" or has_scopes(
            self.op_name(source_name)
        ):
            return user_name
        return "/".join((*self.sources.module_names(self.computation_and_op_by_name[source_name][1]), user_name))

    def source_place(self, name: str, index: BufferIndex) -> str | None:
        """Return the source file and line of the operation that computes a value; None if unknown."""
        origin = self._origin(name, index, through_stacks=True)
        return (
            self.sources.file_and_line(self.computation_and_op_by_name[origin][1])
            if origin in self.computation_and_op_by_name
            else None
        )

    def _origin(self, name: str, index: BufferIndex, through_stacks: bool) -> str:
        """Find the instruction that computes a value, through copies, tuples and loop carries; return its name.

        With `through_stacks`, a value that is stacked or sliced from a stack is traced to the value that was stacked.
        """
        visited = set()
        while name in self.computation_and_op_by_name and (name, index) not in visited:
            visited.add((name, index))
            computation, op = self.computation_and_op_by_name[name]
            predecessor = self._predecessor(computation, op, index, through_stacks)
            if predecessor is None:
                break
            name, index = predecessor
        return name

    def _predecessor(
        self, computation: Computation, op: Op, index: BufferIndex, through_stacks: bool
    ) -> Element | None:
        """Return the value that an instruction passes on as its result; None if it computes the result itself."""
        if op.opcode == "get-tuple-element":
            index_text = op.attribute(r"index=(\d+)")
            assert index_text is not None, "the attributes specify the element"
            return op.operands[0], (int(index_text), *index)
        if op.opcode == "tuple" and index:
            return op.operands[index[0]], index[1:]
        if op.opcode == "while" and index:
            body_name = op.attribute(r"body=%?([\w.\-]+)")
            assert body_name is not None, "a loop has a body"
            root = self.program.computations[body_name].root
            if root is None:
                return None
            is_unchanged = root.opcode == "tuple" and self._is_unchanged_element(root.operands[index[0]], index[0])
            # a carry that the loop leaves unchanged comes from the loop's input
            return (op.operands[0], index) if is_unchanged else (root.name, index)
        if op.opcode == "parameter" and not computation.is_entry:
            return self._caller_operand(computation, op, index)
        is_unnamed = bool(op.operands) and not self.op_name(op.name)
        if op.opcode in _PASSING_OPCODES or (is_unnamed and op.opcode.endswith(("-start", "-done", "convert"))):
            return op.operands[0], ()
        if is_unnamed and op.opcode == "fusion":
            op_by_name = computation.instructions
            largest_operand = max(op.operands, key=lambda name: op_by_name[name].bytes if name in op_by_name else 0)
            return (
                (self._slice_or_stack_element(op, index) if through_stacks else None)
                or self._last_scoped_element(op)
                or (largest_operand, ())
            )
        if not through_stacks:
            return None
        if op.opcode in _SLICE_OR_STACK_INDEX:
            return op.operands[_SLICE_OR_STACK_INDEX[op.opcode]], ()
        if op.opcode in ("async-done", "async-update"):
            return op.operands[0], ()
        return self._slice_or_stack_element(op, index) if op.opcode in ("fusion", "async-start", "call") else None

    def _is_unchanged_element(self, name: str, index: int) -> bool:
        """Return whether a value is, unchanged, element number `index` of its computation's only parameter."""
        if name not in self.computation_and_op_by_name:
            return False
        computation, op = self.computation_and_op_by_name[name]
        op = computation.skip_back(op, ("bitcast", "copy"))
        if op.opcode != "get-tuple-element" or not op.attributes.lstrip(", ").startswith(f"index={index}"):
            return False
        return computation.instructions[op.operands[0]].opcode == "parameter"

    def _caller_operand(self, computation: Computation, op: Op, index: BufferIndex) -> Element | None:
        """Return the caller's operand for the parameter `op`; inside a loop, the result of the previous iteration."""
        caller_op = next((caller_op for _, caller_op in self.program.callers.get(computation.name, [])), None)
        if caller_op is None or caller_op.opcode not in ("while", "fusion", "call", "async-start"):
            return None
        return (caller_op.name if caller_op.opcode == "while" else caller_op.operands[int(op.operands[0])]), index

    def _last_scoped_element(self, fusion: Op) -> Element | None:
        """Return the last instruction with scopes inside a fusion; None if none of its instructions has scopes."""
        instructions = self.program.computations[callees(fusion.attributes)[0]].instructions
        scoped_names = [name for name, op in instructions.items() if self.op_name(name) and op.opcode != "constant"]
        return (scoped_names[-1], ()) if scoped_names else None

    def _slice_or_stack_element(self, op: Op, index: BufferIndex) -> Element | None:
        """Return the slice that an operation writes into a stack, or the stack from which the operation reads."""
        callee = self.program.computations[callees(op.attributes)[0]]
        root = callee.root
        if root is None:
            return None
        if root.opcode == "tuple" and index:
            root, index = callee.instructions[root.operands[index[0]]], index[1:]
        root = callee.skip_back(root, ("bitcast", "copy", "convert"))
        if root.opcode == "fusion":
            return self._slice_or_stack_element(root, index)
        if root.opcode not in _SLICE_OR_STACK_INDEX:
            return None
        slice_or_stack = callee.instructions[root.operands[_SLICE_OR_STACK_INDEX[root.opcode]]]
        return callee.skip_back(slice_or_stack, ("bitcast", "copy", "reshape", "convert")).name, ()
