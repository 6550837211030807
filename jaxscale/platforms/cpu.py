"""The CPU as a platform. No datasheet covers all CPUs, so the peak is unknown, and a run on a CPU reports no `mfu`.

`detect` reads the memory size from the machine. JAX reports the device kind "cpu" for every processor.
"""

from jaxscale.platforms.platform import Chip

CPU = Chip(
    name="cpu",
    kind="cpu",
    device_kinds=("cpu",),
    source=("jax.devices('cpu')[0].device_kind is 'cpu' for every processor; no peak is claimed for an unnamed one",),
)
