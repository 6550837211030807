"""samples.txt: texts that the model wrote during training, in blocks for people to read, the newest last:

    === step 500 | prompt "ROMEO:"
    ROMEO: I do not know thee.

A line of the text that begins like a header is indented by one more space, so that the file can be read back.
"""

import json
import re
from typing import Any, NamedTuple

from jaxscale.records.storage import open_append, run_path

FILE = "samples.txt"
_MARK = "=== step "
_LIKE_MARK = re.compile(rf"^( *{_MARK})", re.MULTILINE)
_INDENTED_MARK = re.compile(rf"^ ( *{_MARK})", re.MULTILINE)


class Sample(NamedTuple):
    """A continuation of `prompt` by the parameters after `step` updates."""

    step: int
    prompt: str
    text: str


def append_sample(directory: Any, step: int, prompt: str, text: str) -> None:
    """Appends a sample to the run's samples.txt.

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
    body = _LIKE_MARK.sub(r" \1", prompt + text)
    header = f"{_MARK}{int(step)} | prompt {json.dumps(prompt, ensure_ascii=False)}"
    file = open_append(run_path(directory) / FILE)
    try:
        file.write(f"{header}\n{body}\n\n".encode(errors="replace"))
    finally:
        file.close()


def read_samples(directory: Any) -> list[Sample]:
    """The samples of a run, oldest first; if a resumed run wrote one twice, the last version."""
    path = run_path(directory) / FILE
    if not path.exists():
        return []
    samples: dict[tuple[int, str], Sample] = {}
    for block in ("\n" + path.read_bytes().decode(errors="replace") + _MARK).split("\n" + _MARK)[1:-1]:
        header, _, body = block.partition("\n")
        step_text, _, quoted_prompt = header.partition(" | prompt ")
        try:
            step, prompt = int(step_text), str(json.loads(quoted_prompt))
        except ValueError:
            continue
        text = _INDENTED_MARK.sub(r"\1", body.removesuffix("\n"))
        text = text[len(prompt) :] if text.startswith(prompt) else text
        samples[step, prompt] = Sample(step, prompt, text)
    return sorted(samples.values(), key=lambda sample: sample.step)
