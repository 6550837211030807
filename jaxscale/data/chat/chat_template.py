"""The chat template of a model folder: the Jinja text that turns messages into the text that a model was trained on.

A folder stores the template in `chat_template.jinja`, `tokenizer_config.json` or `chat_template.json`, in the format of
transformers (https://huggingface.co/docs/transformers/chat_templating). A template is code from the internet, so a
separate process renders it (`template_child.py`), within limits of time, memory and length.
"""

import contextlib
import dataclasses
import functools
import importlib.util
import itertools
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxscale.data.chat import template_child
from jaxscale.data.documents import has_half_characters
from jaxscale.data.tokenizer import Subwords
from jaxscale.errors import UserError
from jaxscale.values.read_files import is_folder, is_regular, parse_json, read_bytes

JINJA, TOKENIZER_CONFIG, LEGACY = "chat_template.jinja", "tokenizer_config.json", "chat_template.json"
"""The files that may hold a template, in search order."""
_JOBS_PER_LINE = 64


@dataclasses.dataclass(frozen=True)
class ChatTemplate:
    """A chat template and the special tokens that it may name.

    Args:
        source: text of the template, in Jinja.
        tokens: the special tokens by name, such as ("eos_token", "<|im_end|>").
        origin: the file that the template is from, for messages.

    Example:
        >>> ChatTemplate("{{ bos_token }}{{ messages[0].content }}", (("bos_token", "<s>"),), "a.jinja").variables
        {'bos_token': '<s>'}
    """

    source: str
    tokens: tuple[tuple[str, str], ...]
    origin: str

    @property
    def variables(self) -> dict[str, str]:
        """The special tokens by name, which are variables of the template."""
        return dict(self.tokens)

    @property
    def identity(self) -> tuple[Any, ...]:
        """The values that determine the rendered texts, for the cache key."""
        return self.source, self.tokens

    def to_json(self) -> str:
        """Return a text from which `from_json` restores an equal template."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str, place: str) -> "ChatTemplate":
        """Return the template that `to_json` stored in the file at `place`.

        Raises:
            UserError: the text is not a stored template.
        """
        fields = parse_json(text, place)
        try:
            tokens = tuple((name, token) for name, token in fields["tokens"])
            template = cls(fields["source"], tokens, fields["origin"])
        except (KeyError, TypeError, ValueError):
            raise UserError(
                f"{place}: expected a chat template saved by a run; restore the file from a backup"
            ) from None
        if not all(isinstance(field, str) for field in (template.source, template.origin, *itertools.chain(*tokens))):
            raise UserError(f"{place}: expected a chat template saved by a run; restore the file from a backup")
        return template

    def prompt(self, text: str) -> str:
        """Return the rendered text of one user message, with the generation prompt at the end."""
        with Renderer(self, None) as renderer:
            (texts_or_failure,) = renderer.render([Job([{"role": "user", "content": text}], None, ((1, True),))])
        if isinstance(texts_or_failure, Failure):
            raise UserError(f"{self.origin}: {texts_or_failure.text}")
        return texts_or_failure[0]

    @functools.cached_property
    def answer_end(self) -> str:
        """The text that the template puts after the last answer of a chat, such as "<|im_end|>\\n"."""
        answer_words = "word"
        messages = [{"role": "user", "content": answer_words}, {"role": "assistant", "content": answer_words}]
        with Renderer(self, None) as renderer:
            (texts_or_failure,) = renderer.render([Job(messages, None, ((2, False),))])
        return "" if isinstance(texts_or_failure, Failure) else texts_or_failure[0].rpartition(answer_words)[2]


class Job(NamedTuple):
    """A chat that the template renders once for each entry of `renderings`.

    Args:
        messages: the messages.
        tools: descriptions of the tools that the assistant may call; `None` if there are none.
        renderings: for each text to render, the number of messages in it, and whether to add the generation prompt.
    """

    messages: list[dict[str, Any]]
    tools: list[Any] | None
    renderings: tuple[tuple[int, bool], ...]


class Failure(NamedTuple):
    """The result of a job that the template could not render; `text` is the reason."""

    text: str


class Renderer:
    """A context manager for the process that renders a template.

    Args:
        template: the template.
        date: day that the template sees as today, as YYYY-MM-DD; `None` for the present time.

    Raises:
        UserError: on entry, if Jinja2 is missing or the template cannot be compiled.
    """

    def __init__(self, template: ChatTemplate, date: str | None) -> None:
        self._template, self._date = template, date

    def __enter__(self) -> "Renderer":
        if importlib.util.find_spec("jinja2") is None:
            raise UserError("chat templates need the package jinja2: pip install 'jaxscale[chat]'")
        self._stderr_file = tempfile.TemporaryFile()
        self._process = subprocess.Popen(
            [sys.executable, "-P", template_child.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr_file,
            start_new_session=True,  # an interrupt from the keyboard does not reach the child
        )
        request = {
            "path": [entry for entry in sys.path if entry],
            "source": self._template.source,
            "variables": self._template.variables,
            "date": self._date,
        }
        try:
            self._send(request)
            reply = self._receive()
            if isinstance(reply, Failure):
                raise UserError(f"{self._template.origin} cannot be used as a template: {reply.text}")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            with contextlib.suppress(OSError):
                stream.close()
        self._process.kill()
        self._process.wait()
        self._stderr_file.close()

    def render(self, jobs: Iterable[Job]) -> Iterator[list[str] | Failure]:
        """Yield the rendered texts of each job, or a `Failure`; stop after a job that ended the process."""
        jobs_left = iter(jobs)
        while job_dicts := [job._asdict() for job in itertools.islice(jobs_left, _JOBS_PER_LINE)]:
            self._send(job_dicts)
            for _ in job_dicts:
                yield self._receive()
                if self._process.poll() is not None:
                    return

    def _send(self, content: Any) -> None:
        """Send a line of JSON to the process. If the process has ended, `_receive` reports that."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.write(json.dumps(content).encode() + b"\n")
            self._process.stdin.flush()

    def _receive(self) -> list[str] | Failure:
        """Wait for the process's result of the next job, and return its texts or a `Failure`."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line.endswith(b"\n"):
            exit_code = self._process.wait()
            if -exit_code in (14, 26, 27):  # SIGALRM, SIGVTALRM, SIGPROF
                return Failure(f"the template takes more than {template_child.CPU_SECONDS:g} s: does it end?")
            self._stderr_file.seek(0)
            last_line = (self._stderr_file.read().decode(errors="replace").strip().splitlines() or [""])[-1]
            return Failure(
                f"the process that renders the template ended with code {exit_code} {last_line:.300}".rstrip()
            )
        reply = json.loads(line)
        if "raised" in reply:
            return Failure(f"the template refuses it: {reply['raised']}")
        return reply["texts"] if "texts" in reply else Failure(f"the template is broken: {reply['broken']}")


def read_template(folder: str | Path) -> ChatTemplate:
    """Read the chat template of a model folder.

    Args:
        folder: folder that transformers saved, with a tokenizer.

    Raises:
        UserError: the folder has no template, or a file does not have the format of transformers.
    """
    template = find_template(folder)
    if template is None:
        raise UserError(
            f"{folder} has no chat template ({JINJA}, or chat_template in {TOKENIZER_CONFIG}): add one, such as that "
            "of the instruct version of the model, or train on texts with data.Text(fields=('prompt', 'answer'))"
        )
    return template


def find_template(folder: str | Path) -> ChatTemplate | None:
    """Return the chat template of a model folder, or `None` if it has none; see `read_template` for the errors."""
    folder = Path(folder)
    if not is_folder(folder):
        raise UserError(f"{folder}: no such folder; expected that of a model, with its tokenizer and chat template")
    config = _read_object(folder / TOKENIZER_CONFIG)
    tokens = tuple(_special_tokens(_read_object(folder / "special_tokens_map.json") | config).items())
    if is_regular(folder / JINJA):
        try:
            return ChatTemplate(read_bytes(folder / JINJA).decode("utf-8"), tokens, str(folder / JINJA))
        except UnicodeDecodeError as error:
            raise UserError(f"{folder / JINJA} is not UTF-8 ({error}): copy the file again") from None
    for file_name, json_object in ((TOKENIZER_CONFIG, config), (LEGACY, _read_object(folder / LEGACY))):
        source = json_object.get("chat_template")
        if isinstance(source, list):  # several templates, each with a name
            source_by_name = {str(each.get("name")): each.get("template") for each in source if isinstance(each, dict)}
            if not isinstance(source_by_name.get("default"), str):
                raise UserError(
                    f"{folder / file_name}: chat_template has {', '.join(source_by_name) or 'no names'}, expected one "
                    f"named default: write the one to use to {JINJA}"
                )
            source = source_by_name["default"]
        if isinstance(source, str):
            if has_half_characters(source + "".join(token for _, token in tokens)):
                raise UserError(f"{folder / file_name}: chat_template or a token has half a surrogate pair: repair it")
            return ChatTemplate(source, tokens, str(folder / file_name))
        if source is not None:
            raise UserError(f"{folder / file_name}: chat_template: got a {type(source).__name__}, expected a text")
    return None


def _read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; an empty dict if there is no file."""
    if not is_regular(path):
        return {}
    json_object = parse_json(read_bytes(path), str(path))
    if not isinstance(json_object, dict):
        raise UserError(f"{path}: got a {type(json_object).__name__}, expected a JSON object; copy the file again")
    return json_object


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """Return the special tokens in the JSON of a tokenizer_config.json, by names such as bos_token."""
    token_by_name = {}
    for name, token in config.items():
        token_text = token.get("content") if isinstance(token, dict) else token
        if name.endswith("_token") and isinstance(token_text, str):
            token_by_name[name] = token_text
    return token_by_name


def folder_tokenizer(folder: str | Path) -> Subwords:
    """Return the tokenizer of a model folder.

    Raises:
        UserError: the folder has no tokenizer.json, or that file does not hold a tokenizer.
    """
    from jaxscale.data.tokenizer import load

    path = Path(folder) / "tokenizer.json"
    if not is_regular(path):
        has_slow_tokenizer = any(
            is_regular(Path(folder) / name) for name in ("tokenizer.model", "vocab.json", "vocab.txt")
        )
        advice = (
            "load it with transformers' AutoTokenizer and save it, which writes one"
            if has_slow_tokenizer
            else "copy it from where the model is from"
        )
        raise UserError(f"{folder} has no tokenizer.json: {advice}")
    return load(str(path))


def stop_ids(folder: str | Path, tokenizer: Any) -> tuple[int, ...]:
    """Return the end-of-text ids of a folder's model: eos_token_id of generation_config.json or else of config.json.

    Args:
        folder: folder that transformers saved.
        tokenizer: the model's tokenizer; ids beyond its vocabulary are left out.
    """
    for name in ("generation_config.json", "config.json"):
        id_or_ids = _read_object(Path(folder) / name).get("eos_token_id")
        stored_ids = id_or_ids if isinstance(id_or_ids, list) else [id_or_ids]
        ids = tuple(i for i in stored_ids if type(i) is int and 0 <= i < tokenizer.size)
        if ids:
            return ids
    return ()


def answer_stops(template: ChatTemplate, tokenizer: Any) -> tuple[Sequence[int], Sequence[str]]:
    """Return the stop ids and the stop texts of an answer.

    An answer ends at the first special token that the template puts after it. If the template puts no special token
    there, the answer ends at the text that the template puts there.
    """
    end_text = template.answer_end
    special_ids = [int(i) for i in tokenizer.encode(end_text) if int(i) in tokenizer.special_ids] if end_text else []
    if special_ids:
        return (special_ids[0],), ()
    return (), ((end_text.strip(),) if end_text.strip() else ())
