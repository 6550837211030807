"""What the rules that swap have in common: which values they move, when these lie idle, what is infeasible.

Times are of the block alone, by roofline: the forward pass runs its equations in order, the backward pass in reverse,
twice as long.
"""

import dataclasses
from collections.abc import Iterable, Sequence

from jaxscale.costs.block import BlockGraph
from jaxscale.errors import UserError
from jaxscale.memory.decision import SaveSet
from jaxscale.memory.graph import EVERYTHING, Host, recompute, save_set
from jaxscale.values.byte_sizes import bytes_text

SMALL = 256 * 1024
"""Bytes below which a rule leaves a value on the device while it can: a copy's latency costs more than it frees."""


@dataclasses.dataclass(frozen=True)
class Idle:
    """A value between the forward and the backward pass.

    Args:
        names: of what is kept together under one mark.
        bytes: of them, per device.
        start: seconds at which the forward pass has read it last, from the start of the block.
        stop: seconds at which the backward pass reads it first.
        read_by_products: whether a matrix product or convolution reads it.
    """

    names: tuple[str, ...]
    bytes: int
    start: float
    stop: float
    read_by_products: bool

    @property
    def seconds(self) -> float:
        """How long it lies idle."""
        return self.stop - self.start


def idle_values(graph: BlockGraph) -> tuple[Idle, ...]:
    """The values to keep or move for the backward pass to run no product again, in the order they are made.

    They are those that it reads, by their names; what it reads of the inside of an operation has none, and is made
    again from the result of a product before it.

    Raises:
        UserError: the graph has no seconds.
    """
    if graph.equations and not graph.seconds:
        raise UserError("offload needs seconds, and so a chip whose rates are known: name a platform")
    clock, ends = 0.0, []
    for equation in graph.equations:
        clock += equation.seconds
        ends.append(clock)
    last: dict[int, float] = {}
    heavy: set[int] = set()
    for equation, end in zip(graph.equations, ends, strict=True):
        for index in (*equation.inputs, *equation.outputs):
            last[index] = end
        heavy |= set(equation.inputs) if equation.flop else set()
    groups: dict[str, list[int]] = {}
    wanted = {index for index in graph.needed if graph.values[index].mark is not None}
    while True:
        products = [graph.equations[e] for e in recompute(graph, wanted).equations if graph.equations[e].flop]
        more = {i for product in products for i in product.outputs if graph.values[i].mark is not None} - wanted
        if not more:
            break
        wanted |= more
    for index in sorted(wanted):
        groups.setdefault(str(graph.values[index].mark), []).append(index)
    found = []
    for indices in groups.values():
        start = max(last[index] for index in indices)
        found.append(
            Idle(
                tuple(graph.values[index].name for index in indices),
                sum(graph.values[index].bytes for index in indices),
                start,
                clock + 2 * (clock - start),
                bool(heavy & set(indices)),
            )
        )
    return tuple(found)


def everything(graph: BlockGraph, budget: int) -> SaveSet | None:
    """The save set that leaves the block as it is, where that fits."""
    return save_set(graph, (EVERYTHING,)) if graph.needed_bytes <= budget else None


def swap(graph: BlockGraph, budget: int, host: Host, order: Sequence[Idle]) -> SaveSet:
    """Everything is kept, but for what goes to the host in this order until the rest fits; small values go last.

    Raises:
        UserError: the host's budget does not hold what has to go.
    """
    return everything(graph, budget) or chosen(graph, host, order, moved_to_fit(budget, host, order))


def moved_to_fit(budget: int, host: Host, order: Sequence[Idle]) -> list[Idle]:
    """The first of the values, in this order, without which the others fit the budget.

    Raises:
        UserError: the host's budget does not hold them.
    """
    left, moved = sum(value.bytes for value in order), []
    for value in sorted(order, key=lambda value: value.bytes <= SMALL):
        if left <= budget:
            break
        left -= value.bytes
        moved.append(value)
    there = sum(value.bytes for value in moved)
    if there > host.budget:
        raise UserError(
            f"a rule that recomputes nothing puts {bytes_text(there)} of each block on the host, and there is room for "
            f"{bytes_text(host.budget)}: take offload:pofo, a larger budget, or a larger host limit"
        )
    return moved


def chosen(graph: BlockGraph, host: Host, values: Iterable[Idle], moved: Iterable[Idle]) -> SaveSet:
    """The save set that keeps all values but those moved."""
    away = set(moved)
    return save_set(
        graph,
        [name for value in values if value not in away for name in value.names],
        [name for value in values if value in away for name in value.names],
        host,
    )
