"""Apply a memory plan or its decision to the blocks of a model: wrap them in `jax.checkpoint`, from outside the model.

In a chain, `Remat(nodes)` becomes a checkpoint that keeps only its inputs, and `Save(i, option)` becomes block i in the
wrapper of that option. The barriers of `prevent_cse` stay on in a chain, because its blocks occur twice in one program.
Without barriers XLA would merge the second run with the first and keep the values that the plan recomputes.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax

from jaxscale.blocks import BlockFunction, Call, Treatment, Wrapper, identity, keep_nothing, run_again, run_recomputed
from jaxscale.memory.chain import Nodes, Save, check_nodes, saves
from jaxscale.memory.decision import ChainDecision, Decision
from jaxscale.memory.keep_named import keeping
from jaxscale.memory.plan import MemoryPlan
from jaxscale.memory.save_set import EVERYTHING


@dataclasses.dataclass(frozen=True)
class KeepBy:
    """One of JAX's policies, by its name in `jax.checkpoint_policies`.

    The type distinguishes blocks that a plan wrapped from the user's checkpoints in a traced program.
    """

    name: str

    def __call__(self, primitive: Any, *inputs: Any, **params: Any) -> Any:
        """Whether to keep the outputs of an operation; `jax.checkpoint` calls this."""
        return getattr(jax.checkpoint_policies, self.name)(primitive, *inputs, **params)


def policy_of(plan: MemoryPlan) -> Any:
    """The `jax.checkpoint` policy that a plan applies to every block; `None` if the plan is not a policy.

    Example:
        >>> policy_of(MemoryPlan.parse("jax:dots_saveable"))
        KeepBy(name='dots_saveable')
    """
    if plan.rule == "full":
        return keep_nothing
    return None if plan.policy is None else KeepBy(plan.policy)


def wrapper(plan: MemoryPlan) -> Wrapper:
    """The wrapper of every block, for `blocks.wrapping`, under a plan that is a policy or is `none`."""
    if plan.rule == "none":
        return identity
    policy = policy_of(plan)
    assert policy is not None, f"{plan} needs a decision, not a policy"

    def wrap_block(block: BlockFunction, rolled: bool) -> BlockFunction:
        """The block under the policy; `rolled` is true in a scan."""
        return run_again(block, rolled=rolled, policy=policy)

    return wrap_block


def treatment_for(decision: Decision, *, unroll: int = 1) -> Treatment:
    """The treatment of blocks under a decision, for `blocks.treating`.

    Args:
        decision: the decision that `decide` returned or that was read from a file.
        unroll: layers per iteration of a scan over layers.
    """
    if decision.plan.rule in ("none", "dots", "full", "jax"):
        return Treatment(wrapper(decision.plan), unroll)
    if decision.chain is not None:
        return treatment_of_chain(decision.chain)
    stack = decision.stack
    if stack is None:
        return Treatment(keeping(decision.saves), unroll)
    # number of layers and wrapper of each group
    groups = tuple((group.layers, identity if group.save is None else keeping([group.save])) for group in stack.groups)
    if len(groups) == 1:
        return Treatment(groups[0][1], unroll, segment=stack.segment)
    return Treatment(unroll=unroll, segment=stack.segment, groups=groups)


def chain_treatment(nodes: Nodes, options: Sequence[Sequence[Wrapper]] | None = None) -> Treatment:
    """The treatment of a model's blocks under a plan of a chain.

    Args:
        nodes: the plan of the chain.
        options: for each stage, a wrapper for each of its options; by default one option, which keeps everything.

    Example:
        >>> from jaxscale.memory.chain import revolve
        >>> block = Call(lambda weight, x: (weight * x, None), (2.0,))
        >>> treatment = chain_treatment(revolve(3, 1))
        >>> float(treatment.sequence([block] * 3, 1.0)[0])
        8.0
    """

    def run(calls: Sequence[Call], x: Any) -> tuple[Any, list[Any]]:
        """Run the calls under the plan; return the last `x` and the second result of each block."""
        check_nodes(nodes, len(calls))
        return _run(nodes, options, calls, x)

    return Treatment(sequence=run)


def treatment_of_chain(decision: ChainDecision) -> Treatment:
    """The treatment of blocks under a decision for a chain."""
    options = [
        [identity if save.keep == (EVERYTHING,) else keeping([save]) for save in ways] for ways in decision.options
    ]
    return chain_treatment(decision.nodes, options)


def _run(
    nodes: Nodes, options: Sequence[Sequence[Wrapper]] | None, calls: Sequence[Call], x: Any
) -> tuple[Any, list[Any]]:
    """Run the block calls of these nodes in order; return the last `x` and the second result of each block."""
    block_results, position = [], 0
    for node in nodes:
        if isinstance(node, Save):
            call = calls[position]
            wrap_block = identity if options is None else options[node.stage][node.option]
            x, block_result = wrap_block(call.block, False)(*call.before, x, *call.after)
            block_results.append(block_result)
            position += 1
        else:
            stage_count = sum(1 for _ in saves(node.nodes))
            segment_calls = calls[position : position + stage_count]
            x, segment_results = run_recomputed(
                segment_calls, x, lambda calls, x, nodes=node.nodes: _run(nodes, options, calls, x)
            )
            block_results += segment_results
            position += stage_count
    return x, block_results
