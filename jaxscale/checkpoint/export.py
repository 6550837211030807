"""Exports a run's model to a folder that Hugging Face's transformers can read."""

from pathlib import Path
from typing import Any, Literal

from jaxscale.errors import UserError
from jaxscale.records.directory import EXPERIMENT
from jaxscale.records.storage import check_location, is_remote


def export(
    run: Any, folder: Any, *, best: bool = False, dtype: Literal["float32", "bfloat16", "float16"] = "float32"
) -> Path:
    """Write a run's model as config.json and safetensors files, with the run's tokenizer if it is a subword tokenizer.

    Args:
        run: the run directory.
        folder: the folder to create; it must not contain a model.
        best: whether to take the checkpoint with the lowest held-out loss instead of the newest one.
        dtype: dtype of the weights in the files.

    Returns:
        The folder.

    Raises:
        UserError: `run` has no run or checkpoint, or transformers has no equivalent of the model.
    """
    check_location(folder)
    if is_remote(folder):
        raise UserError(f"{folder} is in a bucket: give a local folder for the model, and copy it there")
    if (Path(folder) / EXPERIMENT).exists():
        raise UserError(f"{folder} is the directory of a run: give a new folder for the model")
    from jaxscale.checkpoint.restore import read_tokenizer, restore_parameters
    from jaxscale.models import huggingface
    from jaxscale.models.lora import LoRA
    from jaxscale.state.ema import averaged

    trained = restore_parameters(run, best=best)
    trained_model = trained.experiment.model
    arrays = trained.step.to_canonical(averaged(trained.state))
    params = {
        name.partition("/")[2].replace("/", "."): array for name, array in arrays.items() if name.startswith("params/")
    }
    if isinstance(trained_model, LoRA):
        params, trained_model = trained_model.merged(params), trained_model.model
    exported_model = getattr(trained_model, "model", trained_model)  # `Pretrained` wraps a model in `model`
    huggingface.save(folder, exported_model, params, dtype)
    tokenizer = read_tokenizer(run)
    if tokenizer is not None and tokenizer.kind == "subword":
        (Path(folder) / "tokenizer.json").write_text(tokenizer.definition, encoding="utf-8")
    return Path(folder)
