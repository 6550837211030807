"""Apply a memory plan, or a decision, to the blocks of a model: `jax.checkpoint` around them, from outside the model.

In a chain, `Remat(nodes)` becomes a checkpoint that keeps its inputs alone, `Save(i, option)` the block in that
option's wrapper. The barriers of `prevent_cse` stay on there: blocks that are not scanned occur twice in one program,
and XLA would merge the second run with the first, and keep the values that the plan recomputes.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax

from jaxscale.blocks import BlockFunction, Call, Treatment, Wrapper, again, as_it_is, keep_nothing, run_again
from jaxscale.memory.chain import Nodes, Save, check_nodes, saves
from jaxscale.memory.decision import ChainDecision, Decision
from jaxscale.memory.keep_named import keeping
from jaxscale.memory.plan import MemoryPlan
from jaxscale.memory.save_set import EVERYTHING


@dataclasses.dataclass(frozen=True)
class KeepBy:
    """One of JAX's policies, by its name in `jax.checkpoint_policies`.

    Its type distinguishes blocks that a plan wrapped from the user's checkpoints in a traced program.
    """

    name: str

    def __call__(self, primitive: Any, *inputs: Any, **params: Any) -> Any:
        """Whether an operation's outputs are kept, for `jax.checkpoint`."""
        return getattr(jax.checkpoint_policies, self.name)(primitive, *inputs, **params)


def policy_of(plan: MemoryPlan) -> Any:
    """The policy under which a plan runs every block; `None` for a plan that is no policy.

    Example:
        >>> policy_of(MemoryPlan.parse("jax:dots_saveable"))
        KeepBy(name='dots_saveable')
    """
    if plan.rule == "full":
        return keep_nothing
    return None if plan.policy is None else KeepBy(plan.policy)


def wrapper(plan: MemoryPlan) -> Wrapper:
    """The wrapper for `blocks.wrapping` that runs every block under a plan by a policy, or "none"."""
    if plan.rule == "none":
        return as_it_is
    policy = policy_of(plan)
    assert policy is not None, f"{plan} needs a decision, not a policy"

    def checkpointed(block: BlockFunction, rolled: bool) -> BlockFunction:
        return run_again(block, rolled=rolled, policy=policy)

    return checkpointed


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
    groups = tuple((group.layers, as_it_is if group.save is None else keeping([group.save])) for group in stack.groups)
    if len(groups) == 1:
        return Treatment(groups[0][1], unroll, segment=stack.segment)
    return Treatment(unroll=unroll, segment=stack.segment, groups=groups)


def chain_treatment(nodes: Nodes, options: Sequence[Sequence[Wrapper]] | None = None) -> Treatment:
    """The treatment of a model's blocks under a plan of a chain.

    Args:
        nodes: the plan.
        options: for each stage a wrapper per option; by default one, which keeps everything.

    Example:
        >>> from jaxscale.memory.chain import revolve
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
        [as_it_is if save.keep == (EVERYTHING,) else keeping([save]) for save in saves] for saves in decision.options
    ]
    return chain_treatment(decision.nodes, options)


def _run(
    nodes: Nodes, options: Sequence[Sequence[Wrapper]] | None, calls: Sequence[Call], x: Any
) -> tuple[Any, list[Any]]:
    """The last `x` and each block's result, of the calls of these nodes, run in order."""
    results, position = [], 0
    for node in nodes:
        if isinstance(node, Save):
            call = calls[position]
            wrapper = as_it_is if options is None else options[node.stage][node.option]
            x, result = wrapper(call.block, False)(*call.before, x, *call.after)
            results.append(result)
            position += 1
        else:
            count = sum(1 for _ in saves(node.nodes))
            inner = node.nodes
            x, result = again(
                calls[position : position + count], x, lambda calls, x, inner=inner: _run(inner, options, calls, x)
            )
            results += result
            position += count
    return x, results
