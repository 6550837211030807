"""Heuristics for the save set of a block: evict one value after the other until the rest fits the budget.

* `ratio`: evicts the value of least recomputation cost per freed byte.
* `dtr_static`: the score of Dynamic Tensor Rematerialization (Kirisame et al. 2021, arXiv:2006.09616), cost / (bytes *
  staleness), where the staleness of a value is the time since its last read in the forward pass.

DTR evicts while a program runs; here its score chooses a save set in advance: a heuristic for comparison, not DTR.
Left out of it: decisions at run time, the union-find of evicted neighbourhoods, and repeated eviction of recomputed
values.
"""

from typing import Literal

from jaxscale.memory.decision import SaveSet
from jaxscale.memory.plan import SaveSetObjective
from jaxscale.memory.save_set import check_request, cost_of, recompute, save_set
from jaxscale.programs.block import BlockGraph

EvictionScore = Literal["ratio", "dtr_static"]


def greedy(
    graph: BlockGraph, budget: int, score: EvictionScore = "ratio", *, objective: SaveSetObjective = "flop"
) -> SaveSet:
    """A save set within a budget, by eviction.

    Args:
        graph: of the block.
        budget: bytes kept on the device, besides the block's inputs.
        score: the value of least score is evicted first.
        objective: the cost in the score: FLOP of matrix products, or modelled seconds.

    Raises:
        UserError: a negative budget; seconds of a graph without a chip.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from jaxscale.programs.block import block_graph
        >>> w, x = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in [(8, 8), (4, 8)])
        >>> graph = block_graph(lambda w, x: jnp.tanh(jnp.tanh(x @ w) @ w), w, x)
        >>> [greedy(graph, budget).flop for budget in (0, 128, 256)]
        [1024, 512, 0]
    """
    check_request(graph, budget, objective)

    def cost(kept_indices: frozenset[int]) -> float:
        return cost_of(recompute(graph, kept_indices), objective)

    clock, last_read = 0.0, [0.0] * len(graph.values)
    for equation in graph.equations:
        clock += cost_of(equation, objective)
        for index in equation.inputs:
            last_read[index] = clock
    kept_indices = _worth_keeping(graph)
    kept_cost = cost(kept_indices)
    size = sum(graph.values[index].bytes for index in kept_indices)
    while size > budget:

        def badness(
            index: int, kept_indices: frozenset[int] = kept_indices, kept_cost: float = kept_cost
        ) -> tuple[float, int]:
            # of values of equal cost, the largest is evicted first
            stale = clock - last_read[index] + clock * 1e-6 if score == "dtr_static" else 1.0
            size = graph.values[index].bytes
            return (cost(kept_indices - {index}) - kept_cost) / (size * stale or 1.0), -size

        evicted = min(sorted(kept_indices), key=badness)
        kept_indices -= {evicted}
        kept_cost, size = cost(kept_indices), size - graph.values[evicted].bytes
    return save_set(graph, (graph.values[index].name for index in kept_indices))


def _worth_keeping(graph: BlockGraph) -> frozenset[int]:
    """The initial save set: the values that the backward pass reads, or the last named values before them."""
    starting_set: set[int] = set()
    pending = list(graph.needed)
    visited = set(pending)
    while pending:
        value = graph.values[index := pending.pop()]
        if value.mark is not None:
            starting_set.add(index)
        elif value.producer >= 0:
            new = [i for i in graph.equations[value.producer].inputs if i not in visited]
            visited.update(new)
            pending += new
    return frozenset(index for index in starting_set if graph.values[index].bytes)
