"""A MemoryPlan applied to blocks: `jax.checkpoint` around each, from outside the model."""

import jax

from jaxscale.blocks import BlockFunction, Wrapper
from jaxscale.memory.plan import MemoryPlan


def wrapper(plan: MemoryPlan) -> Wrapper:
    """What `blocks.wrapping` needs to run every block under the plan."""
    if plan.remat == "none":
        return lambda block, rolled: block
    policy = jax.checkpoint_policies.dots_saveable if plan.remat == "dots" else None

    def checkpointed(block: BlockFunction, rolled: bool) -> BlockFunction:
        # inside a rolled scan XLA can't undo the recomputation, and the barriers of prevent_cse only cost
        return jax.checkpoint(block, policy=policy, prevent_cse=not rolled)

    return checkpointed
