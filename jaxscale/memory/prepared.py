"""Blocks whose arguments are computed when they run, such as a layer's weights from those of several or from the host.

Such arguments are not kept for the backward pass, but computed again.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from jaxscale.blocks import BlockFunction, Wrapper, identity
from jaxscale.memory.keep_named import Keeping


@dataclasses.dataclass(frozen=True)
class Prepared:
    """A wrapper of blocks whose arguments are computed when they run.

    Args:
        wrapper: wraps blocks for other purposes. If it recomputes a block, it recomputes the arguments, too.
        prepare_args: function from the tuple of the wrapped block's arguments to that of the block's own.
        everything_policy: policy of `jax.checkpoint` for a wrapper that keeps everything. It takes precedence over
            checkpoints inside the block.
    """

    wrapper: Wrapper
    prepare_args: Callable[[Any], Any]
    everything_policy: Callable[..., Any]

    def __call__(self, block: BlockFunction, is_rolled: bool) -> BlockFunction:
        """Return the block, which computes its arguments; `is_rolled` is true in a scan."""

        def prepare_and_run(*args: Any) -> Any:
            return block(*self.prepare_args(args))

        if self.wrapper is identity:
            return jax.checkpoint(prepare_and_run, policy=self.everything_policy, prevent_cse=not is_rolled)
        return self.wrapper(prepare_and_run, is_rolled)


def with_prepared_args(wrapper: Wrapper, prepare_args: Callable[[Any], Any], policy: Callable[..., Any]) -> Wrapper:
    """Return a wrapper of blocks whose arguments are computed when the block runs, and again in its backward pass.

    Args:
        wrapper: wraps blocks for other purposes; it may compute arguments itself, from those of `prepare_args`.
        prepare_args: function from the tuple of the wrapped block's arguments to that of the block's own.
        policy: policy of `jax.checkpoint` that keeps every residual except what `prepare_args` computes, for a wrapper
            that keeps everything.

    Example:
        >>> double = with_prepared_args(identity, lambda args: (2 * args[0],), lambda *_, **params: True)
        >>> float(double(lambda x: x + 1, False)(3.0))
        7.0
    """
    if isinstance(wrapper, Prepared):
        return dataclasses.replace(wrapper, **_composed(wrapper, prepare_args, policy))
    if not isinstance(wrapper, Keeping):
        return Prepared(wrapper, prepare_args, policy)
    # the sets of saved values refer to the block with its own arguments
    if wrapper.prepare_args is None:
        return dataclasses.replace(wrapper, prepare_args=prepare_args, everything_policy=policy)
    return dataclasses.replace(wrapper, **_composed(wrapper, prepare_args, policy))


def _composed(wrapper: Prepared | Keeping, prepare_args: Callable[[Any], Any], policy: Callable[..., Any]) -> Any:
    """Return the fields of a wrapper whose own preparation runs after `prepare_args`."""
    next_preparation, next_policy = wrapper.prepare_args, wrapper.everything_policy
    assert next_preparation is not None

    def prepare_both(args: Any) -> Any:
        return next_preparation(prepare_args(args))

    def keep_if_both_do(primitive: Any, *inputs: Any, **params: Any) -> bool:
        return policy(primitive, *inputs, **params) and next_policy(primitive, *inputs, **params)

    return {"prepare_args": prepare_both, "everything_policy": keep_if_both_do}
