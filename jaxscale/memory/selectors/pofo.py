"""POFO (Beaumont et al. 2021, "Efficient Combination of Rematerialization and Offloading for Training DNNs", NeurIPS).

Keep, recompute or offload, chosen together at the least cost. The paper's dynamic program is for chains, with copies
that a step hides elsewhere; here the same choice is made within one block by integer program (`graph.solve`), and
copies hide behind the work of their own block. Left out: prefetching across blocks, which in a scan over layers XLA
does not do.
"""

from jaxscale.memory.decision import SaveSet
from jaxscale.memory.graph import solve
from jaxscale.memory.save_set import Host
from jaxscale.memory.selectors.swap import everything
from jaxscale.programs.block import BlockGraph


def pofo(graph: BlockGraph, budget: int, host: Host) -> SaveSet:
    """The cheapest of all ways to keep, recompute and offload the values of a block.

    Args:
        graph: of the block, with seconds.
        budget: bytes kept on the device besides the block's inputs.
        host: gets the offloaded values, within its budget.

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
