"""Errors in the user's own code: the model, the score, the data, a schedule or a callback in the experiment's file.

Between the user's frames lie hundreds of JAX, Flax and jaxscale. This module reports the error at the user's line, with
the shapes of the function's arrays, and then the user's frames alone.
"""

import os
import reprlib
import sysconfig
import traceback
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

VARIABLE = "JAXSCALE_TRACEBACK"
"""Environment variable; with the value "full" an error keeps its whole traceback."""
PACKAGE_FOLDERS = tuple(
    str(folder) + os.sep
    for folder in (
        Path(__file__).parents[1],
        Path(__file__).parents[2] / "pallas_kernels",
        *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
    )
)
"""Folders whose code is not the user's: jaxscale, its kernels, Python's library and installed packages."""


def report(error: BaseException) -> str | None:
    """Return a report on an error that arose in the user's code; `None` if no frame of the traceback is the user's.

    Args:
        error: the error, with its traceback.
    """
    frames = _user_frames(error.__traceback__)
    if not frames or os.environ.get(VARIABLE) == "full":
        return None
    frame, line = frames[-1]
    message = f"{type(error).__name__}: {error}".partition("\n-----")[0]  # JAX adds a line on its own frames
    entries = traceback.StackSummary.extract((frame, line) for frame, line in frames)
    return (
        f"{_shown_path(frame)}:{line}: {message}\n"
        f"  in {_call_text(frame)}\n"
        f"Calls in your code, the last one at the end ({VARIABLE}=full shows all):\n{''.join(entries.format())}"
    ).rstrip()


def _user_frames(trace: TracebackType | None) -> list[tuple[FrameType, int]]:
    """Return the frames of the user's code in a traceback, with the number of the line that each was at."""
    frames = []
    while trace is not None:
        file = os.path.abspath(trace.tb_frame.f_code.co_filename)
        if not file.startswith(PACKAGE_FOLDERS) and os.path.exists(file):
            frames.append((trace.tb_frame, trace.tb_lineno))
        trace = trace.tb_next
    return frames


def _shown_path(frame: FrameType) -> str:
    """Return the file of a frame, relative to the current folder if it is in there."""
    file, folder = Path(frame.f_code.co_filename), Path.cwd()
    return str(file.relative_to(folder) if file.is_relative_to(folder) else file)


def _call_text(frame: FrameType) -> str:
    """Return the call of a frame's function: its name, and its arguments and other variables as text."""
    code = frame.f_code
    argument_names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    arguments_text = ", ".join(
        f"{name}: {_value_text(frame.f_locals[name])}" for name in argument_names if name in frame.f_locals
    )
    arrays_text = ", ".join(
        f"{name}: {_value_text(value)}"
        for name, value in frame.f_locals.items()
        if name not in argument_names and _is_array(value)
    )
    return f"{code.co_qualname}({arguments_text})" + (f", where {arrays_text}" if arrays_text else "")


def _is_array(value: Any) -> bool:
    """Return whether a value has a shape and a dtype."""
    return isinstance(getattr(value, "shape", None), tuple) and hasattr(value, "dtype")


def _value_text(value: Any) -> str:
    """Return a value as text: the dtype and shape of an array, the arrays of a dict, the type of another object."""
    if _is_array(value):
        return f"{value.dtype}[{','.join(map(str, value.shape))}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key!r}: {_value_text(value[key])}" for key in list(value)[:6]) + "}"
    return reprlib.repr(value) if value is None or isinstance(value, int | float | str) else type(value).__name__
