"""Placement of arrays: MeshSpec, AxisRules, ZeRO, constrain."""

from typing import TYPE_CHECKING

from jaxscale.lazy import lazy_names

_MODULE_BY_NAME = {
    "AXES": "jaxscale.sharding.mesh",
    "AxisRules": "jaxscale.sharding.rules",
    "MeshSpec": "jaxscale.sharding.mesh",
    "Placement": "jaxscale.sharding.zero",
    "constrain": "jaxscale.sharding.place",
    "on_host": "jaxscale.sharding.memory_space",
    "placement": "jaxscale.sharding.zero",
    "spec": "jaxscale.sharding.place",
    "to_device": "jaxscale.sharding.memory_space",
    "to_host": "jaxscale.sharding.memory_space",
}
"""For each public name, the module that defines it. The module is imported when the name is first used."""

if TYPE_CHECKING:
    from jaxscale.sharding.memory_space import on_host, to_device, to_host
    from jaxscale.sharding.mesh import AXES, MeshSpec
    from jaxscale.sharding.place import constrain, spec
    from jaxscale.sharding.rules import AxisRules
    from jaxscale.sharding.zero import Placement, placement

__all__ = [
    "AXES", "AxisRules", "MeshSpec", "Placement", "constrain", "on_host", "placement", "spec", "to_device",
    "to_host",
]  # fmt: skip

__getattr__ = lazy_names(__name__, _MODULE_BY_NAME)
