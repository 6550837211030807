"""Target: the platform and the chip that a kernel is being traced for, which need not be on this machine."""

import dataclasses

import jax

PLATFORMS = ("tpu", "gpu", "cpu")

HOPPER = ("h100", "h200", "h800", "h20", "gh200")
"""How the names of GPUs of compute capability 9.0 begin."""

_TPUS = {
    "tpu v4": "v4",
    "tpu v5 lite": "v5e",
    "tpu v5e": "v5e",
    "tpu v5": "v5p",
    "tpu v5p": "v5p",
    "tpu v6 lite": "v6e",
    "tpu v6e": "v6e",
    "tpu7x": "7x",
}
"""Chips by JAX's `device_kind`, in small letters."""


@dataclasses.dataclass(frozen=True)
class Target:
    """Where a kernel will run.

    Args:
        platform: "tpu", "gpu", "cpu"; None where lowering decides.
        chip: "v5e", "h200", ..; None where nobody said.

    Raises:
        ValueError: an unknown platform.
    """

    platform: str | None = None
    chip: str | None = None

    def __post_init__(self) -> None:
        if self.platform is not None and self.platform not in PLATFORMS:
            raise ValueError(f"platform {self.platform!r}: expected 'tpu', 'gpu' or 'cpu', and a chip after it if any")

    @property
    def hopper(self) -> bool:
        """Whether this is a GPU with wgmma: compute capability 9.0."""
        return self.platform == "gpu" and self.chip is not None and self.chip.startswith(HOPPER)

    def on(self, platform: str) -> "Target":
        """This target if `platform` is the one that lowering decides for; the chip stays if it is one of them."""
        if self.platform == platform:
            return self
        tpu = self.chip in _TPUS.values()
        return Target(platform, self.chip if tpu == (platform == "tpu") else None)

    def __str__(self) -> str:
        if self.platform == "cpu":
            return "cpu"
        chip = self.chip or "(chip not known)"
        return f"{self.platform} {chip}" if self.platform else "whatever it is lowered for"


def target(platform: str | None = None) -> Target:
    """The target of what is being traced.

    Args:
        platform: "tpu v5e", "gpu h200", "gpu", "cpu"; by default that of the mesh in force (`jax.set_mesh`, or inside
            `jax.shard_map`), whose devices may be described ones; without a mesh lowering decides among the platforms,
            and the chip is that of the first device here.

    Raises:
        ValueError: an unknown platform.

    Example:
        >>> str(target("gpu NVIDIA H200")), target("tpu v5e").chip, target("gpu a100").hopper
        ('gpu h200', 'v5e', False)
    """
    if platform is not None:
        kind, _, chip = platform.strip().partition(" ")
        return Target(kind, _chip(chip) if chip and kind != "cpu" else None)
    device = jax.sharding.get_abstract_mesh().abstract_device
    if device is None:
        return Target(None, _chip(jax.devices()[0].device_kind))
    kind = {"cuda": "gpu", "rocm": "gpu"}.get(device.platform, device.platform)
    return Target(kind if kind in PLATFORMS else "cpu", _chip(device.device_kind))


def _chip(kind: str) -> str | None:
    """A chip's short name: `kind` is JAX's `device_kind`, or the short name."""
    kind = kind.strip().lower()
    if kind in ("", "cpu"):
        return None
    return _TPUS.get(kind, kind.removeprefix("nvidia ").split(" ")[0])
