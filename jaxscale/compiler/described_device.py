"""A device of a platform that need not be present, as JAX describes devices of an abstract mesh."""

import dataclasses

from jax.sharding import AbstractDevice


@dataclasses.dataclass(frozen=True)
class DescribedDevice(AbstractDevice):
    """An abstract device that belongs to a TPU slice.

    Args:
        slice_index: number of the slice, from 0; 0 for other devices.
    """

    slice_index: int = 0
