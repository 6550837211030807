"""CompileReport: what a compiler says about a program (bytes, FLOP, collectives, who is alive), with JSON both ways.

Bytes are per device. Two numbers that a compiler offers are left out, for they are wrong: `peak_memory_in_bytes` (on a
TPU it adds on-chip and host memory) and the FLOP of `cost_analysis()` (a loop's body counts once).
"""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any, Literal

from jaxscale.platforms.hlo import Collective
from jaxscale.values import from_json, to_json

Kind = Literal["argument", "output", "kept", "transient", "constant"]
KINDS: tuple[Kind, ...] = ("argument", "output", "kept", "transient", "constant")

_UNITS = {"": 1, "B": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_NUMBER = r"([\d.]+)([KMGTB]?)"
# the two numbers of each message, as printed by libtpu 0.0.42 to 0.0.51 and by XLA's allocators
_OUT_OF_MEMORY: tuple[tuple[Literal["device", "on-chip"], str], ...] = (
    ("device", rf"required for [^()]*\({_NUMBER}\) exceeds available HBM \({_NUMBER}\)"),
    ("device", rf"Used {_NUMBER} of {_NUMBER} hbm"),
    ("on-chip", rf"Used {_NUMBER} of {_NUMBER} [vs]mem"),
    ("on-chip", rf"[Vv]mem[^\n]*?size {_NUMBER} and limit {_NUMBER}"),
    ("on-chip", r"Allocation \(size=(\d+)()\) would exceed memory \(size=(\d+)()\)[^\n]*space=[vs]mem"),
    ("device", r"Allocation \(size=(\d+)()\) would exceed memory \(size=(\d+)()\)"),
)


@dataclasses.dataclass(frozen=True)
class OutOfMemory:
    """A compiler's refusal: the program does not fit.

    Args:
        required: bytes that the whole program needs, arguments included; of a kernel's buffers where `memory` is
            "on-chip".
        available: bytes that there are.
        memory: "device" (HBM), or "on-chip" (a kernel asks for more VMEM than a core has).
        message: the compiler's words.
    """

    required: int
    available: int
    memory: Literal["device", "on-chip"]
    message: str

    def __str__(self) -> str:
        where = "device memory" if self.memory == "device" else "on-chip memory (a kernel's blocks are too large)"
        return f"out of {where}: needs {_size(self.required)}, there are {_size(self.available)}"


def out_of_memory(message: str) -> OutOfMemory | None:
    """The two numbers of a compiler's out-of-memory message; None where the message is about something else.

    Example:
        >>> out_of_memory("RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: Ran out of memory on HBM, the total memory "
        ...               "required for HLO temporaries (16.88G) exceeds available HBM (15.75G).").required
        18124761989
    """
    for memory, pattern in _OUT_OF_MEMORY:
        if found := re.search(pattern, message):
            required, unit, available, other = found.groups()
            return OutOfMemory(
                int(float(required) * _UNITS[unit]), int(float(available) * _UNITS[other]), memory, message.strip()
            )
    return None


@dataclasses.dataclass(frozen=True)
class LiveTensor:
    """One buffer that is alive when device memory is fullest.

    Args:
        name: in the user's terms: an argument's path ("params['layers']['up']"), else the scopes of the operation that
            made it, without what JAX adds ("layers/mlp/dot_general"), or where it has none the modules it belongs to
            ("Stack/Block/MLP/Linear/dot_general").
        bytes: on the device, with the padding of its layout.
        kind: "argument"; "output" that is no donated argument; "kept", made in the forward pass and read in the
            backward pass; "constant"; "transient", all else.
        shape: type and shape as XLA prints them, "bf16[8,16384,1024]".
        phase: the pass that makes it: "forward", "backward", "recompute" (of the forward pass, in the backward pass);
            None for arguments, and in a program without gradients.
        in_loop: it belongs to one iteration of a loop.
        source: file and line that it comes from: where the innermost module is called, "layers/mlp.py:96".
    """

    name: str
    bytes: int
    kind: Kind
    shape: str
    phase: Literal["forward", "backward", "recompute"] | None = None
    in_loop: bool = False
    source: str | None = None


@dataclasses.dataclass(frozen=True)
class Moment:
    """Live bytes at one place of the compiled schedule.

    Args:
        at: place in the schedule, in instructions from its start; a loop's body stands there once.
        bytes: live bytes per kind (`KINDS`).
        phase: pass of the instruction there.
    """

    at: int
    bytes: Mapping[str, int]
    phase: Literal["forward", "backward", "recompute"] | None = None

    @property
    def total(self) -> int:
        """Live bytes of all kinds."""
        return sum(self.bytes.values())


@dataclasses.dataclass(frozen=True)
class CompileReport:
    """What the compiler of a platform says about one program. Bytes and FLOP are of one device.

    A program that does not fit has `oom`; one that its compiler did not survive has `crashed`. Then the bytes are None,
    except where the compiler said them before it gave up.

    Args:
        platform: text of the `Platform` it was compiled for.
        argument_bytes, output_bytes, alias_bytes, temp_bytes: device memory; aliased are outputs that take the place
            of donated arguments.
        host_argument_bytes, host_output_bytes, host_alias_bytes, host_temp_bytes: memory of the host. Always 0 on a
            CPU, which has no other memory.
        flop: FLOP of matrix products, convolutions and kernels, loops counted; None where there is no program.
        unknown_loops: loops whose number of trips the program does not say; `flop` has their bodies once.
        silent_kernels: custom kernels that do not say their cost; they are missing from `flop`.
        collectives: what is sent between devices, by kind, mesh axes and bytes.
        unread: why `flop` and `collectives` are missing of a program that was compiled.
        oom: the compiler's refusal.
        crashed: why there is no program though memory is not the reason: a signal, a time-out, an internal error.
        live: who is alive at the peak, largest first; None unless asked for (`explain`).
        timeline: live bytes along the schedule, at most some hundreds of moments, the peak among them; None likewise.
        seconds: seconds that the compiler took.
        versions: of jax, jaxlib and the compiler.
        attached: it was compiled for a device that is there, not for a described one.
        key: of program, platform, versions and options: what the cache knows it by.
        cached: it comes from the cache.
    """

    platform: str
    argument_bytes: int | None = None
    output_bytes: int | None = None
    alias_bytes: int | None = None
    temp_bytes: int | None = None
    host_argument_bytes: int | None = None
    host_output_bytes: int | None = None
    host_alias_bytes: int | None = None
    host_temp_bytes: int | None = None
    flop: int | None = None
    unknown_loops: int = 0
    silent_kernels: int = 0
    collectives: tuple[Collective, ...] = ()
    unread: str | None = None
    oom: OutOfMemory | None = None
    crashed: str | None = None
    live: tuple[LiveTensor, ...] | None = None
    timeline: tuple[Moment, ...] | None = None
    seconds: float = 0.0
    versions: Mapping[str, str] = dataclasses.field(default_factory=dict)
    attached: bool = False
    key: str = ""
    cached: bool = False

    @property
    def device_bytes(self) -> int | None:
        """Bytes of device memory that a run takes: temp + argument + output - alias.

        Of a program that does not fit, what the compiler says it would need; None where nothing says it.
        """
        found = _sum(self.temp_bytes, self.argument_bytes, self.output_bytes, self.alias_bytes)
        if found is None and self.oom is not None and self.oom.memory == "device":
            return self.oom.required
        return found

    @property
    def host_bytes(self) -> int | None:
        """Bytes of host memory that a run takes, per device."""
        return _sum(self.host_temp_bytes, self.host_argument_bytes, self.host_output_bytes, self.host_alias_bytes)

    def fits(self, limit: int) -> bool:
        """Whether the program compiles and takes no more than `limit` bytes of device memory."""
        needed = self.device_bytes
        return self.oom is None and self.crashed is None and needed is not None and needed <= limit

    def sent(self, axis: str | None = None, kind: str | None = None) -> int:
        """Bytes of the arrays of all collectives in one run, loops counted.

        Args:
            axis: of those alone whose groups span this mesh axis.
            kind: of those alone of this kind.
        """
        return sum(
            one.bytes * one.count
            for one in self.collectives
            if (kind is None or one.kind == kind) and (axis is None or one.axes is None or axis in one.axes)
        )

    def json(self) -> Any:
        """What `json.dumps` takes, and `CompileReport.from_json` reads back."""
        return to_json(self)

    @classmethod
    def from_json(cls, data: Any, where: str = "the JSON") -> "CompileReport":
        """The report that `json` wrote."""
        return from_json(cls, data, where)

    def __str__(self) -> str:
        lines = [
            f"compiled for {self.platform}" + (" (from the cache)" if self.cached else f" in {self.seconds:.1f} s")
        ]
        if self.crashed is not None:
            lines = [f"not compiled for {self.platform}: {self.crashed}"]
        if self.oom is not None:
            lines = [f"does not fit {self.platform}: {self.oom}"]
        if self.temp_bytes is not None and self.device_bytes is not None:
            rows = {
                "device": self.device_bytes,
                "  arguments": self.argument_bytes,
                "  outputs": self.output_bytes,
                "  of which in place": -(self.alias_bytes or 0),
                "  temporaries": self.temp_bytes,
                "host": self.host_bytes,
            }
            lines += [f"  {name:22}{_size(count):>12}" for name, count in rows.items() if count is not None]
        if self.flop is not None:
            lines.append(f"  {'FLOP per device':22}{self.flop:>12.4g}")
        sums: dict[tuple[str, str], int] = {}
        for one in self.collectives:
            axes = "+".join(one.axes) if one.axes is not None else "other groups"
            sums[one.kind, axes] = sums.get((one.kind, axes), 0) + one.bytes * one.count
        lines += [f"  {f'{kind} {axes}':38}{_size(count):>12}" for (kind, axes), count in sums.items()]
        if self.live:
            lines.append("  alive at the peak:")
            lines += [f"    {_size(one.bytes):>10}  {one.kind:9}  {one.name}  {one.shape}" for one in self.live[:12]]
        return "\n".join(lines)


def _sum(temp: int | None, argument: int | None, output: int | None, alias: int | None) -> int | None:
    if temp is None or argument is None or output is None or alias is None:
        return None
    return temp + argument + output - alias


def _size(count: int) -> str:
    """A number of bytes to read, not to parse: "15.75 GiB"."""
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(count) >= scale:
            return f"{count / scale:.2f} {unit}"
    return f"{count} B"
