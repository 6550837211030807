"""Compile for chips that are not on this machine, and read what their compilers report about kernels.

libtpu compiles for a TPU by name and dumps its final schedule as text: one VLIW bundle is issued per cycle, and code
under a condition is a region that a branch skips. The CUDA plugin compiles for a GPU from a description, and ptxas
reports the bytes of registers that it spills. Neither compiler reports how long a program takes: the number of bundles,
for instance, does not include waiting for DMA.
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
"""Name of the smallest slice that libtpu compiles for, by name of the chip."""
GPUS = {"h100": (84942979072, 3.35e12), "h200": (151397597184, 4.8e12)}
"""Memory in bytes and memory bandwidth in bytes/s of each GPU (openxla/xla, xla/backends/gpu/target_config/specs)."""

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
"""Bytes spilled by a kernel, in ptxas's line about its stack frame, not in the warning that repeats the numbers."""
_BUNDLE = re.compile(r"^ *(?:0x)?[0-9a-f]+ +(\w\w)? *: (>*)(.*)")
"""One bundle in a dumped schedule: its mark ("LB" starts a loop), a ">" for each loop around it, its instructions."""
_BRANCH = re.compile(r"sbr\.rel .*?target = \$region(\d+)")
"""A branch over a region, with the region's number."""


def prepare() -> None:
    """Set the environment variables that the compilers for absent chips read when they are loaded.

    XLA flags for the CPU are dropped, because a compiler ends the process if it does not support a flag.
    """
    cpu_flags = ("--xla_force_host_platform_device_count", "--xla_cpu_")
    other_flags = [flag for flag in os.environ.get("XLA_FLAGS", "").split() if not flag.startswith(cpu_flags)]
    os.environ["XLA_FLAGS"] = " ".join(other_flags)
    defaults = {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "true", "MOSAIC_GPU_DUMP_PTXAS": "1"}
    for name, value in defaults.items():
        os.environ.setdefault(name, value)


@contextlib.contextmanager
def schedule_folder() -> Iterator[pathlib.Path]:
    """A context with a temporary folder into which libtpu dumps its schedules.

    libtpu must be loaded inside the context, in this process or in one of its child processes.
    """
    earlier_args = os.environ.get("LIBTPU_INIT_ARGS")
    with tempfile.TemporaryDirectory(prefix="schedules-") as folder:
        flags = f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true"
        os.environ["LIBTPU_INIT_ARGS"] = f"{earlier_args or ''} {flags}".strip()
        try:
            yield pathlib.Path(folder)
        finally:
            del os.environ["LIBTPU_INIT_ARGS"]
            if earlier_args is not None:
                os.environ["LIBTPU_INIT_ARGS"] = earlier_args


def device(chip: str) -> tuple[Any, bool]:
    """Return a device to compile for.

    Args:
        chip: a name of `TPUS` or `GPUS`.

    Returns:
        A pair: the first device of this machine if it is this chip, else the description of such a device; and whether
        the device is on this machine.

    Raises:
        ValueError: the chip is not on this machine, and its compiler is not installed.
    """
    import jax

    from pallas_kernels.target import target

    local_device = jax.devices()[0]
    platform = "tpu" if chip in TPUS else "gpu"
    if local_device.platform == platform and target(f"{platform} {local_device.device_kind}").chip == chip:
        return local_device, True
    module, extra = ("libtpu", "aot-tpu") if platform == "tpu" else ("jax_plugins", "aot-gpu")
    if importlib.util.find_spec(module) is None:
        raise ValueError(
            f"{chip} is not here, and its compiler is not installed: pip install jaxscale[{extra}], or run this on a "
            f"machine that has a {chip}"
        )
    from jax.experimental import topologies

    if platform == "tpu":
        topology: Any = topologies.get_topology_desc(platform="tpu", topology_name=TPUS[chip])
    else:
        memory, bandwidth = GPUS[chip]
        config = _H100.format(memory=memory, bandwidth=bandwidth, name=chip.upper())
        topology = topologies.get_topology_desc(platform="cuda", target_config=config, topology="1x1x1")
    return topology.devices[0], False


@dataclasses.dataclass(frozen=True)
class Compiled:
    """The result of compiling a program.

    Args:
        program: a `jax.stages.Compiled`; `None` if the compiler refused the program.
        refusal: the compiler's error; `None` if it compiled the program.
        temporary_bytes: memory that the program needs besides its arguments and results.
        compiler_output: what the compiler printed.
    """

    program: Any = None
    refusal: str | None = None
    temporary_bytes: int = 0
    compiler_output: str = ""

    @property
    def spilled_bytes(self) -> int:
        """Bytes of register spills, stores plus loads, summed over all kernels."""
        return spilled_bytes(self.compiler_output)


def spilled_bytes(compiler_output: str) -> int:
    """Sum the bytes of register spills, stores plus loads, over all kernels that ptxas reports on.

    Example:
        >>> spilled_bytes('''
        ... ptxas warning : Registers are spilled to local memory in 'a', 8 bytes spill stores, 16 bytes spill loads
        ...     24 bytes stack frame, 8 bytes spill stores, 16 bytes spill loads
        ... ''')
        24
    """
    return sum(int(stores) + int(loads) for stores, loads in _SPILLS.findall(compiler_output))


def compile_for(
    device: Any, function: Callable[..., Any], arg_shapes: Sequence[Any], *, donated: tuple[int, ...] = ()
) -> Compiled:
    """Compile a function for one device.

    Args:
        device: a device, or the description of a device.
        function: a function of arrays.
        arg_shapes: one tree of `jax.ShapeDtypeStruct` per argument.
        donated: indices of the arguments that are changed in place.
    """
    import jax
    from jax.sharding import AxisType, NamedSharding

    mesh = jax.make_mesh((1,), ("x",), axis_types=(AxisType.Auto,), devices=[device])
    sharding = NamedSharding(mesh, jax.P())
    sharded_shapes = jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding), tuple(arg_shapes)
    )
    try:
        with captured_output() as texts, jax.set_mesh(mesh):
            program: Any = jax.jit(function, donate_argnums=donated).lower(*sharded_shapes).compile()
    except Exception as error:  # the caller reports the refusal
        return Compiled(refusal=f"{type(error).__name__}: {str(error).splitlines()[0][:160]}")
    return Compiled(program, None, program.memory_analysis().temp_size_in_bytes, "".join(texts))


@contextlib.contextmanager
def captured_output() -> Iterator[list[str]]:
    """Capture what this process and its compilers, ptxas included, print to standard output.

    Returns:
        A list that is empty until the context ends. After that, its only element is the output.
    """
    texts: list[str] = []
    with tempfile.TemporaryFile() as file:
        sys.stdout.flush()
        stdout = os.dup(1)
        os.dup2(file.fileno(), 1)
        try:
            yield texts
        finally:
            sys.stdout.flush()
            os.dup2(stdout, 1)
            os.close(stdout)
            file.seek(0)
            texts.append(file.read().decode("utf-8", "replace"))


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Numbers of bundles in the parts of a kernel's schedule.

    Args:
        always: number of bundles of one step of the grid that lie outside of all regions.
        regions: number of bundles of each region (code under a condition) of a step, in program order.
        loops: number of bundles of one iteration of each loop within a step, in program order.
        outside: number of bundles before and after the loop over the grid.
        load_by_unit: share of each hardware unit's capacity that the kernel's bundles use, from 0 to 1, by unit name.
    """

    always: int
    regions: tuple[int, ...]
    loops: tuple[int, ...] = ()
    outside: int = 0
    load_by_unit: Mapping[str, float] = dataclasses.field(default_factory=dict[str, float])

    @property
    def step(self) -> int:
        """Number of bundles of one step of the grid."""
        return self.always + sum(self.regions)

    @property
    def total(self) -> int:
        """Number of bundles of the whole schedule, with one step of the grid."""
        return self.outside + self.step

    def longest_regions(self, count: int) -> tuple[int, ...]:
        """Return the numbers of bundles of the `count` longest regions, in program order."""
        indices = sorted(range(len(self.regions)), key=lambda i: -self.regions[i])[:count]
        return tuple(self.regions[i] for i in sorted(indices))


def parse_schedule(text: str) -> Schedule:
    """Parse a schedule that libtpu dumped (`*-final_bundles.txt`).

    Example:
        >>> parse_schedule('''
        ...      0   :  { nop }
        ...    0x1 LB: > { %1 = sbr.rel (%p1) target = $region8 }
        ...    0x2   : > { nop }
        ...    0x3   : > { nop }
        ...    0x4 PF: > { nop } /* Start/End empty region 8 :: Start region 9 */
        ... ''')
        Schedule(always=2, regions=(2,), loops=(), outside=1, load_by_unit={})
    """
    bundles = [(match[1], len(match[2]), match[3]) for match in map(_BUNDLE.match, text.splitlines()) if match]
    step_bundles = [instructions for _, depth, instructions in bundles if depth]
    always, regions = _count_regions(step_bundles, 0, len(step_bundles))
    loops: list[int] = []
    for mark, depth, _ in bundles:
        if depth > 1:
            loops += [0] if mark == "LB" or not loops else []
            loops[-1] += 1
    return Schedule(always, tuple(regions), tuple(loops), len(bundles) - len(step_bundles))


def _count_regions(bundles: Sequence[str], start: int, end: int) -> tuple[int, list[int]]:
    """Count the bundles from `start` to `end` (exclusive): those that always run, and those of each region.

    If nested regions take most of a region, the parts of that region are counted separately, as if it always ran.
    """
    regions: list[int] = []
    always, index = 0, start
    while index < end:
        branch = _BRANCH.search(bundles[index])
        index, always = index + 1, always + 1
        if branch is None:
            continue
        region_name = re.compile(rf"[Rr]egion {branch[1]}\b")
        region_ends = (i for i in range(index, min(end + 1, len(bundles))) if region_name.search(bundles[i]))
        region_end = next(region_ends, None)
        if region_end is None:  # the branch goes back, to the start of the loop over the grid
            continue
        inner_always, inner_regions = _count_regions(bundles, index, region_end)
        is_mostly_regions = sum(inner_regions) > inner_always
        always += inner_always if is_mostly_regions else 0
        regions += inner_regions if is_mostly_regions else [region_end - index]
        index = region_end
    return always, regions


def parse_unit_loads(text: str) -> Mapping[str, float]:
    """Parse how much of each hardware unit a schedule uses (`*-final_hlo-static-per-bundle-utilization.txt`).

    Returns:
        The used share of each unit's capacity, by name of the unit.

    Example:
        >>> parse_unit_loads("== CAPACITY:\\nMATMUL, SALU\\n   4   2\\n== UTILIZATION:\\n4 0\\n2 1\\n")
        {'MATMUL': 0.75, 'SALU': 0.25}
    """
    _, unit_line, capacity_line, _, *bundle_lines = (line for line in text.splitlines() if line.strip())
    loads_by_unit = zip(*([int(word) for word in line.split()] for line in bundle_lines), strict=True)
    capacities = (int(word) * len(bundle_lines) for word in capacity_line.split())
    units = unit_line.split(", ")
    return {unit: sum(loads) / capacity for unit, loads, capacity in zip(units, loads_by_unit, capacities, strict=True)}


def take_schedules(folder: pathlib.Path) -> Mapping[str, Schedule]:
    """Return the schedules of the kernels compiled since the last call, by kernel name; empty the folder."""
    load_by_unit, schedules = {}, {}
    for file in folder.glob("*-final_hlo-static-per-bundle-utilization.txt"):
        load_by_unit[re.sub(r"-\d+-final_hlo.*$", "", file.name)] = parse_unit_loads(file.read_text())
    for file in sorted(folder.glob("*-final_bundles.txt")):
        if "schedule-analysis" not in file.name:
            dump_name = re.sub(r"-\d+-final_bundles.*$", "", file.name)
            schedule = parse_schedule(file.read_text())
            kernel = re.sub(r"^\d+-|\.\d+$", "", dump_name)
            schedules[kernel] = dataclasses.replace(schedule, load_by_unit=load_by_unit.get(dump_name, {}))
    shutil.rmtree(folder)
    folder.mkdir()
    return schedules
