"""KernelTrace: kernels while a step is traced: codecs' are named as the plan has it, every choice is written down.

The choices are those that `pallas_kernels.dispatch` and the layers made for the shapes that the trace met, each where
it was made; nothing is asked a second time.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

from jaxscale.errors import UserError
from jaxscale.recipe.kernels import Taken
from jaxscale.recipe.plan import Plan
from pallas_kernels import dispatch
from pallas_kernels.target import target

_PASS_NONE = "Pass implementation=None to take one that can."


class KernelTrace:
    """The choices of kernels that the traces of a step meet.

    Args:
        plan: names kernels.
        mesh: devices of the step.
        unfused: why no kernel steps an optimizer's state in few bits; `None` where one does.
    """

    def __init__(self, plan: Plan, mesh: Any, unfused: str | None) -> None:
        self._plan, self._mesh, self._unfused = plan, mesh, unfused
        self._notes: dispatch.Notes = []

    @property
    def taken(self) -> tuple[Taken, ...]:
        """Choices without their shapes, each once."""
        choices = (Taken(note.kernel, str(note.target), note.chosen, note.why) for note, _ in self._notes)
        return tuple(dict.fromkeys(choices))

    def noted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A function of the step whose traces take kernels by the plan, and add to the choices.

        Args:
            function: to be traced.
        """

        @functools.wraps(function)
        def run(*args: Any) -> Any:
            with dispatch.naming(self._plan.kernels.of_codecs()), dispatch.noting(self._notes):
                try:
                    result = function(*args)
                except dispatch.CannotRun as error:
                    reason = str(error)
                    if reason.endswith(_PASS_NONE):
                        reason = f"{reason.removesuffix(_PASS_NONE)}Leave it out for one that can"
                        reason = f"kernels {self._plan.kernels}: {reason}"
                    raise UserError(reason) from error
                self._note_update()
            return result

        return run

    def _note_update(self) -> None:
        """Note that no kernel steps a state in few bits, where none has been asked."""
        if self._plan.state.moments == "float32" or any(note.kernel == "adam8" for note, _ in self._notes):
            return
        device = getattr(self._mesh, "abstract_device", None) or self._mesh.devices.flat[0]
        why = self._unfused or "no moment lies as the kernel takes it"
        where = target(f"{device.platform} {device.device_kind}")
        dispatch.note(dispatch.Explanation("adam8", where, "reference", {}, why))


def check_taken(plan: Plan, taken: Sequence[Taken]) -> None:
    """Refuse a plan that names a kernel which its step does not take, or takes otherwise.

    Args:
        plan: names kernels.
        taken: by the traced step.

    Raises:
        UserError: as it says.
    """
    for kernel, name in plan.kernels.named:
        choices = [choice for choice in taken if choice.kernel == kernel]
        if kernel == "attention":  # a model that reads no such setting is refused by `check_traced`
            continue
        if not choices:
            raise UserError(f"kernels {kernel}={name}: nothing in this step takes {kernel}; leave it out")
        if name not in [choice.chosen for choice in choices]:
            refusal = f"kernels {kernel}={name}: this step takes {kernel} {choices[0].chosen}"
            if kernel == "cross_entropy":
                why = "a loss of a model's own must be given context.loss and context.loss_chunk"
                raise UserError(f"{refusal}: {why}; or leave it out")
            raise UserError(f"{refusal}{'' if choices[0].why is None else f': {choices[0].why}'}; leave it out")
