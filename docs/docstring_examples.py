"""An extension of griffe, the reader of docstrings for the pages of the API: it renames our section Example."""

import re
from typing import Any

import griffe


class ExampleSections(griffe.Extension):
    """Rename the section `Example:` to `Examples:`, which griffe's parser reads."""

    def on_object(self, *, obj: Any, **_: Any) -> None:
        """Rename the section in the docstring of an object."""
        if obj.docstring is not None:
            obj.docstring.value = re.sub(r"^(\s*)Example:$", r"\1Examples:", obj.docstring.value, flags=re.MULTILINE)
