"""Source of experiments with a few wild values: mostly valid fields, drawn from their declared types.

A draw is the text of one Python expression, such as `Experiment(name='a', model=Decoder(vocab=10**18), ...)`, so that
it can be read, evaluated and varied as a syntax tree.
"""

import ast
import dataclasses
import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import jax
import numpy as np
import optax
import pyarrow
import pyarrow.parquet
import safetensors.numpy
import tokenizers
from fault_injection.value_pools import (
    ALONE,
    FLOATS,
    MODELS,
    NUMBERS,
    ODDITIES,
    OPTIMIZERS,
    ORDINARY_FIELDS,
    PLANS,
    STRINGS,
    TEXT_FORMS,
)
from flax import nnx
from PIL import Image

from jaxscale.data.chat.chats import Chats
from jaxscale.data.image_folder import ImageFolder
from jaxscale.data.images import Images
from jaxscale.data.rows import Arrays, Rows
from jaxscale.data.stream import Stream
from jaxscale.data.table import Table
from jaxscale.data.text import Mixture, Text
from jaxscale.generation.sampling import Sampling
from jaxscale.launch.cluster import Cluster, JobSet, Local, QueuedResource, Slurm, Ssh
from jaxscale.memory.plan import MemoryPlan
from jaxscale.models.decoder import Decoder, Llama3Scaling
from jaxscale.models.foreign import CrossEntropy, ForeignModel, FromLinen
from jaxscale.models.huggingface import Pretrained
from jaxscale.models.lora import LoRA
from jaxscale.models.resnet import ResNet
from jaxscale.models.vit import ViT
from jaxscale.optim.optimizer import OPTIONS, Optimizer
from jaxscale.pipeline.plan import PipelinePlan
from jaxscale.platforms.compiler_options import CompilerOptions
from jaxscale.platforms.platform import Platform
from jaxscale.recipe.experiment import Checkpointing, Evaluation, Experiment, Guard, Samples
from jaxscale.recipe.kernels import Kernels
from jaxscale.recipe.plan import OffloadPlan, Plan, StatePlan
from jaxscale.replicas.codecs import CODECS
from jaxscale.replicas.low_communication import Diloco
from jaxscale.replicas.named import NamedCodec
from jaxscale.sharding.mesh import AXES, MeshSpec
from jaxscale.sharding.rules import AxisRules
from jaxscale.values.annotations import alternatives, field_types

RECORDS: tuple[type, ...] = (
    *(Arrays, AxisRules, Chats, Checkpointing, Cluster, CompilerOptions, CrossEntropy, Decoder, Diloco, Evaluation),
    *(Experiment, ForeignModel, FromLinen, Guard, ImageFolder, Images, JobSet, Kernels, Llama3Scaling, Local, LoRA),
    *(MemoryPlan, MeshSpec, Mixture, OffloadPlan, Optimizer, PipelinePlan, Plan, Pretrained, QueuedResource, ResNet),
    *(Rows, Samples, Sampling, Slurm, Ssh, StatePlan, Stream, Table, Text, ViT, *CODECS.values()),
)
"""Classes whose calls a draw contains; their fields become wild."""
CLASS_BY_NAME = {cls.__name__: cls for cls in RECORDS}


class Net(nnx.Module):
    """A tiny network of Flax NNX, for images of 8 x 8 pixels."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.head = nnx.Linear(64, 10, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        """Return the logits of ten classes."""
        return self.head(images.reshape(len(images), -1))


class Odd:
    """An object that is nothing in particular."""


def nested(depth: int) -> Any:
    """Return tuples in one another."""
    value: Any = ()
    for _ in range(depth):
        value = (value,)
    return value


def cycle() -> list[Any]:
    """Return a list that contains itself."""
    items: list[Any] = []
    items.append(items)
    return items


def namespace(folder: Path) -> dict[str, Any]:
    """Return the names that a draw's source uses.

    Args:
        folder: folder of the data.
    """
    tools = {"np": np, "Path": Path, "Platform": Platform, "NamedCodec": NamedCodec, "nested": nested, "cycle": cycle}
    tools |= {"Net": Net, "Odd": Odd, "FOLDER": folder, "jax": jax, "nan": float("nan"), "inf": float("inf")}
    tools |= {"adam": lambda rate: optax.adam(rate), "falling": lambda update: 1e-2 / (1 + update)}
    tools |= {"missing": lambda update: None, "sinking": lambda update: 1e-3 - update}
    return tools | CLASS_BY_NAME


LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_act": "silu",
    "vocab_size": 257,
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 16,
    "max_position_embeddings": 8,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "rope_theta": 1e4,
}
"""The config.json of a tiny Llama."""


def write_data(folder: Path) -> None:
    """Write the files that a draw's source names."""
    (folder / "text.txt").write_text("\n\n".join(f"line {i * i % 97} of the text." for i in range(300)))
    (folder / "lines.jsonl").write_text(
        "".join(f'{{"text": "line {i} of many", "answer": "{i}"}}\n' for i in range(99))
    )
    columns = {"text": [f"line {i} of many" for i in range(99)], "tokens": [[1] * 8] * 99, "targets": [[2] * 8] * 99}
    pyarrow.parquet.write_table(pyarrow.table(columns), folder / "table.parquet")
    (folder / "empty.txt").write_text("")
    (folder / "short.txt").write_text("ab")
    (folder / "binary.txt").write_bytes(bytes(range(256)))
    (folder / "odd.csv").write_text("0F0,²,1F99999999999\n")
    pixels = np.random.default_rng(0).integers(0, 256, (64, 8, 8, 1), dtype=np.uint8)
    np.savez(folder / "images.npz", x=pixels, y=np.arange(64) % 10)
    for index, name in enumerate(["cat", "dog"] * 8):
        (folder / "photos" / name).mkdir(parents=True, exist_ok=True)
        values = np.full((10, 12, 3), 16 * index, np.uint8)
        Image.fromarray(values).save(folder / "photos" / name / f"{index}.png")
    write_chats(folder)
    (folder / "llama").mkdir()
    (folder / "llama" / "config.json").write_text(json.dumps(LLAMA))


def write_chats(folder: Path) -> None:
    """Write chats.jsonl, and the model folder chat/ with a tokenizer of words, a template and random weights.

    JAX stays out of it: a process that has started its backend is not to be forked.
    """
    words = ["<s>", "</s>", "?", "hello", *map(str, range(9))]
    chat_folder = folder / "chat"
    chat_folder.mkdir()
    sizes = {"vocab_size": len(words), "num_hidden_layers": 1, "max_position_embeddings": 64}
    (chat_folder / "config.json").write_text(json.dumps({**LLAMA, **sizes}))
    rng, layer = np.random.default_rng(0), "model.layers.0."
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (len(words), 8), "model.norm.weight": (8,)}
    shapes |= {f"{layer}self_attn.{name}_proj.weight": (8, 8) for name in "qkvo"}
    shapes |= {f"{layer}mlp.{name}_proj.weight": (16, 8) for name in ("gate", "up")}
    shapes |= {f"{layer}mlp.down_proj.weight": (8, 16)}
    shapes |= {f"{layer}{name}_layernorm.weight": (8,) for name in ("input", "post_attention")}
    weights = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    safetensors.numpy.save_file(weights, chat_folder / "model.safetensors")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({word: i for i, word in enumerate(words)}, "?"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.save(str(chat_folder / "tokenizer.json"))
    template = "{% for message in messages %}<s>{{ message.content }}</s>{% endfor %}"
    (chat_folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    chats = [{"prompt": f"hello {i % 9} ?", "completion": f"{i % 7} hello"} for i in range(40)]
    (folder / "chats.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))


def draw_experiment(chance: random.Random, wild_count: int) -> ast.expr:
    """Return the source of an experiment as a tree, with ordinary changes and `wild_count` wild fields."""
    model, data = chance.choice(MODELS)
    optimizer = f"Optimizer(name={chance.choice(OPTIMIZERS)!r})"
    parts = f"model={model}, data={data}, optimizer={optimizer}, plan={chance.choice(PLANS)}, steps=4, batch=8"
    tree = parsed(
        f"Experiment(name='a', {parts}, evaluation=Evaluation(), samples=Samples(), checkpoint=Checkpointing(), "
        "guard=Guard())"
    )
    return changed(tree, chance, chance.choice((0, 0, 1, 1, 2, 3)), wild_count)


def draw_alone(chance: random.Random, wild_count: int) -> ast.expr:
    """Return the source of a value outside an experiment as a tree, with `wild_count` wild fields."""
    if chance.random() < 0.5:
        cls = chance.choice(list(TEXT_FORMS))
        text = chance.choice(TEXT_FORMS[cls])
        for _ in range(wild_count):
            text = mutated(text, chance)
        return parsed(f"{cls.__name__}.parse({text!r})")
    if chance.random() < 0.3:
        cls = chance.choice(list(CODECS.values()))
        return changed(parsed(call_text(cls, chance)), chance, 1, wild_count)
    return changed(parsed(chance.choice(ALONE)), chance, 1, wild_count)


def changed(
    tree: ast.expr, chance: random.Random, ordinary_count: int, wild_count: int, classes: Sequence[str] = ()
) -> ast.expr:
    """Set some fields of the calls in a tree to ordinary values and then some to wild ones, and return the tree.

    Args:
        tree: the source of a value.
        chance: source of the draws.
        ordinary_count: number of fields to set to ordinary values.
        wild_count: number of fields to set to wild values.
        classes: names of the classes whose fields are set; empty for all.
    """
    for number in range(ordinary_count + wild_count):
        fields = [field for field in _fields(tree) if not classes or field[0].func.id in classes]
        call, name, hint = chance.choice(fields)
        if call.func.id == "Optimizer" and number < ordinary_count and name in OPTIONS:
            continue  # most rules do not have the option
        text = ordinary(name, hint, chance) if number < ordinary_count else wild(name, hint, chance)
        if text is None:
            continue
        call.keywords = [keyword for keyword in call.keywords if keyword.arg != name]
        call.keywords.append(ast.keyword(name, parsed(text)))
    return tree


def parsed(text: str) -> Any:
    """Return the tree of an expression."""
    return ast.parse(text, mode="eval").body


def _fields(tree: ast.expr) -> Iterator[tuple[Any, str, Any]]:
    """Yield call, name and declared type of each field of the calls in a tree; those of plans more often."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in CLASS_BY_NAME:
            cls = CLASS_BY_NAME[node.func.id]
            for name, hint in field_types(cls).items():
                yield from [(node, name, hint)] * (3 if cls is Plan else 1)


def ordinary(name: str, hint: Any, chance: random.Random) -> str | None:
    """Return the source of a value that a field usually takes; `None` if its type does not suggest any."""
    if name == "model" or name == "data":
        return None
    hint = chance.choice(alternatives(hint))
    if get_origin(hint) is Literal:
        return repr(chance.choice(get_args(hint)))
    if name in ORDINARY_FIELDS and chance.random() < 0.9:
        return chance.choice(ORDINARY_FIELDS[name])
    if hint in TEXT_FORMS:
        return repr(chance.choice(TEXT_FORMS[hint]))
    if hint is type(None):
        return "None"
    if hint is bool:
        return chance.choice(("True", "False"))
    if hint is int:
        return chance.choice(("1", "2", "4", "8", "1", "3"))
    if hint is float:
        return chance.choice(("0.1", "0.5", "0.9", "1e-3", "2"))
    if hint is str:
        return chance.choice(("'a'", "'lora|head'", "'a b'"))
    if hint in RECORDS:
        return call_text(hint, chance)
    if get_origin(hint) is tuple:
        items = [ordinary(name, get_args(hint)[0], chance) for _ in range(chance.randint(0, 2))]
        if get_args(hint)[0] is str:
            items = [repr(chance.choice(AXES)) for _ in items]
        return f"({''.join(f'{item}, ' for item in items)})"
    return None


def call_text(cls: Any, chance: random.Random) -> str:
    """Return the source of a call of a class, with ordinary values for the fields that have no default."""
    required = [
        field.name
        for field in dataclasses.fields(cls)
        if field.init and field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    ]
    hints = field_types(cls)
    return f"{cls.__name__}({', '.join(f'{name}={ordinary(name, hints[name], chance)}' for name in required)})"


def wild(name: str, hint: Any, chance: random.Random) -> str:
    """Return the source of a value that a field does not usually take."""
    if chance.random() < 0.25:
        return chance.choice(chance.choice((NUMBERS, FLOATS, STRINGS, ODDITIES, ODDITIES)))
    hint = chance.choice(alternatives(hint))
    if get_origin(hint) is Literal:
        return repr(mutated(str(chance.choice(get_args(hint))), chance))
    if hint in TEXT_FORMS and chance.random() < 0.8:
        return repr(mutated(chance.choice(TEXT_FORMS[hint]), chance))
    if hint is int:
        return chance.choice(NUMBERS)
    if hint is float:
        return chance.choice((FLOATS, FLOATS, NUMBERS)[chance.randrange(3)])
    if hint is str or (isinstance(hint, type) and issubclass(hint, Path)):
        return chance.choice(STRINGS)
    if hint in RECORDS:
        return chance.choice((hint.__name__, call_text(hint, chance), "{}", "'a'"))
    if name == "groups":
        texts = [wild(name, member, chance) for member in get_args(hint)]
        return chance.choice(
            (f"{{{texts[0]}: Optimizer()}}", f"{{'embed': {texts[1]}}}", "{'embed': Optimizer(ema=0.9)}")
        )
    if get_origin(hint) in (tuple, list):
        item_hints = [item for item in get_args(hint) if item is not ...] or [Any]
        items = [wild(name, chance.choice(item_hints), chance) for _ in range(chance.choice((0, 1, 2, 3)))]
        return f"({''.join(f'{item}, ' for item in items)})"
    return chance.choice(ODDITIES)


def mutated(text: str, chance: random.Random) -> str:
    """Return a text with one change: a character more, less or other, a wild number, or a piece of it twice."""
    characters = "0129x:,=+-. \0²٣_eE#/\\\"'[]{}()%ä\n" + "".join(AXES[:3])
    kind, place = chance.randrange(9), chance.randrange(len(text) + 1)
    if kind == 0:
        return text[:place] + chance.choice(characters) + text[place:]
    if kind == 1:
        return text[:place] + text[place + 1 :]
    if kind == 2:
        return text[:place] + chance.choice(characters) + text[place + 1 :]
    if kind in (3, 4) and any(character.isdigit() for character in text):
        place = chance.choice([index for index, character in enumerate(text) if character.isdigit()])
        number = chance.choice(
            ("0", "-1", "99999999", "9" * 30, "9" * 5000, "²", "٣", "1e400", "nan", "0.5", "512", "65536", "1_0")
        )
        return text[:place] + number + text[place + 1 :]
    if kind == 5:
        return text.upper() if chance.random() < 0.5 else f" {text} "
    if kind == 6:
        return text + chance.choice((",", ":", "=", "x")) + text
    if kind == 7:
        return text[:place]
    return text * chance.choice((2, 1000))
