"""vDNN (Rhu et al. 2016, "vDNN: Virtualized Deep Neural Networks for Scalable, Memory-Efficient Neural Network Design",
arXiv 1602.08124): the inputs of convolutions go to the host, in the order of the forward pass.

Here the inputs of matrix products go too, and after them the other values, until the kept ones fit. Left
out: its choice of slower convolutions that need less workspace, and its prefetch, which is XLA's.
"""

from jaxscale.memory.decision import SaveSet
from jaxscale.memory.save_set import Host
from jaxscale.memory.selectors.swap import idle_values, swap
from jaxscale.programs.block import BlockGraph


def vdnn(graph: BlockGraph, budget: int, host: Host) -> SaveSet:
    """The save set of a block by vDNN.

    Args:
        graph: of the block, with seconds.
        budget: bytes kept on the device besides the block's inputs.
        host: gets the other values.
    """
    return swap(graph, budget, host, sorted(idle_values(graph), key=lambda value: not value.read_by_products))
