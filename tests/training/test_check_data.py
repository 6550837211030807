"""The prompts of samples: the default one fits every alphabet, a user's own one must."""

import pytest

import jaxscale as jx
from jaxscale.errors import UserError
from jaxscale.generation.generator import Generator
from jaxscale.models import Decoder
from jaxscale.training.check_data import check_data
from jaxscale.training.generate import draw_samples


def experiment(tmp_path, **fields):
    (tmp_path / "text.txt").write_text("abracadabra " * 40)
    data = jx.data.Text(tmp_path / "text.txt", tokenizer="char", context=8)
    return jx.Experiment("letters", Decoder(vocab=8, context=8, layers=1, embed=8, heads=1), data, batch=2, **fields)


def test_the_default_prompt_of_a_text_without_line_breaks_is_its_first_character(tmp_path):
    letters = experiment(tmp_path)
    opened = letters.data.open(2, 0)
    check_data(letters, opened)
    step = jx.build(letters, jx.Plan(mesh="1"))
    generator = Generator.of_step(step, step.init())
    ((prompt, continuation),) = draw_samples(letters, opened.tokenizer, lambda: generator)
    assert prompt == " "
    assert len(continuation) == letters.samples.tokens


def test_a_prompt_of_ones_own_must_have_characters_of_the_text(tmp_path):
    letters = experiment(tmp_path, samples=jx.Samples(prompts=("x",)))
    with pytest.raises(UserError, match=r"samples\.prompts: 'x': the text contains 'x', unknown to this alphabet"):
        check_data(letters, letters.data.open(2, 0))


def test_a_prompt_longer_than_the_model_is_refused_before_the_run(tmp_path):
    letters = experiment(tmp_path, samples=jx.Samples(prompts=("abracadab",)))
    with pytest.raises(UserError, match=r"'abracadab' has 9 tokens, but model.context is 8 positions"):
        check_data(letters, letters.data.open(2, 0))


def test_an_experiment_without_data_is_refused_before_a_step_is_built(tmp_path):
    with pytest.raises(UserError, match="data: got None, expected what to train on"):
        jx.train(jx.Experiment("none", Decoder(vocab=8), None), out=tmp_path / "run", quiet=True)
