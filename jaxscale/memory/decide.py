"""Resolve a memory plan for a model's blocks to a decision, and a decision to a treatment of blocks.

Rules of this module: none, dots, full, jax, sqrt and periodic (of a scanned stack), save, greedy, dtr_static, file.
Rules for chains of blocks and for offload are in `chain_decision.py` and `selectors`.
"""

from collections.abc import Mapping, Sequence

from jaxscale.blocks import Treatment
from jaxscale.errors import UserError
from jaxscale.memory.apply import wrapper
from jaxscale.memory.chain_decision import decide_chain, treatment_of_chain
from jaxscale.memory.decision import Decision, Group, SaveSet, StackDecision, read_decision
from jaxscale.memory.graph import EVERYTHING, Host, Objective, save_set
from jaxscale.memory.greedy import greedy
from jaxscale.memory.keep_named import keeping, keeping_or_not
from jaxscale.memory.plan import MemoryPlan
from jaxscale.memory.policy_sets import policy_set
from jaxscale.memory.selectors import SELECTORS
from jaxscale.memory.stack_plan import plan_stack, share, stack_totals, too_small, totals
from jaxscale.platforms.platform import Chip, chips
from jaxscale.programs import roofline
from jaxscale.programs.block import BlockGraph
from jaxscale.programs.collect import BlockCall

RULES = (
    "none",
    "dots",
    "full",
    "jax",
    "sqrt",
    "periodic",
    "revolve",
    "chain",
    "save",
    "greedy",
    "dtr_static",
    "offload",
    "file",
)
"""Rules that `decide` supports."""
_POLICIES = {"dots": "dots_saveable", "full": "nothing_saveable"}


def decide(plan: MemoryPlan, calls: Sequence[BlockCall], chip: Chip | None = None) -> Decision:
    """Resolve a memory plan for a model.

    Args:
        plan: one of `RULES`.
        calls: the model's blocks (`costs.collect`), per device and microbatch, with seconds where `chip` is given.
        chip: its seconds are minimized if the plan specifies no objective.

    Raises:
        UserError: a budget below the least possible; segments of a model that is no scanned stack; no blocks.
    """
    if plan.rule == "file":
        return read_decision(plan.name)
    if not calls:
        raise UserError(
            f"memory {plan}: this model shows no blocks; build it of layers.Stack or layers.Chain, bring it as a "
            "ForeignModel, or leave memory out"
        )
    kinds = kinds_of(calls)
    objective = plan.objective or default_objective(chip)
    budget = plan.budget if plan.budget is not None else 0
    match plan.rule:
        case "none":
            return _uniform(plan, calls, [save_set(graph, (EVERYTHING,)) for graph in kinds.values()])
        case "dots" | "full" | "jax":
            policy = plan.name or _POLICIES[plan.rule]
            return _uniform(plan, calls, [policy_set(graph, policy) for graph in kinds.values()])
        case "sqrt" | "periodic" if _scanned(calls):
            return _segments(plan, calls)
        case "sqrt" | "periodic" | "revolve" | "chain":
            return decide_chain(plan, calls, chip)
        case "save" if _scanned(calls):
            return _stack_optimum(plan, calls, objective, None)
        case "save":
            return _uniform(plan, calls, share(calls, budget, objective=objective))
        case "greedy" | "dtr_static":
            inputs = sum(call.count * call.input_bytes for call in calls)
            if budget < inputs:
                raise too_small(budget, inputs, "save:BYTES for a scanned stack, chain:BYTES, ")
            full_bytes = sum(call.count * call.graph.needed_bytes for call in calls)
            share_kept = min(1.0, (budget - inputs) / full_bytes) if full_bytes else 1.0
            score = "ratio" if plan.rule == "greedy" else "dtr_static"
            rooms = {kind: int(graph.needed_bytes * share_kept) for kind, graph in kinds.items()}
            return _uniform(
                plan, calls, [greedy(graph, rooms[kind], score, objective=objective) for kind, graph in kinds.items()]
            )
        case "offload" if plan.selector == "pofo" and _scanned(calls):
            return _stack_optimum(plan, calls, "seconds", Host(2**62, host_bandwidth(chip)))
        case "offload" if plan.selector is not None:
            return _uniform(plan, calls, _offloaded(plan, calls, kinds, Host(2**62, host_bandwidth(chip))))
        case _:
            raise UserError(f"memory {plan}: expected a plan by one of {', '.join(RULES)}")


def kinds_of(calls: Sequence[BlockCall]) -> dict[str, BlockGraph]:
    """A model's kinds of blocks by fingerprint, in order of first appearance."""
    return {call.fingerprint: call.graph for call in calls}


def default_objective(chip: Chip | None) -> Objective:
    """Seconds on a chip with known rates, else FLOP."""
    return "flop" if roofline.rate(chip, "bfloat16") is None else "seconds"


def host_bandwidth(chip: Chip | None) -> float:
    """Bytes/s between a chip and its host, each way; if unknown, that of the slowest link of the tables.

    Example:
        >>> from jaxscale.platforms.platform import chips
        >>> host_bandwidth(chips()["h100"]), host_bandwidth(None)
        (64000000000.0, 15000000000.0)
    """
    links = [link.bandwidth for link in (() if chip is None else chip.links) if link.name == "pcie"]
    return (
        links[0] if links else min(link.bandwidth for c in chips().values() for link in c.links if link.name == "pcie")
    )


def _offloaded(
    plan: MemoryPlan, calls: Sequence[BlockCall], kinds: Mapping[str, BlockGraph], host: Host
) -> list[SaveSet]:
    """A selector's choice for each kind of block; its budget is proportional to the bytes kept without a plan."""
    budget, inputs = plan.budget or 0, sum(call.count * call.input_bytes for call in calls)
    if budget < inputs:
        raise too_small(budget, inputs)
    full_bytes = sum(call.count * call.graph.needed_bytes for call in calls)
    share_kept = min(1.0, (budget - inputs) / full_bytes) if full_bytes else 1.0
    selector = SELECTORS[str(plan.selector)]
    return [selector(graph, int(graph.needed_bytes * share_kept), host) for graph in kinds.values()]


def treatment_for(decision: Decision, *, unroll: int = 1) -> Treatment:
    """The treatment of blocks under a decision, for `blocks.treating`.

    Args:
        decision: of `decide`, or read from a file.
        unroll: layers per iteration of a scan over layers.
    """
    if decision.plan.rule in ("none", "dots", "full", "jax"):
        return Treatment(wrapper(decision.plan), unroll)
    if decision.chain is not None:
        return treatment_of_chain(decision.chain)
    stack = decision.stack
    if stack is None:
        return Treatment(keeping(decision.saves), unroll)
    groups = tuple((group.layers, keeping_or_not(group.save)) for group in stack.groups)
    if len(groups) == 1:
        return Treatment(groups[0][1], unroll, segment=stack.segment)
    return Treatment(unroll=unroll, segment=stack.segment, groups=groups)


def _scanned(calls: Sequence[BlockCall]) -> bool:
    """Whether the model is one scanned stack of alike blocks."""
    return len(calls) == 1 and calls[0].rolled and calls[0].count > 1


def _stack_optimum(plan: MemoryPlan, calls: Sequence[BlockCall], objective: Objective, host: Host | None) -> Decision:
    """The optimum of a scanned stack: one save set for all its layers, two groups, or two levels."""
    [call] = calls
    stack = plan_stack(call.graph, call.count, plan.budget or 0, objective=objective, host=host)
    if len(stack.groups) == 1 and stack.segment is None:
        return _uniform(plan, calls, [group.save for group in stack.groups if group.save is not None])
    return _stacked(plan, call, stack)


def _uniform(plan: MemoryPlan, calls: Sequence[BlockCall], saves: Sequence[SaveSet]) -> Decision:
    sums = totals(calls, saves)
    return Decision(
        plan,
        tuple(saves),
        None,
        blocks=tuple(kinds_of(calls)),
        layers=sums.layers,
        bytes=sums.bytes,
        host_bytes=sums.host_bytes,
        flop=sums.flop,
        seconds=sums.seconds,
    )


def _stacked(plan: MemoryPlan, call: BlockCall, stack: StackDecision) -> Decision:
    sums = stack_totals(call.graph, stack)
    return Decision(
        plan,
        (),
        stack,
        blocks=(call.fingerprint,),
        layers=sums.layers,
        bytes=sums.bytes,
        host_bytes=sums.host_bytes,
        flop=sums.flop,
        seconds=sums.seconds,
    )


def _segments(plan: MemoryPlan, calls: Sequence[BlockCall]) -> Decision:
    [call] = calls
    layers = call.count
    every = plan.count
    if every is None:
        every = min(range(1, layers + 1), key=lambda k: (-(-layers // k) + k, abs(k - layers**0.5)))
    if every > layers:
        raise UserError(f"memory {plan}: segments of {every} blocks, and the model has {layers}")
    return _stacked(plan, call, StackDecision((Group(layers),), every))
