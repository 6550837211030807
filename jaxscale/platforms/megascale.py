"""Collectives of a TPU program over the network between slices.

libtpu compiles one program per slice. In collectives inside a slice, the slice's devices are numbered from 0. A
collective across slices becomes a host transfer (`send`) by the megascale runtime. An undocumented attribute specifies
the kind of collective. The order of the mesh axes determines which axes cross slices (`jaxscale/tpu_slices.py`).
"""

import re
from collections.abc import Mapping
from typing import Literal

from jaxscale.tpu_slices import slices_per_axis

CollectiveKind = Literal["all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute"]
KIND_BY_TRANSFER_TYPE: dict[str, CollectiveKind] = {
    "ALL_REDUCE": "all-reduce",
    "ALL_GATHER": "all-gather",
    "REDUCE_SCATTER": "reduce-scatter",
    "ALL_TO_ALL": "all-to-all",
    "ONE_TO_ONE": "collective-permute",
}
HANDLER = "xla_megascale_runtime"
"""Name of the megascale runtime in the attributes of a host transfer."""


def slices_of(text: str) -> int:
    """Return the number of slices between which a compiled program communicates; 1 if it runs within one slice.

    Args:
        text: text of the compiled program.

    Example:
        >>> slices_of('_xla_megascale_target="{1,2}x{0:3}"'), slices_of("_xla_megascale_target={{100000->200000}}")
        (2, 2)
        >>> slices_of("nothing")
        1
    """
    slice_ids: set[int] = set()
    for id_ranges in re.findall(r'_xla_megascale_target="?\{([\d,:]+)\}x', text):
        for id_range in id_ranges.split(","):
            first_id, _, last_id = id_range.partition(":")
            slice_ids |= set(range(int(first_id), int(last_id or first_id) + 1))
    for targets_text in re.findall(r"_xla_megascale_target=\{\{(.*?)\}\}", text):
        slice_ids |= {int(device_id) // 100_000 for device_id in re.findall(r"\d+", targets_text)}
    return max(len(slice_ids), 1)


def kind_of(attributes: str) -> CollectiveKind | None:
    """Return the kind of collective that a `send` belongs to; `None` if the `send` does not cross slices.

    Args:
        attributes: attributes of the `send` in the text of a compiled program.

    Example:
        >>> handler = '_xla_host_transfer_handler_name="xla_megascale_runtime"'
        >>> kind_of(handler + ',_xla_megascale_target="{1,2}x{0:3}",_xla_megascale_transfer_type="ALL_GATHER"')
        'all-gather'
    """
    if HANDLER not in attributes or "_xla_megascale_target" not in attributes:
        return None
    type_match = re.search(r'_xla_megascale_transfer_type="(\w+)"', attributes)
    return KIND_BY_TRANSFER_TYPE.get(type_match[1], "collective-permute") if type_match else "collective-permute"


def split_axes(axis_sizes: Mapping[str, int], slice_count: int) -> tuple[dict[str, int], tuple[str, ...]]:
    """Return the size of each mesh axis inside a slice, and the names of the axes that cross slices.

    Args:
        axis_sizes: number of devices along each mesh axis.
        slice_count: number of slices.

    Example:
        >>> split_axes({"pipe": 2, "fsdp": 4}, 2)
        ({'pipe': 1, 'fsdp': 4}, ('pipe',))
    """
    slice_counts = slices_per_axis(tuple(axis_sizes.values()), slice_count)
    if slice_counts is None:
        return dict(axis_sizes), ()
    axes_and_counts = list(zip(axis_sizes, slice_counts, strict=True))
    sizes_in_slice = {axis: axis_sizes[axis] // count for axis, count in axes_and_counts}
    return sizes_in_slice, tuple(axis for axis, count in axes_and_counts if count > 1)
