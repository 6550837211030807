"""Stop signals: after one SIGTERM, SIGHUP or Ctrl-C, a run finishes its step, saves and stops; a second kills the run.

Before its first step a run has nothing to save, and ends within two seconds. Python calls the handler of a signal only
once the main thread is back from C++, where XLA may compile for minutes. Therefore, another thread also receives the
signals, through the wakeup descriptor, to which Python writes their numbers at once. This thread ends the process if
the main thread does not react.

Colab's stop button interrupts the kernel, like Ctrl-C. If there are several processes, a signal may reach any of them.
`Agreement` makes all processes stop, or save, after the same step. SIGHUP is ignored under `nohup`.
"""

import contextlib
import os
import select
import signal
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any

import numpy as np

from jaxscale import heartbeat

SAME_SIGNAL_SECONDS = 3
"""Under a watchdog: seconds after a SIGTERM within which another SIGTERM is treated as a copy of the first."""
REACTION_SECONDS = 0.5
"""Seconds that the main thread has to react to a signal before the signal thread ends the process."""
ENDING_SECONDS = 10.0
"""Seconds that the main thread has to end once it has reacted to a signal before the first step."""


class StoppedEarly(KeyboardInterrupt):
    """A stop signal arrived before the first step. As a `KeyboardInterrupt`, it passes every `except Exception`."""


class Stop:
    """A context manager that catches stop signals.

    Handlers are set only in the main thread, as Python requires. On exit, the previous handlers are restored.

    Args:
        end_process: function that ends the process if the main thread does not react to a signal before the first step;
            its argument is the signal's name. `None` if there is something to save from the start.

    Attributes:
        signal_name: name of the first stop signal; empty until one arrives.
        is_early: whether there is nothing to save yet, so that the first signal raises `StoppedEarly` in the main
            thread; the run sets it to false before its first step.
        saved_step: step of the checkpoint from which another start continues; 0 if there is none.

    Example:
        >>> with Stop() as stop:
        ...     stop.signal_name
        ''
    """

    SIGNALS = (signal.SIGTERM, signal.SIGINT, *([signal.SIGHUP] if hasattr(signal, "SIGHUP") else []))

    def __init__(self, end_process: Callable[[str], None] | None = None) -> None:
        self.signal_name = ""
        self.is_early, self.saved_step = end_process is not None, 0
        self._end_process = end_process
        self._signal_time = 0.0
        self._has_reacted = False
        self._previous_handlers: dict[int, Any] = {}
        self._terminals = [descriptor for descriptor in (1, 2) if os.isatty(descriptor)]
        self._signal_thread: _SignalThread | None = None

    def __enter__(self) -> "Stop":
        if threading.current_thread() is threading.main_thread():
            for signal_number in self.SIGNALS:
                if not _is_hangup_ignored(signal_number):
                    self._previous_handlers[signal_number] = signal.signal(signal_number, self._on_signal)
            self._signal_thread = _SignalThread(
                frozenset(self._previous_handlers), self._end_unresponsive, self._seconds_to_react
            )
            _open_stops.add(self)
        return self

    def __exit__(self, *_: object) -> None:
        _open_stops.discard(self)
        if self._signal_thread is not None:
            self._signal_thread.close()
            self._signal_thread = None
        self._restore_handlers()

    def _restore_handlers(self) -> None:
        """Restore the handlers from before this context."""
        for signal_number, handler in self._previous_handlers.items():
            signal.signal(signal_number, signal.SIG_DFL if handler is None else handler)
        self._previous_handlers.clear()

    def _leave_in_fork(self) -> None:
        """Restore the handlers and the descriptor in a forked child, whose signals do not concern the run."""
        if self._signal_thread is not None:
            self._signal_thread.leave_in_fork()
            self._signal_thread = None
        self._restore_handlers()

    def _on_signal(self, signal_number: int, frame: FrameType | None) -> None:
        """React to a signal in the main thread; a second one ends the process, or interrupts the kernel of a notebook.

        Under a watchdog, a second SIGTERM soon after the first is a copy of it: a scheduler may signal all processes of
        a job, among them the watchdog, which passes the signal on.
        """
        self._drop_lost_terminal()
        if not self.signal_name:
            self.signal_name = signal.Signals(signal_number).name
            self._signal_time = time.monotonic()
            self._has_reacted = True
            if self.is_early:
                raise StoppedEarly(f"stopped by {self.signal_name}")
            return
        is_soon = time.monotonic() - self._signal_time < SAME_SIGNAL_SECONDS
        if is_soon and _may_be_repeated(signal_number):
            return
        if signal_number == signal.SIGINT and "ipykernel" in sys.modules:
            raise KeyboardInterrupt  # so that a notebook keeps its kernel
        signal.signal(signal_number, signal.SIG_DFL)
        os.kill(os.getpid(), signal_number)

    def _seconds_to_react(self) -> float:
        """Return the number of seconds after a signal at which `_end_unresponsive` is called."""
        return ENDING_SECONDS if self._has_reacted and self.is_early else REACTION_SECONDS

    def _end_unresponsive(self, signal_number: int, is_second: bool) -> None:
        """End the process if its main thread has not reacted to a signal, or has not ended, in time.

        The signal thread calls this.
        """
        self._drop_lost_terminal()
        if self.is_early and self._end_process is not None:
            self._end_process(signal.Signals(signal_number).name)
        elif is_second and not is_interactive():
            os._exit(128 + signal_number)

    def _drop_lost_terminal(self) -> None:
        """Discard output to a terminal that has hung up: writing to it would fail, and the run would not save."""
        for descriptor in self._terminals:
            if not os.isatty(descriptor):
                with contextlib.suppress(OSError), open(os.devnull, "wb") as null:
                    os.dup2(null.fileno(), descriptor)


class _SignalThread:
    """A thread that receives signals at once, even while the main thread is in C++.

    Args:
        stop_numbers: numbers of the stop signals; other signals are forwarded to the previous wakeup descriptor.
        end: function that is called if the context has not been left in time. Its arguments are the number of the
            signal, and whether it is a second signal.
        seconds_to_react: function that returns the number of seconds after a signal at which `end` is called.
    """

    def __init__(
        self, stop_numbers: frozenset[int], end: Callable[[int, bool], None], seconds_to_react: Callable[[], float]
    ) -> None:
        self._stop_numbers, self._end, self._seconds_to_react = stop_numbers, end, seconds_to_react
        self._receiver, self._sender = socket.socketpair()
        self._sender.setblocking(False)
        self._previous_descriptor = signal.set_wakeup_fd(self._sender.fileno(), warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._listen, name="stop signals", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Restore the previous descriptor, and end the thread."""
        signal.set_wakeup_fd(self._previous_descriptor)
        self._sender.close()
        self._thread.join()
        self._receiver.close()

    def leave_in_fork(self) -> None:
        """Reset the descriptor in a forked child, which shares the sockets and lacks the thread."""
        signal.set_wakeup_fd(-1)
        self._sender.close()
        self._receiver.close()

    def _listen(self) -> None:
        """Receive signals until the socket's other end is closed; call `end` if the context is not left in time."""
        first_time = second_time = None
        last_number, is_end_called = 0, False
        while True:
            timeout_seconds = None
            if first_time is not None and not is_end_called:
                timeout_seconds = max(0.0, (second_time or first_time) + self._seconds_to_react() - time.monotonic())
            has_bytes = bool(
                select.select(
                    [self._receiver], [], [], timeout_seconds if timeout_seconds is None else min(timeout_seconds, 0.1)
                )[0]
            )
            if has_bytes:
                received_numbers = self._receiver.recv(64)
                if not received_numbers:
                    return
                self._forward(bytes(number for number in received_numbers if number not in self._stop_numbers))
                for number in received_numbers:
                    if number not in self._stop_numbers:
                        continue
                    now = time.monotonic()
                    if first_time is None:
                        first_time, last_number = now, number
                    elif now - first_time >= SAME_SIGNAL_SECONDS or not _may_be_repeated(number):
                        second_time, last_number, is_end_called = second_time or now, number, False
            elif timeout_seconds == 0.0:
                is_end_called = True
                self._end(last_number, second_time is not None)

    def _forward(self, numbers: bytes) -> None:
        """Forward the numbers of other signals to the previous wakeup descriptor, such as that of an event loop."""
        if numbers and self._previous_descriptor != -1:
            with contextlib.suppress(OSError):
                os.write(self._previous_descriptor, numbers)


_open_stops: "weakref.WeakSet[Stop]" = weakref.WeakSet()
"""The `Stop` contexts that are open."""


def _leave_in_fork() -> None:
    """Leave the open contexts in a forked child."""
    for stop in list(_open_stops):
        stop._leave_in_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_in_fork)


def _is_hangup_ignored(signal_number: int) -> bool:
    """Return whether a signal is SIGHUP and the process was started to ignore it, as by `nohup`."""
    return signal.Signals(signal_number).name == "SIGHUP" and signal.getsignal(signal_number) is signal.SIG_IGN


def _may_be_repeated(signal_number: int) -> bool:
    """Return whether a second signal may be a copy: a SIGTERM, which a scheduler and the watchdog may both send."""
    return signal_number == signal.SIGTERM and heartbeat.FOLDER_VARIABLE in os.environ


def is_interactive() -> bool:
    """Return whether a user works in this process, in a notebook or at Python's prompt; if so, it must not end."""
    return "ipykernel" in sys.modules or hasattr(sys, "ps1") or bool(sys.flags.interactive)


class Agreement:
    """The common decision of all processes after a step: whether to stop, and whether to save a checkpoint.

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
            replicated_sharding = NamedSharding(mesh, PartitionSpec())
            self._combine = jax.jit(lambda flags: jnp.max(flags, axis=0), out_shardings=replicated_sharding)

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
        with heartbeat.awaiting():
            is_stop_due, is_save_due = np.asarray(combined_flags)
        return bool(is_stop_due), bool(is_save_due)
