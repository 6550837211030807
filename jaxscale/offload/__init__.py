"""Host memory: weights streamed to the device, and optimizer state updated slice by slice or on the host."""

from typing import TYPE_CHECKING

from jaxscale.lazy import lazy_names

_MODULE_BY_NAME = {
    "Streamed": "jaxscale.offload.weights",
    "cut": "jaxscale.offload.slices",
    "offload_state": "jaxscale.offload.wrapper",
    "update_on_host": "jaxscale.offload.updates",
    "update_on_device": "jaxscale.offload.updates",
    "update_in_slices": "jaxscale.offload.updates",
}
"""For each public name, the module from which the name loads on first use."""

if TYPE_CHECKING:
    from jaxscale.offload.slices import cut
    from jaxscale.offload.updates import update_in_slices, update_on_device, update_on_host
    from jaxscale.offload.weights import Streamed
    from jaxscale.offload.wrapper import offload_state

__all__ = [
    "Streamed", "cut", "offload_state", "update_in_slices", "update_on_device", "update_on_host",
]  # fmt: skip

__getattr__ = lazy_names(__name__, _MODULE_BY_NAME)
