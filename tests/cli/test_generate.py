"""`jaxscale generate`: its flags, and the text as it is drawn."""

import pytest

from jaxscale.cli.main import main
from jaxscale.data import Text
from jaxscale.models import Decoder
from jaxscale.recipe.experiment import Experiment
from jaxscale.recipe.plan import Plan
from jaxscale.training.generate import generate
from jaxscale.training.loop import train


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("generate")
    (folder / "text.txt").write_text("a text of some words, " * 200)
    model = Decoder(vocab=256, context=32, layers=1, embed=16, heads=2)
    data = Text(str(folder / "text.txt"), context=32)
    train(Experiment("tiny", model, data, steps=2, batch=8), Plan(mesh="1"), out=folder / "run", quiet=True)
    return str(folder / "run")


def test_the_streamed_text_is_that_of_the_function(run_dir, capsys):
    assert main(["generate", run_dir, "--prompt", "a ", "--tokens", "9", "--top-k", "40", "--seed", "3"]) == 0
    output = capsys.readouterr().out
    assert output == f"a {generate(run_dir, 'a ', 9, top_k=40, seed=3)}\n"


def test_several_samples_are_numbered(run_dir, capsys):
    assert main(["generate", run_dir, "--prompt", "a ", "--tokens", "5", "--samples", "2", "--stop", "text"]) == 0
    first, second = generate(run_dir, "a ", 5, samples=2, stop=("text",))
    assert capsys.readouterr().out == f"--- 1 of 2\na {first}\n--- 2 of 2\na {second}\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--tokens", "0"], "--tokens: got 0, expected a whole number >= 1"),
        (["--top-k", "0"], "--top-k: got 0, expected a whole number >= 1; leave it out"),
        (["--top-p", "0"], "--top-p: got 0.0, expected a number above 0 and at most 1"),
        (["--top-p", "1.5"], "--top-p: got 1.5"),
        (["--min-p", "-1"], "--min-p: got -1.0, expected a share from 0 to 1"),
        (["--stop", ""], "--stop: got '', expected a text"),
        (["--samples", "0"], "--samples: got 0"),
        (["--seed", "4294967296"], "--seed: got 4294967296"),
        (["--temperature", "-1"], "--temperature: got -1.0, expected a number >= 0"),
        (["--prompt", ""], "prompt"),
    ],
)
def test_a_wrong_setting_is_one_sentence(run_dir, capsys, words, message):
    assert main(["generate", run_dir, *words]) == 2
    output = capsys.readouterr()
    assert message in output.err
    assert output.err.count("\n") == 1
