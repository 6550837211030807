"""The example experiments of the package, which commands find by name: `jaxscale train shakespeare`."""

from pathlib import Path

from jaxscale.values.read_files import is_regular

_PACKAGE = Path(__file__).parents[1]
_FOLDERS = (_PACKAGE / "_experiments", _PACKAGE.parent / "experiments")
"""Folders that may hold the examples: the first in an installed wheel, the second in a checkout."""


def example_names() -> list[str]:
    """Return the names of the examples."""
    folder = next((folder for folder in _FOLDERS if folder.is_dir()), None)
    files = [] if folder is None else sorted(folder.glob("*.py"))
    return [file.stem for file in files if "\ndef experiment(" in file.read_text("utf-8")]


def example_file(path: str | Path) -> Path | None:
    """Return the file of an example, given its name or its path in the repository; `None` if there is no such example.

    Args:
        path: a name, such as "shakespeare", or "experiments/shakespeare.py".

    Example:
        >>> example_file("shakespeare").name, example_file("no_such_example"), example_file("other/shakespeare.py")
        ('shakespeare.py', None, None)
    """
    path_parts = Path(path).with_suffix("").parts if Path(path).suffix == ".py" else Path(path).parts
    name = path_parts[-1] if path_parts else ""
    if path_parts not in ((name,), ("experiments", name)) or (path_parts == (name,) and Path(path).suffix):
        return None
    files = (folder / f"{name}.py" for folder in _FOLDERS)
    return next((file for file in files if is_regular(file)), None)
