"""Parts of arrays in files: the region of its array that each holds, and regions that are read from several of them.

An array is written in one number of parts and may be read in another. `region_of` determines what a device needs,
`is_covered` whether the parts at hand contain it, and `assemble` reads it from those parts that overlap with it.
"""

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

Region = tuple[tuple[int, int], ...]
"""Start and end of a part of an array along each dim."""


@dataclasses.dataclass(frozen=True)
class StoredPart:
    """A part of an array in a file.

    Args:
        shape: shape of the whole array.
        region: start and end of the part along each dim of the array.
        dtype: name of the array's dtype.
        path: the file.
        position: offset of the part's first byte in the file.
    """

    shape: tuple[int, ...]
    region: Region
    dtype: str
    path: Path
    position: int


def region_of(region_slices: Any, shape: tuple[int, ...]) -> Region:
    """Return the region that slices, one for each dim, select from an array of this shape."""
    return tuple(dim_slice.indices(dim_size)[:2] for dim_slice, dim_size in zip(region_slices, shape, strict=True))


def element_count(region: Region) -> int:
    """Return the number of elements of a region."""
    return math.prod(end - start for start, end in region)


def _overlap(one: Region, other: Region) -> Region:
    """Return the intersection of two regions; if they are disjoint, some dim of it has end <= start."""
    return tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))


def belongs_to(part: StoredPart, leaf: Any) -> bool:
    """Return whether a part belongs to an array with the shape and dtype of `leaf`."""
    return (part.shape, part.dtype) == (leaf.shape, str(leaf.dtype))


def is_covered(leaf: Any, parts: Sequence[StoredPart]) -> bool:
    """Return whether the parts cover every region of an array that this process's devices hold."""
    regions = {part.region for part in parts if belongs_to(part, leaf)}
    return all(
        _is_region_covered(region_of(index, leaf.shape), regions)
        for index in leaf.sharding.addressable_devices_indices_map(leaf.shape).values()
    )


def _is_region_covered(region: Region, part_regions: set[Region]) -> bool:
    """Return whether `part_regions`, which do not overlap, cover a region."""
    overlaps = [_overlap(region, part_region) for part_region in part_regions]
    return element_count(region) == sum(
        element_count(overlap) for overlap in overlaps if all(start < end for start, end in overlap)
    )


def assemble(parts: Sequence[StoredPart], region: Region, dtype: Any) -> np.ndarray:
    """Return a region of an array, read from the parts that cover it."""
    region_array = np.empty([end - start for start, end in region], dtype)
    for part in {part.region: part for part in parts}.values():
        overlap = _overlap(region, part.region)
        if all(start < end for start, end in overlap):
            shape = [end - start for start, end in part.region]
            raw_part = np.memmap(part.path, np.uint8, "r", part.position, (math.prod(shape) * region_array.itemsize,))
            part_array = np.asarray(raw_part).view(dtype).reshape(shape)
            source_slices = tuple(
                slice(start - origin, end - origin)
                for (start, end), (origin, _) in zip(overlap, part.region, strict=True)
            )
            target_slices = tuple(
                slice(start - origin, end - origin) for (start, end), (origin, _) in zip(overlap, region, strict=True)
            )
            region_array[target_slices] = part_array[source_slices]
    return region_array
