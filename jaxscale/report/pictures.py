"""Pictures of a layout as HTML: the mesh of devices, how a parameter is sharded over it, memory by kind of tensor."""

import math
from collections.abc import Sequence
from html import escape
from typing import Any

from jaxscale.values.units import count, size

_SHOWN = 8
"""Devices drawn along an axis; a longer one is drawn with a gap."""

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

TIMES = "\N{MULTIPLICATION SIGN}"


def mesh_picture(sizes: dict[str, int], devices: int) -> str:
    """The devices of a mesh as a grid of numbered squares.

    The last axis, whose links are the fastest, runs across; the one before it runs down; earlier axes form groups.

    Args:
        sizes: devices per axis, without axes of one device.
        devices: number of devices, where the mesh has no axis.
    """
    axes = list(sizes.items())
    column_axis = axes[-1] if axes else ("device", max(1, devices))
    row_axis = axes[-2] if len(axes) > 1 else None
    groups = axes[:-2]
    rows, columns = (row_axis[1] if row_axis else 1), column_axis[1]
    group_count = math.prod(length for _, length in groups)
    grids = []
    for group in _drawn_indices(group_count):
        if group is None:
            grids.append('<span class="gap">…</span>')
            continue
        cells = []
        for row in _drawn_indices(rows):
            for column in _drawn_indices(columns):
                if row is None or column is None:
                    cells.append('<i class="gap">…</i>')
                    continue
                cells.append(f"<i>{(group * rows + row) * columns + column}</i>")
        name = "" if not groups else f'<figcaption class="group">{escape(_group_name(groups, group))}</figcaption>'
        width = min(columns, _SHOWN)
        grids.append(f'<figure>{name}<div class="cells" style="--columns:{width}">{"".join(cells)}</div></figure>')
    legend = [
        f'<span class="key"><i class="c{_AXIS_COLORS.get(axis, 6)}"></i><b>{escape(axis)}</b> {length} {place}</span>'
        for axis, length, place in [
            *((axis, length, "groups") for axis, length in groups),
            *([(*row_axis, "down")] if row_axis else []),
            *([(*column_axis, "across")] if axes else []),
        ]
    ]
    return (
        f'<div class="mesh"><div class="grids">{"".join(grids)}</div><div class="legend">{"".join(legend)}</div></div>'
    )


def _drawn_indices(count: int) -> list[int | None]:
    return [*range(count)] if count <= _SHOWN else [*range(_SHOWN - 2), None, count - 1]


def _group_name(groups: Sequence[tuple[str, int]], index: int) -> str:
    names = []
    for axis, length in reversed(groups):
        names.append(f"{axis} {index % length}")
        index //= length
    return ", ".join(reversed(names))


def cut_picture(shape: Sequence[int], parts: Sequence[int]) -> str:
    """A parameter as a rectangle cut into its shards, the first device's filled; dims beyond two show as a pile.

    Args:
        shape: shape of the parameter.
        parts: number of shards along each dim.
    """
    dims = list(zip(shape, parts, strict=True)) or [(1, 1)]
    rows, columns = (dims[-2], dims[-1]) if len(dims) > 1 else ((1, 1), dims[-1])
    width = _LONGEST_SIDE if rows[0] <= columns[0] else max(16.0, _LONGEST_SIDE * columns[0] / rows[0])
    height = 10.0 if len(dims) == 1 else min(_LONGEST_SIDE, max(16.0, width * rows[0] / max(1, columns[0])))
    shard_width, shard_height = width / max(1, columns[1]), height / max(1, rows[1])
    lines = "".join(f"M{shard_width * i:.1f} 0V{height:.1f}" for i in range(1, min(columns[1], 16)))
    lines += "".join(f"M0 {shard_height * i:.1f}H{width:.1f}" for i in range(1, min(rows[1], 16)))
    back = ""
    if len(dims) > 2:
        back = f'<rect class="back" x="5" y="0.5" width="{width:.1f}" height="{height:.1f}"/>'
    front = f'<g transform="translate(0.5 {4.5 if back else 0.5})">'
    front += f'<rect class="back" width="{width:.1f}" height="{height:.1f}"/>'
    front += f'<rect class="mine" width="{shard_width:.1f}" height="{shard_height:.1f}"/><path d="{lines}"/></g>'
    box = f"{width + (6 if back else 1):.0f}", f"{height + (5 if back else 1):.0f}"
    return f'<svg class="cut" width="{box[0]}" height="{box[1]}" aria-hidden="true">{back}{front}</svg>'


def parameter_table(parameters: Sequence[Any], sizes: dict[str, int], most: int = 12) -> str:
    """The biggest parameters: shape, placement on the mesh, bytes in all and per device."""
    valid = [param for param in parameters if isinstance(param, dict) and isinstance(param.get("shape"), list | tuple)]
    valid.sort(key=lambda param: (-float(param.get("bytes") or 0), str(param.get("name"))))
    rows = []
    for param in valid[:most]:
        shape, spec = list(param["shape"]), _spec(param.get("spec"), len(param["shape"]))
        parts = [math.prod(sizes.get(axis, 1) for axis in axes) for axes in spec]
        total_bytes, device_bytes = float(param.get("bytes") or 0), float(param.get("bytes_per_device") or 0)
        rows.append(
            f"<tr><td>{cut_picture(shape, parts)}</td><th scope=row>{_breakable(str(param.get('name')))}</th>"
            f"<td>{f' {TIMES} '.join(f'{dim:,}' for dim in shape) or 'scalar'}</td><td>{_placement(spec, sizes)}</td>"
            f"<td>{escape(str(param.get('dtype') or ''))}</td>"
            f"<td class=n>{size(total_bytes)}</td><td class=n>{size(device_bytes)}</td></tr>"
        )
    if not rows:
        return ""
    hidden_count = len(valid) - len(rows)
    last_row = ""
    if hidden_count:
        hidden_bytes = sum(float(param.get("bytes") or 0) for param in valid[most:])
        device_bytes = sum(float(param.get("bytes_per_device") or 0) for param in valid[most:])
        last_row = (
            f"<tr class=rest><td></td><th scope=row>{count(hidden_count)} smaller ones</th><td></td><td></td><td></td>"
            f"<td class=n>{size(hidden_bytes)}</td><td class=n>{size(device_bytes)}</td></tr>"
        )
    head = "<th></th><th>Parameter</th><th>Shape</th><th>Lies on</th><th>Type</th>"
    head += "<th class=n>Whole</th><th class=n>Per device</th>"
    return (
        f'<div class="scroll"><table class="parameters"><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(rows)}{last_row}</tbody></table></div>"
    )


def _spec(spec: Any, dims: int) -> list[list[str]]:
    """Mesh axes per dim; a spec may be shorter than the shape; a dim's axes are `None`, one name or several."""
    items = list(spec) if isinstance(spec, list | tuple) else []
    items = (items + [None] * dims)[:dims]
    return [[] if axes is None else [axes] if isinstance(axes, str) else [str(axis) for axis in axes] for axes in items]


def _placement(spec: list[list[str]], sizes: dict[str, int]) -> str:
    tags = []
    for dim, axes in enumerate(spec):
        for axis in axes:
            if sizes.get(axis, 1) > 1:
                tags.append(f'<span class="tag c{_AXIS_COLORS.get(axis, 6)}">dim {dim} on {escape(axis)}</span>')
    return "".join(tags) or '<span class="faint">whole on each</span>'


def _breakable(name: str) -> str:
    return escape(name).replace(".", ".<wbr>").replace("/", "/<wbr>").replace("_", "_<wbr>")


def _share(part: float) -> str:
    return f"{part:.0%}" if part >= 0.005 else "&lt;1%"


def memory_bar(kinds: dict[str, float], capacity: float | None = None) -> str:
    """Bytes per device by kind of tensor, as one bar and a line per kind; the device's too where it is known."""
    kinds = {kind: amount for kind, amount in kinds.items() if amount > 0 and math.isfinite(amount)}
    total = sum(kinds.values())
    if not total:
        return ""
    width = max(total, capacity or 0.0)
    segments, lines = [], []
    for kind, amount in kinds.items():
        color = next((index for word, index in _KIND_COLORS if word in kind.lower()), 7)
        segments.append(
            f'<i class="c{color}" style="width:{amount / width:.3%}" title="{escape(kind)}: {size(amount)}"></i>'
        )
        lines.append(
            f'<tr><th scope=row><span class="key"><i class="c{color}"></i>{escape(kind.capitalize())}</span></th>'
            f"<td class=n>{size(amount)}</td><td class=n>{_share(amount / total)}</td></tr>"
        )
    lines.append(f"<tr class=rest><th scope=row>Together</th><td class=n>{size(total)}</td><td class=n></td></tr>")
    if capacity:
        lines.append(f"<tr class=rest><th scope=row>Device</th><td class=n>{size(capacity)}</td><td class=n></td></tr>")
    bar = f'<div class="bar" role="img" aria-label="memory per device">{"".join(segments)}</div>'
    return f"{bar}<table>{''.join(lines)}</table>"
