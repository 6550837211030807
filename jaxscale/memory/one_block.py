"""Rematerialization of one function, for code that uses no other part of jaxscale."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax

from jaxscale.blocks import run_again, treating, treatment
from jaxscale.compat import runs_recomputation_early
from jaxscale.errors import UserError
from jaxscale.memory.apply import policy_of
from jaxscale.memory.decide import decide
from jaxscale.memory.keep_named import keeping
from jaxscale.memory.plan import MemoryPlan
from jaxscale.platforms.platform import Platform
from jaxscale.programs.block import block_graph
from jaxscale.programs.collect import BlockCall

_RULES_OF_SEVERAL_BLOCKS = ("sqrt", "periodic", "revolve", "chain")


def remat(
    block: Callable[..., Any], plan: MemoryPlan | str, *args: Any, platform: Platform | str | None = None
) -> Callable[..., Any]:
    """Wrap a function so that a memory plan selects the values that are kept for its backward pass.

    The other values are recomputed.

    Results and gradients equal those of `block`. Under a budget the kept values are

        argmin over sets S of { recomputed cost of S : bytes of inputs + bytes of S <= budget }.

    The rule `save` finds this set exactly; `greedy` and `dtr_static` approximate it by heuristics.

    Args:
        block: a function of pytrees of arrays that JAX can differentiate; the last argument is the activation.
        plan: a memory plan, or its text: "full", "dots", "jax:POLICY", "save:136MiB", "greedy:136MiB",
            "offload:pofo:136MiB"; budgets include the activation itself.
        args: the block's arguments, as arrays or shapes (`jax.ShapeDtypeStruct`). A plan with a budget is solved for
            them, and the returned function accepts only arrays of these shapes and dtypes. Other plans need no `args`.
        platform: platform on which the cost is modeled in seconds, such as "tpu v5e:1x1"; if `None`, the cost is FLOP.

    Returns:
        A function with the positional arguments of `block`. JAX can differentiate, compile, map and scan it.

    Raises:
        UserError: the plan is for several blocks, or is `fit`; the budget is too small; or `args` are missing.
        StaleGraph: the returned function is traced with shapes that differ from those of `args`.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> def block(w, x):
        ...     return jnp.tanh(jnp.tanh(x @ w) @ w)
        >>> w, x = jnp.full((8, 8), 0.1), jnp.ones((4, 8))
        >>> lean = remat(block, "save:256B", w, x)
        >>> gradient = jax.grad(lambda w: lean(w, x).sum())(w)
        >>> bool(jnp.allclose(gradient, jax.grad(lambda w: block(w, x).sum())(w)))
        True

    References:
        Checkpointing by integer program: Jain et al., "Checkmate", 2020 (https://arxiv.org/abs/1910.02653).
    """
    if not callable(block):
        raise UserError(f"remat: got {block!r}, expected a function of arrays, then the memory plan")
    if not isinstance(plan, MemoryPlan | str):
        raise UserError(f"remat: got {plan!r}, expected a memory plan such as 'full' or 'save:136MiB'")
    memory_plan = MemoryPlan.parse(plan) if isinstance(plan, str) else plan
    if memory_plan.rule == "fit":
        raise UserError("remat: got the plan fit, which is for a whole model: set it in a Plan, or give save:BYTES")
    if memory_plan.rule in _RULES_OF_SEVERAL_BLOCKS:
        raise UserError(
            f"remat: the plan {memory_plan} is for a sequence of blocks, but remat wraps one block: give save:BYTES "
            "or full, or set the plan in a Plan"
        )
    if memory_plan.rule == "none":
        return block
    policy = policy_of(memory_plan)
    if policy is not None:
        return _wrap(block, lambda: run_again(block, rolled=False, policy=policy))
    if not args:
        raise UserError(
            f"remat: the plan {memory_plan} depends on the shapes of the block's arguments: give them, as in "
            f"remat(block, {str(memory_plan)!r}, *args)"
        )
    parsed_platform = Platform.parse(platform) if isinstance(platform, str) else platform
    chip = None if parsed_platform is None else parsed_platform.chip
    if memory_plan.rule == "offload" and chip is None:
        raise UserError(
            f"remat: the plan {memory_plan} compares the seconds of copies and of recomputation: give a platform, such "
            'as platform="tpu v5e:1x1"'
        )
    graph = block_graph(block, *args, chip=chip)
    call = BlockCall(graph.fingerprint, graph, args, 1, rolled=False, order=0)
    wrap_block = keeping(decide(memory_plan, [call], chip).saves)
    return _wrap(block, lambda: wrap_block(block, False))


def _wrap(block: Callable[..., Any], make_rematerialized: Callable[[], Callable[..., Any]]) -> Callable[..., Any]:
    """Return a function like `block`; each call makes the rematerialized block and runs it."""

    @functools.wraps(block)
    def rematerialized_block(*args: Any) -> Any:
        """Run the block; on a backend that would recompute too early, let recomputation wait for its gradient."""
        is_recomputation_early = jax.default_backend() == "cpu" and runs_recomputation_early()
        with treating(dataclasses.replace(treatment(), is_held_back=is_recomputation_early)):
            return make_rematerialized()(*args)

    return rematerialized_block
