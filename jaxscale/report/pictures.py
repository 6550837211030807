"""Draw a run's layout as HTML: the mesh of devices, the shards of parameters, and the memory by kind of tensor.

Colours are numbers of the page's palette. Axis sizes are the number of devices along each mesh axis, by its name.
"""

import math
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxscale.figures.markup import Markup, element, joined, table
from jaxscale.values.units import count, size

_MOST_DRAWN = 8
"""Largest number of devices drawn along an axis; a longer axis is drawn with a gap."""

_AXIS_COLORS = {"replica": 6, "data": 1, "pipe": 5, "fsdp": 2, "expert": 4, "sequence": 7, "tensor": 3}
_KIND_COLORS = (
    ("param", 1),
    ("optim", 2),
    ("activ", 3),
    ("temp", 3),
    ("grad", 4),
    ("batch", 5),
    ("output", 6),
)
_LONGEST_SIDE = 44.0
"""Longest side of a parameter's picture, in pixels."""


def mesh_picture(sizes: dict[str, int], devices: int) -> Markup:
    """Draw the devices of a mesh as a grid of numbered squares.

    The last axis, whose links are the fastest, runs across, and the axis before it runs down. Earlier axes form groups.

    Args:
        sizes: number of devices along each axis by name, without axes of one device.
        devices: number of devices if the mesh has no axis.
    """
    axes = list(sizes.items())
    lengths = [length for _, length in axes] or [max(1, devices)]
    group_axes = axes[:-2]
    row_count, column_count = (lengths[-2] if len(lengths) > 1 else 1), lengths[-1]
    grids = []
    for group in _drawn_indices(math.prod(length for _, length in group_axes)):
        if group is None:
            grids.append(element("span", "…", class_="gap"))
            continue
        cells = [
            element("i", "…", class_="gap")
            if row is None or column is None
            else element("i", (group * row_count + row) * column_count + column)
            for row in _drawn_indices(row_count)
            for column in _drawn_indices(column_count)
        ]
        caption = element("figcaption", _group_name(group_axes, group), class_="group") if group_axes else None
        style = f"--columns:{min(column_count, _MOST_DRAWN)}"
        grids.append(element("figure", caption, element("div", cells, class_="cells", style=style)))
    direction_names = [*["groups"] * len(group_axes), *["down", "across"][-len(axes) :]]
    legend = [
        element("span", _swatch(_axis_color(axis)), element("b", axis), f" {length} {direction}", class_="key")
        for (axis, length), direction in zip(axes, direction_names, strict=False)
    ]
    return element("div", element("div", grids, class_="grids"), element("div", legend, class_="legend"), class_="mesh")


def _axis_color(axis: str) -> int:
    """Return the number of a mesh axis's colour in the page's palette."""
    return _AXIS_COLORS.get(axis, 6)


def _swatch(color: int, **attributes: str) -> Markup:
    """Return a small box in a colour of the page's palette."""
    return element("i", class_=f"c{color}", **attributes)


def _drawn_indices(count: int) -> list[int | None]:
    """Return the indices of the devices that are drawn along an axis of `count` devices; `None` is a gap."""
    return [*range(count)] if count <= _MOST_DRAWN else [*range(_MOST_DRAWN - 2), None, count - 1]


def _group_name(group_axes: Sequence[tuple[str, int]], index: int) -> str:
    """Return the name of a group of devices, such as "replica 0, data 3".

    Args:
        group_axes: name and number of devices of each axis that forms groups.
        index: number of the group, counted along the last of these axes first.
    """
    indices = np.unravel_index(index, [length for _, length in group_axes])
    return ", ".join(f"{axis} {index_on_axis}" for (axis, _), index_on_axis in zip(group_axes, indices, strict=True))


def shard_picture(shape: Sequence[int], parts: Sequence[int]) -> Markup:
    """Draw a parameter as a rectangle divided into its shards, with the first device's shard filled.

    A parameter of more than two dims is drawn with a second rectangle behind the first.

    Args:
        shape: shape of the parameter.
        parts: number of shards along each dim.
    """
    # length and number of shards of each dim
    dims = list(zip(shape, parts, strict=True)) or [(1, 1)]
    (rows, row_parts), (columns, column_parts) = (dims[-2], dims[-1]) if len(dims) > 1 else ((1, 1), dims[-1])
    width = _LONGEST_SIDE if rows <= columns else max(16.0, _LONGEST_SIDE * columns / rows)
    height = 10.0 if len(dims) == 1 else min(_LONGEST_SIDE, max(16.0, width * rows / max(1, columns)))
    shard_width, shard_height = width / max(1, column_parts), height / max(1, row_parts)
    line_data = "".join(f"M{shard_width * i:.1f} 0V{height:.1f}" for i in range(1, min(column_parts, 16)))
    line_data += "".join(f"M0 {shard_height * i:.1f}H{width:.1f}" for i in range(1, min(row_parts, 16)))
    is_pile = len(dims) > 2
    back_box = element("rect", class_="back", x=5, y=0.5, width=width, height=height) if is_pile else None
    front = element(
        "g",
        element("rect", class_="back", width=width, height=height),
        element("rect", class_="mine", width=shard_width, height=shard_height),
        element("path", d=line_data),
        transform=f"translate(0.5 {4.5 if is_pile else 0.5})",
    )
    box_width, box_height = (round(width + 6), round(height + 5)) if is_pile else (round(width + 1), round(height + 1))
    return element("svg", back_box, front, class_="cut", width=box_width, height=box_height, aria_hidden="true")


def parameter_table(parameters: Sequence[Any], sizes: dict[str, int], most: int = 12) -> Markup:
    """Return a table of the biggest parameters, with shape, placement on the mesh, and bytes in total and per device.

    Args:
        parameters: the parameters of layout.json.
        sizes: number of devices along each axis by name.
        most: largest number of parameters with a row of their own; the others are summed in one more row.
    """
    params = [param for param in parameters if isinstance(param, dict) and isinstance(param.get("shape"), list | tuple)]
    params.sort(key=lambda param: (-float(param.get("bytes") or 0), str(param.get("name"))))
    if not params:
        return Markup()
    rows = []
    for param in params[:most]:
        shape, dim_axes = list(param["shape"]), _dim_axes(param.get("spec"), len(param["shape"]))
        parts = [math.prod(sizes.get(axis, 1) for axis in axes) for axes in dim_axes]
        cells = [shard_picture(shape, parts), _breakable_name(str(param.get("name")))]
        cells += [" \N{MULTIPLICATION SIGN} ".join(f"{dim:,}" for dim in shape) or "scalar"]
        rows.append([*cells, _axis_tags(dim_axes, sizes), str(param.get("dtype") or ""), *_byte_texts([param])])
    remainder = params[most:]
    remainder_rows = (
        [("", f"{count(len(remainder))} smaller ones", "", "", "", *_byte_texts(remainder))] if remainder else []
    )
    headings = ("", "Parameter", "Shape", "Lies on", "Type", "Whole", "Per device")
    grid = table(rows, headings, numeric=(5, 6), name_column=1, extra_rows=remainder_rows, class_="parameters")
    return element("div", grid, class_="scroll")


def _byte_texts(parameters: Sequence[Any]) -> list[str]:
    """Return the sums of the bytes of parameters, in total and per device, as texts."""
    return [size(sum(float(param.get(field) or 0) for param in parameters)) for field in ("bytes", "bytes_per_device")]


def _dim_axes(spec: Any, dims: int) -> list[list[str]]:
    """Return the mesh axes that shard each dim, from a spec of layout.json.

    Args:
        spec: for each dim `None`, the name of a mesh axis, or several names; trailing dims may be missing.
        dims: number of dims.
    """
    specs = list(spec) if isinstance(spec, list | tuple) else []
    specs = (specs + [None] * dims)[:dims]
    return [[] if axes is None else [axes] if isinstance(axes, str) else [str(axis) for axis in axes] for axes in specs]


def _axis_tags(dim_axes: list[list[str]], sizes: dict[str, int]) -> list[Markup]:
    """Return a tag for each mesh axis of more than one device that shards a dim; `dim_axes` lists the axes by dim."""
    tags = [
        element("span", f"dim {dim} on {axis}", class_=f"tag c{_axis_color(axis)}")
        for dim, axes in enumerate(dim_axes)
        for axis in axes
        if sizes.get(axis, 1) > 1
    ]
    return tags or [element("span", "whole on each", class_="faint")]


def _breakable_name(name: str) -> list[Any]:
    """Return the HTML of a name that may be broken into lines after a separator."""
    return [[part, element("wbr") if part in "./_" else None] for part in re.split("([./_])", name) if part]


def memory_bar(bytes_by_kind: dict[str, float], capacity: float | None = None) -> Markup:
    """Draw the bytes per device by kind of tensor, as a bar and a table.

    Args:
        bytes_by_kind: bytes by kind of tensor; kinds without bytes are left out.
        capacity: bytes of the device's memory; `None` if unknown.
    """
    bytes_by_kind = {kind: amount for kind, amount in bytes_by_kind.items() if amount > 0 and math.isfinite(amount)}
    total = sum(bytes_by_kind.values())
    if not total:
        return Markup()
    bar_bytes = max(total, capacity or 0.0)
    segments, rows = [], []
    for kind, amount in bytes_by_kind.items():
        color = next((color_number for word, color_number in _KIND_COLORS if word in kind.lower()), 7)
        segments.append(_swatch(color, style=f"width:{amount / bar_bytes:.3%}", title=f"{kind}: {size(amount)}"))
        share = f"{amount / total:.0%}" if amount >= 0.005 * total else "<1%"
        rows.append((element("span", _swatch(color), kind.capitalize(), class_="key"), size(amount), share))
    total_rows = [("Together", size(total), "")] + ([("Device", size(capacity), "")] if capacity else [])
    bar = element("div", segments, class_="bar", role="img", aria_label="memory per device")
    return joined([bar, table(rows, numeric=(1, 2), extra_rows=total_rows)])
