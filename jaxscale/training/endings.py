"""Endings of a run before its last step, by a signal or by divergence."""

import contextlib
from collections.abc import Mapping
from typing import NoReturn

from jaxscale.checkpoint.store import Checkpoints
from jaxscale.errors import Diverged, Preempted, UserError
from jaxscale.records import directory as run_files
from jaxscale.training.journal import Journal


def preempted(journal: Journal, step: int, signal: str, *, saved: bool) -> NoReturn:
    """Stop a run after a signal.

    Args:
        journal: the run's journal.
        step: number of updates made.
        signal: name of the signal; empty if another process received it.
        saved: whether the state after these updates was saved; if not, the process stops before its first step.
    """
    cause = signal or "a signal to another process"
    journal.event(step, "preempted", by=cause)
    journal.report()
    if saved:
        raise Preempted(f"stopped by {cause} after step {step}, and saved: start the run again to continue it")
    if step:
        raise Preempted(
            f"stopped by {cause} before step {step + 1}; the checkpoint of step {step} is intact: start the run again "
            "to continue it"
        )
    raise KeyboardInterrupt(f"stopped by {cause} before the first step: nothing is lost, start the run again")


def diverged(journal: Journal, checkpoints: Checkpoints, step: int, metrics: Mapping[str, float]) -> NoReturn:
    """Stop a run in which too many steps in a row were skipped.

    Args:
        journal: the run's journal.
        checkpoints: the run's checkpoints; a save may still be running.
        step: number of the last skipped step.
        metrics: metrics of that step.
    """
    with contextlib.suppress(UserError):
        checkpoints.wait()
    steps = checkpoints.steps()
    fallback = "no checkpoint was saved"
    if steps:
        fallback = f"the last good checkpoint is {journal.folder / run_files.CHECKPOINTS / f'{steps[-1]:08d}'}"
    loss, norm, skip_count = metrics["loss"], metrics["grad_norm"], metrics["skipped_in_row"]
    journal.event(step, "diverged", loss=loss, grad_norm=norm, checkpoint=steps[-1] if steps else None)
    journal.report()
    raise Diverged(
        f"{skip_count} steps in a row were skipped up to step {step} (loss {loss:.4g}, gradient norm {norm:.4g}); "
        f"{fallback}: lower the learning rate, or raise guard.spike if these steps are sound"
    )
