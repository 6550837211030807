"""Pictures of a layout as HTML: the mesh of devices, how a parameter is cut over it, memory by kind of tensor."""

import math
from collections.abc import Sequence
from html import escape
from typing import Any

from jaxscale.values.units import count, size

_SHOWN = 8
"""Devices drawn along an axis; of a longer one the first seven, and a gap."""

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
_CUT = 44.0
"""Longest side of a parameter's picture, in pixels."""

TIMES = "\N{MULTIPLICATION SIGN}"


def mesh_picture(sizes: dict[str, int], devices: int) -> str:
    """The devices of a mesh as a grid of numbered squares.

    The last axis, whose links are the fastest, runs across; the one before it runs down; earlier ones make groups.

    Args:
        sizes: devices per axis, axes of one device left out.
        devices: how many there are, where the mesh has no axis.
    """
    axes = list(sizes.items())
    across = axes[-1] if axes else ("device", max(1, devices))
    down = axes[-2] if len(axes) > 1 else None
    groups = axes[:-2]
    rows, columns = (down[1] if down else 1), across[1]
    several = math.prod(number for _, number in groups)
    grids = []
    for group in _some(several):
        if group is None:
            grids.append('<span class="gap">…</span>')
            continue
        cells = []
        for row in _some(rows):
            for column in _some(columns):
                if row is None or column is None:
                    cells.append('<i class="gap">…</i>')
                    continue
                cells.append(f"<i>{(group * rows + row) * columns + column}</i>")
        name = "" if not groups else f'<figcaption class="group">{escape(_group_name(groups, group))}</figcaption>'
        shown = min(columns, _SHOWN)
        grids.append(f'<figure>{name}<div class="cells" style="--columns:{shown}">{"".join(cells)}</div></figure>')
    legend = [
        f'<span class="key"><i class="c{_AXIS_COLORS.get(axis, 6)}"></i><b>{escape(axis)}</b> {number} {where}</span>'
        for axis, number, where in [
            *((axis, number, "groups") for axis, number in groups),
            *([(*down, "down")] if down else []),
            *([(*across, "across")] if axes else []),
        ]
    ]
    return (
        f'<div class="mesh"><div class="grids">{"".join(grids)}</div><div class="legend">{"".join(legend)}</div></div>'
    )


def _some(number: int) -> list[int | None]:
    return [*range(number)] if number <= _SHOWN else [*range(_SHOWN - 2), None, number - 1]


def _group_name(groups: Sequence[tuple[str, int]], index: int) -> str:
    names = []
    for axis, number in reversed(groups):
        names.append(f"{axis} {index % number}")
        index //= number
    return ", ".join(reversed(names))


def cut_picture(shape: Sequence[int], parts: Sequence[int]) -> str:
    """A parameter as a rectangle cut into its shards, that of the first device filled. A dim more than two is a pile.

    Args:
        shape: of the parameter.
        parts: into how many each dim is cut.
    """
    dims = list(zip(shape, parts, strict=True)) or [(1, 1)]
    rows, columns = (dims[-2], dims[-1]) if len(dims) > 1 else ((1, 1), dims[-1])
    wide = _CUT if rows[0] <= columns[0] else max(16.0, _CUT * columns[0] / rows[0])
    tall = 10.0 if len(dims) == 1 else min(_CUT, max(16.0, wide * rows[0] / max(1, columns[0])))
    x, y = wide / max(1, columns[1]), tall / max(1, rows[1])
    lines = "".join(f"M{x * i:.1f} 0V{tall:.1f}" for i in range(1, min(columns[1], 16)))
    lines += "".join(f"M0 {y * i:.1f}H{wide:.1f}" for i in range(1, min(rows[1], 16)))
    pile = ""
    if len(dims) > 2:
        pile = f'<rect class="back" x="5" y="0.5" width="{wide:.1f}" height="{tall:.1f}"/>'
    front = f'<g transform="translate(0.5 {4.5 if pile else 0.5})">'
    front += f'<rect class="back" width="{wide:.1f}" height="{tall:.1f}"/>'
    front += f'<rect class="mine" width="{x:.1f}" height="{y:.1f}"/><path d="{lines}"/></g>'
    box = f"{wide + (6 if pile else 1):.0f}", f"{tall + (5 if pile else 1):.0f}"
    return f'<svg class="cut" width="{box[0]}" height="{box[1]}" aria-hidden="true">{pile}{front}</svg>'


def parameter_table(parameters: Sequence[Any], sizes: dict[str, int], most: int = 12) -> str:
    """The biggest parameters: shape, how they lie on the mesh, bytes whole and per device."""
    known = [one for one in parameters if isinstance(one, dict) and isinstance(one.get("shape"), list | tuple)]
    known.sort(key=lambda one: (-float(one.get("bytes") or 0), str(one.get("name"))))
    rows = []
    for one in known[:most]:
        shape, spec = list(one["shape"]), _spec(one.get("spec"), len(one["shape"]))
        parts = [math.prod(sizes.get(axis, 1) for axis in axes) for axes in spec]
        whole, own = float(one.get("bytes") or 0), float(one.get("bytes_per_device") or 0)
        rows.append(
            f"<tr><td>{cut_picture(shape, parts)}</td><th scope=row>{_breakable(str(one.get('name')))}</th>"
            f"<td>{f' {TIMES} '.join(f'{dim:,}' for dim in shape) or 'scalar'}</td><td>{_lies(spec, sizes)}</td>"
            f"<td>{escape(str(one.get('dtype') or ''))}</td>"
            f"<td class=n>{size(whole)}</td><td class=n>{size(own)}</td></tr>"
        )
    if not rows:
        return ""
    left = len(known) - len(rows)
    rest = ""
    if left:
        others = sum(float(one.get("bytes") or 0) for one in known[most:])
        own = sum(float(one.get("bytes_per_device") or 0) for one in known[most:])
        rest = (
            f"<tr class=rest><td></td><th scope=row>{count(left)} smaller ones</th><td></td><td></td><td></td>"
            f"<td class=n>{size(others)}</td><td class=n>{size(own)}</td></tr>"
        )
    head = "<th></th><th>Parameter</th><th>Shape</th><th>Lies on</th><th>Type</th>"
    head += "<th class=n>Whole</th><th class=n>Per device</th>"
    return (
        f'<div class="scroll"><table class="parameters"><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(rows)}{rest}</tbody></table></div>"
    )


def _spec(spec: Any, dims: int) -> list[list[str]]:
    """Mesh axes per dim; a spec may be shorter than the shape, and a dim's axes `None`, one name or several."""
    given = list(spec) if isinstance(spec, list | tuple) else []
    given = (given + [None] * dims)[:dims]
    return [[] if axes is None else [axes] if isinstance(axes, str) else [str(axis) for axis in axes] for axes in given]


def _lies(spec: list[list[str]], sizes: dict[str, int]) -> str:
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
    """Bytes per device by kind of tensor, as one bar and a line per kind; the room left where the capacity is known."""
    kinds = {kind: value for kind, value in kinds.items() if value > 0 and math.isfinite(value)}
    total = sum(kinds.values())
    if not total:
        return ""
    full = max(total, capacity or 0.0)
    parts, lines = [], []
    for kind, value in kinds.items():
        color = next((number for word, number in _KIND_COLORS if word in kind.lower()), 7)
        parts.append(f'<i class="c{color}" style="width:{value / full:.3%}" title="{escape(kind)}: {size(value)}"></i>')
        lines.append(
            f'<tr><th scope=row><span class="key"><i class="c{color}"></i>{escape(kind.capitalize())}</span></th>'
            f"<td class=n>{size(value)}</td><td class=n>{_share(value / total)}</td></tr>"
        )
    lines.append(f"<tr class=rest><th scope=row>Together</th><td class=n>{size(total)}</td><td class=n></td></tr>")
    if capacity:
        lines.append(f"<tr class=rest><th scope=row>Device</th><td class=n>{size(capacity)}</td><td class=n></td></tr>")
    bar = f'<div class="bar" role="img" aria-label="memory per device">{"".join(parts)}</div>'
    return f"{bar}<table>{''.join(lines)}</table>"
