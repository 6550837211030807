"""Capuchin (Peng et al. 2020, "Capuchin: Tensor-based GPU Memory Management for Deep Learning", ASPLOS 2020).

Values whose copies overlap with computation go to the host first, in order of decreasing idle time. Each further value
is copied or recomputed, whichever is cheaper per byte.

Left out: the slow first step that measures times (here a roofline model estimates them); management of tensors while
the program runs; and feedback when a copy is late.
"""

from jaxscale.memory.decision import SaveSet
from jaxscale.memory.save_set import Host, save_set
from jaxscale.memory.selectors.swap import IdleValue, idle_values, keep_all_set
from jaxscale.programs.block import BlockGraph


def capuchin(graph: BlockGraph, budget: int, host: Host) -> SaveSet:
    """Return the save set that Capuchin selects for a block.

    Args:
        graph: graph of the block, with seconds.
        budget: maximum bytes kept on the device, the block's inputs excluded.
        host: host memory for the values that are neither kept nor recomputed.
    """
    values = idle_values(graph)
    kept_values, offloaded_values = list(values), []

    def set_of(device_values: list[IdleValue], host_values: list[IdleValue]) -> SaveSet:
        """Return the save set that keeps `device_values` on the device and offloads `host_values`."""
        kept_names = [name for value in device_values for name in value.names]
        offloaded_names = [name for value in host_values for name in value.names]
        return save_set(graph, kept_names, offloaded_names, host)

    def kept_without(value: IdleValue) -> list[IdleValue]:
        """Return the values in `kept_values` except this one."""
        return [kept_value for kept_value in kept_values if kept_value is not value]

    if full_set := keep_all_set(graph, budget):
        return full_set
    save = set_of(kept_values, offloaded_values)
    for value in sorted(values, key=lambda value: -value.seconds):
        if save.bytes <= budget:
            return save
        copied_set = set_of(kept_without(value), [*offloaded_values, value])
        is_hidden = value.seconds >= 2 * value.bytes / host.bandwidth and copied_set.seconds <= save.seconds
        if is_hidden and copied_set.host_bytes <= host.budget:
            kept_values, offloaded_values, save = kept_without(value), [*offloaded_values, value], copied_set
    while save.bytes > budget and kept_values:
        options = []  # each: seconds per byte, value to move, whether it is copied to the host, resulting save set
        for value in kept_values:
            rerun_set = set_of(kept_without(value), offloaded_values)
            options.append(((rerun_set.seconds - save.seconds) / max(value.bytes, 1), value, False, rerun_set))
            copied_set = set_of(kept_without(value), [*offloaded_values, value])
            if copied_set.host_bytes <= host.budget:
                options.append(((copied_set.seconds - save.seconds) / max(value.bytes, 1), value, True, copied_set))
        _, value, is_copied, save = min(options, key=lambda option: option[0])
        kept_values, offloaded_values = kept_without(value), offloaded_values + [value] * is_copied
    return save
