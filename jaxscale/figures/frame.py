"""Charts as SVG images, in colors for light and dark mode: elements, and a frame that maps values to coordinates."""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar

from jaxscale.figures.markup import Markup, element, joined

COLORS = (
    "#4e79a7", "#59a14f", "#9c755f", "#bab0ac", "#76b7b2", "#f28e2b", "#e15759", "#b07aa1", "#edc948", "#ff9da7",
)  # fmt: skip
"""The ten colors of Tableau."""

PER_LETTER = 6.6
"""Average width of a letter, in units of the image."""

_STYLE = (
    ".grid{stroke:#8884;stroke-width:1}.limit{stroke:#e15759;stroke-width:1.5;stroke-dasharray:6 4}"
    ".turn{stroke:#888;stroke-width:1;stroke-dasharray:2 4}"
)


def svg(width: float, height: float, label: str, *elements: Any, style: str = _STYLE) -> Markup:
    """Return an SVG image that consists of the given elements.

    Args:
        width: width in units of the image; a unit is a pixel on a wide screen.
        height: height in units of the image.
        label: description of the image, for screen readers.
        elements: elements of the image.
        style: CSS for the elements' classes.
    """
    return element(
        "svg",
        element("style", Markup(style)),
        elements,
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {width:.0f} {height:.0f}",
        role="img",
        aria_label=label,
        font_family="system-ui, sans-serif",
        font_size=12,
        fill="#777",
    )


def svg_text(x: float, y: float, content: Any, anchor: str | None = None, **attributes: Any) -> Markup:
    """Return a text element. `anchor` is the part of the text at the point (x, y): "start", "middle" or "end"."""
    return element("text", content, x=float(x), y=float(y), text_anchor=anchor, **attributes)


def dot(x: float, y: float, radius: float, color: str, tooltip: str | None = None) -> Markup:
    """Return a filled circle around the point (x, y), with an optional tooltip."""
    return element("circle", tooltip and element("title", tooltip), cx=float(x), cy=float(y), r=radius, fill=color)


def legend(
    entries: Iterable[tuple[dict[str, str], str]], left: float, top: float, right: float
) -> tuple[Markup, float]:
    """Return a legend of colored squares and their meanings, in rows from `left` to `right`, and the legend's height.

    Args:
        entries: (attributes, meaning) of each square. The attributes are SVG attributes, such as `fill`.
        left: x of the start of each row.
        top: y of the first row.
        right: x of the end of each row.
    """
    elements, x, y = [], left, top
    for attributes, meaning in entries:
        width = 32 + PER_LETTER * len(meaning)
        if x > left and x + width > right:
            x, y = left, y + 20
        elements += [element("rect", x=float(x), y=float(y), width=12, height=12, **attributes)]
        elements += [svg_text(x + 17, y + 10, meaning)]
        x += width
    return joined(elements), y + 20 - top


@dataclasses.dataclass(frozen=True)
class Frame:
    """The mapping from values on two axes to coordinates in an image, in units of the image.

    Args:
        x_range: lowest and highest value of the horizontal axis.
        y_range: lowest and highest value of the vertical axis.
        right: width of the right margin, in units of the image.

    The attributes `width` and `height`, and the margins `left`, `top` and `bottom`, are also in units of the image.
    """

    x_range: tuple[float, float]
    y_range: tuple[float, float]
    right: float = 16
    width: ClassVar[int] = 960
    height: ClassVar[int] = 380
    left: ClassVar[int] = 86
    top: ClassVar[int] = 16
    bottom: ClassVar[int] = 40

    def x_of(self, value: float) -> float:
        """Return the x coordinate of a value on the horizontal axis, in units of the image."""
        low, high = self.x_range
        return self.left + (self.width - self.left - self.right) * (value - low) / (high - low)

    def y_of(self, value: float) -> float:
        """Return the y coordinate of a value on the vertical axis, in units of the image."""
        low, high = self.y_range
        return self.height - self.bottom - (self.height - self.top - self.bottom) * (value - low) / (high - low)

    def grid(self, values: Iterable[float], format_value: Callable[[float], str]) -> Markup:
        """Return grid lines at values on the vertical axis, each with its tick label `format_value(value)`."""
        lines_and_texts = [
            (self.level(value, "grid"), svg_text(self.left - 8, self.y_of(value) + 4, format_value(value), "end"))
            for value in values
        ]
        return joined(lines_and_texts)

    def labels(self, values: Iterable[float], format_value: Callable[[float], str]) -> Markup:
        """Return tick labels `format_value(value)` at values on the horizontal axis."""
        y = self.height - self.bottom + 16
        return joined([svg_text(self.x_of(value), y, format_value(value), "middle") for value in values])

    def title(self, text: str) -> Markup:
        """Return the title of the horizontal axis."""
        return svg_text((self.left + self.width - self.right) / 2, self.height - 4, text, "middle")

    def level(self, value: float, class_: str) -> Markup:
        """Return a horizontal line at a value on the vertical axis."""
        y = self.y_of(value)
        return element("line", class_=class_, x1=self.left, x2=self.width - self.right, y1=y, y2=y)

    def rule(self, value: float, class_: str) -> Markup:
        """Return a vertical line at a value on the horizontal axis."""
        x = self.x_of(value)
        return element("line", class_=class_, x1=x, x2=x, y1=self.top, y2=self.height - self.bottom)

    def area(
        self, xs: Sequence[float], lower_ys: Sequence[float], upper_ys: Sequence[float], color: str, name: str
    ) -> Markup:
        """Return the filled area between two curves that have the same values on the horizontal axis."""
        outline_points = [*zip(xs, upper_ys, strict=True), *reversed([*zip(xs, lower_ys, strict=True)])]
        path_data = " L".join(f"{self.x_of(x):.1f},{self.y_of(y):.1f}" for x, y in outline_points)
        return element("path", element("title", name), d=f"M{path_data}Z", fill=color)
