"""Target: the platform and the chip that a kernel is being traced for, which need not be on this machine."""

import dataclasses
import difflib
import re
from collections.abc import Sequence
from typing import Any

import jax
from jax import lax
from jax.core import Tracer

PLATFORMS = ("tpu", "gpu", "cpu")

HOPPER = ("h100", "h200", "h800", "h20", "gh200")
"""How the names of GPUs of compute capability 9.0 begin."""

PROVED = ("v5e", "v5p", "v6e", "7x")
"""TPUs for which every kernel was compiled; a kernel that was for others too lists them."""

_TPUS = {
    "tpu v2": "v2",
    "tpu v3": "v3",
    "tpu v4 lite": "v4i",
    "tpu v4": "v4",
    "tpu v5 lite": "v5e",
    "tpu v5e": "v5e",
    "tpu v5": "v5p",
    "tpu v5p": "v5p",
    "tpu v6 lite": "v6e",
    "tpu v6e": "v6e",
    "tpu7": "7",
    "tpu7x": "7x",
    "tpu8i": "8i",
}
"""Chips by JAX's `device_kind`, in small letters (jax/_src/pallas/mosaic/tpu_info.py)."""

_GPUS = (
    *HOPPER,
    *("p100", "v100", "t4", "a10", "a10g", "a16", "a30", "a40", "a100", "a800", "l4", "l20", "l40", "l40s"),
    *("b100", "b200", "b300", "gb200", "gb300"),
)
"""Short names of GPUs; "-" and more may follow."""
_FAMILIES = re.compile(r"(rtx|gtx|mi) ?\d")
"""How those of GPUs begin that have too many."""


@dataclasses.dataclass(frozen=True)
class Target:
    """Where a kernel will run.

    Args:
        platform: "tpu", "gpu", "cpu"; None where lowering decides.
        chip: "v5e", "h200", ..; None where it is not given.

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
        tpu = self.chip in _TPUS.values() or (self.chip or "").startswith("tpu")
        return Target(platform, self.chip if tpu == (platform == "tpu") else None)

    def __str__(self) -> str:
        if self.platform == "cpu":
            return "cpu"
        chip = (self.chip or "(chip not known)").removeprefix("tpu ")
        return f"{self.platform} {chip}" if self.platform else "whatever it is lowered for"


def target(platform: str | None = None, *arrays: Any) -> Target:
    """The target of what is being traced, or run at once.

    A TPU of which no chip is named is taken for one for which kernels were compiled (`PROVED`): where programs are
    lowered for a TPU that is not here, its chip is not known. A GPU without a named chip is not taken for a Hopper.

    Args:
        platform: "tpu v5e", "gpu h200", "gpu", "cpu"; in place of the chip JAX's `device_kind`, which need not be a
            known one; by default that of the mesh in force (`jax.set_mesh`, or inside `jax.shard_map`), whose devices
            may be described ones; without a mesh that of the arrays' device, where nothing is traced; else lowering
            decides among the platforms, and the chip is that of the first device here.
        arrays: what a kernel is called with, and trees of it.

    Raises:
        ValueError: an unknown platform, or an unknown short name of a chip.

    Example:
        >>> str(target("gpu NVIDIA H200")), target("tpu v5e").chip, target("TPU v6 lite").chip
        ('gpu h200', 'v5e', 'v6e')
    """
    if platform is not None:
        return _named(platform.strip())
    device = jax.sharding.get_abstract_mesh().abstract_device
    if device is None:
        device = _device(jax.tree.leaves(arrays))
    if device is None:
        return Target(None, _chip(jax.devices()[0].device_kind))
    kind = {"cuda": "gpu", "rocm": "gpu"}.get(device.platform, device.platform)
    return Target(kind if kind in PLATFORMS else "cpu", _chip(device.device_kind))


def _device(arrays: Sequence[Any]) -> Any:
    """Where these arrays are computed with; None where something is being traced: it may be for another machine."""
    if not arrays or any(isinstance(array, Tracer) for array in arrays):
        return None
    if isinstance(lax.neg(0.0), Tracer):  # the arrays are constants of a program
        return None
    device_arrays = [array for array in arrays if isinstance(array, jax.Array)]
    if device_arrays:
        return next(iter(device_arrays[0].sharding.device_set))
    config: Any = jax.config
    default = config.jax_default_device
    return default if isinstance(default, jax.Device) else jax.devices(default)[0]


def _named(platform: str) -> Target:
    """The target of a platform's name."""
    if platform.lower() in _TPUS:
        return Target("tpu", _TPUS[platform.lower()])
    kind, _, chip = platform.partition(" ")
    chip = chip.strip()
    if kind not in ("tpu", "gpu") or not chip:
        return Target(kind)
    name = _chip(chip)
    known_chips = _GPUS if kind == "gpu" else tuple(dict.fromkeys(_TPUS.values()))
    is_device_kind = re.match("tpu" if kind == "tpu" else "nvidia |tesla |quadro |amd |gfx", chip.lower())
    is_known_family = kind == "gpu" and (f"{name}".partition("-")[0] in known_chips or _FAMILIES.match(chip.lower()))
    if not (is_device_kind or name in known_chips or is_known_family):
        near = difflib.get_close_matches(chip.lower(), known_chips, n=1)
        hint = f"; did you mean {kind + ' ' + near[0]!r}?" if near else ""
        raise ValueError(
            f"platform {platform!r}: unknown chip {chip!r}, expected one of {', '.join(known_chips)}, the device_kind "
            f"that JAX prints, or {kind!r} alone{hint}"
        )
    return Target(kind, name)


def _chip(kind: str) -> str | None:
    """A chip's short name: `kind` is JAX's `device_kind`, or the short name. A TPU that is not known keeps its kind."""
    kind = kind.strip().lower()
    if kind in ("", "cpu"):
        return None
    if kind.startswith("tpu"):
        return _TPUS.get(kind, kind)
    return re.sub("^(nvidia|tesla) ", "", kind).split(" ")[0]
