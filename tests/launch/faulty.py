"""An experiment, one process of which fails as `FAULT=KIND:RANK:PHASE:STEP:ATTEMPTS` specifies, once per process."""

import contextlib
import os
import signal
import sys
import time
from typing import Any

import jaxscale as jx
from jaxscale import heartbeat

_faults = [os.environ["FAULT"]] if os.environ.get("FAULT") else []
_set = heartbeat.Writer.set


def _set_and_fail(self: heartbeat.Writer, phase: Any, step: int | None = None) -> None:
    """Set the phase, and fail if this is the process, the phase and the step of the fault."""
    _set(self, phase, step)
    if not _faults:
        return
    kind, rank, fault_phase, fault_step, attempt_count = _faults[0].split(":")
    if (self.rank, phase, self.step) != (int(rank), fault_phase, int(fault_step)) or self.attempt > int(attempt_count):
        return
    _faults.clear()
    if kind == "sleep":
        time.sleep(3600)
    elif kind == "raise":
        raise RuntimeError("made by the test")
    elif kind == "exit":
        sys.exit(3)
    elif kind == "mistake":
        raise jx.errors.UserError("made by the test")
    elif kind == "fill":
        time.sleep(2)  # so that the checkpoint that is being written is there
        _fill(os.environ["FILL"])
    elif kind == "spin":
        while True:
            pass
    else:
        time.sleep(2)  # so that the checkpoint that is being written is there
        os.kill(os.getpid(), signal.Signals[kind])


def _fill(folder: str) -> None:
    """Write until the disk is full."""
    with contextlib.suppress(OSError), open(os.path.join(folder, "filler"), "wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))


heartbeat.Writer.set = _set_and_fail


def experiment() -> jx.Experiment:
    """A tiny model on a line of text."""
    return jx.Experiment(
        name="faulty",
        model=jx.models.Decoder(vocab=256, context=16, layers=2, embed=8, heads=2, mlp=16),
        data=jx.data.Text(os.environ["TEXT"], context=16),
        optimizer=jx.Optimizer(warmup=5, learning_rate=1e-2),
        steps=12,
        batch=8,
        evaluation=jx.Evaluation(every=0),
        samples=jx.Samples(prompts=()),
        checkpoint=jx.Checkpointing(every=4),
        plan=jx.Plan(mesh=os.environ.get("MESH", "fsdp:2"), zero=3),
    )
