"""XLA's target configuration of a GPU, as text, for compiling for a GPU that is not attached.

`TARGETS` has the values that the driver reports for each card, as recorded in XLA's own specifications (openxla/xla,
xla/backends/gpu/target_config/specs). The memory bandwidth comes from the chip table (`platforms/gpu.py`). Left out:
autotuning, which needs the card. Without it XLA uses its defaults: the compiled program takes as much memory as a tuned
program, but not the same time.
"""

import dataclasses

from jaxscale.errors import UserError
from jaxscale.platforms.platform import Chip, Platform

_SPECS = "openxla/xla, xla/backends/gpu/target_config/specs"


@dataclasses.dataclass(frozen=True)
class GpuTarget:
    """Values that XLA's GPU compiler needs.

    Args:
        capability: CUDA compute capability (major, minor).
        core_count: number of streaming multiprocessors.
        units_per_core: number of float32 units of one multiprocessor.
        clock_ghz: clock rate in GHz.
        cache_bytes: bytes of the L2 cache.
        shared_bytes: bytes of shared memory of one multiprocessor; a block may use 1 KiB less.
        memory_bytes: bytes of device memory as the driver reports them.
        source: file from which the values come.
    """

    capability: tuple[int, int]
    core_count: int
    units_per_core: int
    clock_ghz: float
    cache_bytes: int
    shared_bytes: int
    memory_bytes: int
    source: str


_A100 = GpuTarget((8, 0), 108, 64, 1.41, 41943040, 167936, 85100068864, f"{_SPECS}/a100_sxm_80.txtpb")
_H100 = GpuTarget((9, 0), 132, 128, 1.98, 52428800, 233472, 84942979072, f"{_SPECS}/h100_sxm.txtpb")
TARGETS = {
    "a100-40": dataclasses.replace(_A100, memory_bytes=42331013120, source=f"{_SPECS}/a100_sxm_40.txtpb"),
    "a100-80": _A100,
    "a100-80-pcie": dataclasses.replace(
        _A100, clock_ghz=1.1105, memory_bytes=79050250240, source=f"{_SPECS}/a100_pcie_80.txtpb"
    ),
    "h100": _H100,
    "h100-pcie": dataclasses.replace(_H100, core_count=114, clock_ghz=1.755, source=f"{_SPECS}/h100_pcie.txtpb"),
    "h200": dataclasses.replace(_H100, memory_bytes=151397597184, source=f"{_SPECS}/h200.txtpb"),
    "b200": GpuTarget((10, 0), 148, 128, 1.965, 132644864, 233472, 191514411008, f"{_SPECS}/b200.txtpb"),
}


def hides_latency(chip: Chip) -> bool:
    """Return whether XLA orders the operations of a GPU's programs so that computations hide messages.

    XLA uses its latency-hiding scheduler by default if it can model the seconds of the chip's collectives: from compute
    capability 9.0 on, as observed in programs compiled for A100 and H100.

    Example:
        >>> from jaxscale.platforms.gpu import A100_80, H100
        >>> hides_latency(A100_80), hides_latency(H100)
        (False, True)
    """
    target = TARGETS.get(chip.name)
    return target is not None and target.capability >= (9, 0)


def target_config(chip: Chip) -> str:
    """Return XLA's target configuration of a GPU, in the text form that `jax.experimental.topologies` takes.

    Raises:
        UserError: the GPU is not in `TARGETS`.

    Example:
        >>> from jaxscale.platforms.gpu import H100
        >>> "core_count: 132" in target_config(H100)
        True
    """
    target = TARGETS.get(chip.name)
    if target is None:
        raise UserError(
            f"programs cannot be compiled ahead of time for gpu {chip.name}: compiler/gpu_target.py lacks its data; "
            f"expected one of {', '.join(TARGETS)}"
        )
    device_info = {
        "threads_per_block_limit": 1024,
        "threads_per_warp": 32,
        "shared_memory_per_block": 49152,
        "shared_memory_per_core": target.shared_bytes,
        "shared_memory_per_block_optin": target.shared_bytes - 1024,
        "threads_per_core_limit": 2048,
        "core_count": target.core_count,
        "fpus_per_core": target.units_per_core,
        "block_dim_limit_x": 2147483647,
        "block_dim_limit_y": 65535,
        "block_dim_limit_z": 65535,
        "memory_bandwidth": int(chip.memory_bandwidth or 0),
        "l2_cache_size": target.cache_bytes,
        "clock_rate_ghz": target.clock_ghz,
        "device_memory_size": target.memory_bytes,
        "registers_per_core_limit": 65536,
        "registers_per_block_limit": 65536,
    }
    major, minor = target.capability
    info_text = "\n".join(f"  {name}: {value}" for name, value in device_info.items())
    return (
        f"gpu_device_info {{\n{info_text}\n  cuda_compute_capability {{ major: {major} minor: {minor} }}\n}}\n"
        'platform_name: "CUDA"\ndnn_version_info { major: 9 minor: 8 }\nruntime_version { major: 13 }\n'
        f'device_description_str: "{chip.device_kinds[0]}"\n'
    )


def topology_text(platform: Platform) -> str:
    """Return a GPU platform's topology as text, such as "1x2x8" for 16 GPUs in hosts of 8.

    The text gives the number of slices, the number of hosts, and the number of GPUs per host.

    Raises:
        UserError: the GPUs do not fill their hosts.
    """
    gpus_per_host = platform.chip.chips_per_host or platform.chips
    host_count, leftover_gpu_count = divmod(platform.chips, gpus_per_host)
    if host_count == 0:
        return f"1x1x{platform.chips}"
    if leftover_gpu_count:
        raise UserError(
            f"{platform}: {platform.chips} GPUs do not fill hosts of {gpus_per_host}: "
            f"expected at most {gpus_per_host}, or a multiple of it"
        )
    return f"1x{host_count}x{gpus_per_host}"
