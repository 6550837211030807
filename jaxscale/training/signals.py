"""Stop signals: after one SIGTERM or Ctrl-C, a run finishes its step, saves and stops; a second signal kills the run.

Colab's stop button interrupts the kernel, like Ctrl-C. If there are several processes, a signal may reach any of them.
`Agreement` makes all processes stop, or save, after the same step.
"""

import os
import signal
import sys
import threading
import time
from types import FrameType
from typing import Any

import numpy as np

from jaxscale import heartbeat

SAME_SIGNAL_SECONDS = 3
"""Seconds after a SIGTERM within which another one is taken for the same, under a watchdog."""


class Stop:
    """A context manager that catches stop signals.

    Handlers are set only in the main thread, as Python requires. On exit, the previous handlers are restored.

    Attributes:
        signal_name: name of the first stop signal; empty until one arrives.

    Example:
        >>> with Stop() as stop:
        ...     stop.signal_name
        ''
    """

    SIGNALS = (signal.SIGTERM, signal.SIGINT)

    def __init__(self) -> None:
        self.signal_name = ""
        self._signal_time = 0.0
        self._previous_handlers: dict[int, Any] = {}

    def __enter__(self) -> "Stop":
        if threading.current_thread() is threading.main_thread():
            for signal_number in self.SIGNALS:
                self._previous_handlers[signal_number] = signal.signal(signal_number, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        for signal_number, handler in self._previous_handlers.items():
            signal.signal(signal_number, signal.SIG_DFL if handler is None else handler)
        self._previous_handlers.clear()

    def _on_signal(self, signal_number: int, frame: FrameType | None) -> None:
        """Record the first signal. A second one ends the process, or interrupts the kernel of a notebook.

        Under a watchdog, a second SIGTERM soon after the first is the same one: a scheduler may signal all processes of
        a job, among them the watchdog, which passes the signal on.
        """
        if not self.signal_name:
            self.signal_name = signal.Signals(signal_number).name
            self._signal_time = time.monotonic()
            return
        is_watched = heartbeat.FOLDER_VARIABLE in os.environ
        is_soon = time.monotonic() - self._signal_time < SAME_SIGNAL_SECONDS
        if signal_number == signal.SIGTERM and is_watched and is_soon:
            return
        if signal_number == signal.SIGINT and "ipykernel" in sys.modules:
            raise KeyboardInterrupt  # so that a notebook keeps its kernel
        signal.signal(signal_number, signal.SIG_DFL)
        os.kill(os.getpid(), signal_number)


class Agreement:
    """One decision for all processes: whether to stop, and whether to save a checkpoint, after a step.

    All processes stop if any of them received a signal, and save if a checkpoint is due by the first process's clock.

    A tiny program on the devices combines the processes' flags. It is dispatched after a step, and its result is read
    together with the step's metrics, so that no device waits.

    Args:
        mesh: the mesh of the run.
    """

    def __init__(self, mesh: Any) -> None:
        import jax

        self._is_single = jax.process_count() == 1
        if not self._is_single:
            import jax.numpy as jnp
            from jax.sharding import NamedSharding, PartitionSpec

            self._sharding = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
            self._device_count = mesh.size
            replicated = NamedSharding(mesh, PartitionSpec())
            self._combine = jax.jit(lambda flags: jnp.max(flags, axis=0), out_shardings=replicated)

    def combine(self, has_signal: bool, is_save_due: bool) -> Any:
        """Start combining the flags of all processes; every process calls this after each step.

        Args:
            has_signal: whether this process received a signal.
            is_save_due: whether a checkpoint is due by this process's clock.

        Returns:
            The flags to pass to `decision`: int32 [2] on the devices; with one process, just the two arguments.
        """
        if self._is_single:
            return has_signal, is_save_due
        import jax

        # every device of this process contributes the same two flags; the result is their maximum over all devices
        local_flags = np.array([has_signal, is_save_due and jax.process_index() == 0], np.int32)
        repeated_flags = np.broadcast_to(local_flags, (self._device_count, 2))
        flags = jax.make_array_from_callback(repeated_flags.shape, self._sharding, lambda index: repeated_flags[index])
        return self._combine(flags)

    def decision(self, combined_flags: Any) -> tuple[bool, bool]:
        """Wait for the flags that `combine` returned; return whether to stop, and whether to save by the clock."""
        if self._is_single:
            return combined_flags
        is_stop_due, is_save_due = np.asarray(combined_flags)
        return bool(is_stop_due), bool(is_save_due)
