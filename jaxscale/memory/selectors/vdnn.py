"""vDNN (Rhu et al. 2016, "vDNN: Virtualized Deep Neural Networks for Scalable, Memory-Efficient Neural Network Design",
arXiv 1602.08124): the inputs of convolutions go to the host, in the order of the forward pass.

Here the inputs of matrix products go too, and once they are gone the other values follow, until the rest fits. Left
out: its choice of slower convolutions that need less workspace, and its own prefetch, which is XLA's.
"""

from jaxscale.costs.block import BlockGraph
from jaxscale.memory.decision import SaveSet
from jaxscale.memory.graph import Host
from jaxscale.memory.selectors.swap import idle_values, swap


def vdnn(graph: BlockGraph, budget: int, host: Host) -> SaveSet:
    """What vDNN moves of a block.

    Args:
        graph: of the block, with seconds.
        budget: bytes kept on the device beside the block's inputs.
        host: where the rest goes.
    """
    return swap(graph, budget, host, sorted(idle_values(graph), key=lambda value: not value.read_by_products))
