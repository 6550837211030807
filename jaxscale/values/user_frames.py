"""Find the user's own code in a traceback or a function, and give advice on what to change there.

An error in a model, a score or a schedule arises hundreds of frames deep in JAX, Flax and jaxscale. Therefore, the
message begins with the user's line and a sentence about what to change.
"""

import functools
import linecache
import os
import re
import sysconfig
from pathlib import Path
from types import CodeType, FrameType, TracebackType
from typing import Any

from jaxscale.errors import near_argument, near_miss
from jaxscale.values.type_names import public_class

PACKAGE_FOLDERS = tuple(
    str(folder) + os.sep
    for folder in (
        Path(__file__).parents[1],
        Path(__file__).parents[2] / "pallas_kernels",
        *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
    )
)
"""Folders with code that is not the user's: jaxscale, its kernels, Python's library and installed packages."""
_NO_NUMBERS = "the step is traced once, without numbers"
_ADVICE_BY_ERROR = {
    "TracerBoolConversionError": f"{_NO_NUMBERS}, so Python's if, while, and, or and assert cannot read an array: "
    "choose with jnp.where or jax.lax.cond, loop with jax.lax.while_loop",
    "TracerArrayConversionError": f"{_NO_NUMBERS}, so NumPy cannot compute: call jnp instead of np",
    "TracerIntegerConversionError": f"{_NO_NUMBERS}, so an array cannot be a list's index, a range's end or a shape: "
    "index jnp.asarray(numbers)[i], loop with jax.lax.fori_loop",
    "ConcretizationTypeError": f"{_NO_NUMBERS}, so float(), int(), item() and math cannot read an array: compute with "
    "jnp",
    "NonConcreteBooleanIndexError": f"{_NO_NUMBERS}, so a mask selects an unknown number of elements: use "
    "jnp.where(mask, x, 0)",
    "UnexpectedTracerError": "an array of an earlier trace was kept in a list, a global or an attribute: return it "
    "instead",
    "TraceContextError": "a variable of a module is written inside a transformation of JAX that does not belong to it: "
    "use nnx.jit, nnx.grad or nnx.scan instead of that of jax",
}
"""Advice on what to change, by the name of the error's class."""


def frames_and_lines_of(trace: TracebackType | None) -> list[tuple[FrameType, int]]:
    """Return (frame, line number) for each frame of a traceback that is in the user's code."""
    frames_and_lines = []
    while trace is not None:
        if is_user_code(trace.tb_frame.f_code):
            frames_and_lines.append((trace.tb_frame, trace.tb_lineno))
        trace = trace.tb_next
    return frames_and_lines


def is_user_code(code: CodeType) -> bool:
    """Return whether code is the user's: it is in a file outside of installed packages, or in a notebook's cell."""
    file = code.co_filename
    is_there = os.path.exists(file) or (file in linecache.cache and not file.startswith("<"))
    return is_there and not os.path.abspath(file).startswith(PACKAGE_FOLDERS)


def shown_path(code: CodeType) -> str:
    """Return the path of a code object's file; relative to the working directory, if the file lies below it.

    For a cell of a notebook, return "a cell of the notebook".
    """
    file, folder = Path(code.co_filename), Path.cwd()
    if "ipykernel_" in str(file.parent):
        return "a cell of the notebook"
    return str(file.relative_to(folder) if file.is_relative_to(folder) else file)


def place_of(function: Any) -> str:
    """Return the file and first line of a user's function, as "FILE:LINE: "; "" if the function is not the user's.

    Args:
        function: a function, method, `functools.partial`, or another callable object.

    Example:
        >>> place_of(len), place_of(place_of)
        ('', '')
    """
    while isinstance(function, functools.partial):
        function = function.func
    function = getattr(function, "__func__", function)
    if not hasattr(function, "__code__"):
        function = vars(type(function)).get("__call__")
    code = getattr(function, "__code__", None)
    if code is None or not is_user_code(code):
        return ""
    return f"{shown_path(code)}:{code.co_firstlineno}: "


def place_in(error: BaseException) -> str:
    """Return the innermost line of the user's code in an error's traceback, as "FILE:LINE: "; "" if there is none."""
    frames_and_lines = frames_and_lines_of(error.__traceback__)
    if not frames_and_lines:
        return ""
    frame, line_number = frames_and_lines[-1]
    return f"{shown_path(frame.f_code)}:{line_number}: "


def advice_on(error: BaseException, frame: FrameType | None = None) -> str:
    """Return advice on an error, to append to its message; "" if nothing is known. The text begins with "; ".

    Args:
        error: the error.
        frame: the user's innermost frame. Its variables may explain the error.
    """
    advice = next(
        (_ADVICE_BY_ERROR[cls.__name__] for cls in type(error).__mro__ if cls.__name__ in _ADVICE_BY_ERROR), ""
    )
    if advice:
        return f"; {advice}"
    if isinstance(error, ModuleNotFoundError):
        return "; install it, or put its file beside this one"
    if isinstance(error, TypeError) and (match := _UNEXPECTED_ARGUMENT.search(str(error))):
        return near_argument(match[2], getattr(public_class(match[1]), "__dataclass_fields__", {}))
    if "subdtype of <class 'numpy.integer'>" in str(error):
        return "; labels are whole numbers: give them as y.astype('int32')"
    if "assigned to static attribute" in str(error):
        return "; keep several layers in nnx.List([...]) or nnx.Dict(...), and other arrays in nnx.Variable(...)"
    if frame is None:
        return ""
    if "is not a valid JAX array type" in str(error):
        return _advice_on_items(frame)
    if isinstance(error, NameError):
        return _advice_on_name(error.name or "", frame)
    if isinstance(error, AttributeError):
        return _advice_on_attribute(error, frame)
    return ""


_UNEXPECTED_ARGUMENT = re.compile(r"^(\w+)\.__init__\(\) got an unexpected keyword argument '(\w+)'")


def _advice_on_name(name: str, frame: FrameType) -> str:
    """Return a suggestion for an undefined name, to append to an error; "" if no name is similar."""
    if hasattr(frame.f_locals.get("self"), name):
        return f"; did you mean 'self.{name}'?"
    return near_miss(name, [*frame.f_locals, *frame.f_globals])


def _advice_on_attribute(error: AttributeError, frame: FrameType) -> str:
    """Return a suggestion for an attribute that does not exist, to append to an error; "" if nothing is known."""
    variable_names = [name for name, value in frame.f_locals.items() if value is error.obj]
    if variable_names and error.obj is None:
        return f"; {variable_names[0]} is None: a call that gave it returns nothing"
    if variable_names and isinstance(error.obj, tuple | list):
        return _advice_on_items(frame)
    if "did you mean" in str(error):
        return ""
    return near_miss(error.name or "", [name for name in dir(error.obj) if not name.startswith("_")])


def _advice_on_items(frame: FrameType) -> str:
    """Return advice on the first tuple or list in a frame, where an array was expected; "" if there is none."""
    for name, value in frame.f_locals.items():
        if isinstance(value, tuple | list):
            return f"; {name} is a {type(value).__name__} of {len(value)}: take one of its items"
    return ""


def add_place(error: BaseException) -> None:
    """Add the user's line to an error as a note. Python prints the note at the end of the long traceback.

    Example:
        >>> error = ValueError("no line of the user's")
        >>> add_place(error)
        >>> hasattr(error, "__notes__")
        False
    """
    frames_and_lines = frames_and_lines_of(error.__traceback__)
    if frames_and_lines:
        error.add_note(
            f"in your code: {place_in(error)}{type(error).__name__}{advice_on(error, frames_and_lines[-1][0])}"
        )
