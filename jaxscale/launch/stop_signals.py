"""The stop signals that a launcher or a watchdog receives while it waits."""

import contextlib
import signal
from collections.abc import Callable, Iterator
from types import FrameType


@contextlib.contextmanager
def received_signals(react: Callable[[], None] = lambda: None) -> Iterator[list[int]]:
    """Collect the numbers of the stop signals that arrive while the context is open; call `react` for each.

    Example:
        >>> with received_signals() as received:
        ...     signal.raise_signal(signal.SIGTERM)
        >>> received == [signal.SIGTERM]
        True
    """
    received: list[int] = []

    def collect(signal_number: int, frame: FrameType | None) -> None:
        """Take note of a signal."""
        received.append(signal_number)
        react()

    numbers = [signal.SIGTERM, signal.SIGINT]
    if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as under nohup
        numbers.append(signal.SIGHUP)
    previous_handlers = {number: signal.signal(number, collect) for number in numbers}
    try:
        yield received
    finally:
        for number, handler in previous_handlers.items():
            signal.signal(number, handler)
