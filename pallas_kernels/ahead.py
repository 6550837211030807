"""Chips that need not be here: their compilers, reports of these on a program, and libtpu's schedule of its kernels.

libtpu compiles for chips by name and dumps its final schedule as text: one VLIW bundle issues in a cycle, and code that
runs under a condition is a region that a branch leaps over. CUDA's plugin compiles for a GPU that is described to it;
ptxas reports the bytes of registers that it spills. Neither reports how long a program takes: waits for DMA, for
instance, are not seen.
"""

import contextlib
import dataclasses
import importlib.util
import os
import pathlib
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

TPUS = {"v4": "v4:2x2x1", "v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2"}
"""The smallest slice that libtpu compiles for, by chip."""
GPUS = {"h100": (84942979072, 3.35e12), "h200": (151397597184, 4.8e12)}
"""Bytes of memory and bytes/s of it, by chip: openxla/xla, xla/backends/gpu/target_config/specs, h100_sxm and h200."""

_H100 = """gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  shared_memory_per_block: 49152 shared_memory_per_core: 233472 shared_memory_per_block_optin: 232448
  core_count: 132 fpus_per_core: 128 clock_rate_ghz: 1.98 l2_cache_size: 52428800
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  memory_bandwidth: {bandwidth:.0f} device_memory_size: {memory}
  cuda_compute_capability {{ major: 9 minor: 0 }}
}}
platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 8 }} runtime_version {{ major: 13 }}
device_description_str: "NVIDIA {name}"
"""
_SPILLS = re.compile(r"stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
"""A kernel's, in ptxas's line on its stack frame: a warning repeats the same numbers."""
_BUNDLE = re.compile(r"^ *(?:0x)?[0-9a-f]+ +(\w\w)? *: (>*)(.*)")
_BRANCH = re.compile(r"sbr\.rel .*?target = \$region(\d+)")


def prepare() -> None:
    """Set the environment that compilers of chips which are not here must find when they are loaded.

    Flags of XLA for other platforms are dropped, because a compiler ends the process at an unknown flag.
    """
    of_others = ("--xla_force_host_platform_device_count", "--xla_cpu_")
    other_flags = [flag for flag in os.environ.get("XLA_FLAGS", "").split() if not flag.startswith(of_others)]
    os.environ["XLA_FLAGS"] = " ".join(other_flags)
    defaults = {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "true", "MOSAIC_GPU_DUMP_PTXAS": "1"}
    for name, value in defaults.items():
        os.environ.setdefault(name, value)


@contextlib.contextmanager
def dumping() -> Iterator[pathlib.Path]:
    """A folder, into which libtpu writes its schedules where it is loaded inside, here or in processes started here."""
    before = os.environ.get("LIBTPU_INIT_ARGS")
    with tempfile.TemporaryDirectory(prefix="schedules-") as folder:
        flags = f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true"
        os.environ["LIBTPU_INIT_ARGS"] = f"{before or ''} {flags}".strip()
        try:
            yield pathlib.Path(folder)
        finally:
            del os.environ["LIBTPU_INIT_ARGS"]
            if before is not None:
                os.environ["LIBTPU_INIT_ARGS"] = before


def device(chip: str) -> tuple[Any, bool]:
    """A device of the chip, and whether it is here.

    Args:
        chip: of `TPUS` or `GPUS`.

    Raises:
        ValueError: it is not here, and its compiler is not installed.
    """
    import jax

    from pallas_kernels.target import target

    here = jax.devices()[0]
    kind = "tpu" if chip in TPUS else "gpu"
    if here.platform == kind and target(f"{kind} {here.device_kind}").chip == chip:
        return here, True
    needed, extra = ("libtpu", "aot-tpu") if kind == "tpu" else ("jax_plugins", "aot-gpu")
    if importlib.util.find_spec(needed) is None:
        raise ValueError(
            f"{chip} is not here, and its compiler is not installed: pip install jaxscale[{extra}], or run this where "
            f"a {chip} is"
        )
    from jax.experimental import topologies

    if kind == "tpu":
        topology: Any = topologies.get_topology_desc(platform="tpu", topology_name=TPUS[chip])
    else:
        memory, bandwidth = GPUS[chip]
        config = _H100.format(memory=memory, bandwidth=bandwidth, name=chip.upper())
        topology = topologies.get_topology_desc(platform="cuda", target_config=config, topology="1x1x1")
    return topology.devices[0], False


@dataclasses.dataclass(frozen=True)
class Compiled:
    """What a compiler made of a program.

    Args:
        program: a `jax.stages.Compiled`; `None` where it was refused.
        refused: why.
        temporary: bytes that it needs beside arguments and results.
        said: what the compiler printed.
    """

    program: Any = None
    refused: str | None = None
    temporary: int = 0
    said: str = ""

    @property
    def spilled(self) -> int:
        """Bytes that ptxas spills, stores and loads, over all kernels."""
        return spilled(self.said)


def spilled(said: str) -> int:
    """Bytes that ptxas spills, stores and loads, over all kernels of what it printed.

    Example:
        >>> spilled('''
        ... ptxas warning : Registers are spilled to local memory in 'a', 8 bytes spill stores, 16 bytes spill loads
        ...     24 bytes stack frame, 8 bytes spill stores, 16 bytes spill loads
        ... ''')
        24
    """
    return sum(int(stores) + int(loads) for stores, loads in _SPILLS.findall(said))


def compiled(
    function: Callable[..., Any], shapes: Sequence[Any], at: Any, *, donated: tuple[int, ...] = ()
) -> Compiled:
    """Compile a function for a device.

    Args:
        function: of arrays.
        shapes: trees of `jax.ShapeDtypeStruct`.
        at: the device, or the description of one.
        donated: positions of arguments that are changed in place.
    """
    import jax
    from jax.sharding import AxisType, NamedSharding

    mesh = jax.make_mesh((1,), ("x",), axis_types=(AxisType.Auto,), devices=[at])
    place = NamedSharding(mesh, jax.P())
    placed_shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=place), tuple(shapes))
    try:
        with quoted() as output, jax.set_mesh(mesh):
            program: Any = jax.jit(function, donate_argnums=donated).lower(*placed_shapes).compile()
    except Exception as error:  # a refusal is an answer
        return Compiled(refused=f"{type(error).__name__}: {str(error).splitlines()[0][:160]}")
    return Compiled(program, None, program.memory_analysis().temp_size_in_bytes, "".join(output))


@contextlib.contextmanager
def quoted() -> Iterator[list[str]]:
    """What this process's compilers print to standard output, ptxas among them, as text when the context ends."""
    words: list[str] = []
    with tempfile.TemporaryFile() as file:
        sys.stdout.flush()
        stdout = os.dup(1)
        os.dup2(file.fileno(), 1)
        try:
            yield words
        finally:
            sys.stdout.flush()
            os.dup2(stdout, 1)
            os.close(stdout)
            file.seek(0)
            words.append(file.read().decode("utf-8", "replace"))


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Bundles of a kernel.

    Args:
        always: in one step of its grid, those outside of all regions.
        regions: of each region of a step that runs under a condition, in the order of the program.
        loops: of each loop within a step, in the order of the program; one pass of it.
        outside: before and after all steps.
        busy: by name of a unit, what all bundles ask of it as a part of what it could take.
    """

    always: int
    regions: tuple[int, ...]
    loops: tuple[int, ...] = ()
    outside: int = 0
    busy: Mapping[str, float] = dataclasses.field(default_factory=dict[str, float])

    @property
    def step(self) -> int:
        """Those of one step of the grid."""
        return self.always + sum(self.regions)

    @property
    def bundles(self) -> int:
        """All of them, once."""
        return self.outside + self.step

    def longest(self, count: int) -> tuple[int, ...]:
        """The longest regions, in the order of the program."""
        chosen = sorted(range(len(self.regions)), key=lambda i: -self.regions[i])[:count]
        return tuple(self.regions[i] for i in sorted(chosen))


def schedule(text: str) -> Schedule:
    """Read a schedule that libtpu dumped (`*-final_bundles.txt`).

    Example:
        >>> schedule('''
        ...      0   :  { nop }
        ...    0x1 LB: > { %1 = sbr.rel (%p1) target = $region8 }
        ...    0x2   : > { nop }
        ...    0x3   : > { nop }
        ...    0x4 PF: > { nop } /* Start/End empty region 8 :: Start region 9 */
        ... ''')
        Schedule(always=2, regions=(2,), loops=(), outside=1, busy={})
    """
    lines = [(match[1], len(match[2]), match[3]) for match in map(_BUNDLE.match, text.splitlines()) if match]
    body = [words for _, depth, words in lines if depth]
    always, regions = _regions(body, 0, len(body))
    loops: list[int] = []
    for mark, depth, _ in lines:
        if depth > 1:
            loops += [0] if mark == "LB" or not loops else []
            loops[-1] += 1
    return Schedule(always, tuple(regions), tuple(loops), len(lines) - len(body))


def _regions(lines: Sequence[str], at: int, stop: int) -> tuple[int, list[int]]:
    """Bundles that always run, and those of each region; one that mostly holds regions is as good as always run."""
    regions: list[int] = []
    always = 0
    while at < stop:
        branch = _BRANCH.search(lines[at])
        at, always = at + 1, always + 1
        if branch is None:
            continue
        name = re.compile(rf"[Rr]egion {branch[1]}\b")
        end = next((i for i in range(at, min(stop + 1, len(lines))) if name.search(lines[i])), None)
        if end is None:  # backwards: the loop over the grid
            continue
        inner_always, inner = _regions(lines, at, end)
        holds_regions = sum(inner) > inner_always
        always += inner_always if holds_regions else 0
        regions += inner if holds_regions else [end - at]
        at = end
    return always, regions


def busy(text: str) -> Mapping[str, float]:
    """Read what the bundles of a schedule ask of units (`*-final_hlo-static-per-bundle-utilization.txt`).

    Example:
        >>> busy("== CAPACITY:\\nMATMUL, SALU\\n   4   2\\n== UTILIZATION:\\n4 0\\n2 1\\n")
        {'MATMUL': 0.75, 'SALU': 0.25}
    """
    _, units, limits, _, *rows = (line for line in text.splitlines() if line.strip())
    loads = zip(*([int(word) for word in row.split()] for row in rows), strict=True)
    capacities = (int(word) * len(rows) for word in limits.split())
    return {
        unit: sum(load) / capacity for unit, load, capacity in zip(units.split(", "), loads, capacities, strict=True)
    }


def schedules(folder: pathlib.Path) -> Mapping[str, Schedule]:
    """Schedules of the kernels that were compiled since the folder was read last, by their names; it is emptied."""
    loads, by_kernel = {}, {}
    for file in folder.glob("*-final_hlo-static-per-bundle-utilization.txt"):
        loads[re.sub(r"-\d+-final_hlo.*$", "", file.name)] = busy(file.read_text())
    for file in sorted(folder.glob("*-final_bundles.txt")):
        if "schedule-analysis" not in file.name:
            kernel = re.sub(r"-\d+-final_bundles.*$", "", file.name)
            kernel_schedule = dataclasses.replace(schedule(file.read_text()), busy=loads.get(kernel, {}))
            by_kernel[re.sub(r"^\d+-|\.\d+$", "", kernel)] = kernel_schedule
    shutil.rmtree(folder)
    folder.mkdir()
    return by_kernel
