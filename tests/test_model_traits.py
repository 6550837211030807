"""What plans and checks of data read from a model: reported by the model, or read from fields of the same names."""

import dataclasses
import types

import pytest
from flax import nnx

import jaxscale as jx
from jaxscale.state.stages import period_of
from jaxscale.training.check_data import check_data


@dataclasses.dataclass(frozen=True)
class Family:
    """A user's model family whose fields have names of their own."""

    positions: int = 8
    alphabet: int = 16

    def traits(self):
        return jx.ModelTraits(context=self.positions, vocab=self.alphabet, windows=(4, None))

    def build(self, rngs, *, vocab_multiple=1):
        raise NotImplementedError

    def loss(self, module, batch, context):
        raise NotImplementedError

    def logical_sizes(self):
        return {}


def test_a_family_reports_its_traits():
    traits = jx.ModelTraits.of(Family())
    assert (traits.context, traits.vocab, traits.layers) == (8, 16, None)
    assert period_of(Family()) == 2


def test_fields_of_the_same_names_are_read():
    decoder = jx.models.Decoder(vocab=16, context=8, layers=2, heads=2, embed=16)
    traits = jx.ModelTraits.of(decoder)
    assert (traits.layers, traits.context, traits.vocab, traits.generates, traits.foreign) == (2, 8, 16, True, False)
    assert jx.ModelTraits.of(
        jx.models.ForeignModel(make=lambda rngs: nnx.Module(), score=jx.models.classification())
    ).foreign
    assert jx.ModelTraits.of(object()) == jx.ModelTraits()


def test_data_are_checked_against_reported_traits():
    tokens = types.SimpleNamespace(tokenizer=types.SimpleNamespace(size=17))
    experiment = jx.Experiment("family", Family(), data=None, steps=1, batch=1)
    with pytest.raises(jx.UserError, match=r"the tokenizer has 17 tokens, but model\.vocab is 16"):
        check_data(experiment, tokens)
