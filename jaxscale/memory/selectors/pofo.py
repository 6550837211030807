"""POFO (Beaumont et al. 2021, "Efficient Combination of Rematerialization and Offloading for Training DNNs", NeurIPS).

Each value is kept, recomputed or offloaded, and all are chosen together at the least cost. The paper's dynamic program
is for chains, whose copies overlap with other stages. Here the same choice is made within one block by an integer
program (`graph.solve`), and copies overlap with the computation of their own block. Left out: prefetching across
blocks, which XLA does not do in a scan over layers.
"""

from jaxscale.memory.decision import SaveSet
from jaxscale.memory.graph import solve
from jaxscale.memory.save_set import Host
from jaxscale.memory.selectors.swap import everything
from jaxscale.programs.block import BlockGraph


def pofo(graph: BlockGraph, budget: int, host: Host) -> SaveSet:
    """The cheapest of all ways to keep, recompute and offload the values of a block.

    Args:
        graph: graph of the block, with seconds.
        budget: most bytes kept on the device besides the block's inputs.
        host: host memory for the offloaded values, within its budget.

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
    return everything(graph, budget) or solve(graph, budget, objective="seconds", host=host)
