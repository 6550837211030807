"""How another process gets a platform's devices: the backend, its arguments and the environment.

An attached device is requested by its backend's name. A TPU that is not attached is described to libtpu by the name of
its topology. A GPU that is not attached is described to the CUDA plugin by a configuration of the card.
"""

import dataclasses
import importlib.metadata
import os
from collections.abc import Collection, Mapping
from typing import Any, Literal

from jaxscale.compiler import trust
from jaxscale.compiler.gpu_target import target_config, topology_text
from jaxscale.errors import UserError
from jaxscale.platforms.platform import Platform

_PLUGIN_PACKAGES = ("jax-cuda13-pjrt", "jax-cuda12-pjrt")
# these variables would send the child to other devices, or to a cache that it cannot read
_NOT_INHERITED_VARIABLES = ("JAX_NUM_CPU_DEVICES", "JAX_COMPILATION_CACHE_DIR", "JAX_COORDINATOR_ADDRESS")


@dataclasses.dataclass(frozen=True)
class Target:
    """How to get a platform's devices.

    Args:
        backend: name of JAX's backend.
        environment: whole environment of the child process; JAX reads it when it is first imported.
        attached: whether the devices are on this machine; if not, `arguments` describe them.
        arguments: keyword arguments of `jax.experimental.topologies.get_topology_desc`, except `platform`.
        compiler: versions of the compiler, by package.
    """

    backend: Literal["tpu", "cuda", "cpu"]
    environment: Mapping[str, str]
    attached: bool
    arguments: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    compiler: Mapping[str, str] = dataclasses.field(default_factory=dict)


def target(platform: Platform, accelerator_kinds: Collection[str]) -> Target:
    """Return how another process gets a platform's devices.

    Args:
        platform: the platform.
        accelerator_kinds: kinds of accelerators that this machine has ("tpu", "gpu").

    Raises:
        UserError: the platform's compiler is missing, differs from jaxlib in version, or cannot describe the devices.
    """
    environment = {name: value for name, value in os.environ.items() if name not in _NOT_INHERITED_VARIABLES}
    chip_kind = platform.chip.kind
    flags = environment.get("XLA_FLAGS", "").split()
    # a compiler aborts at a flag of another compiler
    foreign_prefixes = tuple(f"--xla_{backend}_" for backend in ("cpu", "gpu", "tpu") if backend != chip_kind)
    dropped_prefixes = ("--xla_force_host_platform_device_count", *foreign_prefixes)
    environment["XLA_FLAGS"] = " ".join(flag for flag in flags if not flag.startswith(dropped_prefixes))
    if chip_kind == "cpu":
        return Target("cpu", environment | {"JAX_PLATFORMS": "cpu"}, attached=True)
    describe_target = _tpu_target if chip_kind == "tpu" else _gpu_target
    return describe_target(platform, environment, chip_kind in accelerator_kinds)


def _tpu_target(platform: Platform, environment: dict[str, str], is_attached: bool) -> Target:
    """Return how another process with this environment gets TPUs, attached or described."""
    libtpu_version = trust.libtpu(environment)
    if libtpu_version is None:
        raise UserError(
            f"{platform}: its compiler is not installed; install jaxscale[aot-tpu] (libtpu, 600 MB unpacked)"
        )
    if is_attached:
        return Target("tpu", environment | {"JAX_PLATFORMS": "tpu,cpu"}, True, compiler={"libtpu": libtpu_version})
    if platform.topology is None:
        raise UserError(
            f"{platform}: its chips do not form a box, which the compiler needs; specify a slice, as in tpu v5e:4x4"
        )
    environment |= {
        "JAX_PLATFORMS": "cpu",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "true",  # several processes may load libtpu, because none uses a chip
        "TPU_SKIP_MDS_QUERY": "1",  # there is no metadata server
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    }
    chip_name = platform.chip.name
    topology_chip_name = "tpu7x" if chip_name == "7x" else chip_name
    arguments: dict[str, Any] = {"topology_name": f"{topology_chip_name}:{'x'.join(map(str, platform.topology))}"}
    if platform.slices > 1:
        arguments["num_slices"] = platform.slices
    if chip_name == "v4":
        arguments["chip_config_name"] = "megacore"  # without it, a chip is two devices
    return Target("tpu", environment, False, arguments, {"libtpu": libtpu_version})


def _gpu_target(platform: Platform, environment: dict[str, str], is_attached: bool) -> Target:
    """Return how another process with this environment gets GPUs, attached or described."""
    plugin_version = next((version for name in _PLUGIN_PACKAGES if (version := _installed_version(name))), None)
    if is_attached:
        # a run may hold the card's memory already
        environment |= {"JAX_PLATFORMS": "cuda,cpu", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
        return Target("cuda", environment, True, compiler={"cuda plugin": plugin_version or "of the system"})
    arguments = {"target_config": target_config(platform.chip), "topology": topology_text(platform)}
    if plugin_version is None:
        raise UserError(
            f"{platform}: its compiler is not installed; install jaxscale[aot-gpu] (the CUDA plugin, 400 MB)"
        )
    jaxlib_version = _installed_version("jaxlib")
    if plugin_version != jaxlib_version:
        raise UserError(
            f"{platform}: the CUDA plugin has version {plugin_version}, jaxlib {jaxlib_version}; install equal versions"
        )
    return Target("cuda", environment | {"JAX_PLATFORMS": "cpu"}, False, arguments, {"cuda plugin": plugin_version})


def _installed_version(package: str) -> str | None:
    """Return the installed version of a package; None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
