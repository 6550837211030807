"""A MemoryPlan applied to blocks: `jax.checkpoint` around each, from outside the model."""

from typing import Any

import jax

from jaxscale.blocks import BlockFunction, Wrapper
from jaxscale.memory.plan import MemoryPlan


def keep_dots(primitive: Any, *inputs: Any, **params: Any) -> Any:
    """Policy of "dots": the results of matrix products are kept."""
    return jax.checkpoint_policies.dots_saveable(primitive, *inputs, **params)


def keep_nothing(primitive: Any, *inputs: Any, **params: Any) -> bool:
    """Policy of "full": nothing inside a block is kept."""
    return False


# functions of our own, so that a traced program tells blocks that a plan wrapped from a checkpoint of the user's
POLICIES: dict[str, Any] = {"dots": keep_dots, "full": keep_nothing}


def wrapper(plan: MemoryPlan) -> Wrapper:
    """What `blocks.wrapping` needs to run every block under the plan."""
    if plan.rule == "none":
        return lambda block, rolled: block
    policy = POLICIES[plan.rule]

    def checkpointed(block: BlockFunction, rolled: bool) -> BlockFunction:
        # inside a rolled scan XLA can't undo the recomputation, and the barriers of prevent_cse only cost
        return jax.checkpoint(block, policy=policy, prevent_cse=not rolled)

    return checkpointed
