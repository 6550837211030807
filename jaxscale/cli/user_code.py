"""Errors in the user's own code: the model, the score, the data, a schedule or a callback in the experiment's file.

A traceback has hundreds of frames of JAX, Flax and jaxscale between the user's frames. This module reports the user's
line of an error, with the shapes of the function's arrays, and then only the user's frames.
"""

import os
import reprlib
import traceback
from types import FrameType
from typing import Any

from jaxscale.values.user_frames import advice_on, frames_and_lines_of, shown_path

VARIABLE = "JAXSCALE_TRACEBACK"
"""Environment variable. With the value "full", an error keeps its whole traceback."""


def report(error: BaseException) -> str | None:
    """Return a report on an error in the user's code; `None` if no frame of the traceback is in the user's code.

    Args:
        error: the error, with its traceback.
    """
    frames_and_lines = frames_and_lines_of(error.__traceback__)
    if not frames_and_lines or os.environ.get(VARIABLE) == "full":
        return None
    frame, line_number = frames_and_lines[-1]
    error_text = str(error).partition("\n-----")[0]  # JAX adds a line about its own frames
    first_line, line_break, other_lines = f"{type(error).__name__}: {error_text}".partition("\n")
    message = f"{first_line.rstrip(' .')}{advice_on(error, frame)}{line_break}{other_lines}"
    stack_summary = traceback.StackSummary.extract((frame, line_number) for frame, line_number in frames_and_lines)
    return (
        f"{shown_path(frame.f_code)}:{line_number}: {message}\n"
        f"  in {_call_text(frame)}\n"
        f"Calls in your code, the last one at the end ({VARIABLE}=full shows all):\n{''.join(stack_summary.format())}"
    ).rstrip()


def _call_text(frame: FrameType) -> str:
    """Return a text about the call that a frame belongs to: the function's name, its arguments, and its arrays."""
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
    """Return a short text for a value: dtype and shape of an array, entries of a dict, a scalar, or else the type."""
    if _is_array(value):
        return f"{value.dtype}[{','.join(map(str, value.shape))}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key!r}: {_value_text(value[key])}" for key in list(value)[:6]) + "}"
    return reprlib.repr(value) if value is None or isinstance(value, int | float | str) else type(value).__name__
