"""One budget for all blocks: a save set per kind of block and, in a scanned stack, two groups of layers or two levels.

* One save set for all layers is the optimum of `graph.solve` for a layer's share of the budget.
* Two groups of layers have save sets at two neighboring points of the lower convex hull of the curve of cost against
  bytes. They are used if they lower the cost by more than the share `GROUPS_GAIN` of a step's cost.
* If not even the blocks' inputs fit, the stack is divided into segments of k of its L layers (two levels). One input is
  kept for each segment, and the inputs inside a segment only while the segment runs again. At most ceil(L / k) + k
  inputs are alive, at the cost of one more forward pass.
* Blocks of several kinds share a budget by an integer program over the points of their curves.

Left out: more than two groups (on the hull, two are enough), and groups in a model with several kinds of blocks.
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
"""Share of a step's cost (three forward passes) that a second group must save, since it takes a second compilation."""


def plan_stack(
    graph: BlockGraph, layer_count: int, budget: int, *, objective: SaveSetObjective = "flop", host: Host | None = None
) -> StackDecision:
    """Return the save sets of a scanned stack's layers within a budget.

    Args:
        graph: graph of a block.
        layer_count: number of layers.
        budget: maximum bytes kept by the whole stack, inputs of blocks included.
        objective: the cost to minimize.
        host: host memory for offloaded values; it requires the objective "seconds" and rules out segments.

    Raises:
        UserError: the budget is too small even for segments; or a host is given, and the budget is smaller than the
            inputs of all blocks.
    """
    inputs_bytes = layer_count * graph.carried_bytes
    if budget < inputs_bytes and host is not None:
        raise budget_error(budget, inputs_bytes, "save:BYTES for a scanned stack, ")
    if budget < inputs_bytes:
        return _two_level_decision(graph, layer_count, budget, objective)
    value_bytes = budget - inputs_bytes
    uniform_save = solve(graph, value_bytes // layer_count, objective=objective, host=host)
    groups = _best_groups(menu(graph, objective=objective, host=host), layer_count, value_bytes, objective)
    groups_cost = sum(group.layers * cost_of(group.save, objective) for group in groups if group.save)
    saved_cost = layer_count * cost_of(uniform_save, objective) - groups_cost
    if len(groups) > 1 and saved_cost > GROUPS_GAIN * 3 * layer_count * cost_of(graph, objective):
        return StackDecision(groups)
    return StackDecision((Group(layer_count, uniform_save),))


def least_bytes(graph: BlockGraph, layer_count: int) -> int:
    """Return the fewest bytes that a scanned stack can keep.

    These are the bytes of ceil(L / k) + k block inputs, for L layers and the best segment length k.

    Example:
        >>> from jaxscale.programs.block import BlockGraph, Value
        >>> x = Value("x", (4,), "float32", 16, -1)
        >>> least_bytes(BlockGraph("x", (x,), (), (0,), (0,), (), ()), 16) // 16
        8
    """
    return min(_live_input_count(layer_count, k) for k in range(1, layer_count + 1)) * graph.carried_bytes


def _live_input_count(layer_count: int, segment_length: int) -> int:
    """Return the most block inputs alive at once: one for each segment, and those inside one segment."""
    return layer_count if segment_length == 1 else math.ceil(layer_count / segment_length) + segment_length


def _two_level_decision(graph: BlockGraph, layer_count: int, budget: int, objective: SaveSetObjective) -> StackDecision:
    """Return the cheapest decision with segments, for a budget smaller than the inputs of all blocks."""
    input_bytes = graph.carried_bytes
    least_budget = least_bytes(graph, layer_count)
    if budget < least_budget:
        raise budget_error(budget, least_budget)
    curve = menu(graph, objective=objective)
    candidates: list[tuple[float, int, int]] = []  # cost of a layer, number of live inputs, layers of a segment
    for segment_length in range(2, layer_count + 1):
        input_count = _live_input_count(layer_count, segment_length)
        if budget >= input_count * input_bytes:
            value_bytes = (budget - input_count * input_bytes) // segment_length
            largest_save = max((save for save in curve if save.bytes <= value_bytes), key=lambda save: save.bytes)
            candidates.append((cost_of(largest_save, objective), input_count, segment_length))
    _, input_count, segment_length = min(candidates)
    save = solve(graph, (budget - input_count * input_bytes) // segment_length, objective=objective)
    return StackDecision((Group(layer_count, save),), segment_length)


def budget_error(budget: int, least_budget: int, alternatives: str = "") -> UserError:
    """Return the error for a budget below the least one, in bytes; `alternatives` names plans that need less."""
    return UserError(
        f"a memory budget of {bytes_text(budget)} is below the least possible, {bytes_at_least(least_budget)}, which "
        f"the inputs of blocks take; to lower that, use {alternatives}more microbatches, a smaller batch, or a mesh "
        "that splits batch or sequence further",
        page="choosing/memory",
    )


def hull(saves: Sequence[SaveSet], objective: SaveSetObjective) -> tuple[SaveSet, ...]:
    """Return the save sets that lie on the lower convex hull of cost against bytes, in order of increasing bytes."""
    hull_saves: list[SaveSet] = []
    for save in sorted(saves, key=lambda save: (save.bytes, cost_of(save, objective))):
        if hull_saves and cost_of(save, objective) >= cost_of(hull_saves[-1], objective):
            continue
        while len(hull_saves) > 1 and _is_above(hull_saves[-2], hull_saves[-1], save, objective):
            hull_saves.pop()
        hull_saves.append(save)
    return tuple(hull_saves)


def _is_above(left: SaveSet, middle: SaveSet, right: SaveSet, objective: SaveSetObjective) -> bool:
    """Return whether the middle save set is on or above the line from left to right, as cost against bytes."""
    middle_rise = (cost_of(middle, objective) - cost_of(left, objective)) * (right.bytes - left.bytes)
    line_rise = (cost_of(right, objective) - cost_of(left, objective)) * (middle.bytes - left.bytes)
    return middle_rise >= line_rise


def _best_groups(
    curve: Sequence[SaveSet], layer_count: int, value_bytes: int, objective: SaveSetObjective
) -> tuple[Group, ...]:
    """Return the cheapest one or two groups of layers whose save sets, in all layers, take at most `value_bytes`."""
    hull_saves = hull(curve, objective)
    candidates: list[tuple[float, tuple[Group, ...]]] = []  # cost, groups
    for low_save, high_save in zip(hull_saves, (*hull_saves[1:], hull_saves[-1]), strict=True):
        if low_save.bytes * layer_count > value_bytes:
            break
        extra_bytes = high_save.bytes - low_save.bytes
        high_count = (
            layer_count
            if not extra_bytes
            else min(layer_count, (value_bytes - low_save.bytes * layer_count) // extra_bytes)
        )
        counts_and_saves = ((layer_count - high_count, low_save), (high_count, high_save))
        groups = tuple(Group(count, save) for count, save in counts_and_saves if count)
        cost = sum(group.layers * cost_of(group.save, objective) for group in groups if group.save is not None)
        candidates.append((cost, groups))
    return min(candidates, key=lambda candidate: candidate[0])[1]


def cheapest_saves(
    calls: Sequence[BlockCall], budget: int, *, objective: SaveSetObjective = "flop"
) -> tuple[SaveSet, ...]:
    """Return the save set of each kind of block, chosen at the least total cost within one budget for the model.

    Args:
        calls: the model's blocks (`programs.collect`).
        budget: maximum bytes kept by the whole model, inputs of blocks included.
        objective: the cost to minimize.

    Raises:
        UserError: the inputs of blocks alone exceed the budget.
    """
    inputs_bytes = sum(call.count * call.input_bytes for call in calls)
    if budget < inputs_bytes:
        raise budget_error(budget, inputs_bytes, "chain:BYTES, which keeps the inputs of fewer blocks, ")
    value_bytes = budget - inputs_bytes
    count_by_kind: dict[str, int] = {}
    graph_by_kind = {call.fingerprint: call.graph for call in calls}
    for call in calls:
        count_by_kind[call.fingerprint] = count_by_kind.get(call.fingerprint, 0) + call.count
    if len(graph_by_kind) == 1:
        [(kind, graph)] = graph_by_kind.items()
        return (solve(graph, value_bytes // count_by_kind[kind], objective=objective),)
    curve_by_kind = {kind: menu(graph, objective=objective) for kind, graph in graph_by_kind.items()}
    counts_and_curves = [(count_by_kind[kind], curve_by_kind[kind]) for kind in graph_by_kind]
    chosen_saves = _cheapest_points(counts_and_curves, value_bytes, objective)
    spare_bytes = value_bytes - sum(count_by_kind[save.block] * save.bytes for save in chosen_saves)
    # the curves have gaps, so some bytes are unused: each kind of block in turn may use them
    saves = []
    for save in chosen_saves:
        count = count_by_kind[save.block]
        larger_save = solve(graph_by_kind[save.block], save.bytes + spare_bytes // count, objective=objective)
        better_save = larger_save if cost_of(larger_save, objective) < cost_of(save, objective) else save
        spare_bytes -= count * (better_save.bytes - save.bytes)
        saves.append(better_save)
    return tuple(saves)


def _cheapest_points(
    counts_and_curves: Sequence[tuple[int, Sequence[SaveSet]]], value_bytes: int, objective: SaveSetObjective
) -> list[SaveSet]:
    """Return one save set from each kind's curve, chosen by an integer program at the least total cost within a budget.

    Args:
        counts_and_curves: for each kind of block, the number of blocks of that kind, and the save sets of its curve.
        value_bytes: maximum bytes that the kept values of all blocks may take.
        objective: the cost to minimize.
    """
    import numpy as np
    from scipy.optimize import Bounds, LinearConstraint, milp

    # each point: index of the kind, number of blocks of that kind, save set
    points = [
        (kind_index, count, save) for kind_index, (count, curve) in enumerate(counts_and_curves) for save in curve
    ]
    point_costs = np.array([count * cost_of(save, objective) for _, count, save in points], float)
    point_bytes = np.array([count * save.bytes for _, count, save in points], float)
    kind_rows = np.array(
        [[float(kind_index == row) for kind_index, _, _ in points] for row in range(len(counts_and_curves))]
    )
    byte_unit = float(point_bytes.max()) or 1.0
    solution = milp(
        point_costs / (point_costs.max() or 1.0),
        integrality=np.ones(len(points)),
        bounds=Bounds(0, 1),
        constraints=[
            LinearConstraint(kind_rows, 1, 1),
            LinearConstraint(point_bytes[None, :] / byte_unit, -np.inf, value_bytes / byte_unit),
        ],
        options={"mip_rel_gap": 0},
    )
    assert solution.x is not None, "the choice to keep nothing of any block always fits"
    return [save for (_, _, save), choice in zip(points, solution.x, strict=True) if choice > 0.5]


@dataclasses.dataclass(frozen=True)
class Totals:
    """The bytes that all blocks of a model keep, and the cost of recomputation.

    Args:
        layers: number of blocks.
        bytes: bytes kept on the device, inputs of blocks included.
        host_bytes: bytes kept in host memory.
        flop: FLOP that the backward pass recomputes.
        seconds: modeled seconds of recomputation and of copies that do not overlap with computation.
    """

    layers: int
    bytes: int
    host_bytes: int
    flop: int
    seconds: float


def model_totals(calls: Sequence[BlockCall], saves: Sequence[SaveSet]) -> Totals:
    """Return the totals of a model in which each block keeps the save set of its kind."""
    save_by_block = {save.block: save for save in saves}
    calls_and_saves = [(call, save_by_block[call.fingerprint]) for call in calls]
    return Totals(
        layers=sum(call.count for call in calls),
        bytes=sum(call.count * (call.input_bytes + save.bytes) for call, save in calls_and_saves),
        host_bytes=sum(call.count * save.host_bytes for call, save in calls_and_saves),
        flop=sum(call.count * save.flop for call, save in calls_and_saves),
        seconds=sum(call.count * save.seconds for call, save in calls_and_saves),
    )


def stack_totals(graph: BlockGraph, stack_decision: StackDecision) -> Totals:
    """Return the totals of a scanned stack with groups or segments; a group without a save set keeps everything."""
    layer_count, input_bytes = stack_decision.layers, graph.carried_bytes
    full_save = SaveSet(graph.fingerprint, bytes=graph.needed_bytes)
    counts_and_saves = [(group.layers, group.save or full_save) for group in stack_decision.groups]
    recomputed_flop = sum(count * save.flop for count, save in counts_and_saves)
    extra_seconds = sum(count * save.seconds for count, save in counts_and_saves)
    host_bytes = sum(count * save.host_bytes for count, save in counts_and_saves)
    if stack_decision.segment is None:
        kept_bytes = layer_count * input_bytes + sum(count * save.bytes for count, save in counts_and_saves)
        return Totals(layer_count, kept_bytes, host_bytes, recomputed_flop, extra_seconds)
    segment_length = min(stack_decision.segment, layer_count)
    kept_bytes = _live_input_count(layer_count, segment_length) * input_bytes + segment_length * max(
        save.bytes for _, save in counts_and_saves
    )
    return Totals(
        layer_count,
        kept_bytes,
        host_bytes,
        recomputed_flop + layer_count * graph.flop,
        extra_seconds + layer_count * graph.seconds,
    )
