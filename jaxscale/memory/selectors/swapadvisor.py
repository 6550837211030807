"""SwapAdvisor (Huang et al. 2020, "SwapAdvisor: Pushing Deep Learning Beyond the GPU Memory Limit via Smart Swapping",
ASPLOS 2020): a genetic search over the values that go to the host, scored by a simulated step.

The score is this project's model of a block's seconds. Left out: the paper's search over the schedule of operations and
over memory pools, both of which XLA decides. The search has a fixed seed, so one block always gets the same save set.
"""

import random

from jaxscale.memory.decision import SaveSet
from jaxscale.memory.save_set import Host
from jaxscale.memory.selectors.swap import idle_values, keep_all_set, set_without, values_to_move
from jaxscale.programs.block import BlockGraph

POPULATION, GENERATIONS, MUTATION = 32, 40, 0.05
"""Number of genomes alive at a time, number of generations, and the probability that a gene changes."""


def swapadvisor(graph: BlockGraph, budget: int, host: Host) -> SaveSet:
    """Return the save set that SwapAdvisor selects for a block.

    Args:
        graph: graph of the block, with seconds.
        budget: maximum bytes kept on the device, the block's inputs excluded.
        host: host memory for the values that move.
    """
    values = idle_values(graph)
    moved_values = values_to_move(budget, host, values)  # a first solution; refuses a budget that no solution meets
    if not moved_values:
        return keep_all_set(graph, budget) or set_without(graph, host, values, ())
    rng = random.Random(0)
    Genes = tuple[bool, ...]  # for each value, whether it moves

    def evaluate(genes: Genes) -> tuple[float, SaveSet]:
        """Return the seconds of these genes' save set, with a penalty if it exceeds a budget, and the save set."""
        save = set_without(graph, host, values, [v for v, is_moved in zip(values, genes, strict=True) if is_moved])
        excess_bytes = max(0, save.bytes - budget) + max(0, save.host_bytes - host.budget)
        return save.seconds + (graph.seconds * (1 + excess_bytes / max(budget, 1)) * 1e3 if excess_bytes else 0.0), save

    evaluation_by_genes: dict[Genes, tuple[float, SaveSet]] = {}

    def score(genes: Genes) -> tuple[float, int]:
        """Return the sort key of genes, least for the best: seconds with penalty, then bytes in host memory."""
        if genes not in evaluation_by_genes:
            evaluation_by_genes[genes] = evaluate(genes)
        return evaluation_by_genes[genes][0], evaluation_by_genes[genes][1].host_bytes

    def child(mother: Genes, father: Genes) -> Genes:
        """Return the genes of a child: each gene is that of a random parent, and a few genes are flipped."""
        mixed_genes = (rng.choice(gene_pair) for gene_pair in zip(mother, father, strict=True))
        return tuple(gene ^ (rng.random() < MUTATION) for gene in mixed_genes)

    first_genes: Genes = tuple(value in moved_values for value in values)
    population = [first_genes] + [tuple(rng.random() < 0.5 for _ in values) for _ in range(POPULATION - 1)]
    for _ in range(GENERATIONS):
        parents = sorted(population, key=score)[: POPULATION // 4]
        children = [child(*rng.choices(parents, k=2)) for _ in range(POPULATION - len(parents))]
        population = parents + children
    return evaluation_by_genes[min(population, key=score)][1]
