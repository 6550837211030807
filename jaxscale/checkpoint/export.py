"""Exports a run's model to a folder that Hugging Face's transformers can read."""

import json
import shutil
from pathlib import Path
from typing import Any, Literal

from jaxscale.data.chat.chat_template import JINJA, TOKENIZER_CONFIG
from jaxscale.errors import UserError
from jaxscale.records.directory import EXPERIMENT
from jaxscale.records.storage import check_location, is_remote
from jaxscale.values.read_files import is_regular, read_bytes

TOKENIZER, GENERATION = "tokenizer.json", "generation_config.json"
COMPANIONS = (TOKENIZER_CONFIG, "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt")
COMPANIONS += ("tokenizer.model", JINJA, "chat_template.json")
"""Names of the tokenizer files, other than tokenizer.json, that transformers reads."""


def export(
    run: Any, folder: Any, *, best: bool = False, dtype: Literal["float32", "bfloat16", "float16"] = "float32"
) -> Path:
    """Write a run's model as config.json and safetensors files, with the run's tokenizer if it is a subword tokenizer.

    The tokenizer's other files, the chat template and the generation settings are written, too, if they are available.

    Args:
        run: the run directory.
        folder: the folder to create; it must not contain a model.
        best: whether to take the checkpoint with the lowest held-out loss instead of the newest one.
        dtype: dtype of the weights in the files.

    Returns:
        The folder.

    Raises:
        UserError: `run` has no run or checkpoint, or transformers has no equivalent of the model.

    Example:
        >>> export("no/such/run", "folder")
        Traceback (most recent call last):
        jaxscale.errors.UserError: no/such/run holds no run: expected experiment.json there; give the directory of a run
    """
    check_location(folder)
    if is_remote(folder):
        raise UserError(f"{folder} is in a bucket: give a local folder for the model, and copy it there")
    if (Path(folder) / EXPERIMENT).exists():
        raise UserError(f"{folder} is the directory of a run: give a new folder for the model")
    from jaxscale.checkpoint.restore import read_template, read_tokenizer, restore_parameters
    from jaxscale.models import huggingface
    from jaxscale.models.lora import LoRA
    from jaxscale.state.ema import with_average

    trained = restore_parameters(run, best=best)
    trained_model = trained.experiment.model
    arrays = trained.step.to_canonical(with_average(trained.state))
    params = {
        name.partition("/")[2].replace("/", "."): array for name, array in arrays.items() if name.startswith("params/")
    }
    if isinstance(trained_model, LoRA):
        params, trained_model = trained_model.merged(params), trained_model.model
    exported_model = getattr(trained_model, "model", trained_model)  # `Pretrained` wraps a model in `model`
    origin_folder = Path(trained_model.folder) if isinstance(trained_model, huggingface.Pretrained) else None
    token_ids = {} if origin_folder is None else huggingface.special_token_ids(origin_folder)
    huggingface.save(folder, exported_model, params, dtype, token_ids=token_ids)
    tokenizer = read_tokenizer(run)
    if tokenizer is not None and tokenizer.kind == "subword":
        (Path(folder) / TOKENIZER).write_text(tokenizer.definition, encoding="utf-8")
        _write_companions(Path(folder), trained.experiment.data, tokenizer, read_template(run))
        if origin_folder is not None and is_regular(origin_folder / GENERATION):
            shutil.copyfile(origin_folder / GENERATION, Path(folder) / GENERATION)
    return Path(folder)


def _write_companions(folder: Path, data: Any, tokenizer: Any, template: Any) -> None:
    """Write the tokenizer's other files and the chat template.

    If the folder that the tokenizer came from still has this tokenizer, its other files are copied from there.

    Args:
        folder: the exported folder.
        data: data of the run.
        tokenizer: the run's tokenizer.
        template: the run's chat template; `None` if it has none.
    """
    tokenizer_folder = getattr(data, "folder", None) or Path(str(getattr(data, "tokenizer", ""))).parent
    tokenizer_path = Path(tokenizer_folder) / TOKENIZER
    if is_regular(tokenizer_path) and read_bytes(tokenizer_path).decode("utf-8", "replace") == tokenizer.definition:
        for name in COMPANIONS:
            if is_regular(Path(tokenizer_folder) / name):
                shutil.copyfile(Path(tokenizer_folder) / name, folder / name)
    elif template is not None:  # the folder no longer exists, or now has another tokenizer
        tokenizer_config = {"tokenizer_class": "PreTrainedTokenizerFast", **template.variables}
        (folder / TOKENIZER_CONFIG).write_text(json.dumps(tokenizer_config, indent=2) + "\n", encoding="utf-8")
    if template is not None:  # the run's template, in case the folder has changed
        (folder / JINJA).write_text(template.source, encoding="utf-8")
