"""Resolve a memory plan for a chain of blocks: make stages of the traced blocks, and choose the nodes of the chain.

The options of a block are its optimal save sets (`graph.menu`) on the lower convex hull of cost against bytes, from the
set that keeps all values to the empty set. A budget limits the bytes kept for a later backward pass: the inputs of
blocks and the kept values inside blocks. The budget does not cover gradients and the working memory of the running
block; `peak_bytes` of `chain.simulate` includes both.
"""

from collections.abc import Sequence

from jaxscale.errors import UserError
from jaxscale.memory.chain import (
    Nodes,
    Option,
    Stage,
    keep_all,
    keep_inputs,
    periodic,
    revolve,
    save_nodes,
    simulate,
    square_root,
    times_run,
)
from jaxscale.memory.decision import ChainDecision, Decision, SaveSet
from jaxscale.memory.graph import menu
from jaxscale.memory.plan import MemoryPlan, SaveSetObjective
from jaxscale.memory.rotor_table import rotor
from jaxscale.memory.save_set import EVERYTHING, cost_of, save_set
from jaxscale.memory.stack_plan import hull
from jaxscale.platforms.platform import Chip
from jaxscale.programs import roofline
from jaxscale.programs.block import BlockGraph
from jaxscale.programs.collect import BlockCall

CHAIN_RULES = ("none", "full", "sqrt", "periodic", "revolve", "chain")
"""Rules of a `MemoryPlan` for chains."""
SAVE_SET_COUNT = 8
"""Number of save sets to solve for per kind of block if there are several kinds."""
ONE_KIND_SAVE_SET_COUNT = 23
"""Number of save sets to solve for if all blocks are of one kind; Rotor's table is then small."""
_TIE_FLOP_PER_BYTE = 1e-6
"""FLOP charged per recomputed byte: among options of equal FLOP, the one that recomputes fewer bytes is chosen."""


def chain_nodes(plan: MemoryPlan, stages: Sequence[Stage], input_bytes: int) -> Nodes:
    """Return the plan of a chain (its nodes) that a memory plan specifies.

    Args:
        plan: memory plan whose rule is in `CHAIN_RULES`.
        stages: cost of each block; rules other than `chain` use only the number of stages.
        input_bytes: bytes of the first block's input.

    Raises:
        UserError: the budget is too small, or the rule is not in `CHAIN_RULES`.

    Example:
        >>> chain_nodes(MemoryPlan.parse("periodic:1"), [Stage(1.0, 2.0, 8)] * 2, 8)
        (Remat(nodes=(Save(stage=0, option=0),)), Save(stage=1, option=0))
    """
    stage_count = len(stages)
    match plan.rule:
        case "none":
            return keep_all(stage_count)
        case "full":
            return keep_inputs(stage_count)
        case "sqrt":
            return periodic(stage_count, square_root(stage_count))
        case "periodic" if plan.count is not None:
            return periodic(stage_count, plan.count)
        case "revolve" if plan.count is not None:
            return revolve(stage_count, plan.count)
        case "chain" if plan.budget is not None:
            return rotor(stages, input_bytes, plan.budget, bound="kept").nodes
    raise UserError(f"memory plan {plan} is not for a chain of blocks: expected one of {', '.join(CHAIN_RULES)}")


def default_objective(chip: Chip | None) -> SaveSetObjective:
    """Return the cost to minimize by default: "seconds" if the chip's rates are known, otherwise "flop"."""
    return "flop" if roofline.rate(chip, "bfloat16") is None else "seconds"


def block_save_sets(
    graph: BlockGraph, objective: SaveSetObjective, save_set_count: int = SAVE_SET_COUNT
) -> tuple[SaveSet, ...]:
    """Return save sets of a block by decreasing bytes. The first one keeps everything, and the last one nothing.

    Args:
        graph: graph of the block.
        objective: the cost to minimize.
        save_set_count: number of save sets to solve for.
    """
    full_save = save_set(graph, (EVERYTHING,))
    hull_saves = hull(menu(graph, save_set_count, objective=objective), objective)
    return (full_save, *(save for save in reversed(hull_saves) if save.bytes < full_save.bytes))


def block_stage(graph: BlockGraph, save_sets: Sequence[SaveSet], objective: SaveSetObjective) -> Stage:
    """Return the cost of a block as a stage of a chain.

    With the objective "flop", the stage's fields for seconds contain FLOP. The backward pass is assumed to cost twice
    the forward pass, and to have all values that it reads in memory at once.

    Args:
        graph: graph of the block.
        save_sets: save sets of the block, one for each option of the stage.
        objective: unit of the stage's costs, FLOP or seconds.
    """
    forward_cost = float(cost_of(graph, objective))
    needed_indices, input_indices = set(graph.needed), set(graph.inputs)
    needed_output_bytes = sum(graph.values[index].bytes for index in needed_indices & set(graph.outputs))

    def option_of(save: SaveSet) -> Option:
        """Return the option of the stage that keeps the values of a save set."""
        # the block's output is left out of `kept_bytes`: it is always kept, as the next block's input
        kept_indices = graph.needed if save.keep == (EVERYTHING,) else [graph.by_name[name] for name in save.keep]
        kept_output_bytes = sum(graph.values[index].bytes for index in set(kept_indices) & set(graph.outputs))
        kept_bytes = max(0, save.bytes - kept_output_bytes)
        recomputed_bytes = max(0, graph.needed_bytes - needed_output_bytes - kept_bytes)
        extra_cost = save.seconds if objective == "seconds" else save.flop + _TIE_FLOP_PER_BYTE * recomputed_bytes
        name = "everything" if save.keep == (EVERYTHING,) else ", ".join(save.keep) or "nothing"
        return Option(kept_bytes, extra_cost, recomputed_bytes, name)

    passed_bytes = sum(graph.values[index].bytes for index in input_indices & set(graph.outputs) & set(graph.carried))
    stage_options = tuple(map(option_of, save_sets))
    return Stage(forward_cost, 2 * forward_cost, graph.output_bytes, stage_options, passed_bytes=passed_bytes)


def decide_chain(plan: MemoryPlan, calls: Sequence[BlockCall], chip: Chip | None = None) -> Decision:
    """Resolve a memory plan for a model of one chain or one stack of blocks; the stack will not be scanned.

    Args:
        plan: memory plan whose rule is in `CHAIN_RULES`.
        calls: the model's blocks (`programs.collect`), per device and microbatch; if `chip` is given, they were traced
            with it.
        chip: chip for which modeled seconds are minimized; without a chip, or if its rates are unknown, FLOP are
            minimized.

    Raises:
        UserError: the budget is too small, or the blocks do not form one chain.
    """
    if not calls or (len(calls) > 1 and any(call.count > 1 for call in calls)):
        raise UserError(
            f"memory {plan}: this model's blocks are not one chain ({len(calls)} calls of blocks, some in a loop): "
            "build the model from one layers.Chain or one layers.Stack, or use the memory plan save:BYTES"
        )
    objective = default_objective(chip)
    graph_by_kind = {call.fingerprint: call.graph for call in calls}
    save_set_count = SAVE_SET_COUNT if len(graph_by_kind) > 1 else ONE_KIND_SAVE_SET_COUNT
    save_sets_by_kind = {
        kind: block_save_sets(graph, objective, save_set_count) for kind, graph in graph_by_kind.items()
    }
    stage_by_kind = {
        kind: block_stage(graph, save_sets_by_kind[kind], objective) for kind, graph in graph_by_kind.items()
    }
    stage_kinds = [call.fingerprint for call in calls for _ in range(call.count)]
    stages = [stage_by_kind[kind] for kind in stage_kinds]
    nodes = chain_nodes(plan, stages, calls[0].input_bytes)
    chain_cost = simulate(nodes, stages, calls[0].input_bytes)
    chosen_save_sets = [save_sets_by_kind[stage_kinds[node.stage]][node.option] for node in save_nodes(nodes)]
    recomputed_flop = sum(
        (run_count - 1) * graph_by_kind[kind].flop + save_set.flop
        for run_count, kind, save_set in zip(times_run(nodes), stage_kinds, chosen_save_sets, strict=True)
    )
    # cost without recomputation, in the unit of the objective
    least_cost = sum(stage.forward_seconds + stage.backward_seconds for stage in stages)
    return Decision(
        plan,
        chain=ChainDecision(nodes, tuple(save_sets_by_kind[kind] for kind in stage_kinds)),
        blocks=tuple(graph_by_kind),
        layers=len(stages),
        bytes=chain_cost.kept_bytes,
        flop=recomputed_flop,
        seconds=max(0.0, chain_cost.seconds - least_cost) if objective == "seconds" else 0.0,
    )
