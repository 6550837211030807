"""The readers of files as targets of a fuzzer: each takes bytes, writes them to a file, and reads the file.

A reader may raise `UserError`, or the error that its docstring names; any other error is a fault. Valid files come from
the writers of jaxscale, so that they keep pace with the formats. `mutate.py` changes them; `fuzz.py` runs the targets
under Atheris, and `tests/experiments/test_fuzz_of_files.py` with plain random numbers.
"""

import contextlib
import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

from fault_injection import mutate
from fault_injection.mutate import Form, dumps

Prepared = tuple[Callable[[bytes], object], list[bytes]]
"""A function that writes bytes to a file and reads the file, and valid files."""


@dataclasses.dataclass(frozen=True)
class Target:
    """A reader of a file.

    Args:
        name: the file, or what it holds.
        form: form of the file.
        prepare: writes what lies beside the file to an empty folder, and returns how the file is read there.
        words: keys and values of the format, besides those of the valid files.
    """

    name: str
    form: Form
    prepare: Callable[[Path], Prepared]
    words: tuple[str, ...] = ()


def written(
    path: Path, read: Callable[[], object], errors: tuple[type[Exception], ...] = ()
) -> Callable[[bytes], object]:
    """Return a function that writes bytes to a path and reads the file; a refusal is what it should be."""
    from jaxscale.errors import UserError

    def run(data: bytes) -> object:
        path.write_bytes(data)
        try:
            return read()
        except (UserError, *errors) as error:
            return check_message(error)

    return run


def check_message(error: Exception) -> None:
    """Check that a refusal has a message."""
    if not str(error):
        raise AssertionError("a refusal without a message")


def words_of(target: Target, files: list[bytes]) -> tuple[str, ...]:
    """Return the names and the texts in valid files, and the further words of a target."""
    words = dict.fromkeys(target.words)
    pending: list[Any] = [target.form.parse(file) for file in files]
    while pending:
        value = pending.pop()
        if isinstance(value, str) and len(value) < 200:
            words[value] = None
        elif isinstance(value, dict):
            pending += [*value, *value.values()]
        elif isinstance(value, list):
            pending += value
    return tuple(words)


# -- models ------------------------------------------------------------------------------------------------------------


def _safetensors_files(folder: Path) -> list[bytes]:
    """Return files of the safetensors format as jaxscale writes them, one after the other in a folder."""
    import ml_dtypes
    import numpy as np

    from jaxscale.models import safetensors_folder

    arrays = {"a": np.ones((2, 3), np.float32), "b.weight": np.zeros((0, 4), np.int64), "s": np.ones((), np.uint8)}
    files = []
    for tensors in (arrays, {"x": np.ones(4, ml_dtypes.bfloat16)}, {}):
        safetensors_folder.write(folder, tensors, shard_bytes=10**9)
        files.append((folder / safetensors_folder.SINGLE).read_bytes())
    return files


def _prepare_safetensors(folder: Path) -> Prepared:
    from jaxscale.models import safetensors_folder

    def read() -> None:
        for array in safetensors_folder.read(folder).values():
            array.tobytes()

    return written(folder / safetensors_folder.SINGLE, read), _safetensors_files(folder)


def _prepare_index(folder: Path) -> Prepared:
    import numpy as np

    from jaxscale.models import safetensors_folder

    arrays = {name: np.ones(2, np.float32) for name in "abc"}
    safetensors_folder.write(folder, arrays, shard_bytes=8)
    path = folder / safetensors_folder.INDEX
    return written(path, lambda: safetensors_folder.read(folder)), [path.read_bytes()]


def _prepare_config(folder: Path) -> Prepared:
    from jaxscale.models.decoder import Decoder, Llama3Scaling
    from jaxscale.models.huggingface import describe, read_config
    from jaxscale.models.vit import ViT

    size: dict[str, Any] = {"vocab": 32, "context": 16, "layers": 2, "embed": 8, "heads": 2, "mlp": 16}
    models = [
        Decoder(**size, scaled_init=False),
        Decoder(**size, scaled_init=False, rotary_scaling=Llama3Scaling(original_context=8), tied=True),
        Decoder(**size, scaled_init=False, attention_bias="qkv", windows=(4, None)),
        Decoder(**size, scaled_init=False, qk_norm=True, kv_heads=1, head_dim=4),
        Decoder(
            **size,
            norm="layer",
            positions="learned",
            attention_bias=True,
            mlp_bias=True,
            mlp_kind="gelu_tanh",
            tied=True,
        ),
        ViT(image=8, patch=4, classes=3, layers=1, embed=8, heads=2, mlp=16, pooling="token"),
    ]
    configs = [describe(model)[1] for model in models]
    older = {"model_type": "gemma2", "hidden_act": "gelu_pytorch_tanh", "vocab_size": 32, "num_hidden_layers": 2}
    older |= {"max_position_embeddings": 16, "hidden_size": 8, "intermediate_size": 16, "num_attention_heads": 2}
    path = folder / "config.json"
    return written(path, lambda: read_config(folder, dropout=0.0)), [dumps(config) for config in (*configs, older)]


def _prepare_weights(folder: Path) -> Prepared:
    import numpy as np

    from jaxscale.models import huggingface_tensors
    from jaxscale.models.decoder import Decoder
    from jaxscale.models.huggingface import load, save
    from jaxscale.models.safetensors_folder import SINGLE

    model = Decoder(vocab=8, context=4, layers=2, embed=4, heads=2, mlp=4, scaled_init=False)
    shapes = huggingface_tensors._param_shapes(model)
    save(folder / "model", model, {path: np.zeros(shape, np.float32) for path, shape in shapes.items()})
    path = folder / "model" / SINGLE

    def read() -> None:
        with mock.patch.object(
            huggingface_tensors, "_param_shapes", return_value=shapes
        ):  # config.json does not change
            load(path.parent)

    return written(path, read), [path.read_bytes()]


def _tokenizer_files() -> list[Any]:
    """Return the JSON of small tokenizers of every kind that the tokenizers library has."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

    texts = ["the cat sat on the mat", "a cat and a dog"]
    files = []
    kinds: list[tuple[Any, Any]] = [
        (models.BPE(unk_token="[UNK]"), trainers.BpeTrainer(vocab_size=40, special_tokens=["[UNK]", "<|eos|>"])),
        (models.WordPiece(unk_token="[UNK]"), trainers.WordPieceTrainer(vocab_size=40, special_tokens=["[UNK]"])),
        (models.Unigram(), trainers.UnigramTrainer(vocab_size=30, special_tokens=["<unk>"], unk_token="<unk>")),
        (models.WordLevel(unk_token="[UNK]"), trainers.WordLevelTrainer(vocab_size=20, special_tokens=["[UNK]"])),
    ]
    for model, trainer in kinds:
        tokenizer: Any = Tokenizer(model)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Whitespace(), pre_tokenizers.Digits()])
        tokenizer.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()])
        tokenizer.decoder = decoders.BPEDecoder()
        tokenizer.train_from_iterator(texts, trainer)
        files.append(json.loads(tokenizer.to_str()))
    byte_level: Any = Tokenizer(models.BPE())
    byte_level.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    byte_level.decoder = decoders.ByteLevel()
    byte_level.post_processor = processors.TemplateProcessing(single="$A <|eos|>", special_tokens=[("<|eos|>", 0)])
    byte_level.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=40, special_tokens=["<|eos|>"]))
    return [*files, json.loads(byte_level.to_str())]


def _use_tokenizer(tokenizer: Any) -> None:
    """Encode and decode short texts."""
    for text in ("the cat 12", "\0\ud7ff caf\N{LATIN SMALL LETTER E WITH ACUTE}"):
        tokenizer.decode(tokenizer.encode(text)[:20])
    for _ in tokenizer.encode_all(["a cat", "the mat"]):
        pass
    tokenizer.decode([0, tokenizer.size - 1])


def _prepare_tokenizer(folder: Path) -> Prepared:
    from jaxscale.data.tokenizer import load

    path = folder / "tokenizer.json"
    return written(path, lambda: _use_tokenizer(load(str(path)))), [*map(dumps, _tokenizer_files())]


def _prepare_run_tokenizer(folder: Path) -> Prepared:
    from jaxscale.checkpoint.restore import TOKENIZER, read_tokenizer
    from jaxscale.data.tokenizer import Bytes, Characters, Subwords

    tokenizers = (Bytes(), Characters.of(["the cat 12", "\0\ud7ff"]), Subwords(json.dumps(_tokenizer_files()[3])))
    files = [tokenizer.to_json().encode() for tokenizer in tokenizers]
    return written(folder / TOKENIZER, lambda: _use_tokenizer(read_tokenizer(folder))), files


# -- data --------------------------------------------------------------------------------------------------------------


def _prepare_documents(folder: Path) -> Prepared:
    from jaxscale.data.documents import DocumentRecipe, check_and_count, labeled_texts
    from jaxscale.errors import UserError

    path = folder / "chats.jsonl"
    shared: dict[str, Any] = {
        "separator": None,
        "beginning": "<b>",
        "ending": "<e>",
        "prompt_end": None,
        "held_out": 0.3,
    }
    recipes = [
        DocumentRecipe(**shared, is_cut_at_document=True, fields=("prompt", "answer")),
        DocumentRecipe(**shared, is_cut_at_document=False, fields=("text",)),
    ]

    def read() -> None:
        for recipe in recipes:
            with contextlib.suppress(UserError):
                facts = check_and_count([str(path)], recipe)
                pieces = [text for *_, text in labeled_texts([str(path)], recipe, facts["documents"] // 2)]
                "".join(pieces).encode()
                assert sum(map(len, pieces)) == facts["characters"], "texts were lost or added"

    chats = [{"prompt": "2 + 2?", "answer": "4"}, {"prompt": "hi", "answer": "hello\u2028you", "text": "both"}]
    return written(path, read), [b"\n".join(map(dumps, chats)), b"\n".join(dumps({"text": text}) for text in "ab")]


def _prepare_dataset(folder: Path) -> Prepared:
    from jaxscale.data import source

    for name in ("dataset_info.json", "data-00000-of-00001.arrow"):
        (folder / name).write_text("{}")
    state = {"_data_files": [{"filename": "data-00000-of-00001.arrow"}], "_fingerprint": "0f", "_split": None}
    path = folder / "state.json"

    def read() -> None:
        for file in source.find_files((str(folder),)):
            assert Path(file).parent == folder, "a file outside of the folder"

    files = [dumps(state), dumps({**state, "_indices_data_files": [{"filename": "indices.arrow"}]})]
    return written(path, read), files


def _prepare_cache(folder: Path) -> Prepared:
    from jaxscale.data import cache
    from jaxscale.data.documents import DocumentRecipe
    from jaxscale.data.tokenizer import Bytes

    text = folder / "a.txt"
    text.write_text("some text\n\nand more of it")
    recipe = DocumentRecipe("\n\n", "", "", "t", 0.5, True)
    cache._write(folder, "entry", [str(text)], Bytes(), recipe)
    path = folder / "entry" / "facts.json"
    return written(path, lambda: cache._load(folder / "entry")), [path.read_bytes()]


# -- plans and experiments ---------------------------------------------------------------------------------------------


def _prepare_csv(folder: Path) -> Prepared:
    from jaxscale.pipeline.csv import read_csv, to_csv
    from jaxscale.pipeline.schedules import METHODS

    path = folder / "schedule.csv"
    schedules = [
        METHODS[name].schedule(2, 2) for name in ("gpipe", "1f1b", "lockstep", "zb-h1", "zb-v") if name in METHODS
    ]
    files = [to_csv(schedule, lower=lower).encode() for schedule in schedules for lower in (False, True)]
    return written(path, lambda: read_csv(path)), [*files, b"0F0,(0F1;0B0)OVERLAP_F_B,0B1,0UNSHARD"]


def _prepare_plan(folder: Path) -> Prepared:
    from jaxscale.recipe.plan import PLAN_VERSION, OffloadPlan, Plan, StatePlan, read_plan, version_1_fields
    from jaxscale.values import to_json

    plans = [
        Plan(mesh="replica:2,fsdp:4", zero=3, memory="save:136MiB", reduce="int8", state=StatePlan(moments="int8")),
        Plan(pipeline="1f1b:2x4,stages=3+1,stash=input", kernels="attention=chunked,loss_chunk=8"),
        Plan(memory="full", offload=OffloadPlan(weights="host"), compiler="overlap,xla_gpu_enable_triton_gemm=false"),
        Plan(pipeline="2bw:2x4", precision="bfloat16", matmul="int8"),
        Plan(mesh="replica:2", diloco="every=3", memory="offload:pofo:12KiB"),
    ]
    files = [dumps({"version": PLAN_VERSION, **to_json(plan)}) for plan in plans]
    files += [dumps({"version": 1, **version_1_fields(plan)}) for plan in plans]
    path = folder / "plan.json"
    return written(path, lambda: read_plan(path)), files


def _experiments(folder: Path) -> list[Any]:
    """Return experiments with each class that experiment.json may name, whose text lies in a folder."""
    from jaxscale.data.text import Mixture, Text
    from jaxscale.models.decoder import Decoder
    from jaxscale.models.lora import LoRA
    from jaxscale.models.resnet import ResNet
    from jaxscale.recipe.experiment import Experiment

    (folder / "text.txt").write_text("a text of some length\n" * 9)
    text = Text(folder / "text.txt", context=16)
    model = Decoder(vocab=256, context=16, layers=2, embed=8, heads=2, dropout=0.1)
    plain = Experiment(name="fuzzed", model=model, data=text, steps=8, batch=4)
    return [
        plain,
        dataclasses.replace(plain, data=Mixture((text, text), (3.0, 1.0)), model=LoRA(model, rank=2, base="int4")),
        dataclasses.replace(plain, data=None, model=ResNet(classes=3, stages=(1, 1), width=8)),
    ]


def _prepare_experiment(folder: Path) -> Prepared:
    from jaxscale.errors import UserError
    from jaxscale.records.directory import EXPERIMENT, check_same_experiment
    from jaxscale.records.source import load_experiment
    from jaxscale.values import to_json

    experiments = _experiments(folder)

    def read() -> None:
        with contextlib.suppress(UserError):
            check_same_experiment(folder, experiments[0])
        load_experiment(folder)

    files = [to_json(experiment) for experiment in experiments]
    files += [{name: files[0][name] for name in ("name", "model", "data", "steps", "batch")}]
    return written(folder / EXPERIMENT, read), [*map(dumps, files)]


def _prepare_source(folder: Path) -> Prepared:
    from jaxscale.records.source import FOLDER, SOURCE_JSON, Source, written_sha256

    source = Source("fuzzed", "text = 1", "/nowhere/a.py", "a.py", "tiny", {"batch": "8"}, {"version": 2}, 3)
    source.write(folder)
    path = folder / FOLDER / SOURCE_JSON

    def read() -> None:
        written_sha256(folder)
        Source.read(folder)

    return written(path, read), [path.read_bytes()]


def _prepare_decision(folder: Path) -> Prepared:
    from jaxscale.memory.decision import Decision, read_decision
    from jaxscale.memory.plan import MemoryPlan
    from jaxscale.memory.save_set import SaveSet
    from jaxscale.values import to_json

    path = folder / "memory.json"
    saves = (SaveSet("block", ("up", "down"), bytes=64), SaveSet("head", (), bytes=8))
    decision = Decision(MemoryPlan.parse("save:1MiB"), saves, layers=2, bytes=192, blocks=("block", "head"))
    return written(path, lambda: read_decision(path)), [dumps(to_json(decision))]


def _prepare_actions(folder: Path) -> Prepared:
    from jaxscale.training.traced_actions import ACTIONS, read_actions

    content = {"operations": {"F": ["dot.1", "add.2"], "B": []}, "ranks": {"0": 0, "1": 1}, "processes": 1}
    return written(folder / ACTIONS, lambda: read_actions(folder / ACTIONS)), [dumps(content)]


TARGETS = (
    Target(
        "safetensors", mutate.SAFETENSORS, _prepare_safetensors, ("F32", "BF16", "I64", "U8", "BOOL", "__metadata__")
    ),
    Target("safetensors index", mutate.JSON, _prepare_index, ("..", "model.safetensors")),
    Target("config.json", mutate.JSON, _prepare_config, ("type", "layer_types", "sliding_attention", "rope_type")),
    Target("weights", mutate.SAFETENSORS, _prepare_weights, ("F16", "I32", "lm_head.weight", "model.norm.bias")),
    Target("tokenizer.json", mutate.JSON, _prepare_tokenizer),
    Target("tokenizer of a run", mutate.JSON, _prepare_run_tokenizer),
    Target("chats", mutate.LINES, _prepare_documents),
    Target("state.json", mutate.JSON, _prepare_dataset, ("_indices_files", "../a.arrow", "a\0", "splits")),
    Target("token cache", mutate.JSON, _prepare_cache, ("uint16", "object", "float64", "U8")),
    Target("schedule", mutate.CELLS, _prepare_csv, ("0F0", "1B1", "0I0", "0W1", "0SEND_F0", "1RECV_F0", "OVERLAP_F_B")),
    Target("plan.json", mutate.JSON, _prepare_plan),
    Target("experiment.json", mutate.JSON, _prepare_experiment, ("models.ViT", "data.Images", "data.Rows", "callable")),
    Target("source.json", mutate.JSON, _prepare_source),
    Target("memory.json", mutate.JSON, _prepare_decision),
    Target("actions.json", mutate.JSON, _prepare_actions),
)
