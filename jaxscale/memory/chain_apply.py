"""Apply a plan of a chain: nested `jax.checkpoint`, from outside the model.

`Remat(nodes)` becomes a checkpoint that keeps its inputs alone, `Save(i, option)` the block in that option's wrapper.
The barriers of `prevent_cse` stay on: blocks that are not scanned occur twice in one program, and XLA would merge the
second run with the first, and keep the values that the plan recomputes.
"""

from collections.abc import Sequence
from typing import Any

from jaxscale import blocks
from jaxscale.blocks import Call, Treatment, Wrapper
from jaxscale.errors import UserError
from jaxscale.memory.chain import (
    Nodes,
    Save,
    Stage,
    check_nodes,
    keep_all,
    keep_inputs,
    periodic,
    revolve,
    saves,
    square_root,
)
from jaxscale.memory.decision import ChainDecision
from jaxscale.memory.keep_named import keeping
from jaxscale.memory.plan import MemoryPlan
from jaxscale.memory.rotor import rotor
from jaxscale.memory.save_set import EVERYTHING

CHAIN_RULES = ("none", "full", "sqrt", "periodic", "revolve", "chain")
"""Rules of a `MemoryPlan` for chains."""


def chain_nodes(plan: MemoryPlan, stages: Sequence[Stage], input_bytes: int) -> Nodes:
    """Resolve a memory plan for a chain.

    Args:
        plan: by a rule of `CHAIN_RULES`.
        stages: cost of each block; only `chain` reads more than their number.
        input_bytes: of the first block's input.

    Raises:
        UserError: the budget is below the least possible.

    Example:
        >>> chain_nodes(MemoryPlan.parse("periodic:1"), [Stage(1.0, 2.0, 8)] * 2, 8)
        (Remat(nodes=(Save(stage=0, option=0),)), Save(stage=1, option=0))
    """
    count = len(stages)
    match plan.rule:
        case "none":
            return keep_all(count)
        case "full":
            return keep_inputs(count)
        case "sqrt":
            return periodic(count, square_root(count))
        case "periodic" if plan.count is not None:
            return periodic(count, plan.count)
        case "revolve" if plan.count is not None:
            return revolve(count, plan.count)
        case "chain" if plan.budget is not None:
            return rotor(stages, input_bytes, plan.budget, bound="kept").nodes
    raise UserError(f"memory plan {plan} is not one of a chain of blocks: take {', '.join(CHAIN_RULES)}")


def chain_treatment(nodes: Nodes, options: Sequence[Sequence[Wrapper]] | None = None) -> Treatment:
    """The treatment of a model's blocks under a plan of a chain.

    Args:
        nodes: the plan.
        options: for each stage a wrapper per option; by default one, which keeps everything.

    Example:
        >>> from jaxscale.blocks import one_after_another
        >>> block = Call(lambda weight, x: (weight * x, None), (2.0,))
        >>> treatment = chain_treatment(revolve(3, 1))
        >>> float(treatment.sequence([block] * 3, 1.0)[0])
        8.0
    """

    def run(calls: Sequence[Call], x: Any) -> tuple[Any, list[Any]]:
        check_nodes(nodes, len(calls))
        return _run(nodes, options, calls, x)

    return Treatment(sequence=run)


def treatment_of_chain(decision: ChainDecision) -> Treatment:
    """The treatment of blocks under a decision for a chain."""
    options = [
        [blocks.as_it_is if save.keep == (EVERYTHING,) else keeping([save]) for save in saves]
        for saves in decision.options
    ]
    return chain_treatment(decision.nodes, options)


def _run(
    nodes: Nodes, options: Sequence[Sequence[Wrapper]] | None, calls: Sequence[Call], x: Any
) -> tuple[Any, list[Any]]:
    """Run the calls of these nodes, in order."""
    results, position = [], 0
    for node in nodes:
        if isinstance(node, Save):
            call = calls[position]
            wrapper = blocks.as_it_is if options is None else options[node.stage][node.option]
            x, result = wrapper(call.block, False)(*call.before, x, *call.after)
            results.append(result)
            position += 1
        else:
            count = sum(1 for _ in saves(node.nodes))
            inner = node.nodes
            x, result = blocks.again(
                calls[position : position + count], x, lambda calls, x, inner=inner: _run(inner, options, calls, x)
            )
            results += result
            position += count
    return x, results
