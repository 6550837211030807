"""Common functions of the rules that move values to the host: idle times of values, and the choice of values to move.

Times are those of the block alone, by the roofline model: the forward pass runs the equations in order; the backward
pass runs them in reverse and takes twice as long.
"""

import dataclasses
from collections.abc import Callable, Iterable, Sequence

from jaxscale.errors import UserError
from jaxscale.memory.decision import SaveSet
from jaxscale.memory.save_set import EVERYTHING, Host, recompute, save_set
from jaxscale.programs.block import BlockGraph
from jaxscale.values.byte_sizes import bytes_text

SMALL = 256 * 1024
"""Bytes below which a value stays on the device if possible: the latency of its copy costs more than it frees."""


@dataclasses.dataclass(frozen=True)
class Idle:
    """A value, or several that are kept or moved together, idle between its reads in the forward and backward pass.

    Args:
        names: names of the values.
        bytes: bytes of the values, per device.
        start: time of their last read in the forward pass, in seconds from the start of the block.
        stop: time of their first read in the backward pass, in seconds from the start of the block.
        read_by_products: whether a matrix product or convolution reads one of them.
    """

    names: tuple[str, ...]
    bytes: int
    start: float
    stop: float
    read_by_products: bool

    @property
    def seconds(self) -> float:
        """Seconds for which the values are idle."""
        return self.stop - self.start


def idle_values(graph: BlockGraph) -> tuple[Idle, ...]:
    """The values to keep or move so that the backward pass recomputes no product, in order of computation.

    These are the named values that the backward pass reads. A value inside an operation has no name; it is recomputed
    from the result of an earlier product.

    Raises:
        UserError: the graph has no seconds.
    """
    if graph.equations and not graph.seconds:
        raise UserError("offload needs modelled seconds, and so a chip whose rates are known: specify a platform")
    clock, end_times = 0.0, []
    for equation in graph.equations:
        clock += equation.seconds
        end_times.append(clock)
    last_read: dict[int, float] = {}
    read_by_products: set[int] = set()
    for equation, end_time in zip(graph.equations, end_times, strict=True):
        for index in (*equation.inputs, *equation.outputs):
            last_read[index] = end_time
        read_by_products |= set(equation.inputs) if equation.flop else set()
    indices_by_mark: dict[str, list[int]] = {}
    indices_to_keep = {index for index in graph.needed if graph.values[index].mark is not None}
    while True:
        products = [graph.equations[e] for e in recompute(graph, indices_to_keep).equations if graph.equations[e].flop]
        named_results = {i for product in products for i in product.outputs if graph.values[i].mark is not None}
        unkept_results = named_results - indices_to_keep
        if not unkept_results:
            break
        indices_to_keep |= unkept_results
    for index in sorted(indices_to_keep):
        indices_by_mark.setdefault(str(graph.values[index].mark), []).append(index)
    values = []
    for indices in indices_by_mark.values():
        start = max(last_read[index] for index in indices)
        values.append(
            Idle(
                names=tuple(graph.values[index].name for index in indices),
                bytes=sum(graph.values[index].bytes for index in indices),
                start=start,
                stop=clock + 2 * (clock - start),
                read_by_products=bool(read_by_products & set(indices)),
            )
        )
    return tuple(values)


def everything(graph: BlockGraph, budget: int) -> SaveSet | None:
    """The save set that keeps every residual; `None` if it exceeds the budget."""
    return save_set(graph, (EVERYTHING,)) if graph.needed_bytes <= budget else None


def swap(graph: BlockGraph, budget: int, host: Host, order: Callable[[Idle], float]) -> SaveSet:
    """The save set that moves values to the host, in a given order, until the others fit; small values go last.

    Args:
        graph: graph of the block, with seconds.
        budget: most bytes kept on the device besides the block's inputs.
        host: host memory for the other values.
        order: sort key of the values; the value with the least key moves first.

    Raises:
        UserError: the host's budget is too small.
    """
    values = sorted(idle_values(graph), key=order)
    return everything(graph, budget) or set_without(graph, host, values, values_to_move(budget, host, values))


def values_to_move(budget: int, host: Host, values: Sequence[Idle]) -> list[Idle]:
    """The first values in order, small ones last, whose move to the host makes the others fit the budget.

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
            f"a rule that recomputes nothing puts {bytes_text(host_bytes)} of each block on the host, which has "
            f"room for only {bytes_text(host.budget)}: use offload:pofo, a larger budget, or a larger host limit"
        )
    return moved_values


def set_without(graph: BlockGraph, host: Host, values: Iterable[Idle], moved_values: Iterable[Idle]) -> SaveSet:
    """The save set that keeps all values except the moved ones, which go to the host."""
    moved_set = set(moved_values)
    return save_set(
        graph,
        [name for value in values if value not in moved_set for name in value.names],
        [name for value in values if value in moved_set for name in value.names],
        host,
    )
