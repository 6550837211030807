"""What a step takes of kernels while it is traced: codecs' are named as the plan has it, every choice is written down.

The choices are those that `pallas_kernels.dispatch` and the layers made for the shapes that the trace met, each where
it was made; nothing is asked a second time.
"""

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from jaxscale.errors import UserError
from jaxscale.step.kernels import Taken
from jaxscale.step.plan import Plan
from pallas_kernels import dispatch
from pallas_kernels.target import target

if TYPE_CHECKING:
    from jaxscale.step.train_step import TrainStep

Notes = dispatch.Notes
_PASS_NONE = "Pass implementation=None to take one that can."


def noted(step: "TrainStep", function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of a step that is traced with kernels as the step's plan has them, and what is chosen noted in it.

    Args:
        step: with its plan.
        function: to be traced.
    """

    @functools.wraps(function)
    def run(*args: Any) -> Any:
        plan, notes = step.plan, step._notes
        with dispatch.naming(plan.kernels.of_codecs()), dispatch.noting(notes):
            try:
                made = function(*args)
            except dispatch.CannotRun as error:
                said = str(error)
                if said.endswith(_PASS_NONE):
                    said = f"kernels {plan.kernels}: {said.removesuffix(_PASS_NONE)}Leave it out for one that can"
                raise UserError(said) from error
            _note_update(step)
        return made

    return run


def _note_update(step: "TrainStep") -> None:
    """Note that no kernel steps a state in few bits, where none has been asked."""
    if step.plan.state == "float32" or any(found.kernel == "adam8" for found, _ in step._notes):
        return
    device = getattr(step.mesh, "abstract_device", None) or step.mesh.devices.flat[0]
    why = step.update.unfused or "no moment lies as the kernel takes it"
    where = target(f"{device.platform} {device.device_kind}")
    dispatch.note(dispatch.Explanation("adam8", where, "reference", {}, why))


def taken(notes: dispatch.Notes) -> tuple[Taken, ...]:
    """Notes without their shapes, each once."""
    found = (Taken(one.kernel, str(one.target), one.chosen, one.why) for one, _ in notes)
    return tuple(dict.fromkeys(found))


def check_taken(plan: Plan, found: Sequence[Taken]) -> None:
    """Refuse a plan that names a kernel which its step does not take, or takes otherwise.

    Args:
        plan: what was asked for.
        found: what the traced step took.

    Raises:
        UserError: as it says.
    """
    for kernel, name in plan.kernels.named:
        met = [one for one in found if one.kernel == kernel]
        if kernel == "attention":  # a model that reads no such setting is refused by `check_traced`
            continue
        if not met:
            raise UserError(f"kernels {kernel}={name}: nothing in this step takes {kernel}; leave it out")
        if name not in [one.chosen for one in met]:
            said = f"kernels {kernel}={name}: this step takes {kernel} {met[0].chosen}"
            if kernel == "cross_entropy":
                why = "a loss of a model's own must be given context.loss and context.loss_chunk"
                raise UserError(f"{said}: {why}; or leave it out")
            raise UserError(f"{said}{'' if met[0].why is None else f': {met[0].why}'}; leave it out")
