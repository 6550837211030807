"""A device that need not be present, described as JAX describes the devices of an abstract mesh."""

import dataclasses

from jax.sharding import AbstractDevice


@dataclasses.dataclass(frozen=True)
class DescribedDevice(AbstractDevice):
    """An abstract device that belongs to a TPU slice.

    Args:
        slice_index: index of the TPU slice; 0 for a device that is not a TPU.
    """

    slice_index: int = 0
