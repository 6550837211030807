"""Heuristics for the save set of a block: evict values one by one until the remaining values fit the budget.

* `ratio` evicts the value with the least recomputation cost per freed byte.
* `dtr_static` uses the score of Dynamic Tensor Rematerialization (DTR; Kirisame et al. 2021, arXiv:2006.09616), cost /
  (bytes * staleness). The staleness of a value is the time since its last read in the forward pass.

DTR evicts while a program runs; here its score chooses a save set in advance, as a heuristic for comparison.
Left out of DTR: decisions at run time, the union-find of evicted neighborhoods, and repeated eviction of recomputed
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
    """Return a save set within a budget, chosen by eviction.

    Args:
        graph: graph of the block.
        budget: maximum bytes kept on the device, the block's inputs excluded.
        score: name of the score; the value of least score is evicted first.
        objective: the cost in the score: FLOP of matrix products, or modeled seconds.

    Raises:
        UserError: the budget is negative, or the objective is "seconds" and the graph has no chip.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from jaxscale.programs.block import block_graph
        >>> w, x = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in [(8, 8), (4, 8)])
        >>> graph = block_graph(lambda w, x: jnp.tanh(jnp.tanh(x @ w) @ w), w, x)
        >>> [greedy(graph, budget).flop for budget in (0, 128, 256)]
        [1024, 512, 0]
    """
    check_request(graph, budget, objective)

    def rerun_cost(indices: frozenset[int]) -> float:
        """Return the cost of recomputation if the values with these indices are kept on the device."""
        return cost_of(recompute(graph, indices), objective)

    # time is measured as the cost of the equations that have run; the list has the time of each value's last read
    elapsed_cost, last_read_costs = 0.0, [0.0] * len(graph.values)
    for equation in graph.equations:
        elapsed_cost += cost_of(equation, objective)
        for index in equation.inputs:
            last_read_costs[index] = elapsed_cost
    kept_indices = _indices_worth_keeping(graph)
    kept_cost = rerun_cost(kept_indices)
    kept_bytes = sum(graph.values[index].bytes for index in kept_indices)
    while kept_bytes > budget:

        def eviction_key(
            index: int, base_indices: frozenset[int] = kept_indices, base_cost: float = kept_cost
        ) -> tuple[float, int]:
            """Return the sort key of a value: its score, then its negative bytes; the least key is evicted next."""
            age = elapsed_cost - last_read_costs[index]
            staleness = age + elapsed_cost * 1e-6 if score == "dtr_static" else 1.0
            value_bytes = graph.values[index].bytes
            return (rerun_cost(base_indices - {index}) - base_cost) / (value_bytes * staleness or 1.0), -value_bytes

        evicted_index = min(sorted(kept_indices), key=eviction_key)
        kept_indices -= {evicted_index}
        kept_cost, kept_bytes = rerun_cost(kept_indices), kept_bytes - graph.values[evicted_index].bytes
    return save_set(graph, (graph.values[index].name for index in kept_indices))


def _indices_worth_keeping(graph: BlockGraph) -> frozenset[int]:
    """Return the indices of the values that are kept before the first eviction.

    These are the values that the backward pass reads and that can be kept by name. If the backward pass reads a value
    without a name, the nearest named values from which that value is computed are kept instead.
    """
    named_indices: set[int] = set()
    pending_indices = list(graph.needed)
    visited_indices = set(pending_indices)
    while pending_indices:
        value = graph.values[index := pending_indices.pop()]
        if value.mark is not None:
            named_indices.add(index)
        elif value.producer >= 0:
            unvisited_indices = [i for i in graph.equations[value.producer].inputs if i not in visited_indices]
            visited_indices.update(unvisited_indices)
            pending_indices += unvisited_indices
    return frozenset(index for index in named_indices if graph.values[index].bytes)
