"""The subcommand that shows pages of the documentation in the terminal, without a network."""

import dataclasses
import difflib
import sys
from pathlib import Path

import jaxscale
from jaxscale.cli.flags import word
from jaxscale.errors import UserError

_PACKAGE = Path(jaxscale.__file__).parent
_FOLDERS = (_PACKAGE / "_pages", _PACKAGE.parent / "docs")
"""Where the pages are: in an installed wheel, or in a checkout."""


@dataclasses.dataclass(frozen=True)
class Docs:
    """Show a page of the documentation, or list all pages.

    Messages name pages; any other word lists the pages that contain it.

    Args:
        page: name of a page, or a word to search for.
    """

    page: str | None = word("[PAGE]", None)

    def run(self) -> int:
        """Print the page or the list; returns the exit code."""
        pages = page_files()
        if self.page is None:
            listed = list(pages)
        elif self.page in pages:
            return _show(pages[self.page])
        else:
            needle = self.page.lower()
            in_name = [name for name in pages if needle in name.lower()]
            if len(in_name) == 1:
                return _show(pages[in_name[0]])
            listed = in_name or [name for name, file in pages.items() if needle in file.read_text("utf-8").lower()]
        if not listed:
            near_pages = difflib.get_close_matches(str(self.page), pages, n=1)
            suggestion = f"; did you mean {near_pages[0]!r}?" if near_pages else "; jaxscale docs lists all pages"
            raise UserError(f"no page is named {self.page!r} or contains it{suggestion}")
        for name in listed:
            print(f"{name:36} {_title(pages[name])}")
        return 0


def page_files() -> dict[str, Path]:
    """The file of each page, by the page's name."""
    for folder in _FOLDERS:
        if (folder / "index.md").exists():
            files = sorted(
                file for file in folder.rglob("*.md") if file.relative_to(folder).parts[0] not in ("api", "build")
            )
            return {file.relative_to(folder).with_suffix("").as_posix(): file for file in files}
    raise UserError(f"the pages are not installed: expected them in {_FOLDERS[0]}; install jaxscale again")


def _title(file: Path) -> str:
    """The first heading of a page."""
    lines = file.read_text("utf-8").splitlines()
    return next((line.lstrip("# ") for line in lines if line.startswith("# ")), file.stem)


def _show(file: Path) -> int:
    """Print a page, formatted if the output is a terminal; returns the exit code."""
    text = file.read_text("utf-8")
    if not sys.stdout.isatty():
        print(text, end="")
        return 0
    from rich.console import Console
    from rich.markdown import Markdown

    Console().print(Markdown(text))
    return 0
