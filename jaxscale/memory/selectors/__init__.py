"""Rules that select a block's values for host memory: functions of a block's graph, a budget and a host.

| rule | chooses | module |
|---|---|---|
| pofo | values to keep, recompute and offload, all at once, at the least cost | `pofo` |
| capuchin | values whose copies are hidden, then values to copy or recompute, whichever is cheaper | `capuchin` |
| vdnn | inputs of the matrix products | `orders` |
| tflms | the values that are idle the longest | `orders` |
| autoswap | the values with the largest product of bytes and idle time | `orders` |
| swapadvisor | values that a genetic search finds | `swapadvisor` |

The last four rules recompute nothing. They were designed between 2016 and 2020 for GPUs of 12 TFLOP/s on links of 12
GB/s. A v5p computes 40 times as fast over a similar link, so only a tenth of the copies that these rules make is
hidden. They are here for comparison. `experiments/benchmarks/offload.py` shows all rules on one block.
"""

import functools
from collections.abc import Callable, Mapping

from jaxscale.memory.decision import SaveSet
from jaxscale.memory.save_set import Host
from jaxscale.memory.selectors.capuchin import capuchin
from jaxscale.memory.selectors.orders import autoswap, tflms, vdnn
from jaxscale.memory.selectors.pofo import pofo
from jaxscale.memory.selectors.swap import swap
from jaxscale.memory.selectors.swapadvisor import swapadvisor
from jaxscale.programs.block import BlockGraph

SelectorFunction = Callable[[BlockGraph, int, Host], SaveSet]
"""Function of a block's graph (with seconds), a budget of bytes on the device, and a host; returns a save set."""

SELECTORS: Mapping[str, SelectorFunction] = {
    "pofo": pofo,
    "capuchin": capuchin,
    "vdnn": functools.partial(swap, order=vdnn),
    "tflms": functools.partial(swap, order=tflms),
    "autoswap": functools.partial(swap, order=autoswap),
    "swapadvisor": swapadvisor,
}
"""The rules, by the name in `MemoryPlan.selector`."""
