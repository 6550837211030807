"""Write the pages of the API from `__all__`: one for jaxscale, and one for each of its public packages.

python docs/make_api.py          writes docs/api/*.md
"""

import importlib
import inspect
from pathlib import Path

import jaxscale

FOLDER = Path(__file__).with_name("api")
PACKAGES = ("jaxscale", *(f"jaxscale.{name}" for name in jaxscale._WINGS))


def page(package: str) -> str:
    """The text of a package's page: its first sentence, then each public name with its signature and docstring."""
    module = importlib.import_module(package)
    title = (inspect.getdoc(module) or "").split("\n\n")[0]
    parts = [f"# {package}\n\n{title}\n"]
    for name in module.__all__:
        value = getattr(module, name)
        if inspect.isclass(value) or inspect.isroutine(value):
            parts.append(f"::: {package}.{name}\n")
        elif inspect.ismodule(value):
            summary = (inspect.getdoc(value) or "").split("\n\n")[0]
            parts.append(f"## {name} {{ #{package}.{name} }}\n\nA module: {summary}\n")
        elif name != "__version__":
            parts.append(f"## {name} {{ #{package}.{name} }}\n\nA constant of type `{type(value).__name__}`.\n")
    return "\n".join(parts)


def pages() -> dict[str, str]:
    """The text of each page, by the name of its file."""
    return {f"{package}.md": page(package) for package in PACKAGES}


def main() -> None:
    """Write the pages."""
    FOLDER.mkdir(exist_ok=True)
    for name, text in pages().items():
        (FOLDER / name).write_text(text, "utf-8")


if __name__ == "__main__":
    main()
