"""samples.txt: texts that the model wrote during training, in blocks for people to read, the newest last, such as

    === step 500 | prompt "ROMEO:"
    ROMEO: I do not know thee.

A line of the text that begins like a block's header is indented by one more space, so that the file can be read back.
"""

import json
import re
from typing import Any, NamedTuple

from jaxscale.records.storage import open_append, run_path

FILE = "samples.txt"
_HEADER_START = "=== step "
_HEADER_LIKE = re.compile(rf"^( *{_HEADER_START})", re.MULTILINE)
_INDENTED_HEADER_LIKE = re.compile(rf"^ ( *{_HEADER_START})", re.MULTILINE)


class Sample(NamedTuple):
    """The `text` with which the model continued `prompt` after `step` updates; it does not repeat the prompt."""

    step: int
    prompt: str
    text: str


def append_sample(directory: Any, step: int, prompt: str, text: str) -> None:
    """Append a sample to the run's samples.txt.

    Args:
        directory: the run's folder.
        step: number of updates so far.
        prompt: the prompt.
        text: its continuation by the model.

    Example:
        >>> import tempfile
        >>> folder = tempfile.mkdtemp()
        >>> append_sample(folder, 500, "ROMEO:", " I do not know thee.")
        >>> read_samples(folder)
        [Sample(step=500, prompt='ROMEO:', text=' I do not know thee.')]
    """
    escaped_text = _HEADER_LIKE.sub(r" \1", prompt + text)
    header = f"{_HEADER_START}{int(step)} | prompt {json.dumps(prompt, ensure_ascii=False)}"
    file = open_append(run_path(directory) / FILE)
    try:
        file.write(f"{header}\n{escaped_text}\n\n".encode(errors="replace"))
    finally:
        file.close()


def read_samples(directory: Any) -> list[Sample]:
    """Read the samples of a run, oldest first; of a sample that a continued run wrote again, the last version."""
    path = run_path(directory) / FILE
    if not path.exists():
        return []
    samples: dict[tuple[int, str], Sample] = {}
    for block in ("\n" + path.read_bytes().decode(errors="replace") + _HEADER_START).split("\n" + _HEADER_START)[1:-1]:
        header, _, escaped_text = block.partition("\n")
        step_text, _, quoted_prompt = header.partition(" | prompt ")
        try:
            step, prompt = int(step_text), str(json.loads(quoted_prompt))
        except ValueError:
            continue
        text = _INDENTED_HEADER_LIKE.sub(r"\1", escaped_text.removesuffix("\n"))
        text = text[len(prompt) :] if text.startswith(prompt) else text
        samples[step, prompt] = Sample(step, prompt, text)
    return sorted(samples.values(), key=lambda sample: sample.step)
