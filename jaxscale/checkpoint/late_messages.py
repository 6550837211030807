"""Drops the late messages of TensorStore's threads about a read or save that has failed.

The error of the read or save has already been raised. TensorStore's other reads and writes end later, in their own
threads, and log that nothing waits for them any more.
"""

import dataclasses
import logging
import sys
from typing import Any


def drop_late_messages() -> None:
    """Drop these messages from now on; further calls have no effect."""
    logging.getLogger("asyncio").addFilter(_is_not_abandoned)
    sys.unraisablehook = _LateHook.around(sys.unraisablehook)


@dataclasses.dataclass(frozen=True)
class _LateHook:
    """A `sys.unraisablehook` that drops the error of a thread that finds the event loop closed.

    Args:
        hook: the hook for all other errors.
    """

    hook: Any

    @classmethod
    def around(cls, hook: Any) -> "_LateHook":
        """Return a hook that passes other errors to `hook`; return `hook` itself if it is a `_LateHook` already."""
        return hook if isinstance(hook, cls) else cls(hook)

    def __call__(self, unraisable: Any) -> None:
        error = unraisable.exc_value
        if not (isinstance(error, RuntimeError) and str(error) == "Event loop is closed"):
            self.hook(unraisable)


def _is_not_abandoned(record: Any) -> bool:
    """Return whether to log a record; records about failed reads whose errors were never retrieved are dropped."""
    return "never retrieved" not in record.getMessage()
