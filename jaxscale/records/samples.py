"""samples.txt: texts that the model generated during training, in blocks for people to read. The newest is the last:

    === step 500 | prompt "ROMEO:"
    ROMEO: I do not know thee.

A line of text that begins like a header is indented by one more space, so that `read_samples` can recognize headers.
When the run returns to an earlier checkpoint, it writes a header without a prompt. This header makes samples above it
invalid if they are of later steps.

    === step 400 | returned
"""

import json
import os
import re
from typing import Any, NamedTuple

from jaxscale.errors import UserError
from jaxscale.records.storage import is_remote, open_append, run_path
from jaxscale.values.limits import MAX_LOG_BYTES
from jaxscale.values.read_files import parse_json, read_bytes, whole_number

FILE = "samples.txt"
_HEADER_START = "=== step "
_HEADER_LIKE = re.compile(rf"^( *{_HEADER_START})", re.MULTILINE)
_RETURNED = " | returned"
_INDENTED_HEADER_LIKE = re.compile(rf"^ ( *{_HEADER_START})", re.MULTILINE)


class Sample(NamedTuple):
    """A text that the model generated during training.

    Args:
        step: number of updates when the text was generated.
        prompt: the prompt.
        text: the model's continuation, without the prompt.
    """

    step: int
    prompt: str
    text: str


def append_sample(directory: Any, step: int, prompt: str, text: str) -> None:
    """Append a sample to the run's samples.txt.

    Args:
        directory: the run's folder.
        step: number of updates so far.
        prompt: the prompt.
        text: the model's continuation, without the prompt.

    Example:
        >>> import tempfile
        >>> folder = tempfile.mkdtemp()
        >>> append_sample(folder, 500, "ROMEO:", " I do not know thee.")
        >>> read_samples(folder)
        [Sample(step=500, prompt='ROMEO:', text=' I do not know thee.')]
    """
    escaped_text = _HEADER_LIKE.sub(r" \1", prompt + text)
    header = f"{_HEADER_START}{int(step)} | prompt {json.dumps(prompt, ensure_ascii=False)}"
    _append(directory, f"{header}\n{escaped_text}\n\n")


def append_return(directory: Any, step: int) -> None:
    """Record in the run's samples.txt, if that file exists, that the run returned to the checkpoint of a step.

    Args:
        directory: the run's folder.
        step: step of the checkpoint.

    Example:
        >>> import tempfile
        >>> folder = tempfile.mkdtemp()
        >>> append_sample(folder, 500, "ROMEO:", " I do not know thee.")
        >>> append_return(folder, 400)
        >>> read_samples(folder)
        []
    """
    if (run_path(directory) / FILE).exists():
        _append(directory, f"{_HEADER_START}{int(step)}{_RETURNED}\n\n")


def _append(directory: Any, text: str) -> None:
    """Append text to the run's samples.txt."""
    file = open_append(run_path(directory) / FILE)
    try:
        file.write(text.encode(errors="replace"))
    finally:
        file.close()


def read_samples(directory: Any) -> list[Sample]:
    """Read the samples of a run, sorted by step. Of samples with equal step and prompt, only the last is returned.

    If the run returned to an earlier checkpoint, earlier samples of later steps are left out.

    Raises:
        UserError: the file exists, but is not a regular file, is too large or cannot be read.
    """
    path = run_path(directory) / FILE
    if not os.path.lexists(path) and not (is_remote(path) and path.exists()):
        return []
    text = read_bytes(path, MAX_LOG_BYTES).decode(errors="replace")
    sample_by_key: dict[tuple[int, str], Sample] = {}  # keys are (step, prompt)
    for block in f"\n{text}{_HEADER_START}".split("\n" + _HEADER_START)[1:-1]:
        header, _, escaped_text = block.partition("\n")
        if header.endswith(_RETURNED) and (return_step := whole_number(header.removesuffix(_RETURNED))) is not None:
            sample_by_key = {key: sample for key, sample in sample_by_key.items() if sample.step <= return_step}
            continue
        step_text, _, quoted_prompt = header.partition(" | prompt ")
        step = whole_number(step_text)
        try:
            prompt = str(parse_json(quoted_prompt, "the prompt"))
        except UserError:
            continue
        if step is None:
            continue
        prompt_and_text = _INDENTED_HEADER_LIKE.sub(r"\1", escaped_text.removesuffix("\n"))
        sample_by_key[step, prompt] = Sample(step, prompt, prompt_and_text.removeprefix(prompt))
    return sorted(sample_by_key.values(), key=lambda sample: sample.step)
