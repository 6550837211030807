"""The modules that have moved to new import paths. Experiment files of earlier runs may still import the old paths.

If a new experiment file imports an old path, the error message gives the new path.
"""

import importlib
import re
import sys

MOVED = {
    "jaxscale.compression": "jaxscale.replicas",
    "jaxscale.compression.named": "jaxscale.replicas.named",
    "jaxscale.layers.attend": "jaxscale.layers.attend_on_mesh",
    "jaxscale.layers.low_precision": "jaxscale.lowbit.products",
    "jaxscale.layers.visibility": "pallas_kernels.attention.visibility",
    "jaxscale.memory.greedy": "jaxscale.memory.greedy_sets",
    "jaxscale.memory.offload": "jaxscale.offload.weights",
    "jaxscale.memory.policy_sets": "jaxscale.memory.save_set",
    "jaxscale.memory.rotor": "jaxscale.memory.rotor_table",
    "jaxscale.optim.diloco": "jaxscale.replicas.low_communication",
    "jaxscale.optim.galore": "jaxscale.optim.matrix.galore",
    "jaxscale.optim.hosted": "jaxscale.offload.wrapper",
    "jaxscale.optim.maps": "jaxscale.lowbit.codebooks",
    "jaxscale.optim.muon": "jaxscale.optim.matrix.muon",
    "jaxscale.optim.offloaded": "jaxscale.offload.updates",
    "jaxscale.optim.quantize": "jaxscale.lowbit.quantize",
    "jaxscale.optim.quantized": "jaxscale.lowbit.quantized",
    "jaxscale.optim.soap": "jaxscale.optim.matrix.soap",
    "jaxscale.optim.split_weights": "jaxscale.lowbit.split_weights",
    "jaxscale.pipeline.schedule": "jaxscale.pipeline.orders",
    "jaxscale.pipeline.weave": "jaxscale.pipeline.builders",
    "jaxscale.planning.cheapest": "jaxscale.planning.memory_search",
    "jaxscale.planning.settle": "jaxscale.planning.automatic_choices",
    "jaxscale.replicas.codecs.int4": "jaxscale.replicas.codecs.block_codes",
    "jaxscale.replicas.codecs.int8": "jaxscale.replicas.codecs.block_codes",
    "jaxscale.replicas.diloco": "jaxscale.replicas.low_communication",
    "jaxscale.slices": "jaxscale.tpu_slices",
    "jaxscale.step.experiment": "jaxscale.recipe.experiment",
    "jaxscale.step.kernels": "jaxscale.recipe.kernels",
    "jaxscale.step.plan": "jaxscale.recipe.plan",
    "jaxscale.step.state": "jaxscale.state.train_state",
}
"""Current import path of each moved module, by its path in an earlier version. Lines must never be removed."""


def provide_old_paths(text: str) -> None:
    """Make the old paths of moved modules importable in this process, if a Python file mentions these paths.

    Args:
        text: content of the file.
    """
    for old_path in set(re.findall(r"\bjaxscale(?:\.\w+)+", text)) & set(MOVED):
        sys.modules[old_path] = importlib.import_module(MOVED[old_path])


def new_import_path(error: ImportError) -> str | None:
    """Return the current path of the module that an import failed to find; `None` if that module has not moved.

    Example:
        >>> new_import_path(ModuleNotFoundError(name="jaxscale.step.plan"))
        'jaxscale.recipe.plan'
    """
    return MOVED.get(error.name or "")
