"""Capuchin (Peng et al. 2020, "Capuchin: Tensor-based GPU Memory Management for Deep Learning", ASPLOS 2020).

First what a copy hides goes to the host, the longest idle first; then each next value goes the cheaper way per byte, to
the host or recomputed.

Left out: that it watches a first, slow step for the times it needs, where a roofline gives them here; that it manages
tensors while the program runs; and its feedback when a copy comes late.
"""

from jaxscale.costs.block import BlockGraph
from jaxscale.memory.decision import SaveSet
from jaxscale.memory.graph import Host, save_set
from jaxscale.memory.selectors.swap import Idle, everything, idle_values


def capuchin(graph: BlockGraph, budget: int, host: Host) -> SaveSet:
    """What Capuchin keeps, moves and recomputes of a block.

    Args:
        graph: of the block, with seconds.
        budget: bytes kept on the device beside the block's inputs.
        host: where what is not recomputed goes.
    """
    values = idle_values(graph)
    kept, moved = list(values), []

    def choice(kept: list[Idle], moved: list[Idle]) -> SaveSet:
        names = [[name for value in group for name in value.names] for group in (kept, moved)]
        return save_set(graph, names[0], names[1], host)

    def without(value: Idle) -> list[Idle]:
        return [other for other in kept if other is not value]

    if whole := everything(graph, budget):
        return whole
    found = choice(kept, moved)
    for value in sorted(values, key=lambda value: -value.seconds):
        if found.bytes <= budget:
            return found
        trial = choice(without(value), [*moved, value])
        hidden = value.seconds >= 2 * value.bytes / host.bandwidth and trial.seconds <= found.seconds
        if hidden and trial.host_bytes <= host.budget:
            kept, moved, found = without(value), [*moved, value], trial
    while found.bytes > budget and kept:
        trials = []
        for value in kept:
            gone = choice(without(value), moved)
            trials.append(((gone.seconds - found.seconds) / max(value.bytes, 1), value, False, gone))
            away = choice(without(value), [*moved, value])
            if away.host_bytes <= host.budget:
                trials.append(((away.seconds - found.seconds) / max(value.bytes, 1), value, True, away))
        _, value, to_host, found = min(trials, key=lambda trial: trial[0])
        kept, moved = without(value), [*moved, value] if to_host else moved
    return found
