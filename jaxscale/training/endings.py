"""Ways for a run to end before its last step: told to stop, before a step or after one; diverged."""

import contextlib
from collections.abc import Mapping
from typing import NoReturn

from jaxscale.errors import Diverged, Preempted, UserError
from jaxscale.training import directory as place
from jaxscale.training.checkpoint import Checkpoints
from jaxscale.training.journal import Journal

_ANOTHER = "a signal to another process"


def stopped_before_the_first_step(journal: Journal, n: int, by: str) -> NoReturn:
    """Stop: there is nothing to save.

    Args:
        journal: what the run tells.
        n: updates of the checkpoint that it began with.
        by: the signal; empty where another process got it.
    """
    by = by or _ANOTHER
    journal.event(n, "preempted", by=by)
    journal.report()
    if n:
        raise Preempted(
            f"stopped by {by} before step {n + 1}; the checkpoint of step {n} is intact: start the run again to "
            "continue it"
        )
    raise KeyboardInterrupt(f"stopped by {by} before the first step: nothing is lost, start the run again")


def preempted(journal: Journal, n: int, by: str) -> NoReturn:
    """Stop after step `n`, which has been saved; `by` as above."""
    by = by or _ANOTHER
    journal.event(n, "preempted", by=by)
    journal.report()
    raise Preempted(f"stopped by {by} after step {n}, and saved: start the run again to continue it")


def diverged(journal: Journal, checkpoints: Checkpoints, n: int, found: Mapping[str, float]) -> NoReturn:
    """Stop, for steps kept being skipped.

    Args:
        journal: what the run tells.
        checkpoints: of the run, one of which may still be on its way.
        n: the last step that was skipped.
        found: what it measured.
    """
    with contextlib.suppress(UserError):
        checkpoints.wait()
    steps = checkpoints.steps()
    good = "no checkpoint was saved"
    if steps:
        good = f"the last good checkpoint is {journal.folder / place.CHECKPOINTS / f'{steps[-1]:08d}'}"
    loss, norm, in_row = found["loss"], found["grad_norm"], found["skipped_in_row"]
    journal.event(n, "diverged", loss=loss, grad_norm=norm, checkpoint=steps[-1] if steps else None)
    journal.report()
    raise Diverged(
        f"{in_row} steps in a row were skipped up to step {n} (loss {loss:.4g}, gradient norm {norm:.4g}); {good}: "
        "lower the learning rate, or raise guard.spike if these steps are sound"
    )
