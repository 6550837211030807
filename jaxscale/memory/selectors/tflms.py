"""TFLMS (Le et al. 2018, "TFLMS: Large Model Support in TensorFlow by Graph Rewriting", arXiv 1807.02037): the value
with the longest distance to its next read goes to the host first.

Distance is in seconds here, where the paper counts operations. Left out: its control edges that time the copy back,
which is XLA's, and its fusing of swaps.
"""

from jaxscale.memory.decision import SaveSet
from jaxscale.memory.save_set import Host
from jaxscale.memory.selectors.swap import idle_values, swap
from jaxscale.programs.block import BlockGraph


def tflms(graph: BlockGraph, budget: int, host: Host) -> SaveSet:
    """The save set of a block by TFLMS.

    Args:
        graph: of the block, with seconds.
        budget: bytes kept on the device besides the block's inputs.
        host: gets the other values.
    """
    return swap(graph, budget, host, sorted(idle_values(graph), key=lambda value: -value.seconds))
