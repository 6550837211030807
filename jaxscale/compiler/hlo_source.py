"""Source lines of a compiled program's instructions, from the stack frames that XLA records.

The head of a program's text lists files, functions, locations and frames; an instruction names its innermost frame. An
operation inside modules (classes with a `__call__`) is described by the chain of the modules' names, from the outermost
to the innermost; any other operation, by the names of the two innermost functions. Left out: functions inside
functions, and names that begin with an underscore.
"""

import re

from jaxscale.compiler.hlo_program import Op

MAX_SHOWN_MODULES = 4
"""Maximum number of modules of a chain that are shown: the innermost modules."""

# frames of the caller of a program
_OUTSIDE = re.compile(r"/(pluggy|_pytest|IPython|ipykernel|absl)/|/jaxscale/compiler/compile(_child)?\.py$|/runpy\.py$")


class Sources:
    """The stack frames of a program's instructions.

    Args:
        text: text of the program, with its tables of files, functions, locations and frames.
    """

    def __init__(self, text: str) -> None:
        tables_text = text[: text.find("\n%")]
        # rows by number, as texts: (file,), (function,), (file number, function number, line),
        # (location number, parent's number + 1)
        file_rows = _table(tables_text, "FileNames", r'(\d+) "(.*)"')
        function_rows = _table(tables_text, "FunctionNames", r'(\d+) "(.*)"')
        location_rows = _table(
            tables_text, "FileLocations", r"(\d+) \{file_name_id=(\d+) function_name_id=(\d+) line=(\d+)"
        )
        frame_rows = _table(tables_text, "StackFrames", r"(\d+) \{file_location_id=(\d+) parent_frame_id=(\d+)")
        self._location_by_number = {
            number: (file_rows.get(file, ("",))[0], function_rows.get(function, ("",))[0], line)
            for number, (file, function, line) in location_rows.items()
        }
        # `parent_frame_id` is the parent's number plus 1; an outermost frame has 1
        self._frame_by_number = {
            number: (location, str(int(parent) - 1)) for number, (location, parent) in frame_rows.items()
        }

    def module_names(self, op: Op) -> tuple[str, ...]:
        """Return the names of an instruction's modules or, without modules, its last two functions, outermost first."""
        module_names, function_names = [], []
        for _, function, _ in self._stack(op):
            if module_match := re.search(r"(?:^|\.)(\w+)\.__call__$", function):
                if module_match[1] not in module_names[-1:]:
                    module_names.append(module_match[1])
            elif re.fullmatch(r"[A-Za-z]\w*", function):
                function_names.append(function)
        return tuple(reversed(module_names[:MAX_SHOWN_MODULES] or function_names[:2]))

    def file_and_line(self, op: Op) -> str | None:
        """Return the file and line of the call of an instruction's innermost module; without modules, its own line."""
        stack = self._stack(op)
        module_index = next((i for i, (_, function, _) in enumerate(stack) if function.endswith(".__call__")), None)
        if not stack:
            return None
        shown_index = 0 if module_index is None else min(module_index + 1, len(stack) - 1)
        # if no other module calls it, its line is more useful than that of its caller
        if module_index is not None and not stack[shown_index][1].endswith(".__call__"):
            shown_index = module_index
        file, _, line = stack[shown_index]
        return f"{'/'.join(file.split('/')[-2:])}:{line}"

    def _stack(self, op: Op) -> list[tuple[str, str, str]]:
        """Return a tuple (file, function, line) for each stack frame of an instruction, innermost first."""
        frame_number, stack = op.attribute(r"stack_frame_id=(\d+)") or "0", []
        while frame_number in self._frame_by_number:
            location_number, frame_number = self._frame_by_number[frame_number]
            frame = self._location_by_number.get(location_number, ("", "", ""))
            if _OUTSIDE.search(frame[0]):
                break
            stack.append(frame)
        return stack


def _table(tables_text: str, name: str, row_pattern: str) -> dict[str, tuple[str, ...]]:
    """Return the fields of each row of the table `name`, by the row's number, from the head of a program's text."""
    start = tables_text.find(f"\n{name}\n")
    lines = tables_text[start + len(name) + 2 :].split("\n\n")[0].splitlines() if start >= 0 else []
    matches = (re.match(row_pattern, line) for line in lines)
    return {match[1]: match.groups()[1:] for match in matches if match}
