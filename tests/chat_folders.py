"""Model folders with a chat template, and files of chats, for tests."""

import functools
import json
import shutil
from pathlib import Path

GOLDEN = Path(__file__).parent / "golden" / "chat"


@functools.cache
def recorded():
    """The chats, templates and cases that `golden/chat/make.py` recorded with transformers."""
    return json.loads((GOLDEN / "chats.json").read_text())


def template_folder(folder, template="smollm2", tokenizer="byte_level"):
    """A folder with a tokenizer and a recorded template; a template that is not recorded is the text of one."""
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(GOLDEN / tokenizer / "tokenizer.json", folder / "tokenizer.json")
    config = recorded()["templates"].get(template)
    if config is None:
        config = {**recorded()["templates"]["smollm2"], "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def chat_file(path, chats):
    """A JSONL file of rows."""
    path.write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    return path


def turns(*texts):
    """A row of messages of a user and an assistant in turn."""
    roles = ("user", "assistant") * len(texts)
    return {"messages": [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]}
