"""How a run ends early or badly: by a signal, by divergence, because a step is stuck, or with many skipped steps.

The main thread may be in C++ and not return. Another thread then ends the process, with the same message and exit code.
"""

import contextlib
import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

from jaxscale import heartbeat
from jaxscale.checkpoint.store import Checkpoints
from jaxscale.errors import INTERRUPTED, PREEMPTED, STUCK, Diverged, MostlySkipped, Preempted, Stuck, UserError
from jaxscale.records import directory as run_files
from jaxscale.records.skip_causes import Causes
from jaxscale.training.journal import Journal
from jaxscale.training.signals import Stop, StoppedEarly, is_interactive
from jaxscale.training.stuck import StuckWatch, collectives_by_channel, collectives_text

LAST_SECONDS = 0.5
"""If a signal ends the process before the first step: seconds that the last line of the log may take."""
MOST_SKIPPED = 0.1
"""Largest share of skipped steps with which a run ends with exit code 0."""
STUCK_SAVE_SECONDS = 60.0
"""If a step is stuck: seconds that the report and the checkpoint being written may take."""


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
    if is_saved:
        journal.write_report()
        raise Preempted(f"stopped by {cause} after step {step}, and saved: start the run again to continue it")
    raise _early_error(step, cause)


def _early_error(step: int, cause: str) -> Preempted | KeyboardInterrupt:
    """Return the error of a run that is stopped before its first step; `step` is that of its checkpoint, or 0."""
    if step:
        text = f"stopped by {cause} before step {step + 1}. The checkpoint of step {step} is intact"
        return Preempted(f"{text}: start the run again to continue it", is_saved=False)
    return KeyboardInterrupt(f"stopped by {cause} before the first step: nothing is lost; start the run again")


@contextlib.contextmanager
def explain_stop(journal: Journal, stop: Stop) -> Iterator[None]:
    """Turn the `StoppedEarly` that a signal raises before the first step into the error that `train` documents."""
    try:
        yield
        return
    except StoppedEarly:
        pass  # the error below needs no traceback of what the signal interrupted
    stop_preempted(journal, stop.saved_step, stop.signal_name, is_saved=False)


def newest_step(folder: Any) -> int:
    """Return the step of the newest checkpoint of the run in a folder; 0 if there is none, or it cannot be listed."""
    with contextlib.suppress(UserError, OSError):
        return max(Checkpoints(folder / run_files.CHECKPOINTS, write=False).steps(), default=0)
    return 0


def end_process_early(journal: Journal, step: int, signal_name: str) -> None:
    """End this process before its first step, while the main thread is in C++; in a notebook, only print a message.

    Args:
        journal: the run's journal.
        step: step of the checkpoint from which another start continues; 0 if there is none.
        signal_name: name of the signal.
    """
    if is_interactive():
        print(f"jaxscale: {signal_name}: the run stops as soon as XLA returns", file=sys.stderr, flush=True)
        return
    error = _early_error(step, signal_name)

    def finish() -> None:
        """Log the signal, and end the heartbeats."""
        print(f"jaxscale: {error}", file=sys.stderr, flush=True)
        journal.log_event(step, "preempted", by=signal_name)
        journal.close()
        heartbeat.fail(error)

    _end_process(PREEMPTED if step else INTERRUPTED, finish, LAST_SECONDS)


def watch_steps(journal: Journal, checkpoints: Checkpoints, train_step: Any) -> StuckWatch:
    """Return the watcher that ends this process if a step waits endlessly for its devices.

    Args:
        journal: the run's journal.
        checkpoints: the run's checkpoints.
        train_step: the compiled train step.
    """
    import jax

    return StuckWatch(
        lambda *step_wait_and_limit: _end_stuck(journal, checkpoints, train_step, step_wait_and_limit),
        process_count=jax.process_count(),
    )


def _end_stuck(
    journal: Journal, checkpoints: Checkpoints, train_step: Any, step_wait_and_limit: tuple[int, float, float]
) -> None:
    """End this process, whose main thread waits endlessly for a step; in a notebook, only print a message.

    Args:
        journal: the run's journal.
        checkpoints: the run's checkpoints; a save may still be running.
        train_step: the compiled train step.
        step_wait_and_limit: the step's number, the seconds that the main thread has waited for it, and the limit in
            seconds.
    """
    step, waited_seconds, limit_seconds = step_wait_and_limit
    beat, _ = heartbeat.own_heartbeat()
    text = (
        f"step {step} is stuck: it has waited {waited_seconds:.0f} s for its devices, and the limit is "
        f"{limit_seconds:.0f} s (30 s or 20 median steps). The main thread is in {beat.place or 'C++'}"
    )

    def finish() -> None:
        """Show where all threads are, name the collectives, log the event, and let a save finish."""
        print(f"jaxscale: {text}", file=sys.stderr, flush=True)
        with contextlib.suppress(OSError, ValueError, AttributeError):  # stderr is not a file, as in a notebook
            faulthandler.dump_traceback(sys.__stderr__ or sys.stderr, all_threads=True)
        program = train_step.program or ""
        counts_text, collective_by_channel = collectives_text(program, train_step.mesh), collectives_by_channel(program)
        hint_text = (
            "; XLA's lines above name the one that waits, by its op_id" if train_step.layout.platform == "cpu" else ""
        )
        print(f"jaxscale: the step's collectives: {counts_text}{hint_text}", file=sys.stderr, flush=True)
        journal.log_event(
            step - 1,
            "stuck",
            seconds=waited_seconds,
            limit=limit_seconds,
            place=beat.place,
            collectives=counts_text,
            by_op_id=collective_by_channel,
        )
        saved_step = checkpoints.settle(STUCK_SAVE_SECONDS / 2)
        checkpoint_text = f"the checkpoint of step {saved_step} is intact" if saved_step else "there is no checkpoint"
        print(f"jaxscale: {checkpoint_text}: start the run again to continue it", file=sys.stderr, flush=True)
        heartbeat.fail(Stuck(text))
        journal.close()

    _end_process(STUCK, finish, STUCK_SAVE_SECONDS)


def _end_process(exit_code: int, finish: Callable[[], None], finish_seconds: float) -> None:
    """Call `finish`, and then end this process at once; an interactive process is not ended.

    If there are several ranks, rank 0 waits one second before it ends. JAX aborts the other ranks once the service of
    rank 0 is gone, and they may be about to report the same error.

    Args:
        exit_code: exit code.
        finish: function to call last. Its errors are ignored, because a disk may be full or a terminal gone.
        finish_seconds: seconds that `finish` may take.
    """

    def run() -> None:
        """Call `finish`, and flush the output of the program."""
        for action in (finish, sys.stdout.flush, sys.stderr.flush):
            with contextlib.suppress(Exception):
                action()

    thread = threading.Thread(target=run, name="last words", daemon=True)
    thread.start()
    thread.join(finish_seconds)
    if is_interactive():
        return
    import jax

    if jax.distributed.is_initialized() and heartbeat.own_heartbeat()[0].rank == 0:
        time.sleep(1)
    os._exit(exit_code)


def stop_diverged(
    journal: Journal, checkpoints: Checkpoints, step: int, metrics: Mapping[str, float], causes: Causes
) -> NoReturn:
    """Stop a run that skipped too many steps in a row: log the divergence, write the report, and raise an error.

    Args:
        journal: the run's journal.
        checkpoints: the run's checkpoints; a save may still be running.
        step: number of the last skipped step.
        metrics: metrics of the last skipped step.
        causes: the causes of the first skipped step, as far as they are known.

    Raises:
        Diverged: always; the message names the last good checkpoint.
    """
    with contextlib.suppress(UserError):
        checkpoints.wait()
    checkpoints.drop_host_copies()  # the newest copy may be of a skipped step
    checkpoint_step = checkpoints.last_good()
    checkpoint_text, start_text = "no good checkpoint was saved", "Start again with --resume never"
    if checkpoint_step is not None:
        checkpoint_folder = journal.folder / run_files.CHECKPOINTS / f"{checkpoint_step:08d}"
        checkpoint_text = f"the last good checkpoint is {checkpoint_folder}"
        start_text = f"Go on from it with --from {checkpoint_step}"
    loss, grad_norm, skip_count = metrics["loss"], metrics["grad_norm"], metrics["skipped_in_row"]
    journal.log_event(step, "diverged", loss=loss, grad_norm=grad_norm, checkpoint=checkpoint_step)
    journal.write_report()
    advice_text = (
        f"{start_text} and a lower --optimizer.learning_rate, or with a larger --guard.spike if such gradients are "
        "normal, or a larger --guard.update if such updates are"
    )
    if causes.advice:
        advice_text = f"{causes.advice[0].upper()}{causes.advice[1:]}. Then {start_text[0].lower()}{start_text[1:]}"
    raise Diverged(
        f"{f'{causes.text}. ' if causes.text else ''}"
        f"{skip_count} steps in a row were skipped up to step {step} (loss {loss:.4g}, gradient norm {grad_norm:.4g}, "
        f"learning rate {metrics['learning_rate']:.4g}), and {checkpoint_text}. {advice_text}"
    )


def check_skipped(folder: Any, step_count: int, skip_count: int, causes: Causes | None = None) -> None:
    """Raise an error at the end of a run if too large a share of its steps was skipped.

    Args:
        folder: the run's folder.
        step_count: number of steps of the run, including skipped steps.
        skip_count: number of the skipped steps.
        causes: the causes of the first skipped step, as far as they are known; `None` if they were not searched for.

    Raises:
        MostlySkipped: more than a tenth of the steps was skipped.
    """
    if skip_count > MOST_SKIPPED * step_count:
        cause_text, cause_advice = ("", "") if causes is None else (causes.text, causes.advice)
        advice_text = (
            "Lower the learning rate or lengthen its warm-up, or raise guard.spike if such gradients are normal, or "
            "guard.update if such updates are,"
        )
        if cause_advice:
            advice_text = f"{cause_advice[0].upper()}{cause_advice[1:]},"
        raise MostlySkipped(
            f"{f'{cause_text}. ' if cause_text else ''}"
            f"{skip_count:,} of {step_count:,} steps ({skip_count / step_count:.0%}) were skipped, so {folder} holds "
            f"the weights of {step_count - skip_count:,} updates; the event of each in metrics.jsonl has its loss and "
            f"its gradient norm. {advice_text} and train again from an earlier checkpoint with --from STEP, or in "
            "another directory with --out"
        )
