"""Measure the speed of steps for the log: seconds, tokens per second, FLOP/s, and the share of the chips' peak."""

import time
from typing import Any


class Meter:
    """Measures the steps between two lines of the log.

    Args:
        flop: model FLOP per step, without recomputation.
        peak: peak FLOP/s of all chips together; `None` if unknown.
        device: device whose memory statistics are logged; `None` if the platform reports none.
    """

    def __init__(self, flop: int, peak: float | None, device: Any) -> None:
        self._flop, self._peak, self._device = flop, peak, device
        self._seconds, self._steps, self._tokens = 0.0, 0, 0
        self.resume()

    def resume(self) -> None:
        """Start the clock of the next step now, so that the time since the last step does not count."""
        self._step_start = time.perf_counter()

    def add(self, tokens: int) -> None:
        """Count a step of `tokens` target tokens that ends now."""
        now = time.perf_counter()
        self._seconds += now - self._step_start
        self._step_start = now
        self._steps += 1
        self._tokens += tokens

    def row(self) -> dict[str, float]:
        """Return the mean figures of the steps since the last row, and start the next row."""
        seconds = self._seconds / self._steps
        row: dict[str, float] = {
            "step_seconds": seconds,
            "tokens_per_second": self._tokens / self._seconds,
            "flop_per_second": self._flop / seconds,
        }
        if self._peak:
            row["mfu"] = row["flop_per_second"] / self._peak
        if self._device is not None:
            statistics = self._device.memory_stats() or {}
            statistic_by_field = {"memory_bytes": "bytes_in_use", "peak_memory_bytes": "peak_bytes_in_use"}
            row |= {field: statistics[name] for field, name in statistic_by_field.items() if name in statistics}
        self._seconds, self._steps, self._tokens = 0.0, 0, 0
        return row


def peak_of(step: Any) -> float | None:
    """Return the peak FLOP/s of all chips of a step's mesh at the plan's precision; `None` if the tables have none."""
    from jaxscale.platforms.detect import detect

    if step.plan.matmul != "default":
        return None  # the tables have no peak for products in several passes
    platform = detect(list(step.mesh.devices.flat))
    peak = platform.chip.peak(step.plan.precision)
    return peak * platform.chips * platform.slices if peak else None
