"""jaxscale: large-scale training on JAX. Your model, your platform, every technique.

The public names are those in `__all__`, of this package and of the packages `data`, `generation`, `launch`,
`layers`, `lowbit`, `memory`, `models`, `offload`, `optim`, `pipeline`, `replicas` and `sharding`; everything else may
change. Importing this package imports neither JAX nor Flax: each public name loads on first use.
"""

from typing import TYPE_CHECKING

from jaxscale.lazy import lazy_names

__version__ = "0.2.0"

_WINGS = (
    "data", "generation", "launch", "layers", "lowbit", "memory", "models", "offload", "optim", "pipeline", "replicas",
    "sharding",
)  # fmt: skip
_MODULE_BY_NAME = {
    "Checkpointing": "jaxscale.recipe.experiment",
    "Checkpoints": "jaxscale.checkpoint.store",
    "Context": "jaxscale.blocks",
    "EarlyStopping": "jaxscale.training.callbacks",
    "Evaluation": "jaxscale.recipe.experiment",
    "Event": "jaxscale.training.callbacks",
    "Experiment": "jaxscale.recipe.experiment",
    "Guard": "jaxscale.recipe.experiment",
    "Kernels": "jaxscale.recipe.kernels",
    "Loss": "jaxscale.blocks",
    "MemoryPlan": "jaxscale.memory.plan",
    "MeshSpec": "jaxscale.sharding.mesh",
    "ModelTraits": "jaxscale.model_traits",
    "OffloadPlan": "jaxscale.recipe.plan",
    "Optimizer": "jaxscale.optim.optimizer",
    "Plan": "jaxscale.recipe.plan",
    "PlanChoice": "jaxscale.planning.search.choice",
    "Platform": "jaxscale.platforms.platform",
    "Run": "jaxscale.training.run",
    "Samples": "jaxscale.recipe.experiment",
    "StatePlan": "jaxscale.recipe.plan",
    "TrainState": "jaxscale.state.train_state",
    "TrainStep": "jaxscale.step.train_step",
    "UserError": "jaxscale.errors",
    "build": "jaxscale.step.build",
    "choose_batch": "jaxscale.planning.search.batches",
    "choose_plan": "jaxscale.planning.search.choice",
    "compare": "jaxscale.report.comparison",
    "evaluate": "jaxscale.training.evaluate",
    "explain": "jaxscale.planning.explain",
    "export": "jaxscale.checkpoint.export",
    "fine_tuning": "jaxscale.recipe.fine_tuning",
    "fit": "jaxscale.planning.fit",
    "generate": "jaxscale.training.generate",
    "load_file": "jaxscale.records.source",
    "menu": "jaxscale.planning.menu",
    "override": "jaxscale.values",
    "train": "jaxscale.training.loop",
}
"""Module of each public name."""

if TYPE_CHECKING:
    from jaxscale import (
        data,
        generation,
        launch,
        layers,
        lowbit,
        memory,
        models,
        offload,
        optim,
        pipeline,
        replicas,
        sharding,
    )
    from jaxscale.blocks import Context, Loss
    from jaxscale.checkpoint.export import export
    from jaxscale.checkpoint.store import Checkpoints
    from jaxscale.errors import UserError
    from jaxscale.memory.plan import MemoryPlan
    from jaxscale.model_traits import ModelTraits
    from jaxscale.optim.optimizer import Optimizer
    from jaxscale.planning.explain import explain
    from jaxscale.planning.fit import fit
    from jaxscale.planning.menu import menu
    from jaxscale.planning.search.batches import choose_batch
    from jaxscale.planning.search.choice import PlanChoice, choose_plan
    from jaxscale.platforms.platform import Platform
    from jaxscale.recipe.experiment import Checkpointing, Evaluation, Experiment, Guard, Samples
    from jaxscale.recipe.fine_tuning import fine_tuning
    from jaxscale.recipe.kernels import Kernels
    from jaxscale.recipe.plan import OffloadPlan, Plan, StatePlan
    from jaxscale.records.source import load_file
    from jaxscale.report.comparison import compare
    from jaxscale.sharding.mesh import MeshSpec
    from jaxscale.state.train_state import TrainState
    from jaxscale.step.build import build
    from jaxscale.step.train_step import TrainStep
    from jaxscale.training.callbacks import EarlyStopping, Event
    from jaxscale.training.evaluate import evaluate
    from jaxscale.training.generate import generate
    from jaxscale.training.loop import train
    from jaxscale.training.run import Run
    from jaxscale.values import override

__all__ = [
    "Checkpointing", "Checkpoints", "Context", "EarlyStopping", "Evaluation", "Event", "Experiment", "Guard",
    "Kernels", "Loss", "MemoryPlan", "MeshSpec", "ModelTraits", "OffloadPlan", "Optimizer", "Plan", "PlanChoice",
    "Platform", "Run", "Samples", "StatePlan", "TrainState", "TrainStep", "UserError", "__version__", "build",
    "choose_batch", "choose_plan", "compare", "data", "evaluate", "explain", "export", "fine_tuning", "fit", "generate",
    "generation", "launch", "layers", "load_file", "lowbit", "memory", "menu", "models", "offload", "optim", "override",
    "pipeline", "replicas", "sharding", "train",
]  # fmt: skip

__getattr__ = lazy_names(__name__, _MODULE_BY_NAME, _WINGS)


def __dir__() -> list[str]:
    return sorted(__all__)
