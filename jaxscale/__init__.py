"""jaxscale: large-scale training on JAX. Your model, your platform, every technique.

Importing this package imports neither JAX nor Flax: each name loads on first use.
"""

from typing import TYPE_CHECKING

from jaxscale.lazy import lazy_names

__version__ = "0.1.0"

_WHERE = {
    "Experiment": "jaxscale.recipe.experiment",
    "Plan": "jaxscale.recipe.plan",
    "Platform": "jaxscale.platforms.platform",
    "MeshSpec": "jaxscale.sharding.mesh",
    "UserError": "jaxscale.errors",
    "train": "jaxscale.training.loop",
    "Run": "jaxscale.training.run",
    "MemoryPlan": "jaxscale.memory.plan",
    "explain": "jaxscale.planning.explain",
    "fit": "jaxscale.planning.fit",
    "menu": "jaxscale.planning.menu",
}
"""Module of each public name."""

if TYPE_CHECKING:
    from jaxscale.errors import UserError
    from jaxscale.memory.plan import MemoryPlan
    from jaxscale.planning.explain import explain
    from jaxscale.planning.fit import fit
    from jaxscale.planning.menu import menu
    from jaxscale.platforms.platform import Platform
    from jaxscale.recipe.experiment import Experiment
    from jaxscale.recipe.plan import Plan
    from jaxscale.sharding.mesh import MeshSpec
    from jaxscale.training.loop import train
    from jaxscale.training.run import Run

__all__ = [
    "Experiment", "MemoryPlan", "MeshSpec", "Plan", "Platform", "Run", "UserError", "__version__", "explain", "fit",
    "menu", "train",
]  # fmt: skip

__getattr__ = lazy_names(__name__, _WHERE)


def __dir__() -> list[str]:
    return sorted(__all__)
