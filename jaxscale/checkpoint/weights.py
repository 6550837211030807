"""Sources of a new run's initial weights: an earlier run, one of its checkpoints, or a folder of transformers.

`WeightSource.open` reads only names and shapes; `load` reads arrays, in the requested layout. Names are those of
checkpoints, with one array for each layer, so that a deeper model can take the existing layers. If a run keeps an
average of its weights, the average is read, as in evaluation, generation and export.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from jaxscale.checkpoint.store import Checkpoints
from jaxscale.checkpoint.verified import DamagedError, is_step_name, read_content
from jaxscale.errors import UserError
from jaxscale.records.directory import CHECKPOINTS, EXPERIMENT
from jaxscale.records.processes import call_on_all, send_from_first
from jaxscale.records.storage import check_location, run_path
from jaxscale.state.canonical import PARAMS, REST
from jaxscale.state.ema import EMA

Loader = Callable[[Mapping[str, Any], Callable[[str], None]], dict[str, Any]]
"""A function that reads arrays and returns them by name. Its arguments are the shape, dtype and sharding of each array
to read, by name, and a function that is called with messages for the user."""


@dataclasses.dataclass(frozen=True)
class WeightSource:
    """Weights that another run may start from.

    Args:
        path: path of the weights.
        step: step of the checkpoint; `None` for a folder of transformers.
        shapes: shape of each array of parameters and statistics, by its name in a checkpoint.
        is_average: whether the trained parameters are an average of weights.
        load: function that reads arrays. Each array must be requested with its shape in `shapes`.
    """

    path: str
    step: int | None
    shapes: Mapping[str, tuple[int, ...]]
    is_average: bool
    load: Loader

    def __str__(self) -> str:
        average_text = ", the average of weights (ema)" if self.is_average else ""
        return f"{self.path}{'' if self.step is None else f' after step {self.step:,}'}{average_text}"

    @classmethod
    def open(cls, path: Any, step: int | None = None) -> "WeightSource":
        """Open weights by their path; every process calls this.

        Args:
            path: the directory of a run, the folder of one of its checkpoints, or a folder that `jaxscale export` or
                transformers wrote.
            step: step of the run's checkpoint; by default the newest one that can be read.

        Raises:
            UserError: there are no weights, or they cannot be read.
        """
        check_location(path)
        folder = run_path(path)

        def find_kind() -> str:
            """Return what the path holds: "run", "checkpoint" or "transformers"."""
            if (folder / EXPERIMENT).exists():
                return "run"
            if is_step_name(folder.name) and folder.is_dir():
                return "checkpoint"
            if (folder / "config.json").exists():
                return "transformers"
            raise UserError(
                f"{path} holds no weights: expected the directory of a run, the folder of a checkpoint "
                f"(RUN/{CHECKPOINTS}/00000500), or a folder with config.json and safetensors, as jaxscale export "
                "writes it"
            )

        path_kind = call_on_all(find_kind, LookupError)
        if path_kind == "run":
            return cls._of_run(str(path), folder / CHECKPOINTS, step)
        if path_kind == "checkpoint":
            return cls._of_run(str(path), folder.parent, int(folder.name))
        return call_on_all(lambda: cls._of_transformers(str(path)), LookupError)

    @classmethod
    def _of_run(cls, path: str, folder: Any, step: int | None) -> "WeightSource":
        """Open a step's checkpoint in a run's folder of checkpoints; `None` opens the newest one that can be read."""
        checkpoints = Checkpoints(folder, write=False)
        steps = send_from_first(checkpoints.steps())
        if not steps or (step is not None and step not in steps):
            steps_text = f"; there are {', '.join(map(str, steps))}" if steps else ""
            raise UserError(
                f"{path} has no checkpoint {'yet' if step is None else f'of step {step} any more'}{steps_text}: give a "
                "run or a checkpoint that has weights"
            )

        def read_facts() -> tuple[int, dict[str, Any]]:
            """Return the step of the checkpoint to open, and (shape, dtype, checksums) of its arrays by name."""
            reason_texts: list[str] = []
            for saved_step in [step] if step is not None else reversed(steps):
                try:
                    return saved_step, read_content(checkpoints.folder / f"{saved_step:08d}")["arrays"]
                except DamagedError as error:
                    reason_texts.append(f"step {saved_step}: {error}")
            raise UserError(f"{path} has no checkpoint that can be read ({'; '.join(reason_texts)}); give another one")

        read_step, facts_by_name = call_on_all(read_facts, LookupError)
        is_average = any(name.startswith(f"{EMA}/") for name in facts_by_name)
        saved_name_by_name: dict[str, str] = {}
        for name, array_facts in facts_by_name.items():
            first_name, _, other_names = name.partition("/")
            if first_name in (PARAMS, REST) and not str(array_facts[1]).startswith("key<"):  # not a random key
                saved_name_by_name[name] = (
                    f"{EMA}/{other_names}" if first_name == PARAMS and f"{EMA}/{other_names}" in facts_by_name else name
                )

        def load(abstract_leaves: Mapping[str, Any], say: Callable[[str], None]) -> dict[str, Any]:
            abstract_saved = {saved_name_by_name[name]: leaf for name, leaf in abstract_leaves.items()}
            try:
                restored = checkpoints.restore_arrays(abstract_saved, step=read_step, say=say)
            except UserError as error:
                others_text = ", ".join(f"{folder}/{saved_step:08d}" for saved_step in steps if saved_step != read_step)
                raise UserError(
                    f"{path}: {error}; or give another checkpoint: {others_text or 'there is none'}"
                ) from error
            assert restored is not None
            return {name: restored.arrays[saved_name_by_name[name]] for name in abstract_leaves}

        shapes = {name: tuple(facts_by_name[saved_name][0]) for name, saved_name in saved_name_by_name.items()}
        return cls(path, read_step, shapes, is_average, load)

    @classmethod
    def _of_transformers(cls, path: str) -> "WeightSource":
        """Open a folder with config.json and safetensors, whose tensors get the names of our parameters."""
        from jaxscale.models.huggingface import read_config
        from jaxscale.models.huggingface_tensors import Stacked, flat_leaves, open_params
        from jaxscale.state.naming import layer_name

        family, model = read_config(path)
        array_by_name: dict[str, Any] = {}
        for leaf_path, leaf in flat_leaves(open_params(path, family, model)):
            name = f"{PARAMS}/{leaf_path.replace('.', '/')}"
            if isinstance(leaf, Stacked):
                array_by_name |= {layer_name(name, index): layer for index, layer in enumerate(leaf.layers)}
            else:
                array_by_name[name] = leaf

        def load(abstract_leaves: Mapping[str, Any], say: Callable[[str], None]) -> dict[str, Any]:
            import jax

            def place(array: Any, leaf: Any) -> Any:
                """Put an array on the devices; each process reads only what its devices need."""
                return jax.make_array_from_callback(
                    leaf.shape, leaf.sharding, lambda index: np.asarray(array[index], leaf.dtype)
                )

            return {name: place(array_by_name[name], leaf) for name, leaf in abstract_leaves.items()}

        return cls(path, None, {name: tuple(array.shape) for name, array in array_by_name.items()}, False, load)
