"""Measure the speed of steps for the log: seconds, tokens per second, FLOP/s, and the share of the chips' peak."""

import time
from collections.abc import Mapping
from typing import Any

import numpy as np


class Meter:
    """Measures the speed of the steps between two lines of the log.

    Args:
        flop: model FLOP per step, without recomputation.
        peak: peak FLOP/s of all chips together; `None` if unknown.
        device: device whose memory statistics are logged; `None` if the platform reports none.
    """

    def __init__(self, flop: int, peak: float | None, device: Any) -> None:
        self._flop, self._peak, self._device = flop, peak, device
        self._seconds, self._step_count, self._token_count = 0.0, 0, 0
        self.resume()

    @classmethod
    def of(cls, step: Any, batch: Any, is_cpu: bool) -> "Meter":
        """Return a meter for the speed of a compiled train step on batches with the shapes of `batch`."""
        return cls(int(step.model_flop(batch)), peak_of(step), None if is_cpu else step.mesh.local_devices[0])

    def resume(self) -> None:
        """Start timing the next step now; the time since the previous step does not count."""
        self._step_start = time.perf_counter()

    def add(self, token_count: int) -> None:
        """Count a step that ends now and had this number of target tokens."""
        now = time.perf_counter()
        self._seconds += now - self._step_start
        self._step_start = now
        self._step_count += 1
        self._token_count += token_count

    def row(self) -> dict[str, float]:
        """Return a row of the log, with means over the steps since the previous row, and start the next row."""
        step_seconds = self._seconds / self._step_count
        row: dict[str, float] = {
            "step_seconds": step_seconds,
            "tokens_per_second": self._token_count / self._seconds,
            "flop_per_second": self._flop / step_seconds,
        }
        if self._peak:
            row["mfu"] = row["flop_per_second"] / self._peak
        if self._device is not None:
            memory_stats = self._device.memory_stats() or {}
            stat_by_field = {"memory_bytes": "bytes_in_use", "peak_memory_bytes": "peak_bytes_in_use"}
            row |= {field: memory_stats[stat] for field, stat in stat_by_field.items() if stat in memory_stats}
        self._seconds, self._step_count, self._token_count = 0.0, 0, 0
        return row


def host_scalars(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Wait for the metrics of a step, and return them as Python scalars; `jax.device_get` is several times slower."""
    for scalar in metrics.values():
        start_copy = getattr(scalar, "copy_to_host_async", None)
        if start_copy is not None:
            start_copy()
    return {name: np.asarray(scalar).item() for name, scalar in metrics.items()}


def peak_of(step: Any) -> float | None:
    """Return the peak FLOP/s of all chips of a step's mesh at the plan's precision; `None` if it is unknown."""
    from jaxscale.platforms.detect import detect

    if step.plan.matmul != "default":
        return None  # the platforms' tables give no peak for matrix products in several passes
    platform = detect(list(step.mesh.devices.flat))
    chip_peak = platform.chip.peak(step.plan.precision)
    return chip_peak * platform.chips * platform.slices if chip_peak else None
