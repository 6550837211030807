"""`jaxscale doctor`: what this machine and this installation have, what is missing, and what to do about it.

`examine` inspects the machine. `diagnose` is a pure function of what `examine` found, so tests can cover other
machines. Nothing is downloaded, written or compiled. The doctor does not measure speed; the benchmarks do.
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
# for each state: the printed mark and its style
MARKS: Mapping[FindingState, tuple[str, str]] = {
    "ok": ("✓", "green"),
    "note": ("·", "yellow"),
    "missing": ("✗", "bold red"),
}
REQUIRED = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")
PLUGINS = ("libtpu", "jax-cuda13-plugin", "jax-cuda12-plugin")
# for each extra: the packages that it installs, and their purpose
OPTIONAL: Mapping[str, tuple[tuple[str, ...], str]] = {
    "notebook": (("ipykernel", "matplotlib", "nbclient"), "plots and notebooks"),
    "remote": (("fsspec", "gcsfs", "s3fs"), "data and runs on gs:// and s3://"),
}
# jax/_src/hardware_utils.py: Google's PCI vendor ID, and the device IDs of its TPUs (other devices are network cards)
_GOOGLE_VENDOR_ID = "0x1ae0"
_TPU_DEVICE_IDS = ("0x0027", "0x0056", "0x005e", "0x0062", "0x0063", "0x006f", "0x0076")
# jax/_src/hardware_utils.py: device files of the driver, of containers, of WSL2
_NVIDIA_FILES = ("/dev/nvidia0", "/dev/nvidiactl", "/dev/dxg")
# free bytes below which the report has a note: a checkpoint of a 0.3 B model with AdamW's moments takes 3.6e9 bytes
_SCARCE_DISK_BYTES = 5 * 10**9


@dataclasses.dataclass(frozen=True)
class Finding:
    """One row of the report.

    Args:
        name: name of the item.
        text: the item's version, size or condition, as text.
        state: "ok"; "note" for useful information; "missing" if no run can start, or the accelerator would be idle.
        to_do: advice to the user; empty if there is none.
    """

    name: str
    text: str
    state: FindingState = "ok"
    to_do: str = ""


@dataclasses.dataclass(frozen=True)
class Section:
    """A titled section of the report.

    Args:
        title: the section's title.
        rows: the section's findings, one in each row.
    """

    title: str
    rows: tuple[Finding, ...]


@dataclasses.dataclass(frozen=True)
class Diagnosis:
    """The doctor's report.

    Args:
        sections: the sections, in the order in which they are printed.
    """

    sections: tuple[Section, ...]

    @property
    def status(self) -> int:
        """The exit status: 1 if any row has the state "missing", otherwise 0."""
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
    """The description of a machine and its installation.

    Args:
        python: version of Python.
        versions: version of each relevant package that is installed, by the package's name.
        platform: the platform that JAX runs on; `None` if JAX found no device.
        failure: JAX's error message if it found no device; otherwise empty.
        process_count: number of JAX processes.
        has_nvidia: whether the system has an NVIDIA GPU.
        has_tpu: whether the system has a TPU.
        jax_platforms: JAX's setting `jax_platforms`; empty if it is not set.
        core_count: number of CPU cores.
        host_memory: bytes of main memory; `None` if unknown.
        free_bytes: for each folder, by its label and path, the free bytes on its disk.
        cache_folder: folder of the compile cache; `None` if the cache is off.
        optional_packages: names of the optional packages that can be imported.
    """

    python: str
    versions: Mapping[str, str]
    platform: Platform | None
    failure: str = ""
    process_count: int = 1
    has_nvidia: bool = False
    has_tpu: bool = False
    jax_platforms: str = ""
    core_count: int = 1
    host_memory: int | None = None
    free_bytes: Mapping[tuple[str, str], int] = dataclasses.field(default_factory=dict)
    cache_folder: str | None = None
    optional_packages: frozenset[str] = frozenset()


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
    """Start JAX's backend, and return a description of this machine."""
    from jaxscale.platforms.cores import usable_cores
    from jaxscale.platforms.detect import detect, host_memory

    jax_platforms = os.environ.get("JAX_PLATFORMS", "")
    platform, failure, process_count, cache_folder = None, "", 1, None
    try:
        import jax

        config: Any = jax.config
        jax_platforms, cache_folder = config.jax_platforms or "", config.jax_compilation_cache_dir
        platform, process_count = detect(), jax.process_count()
    except (ImportError, RuntimeError) as error:
        failure = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    folders_by_label = {"working directory": Path.cwd(), "temporary files": Path(tempfile.gettempdir())}
    if cache_folder is not None and Path(cache_folder).exists():
        folders_by_label["compile cache"] = Path(cache_folder)
    optional_names = [package for packages, _ in OPTIONAL.values() for package in packages]
    return Machine(
        python=python_platform.python_version(),
        versions={name: version for name in ("jaxscale", *REQUIRED, *PLUGINS) if (version := _installed_version(name))},
        platform=platform,
        failure=failure,
        process_count=process_count,
        has_nvidia=any(Path(path).exists() for path in _NVIDIA_FILES),
        has_tpu=has_pci_tpu(),
        jax_platforms=jax_platforms,
        core_count=usable_cores(),
        host_memory=host_memory(),
        free_bytes={(label, str(path)): shutil.disk_usage(path).free for label, path in folders_by_label.items()},
        cache_folder=cache_folder,
        optional_packages=frozenset(name for name in optional_names if importlib.util.find_spec(name) is not None),
    )


def has_pci_tpu(pci_folder: Path = Path("/sys/bus/pci/devices")) -> bool:
    """Return whether a TPU is on the PCI bus; `pci_folder` has one subfolder for each device of the bus."""
    for device_folder in pci_folder.glob("*"):
        try:
            vendor_id, device_id = ((device_folder / name).read_text().strip() for name in ("vendor", "device"))
            if vendor_id == _GOOGLE_VENDOR_ID and device_id in _TPU_DEVICE_IDS:
                return True
        except OSError:
            continue
    return False


def diagnose(machine: Machine) -> Diagnosis:
    """Return the report on a machine; this is a pure function of `machine`."""
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
    """Yield findings about the versions of Python and of the packages, and about mismatched versions."""
    yield Finding("python", machine.python)
    for name in ("jaxscale", *REQUIRED):
        version = machine.versions.get(name)
        if version is not None:
            yield Finding(name, version)
        elif name != "jaxscale":
            yield Finding(name, "not installed", "missing", f"pip install {name}")
    jax_version, jaxlib_version = (machine.versions.get(name) for name in ("jax", "jaxlib"))
    if jax_version and jaxlib_version and _release_numbers(jax_version) != _release_numbers(jaxlib_version):
        text = f"{jax_version} and {jaxlib_version} differ"
        yield Finding("jax and jaxlib", text, "note", f"pip install 'jaxlib=={jax_version}'")
    for name in PLUGINS[1:]:
        version = machine.versions.get(name)
        if version and jax_version and _release_numbers(version) != _release_numbers(jax_version):
            text = f"{version}, but jax is {jax_version}"
            yield Finding(name, text, "missing", f"pip install '{name}=={jax_version}'")


def _device_findings(machine: Machine) -> Iterator[Finding]:
    """Yield findings about the devices that JAX found, and about accelerators that it does not use."""
    platform = machine.platform
    if platform is None:
        yield Finding("devices", f"none: {machine.failure}", "missing", "unset JAX_PLATFORMS, or set JAX_PLATFORMS=cpu")
    else:
        yield from _chip_findings(platform)
        if machine.process_count > 1:
            yield Finding("processes", str(machine.process_count))
        if platform.chip.kind == "cpu" and platform.chips < machine.core_count:
            text = f"{machine.core_count}, but {platform.chips} device(s)"
            yield Finding("cores", text, "note", "by default, a run uses one device per core")
    chip_kind = None if platform is None else platform.chip.kind
    setting_text = f" (jax_platforms is {machine.jax_platforms!r})" if machine.jax_platforms else ""
    # for each kind of accelerator: jaxscale's extra for it, and the packages that JAX needs to use it
    for kind, is_present, extra, plugins in (
        ("gpu", machine.has_nvidia, "cuda", ("jax-cuda13-plugin", "jax-cuda12-plugin")),
        ("tpu", machine.has_tpu, "tpu", ("libtpu",)),
    ):
        plugin_texts = [f"{plugin} {machine.versions[plugin]}" for plugin in plugins if plugin in machine.versions]
        if is_present and chip_kind != kind and not plugin_texts:
            text = f"this machine has a {kind.upper()}, but the installed jaxlib cannot use it"
            yield Finding(f"{kind} support", text, "missing", f"pip install 'jaxscale[{extra}]'")
        elif is_present and chip_kind != kind:
            text = f"this machine has a {kind.upper()}, but JAX does not use it{setting_text}"
            install_text = f"check its driver, then pip install -U 'jaxscale[{extra}]'"
            to_do = "unset JAX_PLATFORMS" if setting_text else install_text
            yield Finding(f"{kind} support", text, "missing", to_do)
        elif plugin_texts and not is_present and chip_kind != kind:
            text = f"{', '.join(plugin_texts)} only for compiling ahead of time: this machine has no {kind.upper()}"
            yield Finding(f"{kind} support", text, "note", "set JAX_PLATFORMS=cpu in your own programs")
        elif plugin_texts:
            yield Finding(f"{kind} support", ", ".join(plugin_texts))


def _chip_findings(platform: Platform) -> Iterator[Finding]:
    """Yield findings about the chip, its peak FLOP/s, and its support for bfloat16."""
    chip = platform.chip
    yield Finding("devices", f"{platform.devices} x {chip.device_kinds[0]} ({platform})")
    peak_flop_per_second = platform.chip.peak("bfloat16") or platform.chip.peak("float16")
    if peak_flop_per_second is not None:
        dtype = "bfloat16" if chip.peak("bfloat16") else "float16"
        yield Finding("peak", f"{rate(peak_flop_per_second, 'FLOP/s')} {dtype} per chip, from {chip.source[0]}")
    elif chip.kind != "cpu":
        text = f"unknown for {chip.device_kinds[0]!r}: runs train, but report no mfu"
        yield Finding("peak", text, "note", f"add a row to jaxscale/platforms/{chip.kind}.py, with its source")
    if chip.kind == "gpu" and chip.peak("bfloat16") is None and peak_flop_per_second is not None:
        to_do = "prefer float32: precision bfloat16 will be slow"
        yield Finding("bfloat16", "this chip has no fast bfloat16", "note", to_do)


def _kernel_findings(machine: Machine) -> Iterator[Finding]:
    """Yield findings about the implementation that each kernel of `pallas_kernels` uses, for a typical shape."""
    platform = machine.platform
    if platform is None or platform.chip.kind == "cpu":
        yield Finding("all", "plain JAX: kernels are for TPUs and for H100 and H200")
        return
    from pallas_kernels.overview import overview

    chip_kind = platform.chip.kind
    for entry in overview(f"{chip_kind} {platform.chip.device_kinds[0]}"):
        reason = entry.reasons.get(chip_kind)
        usage_text = "" if entry.kernel in KNOWN else " (for your own layers; jaxscale's layers do not use it)"
        text = f"{entry.chosen}{usage_text}"
        yield Finding(entry.kernel, text if reason is None else f"{text}; not {chip_kind}: {reason}")


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
    """Yield findings about the free space for the folders that a run writes to, and about the compile cache."""
    for (label, path), free_bytes in machine.free_bytes.items():
        is_scarce = free_bytes < _SCARCE_DISK_BYTES
        to_do = "checkpoints and caches may not fit: free some space, or use --out on another disk" if is_scarce else ""
        yield Finding(label, f"{size(free_bytes)} free at {path}", "note" if is_scarce else "ok", to_do)
    if machine.cache_folder is None:
        text = "off: every run compiles again"
        yield Finding("compile cache", text, "note", "set JAXSCALE_CACHE or JAX_COMPILATION_CACHE_DIR to a folder")


def _optional_findings(machine: Machine) -> Iterator[Finding]:
    """Yield a finding for each extra of jaxscale, with the packages that are missing for it."""
    for extra, (packages, purpose) in OPTIONAL.items():
        missing_packages = [name for name in packages if name not in machine.optional_packages]
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
    """Return the first three numbers of a version, as texts: jax 0.12.0.1 matches jaxlib 0.12.0."""
    return tuple(version.split("."))[:3]
