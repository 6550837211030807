"""Heuristics for the save set of a block: evict one value after the other until the budget holds.

* `ratio`: evicts what costs the least to make again per byte that it frees.
* `dtr_static`: the score of Dynamic Tensor Rematerialization (Kirisame et al. 2021, arXiv:2006.09616), cost / (bytes *
  staleness), where a value is the staler the earlier it was last read in the forward pass.

DTR evicts while a program runs; here its score chooses a save set once, before: a heuristic for comparison, not DTR.
Left out of it: what it decides at run time, the union-find of evicted neighbourhoods, and values made again and evicted
anew.
"""

from typing import Literal

from jaxscale.costs.block import BlockGraph
from jaxscale.errors import UserError
from jaxscale.memory.decision import SaveSet
from jaxscale.memory.graph import Objective, recompute, save_set

Score = Literal["ratio", "dtr_static"]


def greedy(graph: BlockGraph, budget: int, score: Score = "ratio", *, objective: Objective = "flop") -> SaveSet:
    """A save set within a budget, by eviction.

    Args:
        graph: of the block.
        budget: bytes kept on the device, beside the block's inputs.
        score: what is evicted first.
        objective: the cost in the score: FLOP of matrix products, or modelled seconds.

    Raises:
        UserError: a negative budget; seconds of a graph without a chip.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from jaxscale.costs.block import block_graph
        >>> w, x = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in [(8, 8), (4, 8)])
        >>> graph = block_graph(lambda w, x: jnp.tanh(jnp.tanh(x @ w) @ w), w, x)
        >>> [greedy(graph, budget).flop for budget in (0, 128, 256)]
        [1024, 512, 0]
    """
    if budget < 0:
        raise UserError(f"save set: got a budget of {budget} bytes, expected 0 or more")
    if objective == "seconds" and graph.equations and not graph.seconds:
        raise UserError("seconds of a block need a chip whose rates are known: give one, or ask for flop")

    def cost(kept: frozenset[int]) -> float:
        again = recompute(graph, kept)
        return again.flop if objective == "flop" else again.seconds

    clock, last = 0.0, [0.0] * len(graph.values)
    for equation in graph.equations:
        clock += equation.flop if objective == "flop" else equation.seconds
        for index in equation.inputs:
            last[index] = clock
    kept = _worth_keeping(graph)
    spent = cost(kept)
    size = sum(graph.values[index].bytes for index in kept)
    while size > budget:

        def badness(index: int, kept: frozenset[int] = kept, spent: float = spent) -> tuple[float, int]:
            # of values that cost alike, the largest goes first
            stale = clock - last[index] + clock * 1e-6 if score == "dtr_static" else 1.0
            return (cost(kept - {index}) - spent) / (graph.values[index].bytes * stale or 1.0), -graph.values[
                index
            ].bytes

        out = min(sorted(kept), key=badness)
        kept -= {out}
        spent, size = cost(kept), size - graph.values[out].bytes
    return save_set(graph, (graph.values[index].name for index in kept))


def _worth_keeping(graph: BlockGraph) -> frozenset[int]:
    """Where eviction starts: what the backward pass reads, or the last value before it that can be kept by name."""
    found: set[int] = set()
    wanted = list(graph.needed)
    seen = set(wanted)
    while wanted:
        value = graph.values[index := wanted.pop()]
        if value.mark is not None:
            found.add(index)
        elif value.producer >= 0:
            new = [i for i in graph.equations[value.producer].inputs if i not in seen]
            seen.update(new)
            wanted += new
    return frozenset(index for index in found if graph.values[index].bytes)
