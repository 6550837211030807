"""The CPU as a platform: no datasheet covers "a CPU", so its peak is unknown and a run on it reports no `mfu`.

Cores and memory are read from the machine by `detect`. JAX calls every CPU device "cpu", for every processor.
"""

from jaxscale.platforms.platform import Chip

CPU = Chip(
    name="cpu",
    kind="cpu",
    device_kinds=("cpu",),
    source=("jax.devices('cpu')[0].device_kind is 'cpu' for every processor; no peak is claimed for an unnamed one",),
)
