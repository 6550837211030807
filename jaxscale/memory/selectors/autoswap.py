"""AutoSwap (Zhang et al. 2019, "Efficient Memory Management for GPU-based Deep Learning Systems", arXiv 1903.06631).

The value with the largest product of bytes and idle time, its "area of absence", goes to the host first.

Left out: its weighting of this score with three others by Bayesian optimization, and its memory pool, which is XLA's.
"""

from jaxscale.memory.decision import SaveSet
from jaxscale.memory.save_set import Host
from jaxscale.memory.selectors.swap import idle_values, swap
from jaxscale.programs.block import BlockGraph


def autoswap(graph: BlockGraph, budget: int, host: Host) -> SaveSet:
    """The save set of a block by AutoSwap.

    Args:
        graph: of the block, with seconds.
        budget: bytes kept on the device besides the block's inputs.
        host: gets the other values.
    """
    return swap(graph, budget, host, sorted(idle_values(graph), key=lambda value: -value.seconds * value.bytes))
