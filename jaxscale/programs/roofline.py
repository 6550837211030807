"""Seconds of work on a device by the roofline model: the time for the FLOP or for the bytes, whichever is longer.

    seconds = max(FLOP / (peak * efficiency), bytes / bandwidth)

The model serves to choose what to recompute. It does not predict the time of a step, because kernels overlap and
fused operations do not move bytes.

References:
    Williams, Waterman and Patterson 2009, "Roofline: an insightful visual performance model".
"""

from jaxscale.platforms.platform import Chip

EFFICIENCY = {
    "v4": 0.70,  # fitted to the steps of 11 training runs that MaxText's README publishes
    "v5e": 0.80,  # fitted to the same runs
    "v5p": 0.80,  # fitted to the same runs
}
"""Share of the peak that the matrix products of a training step reach, by the name of the chip."""
DEFAULT_EFFICIENCY = 0.6
"""Assumed efficiency of all other chips; whole steps of MaxText on an H100 (492 TFLOP/s) reach half the peak."""


def rate(chip: Chip | None, dtype: str) -> float | None:
    """Return the FLOP/s of matrix products of `dtype` operands on one device; `None` if the chip's rates are unknown.

    Example:
        >>> from jaxscale.platforms.platform import chips
        >>> f"{rate(chips()['v5e'], 'bfloat16'):.4g}"
        '1.576e+14'
    """
    if chip is None or chip.memory_bandwidth is None:
        return None
    peak = chip.peak(dtype) or chip.bfloat16
    return None if peak is None else peak * EFFICIENCY.get(chip.name, DEFAULT_EFFICIENCY) / chip.devices


def seconds(chip: Chip | None, flop: float, bytes_moved: float, dtype: str = "bfloat16") -> float:
    """Return the modeled seconds of one operation on one device; 0 if the chip's rates are unknown.

    Args:
        chip: chip that runs the operation; `None` for an unknown chip.
        flop: FLOP of the operation's matrix products.
        bytes_moved: bytes that the operation moves between memory and chip.
        dtype: type of the operands of the matrix products.
    """
    flop_rate = rate(chip, dtype)
    if flop_rate is None or chip is None or chip.device_bandwidth is None:
        return 0.0
    return max(flop / flop_rate, bytes_moved / chip.device_bandwidth)
