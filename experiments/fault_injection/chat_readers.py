"""The readers of chats and of chat templates as targets of a fuzzer."""

import contextlib
import json
from pathlib import Path

from fault_injection import mutate
from fault_injection.mutate import dumps
from fault_injection.readers import Prepared, Target, written

TEMPLATE = "{% for message in messages %}<s>{{ message.content }}</s>{% endfor %}"


def _prepare_chats(folder: Path) -> Prepared:
    from jaxscale.data.chat.chat_rows import documents_of, read_chats

    path = folder / "chats.jsonl"
    messages = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4", "reasoning": "add"}]
    rows = [
        {"messages": messages},
        {"messages": [{"role": "system", "content": "short"}, *messages], "tools": [{"name": "f"}]},
        {"prompt": "hi", "completion": "hello\u2028you"},
    ]

    def read() -> None:
        from jaxscale.data import source

        for chat in read_chats(source.decode(source.read(str(path)), str(path)), str(path)):
            texts = ["".join(message.get("content", "") for message in chat.messages[:count]) for count in (1, 2)]
            if len(texts[1]) > len(texts[0]):
                documents_of(chat, texts)

    return written(path, read), [b"\n".join(map(dumps, rows)), *map(dumps, rows)]


def _prepare_template(folder: Path) -> Prepared:
    from jaxscale.data.chat.chat_template import find_template

    files = [
        {"chat_template": TEMPLATE, "bos_token": "<s>", "eos_token": {"content": "</s>", "lstrip": False}},
        {"chat_template": [{"name": "default", "template": TEMPLATE}, {"name": "tool_use", "template": "t"}]},
        {"pad_token": None, "additional_special_tokens": ["<a>"]},
    ]

    def read() -> None:
        template = find_template(folder)
        if template is not None:
            json.dumps([template.identity, template.variables])

    return written(folder / "tokenizer_config.json", read), [*map(dumps, files)]


def _prepare_run_template(folder: Path) -> Prepared:
    from jaxscale.checkpoint.restore import TEMPLATE as FILE
    from jaxscale.checkpoint.restore import read_template
    from jaxscale.data.chat.chat_template import ChatTemplate

    def read() -> None:
        with contextlib.suppress(FileNotFoundError):
            template = read_template(folder)
            json.dumps([template.identity, template.variables])

    template = ChatTemplate(TEMPLATE, (("bos_token", "<s>"), ("eos_token", "</s>")), "a.jinja")
    return written(folder / FILE, read), [template.to_json().encode()]


CHAT_TARGETS = (
    Target("messages", mutate.LINES, _prepare_chats, ("user", "assistant", "tool", "content", "prompt", "answer")),
    Target("tokenizer_config.json", mutate.JSON, _prepare_template, ("chat_template", "default", "x_token")),
    Target("template of a run", mutate.JSON, _prepare_run_template, ("source", "tokens", "origin")),
)
