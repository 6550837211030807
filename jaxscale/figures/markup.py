"""HTML and SVG as text. Text that is not `Markup` is escaped, so names in a run's files never become tags."""

from collections.abc import Callable, Container, Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any

from jaxscale.errors import UserError

_WITHOUT_CONTENT = ("meta", "input", "rect", "path", "line", "circle", "polyline", "wbr")


class Markup(str):
    """Text that is already HTML or SVG."""

    __slots__ = ()


def joined(children: Any) -> Markup:
    """Return children as one markup. A child is a text, markup, a number, `None` (empty), or an iterable of these.

    Example:
        >>> joined(["a < b", Markup("<br>"), None, 3])
        'a &lt; b<br>3'
    """
    if isinstance(children, Markup):
        return children
    if children is None or isinstance(children, str | int | float):
        return Markup("" if children is None else escape(str(children)))
    return Markup("".join(map(joined, children)))


def element(tag: str, *children: Any, **attributes: Any) -> Markup:
    """Return an element of a page or an image.

    Args:
        tag: name of the element.
        children: contents of the element, of any type that `joined` accepts.
        attributes: attributes by name. In a name, `_` stands for `-`, and a final `_` is dropped (`class_`). A float is
            written with up to 2 decimals. An attribute with the value `None` is left out.

    Example:
        >>> element("td", "a < b", class_="n"), element("rect", x=1 / 3, width=2.0)
        ('<td class="n">a &lt; b</td>', '<rect x="0.33" width="2"/>')
    """
    opening_tag = tag
    for name, value in attributes.items():
        if value is not None:
            text = f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else escape(str(value))
            opening_tag += f' {name.rstrip("_").replace("_", "-")}="{text}"'
    if tag in _WITHOUT_CONTENT and not any(children):
        return Markup(f"<{opening_tag}/>")
    return Markup(f"<{opening_tag}>{joined(children)}</{tag}>")


def table(
    rows: Iterable[Sequence[Any]],
    headings: Sequence[str] = (),
    *,
    numeric: Container[int] = (),
    name_column: int = 0,
    extra_rows: Iterable[Sequence[Any]] = (),
    class_: str | None = None,
) -> Markup:
    """Return an HTML table.

    Args:
        rows: cells of each row, of any type that `joined` accepts.
        headings: titles of the columns; if empty, the table has no head.
        numeric: indices of the right-aligned columns.
        name_column: index of the column that names the rows.
        extra_rows: cells of further rows at the end, which are less prominent, such as a row of sums.
        class_: CSS class of the table.
    """

    def row(cells: Sequence[Any], row_class: str | None = None) -> Markup:
        """Return a table row with these cells. `row_class` is the row's CSS class, or `None`."""
        cell_elements = [
            element("th", cell, scope="row")
            if column == name_column
            else element("td", cell, class_="n" if column in numeric else None)
            for column, cell in enumerate(cells)
        ]
        return element("tr", cell_elements, class_=row_class)

    title_cells = [
        element("th", title, class_="n" if column in numeric else None) for column, title in enumerate(headings)
    ]
    head = element("thead", element("tr", title_cells)) if headings else None
    body = element("tbody", map(row, rows), [row(cells, "rest") for cells in extra_rows])
    return element("table", head, body, class_=class_)


STYLE = (
    ":root{color-scheme:light dark}body{font:15px/1.5 system-ui,sans-serif;max-width:1100px;margin:2rem auto;"
    "padding:0 1rem}svg{width:100%;height:auto}pre{white-space:pre-wrap;line-height:1.35}p{margin:.1rem 0}"
    "table{border-collapse:collapse;display:block;overflow-x:auto;margin:1rem 0}td,th{padding:.15rem .7rem;"
    "text-align:left;border-bottom:1px solid #8883}th[scope]{font-weight:400}"
    ".n{text-align:right;white-space:nowrap;font-variant-numeric:tabular-nums}"
)
"""CSS of a plain page."""


def page(title: str, *body: Any, style: str = STYLE, script: str | None = None) -> str:
    """Return a self-contained HTML page.

    Args:
        title: title of the page, as plain text.
        body: contents of the page, of any type that `joined` accepts.
        style: CSS of the page.
        script: JavaScript that runs at the end; `None` for no script.
    """
    head = (
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("title", title),
        element("style", Markup(style)),
    )
    script_element = None if script is None else element("script", Markup(script))
    return (
        f"<!doctype html>{element('html', element('head', head), element('body', body, script_element), lang='en')}\n"
    )


def framed(html: str, height: int) -> str:
    """Return a page in a frame for notebooks, so that the page's style does not affect the notebook.

    Example:
        >>> framed("<p>", 100)
        '<iframe srcdoc="&lt;p&gt;" style="width:100%;height:100px;border:0"></iframe>'
    """
    return element("iframe", srcdoc=html, style=f"width:100%;height:{height}px;border:0")


def write_figure(path: str | Path, make_svg: Callable[[], str], make_html: Callable[[], str]) -> None:
    """Write a figure to a file: the result of `make_svg` if the file's name ends in .svg, or else of `make_html`.

    Raises:
        UserError: the file cannot be written.
    """
    write_text(path, make_svg() if Path(path).suffix == ".svg" else make_html())


def write_text(path: str | Path, text: str) -> None:
    """Write a text to a file.

    Raises:
        UserError: the file cannot be written.
    """
    try:
        Path(path).write_text(text, encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}; give another path") from error
    except ValueError as error:  # a NUL, or half of a surrogate pair
        raise UserError(f"{path} cannot be the name of a file ({error}); give another path") from None
