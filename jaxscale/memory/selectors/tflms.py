"""TFLMS (Le et al. 2018, "TFLMS: Large Model Support in TensorFlow by Graph Rewriting", arXiv 1807.02037): what is read
again after the longest distance goes to the host first.

Distance is in seconds here, where the paper counts operations. Left out: its control edges that time the copy back,
which is XLA's, and its fusing of swaps.
"""

from jaxscale.costs.block import BlockGraph
from jaxscale.memory.decision import SaveSet
from jaxscale.memory.graph import Host
from jaxscale.memory.selectors.swap import idle_values, swap


def tflms(graph: BlockGraph, budget: int, host: Host) -> SaveSet:
    """What TFLMS moves of a block.

    Args:
        graph: of the block, with seconds.
        budget: bytes kept on the device beside the block's inputs.
        host: where the rest goes.
    """
    return swap(graph, budget, host, sorted(idle_values(graph), key=lambda value: -value.seconds))
