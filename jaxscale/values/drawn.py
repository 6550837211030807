"""The picture of a value in a notebook: a class has `_repr_html_ = drawn`, as it may have `__repr__ = short_repr`.

The pictures are those of the report, which lies above all rooms that define values. The report is loaded by name when
a notebook first asks for a picture, so that a value imports nothing.
"""

import importlib
from typing import Any

_DRAWINGS = "jaxscale.report.notebook"


def drawn(self: Any) -> str | None:
    """Return the value's picture as HTML; `None` if it has none, so that a notebook shows the value's text.

    The picture is optional: an error while it is drawn never stops a notebook's cell.

    Example:
        >>> from jaxscale.sharding.mesh import MeshSpec
        >>> drawn(MeshSpec(fsdp=4)).startswith("<iframe")
        True
    """
    try:
        return importlib.import_module(_DRAWINGS).html_of(self)
    except Exception:
        return None
