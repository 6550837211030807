"""POFO (Beaumont et al. 2021, "Efficient Combination of Rematerialization and Offloading for Training DNNs", NeurIPS).

Each value is kept, recomputed or offloaded. The choices for all values are made together, at the least total cost. The
paper's dynamic program is for chains, in which copies overlap with other stages. Here an integer program
(`graph.solve`) makes the same choice within one block, and copies overlap with the computation of that block. Left out:
prefetching across blocks, which XLA does not do in a scan over layers.
"""

from jaxscale.memory.decision import SaveSet
from jaxscale.memory.graph import solve
from jaxscale.memory.save_set import Host
from jaxscale.memory.selectors.swap import keep_all_set
from jaxscale.programs.block import BlockGraph


def pofo(graph: BlockGraph, budget: int, host: Host) -> SaveSet:
    """Return the save set of least cost for a block; each value is kept, recomputed or offloaded.

    Args:
        graph: graph of the block, with seconds.
        budget: maximum bytes kept on the device, the block's inputs excluded.
        host: host memory for the offloaded values.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from jaxscale.programs.block import block_graph
        >>> from jaxscale.platforms.platform import Platform
        >>> w, x = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in [(4096, 4096), (8192, 4096)])
        >>> graph = block_graph(lambda w, x: jnp.tanh(x @ w) @ w, w, x, chip=Platform.parse("tpu v5e:2x2").chip)
        >>> save = pofo(graph, 0, Host(budget=2**30, bandwidth=15e9))
        >>> save.bytes, save.seconds < graph.seconds
        (0, True)
    """
    return keep_all_set(graph, budget) or solve(graph, budget, objective="seconds", host=host)
