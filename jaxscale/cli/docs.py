"""The subcommand `docs`, which shows pages of the documentation in the terminal, without a network."""

import dataclasses
import difflib
import sys
from pathlib import Path

import jaxscale
from jaxscale.cli.flags import word
from jaxscale.errors import UserError

_PACKAGE = Path(jaxscale.__file__).parent
_PAGE_FOLDERS = (_PACKAGE / "_pages", _PACKAGE.parent / "docs")
"""Folders that may hold the pages: the first in an installed wheel, the second in a checkout."""


@dataclasses.dataclass(frozen=True)
class Docs:
    """Show a page of the documentation, or list all pages.

    If exactly one name matches, its page is shown; otherwise, pages are listed.

    Error messages refer to pages by name.

    Args:
        page: name of a page, or a word to search for.
    """

    page: str | None = word("[PAGE]", None)

    def run(self) -> int:
        """Print the page or a list of pages, and return the exit code."""
        file_by_page = page_files()
        if self.page is None:
            page_names = list(file_by_page)
        elif self.page in file_by_page:
            return _show(file_by_page[self.page])
        else:
            search_word = self.page.lower()
            page_names = [name for name in file_by_page if search_word in name.lower()]
            if len(page_names) == 1:
                return _show(file_by_page[page_names[0]])
            if not page_names:
                names_and_texts = ((name, file.read_text("utf-8").lower()) for name, file in file_by_page.items())
                page_names = [name for name, text in names_and_texts if search_word in text]
        if not page_names:
            similar_names = difflib.get_close_matches(str(self.page), file_by_page, n=1)
            suggestion = f"; did you mean {similar_names[0]!r}?" if similar_names else "; jaxscale docs lists all pages"
            raise UserError(f"no page is named {self.page!r} or contains this word{suggestion}")
        for name in page_names:
            print(f"{name:36} {_title(file_by_page[name])}")
        return 0


def page_files() -> dict[str, Path]:
    """Return the file of each page, by the name of the page."""
    for folder in _PAGE_FOLDERS:
        if (folder / "index.md").exists():
            files = sorted(
                file for file in folder.rglob("*.md") if file.relative_to(folder).parts[0] not in ("api", "build")
            )
            return {file.relative_to(folder).with_suffix("").as_posix(): file for file in files}
    raise UserError(f"the pages are not installed: expected them in {_PAGE_FOLDERS[0]}; install jaxscale again")


def _title(file: Path) -> str:
    """Return the first heading of a page, or the file's name if there is no heading."""
    lines = file.read_text("utf-8").splitlines()
    return next((line.lstrip("# ") for line in lines if line.startswith("# ")), file.stem)


def _show(file: Path) -> int:
    """Print a page, formatted if the output is a terminal, and return the exit code 0."""
    text = file.read_text("utf-8")
    if not sys.stdout.isatty():
        print(text, end="")
        return 0
    from rich.console import Console
    from rich.markdown import Markdown

    Console().print(Markdown(text))
    return 0
