"""The picture of a value in a notebook. A class uses it as `_repr_html_ = drawn`.

The package `report` draws the pictures. It depends on the packages that define the values, so these cannot import it.
It is therefore loaded by name when a notebook first asks for a picture.
"""

import importlib
from typing import Any

_DRAWINGS = "jaxscale.report.notebook"


def drawn(self: Any) -> str | None:
    """Return the value's picture as HTML; `None` if it has no picture, so that a notebook shows the value's text.

    If drawing the picture raises an error, the result is also `None`, so that a notebook's cell never fails.

    Example:
        >>> from jaxscale.sharding.mesh import MeshSpec
        >>> drawn(MeshSpec(fsdp=4)).startswith("<iframe")
        True
    """
    try:
        return importlib.import_module(_DRAWINGS).html_of(self)
    except Exception:
        return None
