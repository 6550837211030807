"""Collectives of a TPU program over the network between slices.

libtpu compiles one program per slice. Collectives inside a slice number the slice's devices from 0. A collective across
slices becomes a host transfer (`send`) by the megascale runtime, with its kind in an undocumented attribute. The
mesh axes across slices follow from the order of axes (`jaxscale/tpu_slices.py`).
"""

import re
from collections.abc import Mapping
from typing import Literal

from jaxscale.tpu_slices import slices_per_axis

CollectiveKind = Literal["all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute"]
KINDS: dict[str, CollectiveKind] = {
    "ALL_REDUCE": "all-reduce",
    "ALL_GATHER": "all-gather",
    "REDUCE_SCATTER": "reduce-scatter",
    "ALL_TO_ALL": "all-to-all",
    "ONE_TO_ONE": "collective-permute",
}
HANDLER = "xla_megascale_runtime"


def slices_of(text: str) -> int:
    """Return the number of slices between which a compiled program communicates; 1 if it does not.

    Example:
        >>> slices_of('_xla_megascale_target="{1,2}x{0:3}"'), slices_of("_xla_megascale_target={{100000->200000}}")
        (2, 2)
        >>> slices_of("nothing")
        1
    """
    slice_ids: set[int] = set()
    for id_ranges in re.findall(r'_xla_megascale_target="?\{([\d,:]+)\}x', text):
        for id_range in id_ranges.split(","):
            first, _, last = id_range.partition(":")
            slice_ids |= set(range(int(first), int(last or first) + 1))
    for targets in re.findall(r"_xla_megascale_target=\{\{(.*?)\}\}", text):
        slice_ids |= {int(device) // 100_000 for device in re.findall(r"\d+", targets)}
    return max(len(slice_ids), 1)


def kind_of(attributes: str) -> CollectiveKind | None:
    """Return the collective that a `send` with these attributes is part of; `None` if it does not cross slices.

    Example:
        >>> handler = '_xla_host_transfer_handler_name="xla_megascale_runtime"'
        >>> kind_of(handler + ',_xla_megascale_target="{1,2}x{0:3}",_xla_megascale_transfer_type="ALL_GATHER"')
        'all-gather'
    """
    if HANDLER not in attributes or "_xla_megascale_target" not in attributes:
        return None
    type_match = re.search(r'_xla_megascale_transfer_type="(\w+)"', attributes)
    return KINDS.get(type_match[1], "collective-permute") if type_match else "collective-permute"


def split(sizes: Mapping[str, int], slices: int) -> tuple[dict[str, int], tuple[str, ...]]:
    """Return the sizes of the mesh axes inside a slice, and the axes that cross slices.

    Example:
        >>> split({"pipe": 2, "fsdp": 4}, 2)
        ({'pipe': 1, 'fsdp': 4}, ('pipe',))
    """
    slice_counts = slices_per_axis(tuple(sizes.values()), slices)
    if slice_counts is None:
        return dict(sizes), ()
    sizes_in_slice = {axis: size // count for (axis, size), count in zip(sizes.items(), slice_counts, strict=True)}
    return sizes_in_slice, tuple(axis for axis, count in zip(sizes, slice_counts, strict=True) if count > 1)
