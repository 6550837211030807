"""What a compiled step must show: a request that took no effect is an error, not a surprise."""

import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxscale.step.build import TrainStep


class NoEffect(AssertionError):
    """The compiled program does not do what the plan asked for: a defect of jaxscale or of the compiler."""


def check_compiled(step: "TrainStep", executable: Any) -> None:
    """Compare the compiled step with its plan.

    Raises:
        NoEffect: ZeRO left the optimizer's state whole, or bfloat16 was asked for and nothing computes in it.
    """
    plan, mesh = step.plan, step.mesh
    if plan.zero and mesh.shape["fsdp"] > 1:
        expected = sum(s.spec == e.spec for s, e in zip(*_state_shardings(step, executable), strict=True))
        if expected != len(_state_shardings(step, executable)[0]):
            raise NoEffect(f"zero {plan.zero}: the compiled step does not keep the optimizer state sharded as placed")
    if plan.precision == "bfloat16" and not re.search(r"bf16\[", executable.as_text()):
        raise NoEffect("precision bfloat16: nothing in the compiled step is of this type")


def _state_shardings(step: "TrainStep", executable: Any) -> tuple[list[Any], list[Any]]:
    import jax

    after, _ = executable.output_shardings
    return jax.tree.leaves(after.optimizer), jax.tree.leaves(step.layout.state.optimizer)
