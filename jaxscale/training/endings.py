"""Endings of a run before its last step, by a signal or by divergence."""

import contextlib
from collections.abc import Mapping
from typing import NoReturn

from jaxscale.checkpoint.store import Checkpoints
from jaxscale.errors import Diverged, Preempted, UserError
from jaxscale.records import directory as run_files
from jaxscale.training.journal import Journal


def stop_preempted(journal: Journal, step: int, signal: str, *, is_saved: bool) -> NoReturn:
    """Stop a run after a signal: log it, write the report, and raise an error.

    Args:
        journal: the run's journal.
        step: number of updates made.
        signal: name of the signal; empty if another process received it.
        is_saved: whether the state after these updates was saved just now. If not, this process has made no step yet,
            and the updates are those of the checkpoint from which it started.

    Raises:
        Preempted: the run has a checkpoint.
        KeyboardInterrupt: no update was made.
    """
    cause = signal or "a signal to another process"
    journal.log_event(step, "preempted", by=cause)
    journal.write_report()
    if is_saved:
        raise Preempted(f"stopped by {cause} after step {step}, and saved: start the run again to continue it")
    if step:
        raise Preempted(
            f"stopped by {cause} before step {step + 1}. The checkpoint of step {step} is intact: start the run again "
            "to continue it"
        )
    raise KeyboardInterrupt(f"stopped by {cause} before the first step: nothing is lost, start the run again")


def stop_diverged(journal: Journal, checkpoints: Checkpoints, step: int, metrics: Mapping[str, float]) -> NoReturn:
    """Stop a run in which too many steps in a row were skipped: log it, write the report, and raise an error.

    Args:
        journal: the run's journal.
        checkpoints: the run's checkpoints; a save may still be running.
        step: number of the last skipped step.
        metrics: metrics of that step, with "loss", "grad_norm" and "skipped_in_row".

    Raises:
        Diverged: always; the message names the last good checkpoint.
    """
    with contextlib.suppress(UserError):
        checkpoints.wait()
    steps = checkpoints.steps()
    fallback = "no checkpoint was saved"
    if steps:
        fallback = f"the last good checkpoint is {journal.folder / run_files.CHECKPOINTS / f'{steps[-1]:08d}'}"
    loss, norm, skip_count = metrics["loss"], metrics["grad_norm"], metrics["skipped_in_row"]
    journal.log_event(step, "diverged", loss=loss, grad_norm=norm, checkpoint=steps[-1] if steps else None)
    journal.write_report()
    raise Diverged(
        f"{skip_count} steps in a row were skipped up to step {step} (loss {loss:.4g}, gradient norm {norm:.4g}), and "
        f"{fallback}. Lower the learning rate, or raise guard.spike if such gradients are normal"
    )
