"""Stop signals: after the first SIGTERM or Ctrl-C a run saves and stops after its step; a second one ends it at once.

Colab's stop button interrupts the kernel, like Ctrl-C. With several processes a signal may reach any of them:
`Agreement` makes all of them stop, or save, after the same step.
"""

import os
import signal
import sys
import threading
from types import FrameType
from typing import Any

import numpy as np


class Stop:
    """A context in which `signal_name` is the name of the first stop signal, or empty before one arrives.

    Handlers are set only in the main thread, as Python requires; on exit the previous ones are restored.

    Example:
        >>> with Stop() as stop:
        ...     stop.signal_name
        ''
    """

    SIGNALS = (signal.SIGTERM, signal.SIGINT)

    def __init__(self) -> None:
        self.signal_name = ""
        self._previous_handlers: dict[int, Any] = {}

    def __enter__(self) -> "Stop":
        if threading.current_thread() is threading.main_thread():
            for number in self.SIGNALS:
                self._previous_handlers[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous_handlers.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._previous_handlers.clear()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        """Record the first signal; a second one ends the process, or interrupts the notebook's kernel."""
        if not self.signal_name:
            self.signal_name = signal.Signals(number).name
            return
        if number == signal.SIGINT and "ipykernel" in sys.modules:
            raise KeyboardInterrupt  # so that a notebook keeps its kernel
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)


class Agreement:
    """The same decisions on every process.

    All stop if any process received a signal, and save if a checkpoint is due by the first process's clock.

    A tiny program on the devices combines the flags; it is dispatched after a step and read with the step's metrics, so
    that no device waits for it.

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
            self._size = mesh.size
            replicated = NamedSharding(mesh, PartitionSpec())
            self._combine = jax.jit(lambda flags: jnp.max(flags, axis=0), out_shardings=replicated)

    def ask(self, stop: bool, save: bool) -> Any:
        """Dispatch the question whether to `stop` and to `save`, and return it; every process asks after each step."""
        if self._is_single:
            return stop, save
        import jax

        local_flags = np.array([stop, save and jax.process_index() == 0], np.int32)
        flags = jax.make_array_from_callback(
            (self._size, 2), self._sharding, lambda index: np.broadcast_to(local_flags, (self._size, 2))[index]
        )
        return self._combine(flags)

    def answer(self, question: Any) -> tuple[bool, bool]:
        """The answer to what `ask` returned: whether to stop, and whether to save by the clock."""
        if self._is_single:
            return question
        stop, save = np.asarray(question)
        return bool(stop), bool(save)
