"""One budget for a model's blocks: a save set for each kind, and for a scanned stack two groups or two levels.

* One save set for all layers is exact by `graph.solve`, at the budget's share of a layer.
* L alike layers mix at most two *neighbouring* points of the lower convex hull of the curve of cost against bytes; two
  groups of layers are used if they cost less by `GROUPS_GAIN` of a step.
  * If not even the blocks' inputs fit, a scan over segments keeps every k-th block's input, at the cost of one more
  forward pass: ceil(L / k) + k inputs.
* Blocks of several kinds share a budget by an integer program over the points of their curves.

Left out: more than two groups (the hull needs none), groups within a model of several kinds of blocks.
"""

import dataclasses
import math
from collections.abc import Sequence

from jaxscale.errors import UserError
from jaxscale.memory.decision import Group, SaveSet, StackDecision
from jaxscale.memory.graph import menu, solve
from jaxscale.memory.plan import SaveSetObjective
from jaxscale.memory.save_set import Host, cost_of
from jaxscale.programs.block import BlockGraph
from jaxscale.programs.collect import BlockCall
from jaxscale.values.byte_sizes import bytes_at_least, bytes_text

GROUPS_GAIN = 0.005
"""Share of the cost of a step (three forward passes) that a second group must save: it is compiled separately."""


def plan_stack(
    graph: BlockGraph, layers: int, budget: int, *, objective: SaveSetObjective = "flop", host: Host | None = None
) -> StackDecision:
    """The save sets of the layers of a scanned stack within a budget.

    Args:
        graph: of a block.
        layers: L.
        budget: bytes of the whole stack, inputs of blocks counted.
        objective: what to make least.
        host: host memory for offloaded values; requires seconds, and excludes a second level.

    Raises:
        UserError: the budget is too small even for two levels.
    """
    inputs = layers * graph.carried_bytes
    if budget < inputs and host is not None:
        raise too_small(budget, inputs, "save:BYTES for a scanned stack, ")
    if budget < inputs:
        return _two_levels(graph, layers, budget, objective)
    room = budget - inputs
    uniform = solve(graph, room // layers, objective=objective, host=host)
    mixed = _mixture(menu(graph, objective=objective, host=host), layers, room, objective)
    gain = layers * cost_of(uniform, objective) - sum(g.layers * cost_of(g.save, objective) for g in mixed if g.save)
    if len(mixed) > 1 and gain > GROUPS_GAIN * 3 * layers * cost_of(graph, objective):
        return StackDecision(mixed)
    return StackDecision((Group(layers, uniform),))


def least_bytes(graph: BlockGraph, layers: int) -> int:
    """The fewest bytes that a scanned stack can keep: min over k of (ceil(L / k) + k) inputs.

    Example:
        >>> from jaxscale.programs.block import BlockGraph, Value
        >>> x = Value("x", (4,), "float32", 16, -1)
        >>> least_bytes(BlockGraph("x", (x,), (), (0,), (0,), (), ()), 16) // 16
        8
    """
    return min(_two_level_inputs(layers, k) for k in range(1, layers + 1)) * graph.carried_bytes


def _two_level_inputs(layers: int, segment: int) -> int:
    """Block inputs alive at once: one of each segment, and those of the segment that runs again."""
    return layers if segment == 1 else math.ceil(layers / segment) + segment


def _two_levels(graph: BlockGraph, layers: int, budget: int, objective: SaveSetObjective) -> StackDecision:
    """The cheapest stack whose segments run again, within a budget below that of all blocks' inputs."""
    carried = graph.carried_bytes
    least_budget = least_bytes(graph, layers)
    if budget < least_budget:
        raise too_small(budget, least_budget)
    curve = menu(graph, objective=objective)
    candidates: list[tuple[float, int, int]] = []  # cost, inputs and segment
    for segment in range(2, layers + 1):
        inputs = _two_level_inputs(layers, segment)
        if budget >= inputs * carried:
            room = (budget - inputs * carried) // segment
            point = max((save for save in curve if save.bytes <= room), key=lambda save: save.bytes)
            candidates.append((cost_of(point, objective), inputs, segment))
    _, inputs, segment = min(candidates)
    save = solve(graph, (budget - inputs * carried) // segment, objective=objective)
    return StackDecision((Group(layers, save),), segment)


def too_small(budget: int, least: int, fewer: str = "") -> UserError:
    """The error for a budget below the least possible."""
    return UserError(
        f"a memory budget of {bytes_text(budget)} is below the least possible, {bytes_at_least(least)}, which the "
        f"inputs of blocks take; {fewer}more microbatches, a smaller batch, or a mesh that splits batch or sequence "
        "further lower it"
    )


def hull(points: Sequence[SaveSet], objective: SaveSetObjective) -> tuple[SaveSet, ...]:
    """The points of a curve that lie on its lower convex hull, by rising bytes."""
    hull_points: list[SaveSet] = []
    for point in sorted(points, key=lambda save: (save.bytes, cost_of(save, objective))):
        if hull_points and cost_of(point, objective) >= cost_of(hull_points[-1], objective):
            continue
        while len(hull_points) > 1 and _above(hull_points[-2], hull_points[-1], point, objective):
            hull_points.pop()
        hull_points.append(point)
    return tuple(hull_points)


def _above(first: SaveSet, middle: SaveSet, last: SaveSet, objective: SaveSetObjective) -> bool:
    """Whether the middle point lies on or above the line between the first and the last."""
    middle_rise = (cost_of(middle, objective) - cost_of(first, objective)) * (last.bytes - first.bytes)
    line_rise = (cost_of(last, objective) - cost_of(first, objective)) * (middle.bytes - first.bytes)
    return middle_rise >= line_rise


def _mixture(curve: Sequence[SaveSet], layers: int, room: int, objective: SaveSetObjective) -> tuple[Group, ...]:
    """The cheapest one or two groups of layers whose save sets lie on the hull."""
    points = hull(curve, objective)
    mixtures: list[tuple[float, tuple[Group, ...]]] = []
    for low, high in zip(points, (*points[1:], points[-1]), strict=True):
        if low.bytes * layers > room:
            break
        extra_bytes = high.bytes - low.bytes
        count_high = layers if not extra_bytes else min(layers, (room - low.bytes * layers) // extra_bytes)
        groups = tuple(Group(count, save) for count, save in ((layers - count_high, low), (count_high, high)) if count)
        cost = sum(group.layers * cost_of(group.save, objective) for group in groups if group.save is not None)
        mixtures.append((cost, groups))
    return min(mixtures, key=lambda mixture: mixture[0])[1]


def share(calls: Sequence[BlockCall], budget: int, *, objective: SaveSetObjective = "flop") -> tuple[SaveSet, ...]:
    """The cheapest choice within a budget of one save set per kind of block, from their curves.

    Args:
        calls: of the model.
        budget: bytes of the whole model, inputs of blocks counted.
        objective: what to make least.

    Raises:
        UserError: the inputs of blocks alone take more.
    """
    inputs = sum(call.count * call.input_bytes for call in calls)
    if budget < inputs:
        raise too_small(budget, inputs, "chain:BYTES, which keeps the inputs of fewer blocks, ")
    room = budget - inputs
    counts: dict[str, int] = {}
    graphs = {call.fingerprint: call.graph for call in calls}
    for call in calls:
        counts[call.fingerprint] = counts.get(call.fingerprint, 0) + call.count
    if len(graphs) == 1:
        [(kind, graph)] = graphs.items()
        return (solve(graph, room // counts[kind], objective=objective),)
    menus = {kind: menu(graph, objective=objective) for kind, graph in graphs.items()}
    points = _choose([(counts[kind], menus[kind]) for kind in graphs], room, objective)
    spare = room - sum(counts[save.block] * save.bytes for save in points)
    # the curves have gaps: each kind in turn gets the spare bytes
    saves = []
    for save in points:
        count = counts[save.block]
        better = solve(graphs[save.block], save.bytes + spare // count, objective=objective)
        better = better if cost_of(better, objective) < cost_of(save, objective) else save
        spare -= count * (better.bytes - save.bytes)
        saves.append(better)
    return tuple(saves)


def _choose(kinds: Sequence[tuple[int, Sequence[SaveSet]]], room: int, objective: SaveSetObjective) -> list[SaveSet]:
    """One point of each curve, by integer program: least total cost within a total of bytes."""
    import numpy as np
    from scipy.optimize import Bounds, LinearConstraint, milp

    flat = [(row, count, save) for row, (count, curve) in enumerate(kinds) for save in curve]
    cost = np.array([count * cost_of(save, objective) for _, count, save in flat], float)
    size = np.array([count * save.bytes for _, count, save in flat], float)
    one_per_kind = np.array([[float(row == kind) for row, _, _ in flat] for kind in range(len(kinds))])
    unit = float(size.max()) or 1.0
    solution = milp(
        cost / (cost.max() or 1.0),
        integrality=np.ones(len(flat)),
        bounds=Bounds(0, 1),
        constraints=[
            LinearConstraint(one_per_kind, 1, 1),
            LinearConstraint(size[None, :] / unit, -np.inf, room / unit),
        ],
        options={"mip_rel_gap": 0},
    )
    assert solution.x is not None, "keeping nothing of any block takes no room"
    return [save for (_, _, save), amount in zip(flat, solution.x, strict=True) if amount > 0.5]


@dataclasses.dataclass(frozen=True)
class Totals:
    """Bytes that all blocks of a model keep, and the cost of their recomputation."""

    layers: int
    bytes: int
    host_bytes: int
    flop: int
    seconds: float


def totals(calls: Sequence[BlockCall], saves: Sequence[SaveSet]) -> Totals:
    """Sums over all blocks of a model, one level."""
    save_by_block = {save.block: save for save in saves}
    pairs = [(call, save_by_block[call.fingerprint]) for call in calls]
    return Totals(
        sum(call.count for call in calls),
        sum(call.count * (call.input_bytes + save.bytes) for call, save in pairs),
        sum(call.count * save.host_bytes for call, save in pairs),
        sum(call.count * save.flop for call, save in pairs),
        sum(call.count * save.seconds for call, save in pairs),
    )


def stack_totals(graph: BlockGraph, stack: StackDecision) -> Totals:
    """The totals of a scanned stack with groups or segments; a group without a save set keeps everything."""
    layers, carried = stack.layers, graph.carried_bytes
    everything = SaveSet(graph.fingerprint, bytes=graph.needed_bytes)
    groups = [(group.layers, group.save or everything) for group in stack.groups]
    flop = sum(count * save.flop for count, save in groups)
    seconds = sum(count * save.seconds for count, save in groups)
    host_bytes = sum(count * save.host_bytes for count, save in groups)
    if stack.segment is None:
        kept_bytes = layers * carried + sum(count * save.bytes for count, save in groups)
        return Totals(layers, kept_bytes, host_bytes, flop, seconds)
    segment = min(stack.segment, layers)
    kept_bytes = _two_level_inputs(layers, segment) * carried + segment * max(save.bytes for _, save in groups)
    return Totals(layers, kept_bytes, host_bytes, flop + layers * graph.flop, seconds + layers * graph.seconds)
