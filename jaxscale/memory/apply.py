"""Apply a MemoryPlan to blocks: `jax.checkpoint` around each, from outside the model."""

import dataclasses
from typing import Any

import jax

from jaxscale.blocks import BlockFunction, Wrapper, as_it_is, keep_nothing, run_again
from jaxscale.memory.plan import MemoryPlan


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
    name = "dots_saveable" if plan.rule == "dots" else plan.name if plan.rule == "jax" else None
    return None if name is None else KeepBy(name)


def wrapper(plan: MemoryPlan) -> Wrapper:
    """The wrapper for `blocks.wrapping` that runs every block under a plan by a policy, or "none"."""
    if plan.rule == "none":
        return as_it_is
    policy = policy_of(plan)
    assert policy is not None, f"{plan} needs a decision, not a policy"

    def checkpointed(block: BlockFunction, rolled: bool) -> BlockFunction:
        return run_again(block, rolled=rolled, policy=policy)

    return checkpointed
