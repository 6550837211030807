"""`jaxscale finetune` through a whole run: measured, trained, continued, evaluated, answered with, and exported."""

import dataclasses
import json

import numpy as np
import pytest

import jaxscale as jx
from jaxscale.checkpoint.export import export
from jaxscale.checkpoint.restore import read_template
from jaxscale.cli.main import main
from jaxscale.data import Chats
from jaxscale.data.chat.chat_template import folder_tokenizer
from jaxscale.models import LoRA, Pretrained
from jaxscale.models.huggingface import load
from jaxscale.recipe.fine_tuning import fine_tuning
from jaxscale.training.evaluate import evaluate
from jaxscale.training.generate import generate, stream
from tests.chat_folders import chat_file, model_folder, template_folder, turns
from tests.system.whole import compiled_once


@pytest.fixture(scope="module", autouse=True)
def _one_step_each():
    """Runs of one experiment and plan share their compiled step."""
    with compiled_once():
        yield


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with the model "tiny", and files of chats."""
    place = tmp_path_factory.mktemp("finetune")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAXSCALE_CACHE", str(place / "cache"))
        model_folder(place / "tiny", "llama3")
        config = json.loads((place / "tiny" / "config.json").read_text())
        (place / "tiny" / "config.json").write_text(json.dumps(config | {"eos_token_id": 9, "bos_token_id": 5}))
        (place / "tiny" / "generation_config.json").write_text('{"eos_token_id": [9, 6]}')
        chat_file(place / "chats.jsonl", [turns(f"What is {i}?", f"It is {i}, my lord.") for i in range(24)])
        chat_file(place / "held_out.jsonl", [turns(f"What is {i}?", f"It is {i}.", "Why?", "It is.") for i in range(5)])
        yield place


@pytest.fixture(scope="module")
def whole(place):
    """The directory of a finished run of adapters, started from the command line."""
    words = ["finetune", str(place / "tiny"), "--data", str(place / "chats.jsonl"), "--lora", "2", "--steps", "4"]
    words += ["--eval", str(place / "held_out.jsonl"), "--batch", "2", "--out", str(place / "whole"), "--seed", "3"]
    words += ["--plan.mesh", "1", "--optimizer.learning-rate", "1e-2", "--model.on", "attention"]
    assert main(words) == 0
    return place / "whole"


def test_the_experiment_and_the_loss_before_the_first_step(place, whole):
    run = jx.Run.open(whole)
    assert run.experiment.model == LoRA(Pretrained(place / "tiny"), rank=2, on="attention")
    assert isinstance(run.experiment.data, Chats)
    assert run.experiment.data.context == 64, "the longest chat"
    assert (run.experiment.seed, run.experiment.optimizer.learning_rate) == (3, 1e-2)
    assert [row["step"] for row in run.evaluations] == [0, 1, 2, 3, 4]
    before = evaluate(place / "tiny", data=place / "held_out.jsonl")
    assert before["loss"] == pytest.approx(run.evaluations[0]["loss"], rel=1e-5)
    assert before["targets"] == run.evaluations[0]["targets"]
    assert run.held_out_loss < run.evaluations[0]["loss"] - 0.01
    command = json.loads((whole / "source" / "source.json").read_text())["command"]
    assert command.startswith(f"jaxscale finetune {place / 'tiny'} --data {place / 'chats.jsonl'} --eval")
    assert "--lora 2" in command
    assert "--model.on=attention" in command
    assert command.split()[1] in (whole / "report.html").read_text()


def test_a_cut_run_continues_bit_for_bit(place, whole):
    experiment = jx.Run.open(whole).experiment
    stop = [lambda event: event.kind == "step" and event.step == 2]
    jx.train(experiment, out=place / "cut", quiet=True, callbacks=stop)
    assert jx.Run.open(place / "cut").step < 4
    continued = jx.train(jx.Run.open(place / "cut").experiment, out=place / "cut", quiet=True)
    expected = jx.Run.open(whole)
    for found, wanted in zip(*(np.asarray(run.state.params["blocks"]["layers"]["attention"]["q"]["lora"]["b"])
                               for run in (continued, expected)), strict=True):  # fmt: skip
        np.testing.assert_array_equal(found, wanted)
    assert [row["step"] for row in continued.evaluations] == [0, 1, 2, 3, 4]
    assert continued.held_out_loss == expected.held_out_loss


def test_merged_weights_are_the_adapted_model_and_all_files_travel(place, whole):
    folder = export(whole, place / "merged")
    on_file = evaluate(whole, data=place / "held_out.jsonl")
    assert on_file["loss"] == pytest.approx(jx.Run.open(whole).held_out_loss, rel=1e-6)
    assert evaluate(folder, data=place / "held_out.jsonl")["loss"] == pytest.approx(on_file["loss"], abs=1e-5)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (folder / name).read_bytes() == (place / "tiny" / name).read_bytes()
    assert (folder / "chat_template.jinja").read_text() == read_template(whole).source
    config = json.loads((folder / "config.json").read_text())
    assert (config["eos_token_id"], config["bos_token_id"]) == (9, 5)
    original = load(place / "tiny")[1]["blocks"]["layers"]["attention"]["q"]["weight"]
    assert not np.array_equal(load(folder)[1]["blocks"]["layers"]["attention"]["q"]["weight"], original)
    settings = {"tokens": 6, "temperature": 0.0}
    answer = generate(whole, "What is 3?", **settings)
    assert generate(folder, "What is 3?", **settings) == answer
    assert jx.Run.open(whole).generate("What is 3?", **settings) == answer
    assert "".join(stream(folder, "What is 3?", **settings)) == answer


def test_a_prompt_is_a_message_or_is_continued(place, whole, capsys):
    template, settings = read_template(whole), {"tokens": 4, "temperature": 0.0}
    rendered = template.prompt("Hi")
    assert rendered.endswith("<|start_header_id|>assistant<|end_header_id|>\n\n")
    answer = generate(place / "tiny", "Hi", **settings)
    assert answer == generate(place / "tiny", rendered, chat=False, **settings)
    assert generate(place / "tiny", ["Hi", "Ho"], chat=True, **settings)[0] == answer
    assert main(["generate", str(place / "tiny"), "--prompt", "Hi", "--tokens", "4", "--temperature", "0"]) == 0
    assert capsys.readouterr().out == f"{answer}\n"
    words = ["generate", str(place / "tiny"), "--prompt", "Hi", "--tokens", "4", "--temperature", "0", "--chat", "no"]
    assert main(words) == 0
    assert capsys.readouterr().out == f"Hi{generate(place / 'tiny', 'Hi', chat=False, **settings)}\n"


def test_samples_of_a_run_on_chats_are_answers(place):
    experiment = fine_tuning(place / "tiny", place / "chats.jsonl", steps=1, batch=2)
    experiment = dataclasses.replace(experiment, samples=jx.Samples(prompts=("Hi",), tokens=4, temperature=0.0))
    run = jx.train(experiment, jx.Plan(mesh="1"), out=place / "sampled", quiet=True)
    assert run.samples[0].text == run.generate("Hi", tokens=4, temperature=0.0)
    assert experiment.optimizer.train is None
    assert run.experiment.model == Pretrained(place / "tiny")


def test_evaluate_of_a_folder_on_text_counts_every_token(place, capsys):
    (place / "text.txt").write_text("To be, or not to be: that is the question. " * 20)
    assert main(["evaluate", str(place / "tiny"), "--data", str(place / "text.txt")]) == 0
    figures = dict(line.split() for line in capsys.readouterr().out.splitlines())
    assert figures.keys() == {"loss", "targets"}
    assert abs(float(figures["loss"]) - np.log(448)) < 0.5
    text, tokenizer = (place / "text.txt").read_text(), folder_tokenizer(place / "tiny")
    count = len(tokenizer.encode(text))
    assert float(figures["targets"]) == count - 1
    (place / "text.txt").write_text("To be")
    assert evaluate(place / "tiny", data=place / "text.txt")["targets"] == len(tokenizer.encode("To be")) - 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["finetune", "tiny"], "finetune lacks --data: expected a JSONL file of chats"),
        (["finetune", "missing", "--data", "chats.jsonl"], "missing: no such folder"),
        (["finetune", "plain", "--data", "chats.jsonl"], "plain has no chat template"),
        (["finetune", "bare", "--data", "chats.jsonl"], "bare has no tokenizer.json"),
        (["finetune", "tiny", "--data", "missing.jsonl"], "no such file: "),
        (["finetune", "tiny", "--data", "text.jsonl"], "text.jsonl:1: not JSON"),
        (["finetune", "tiny", "--data", "chats.jsonl", "--lora", "0"], "--lora: got 0, expected a whole number >= 1"),
        (["finetune", "tiny", "--data", "chats.jsonl", "--batch", "0"], "--batch: got 0"),
        (["finetune", "tiny", "--data", "chats.jsonl", "--epochs", "0"], "epochs: got 0.0, expected a number above 0"),
        (["finetune", "tiny", "--data", "chats.jsonl", "--epochs", "1", "--steps", "1"], "steps or epochs, not both"),
        (["finetune", "tiny", "--data", "chats.jsonl", "--log-every", "0"], "--log-every: got 0"),
        (["finetune", "tiny", "--data", "chats.jsonl", "--limit", "0"], "--limit: got 0, expected at least 1B"),
        (["finetune", "tiny", "--data", "chats.jsonl", "--resume", "never", "--from", "2"], "leave one of them out"),
        (["finetune", "tiny", "--data", "chats.jsonl", "--context", "999"], "data.context is 999, but model.context"),
        (["finetune", "tiny", "--data", "chats.jsonl", "--lora", "2", "--model.rnk", "2"], "did you mean"),
        (["finetune", "narrow", "--data", "chats.jsonl"], "tokenizer.json has 400 tokens, but the model 64: resize"),
        (["finetune", "vit", "--data", "chats.jsonl"], "vit holds a ViT, which reads no chats"),
        (["generate", "plain", "--chat", "yes"], "plain has no chat template"),
        (["generate", "bare"], "bare has no tokenizer.json"),
        (["generate", "tiny", "--best"], "tiny is a model folder, which has no checkpoints"),
        (["evaluate", "tiny"], "tiny is a model folder: got no data, expected a file of chats"),
        (["evaluate", "tiny", "--best", "--data", "chats.jsonl"], "got best, but a folder has no checkpoints"),
        (["evaluate", "vit", "--data", "chats.jsonl"], "vit holds a ViT, expected a language model"),
        (["export", "tiny", "out"], "tiny is a model folder of Hugging Face, expected the directory of a run"),
        (["report", "tiny"], "tiny is a model folder of Hugging Face"),
    ],
)
def test_a_mistake_is_one_sentence(place, monkeypatch, capsys, words, message):
    monkeypatch.chdir(place)
    if not (place / "vit").exists():
        for name, fields in (("plain", {}), ("bare", {}), ("narrow", {"vocab": 64})):
            model_folder(place / name, **fields)
        (place / "plain" / "tokenizer_config.json").unlink()
        (place / "bare" / "tokenizer.json").unlink()
        (place / "text.jsonl").write_text("To be\n")
        template_folder(place / "vit")
        vit = json.dumps({"architectures": ["ViTForImageClassification"], "image_size": 8, "patch_size": 4} | VIT)
        (place / "vit" / "config.json").write_text(vit)
    assert main(words) == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.splitlines()) == 1


VIT = {
    "model_type": "vit",
    "num_channels": 3,
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-12,
    "qkv_bias": True,
    "id2label": {"0": "a", "1": "b"},
}


def test_a_damaged_template_of_a_run_is_named(place, whole, tmp_path):
    path = whole / "chat_template.json"
    text = path.read_text()
    path.write_text(text.replace("trim", "trin"))
    with pytest.raises(jx.UserError, match=r"chat_template.json is not what the run wrote"):
        generate(whole, "Hi")
    path.write_text(text)
