"""Draw a run's layout as HTML: the mesh of devices, the shards of parameters, and the memory by kind of tensor.

A color is a number in the page's palette. Axis sizes are the numbers of devices along the mesh axes, by axis name.
"""

import math
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxscale.figures.markup import Markup, element, joined, table
from jaxscale.records.hours import Hours
from jaxscale.values.units import count, duration, size

_MAX_DRAWN = 8
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
_PHASE_COLORS = {"stepping": 1, "compiling": 2, "saving": 3, "evaluating": 5, "logging": 4, "data": 7}
_LONGEST_SIDE = 44.0
"""Length of the longest side of a parameter's picture, in pixels."""


def mesh_picture(axis_sizes: dict[str, int], device_count: int) -> Markup:
    """Draw the devices of a mesh as a grid of numbered squares.

    The last axis, which has the fastest links, runs across, and the second-last axis runs down. Earlier axes form
    groups.

    Args:
        axis_sizes: number of devices along each axis, by axis name, without axes of one device.
        device_count: number of devices; it is used only if `axis_sizes` is empty.
    """
    axes_and_sizes = list(axis_sizes.items())
    lengths = [length for _, length in axes_and_sizes] or [max(1, device_count)]
    group_axes_and_sizes = axes_and_sizes[:-2]
    row_count, column_count = (lengths[-2] if len(lengths) > 1 else 1), lengths[-1]
    grids = []
    for group in _drawn_indices(math.prod(length for _, length in group_axes_and_sizes)):
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
        caption = (
            element("figcaption", _group_name(group_axes_and_sizes, group), class_="group")
            if group_axes_and_sizes
            else None
        )
        style = f"--columns:{min(column_count, _MAX_DRAWN)}"
        grids.append(element("figure", caption, element("div", cells, class_="cells", style=style)))
    direction_names = [*["groups"] * len(group_axes_and_sizes), *["down", "across"][-len(axes_and_sizes) :]]
    legend = [
        element("span", _swatch(_axis_color(axis)), element("b", axis), f" {length} {direction}", class_="key")
        for (axis, length), direction in zip(axes_and_sizes, direction_names, strict=False)
    ]
    return element("div", element("div", grids, class_="grids"), element("div", legend, class_="legend"), class_="mesh")


def _axis_color(axis: str) -> int:
    """Return the number of a mesh axis's color in the page's palette."""
    return _AXIS_COLORS.get(axis, 6)


def _swatch(color: int, **attributes: str) -> Markup:
    """Return a small colored box with HTML attributes; `color` is a number in the page's palette."""
    return element("i", class_=f"c{color}", **attributes)


def _drawn_indices(length: int) -> list[int | None]:
    """Return the indices of the devices to draw along an axis of `length` devices. `None` stands for a gap."""
    return [*range(length)] if length <= _MAX_DRAWN else [*range(_MAX_DRAWN - 2), None, length - 1]


def _group_name(group_axes_and_sizes: Sequence[tuple[str, int]], index: int) -> str:
    """Return the name of a group of devices, such as "replica 0, data 3".

    Args:
        group_axes_and_sizes: (name, number of devices) of each axis that forms groups.
        index: index of the group; groups are counted along the last axis first.
    """
    indices = np.unravel_index(index, [length for _, length in group_axes_and_sizes])
    return ", ".join(
        f"{axis} {index_on_axis}" for (axis, _), index_on_axis in zip(group_axes_and_sizes, indices, strict=True)
    )


def shard_picture(shape: Sequence[int], shard_counts: Sequence[int]) -> Markup:
    """Draw a parameter as a rectangle divided into shards. The first device's shard is filled.

    For a parameter with more than two dims, a second rectangle is drawn behind the first one.

    Args:
        shape: shape of the parameter.
        shard_counts: number of shards along each dim.
    """
    # (size, number of shards) of each dim
    sizes_and_shard_counts = list(zip(shape, shard_counts, strict=True)) or [(1, 1)]
    row_count, row_shard_count = sizes_and_shard_counts[-2] if len(sizes_and_shard_counts) > 1 else (1, 1)
    column_count, column_shard_count = sizes_and_shard_counts[-1]
    width = _LONGEST_SIDE if row_count <= column_count else max(16.0, _LONGEST_SIDE * column_count / row_count)
    height = (
        10.0
        if len(sizes_and_shard_counts) == 1
        else min(_LONGEST_SIDE, max(16.0, width * row_count / max(1, column_count)))
    )
    shard_width, shard_height = width / max(1, column_shard_count), height / max(1, row_shard_count)
    line_data = "".join(f"M{shard_width * i:.1f} 0V{height:.1f}" for i in range(1, min(column_shard_count, 16)))
    line_data += "".join(f"M0 {shard_height * i:.1f}H{width:.1f}" for i in range(1, min(row_shard_count, 16)))
    has_back = len(sizes_and_shard_counts) > 2
    back_box = element("rect", class_="back", x=5, y=0.5, width=width, height=height) if has_back else None
    front_box = element(
        "g",
        element("rect", class_="back", width=width, height=height),
        element("rect", class_="mine", width=shard_width, height=shard_height),
        element("path", d=line_data),
        transform=f"translate(0.5 {4.5 if has_back else 0.5})",
    )
    box_width, box_height = (round(width + 6), round(height + 5)) if has_back else (round(width + 1), round(height + 1))
    return element("svg", back_box, front_box, class_="cut", width=box_width, height=box_height, aria_hidden="true")


def parameter_table(entries: Sequence[Any], axis_sizes: dict[str, int], max_rows: int = 12) -> Markup:
    """Return a table of the largest parameters: shape, placement on the mesh, bytes in total, and bytes per device.

    Args:
        entries: the entries for parameters in layout.json, as dicts.
        axis_sizes: number of devices along each axis, by axis name.
        max_rows: largest number of parameters that have a separate row; one more row sums up all other parameters.
    """
    valid_entries = [
        entry for entry in entries if isinstance(entry, dict) and isinstance(entry.get("shape"), list | tuple)
    ]
    valid_entries.sort(key=lambda entry: (-float(entry.get("bytes") or 0), str(entry.get("name"))))
    if not valid_entries:
        return Markup()
    rows = []
    for entry in valid_entries[:max_rows]:
        shape, axes_by_dim = list(entry["shape"]), _axes_by_dim(entry.get("spec"), len(entry["shape"]))
        shard_counts = [math.prod(axis_sizes.get(axis, 1) for axis in axes) for axes in axes_by_dim]
        cells = [shard_picture(shape, shard_counts), _breakable_name(str(entry.get("name")))]
        cells += [" \N{MULTIPLICATION SIGN} ".join(f"{dim_size:,}" for dim_size in shape) or "scalar"]
        tags, dtype = _axis_tags(axes_by_dim, axis_sizes), str(entry.get("dtype") or "")
        rows.append([*cells, tags, dtype, *_byte_texts([entry])])
    other_entries = valid_entries[max_rows:]
    sum_rows = []
    if other_entries:
        sum_rows = [("", f"{count(len(other_entries))} smaller ones", "", "", "", *_byte_texts(other_entries))]
    headings = ("", "Parameter", "Shape", "Sharded over", "Type", "Whole", "Per device")  # report.css repeats two
    parameter_grid = table(rows, headings, numeric=(5, 6), name_column=1, extra_rows=sum_rows, class_="parameters")
    return element("div", parameter_grid, class_="scroll")


def _byte_texts(entries: Sequence[Any]) -> list[str]:
    """Return two texts: the total bytes of all parameters in `entries`, and their bytes per device."""
    return [size(sum(float(entry.get(field) or 0) for entry in entries)) for field in ("bytes", "bytes_per_device")]


def _axes_by_dim(spec: Any, dim_count: int) -> list[list[str]]:
    """Return the mesh axes that shard each dim, from a spec in layout.json.

    Args:
        spec: for each dim: `None`, the name of a mesh axis, or a list of names. Trailing dims may be missing.
        dim_count: number of dims.
    """
    dim_specs = list(spec) if isinstance(spec, list | tuple) else []
    dim_specs = (dim_specs + [None] * dim_count)[:dim_count]
    return [
        [] if dim_spec is None else [dim_spec] if isinstance(dim_spec, str) else [str(axis) for axis in dim_spec]
        for dim_spec in dim_specs
    ]


def _axis_tags(axes_by_dim: list[list[str]], axis_sizes: dict[str, int]) -> list[Markup]:
    """Return a tag for each mesh axis that shards a dim, given the axes of each dim; axes of one device have no tag."""
    tags = [
        element("span", f"dim {dim} on {axis}", class_=f"tag c{_axis_color(axis)}")
        for dim, axes in enumerate(axes_by_dim)
        for axis in axes
        if axis_sizes.get(axis, 1) > 1
    ]
    return tags or [element("span", "whole on each device", class_="faint")]


def _breakable_name(name: str) -> list[Any]:
    """Return a name as HTML in which a line may break after each separator."""
    return [[part, element("wbr") if part in "./_" else None] for part in re.split("([./_])", name) if part]


def hours_bar(hours: Hours) -> Markup:
    """Draw a bar and a table of a run's seconds by phase; return "" if there are no seconds."""
    phases_and_seconds = sorted(hours.seconds_by_phase.items(), key=lambda phase_and_seconds: -phase_and_seconds[1])
    phases_and_seconds = [
        phase_and_seconds for phase_and_seconds in phases_and_seconds if phase_and_seconds[1] >= 0.001 * hours.seconds
    ]
    phases_and_seconds += [(f"lost: {cause}", seconds) for cause, seconds in hours.lost]
    total_seconds = sum(seconds for _, seconds in phases_and_seconds)
    if not total_seconds > 0 or not math.isfinite(total_seconds):
        return Markup()
    segments, rows = [], []
    for label, seconds in phases_and_seconds:
        color = 4 if label.startswith("lost: ") else _PHASE_COLORS.get(label, 6)
        segments.append(
            _swatch(color, style=f"width:{seconds / total_seconds:.3%}", title=f"{label}: {duration(seconds)}")
        )
        key_cell = element("span", _swatch(color), label.capitalize(), class_="key")
        rows.append((key_cell, duration(seconds), f"{seconds / total_seconds:.0%}"))
    bar = element("div", segments, class_="bar", role="img", aria_label="seconds by phase")
    return joined([bar, table(rows, numeric=(1, 2), extra_rows=[("Together", duration(total_seconds), "")])])


def memory_bar(bytes_by_kind: dict[str, float], capacity_bytes: float | None = None) -> Markup:
    """Draw a bar and a table of the bytes per device, by kind of tensor.

    Args:
        bytes_by_kind: bytes by kind of tensor; kinds with 0 bytes are left out.
        capacity_bytes: bytes of the device's memory; `None` if unknown.
    """
    shown_bytes_by_kind = {
        kind: byte_count for kind, byte_count in bytes_by_kind.items() if byte_count > 0 and math.isfinite(byte_count)
    }
    total_bytes = sum(shown_bytes_by_kind.values())
    if not total_bytes:
        return Markup()
    bar_bytes = max(total_bytes, capacity_bytes or 0.0)
    segments, rows = [], []
    for kind, kind_bytes in shown_bytes_by_kind.items():
        color = next((color_number for word, color_number in _KIND_COLORS if word in kind.lower()), 7)
        title = f"{kind}: {size(kind_bytes)}"
        segments.append(_swatch(color, style=f"width:{kind_bytes / bar_bytes:.3%}", title=title))
        share_text = f"{kind_bytes / total_bytes:.0%}" if kind_bytes >= 0.005 * total_bytes else "<1%"
        rows.append((element("span", _swatch(color), kind.capitalize(), class_="key"), size(kind_bytes), share_text))
    total_rows = [("Together", size(total_bytes), "")]
    total_rows += [("Device", size(capacity_bytes), "")] if capacity_bytes else []
    bar = element("div", segments, class_="bar", role="img", aria_label="memory per device")
    return joined([bar, table(rows, numeric=(1, 2), extra_rows=total_rows)])
