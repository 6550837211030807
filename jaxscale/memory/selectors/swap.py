"""Functions shared by the rules that move values to the host: idle times of values, and the values to move.

Times are those of the block alone, estimated by the roofline model. The forward pass runs the equations in order; the
backward pass runs them in reverse and takes twice as long.
"""

import dataclasses
from collections.abc import Callable, Iterable, Sequence

from jaxscale.errors import UserError
from jaxscale.memory.decision import SaveSet
from jaxscale.memory.save_set import EVERYTHING, Host, recompute, save_set
from jaxscale.programs.block import BlockGraph
from jaxscale.values.byte_sizes import bytes_text

SMALL = 256 * 1024
"""Values of at most this number of bytes stay on the device if possible: the latency of their copies costs too much."""


@dataclasses.dataclass(frozen=True)
class IdleValue:
    """A value that is idle from its last read in the forward pass to its first read in the backward pass.

    Values that can only be kept or moved together are one `IdleValue`.

    Args:
        names: names of the values.
        bytes: bytes of the values, per device.
        start: time of the last read of the values in the forward pass, in seconds from the start of the block.
        stop: time of the first read of the values in the backward pass, in seconds from the start of the block.
        is_product_input: whether a matrix product or convolution reads one of the values.
    """

    names: tuple[str, ...]
    bytes: int
    start: float
    stop: float
    is_product_input: bool

    @property
    def seconds(self) -> float:
        """The seconds for which the values are idle."""
        return self.stop - self.start


def idle_values(graph: BlockGraph) -> tuple[IdleValue, ...]:
    """Return the values to keep or move so that the backward pass recomputes no matrix product.

    The order is that of computation. The result has the values that the backward pass reads and that can be kept by
    name. A value inside an operation cannot be kept by name. It is recomputed from the result of an earlier matrix
    product, and that result is one of the returned values.

    Raises:
        UserError: the graph's equations have no modeled times.
    """
    if graph.equations and not graph.seconds:
        raise UserError("offload needs modeled seconds, and so a chip with known rates: specify a platform")
    forward_seconds = 0.0  # of the equations so far
    last_read_times: dict[int, float] = {}  # by index of the value, in seconds from the start of the block
    product_input_indices: set[int] = set()
    for equation in graph.equations:
        forward_seconds += equation.seconds
        for index in (*equation.inputs, *equation.outputs):
            last_read_times[index] = forward_seconds
        product_input_indices |= set(equation.inputs) if equation.flop else set()
    indices_by_mark: dict[str, list[int]] = {}
    indices_to_keep = {index for index in graph.needed if graph.values[index].mark is not None}
    while True:
        products = [
            graph.equations[e] for e in recompute(graph, indices_to_keep).equation_indices if graph.equations[e].flop
        ]
        named_result_indices = {i for product in products for i in product.outputs if graph.values[i].mark is not None}
        unkept_indices = named_result_indices - indices_to_keep  # indices of values
        if not unkept_indices:
            break
        indices_to_keep |= unkept_indices
    for index in sorted(indices_to_keep):
        indices_by_mark.setdefault(str(graph.values[index].mark), []).append(index)
    values = []
    for indices in indices_by_mark.values():
        start = max(last_read_times[index] for index in indices)
        values.append(
            IdleValue(
                names=tuple(graph.values[index].name for index in indices),
                bytes=sum(graph.values[index].bytes for index in indices),
                start=start,
                stop=forward_seconds + 2 * (forward_seconds - start),
                is_product_input=bool(product_input_indices & set(indices)),
            )
        )
    return tuple(values)


def keep_all_set(graph: BlockGraph, budget: int) -> SaveSet | None:
    """Return the save set that keeps every residual; `None` if it exceeds the budget."""
    return save_set(graph, (EVERYTHING,)) if graph.needed_bytes <= budget else None


def swap(graph: BlockGraph, budget: int, host: Host, order: Callable[[IdleValue], float]) -> SaveSet:
    """Return the save set that moves values to the host, in the given order, until the other values fit the budget.

    Small values move last.

    Args:
        graph: graph of the block, with seconds.
        budget: maximum bytes kept on the device, the block's inputs excluded.
        host: host memory for the values that move.
        order: sort key of the values; the value with the least key moves first.

    Raises:
        UserError: the host's budget is too small.
    """
    values = sorted(idle_values(graph), key=order)
    return keep_all_set(graph, budget) or set_without(graph, host, values, values_to_move(budget, host, values))


def values_to_move(budget: int, host: Host, values: Sequence[IdleValue]) -> list[IdleValue]:
    """Return the values that move to the host, in order, so that the other values fit the budget.

    The values move in the order of `values`, but small ones move last.

    Raises:
        UserError: the host's budget is too small.
    """
    kept_bytes, moved_values = sum(value.bytes for value in values), []
    for value in sorted(values, key=lambda value: value.bytes <= SMALL):
        if kept_bytes <= budget:
            break
        kept_bytes -= value.bytes
        moved_values.append(value)
    host_bytes = sum(value.bytes for value in moved_values)
    if host_bytes > host.budget:
        raise UserError(
            f"a rule that recomputes nothing moves {bytes_text(host_bytes)} of each block to the host, which has "
            f"room for only {bytes_text(host.budget)}: use offload:pofo, a larger budget, or a larger host limit"
        )
    return moved_values


def set_without(
    graph: BlockGraph, host: Host, values: Iterable[IdleValue], moved_values: Iterable[IdleValue]
) -> SaveSet:
    """Return the save set that keeps the values on the device, except for the moved ones, which go to the host."""
    unique_moved_values = set(moved_values)
    return save_set(
        graph,
        [name for value in values if value not in unique_moved_values for name in value.names],
        [name for value in values if value in unique_moved_values for name in value.names],
        host,
    )
