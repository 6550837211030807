"""The platform and chip for which a kernel is traced; the chip need not be on this machine."""

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
"""Prefixes of the names of GPUs with compute capability 9.0."""

COMPILED_TPUS = ("v5e", "v5p", "v6e", "7x")
"""TPUs for which every kernel was compiled; a kernel that was compiled for more TPUs has its own list."""

_TPU_CHIPS = {
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
"""Short names of TPUs, by JAX's `device_kind` in lower case (jax/_src/pallas/mosaic/tpu_info.py)."""

_GPU_CHIPS = (
    *HOPPER,
    *("p100", "v100", "t4", "a10", "a10g", "a16", "a30", "a40", "a100", "a800", "l4", "l20", "l40", "l40s"),
    *("b100", "b200", "b300", "gb200", "gb300"),
)
"""Short names of GPUs; a suffix that starts with "-" may follow."""
_GPU_FAMILIES = re.compile(r"(rtx|gtx|mi) ?\d")
"""Prefixes of the short names of GPU families that have too many members to list."""


@dataclasses.dataclass(frozen=True)
class Target:
    """Where a kernel will run.

    Args:
        platform: "tpu", "gpu" or "cpu"; None if lowering will decide.
        chip: "v5e", "h200", ..; None if the chip is unknown.

    Raises:
        ValueError: the platform is unknown.
    """

    platform: str | None = None
    chip: str | None = None

    def __post_init__(self) -> None:
        if self.platform is not None and self.platform not in PLATFORMS:
            raise ValueError(f"platform {self.platform!r}: expected 'tpu', 'gpu' or 'cpu', perhaps followed by a chip")

    @property
    def hopper(self) -> bool:
        """Whether this is a GPU of compute capability 9.0, which has wgmma."""
        return self.platform == "gpu" and self.chip is not None and self.chip.startswith(HOPPER)

    def on(self, platform: str) -> "Target":
        """Return the target if lowering decides for `platform`; the chip stays only if the platform has such chips."""
        if self.platform == platform:
            return self
        is_tpu = self.chip in _TPU_CHIPS.values() or (self.chip or "").startswith("tpu")
        return Target(platform, self.chip if is_tpu == (platform == "tpu") else None)

    def __str__(self) -> str:
        if self.platform == "cpu":
            return "cpu"
        chip = (self.chip or "(chip not known)").removeprefix("tpu ")
        return f"{self.platform} {chip}" if self.platform else "whatever it is lowered for"


def target(platform: str | None = None, *arrays: Any) -> Target:
    """Return the target for which a kernel is being traced, or on which it runs eagerly.

    If the chip of a TPU is unknown, it is assumed to be one for which the kernels were compiled (`COMPILED_TPUS`),
    because the chip of an absent TPU is unknown when a program is lowered for it. A GPU of an unknown chip is not
    assumed to be a Hopper.

    Args:
        platform: "tpu v5e", "gpu h200", "gpu", "cpu". The chip may also be any `device_kind` of JAX, even unknown here.
            By default the target is that of the mesh in force (`jax.set_mesh`, or inside `jax.shard_map`), even if its
            devices are only descriptions. Without a mesh it is the arrays' device. If there is no mesh and the call is
            being traced, lowering decides on the platform, and the chip is that of this machine's first device.
        arrays: the arguments of the kernel: arrays, or trees of arrays.

    Raises:
        ValueError: the platform or the short name of the chip is unknown.

    Example:
        >>> str(target("gpu NVIDIA H200")), target("tpu v5e").chip, target("TPU v6 lite").chip
        ('gpu h200', 'v5e', 'v6e')
    """
    if platform is not None:
        return _parse_platform(platform.strip())
    device = jax.sharding.get_abstract_mesh().abstract_device
    if device is None:
        device = _device_of(jax.tree.leaves(arrays))
    if device is None:
        return Target(None, _chip_name(jax.devices()[0].device_kind))
    device_platform = {"cuda": "gpu", "rocm": "gpu"}.get(device.platform, device.platform)
    return Target(device_platform if device_platform in PLATFORMS else "cpu", _chip_name(device.device_kind))


def _device_of(arrays: Sequence[Any]) -> Any:
    """The device on which operations on these arrays run; None during tracing, which may be for another machine."""
    if not arrays or any(isinstance(array, Tracer) for array in arrays):
        return None
    if isinstance(lax.neg(0.0), Tracer):  # the arrays are constants of a program
        return None
    device_arrays = [array for array in arrays if isinstance(array, jax.Array)]
    if device_arrays:
        return next(iter(device_arrays[0].sharding.device_set))
    config: Any = jax.config
    default_device = config.jax_default_device
    return default_device if isinstance(default_device, jax.Device) else jax.devices(default_device)[0]


def _parse_platform(text: str) -> Target:
    """Parse the text form of a platform: "tpu v5e", "gpu NVIDIA H200", "TPU v5 lite", "gpu", "cpu"."""
    if text.lower() in _TPU_CHIPS:
        return Target("tpu", _TPU_CHIPS[text.lower()])
    platform, _, chip_text = text.partition(" ")
    chip_text = chip_text.strip()
    if platform not in ("tpu", "gpu") or not chip_text:
        return Target(platform)
    chip = _chip_name(chip_text)
    known_chips = _GPU_CHIPS if platform == "gpu" else tuple(dict.fromkeys(_TPU_CHIPS.values()))
    is_device_kind = re.match("tpu" if platform == "tpu" else "nvidia |tesla |quadro |amd |gfx", chip_text.lower())
    is_known_family = platform == "gpu" and (
        f"{chip}".partition("-")[0] in known_chips or _GPU_FAMILIES.match(chip_text.lower())
    )
    if not (is_device_kind or chip in known_chips or is_known_family):
        similar_chips = difflib.get_close_matches(chip_text.lower(), known_chips, n=1)
        hint = f"; did you mean {platform + ' ' + similar_chips[0]!r}?" if similar_chips else ""
        raise ValueError(
            f"platform {text!r}: unknown chip {chip_text!r}, expected one of {', '.join(known_chips)}, the device_kind "
            f"that JAX prints, or {platform!r} alone{hint}"
        )
    return Target(platform, chip)


def _chip_name(text: str) -> str | None:
    """Short name of a chip, from JAX's `device_kind` or the short name; an unknown TPU keeps its `device_kind`."""
    kind = text.strip().lower()
    if kind in ("", "cpu"):
        return None
    if kind.startswith("tpu"):
        return _TPU_CHIPS.get(kind, kind)
    return re.sub("^(nvidia|tesla) ", "", kind).split(" ")[0]
