"""Endings of a run before its last step, by a signal or by divergence."""

import contextlib
from collections.abc import Mapping
from typing import NoReturn

from jaxscale.checkpoint.store import Checkpoints
from jaxscale.errors import Diverged, Preempted, UserError
from jaxscale.records import directory as run_files
from jaxscale.training.journal import Journal


def stop_preempted(journal: Journal, step: int, signal_name: str, *, is_saved: bool) -> NoReturn:
    """Stop a run after a signal: log the signal, write the report, and raise an error.

    Args:
        journal: the run's journal.
        step: number of updates made.
        signal_name: name of the signal; empty if another process received it.
        is_saved: whether the state after these updates has just been saved. If not, this process has not made a step
            yet, and `step` is the step of the checkpoint from which the process started, or 0.

    Raises:
        Preempted: the run has a checkpoint.
        KeyboardInterrupt: no update was made.
    """
    cause = signal_name or "a signal to another process"
    journal.log_event(step, "preempted", by=cause)
    journal.write_report()
    if is_saved:
        raise Preempted(f"stopped by {cause} after step {step}, and saved: start the run again to continue it")
    if step:
        raise Preempted(
            f"stopped by {cause} before step {step + 1}. The checkpoint of step {step} is intact: start the run again "
            "to continue it"
        )
    raise KeyboardInterrupt(f"stopped by {cause} before the first step: nothing is lost; start the run again")


def stop_diverged(journal: Journal, checkpoints: Checkpoints, step: int, metrics: Mapping[str, float]) -> NoReturn:
    """Stop a run that skipped too many steps in a row: log the divergence, write the report, and raise an error.

    Args:
        journal: the run's journal.
        checkpoints: the run's checkpoints; a save may still be running.
        step: number of the last skipped step.
        metrics: metrics of the last skipped step, with "loss", "grad_norm" and "skipped_in_row".

    Raises:
        Diverged: always; the message names the last good checkpoint.
    """
    with contextlib.suppress(UserError):
        checkpoints.wait()
    checkpoints.drop_host_copies()  # the newest one may lie among the skipped steps
    checkpoint_step = checkpoints.last_good()
    checkpoint_text = "no good checkpoint was saved"
    if checkpoint_step is not None:
        checkpoint_folder = journal.folder / run_files.CHECKPOINTS / f"{checkpoint_step:08d}"
        checkpoint_text = f"the last good checkpoint is {checkpoint_folder}"
    loss, grad_norm, skip_count = metrics["loss"], metrics["grad_norm"], metrics["skipped_in_row"]
    journal.log_event(step, "diverged", loss=loss, grad_norm=grad_norm, checkpoint=checkpoint_step)
    journal.write_report()
    raise Diverged(
        f"{skip_count} steps in a row were skipped up to step {step} (loss {loss:.4g}, gradient norm {grad_norm:.4g}), "
        f"and {checkpoint_text}. Lower the learning rate, or raise guard.spike if such gradients are normal"
    )
