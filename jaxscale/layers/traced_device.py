"""The device that a program is traced for, and notes for reports on the implementations that layers select there."""

from typing import Any

import jax

from jaxscale.sharding.place import current
from pallas_kernels.dispatch import Explanation, is_noting, note
from pallas_kernels.target import target


def traced_device() -> tuple[str, str]:
    """Return the platform ("cpu", "gpu", "tpu") and kind of the device traced for: the layout's, or the default one."""
    layout = current()
    if layout is None:
        device: Any = jax.devices()[0]
    else:
        abstract_device = getattr(layout[0], "abstract_device", None)  # an AbstractMesh has no devices
        device = layout[0].devices.flat[0] if abstract_device is None else abstract_device
    return device.platform, device.device_kind


def note_selection(kernel: str, selected: str, reason: str | None = None) -> None:
    """Note the implementation that is about to run, if it was selected without the dispatch of `pallas_kernels`.

    Args:
        kernel: name of the operation, "attention" or "cross_entropy".
        selected: name of the implementation.
        reason: why no kernel of the platform was selected, in a few words; `None` if no implementation is better.
    """
    if is_noting():
        note(Explanation(kernel, target(" ".join(traced_device())), selected, {}, reason))
