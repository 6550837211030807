"""The device that a program is traced for, and notes for reports on the implementations that layers select."""

from typing import Any

import jax

from jaxscale.sharding.place import current
from pallas_kernels.dispatch import Explanation, is_noting, note
from pallas_kernels.target import target


def traced_device() -> tuple[str, str]:
    """Return (platform, device kind) of the layout's first device, or of the default device if there is no layout.

    The platform is "cpu", "gpu" or "tpu"; the device kind is JAX's name of the model.
    """
    layout = current()
    if layout is None:
        device: Any = jax.devices()[0]
    else:
        abstract_device = getattr(layout[0], "abstract_device", None)  # an AbstractMesh has no devices
        device = layout[0].devices.flat[0] if abstract_device is None else abstract_device
    return device.platform, device.device_kind


def note_selection(kernel: str, implementation: str, reason: str | None = None) -> None:
    """Note the implementation that is about to run, if the dispatch of `pallas_kernels` did not select it.

    Args:
        kernel: name of the operation, "attention" or "cross_entropy".
        implementation: name of the implementation.
        reason: short reason why no kernel of the platform was selected; `None` if no implementation would be faster.
    """
    if is_noting():
        note(Explanation(kernel, target(" ".join(traced_device())), implementation, {}, reason))
