"""What a TPU program sends over the network between slices.

libtpu compiles one program per slice: collectives inside a slice number that slice's devices from 0, and what crosses
becomes a host transfer (`send`) that the megascale runtime carries out, with the kind in an attribute that no document
describes. Which mesh axes lie across slices follows from the order of axes (`jaxscale/slices.py`).
"""

import re
from collections.abc import Mapping
from typing import Any, Literal

from jaxscale.slices import across

KINDS: dict[str, Any] = {
    "ALL_REDUCE": "all-reduce",
    "ALL_GATHER": "all-gather",
    "REDUCE_SCATTER": "reduce-scatter",
    "ALL_TO_ALL": "all-to-all",
    "ONE_TO_ONE": "collective-permute",
}
HANDLER = "xla_megascale_runtime"


def slices_of(text: str) -> int:
    """How many slices a compiled program says that it sends between; 1 where it sends over no such network.

    Example:
        >>> slices_of('_xla_megascale_target="{1,2}x{0:3}"'), slices_of("_xla_megascale_target={{100000->200000}}")
        (2, 2)
        >>> slices_of("nothing")
        1
    """
    found: set[int] = set()
    for slices in re.findall(r'_xla_megascale_target="?\{([\d,:]+)\}x', text):
        for part in slices.split(","):
            first, _, last = part.partition(":")
            found |= set(range(int(first), int(last or first) + 1))
    for targets in re.findall(r"_xla_megascale_target=\{\{(.*?)\}\}", text):
        found |= {int(device) // 100_000 for device in re.findall(r"\d+", targets)}
    return max(len(found), 1)


Kind = Literal["all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute"]


def kind_of(attributes: str) -> Kind | None:
    """The collective that a `send` is part of; `None` where it crosses no slices.

    Example:
        >>> handler = '_xla_host_transfer_handler_name="xla_megascale_runtime"'
        >>> kind_of(handler + ',_xla_megascale_target="{1,2}x{0:3}",_xla_megascale_transfer_type="ALL_GATHER"')
        'all-gather'
    """
    if HANDLER not in attributes or "_xla_megascale_target" not in attributes:
        return None
    given = re.search(r'_xla_megascale_transfer_type="(\w+)"', attributes)
    return KINDS.get(given[1], "collective-permute") if given else "collective-permute"


def split(sizes: Mapping[str, int], slices: int) -> tuple[dict[str, int], tuple[str, ...]]:
    """Sizes of the mesh axes inside a slice, and the axes that cross slices.

    Example:
        >>> split({"pipe": 2, "fsdp": 4}, 2)
        ({'pipe': 1, 'fsdp': 4}, ('pipe',))
    """
    cut = across(tuple(sizes.values()), slices)
    if cut is None:
        return dict(sizes), ()
    inside = {axis: size // ways for (axis, size), ways in zip(sizes.items(), cut, strict=True)}
    return inside, tuple(axis for axis, ways in zip(sizes, cut, strict=True) if ways > 1)
