"""SwapAdvisor (Huang et al. 2020, "SwapAdvisor: Pushing Deep Learning Beyond the GPU Memory Limit via Smart Swapping",
ASPLOS 2020): a genetic search over the values that go to the host, scored by a simulated step.

The score is this project's model of a block's seconds. Left out: the paper's search over the schedule of operations and
over memory pools, both of which XLA decides. The search is seeded: the same block gives the same set.
"""

import random

from jaxscale.memory.decision import SaveSet
from jaxscale.memory.save_set import Host
from jaxscale.memory.selectors.swap import everything, idle_values, set_without, values_to_move
from jaxscale.programs.block import BlockGraph

POPULATION, GENERATIONS, MUTATION = 32, 40, 0.05
"""Sizes of the search; the last is the probability that a gene changes."""


def swapadvisor(graph: BlockGraph, budget: int, host: Host) -> SaveSet:
    """The save set of a block by SwapAdvisor.

    Args:
        graph: graph of the block, with seconds.
        budget: most bytes kept on the device besides the block's inputs.
        host: host memory for the other values.
    """
    values = idle_values(graph)
    moved_values = values_to_move(budget, host, values)  # a first solution, which raises if there is none
    if not moved_values:
        return everything(graph, budget) or set_without(graph, host, values, ())
    rng = random.Random(0)
    Genes = tuple[bool, ...]  # whether each value moves

    def evaluate(genes: Genes) -> tuple[float, SaveSet]:
        """Seconds of the save set of these genes, with a penalty beyond a budget; and the save set."""
        save = set_without(graph, host, values, [v for v, moves in zip(values, genes, strict=True) if moves])
        excess_bytes = max(0, save.bytes - budget) + max(0, save.host_bytes - host.budget)
        return save.seconds + (graph.seconds * (1 + excess_bytes / max(budget, 1)) * 1e3 if excess_bytes else 0.0), save

    evaluations: dict[Genes, tuple[float, SaveSet]] = {}

    def score(genes: Genes) -> tuple[float, int]:
        """Sort key of genes, the best first: seconds with penalty, then bytes in host memory."""
        if genes not in evaluations:
            evaluations[genes] = evaluate(genes)
        return evaluations[genes][0], evaluations[genes][1].host_bytes

    def child(mother: Genes, father: Genes) -> Genes:
        """Genes of one parent or the other at random, some of them changed."""
        mixed_genes = (rng.choice(pair) for pair in zip(mother, father, strict=True))
        return tuple(gene ^ (rng.random() < MUTATION) for gene in mixed_genes)

    first_genes: Genes = tuple(value in moved_values for value in values)
    population = [first_genes] + [tuple(rng.random() < 0.5 for _ in values) for _ in range(POPULATION - 1)]
    for _ in range(GENERATIONS):
        parents = sorted(population, key=score)[: POPULATION // 4]
        children = [child(*rng.choices(parents, k=2)) for _ in range(POPULATION - len(parents))]
        population = parents + children
    return evaluations[min(population, key=score)][1]
