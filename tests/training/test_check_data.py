"""The prompts of samples: the default one fits every alphabet, a user's own one must."""

import pytest

import jaxscale as jx
from jaxscale.errors import UserError
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
    module = jx.build(letters, jx.Plan(mesh="1"))
    ((prompt, continuation),) = draw_samples(letters, opened.tokenizer, lambda: module.module(module.init()))
    assert prompt == " "
    assert len(continuation) == letters.samples.tokens


def test_a_prompt_of_ones_own_must_have_characters_of_the_text(tmp_path):
    letters = experiment(tmp_path, samples=jx.Samples(prompts=("x",)))
    with pytest.raises(UserError, match=r"samples\.prompts: 'x': the text contains 'x', unknown to this alphabet"):
        check_data(letters, letters.data.open(2, 0))
