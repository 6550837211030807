"""JAX's policies as save sets, for comparison.

A policy accepts or rejects kinds of operations; accepted results that the backward pass reads are kept.
"""

from jaxscale.errors import unknown
from jaxscale.memory.decision import SaveSet
from jaxscale.memory.plan import POLICIES
from jaxscale.memory.save_set import EVERYTHING, recompute, save_set
from jaxscale.programs.block import BlockGraph


def policy_set(graph: BlockGraph, policy: str) -> SaveSet:
    """The save set of a block under a policy of `jax.checkpoint_policies`.

    Args:
        graph: of the block.
        policy: its name, such as "dots_saveable".

    Raises:
        UserError: a policy that is none of those without arguments.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from jaxscale.programs.block import block_graph
        >>> w, x = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in [(8, 8), (4, 8)])
        >>> graph = block_graph(lambda w, x: jnp.tanh(x @ w) @ w, w, x)
        >>> policy_set(graph, "dots_saveable").keep, policy_set(graph, "nothing_saveable").flop
        (('dot_general',), 512)
    """
    if policy not in POLICIES:
        raise unknown("policy of jax.checkpoint_policies", policy, POLICIES)
    if policy == "everything_saveable":
        return save_set(graph, (EVERYTHING,))
    saveable = {index for equation in graph.equations if policy in equation.kept_by for index in equation.outputs}
    recomputed = recompute(graph, saveable)
    needed = {*graph.needed, *(index for number in recomputed.equations for index in graph.equations[number].inputs)}
    kept_indices = sorted(saveable & needed)
    names = tuple(graph.values[index].name for index in kept_indices)
    size = sum(graph.values[index].bytes for index in kept_indices)
    return SaveSet(graph.fingerprint, names, (), size, 0, recomputed.flop, recomputed.seconds)
