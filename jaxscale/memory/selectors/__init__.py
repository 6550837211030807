"""Rules that choose what of a block goes to host memory: each from a block's graph, a budget and a host to a SaveSet.

| rule | chooses | module |
|---|---|---|
| pofo | keep, recompute or offload, together, at the least cost | `pofo` |
| capuchin | what a copy hides, then the cheaper of copying and recomputing | `capuchin` |
| vdnn | inputs of the matrix products | `vdnn` |
| tflms | what lies idle the longest | `tflms` |
| autoswap | what lies idle the longest times its bytes | `autoswap` |
| swapadvisor | by genetic search | `swapadvisor` |

The last four recompute nothing. They were made from 2016 to 2020 for GPUs of some 12 TFLOP/s on links of 12 GB/s; a v5p
computes 40 times as fast on much the same link, which hides a tenth of what they move: they are here to compare with.
`experiments/benchmarks/offload.py` shows all of them on one block.
"""

from collections.abc import Callable, Mapping

from jaxscale.costs.block import BlockGraph
from jaxscale.memory.decision import SaveSet
from jaxscale.memory.graph import Host
from jaxscale.memory.selectors.autoswap import autoswap
from jaxscale.memory.selectors.capuchin import capuchin
from jaxscale.memory.selectors.pofo import pofo
from jaxscale.memory.selectors.swapadvisor import swapadvisor
from jaxscale.memory.selectors.tflms import tflms
from jaxscale.memory.selectors.vdnn import vdnn

Selector = Callable[[BlockGraph, int, Host], SaveSet]
"""From a block with seconds, bytes that it may keep on the device, and the host, to what it keeps and where."""

SELECTORS: Mapping[str, Selector] = {
    "pofo": pofo,
    "capuchin": capuchin,
    "vdnn": vdnn,
    "tflms": tflms,
    "autoswap": autoswap,
    "swapadvisor": swapadvisor,
}
"""The rules, by the word of `MemoryPlan.selector`."""

__all__ = ["SELECTORS", "Selector", "autoswap", "capuchin", "pofo", "swapadvisor", "tflms", "vdnn"]
