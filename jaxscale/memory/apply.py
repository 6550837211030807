"""Apply a memory plan or a decision to a model's blocks: wrap the blocks in `jax.checkpoint`, from outside the model.

In a chain, `Remat(nodes)` becomes a checkpoint that keeps only its inputs, and `Save(i, option)` becomes block i inside
the wrapper of this option. The barriers of `prevent_cse` stay on in a chain, because each block occurs twice in one
program. Without barriers XLA would merge the second run of a block with the first and keep the values that the plan
recomputes.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax

from jaxscale.blocks import BlockFunction, Call, Treatment, Wrapper, identity, keep_nothing, run_again, run_recomputed
from jaxscale.memory.chain import Nodes, Save, check_nodes, save_nodes
from jaxscale.memory.decision import ChainDecision, Decision
from jaxscale.memory.keep_named import keeping
from jaxscale.memory.plan import MemoryPlan
from jaxscale.memory.save_set import EVERYTHING


@dataclasses.dataclass(frozen=True)
class KeepBy:
    """The policy of `jax.checkpoint_policies` with a given name.

    In a traced program, this type distinguishes the checkpoints of a plan from the user's own.
    """

    name: str

    def __call__(self, primitive: Any, *inputs: Any, **params: Any) -> Any:
        """Return whether to keep the outputs of an operation; `jax.checkpoint` calls this."""
        return getattr(jax.checkpoint_policies, self.name)(primitive, *inputs, **params)


def policy_of(plan: MemoryPlan) -> Any:
    """Return the `jax.checkpoint` policy that a plan applies to every block; `None` if the plan applies no policy.

    Example:
        >>> policy_of(MemoryPlan.parse("jax:dots_saveable"))
        KeepBy(name='dots_saveable')
    """
    if plan.rule == "full":
        return keep_nothing
    return None if plan.policy is None else KeepBy(plan.policy)


def wrapper(plan: MemoryPlan) -> Wrapper:
    """Return the wrapper that `blocks.wrapping` applies to every block; the plan is `none` or applies a policy."""
    if plan.rule == "none":
        return identity
    policy = policy_of(plan)
    assert policy is not None, f"{plan} needs a decision, not a policy"

    def wrap_block(block: BlockFunction, is_rolled: bool) -> BlockFunction:
        """Return the block, wrapped in a checkpoint with the policy; `is_rolled` is true in a scan."""
        return run_again(block, rolled=is_rolled, policy=policy)

    return wrap_block


def treatment_for(decision: Decision, *, unroll: int = 1) -> Treatment:
    """Return the treatment that runs blocks as a decision specifies, for `blocks.treating`.

    Args:
        decision: the decision that `decide` returned or that was read from a file.
        unroll: number of layers that one iteration of a scan over layers runs.
    """
    if decision.plan.rule in ("none", "dots", "full", "jax"):
        return Treatment(wrapper(decision.plan), unroll)
    if decision.chain is not None:
        return treatment_of_chain(decision.chain)
    stack_decision = decision.stack
    if stack_decision is None:
        return Treatment(keeping(decision.saves), unroll)
    wrappers = [identity if group.save is None else keeping([group.save]) for group in stack_decision.groups]
    if len(wrappers) == 1:
        return Treatment(wrappers[0], unroll, segment=stack_decision.segment)
    layer_counts = [group.layers for group in stack_decision.groups]
    return Treatment(
        unroll=unroll, segment=stack_decision.segment, groups=tuple(zip(layer_counts, wrappers, strict=True))
    )


def chain_treatment(nodes: Nodes, option_wrappers: Sequence[Sequence[Wrapper]] | None = None) -> Treatment:
    """Return the treatment that runs a model's blocks as the plan of a chain specifies.

    Args:
        nodes: the plan of the chain.
        option_wrappers: for each stage, one wrapper per option; by default each stage has one option, which keeps
            everything.

    Example:
        >>> from jaxscale.memory.chain import revolve
        >>> block = Call(lambda weight, x: (weight * x, None), (2.0,))
        >>> treatment = chain_treatment(revolve(3, 1))
        >>> float(treatment.sequence([block] * 3, 1.0)[0])
        8.0
    """

    def run_plan(calls: Sequence[Call], x: Any) -> tuple[Any, list[Any]]:
        """Run the calls as the plan specifies; return the last block's `x` and the second result of each block."""
        check_nodes(nodes, len(calls))
        return _run_nodes(nodes, option_wrappers, calls, x)

    return Treatment(sequence=run_plan)


def treatment_of_chain(chain_decision: ChainDecision) -> Treatment:
    """Return the treatment that runs the blocks of a chain as a decision specifies."""
    option_wrappers = [
        [identity if save_set.keep == (EVERYTHING,) else keeping([save_set]) for save_set in save_sets]
        for save_sets in chain_decision.options
    ]
    return chain_treatment(chain_decision.nodes, option_wrappers)


def _run_nodes(
    nodes: Nodes, option_wrappers: Sequence[Sequence[Wrapper]] | None, calls: Sequence[Call], x: Any
) -> tuple[Any, list[Any]]:
    """Run calls of blocks under a plan's nodes; return the last block's `x` and each block's second result."""
    second_results, call_index = [], 0
    for node in nodes:
        if isinstance(node, Save):
            call = calls[call_index]
            wrap_block = identity if option_wrappers is None else option_wrappers[node.stage][node.option]
            x, second_result = wrap_block(call.block, False)(*call.before, x, *call.after)
            second_results.append(second_result)
            call_index += 1
        else:
            stage_count = sum(1 for _ in save_nodes(node.nodes))
            segment_calls = calls[call_index : call_index + stage_count]
            x, segment_second_results = run_recomputed(
                segment_calls,
                x,
                lambda inner_calls, inner_x, inner_nodes=node.nodes: _run_nodes(
                    inner_nodes, option_wrappers, inner_calls, inner_x
                ),
            )
            second_results += segment_second_results
            call_index += stage_count
    return x, second_results
