"""CompileReport: a compiler's report on a program (bytes, FLOP, collectives, live tensors), to and from JSON.

Bytes are per device. Two numbers that compilers report are left out because they are wrong: `peak_memory_in_bytes` (on
a TPU it adds on-chip and host memory) and the FLOP of `cost_analysis()` (a loop's body counts once).
"""

import collections
import dataclasses
import hashlib
import re
from collections.abc import Mapping
from typing import Any, Literal, get_args

from jaxscale.compiler.collectives import Collective
from jaxscale.compiler.schedule import ProgramSchedule
from jaxscale.values import from_json, to_json

LiveKind = Literal["argument", "output", "kept", "transient", "constant"]
KINDS: tuple[LiveKind, ...] = get_args(LiveKind)
StepPhase = Literal["forward", "backward", "recompute"]

_BYTES_BY_UNIT = {"": 1, "B": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
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
    """A compiler's out-of-memory error.

    Args:
        required: bytes that the whole program needs, arguments included; if `memory` is "on-chip", bytes that the
            buffers of a kernel need.
        available: bytes that the memory has.
        memory: "device" (HBM), or "on-chip" (a kernel asks for more VMEM than a core has).
        message: the compiler's message.
    """

    required: int
    available: int
    memory: Literal["device", "on-chip"]
    message: str

    def __str__(self) -> str:
        memory_text = "device memory" if self.memory == "device" else "on-chip memory (a kernel's blocks are too large)"
        return (
            f"out of {memory_text}: needs {_bytes_text(self.required)}, but {_bytes_text(self.available)} are available"
        )


def out_of_memory(message: str) -> OutOfMemory | None:
    """Read a compiler's out-of-memory message; return None for any other message.

    Example:
        >>> out_of_memory("RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: Ran out of memory on HBM, the total memory "
        ...               "required for HLO temporaries (16.88G) exceeds available HBM (15.75G).").required
        18124761989
    """
    for memory, pattern in _OUT_OF_MEMORY:
        if match := re.search(pattern, message):
            required_text, required_unit, available_text, available_unit = match.groups()
            return OutOfMemory(
                int(float(required_text) * _BYTES_BY_UNIT[required_unit]),
                int(float(available_text) * _BYTES_BY_UNIT[available_unit]),
                memory,
                message.strip(),
            )
    return None


def program_hash(text: str) -> str:
    """Return a hash of a compiled program that does not depend on its scopes and source lines.

    Args:
        text: text of the program, as `Compiled.as_text` returns it.

    Example:
        >>> program_hash('ROOT %a = f32[] add(%b, %c), metadata={op_name="x"}') == program_hash(
        ...     'ROOT %a = f32[] add(%b, %c), metadata={op_name="y"}'
        ... )
        True
    """
    first_line, _, rest = text.partition("\n")
    computations_text = re.sub(r"\A.*?(?=^(?:%|ENTRY))", "", rest, count=1, flags=re.DOTALL | re.MULTILINE)
    bare_text = re.sub(r',? metadata=\{(?:[^{}"]|"(?:[^"\\]|\\.)*")*\}', "", f"{first_line}\n{computations_text}")
    return hashlib.sha256(bare_text.encode()).hexdigest()[:16]


@dataclasses.dataclass(frozen=True)
class LiveTensor:
    """One buffer that is alive at the peak of device memory.

    Args:
        name: name in the user's terms: path of an argument ("params['layers']['up']"), or scopes of the operation that
            computes the tensor, without those that JAX adds ("layers/mlp/dot_general"); without scopes, the operation's
            modules ("Stack/Block/MLP/Linear/dot_general").
        bytes: bytes on the device, with the padding of its layout.
        kind: "argument"; "output", an output that does not reuse a donated argument; "kept", a tensor computed in the
            forward pass and read in the backward pass; "constant"; "transient", any other tensor.
        shape: type and shape as XLA prints them, such as "bf16[8,16384,1024]".
        phase: the pass that computes the tensor: "forward", "backward", or "recompute" (of the forward pass, in the
            backward pass); None for arguments, and in a program without gradients.
        in_loop: whether the tensor belongs to one iteration of a loop.
        source: file and line where the innermost module is called, such as "layers/mlp.py:96".
    """

    name: str
    bytes: int
    kind: LiveKind
    shape: str
    phase: StepPhase | None = None
    in_loop: bool = False
    source: str | None = None


@dataclasses.dataclass(frozen=True)
class LiveBytes:
    """Live bytes at one position of the compiled schedule.

    Args:
        at: position in the schedule, in instructions from its start; a loop's body counts once.
        bytes: live bytes per kind (`KINDS`).
        phase: pass of the instruction at this position.
    """

    at: int
    bytes: Mapping[str, int]
    phase: StepPhase | None = None

    @property
    def total(self) -> int:
        """Live bytes of all kinds."""
        return sum(self.bytes.values())


@dataclasses.dataclass(frozen=True)
class CompileReport:
    """A compiler's report on one program. Bytes and FLOP are of one device.

    If the program does not fit, `oom` is set; if the compiler failed for another reason, `crashed` is set. In both
    cases the bytes are None, unless the compiler reported them before it stopped.

    Args:
        platform: text of the `Platform` that the program was compiled for.
        argument_bytes, output_bytes, alias_bytes, temp_bytes: bytes of device memory of the arguments, of the outputs,
            of the outputs that reuse the buffers of donated arguments, and of temporaries.
        host_argument_bytes, host_output_bytes, host_alias_bytes, host_temp_bytes: the same in bytes of host memory;
            always 0 on a CPU, where host memory is device memory.
        flop: FLOP of matrix products, convolutions and kernels, iterations of loops included; None without a program.
        unknown_loops: number of loops whose trip count the program does not specify; `flop` counts their bodies once.
        silent_kernels: number of custom kernels that do not declare their cost; they are missing from `flop`.
        collectives: transfers between devices, by kind, mesh axes and bytes.
        schedule: events of the program with their estimated cycles; None if its compiler estimates none.
        unread: why `flop` and `collectives` of a compiled program are missing; None if they are not.
        oom: the compiler's out-of-memory error; None if there was none.
        crashed: why the compiler failed for another reason than a lack of memory: a signal, a time-out or an internal
            error; None if it did not.
        live: buffers alive at the peak, largest first; None without `explain`.
        timeline: live bytes at a few hundred positions of the schedule at most, the peak included; None without
            `explain`.
        seconds: seconds that the compiler took.
        added_options: options that were added because the compiler failed without them, by name.
        versions: versions of jax, jaxlib and the compiler, by package.
        attached: whether the program was compiled for an attached device rather than for a described one.
        program_hash: hash of the compiled program, as `program_hash` returns it; "" if there is none.
        key: hash of the program, the platform, the versions and the options; the report's key in the cache.
        cached: whether the report comes from the cache.
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
    schedule: ProgramSchedule | None = None
    unread: str | None = None
    oom: OutOfMemory | None = None
    crashed: str | None = None
    live: tuple[LiveTensor, ...] | None = None
    timeline: tuple[LiveBytes, ...] | None = None
    seconds: float = 0.0
    added_options: Mapping[str, bool] = dataclasses.field(default_factory=dict)
    versions: Mapping[str, str] = dataclasses.field(default_factory=dict)
    attached: bool = False
    program_hash: str = ""
    key: str = ""
    cached: bool = False

    @property
    def device_bytes(self) -> int | None:
        """Bytes of device memory that a run takes: temp + argument + output - alias.

        For a program that does not fit, these are the bytes that the compiler says it needs. None if unknown.
        """
        total = _total(self.temp_bytes, self.argument_bytes, self.output_bytes, self.alias_bytes)
        if total is None and self.oom is not None and self.oom.memory == "device":
            return self.oom.required
        return total

    @property
    def host_bytes(self) -> int | None:
        """Bytes of host memory that a run takes, per device."""
        return _total(self.host_temp_bytes, self.host_argument_bytes, self.host_output_bytes, self.host_alias_bytes)

    def fits(self, limit: int) -> bool:
        """Return whether the program compiles and takes no more than `limit` bytes of device memory."""
        device_bytes = self.device_bytes
        return self.oom is None and self.crashed is None and device_bytes is not None and device_bytes <= limit

    def sent(self, axis: str | None = None, kind: str | None = None) -> int:
        """Return the total bytes of all collectives' arrays in one run, iterations of loops included.

        Args:
            axis: count only collectives whose groups span this mesh axis.
            kind: count only collectives of this kind.
        """
        return sum(
            collective.bytes * collective.count
            for collective in self.collectives
            if (kind is None or collective.kind == kind)
            and (axis is None or collective.axes is None or axis in collective.axes)
        )

    def json(self) -> Any:
        """Return the report as JSON values, which `CompileReport.from_json` reads."""
        return to_json(self)

    @classmethod
    def from_json(cls, report_json: Any, source_name: str = "the JSON") -> "CompileReport":
        """Read a report from JSON that `json` returned; error messages call the JSON `source_name`."""
        return from_json(cls, report_json, source_name)

    def __str__(self) -> str:
        origin_text = "(from the cache)" if self.cached else f"in {self.seconds:.1f} s"
        lines = [f"compiled for {self.platform} {origin_text}"]
        if self.crashed is not None:
            lines = [f"not compiled for {self.platform}: {self.crashed}"]
        if self.oom is not None:
            lines = [f"does not fit {self.platform}: {self.oom}"]
        lines += [f"  with {name}={value}: the compiler fails without it" for name, value in self.added_options.items()]
        if self.temp_bytes is not None and self.device_bytes is not None:
            bytes_by_row = {
                "device": self.device_bytes,
                "  arguments": self.argument_bytes,
                "  outputs": self.output_bytes,
                "  of which in place": -(self.alias_bytes or 0),
                "  temporaries": self.temp_bytes,
                "host": self.host_bytes,
            }
            names_and_bytes = [(name, nbytes) for name, nbytes in bytes_by_row.items() if nbytes is not None]
            lines += [f"  {name:22}{_bytes_text(nbytes):>12}" for name, nbytes in names_and_bytes]
        if self.flop is not None:
            lines.append(f"  {'FLOP per device':22}{self.flop:>12.4g}")
        bytes_by_kind_and_axes: collections.Counter[tuple[str, str]] = collections.Counter()
        for collective in self.collectives:
            axes = "+".join(collective.axes) if collective.axes is not None else "other groups"
            bytes_by_kind_and_axes[collective.kind, axes] += collective.bytes * collective.count
        lines += [
            f"  {f'{kind} {axes}':38}{_bytes_text(nbytes):>12}"
            for (kind, axes), nbytes in bytes_by_kind_and_axes.items()
        ]
        if self.live:
            lines.append("  alive at the peak:")
            lines += [
                f"    {_bytes_text(tensor.bytes):>10}  {tensor.kind:9}  {tensor.name}  {tensor.shape}"
                for tensor in self.live[:12]
            ]
        return "\n".join(lines)


def _total(
    temp_bytes: int | None, argument_bytes: int | None, output_bytes: int | None, alias_bytes: int | None
) -> int | None:
    """Return the bytes that a run takes: temp + argument + output - alias; None if one of them is unknown."""
    if temp_bytes is None or argument_bytes is None or output_bytes is None or alias_bytes is None:
        return None
    return temp_bytes + argument_bytes + output_bytes - alias_bytes


def _bytes_text(nbytes: int) -> str:
    """Return a number of bytes as human-readable text, such as "15.75 GiB"."""
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(nbytes) >= scale:
            return f"{nbytes / scale:.2f} {unit}"
    return f"{nbytes} B"
