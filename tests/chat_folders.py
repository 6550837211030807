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


def model_folder(folder, template="smollm2", **fields):
    """A folder of transformers with a tiny Llama of random weights and tied embeddings, a tokenizer and a template."""
    from flax import nnx

    from jaxscale.models.decoder import Decoder
    from jaxscale.models.huggingface import save

    settings = {"vocab": 448, "context": 128, "layers": 2, "heads": 2, "kv_heads": 1, "embed": 16, "tied": True}
    model = Decoder(**settings | fields)
    save(folder, model, nnx.to_pure_dict(nnx.state(model.build(nnx.Rngs(0)), nnx.Param)))
    return template_folder(folder, template)
