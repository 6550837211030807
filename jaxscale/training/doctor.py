"""`jaxscale doctor`: what this machine and this installation have, what is missing, and what to do.

`examine` inspects the machine; `diagnose` is a pure function of the result, so tests cover other machines too. Nothing
is downloaded, written or compiled. Speed is left out: benchmarks measure it.
"""

import dataclasses
import importlib.metadata
import importlib.util
import os
import platform as python_platform
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from jaxscale.platforms.platform import Platform
from jaxscale.recipe.kernels import KNOWN
from jaxscale.values.units import rate, size

FindingState = Literal["ok", "note", "missing"]
# by state: the printed mark, and its colour
MARKS: Mapping[FindingState, tuple[str, str]] = {
    "ok": ("✓", "green"),
    "note": ("·", "yellow"),
    "missing": ("✗", "bold red"),
}
REQUIRED = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")
PLUGINS = ("libtpu", "jax-cuda13-plugin", "jax-cuda12-plugin")
# by extra: the packages that it installs, and their purpose
OPTIONAL: Mapping[str, tuple[tuple[str, ...], str]] = {
    "notebook": (("ipykernel", "matplotlib", "nbclient"), "plots and notebooks"),
    "remote": (("fsspec", "gcsfs", "s3fs"), "data and runs on gs:// and s3://"),
}
# jax/_src/hardware_utils.py: Google's PCI vendor number, and the device numbers of its TPUs (others are network cards)
_GOOGLE_NUMBER = "0x1ae0"
_TPU_NUMBERS = ("0x0027", "0x0056", "0x005e", "0x0062", "0x0063", "0x006f", "0x0076")
# jax/_src/hardware_utils.py: device files of the driver, of containers, of WSL2
_NVIDIA_FILES = ("/dev/nvidia0", "/dev/nvidiactl", "/dev/dxg")
# free bytes below which a note is given: a checkpoint of a 0.3 B model with AdamW's moments takes 3.6e9
_DISK_MARGIN = 5 * 10**9


@dataclasses.dataclass(frozen=True)
class Finding:
    """One row of the report.

    Args:
        name: name of the item.
        text: its version, size or condition, as text.
        state: "ok"; "note" for useful information; "missing" if no run can start, or the accelerator would be idle.
        to_do: advice to the user; empty without one.
    """

    name: str
    text: str
    state: FindingState = "ok"
    to_do: str = ""


@dataclasses.dataclass(frozen=True)
class Section:
    """The rows of the report under one title."""

    title: str
    rows: tuple[Finding, ...]


@dataclasses.dataclass(frozen=True)
class Diagnosis:
    """The doctor's report.

    Args:
        sections: sections in the order in which they are printed.
    """

    sections: tuple[Section, ...]

    @property
    def status(self) -> int:
        """The exit status: 1 if the state of a row is "missing", otherwise 0."""
        return int(any(row.state == "missing" for section in self.sections for row in section.rows))

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        from rich.table import Table
        from rich.text import Text

        for section in self.sections:
            yield Text(section.title, style="bold")
            table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
            table.add_column(width=1)
            table.add_column(min_width=18, no_wrap=True)
            table.add_column(overflow="fold")
            for row in section.rows:
                mark, style = MARKS[row.state]
                cell = Text(row.text)
                if row.to_do:
                    cell.append(f"\n{row.to_do}", style="italic")
                table.add_row(Text(mark, style=style), row.name, cell)
            yield table
            yield Text()

    def __str__(self) -> str:
        from rich.console import Console

        console = Console(width=shutil.get_terminal_size((100, 24)).columns, color_system=None)
        with console.capture() as capture:
            console.print(self)
        return "\n".join(line.rstrip() for line in capture.get().rstrip().splitlines())


@dataclasses.dataclass(frozen=True)
class Machine:
    """Facts about a machine and its installation.

    Args:
        python: version of Python.
        versions: version of each relevant package that is installed, by name.
        platform: the platform that JAX runs on; None if JAX found no device.
        failure: JAX's error message if it found no device.
        processes: number of JAX processes.
        nvidia: whether the system has an NVIDIA GPU.
        tpu: whether the system has a TPU.
        jax_platforms: JAX's setting `jax_platforms`; empty if it is not set.
        cores: number of CPU cores.
        host_memory: bytes of main memory; None if unknown.
        disks: free bytes by (label, path) of a folder.
        cache: folder of the compile cache; None if it is off.
        modules: names of optional packages that can be imported.
    """

    python: str
    versions: Mapping[str, str]
    platform: Platform | None
    failure: str = ""
    processes: int = 1
    nvidia: bool = False
    tpu: bool = False
    jax_platforms: str = ""
    cores: int = 1
    host_memory: int | None = None
    disks: Mapping[tuple[str, str], int] = dataclasses.field(default_factory=dict)
    cache: str | None = None
    modules: frozenset[str] = frozenset()


def doctor() -> Diagnosis:
    """Examine this machine and this installation.

    Returns:
        The report; print it, and exit with its `status`.

    Example:
        >>> [section.title for section in doctor().sections]
        ['versions', 'devices', 'kernels', 'memory', 'disk', 'optional']
    """
    return diagnose(examine())


def examine() -> Machine:
    """Start JAX's backend, and collect the facts about this machine."""
    from jaxscale.platforms.detect import detect, host_memory
    from jaxscale.training.backend import cores

    jax_platforms = os.environ.get("JAX_PLATFORMS", "")
    platform, failure, process_count, cache = None, "", 1, None
    try:
        import jax

        config: Any = jax.config
        jax_platforms, cache = config.jax_platforms or "", config.jax_compilation_cache_dir
        platform, process_count = detect(), jax.process_count()
    except (ImportError, RuntimeError) as error:
        failure = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    folders_by_label = {"working directory": Path.cwd(), "temporary files": Path(tempfile.gettempdir())}
    if cache is not None and Path(cache).exists():
        folders_by_label["compile cache"] = Path(cache)
    optional_names = [package for packages, _ in OPTIONAL.values() for package in packages]
    return Machine(
        python=python_platform.python_version(),
        versions={name: version for name in ("jaxscale", *REQUIRED, *PLUGINS) if (version := _installed_version(name))},
        platform=platform,
        failure=failure,
        processes=process_count,
        nvidia=any(Path(path).exists() for path in _NVIDIA_FILES),
        tpu=sees_tpu(),
        jax_platforms=jax_platforms,
        cores=cores(),
        host_memory=host_memory(),
        disks={(label, str(path)): shutil.disk_usage(path).free for label, path in folders_by_label.items()},
        cache=cache,
        modules=frozenset(name for name in optional_names if importlib.util.find_spec(name) is not None),
    )


def sees_tpu(devices: Path = Path("/sys/bus/pci/devices")) -> bool:
    """Return whether a TPU is on the PCI bus; `devices` is the folder with one subfolder for each device of the bus."""
    for folder in devices.glob("*"):
        try:
            vendor, number = ((folder / name).read_text().strip() for name in ("vendor", "device"))
            if vendor == _GOOGLE_NUMBER and number in _TPU_NUMBERS:
                return True
        except OSError:
            continue
    return False


def diagnose(machine: Machine) -> Diagnosis:
    """Return the report on a machine, as a pure function of its facts."""
    return Diagnosis(
        (
            Section("versions", tuple(_version_findings(machine))),
            Section("devices", tuple(_device_findings(machine))),
            Section("kernels", tuple(_kernel_findings(machine))),
            Section("memory", tuple(_memory_findings(machine))),
            Section("disk", tuple(_disk_findings(machine))),
            Section("optional", tuple(_optional_findings(machine))),
        )
    )


def _version_findings(machine: Machine) -> Iterator[Finding]:
    """Yield findings about the versions of Python and of the packages, and about versions that do not match."""
    yield Finding("python", machine.python)
    for name in ("jaxscale", *REQUIRED):
        version = machine.versions.get(name)
        if version is not None:
            yield Finding(name, version)
        elif name != "jaxscale":
            yield Finding(name, "not installed", "missing", f"pip install {name}")
    jax, jaxlib = (machine.versions.get(name) for name in ("jax", "jaxlib"))
    if jax and jaxlib and _release_numbers(jax) != _release_numbers(jaxlib):
        yield Finding("jax and jaxlib", f"{jax} and {jaxlib} differ", "note", f"pip install 'jaxlib=={jax}'")
    for name in PLUGINS[1:]:
        version = machine.versions.get(name)
        if version and jax and _release_numbers(version) != _release_numbers(jax):
            yield Finding(name, f"{version}, but jax is {jax}", "missing", f"pip install '{name}=={jax}'")


def _device_findings(machine: Machine) -> Iterator[Finding]:
    """Yield findings about the devices that JAX found, and about accelerators that it does not use."""
    platform = machine.platform
    if platform is None:
        yield Finding("devices", f"none: {machine.failure}", "missing", "unset JAX_PLATFORMS, or set JAX_PLATFORMS=cpu")
    else:
        yield from _chip_findings(platform)
        if machine.processes > 1:
            yield Finding("processes", str(machine.processes))
        if platform.chip.kind == "cpu" and platform.chips < machine.cores:
            text = f"{machine.cores}, but {platform.chips} device(s)"
            yield Finding("cores", text, "note", "by default, a run uses one device per core")
    chip_kind = None if platform is None else platform.chip.kind
    setting = f" (jax_platforms is {machine.jax_platforms!r})" if machine.jax_platforms else ""
    # the kind of accelerator, the package's extra for it, and the packages with which JAX uses it
    for name, is_present, extra, plugins in (
        ("gpu", machine.nvidia, "cuda", ("jax-cuda13-plugin", "jax-cuda12-plugin")),
        ("tpu", machine.tpu, "tpu", ("libtpu",)),
    ):
        plugin_texts = [f"{plugin} {machine.versions[plugin]}" for plugin in plugins if plugin in machine.versions]
        if is_present and chip_kind != name and not plugin_texts:
            text = f"this machine has a {name.upper()}, but the installed jaxlib cannot use it"
            yield Finding(f"{name} support", text, "missing", f"pip install 'jaxscale[{extra}]'")
        elif is_present and chip_kind != name:
            text = f"this machine has a {name.upper()}, but JAX does not use it{setting}"
            to_do = "unset JAX_PLATFORMS" if setting else f"check its driver, then pip install -U 'jaxscale[{extra}]'"
            yield Finding(f"{name} support", text, "missing", to_do)
        elif plugin_texts and not is_present and chip_kind != name:
            text = f"{', '.join(plugin_texts)} for compiling ahead of time, because no {name.upper()} is here"
            yield Finding(f"{name} support", text, "note", "set JAX_PLATFORMS=cpu in programs of your own")
        elif plugin_texts:
            yield Finding(f"{name} support", ", ".join(plugin_texts))


def _chip_findings(platform: Platform) -> Iterator[Finding]:
    """Yield findings about the chip, about its peak FLOP/s, and about bfloat16."""
    chip = platform.chip
    yield Finding("devices", f"{platform.devices} x {chip.device_kinds[0]} ({platform})")
    peak = platform.chip.peak("bfloat16") or platform.chip.peak("float16")
    if peak is not None:
        dtype = "bfloat16" if chip.peak("bfloat16") else "float16"
        yield Finding("peak", f"{rate(peak, 'FLOP/s')} {dtype} per chip, from {chip.source[0]}")
    elif chip.kind != "cpu":
        text = f"unknown for {chip.device_kinds[0]!r}: runs train, but report no mfu"
        yield Finding("peak", text, "note", f"add a row to jaxscale/platforms/{chip.kind}.py, with its source")
    if chip.kind == "gpu" and chip.peak("bfloat16") is None and peak is not None:
        to_do = "prefer float32: precision bfloat16 will be slow"
        yield Finding("bfloat16", "this chip has no fast bfloat16", "note", to_do)


def _kernel_findings(machine: Machine) -> Iterator[Finding]:
    """Yield findings about the implementation of each kernel of `pallas_kernels`, for a shape of everyday size."""
    platform = machine.platform
    if platform is None or platform.chip.kind == "cpu":
        yield Finding("all", "plain JAX: kernels are for TPUs and for H100 and H200")
        return
    from pallas_kernels.overview import overview

    chip_kind = platform.chip.kind
    for entry in overview(f"{chip_kind} {platform.chip.device_kinds[0]}"):
        reason = entry.reasons.get(chip_kind)
        choice = entry.chosen if entry.kernel in KNOWN else f"{entry.chosen} (for your own layers; ours do not use it)"
        yield Finding(entry.kernel, choice if reason is None else f"{choice}; not {chip_kind}: {reason}")


def _memory_findings(machine: Machine) -> Iterator[Finding]:
    """Yield findings about main memory, and about the memory of each device."""
    if machine.host_memory is not None:
        yield Finding("host", size(machine.host_memory))
    platform = machine.platform
    if platform is not None and platform.chip.kind != "cpu" and platform.device_memory is not None:
        finding = Finding("device", f"{size(platform.device_memory)} usable on each of {platform.devices}")
        if platform.chip.kind == "gpu":
            to_do = "JAX takes 75 % of it; set XLA_PYTHON_CLIENT_MEM_FRACTION=0.9 for more"
            finding = dataclasses.replace(finding, state="note", to_do=to_do)
        yield finding


def _disk_findings(machine: Machine) -> Iterator[Finding]:
    """Yield findings about the free bytes of the folders that a run writes to, and about the compile cache."""
    for (label, path), free_bytes in machine.disks.items():
        is_scarce = free_bytes < _DISK_MARGIN
        to_do = "checkpoints and caches may not fit: free some space, or use --out on another disk" if is_scarce else ""
        yield Finding(label, f"{size(free_bytes)} free at {path}", "note" if is_scarce else "ok", to_do)
    if machine.cache is None:
        text = "off: every run compiles again"
        yield Finding("compile cache", text, "note", "set JAXSCALE_CACHE or JAX_COMPILATION_CACHE_DIR to a folder")


def _optional_findings(machine: Machine) -> Iterator[Finding]:
    """Yield findings about the extras of this package, and about the packages that each lacks."""
    for extra, (packages, purpose) in OPTIONAL.items():
        missing_packages = [name for name in packages if name not in machine.modules]
        if missing_packages:
            text = f"{', '.join(missing_packages)} not installed: {purpose}"
            yield Finding(extra, text, "note", f"pip install 'jaxscale[{extra}]'")
        else:
            yield Finding(extra, f"{', '.join(packages)}: {purpose}")


def _installed_version(name: str) -> str | None:
    """Return the version of a package; `None` if it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _release_numbers(version: str) -> tuple[str, ...]:
    """Return the first three numbers of a version: jax 0.12.0.1 matches jaxlib 0.12.0."""
    return tuple(version.split("."))[:3]
