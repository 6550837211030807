"""The stop signals that a launcher or a watchdog receives while it waits."""

import contextlib
import signal
from collections.abc import Callable, Iterator
from types import FrameType


@contextlib.contextmanager
def received_signals(react: Callable[[], None] = lambda: None) -> Iterator[list[int]]:
    """Collect the numbers of the stop signals that arrive while the context is open, and call `react` for each signal.

    Example:
        >>> with received_signals() as received:
        ...     signal.raise_signal(signal.SIGTERM)
        >>> received == [signal.SIGTERM]
        True
    """
    received_numbers: list[int] = []

    def collect(signal_number: int, frame: FrameType | None) -> None:
        """Append the number of a signal to the list, and call `react`."""
        received_numbers.append(signal_number)
        react()

    signal_numbers = [signal.SIGTERM, signal.SIGINT]
    if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as under nohup
        signal_numbers.append(signal.SIGHUP)
    previous_handlers = {number: signal.signal(number, collect) for number in signal_numbers}
    try:
        yield received_numbers
    finally:
        for number, handler in previous_handlers.items():
            signal.signal(number, handler)
