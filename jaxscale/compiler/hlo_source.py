"""Source lines of a compiled program's instructions, from the stack frames that XLA records.

The head of a program's text lists files, functions, places and frames; an instruction names its innermost frame. An
operation of modules (classes that are called) is described by the chain of their names, from the outside to the inside;
one of functions by the last two. Left out: functions inside functions, and names that begin with an underscore.
"""

import re

from jaxscale.compiler.hlo_program import Op

SHOWN = 4
"""Number of modules shown of a chain: the innermost ones."""

# frames of the caller of a program
_OUTSIDE = re.compile(r"/(pluggy|_pytest|IPython|ipykernel|absl)/|/jaxscale/compiler/compile(_child)?\.py$|/runpy\.py$")


class Sources:
    """The stack frames of a program.

    Args:
        text: of the program, with its tables.
    """

    def __init__(self, text: str) -> None:
        head = text[: text.find("\n%")]
        files = _table(head, "FileNames", r'(\d+) "(.*)"')
        functions = _table(head, "FunctionNames", r'(\d+) "(.*)"')
        locations = _table(head, "FileLocations", r"(\d+) \{file_name_id=(\d+) function_name_id=(\d+) line=(\d+)")
        frames = _table(head, "StackFrames", r"(\d+) \{file_location_id=(\d+) parent_frame_id=(\d+)")
        self._places = {
            number: (files.get(file, ("",))[0], functions.get(function, ("",))[0], line)
            for number, (file, function, line) in locations.items()
        }
        # the parent is counted from 1: frame 1 has parent 1, none
        self._frames = {number: (location, str(int(parent) - 1)) for number, (location, parent) in frames.items()}

    def module_names(self, op: Op) -> tuple[str, ...]:
        """Names of the modules that an instruction belongs to, from the outside; else of its last two functions."""
        modules, functions = [], []
        for _, function, _ in self._stack(op):
            if called := re.search(r"(?:^|\.)(\w+)\.__call__$", function):
                if called[1] not in modules[-1:]:
                    modules.append(called[1])
            elif re.fullmatch(r"[A-Za-z]\w*", function):
                functions.append(function)
        return tuple(reversed(modules[:SHOWN] or functions[:2]))

    def place(self, op: Op) -> str | None:
        """File and line where the innermost module is called; without a module, of the instruction itself."""
        stack = self._stack(op)
        inner = next((n for n, (_, function, _) in enumerate(stack) if function.endswith(".__call__")), None)
        if not stack:
            return None
        outer = 0 if inner is None else min(inner + 1, len(stack) - 1)
        # if no other module calls it, its line is more useful than that of its caller
        if inner is not None and not stack[outer][1].endswith(".__call__"):
            outer = inner
        file, _, line = stack[outer]
        return f"{'/'.join(file.split('/')[-2:])}:{line}"

    def _stack(self, op: Op) -> list[tuple[str, str, str]]:
        """(file, function, line) of each frame, from the innermost."""
        number, stack = op.attribute(r"stack_frame_id=(\d+)") or "0", []
        while number in self._frames:
            location, number = self._frames[number]
            frame = self._places.get(location, ("", "", ""))
            if _OUTSIDE.search(frame[0]):
                break
            stack.append(frame)
        return stack


def _table(head: str, name: str, row: str) -> dict[str, tuple[str, ...]]:
    """Rows of one table by their number."""
    start = head.find(f"\n{name}\n")
    lines = head[start + len(name) + 2 :].split("\n\n")[0].splitlines() if start >= 0 else []
    matches = (re.match(row, line) for line in lines)
    return {match[1]: match.groups()[1:] for match in matches if match}
