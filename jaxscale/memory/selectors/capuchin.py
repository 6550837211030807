"""Capuchin (Peng et al. 2020, "Capuchin: Tensor-based GPU Memory Management for Deep Learning", ASPLOS 2020).

Values whose copies are hidden go to the host first, the longest idle first; then each next value is copied or
recomputed, whichever is cheaper per byte.

Left out: the slow first step that measures times, which a roofline gives here; management of tensors while the program
runs; and feedback when a copy comes late.
"""

from jaxscale.memory.decision import SaveSet
from jaxscale.memory.save_set import Host, save_set
from jaxscale.memory.selectors.swap import Idle, everything, idle_values
from jaxscale.programs.block import BlockGraph


def capuchin(graph: BlockGraph, budget: int, host: Host) -> SaveSet:
    """The save set of a block by Capuchin.

    Args:
        graph: of the block, with seconds.
        budget: bytes kept on the device besides the block's inputs.
        host: gets the values that are neither kept nor recomputed.
    """
    values = idle_values(graph)
    kept, offloaded = list(values), []

    def choice(kept: list[Idle], offloaded: list[Idle]) -> SaveSet:
        names = [[name for value in group for name in value.names] for group in (kept, offloaded)]
        return save_set(graph, names[0], names[1], host)

    def without(value: Idle) -> list[Idle]:
        return [candidate for candidate in kept if candidate is not value]

    if full_set := everything(graph, budget):
        return full_set
    save = choice(kept, offloaded)
    for value in sorted(values, key=lambda value: -value.seconds):
        if save.bytes <= budget:
            return save
        option = choice(without(value), [*offloaded, value])
        hidden = value.seconds >= 2 * value.bytes / host.bandwidth and option.seconds <= save.seconds
        if hidden and option.host_bytes <= host.budget:
            kept, offloaded, save = without(value), [*offloaded, value], option
    while save.bytes > budget and kept:
        options = []
        for value in kept:
            recomputed = choice(without(value), offloaded)
            options.append(((recomputed.seconds - save.seconds) / max(value.bytes, 1), value, False, recomputed))
            copied = choice(without(value), [*offloaded, value])
            if copied.host_bytes <= host.budget:
                options.append(((copied.seconds - save.seconds) / max(value.bytes, 1), value, True, copied))
        _, value, to_host, save = min(options, key=lambda option: option[0])
        kept, offloaded = without(value), [*offloaded, value] if to_host else offloaded
    return save
