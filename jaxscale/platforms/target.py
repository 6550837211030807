"""How another process gets a platform's devices: which backend, with which arguments, under which environment.

An attached device is asked for by its backend's name; one that is not here is described to libtpu by the name of its
topology, to the CUDA plugin by a configuration of the card.
"""

import dataclasses
import importlib.metadata
import os
from collections.abc import Collection, Mapping
from typing import Any, Literal

from jaxscale.errors import UserError
from jaxscale.platforms import trust
from jaxscale.platforms.gpu_target import target_config, topology_text
from jaxscale.platforms.platform import Platform

_PLUGINS = ("jax-cuda13-pjrt", "jax-cuda12-pjrt")
# they would send the child to other devices, or to a cache that it cannot read
_NOT_INHERITED = ("JAX_NUM_CPU_DEVICES", "JAX_COMPILATION_CACHE_DIR", "JAX_COORDINATOR_ADDRESS")


@dataclasses.dataclass(frozen=True)
class Target:
    """How to get a platform's devices.

    Args:
        backend: name of JAX's backend.
        environment: the child's whole environment, which JAX must find when it is first imported.
        attached: the devices are on this machine; else `arguments` describe them.
        arguments: of `jax.experimental.topologies.get_topology_desc`, after `platform`.
        compiler: versions of what compiles, by package.
    """

    backend: Literal["tpu", "cuda", "cpu"]
    environment: Mapping[str, str]
    attached: bool
    arguments: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    compiler: Mapping[str, str] = dataclasses.field(default_factory=dict)


def target(platform: Platform, attached: Collection[str]) -> Target:
    """How to get a platform's devices in another process.

    Args:
        platform: the platform.
        attached: kinds of accelerators that this machine has ("tpu", "gpu").

    Raises:
        UserError: the platform's compiler is missing, of another version than jaxlib, or cannot be told about the card.
    """
    environment = {name: value for name, value in os.environ.items() if name not in _NOT_INHERITED}
    kind = platform.chip.kind
    flags = environment.get("XLA_FLAGS", "").split()
    # a compiler dies of a flag that another one knows
    others = tuple(f"--xla_{other}_" for other in ("cpu", "gpu", "tpu") if other != kind)
    dropped = ("--xla_force_host_platform_device_count", *others)
    environment["XLA_FLAGS"] = " ".join(flag for flag in flags if not flag.startswith(dropped))
    if kind == "cpu":
        return Target("cpu", environment | {"JAX_PLATFORMS": "cpu"}, attached=True)
    here = kind in attached
    return _tpu(platform, environment, here) if kind == "tpu" else _gpu(platform, environment, here)


def _tpu(platform: Platform, environment: dict[str, str], here: bool) -> Target:
    compiler = trust.libtpu(environment)
    if compiler is None:
        raise UserError(
            f"{platform}: its compiler is missing here; install jaxscale[aot-tpu] (libtpu, 600 MB unpacked)"
        )
    if here:
        return Target("tpu", environment | {"JAX_PLATFORMS": "tpu,cpu"}, True, compiler={"libtpu": compiler})
    if platform.topology is None:
        raise UserError(f"{platform}: its chips form no box, so it cannot be described to the compiler; name a slice")
    environment |= {
        "JAX_PLATFORMS": "cpu",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "true",  # several processes may load libtpu: there is no chip to quarrel over
        "TPU_SKIP_MDS_QUERY": "1",  # nobody would answer
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    }
    chip = platform.chip.name
    name = "tpu7x" if chip == "7x" else chip
    arguments: dict[str, Any] = {"topology_name": f"{name}:{'x'.join(map(str, platform.topology))}"}
    if platform.slices > 1:
        arguments["num_slices"] = platform.slices
    if chip == "v4":
        arguments["chip_config_name"] = "megacore"  # else two devices a chip
    return Target("tpu", environment, False, arguments, {"libtpu": compiler})


def _gpu(platform: Platform, environment: dict[str, str], here: bool) -> Target:
    plugin = next((version for name in _PLUGINS if (version := _installed(name))), None)
    if here:
        # a run may hold the card's memory already
        environment |= {"JAX_PLATFORMS": "cuda,cpu", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
        return Target("cuda", environment, True, compiler={"cuda plugin": plugin or "of the system"})
    arguments = {"target_config": target_config(platform.chip), "topology": topology_text(platform)}
    if plugin is None:
        raise UserError(
            f"{platform}: its compiler is missing here; install jaxscale[aot-gpu] (the CUDA plugin, 400 MB)"
        )
    jaxlib = _installed("jaxlib")
    if plugin != jaxlib:
        raise UserError(
            f"{platform}: the CUDA plugin is {plugin} and jaxlib {jaxlib}; install the plugin of the same version"
        )
    return Target("cuda", environment | {"JAX_PLATFORMS": "cpu"}, False, arguments, {"cuda plugin": plugin})


def _installed(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
