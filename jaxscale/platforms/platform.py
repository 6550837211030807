"""Chip, Link, Platform: the rates and memory sizes of a machine, as frozen values that need no JAX.

The values come from the tables in `tpu.py`, `gpu.py` and `cpu.py`, where every row names its source. A field without a
source is None. A platform has a text form, such as `"tpu v5p:4x4x4"` or `"gpu h100 x 64"`; `"local"` is the machine
that this process runs on. Peak rates are those of dense matrix products, without sparsity.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Mapping
from typing import Literal

from jaxscale.errors import UserError, near_miss, unknown

DeviceKind = Literal["tpu", "gpu", "cpu"]
GiB = 2**30


@dataclasses.dataclass(frozen=True)
class Link:
    """A kind of link between parts of a platform.

    Args:
        name: "ici", "nvlink", "pcie" or "dcn".
        connects: description of the parts that the link connects.
        bandwidth: bytes/s in one direction, of the unit that `per` specifies.
        per: unit that has this bandwidth: one "link", or all links of this kind of one "chip" or "host".
        links: number of links of this kind that a chip or host has.
        latency: seconds of one hop; None if unknown.
        source: source of the values.
    """

    name: str
    connects: str
    bandwidth: float
    per: Literal["link", "chip", "host"]
    source: str
    links: int = 1
    latency: float | None = None


@dataclasses.dataclass(frozen=True)
class Chip:
    """One accelerator (or one CPU), and its host.

    Args:
        name: name of the chip in a platform's text, such as "v5p" or "h100".
        kind: "tpu", "gpu" or "cpu".
        device_kinds: values of `jax.Device.device_kind` for devices of this chip.
        source: sources of the values, one per entry.
        bfloat16, float16, tf32, float32, float8, int8: rate of dense matrix products in that number format, in FLOP/s
            (OP/s for int8); None if unknown.
        memory: bytes of device memory; None if unknown.
        usable_memory: bytes of device memory that a program may use; None if not measured.
        memory_bandwidth: bytes/s between the memory and the chip; None if unknown.
        clock: cycles/s, to convert the compiler's estimates, which are in cycles, to seconds; None if it has none.
        devices: number of JAX devices that one chip has when a program runs.
        chips_per_host: number of chips in one host machine; None if unknown.
        host_memory: bytes of main memory of the host; None if unknown.
        links: links of the chip, and of its host.
    """

    name: str
    kind: DeviceKind
    device_kinds: tuple[str, ...]
    source: tuple[str, ...]
    bfloat16: float | None = None
    float16: float | None = None
    tf32: float | None = None
    float32: float | None = None
    float8: float | None = None
    int8: float | None = None
    memory: int | None = None
    usable_memory: int | None = None
    memory_bandwidth: float | None = None
    clock: float | None = None
    devices: int = 1
    chips_per_host: int | None = None
    host_memory: int | None = None
    links: tuple[Link, ...] = ()

    @property
    def device_bandwidth(self) -> float | None:
        """The memory bandwidth of one JAX device, in bytes/s; None if unknown."""
        return None if self.memory_bandwidth is None else self.memory_bandwidth / self.devices

    def peak(self, dtype: str) -> float | None:
        """Return the FLOP/s of a matrix product of `dtype` operands at JAX's default precision; None if unknown.

        Unless a higher precision is requested, a float32 product runs in bfloat16 passes on a TPU, and in TF32 on a GPU
        that supports it. So for float32, the peak of bfloat16 or TF32 is returned.

        Args:
            dtype: name of the operands' dtype, such as "bfloat16", "float32" or "float8_e4m3fn".

        Example:
            >>> Platform.parse("gpu a100").chip.peak("float32")
            156000000000000.0

        References:
            `jax.lax.Precision`, JAX documentation: DEFAULT is the fastest mode.
        """
        if dtype == "float32":
            if self.kind == "tpu":
                return self.bfloat16
            return self.float32 if self.tf32 is None else self.tf32
        if dtype.startswith("float8"):
            return self.float8
        rate_by_dtype = {"bfloat16": self.bfloat16, "float16": self.float16, "int8": self.int8}
        return rate_by_dtype.get(dtype)


@dataclasses.dataclass(frozen=True)
class Platform:
    """The chips of a run and their topology.

    Args:
        chip: the kind of chip; all chips of a platform are the same.
        chips: number of chips in one TPU slice; for GPUs and CPUs, the number of all GPUs or CPU devices.
        topology: number of chips along each axis of a TPU slice's torus; None for GPUs, for CPUs, and for chips that do
            not form a box.
        slices: number of TPU slices, which are connected by the data center's network; 1 for GPUs and CPUs.
        network: bytes/s that a chip sends to other hosts or slices, below 1.25e14; None for the value of the table.

    Example:
        >>> platform = Platform.parse("tpu v5p:4x4x4")
        >>> platform.chips, platform.devices, platform.topology, str(platform)
        (64, 64, (4, 4, 4), 'tpu v5p:4x4x4')
        >>> Platform.parse("gpu h100 x 64").hosts
        8
    """

    chip: Chip
    chips: int
    topology: tuple[int, ...] | None = None
    slices: int = 1
    network: int | None = None

    def __post_init__(self) -> None:
        if self.chips < 1 or self.slices < 1:
            raise UserError(f"platform: got {self.chips} chips and {self.slices} slices, expected at least 1 of each")
        if self.network is not None and not 0 < self.network < 125 * 10**12:
            raise UserError(
                f"platform: got a network of {self.network} bytes/s, expected more than 0, less than 1.25e14"
            )
        if self.network is not None and self.chip.chips_per_host is None:
            raise UserError(
                f"platform: got a network between hosts, but the number of {self.chip.name} in a host is unknown, so "
                "that all count as one host; leave out the network"
            )
        if self.topology is not None and math.prod(self.topology) != self.chips:
            raise UserError(
                f"topology: got {_topology_text(self.topology)}, which has {math.prod(self.topology)} chips, expected "
                f"{self.chips} chips"
            )

    @property
    def devices(self) -> int:
        """The number of JAX devices, all slices together."""
        return self.chips * self.slices * self.chip.devices

    @property
    def hosts(self) -> int | None:
        """The number of host machines; None if the number of chips per host is unknown."""
        if self.chip.chips_per_host is None:
            return None
        return self.slices * math.ceil(self.chips / self.chip.chips_per_host)

    @property
    def links(self) -> tuple[Link, ...]:
        """The links of a chip and of its host. If the platform specifies a network rate, its network comes last."""
        if self.network is None:
            return self.chip.links
        other_links = tuple(link for link in self.chip.links if link.name != "dcn")
        return (*other_links, Link("dcn", "hosts", self.network, "chip", "the platform's text"))

    def peak(self, dtype: str) -> float | None:
        """Return the FLOP/s of all chips together for matrix products of `dtype` operands; None if unknown.

        `mfu` is relative to this peak. `Chip.peak` describes which rate is used for each dtype.
        """
        chip_peak = self.chip.peak(dtype)
        return None if chip_peak is None else chip_peak * self.chips * self.slices

    @property
    def device_memory(self) -> int | None:
        """The bytes that a program may use on one JAX device; if unknown, the device's memory, or None."""
        chip_memory = self.chip.memory if self.chip.usable_memory is None else self.chip.usable_memory
        return None if chip_memory is None else chip_memory // self.chip.devices

    @classmethod
    def parse(cls, text: str) -> "Platform":
        """Parse a platform's text: "tpu CHIP:TOPOLOGY [x SLICES]", "gpu CHIP [x COUNT]", "cpu [x COUNT]" or "local".

        For TPUs and GPUs, the text may end with the network rate of a chip, in bits/s or bytes/s: "gpu h100 x 16 over
        100Gb/s" or "over 12.5GB/s".

        Raises:
            UserError: the text has an unknown word, or a topology that does not exist.
        """
        if match := re.fullmatch(r"\s*((?:tpu|gpu)\b.*?)\s+over\b\s*(.*?)\s*", text, re.DOTALL | re.IGNORECASE):
            return dataclasses.replace(cls.parse(match[1]), network=_network_rate(text, match[2]))
        match = re.fullmatch(r"\s*(local|tpu|gpu|cpu)\b\s*(.*?)\s*", text.lower(), re.DOTALL)
        if match is None:
            raise _unknown_platform(text)
        kind, tail = match.groups()
        if kind == "tpu":
            return _parse_tpu(text, tail)
        if kind == "gpu":
            return _parse_gpu(text, tail)
        if kind == "cpu":
            from jaxscale.platforms.cpu import CPU

            return cls(CPU, _parse_count(text, tail))
        if tail:
            raise UserError(f"platform {text!r}: got {tail!r} after 'local', expected nothing")
        from jaxscale.platforms.detect import detect

        return detect()

    def __str__(self) -> str:
        network_text = ""
        if self.network is not None:
            gigabits_text = f"{self.network * 8 / 1e9:.9f}".rstrip("0").rstrip(".")
            network_text = f" over {gigabits_text}Gb/s"
        if self.topology is not None:
            slices_text = f" x {self.slices}" if self.slices > 1 else ""
            return f"tpu {self.chip.name}:{_topology_text(self.topology)}{slices_text}{network_text}"
        platform_name = self.chip.kind if self.chip.name == self.chip.kind else f"{self.chip.kind} {self.chip.name}"
        return (f"{platform_name} x {self.chips}" if self.chips > 1 else platform_name) + network_text

    def __repr__(self) -> str:
        return f"<Platform {self}>"


@functools.cache
def chips() -> Mapping[str, Chip]:
    """Return all chips of the tables, by name."""
    from jaxscale.platforms.cpu import CPU
    from jaxscale.platforms.gpu import GPUS
    from jaxscale.platforms.tpu import TPUS

    return {chip.name: chip for chip in (*TPUS, *GPUS, CPU)}


def _topology_text(topology: tuple[int, ...]) -> str:
    """Return the text of a topology, such as "4x4"."""
    return "x".join(map(str, topology))


def _unknown_platform(text: str) -> UserError:
    """Return the error for a text that does not begin with a kind of platform."""
    first_word = re.split(r"[\s:]", text.strip().lower())[0]
    chip = chips().get(first_word.split("x")[0])
    suggestion = near_miss(first_word, ("cpu", "gpu", "local", "tpu"))
    if chip is not None and chip.kind != "cpu":
        suggestion = f"; did you mean {f'{chip.kind} {text.strip()}'!r}?"
    return UserError(
        f"unknown platform {text!r}: expected 'local', 'cpu x 8', 'gpu h100 x 64' or 'tpu v5p:4x4x4'{suggestion}"
    )


def _network_rate(text: str, rate_text: str) -> int:
    """Return the bytes/s of a network rate such as "100Gb/s", the end of a platform's `text`."""
    match = re.fullmatch(r"([0-9]{1,6}(?:\.[0-9]{1,9})?)\s*G(b|B)/s", rate_text)
    byte_rate = 0 if match is None else round(float(match[1]) * 1e9 / (8 if match[2] == "b" else 1))
    if not byte_rate:
        raise UserError(
            f"platform {text!r}: got {rate_text!r} for the network of a chip, expected Gb/s (bits) or GB/s (bytes), "
            "such as 'over 100Gb/s' or 'over 12.5GB/s'"
        )
    return byte_rate


def _parse_count(text: str, tail: str) -> int:
    """Return the number after "x" or ":" in `tail`, the end of a platform's `text`; 1 if `tail` is empty."""
    match = re.fullmatch(r"\s*[x:]\s*([1-9][0-9]{0,6})", tail)
    if tail and match is None:
        raise UserError(f"platform {text!r}: got {tail.strip()!r}, expected a count such as 'x 8'")
    return int(match[1]) if match else 1


def _find_chip(text: str, kind: DeviceKind, name: str, word: str, aliases: Mapping[str, str], example: str) -> Chip:
    """Return the chip with this name or alias.

    Args:
        text: text of the platform, for the error message.
        kind: kind of the chip.
        name: name or alias of the chip; "" if the text has none, which is an error.
        word: the word of the text that should name the chip, for the error message.
        aliases: names of chips by alias.
        example: text of a platform of this kind, for the error message.
    """
    known_names = [chip.name for chip in chips().values() if chip.kind == kind]
    chip_name = aliases.get(name, name)
    if not chip_name:
        raise UserError(
            f"platform {text!r} names no {kind}: expected one of {', '.join(known_names)}, such as {example!r}"
        )
    if chip_name not in known_names:
        raise unknown(kind, word, [*known_names, *aliases])
    return chips()[chip_name]


def _parse_gpu(text: str, tail: str) -> Platform:
    """Return the platform that the text of a GPU platform specifies; `tail` is the part after "gpu"."""
    from jaxscale.platforms.gpu import ALIASES

    match = re.fullmatch(r"([\w-]*?)(\s*[x:]\s*[0-9]+|[^\w-].*)?", tail, re.DOTALL)
    assert match is not None, "the pattern matches any text"
    name, count_text = match.groups(default="")
    first_word = re.split(r"[\s:]", tail)[0]  # an x inside a name does not begin a count
    chip = _find_chip(text, "gpu", name, first_word, ALIASES, "gpu h100 x 8")
    return Platform(chip, _parse_count(text, count_text))


def _parse_tpu(text: str, tail: str) -> Platform:
    """Return the platform that the text of a TPU platform specifies; `tail` is the part after "tpu"."""
    from jaxscale.platforms.tpu import ALIASES, check_topology, topologies

    match = re.fullmatch(r"([^\s:]*)(?:\s*:\s*(\S*))?(.*)", tail, re.DOTALL)
    assert match is not None, "the pattern matches any text"
    name, topology_text, count_text = match.groups(default="")
    chip = _find_chip(text, "tpu", name, name, ALIASES, "tpu v5e:4x4")
    if not re.fullmatch(r"[0-9]{1,4}(x[0-9]{1,4})+", topology_text):
        all_topologies = topologies(chip.name)
        suggestions = [topology for topology in all_topologies if str(math.prod(topology)) == topology_text]
        platform_texts = [
            f"tpu {chip.name}:{_topology_text(topology_choice)}"
            for topology_choice in suggestions or all_topologies[2:3]
        ]
        raise UserError(
            f"platform {text!r}: got {topology_text!r} for the topology, expected chips along each axis: "
            f"{' or '.join(platform_texts)}"
        )
    topology = tuple(map(int, topology_text.split("x")))
    check_topology(chip.name, topology)  # raises UserError for a slice that does not exist
    return Platform(chip, math.prod(topology), topology, _parse_count(text, count_text))
