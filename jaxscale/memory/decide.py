"""Resolve a memory plan for a model's blocks to a decision.

This module implements the rules none, dots, full, jax, save, greedy, dtr_static and file, and for a scanned stack also
sqrt and periodic. The rules for chains of blocks are in `chain_decision.py`, and the selectors of `offload` in
`selectors`; the planner resolves `fit`.
"""

import dataclasses
from collections.abc import Sequence

from jaxscale.errors import UserError
from jaxscale.memory.chain import square_root
from jaxscale.memory.chain_decision import decide_chain, default_objective
from jaxscale.memory.decision import Decision, Group, SaveSet, StackDecision, read_decision
from jaxscale.memory.greedy_sets import greedy
from jaxscale.memory.plan import FORMS, MemoryPlan, SaveSetObjective
from jaxscale.memory.save_set import EVERYTHING, Host, policy_set, save_set
from jaxscale.memory.selectors import SELECTORS
from jaxscale.memory.stack_plan import budget_error, cheapest_saves, model_totals, plan_stack, stack_totals
from jaxscale.platforms.platform import Chip, chips
from jaxscale.programs.block import BlockGraph
from jaxscale.programs.collect import BlockCall


def decide(plan: MemoryPlan, calls: Sequence[BlockCall], chip: Chip | None = None) -> Decision:
    """Resolve a memory plan for a model; return the decision.

    Args:
        plan: memory plan with any rule but `fit`.
        calls: the model's blocks (`programs.collect`), per device and microbatch; if `chip` is given, they were traced
            with it.
        chip: chip for which modeled seconds are minimized unless the plan specifies the objective "flop".

    Raises:
        UserError: the budget is too small, the rule does not apply to this model, or the model has no blocks.
    """
    if plan.rule == "file":
        return read_decision(plan.name)
    if not calls:
        raise UserError(
            f"memory {plan}: no blocks were found in this model; build it from layers.Stack or layers.Chain, wrap it "
            "in a ForeignModel, or set no memory plan",
            page="start/own_model",
        )
    graph_by_kind = graphs_by_kind(calls)
    objective = plan.objective or default_objective(chip)
    match plan.rule:
        case "none":
            return _decision(plan, calls, [save_set(graph, (EVERYTHING,)) for graph in graph_by_kind.values()])
        case "dots" | "full" | "jax":
            return _decision(plan, calls, [policy_set(graph, str(plan.policy)) for graph in graph_by_kind.values()])
        case "sqrt" | "periodic" if _is_scanned(calls):
            return _segment_decision(plan, calls)
        case "sqrt" | "periodic" | "revolve" | "chain":
            return decide_chain(plan, calls, chip)
        case "save" if _is_scanned(calls):
            return _optimal_stack_decision(plan, calls, objective, host=None)
        case "save":
            return _decision(plan, calls, cheapest_saves(calls, plan.budget or 0, objective=objective))
        case "greedy" | "dtr_static":
            graphs_and_budgets = _graphs_and_budgets(
                plan, calls, alternatives="save:BYTES for a scanned stack, chain:BYTES, "
            )
            score = "ratio" if plan.rule == "greedy" else "dtr_static"
            saves = [greedy(graph, budget, score, objective=objective) for graph, budget in graphs_and_budgets]
            return _decision(plan, calls, saves)
        case "offload" if plan.selector == "pofo" and _is_scanned(calls):
            return _optimal_stack_decision(plan, calls, "seconds", Host(budget=2**62, bandwidth=host_bandwidth(chip)))
        case "offload":
            select_values, host = SELECTORS[str(plan.selector)], Host(budget=2**62, bandwidth=host_bandwidth(chip))
            return _decision(
                plan, calls, [select_values(graph, budget, host) for graph, budget in _graphs_and_budgets(plan, calls)]
            )
        case _:
            rules = ", ".join(rule for rule in FORMS if rule != "fit")
            raise UserError(f"memory {plan}: expected a plan with one of the rules {rules}")


def graphs_by_kind(calls: Sequence[BlockCall]) -> dict[str, BlockGraph]:
    """Return the graph of each kind of block, by the kind's fingerprint, in order of first appearance."""
    return {call.fingerprint: call.graph for call in calls}


def host_bandwidth(chip: Chip | None) -> float:
    """Return the bytes/s between a chip and its host in each direction.

    If the chip is `None` or its PCIe link is unknown, this is the bandwidth of the slowest PCIe link in the tables.

    Example:
        >>> from jaxscale.platforms.platform import chips
        >>> host_bandwidth(chips()["h100"]), host_bandwidth(None)
        (64000000000.0, 15000000000.0)
    """
    candidate_chips = chips().values() if chip is None or "pcie" not in {link.name for link in chip.links} else [chip]
    return min(link.bandwidth for candidate in candidate_chips for link in candidate.links if link.name == "pcie")


def _graphs_and_budgets(
    plan: MemoryPlan, calls: Sequence[BlockCall], alternatives: str = ""
) -> list[tuple[BlockGraph, int]]:
    """Return a pair (graph, budget in bytes) for each kind of block.

    One block of the kind may keep this number of bytes in addition to its input. The budgets are proportional to the
    bytes that the blocks keep without a plan.

    Args:
        plan: memory plan whose budget includes the inputs of blocks.
        calls: the model's blocks.
        alternatives: plans that keep fewer block inputs; the error suggests them if the inputs alone exceed the budget.
    """
    budget, inputs_bytes = plan.budget or 0, sum(call.count * call.input_bytes for call in calls)
    if budget < inputs_bytes:
        raise budget_error(budget, inputs_bytes, alternatives)
    needed_bytes = sum(call.count * call.graph.needed_bytes for call in calls)
    kept_fraction = min(1.0, (budget - inputs_bytes) / needed_bytes) if needed_bytes else 1.0
    return [(graph, int(graph.needed_bytes * kept_fraction)) for graph in graphs_by_kind(calls).values()]


def _is_scanned(calls: Sequence[BlockCall]) -> bool:
    """Return whether the model is one scanned stack of identical blocks."""
    return len(calls) == 1 and calls[0].rolled and calls[0].count > 1


def _optimal_stack_decision(
    plan: MemoryPlan, calls: Sequence[BlockCall], objective: SaveSetObjective, host: Host | None
) -> Decision:
    """Return the best decision for a scanned stack: one save set for all layers, two groups, or segments."""
    [call] = calls
    stack_decision = plan_stack(call.graph, call.count, plan.budget or 0, objective=objective, host=host)
    if len(stack_decision.groups) == 1 and stack_decision.segment is None:
        return _decision(plan, calls, [group.save for group in stack_decision.groups if group.save is not None])
    return _stack_decision(plan, call, stack_decision)


def _decision(plan: MemoryPlan, calls: Sequence[BlockCall], saves: Sequence[SaveSet]) -> Decision:
    """Return the decision with one save set for each kind of block."""
    total_by_field = dataclasses.asdict(model_totals(calls, saves))
    return Decision(plan, tuple(saves), blocks=tuple(graphs_by_kind(calls)), **total_by_field)


def _stack_decision(plan: MemoryPlan, call: BlockCall, stack_decision: StackDecision) -> Decision:
    """Return the decision for a scanned stack that has groups of layers or segments."""
    total_by_field = dataclasses.asdict(stack_totals(call.graph, stack_decision))
    return Decision(plan, stack=stack_decision, blocks=(call.fingerprint,), **total_by_field)


def _segment_decision(plan: MemoryPlan, calls: Sequence[BlockCall]) -> Decision:
    """Return the decision for a scanned stack that keeps the input of every K-th block."""
    [call] = calls
    segment_length = square_root(call.count) if plan.count is None else plan.count  # in blocks
    if segment_length > call.count:
        raise UserError(
            f"memory {plan}: got segments of {segment_length} blocks, expected at most the model's {call.count}"
        )
    return _stack_decision(plan, call, StackDecision((Group(call.count),), segment_length))
