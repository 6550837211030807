"""Decoder as a value: what is refused, what is implied, that it needs neither JAX nor Flax."""

import subprocess
import sys

import numpy as np
import pytest

from jaxscale.errors import UserError
from jaxscale.models.decoder import Decoder, Llama3Scaling


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"vocab": 0}, "vocab: got 0, expected a whole number >= 1$"),
        ({"layers": -1}, "layers: got -1"),
        ({"embed": "wide"}, "embed: got 'wide', expected a whole number"),
        ({"tied": "yes"}, "tied: got 'yes', expected true or false"),
        ({"kv_heads": 0}, "kv_heads: got 0, expected a whole number >= 1"),
        ({"heads": 5}, "heads: got 5, expected a divisor of embed 768; change one, or give head_dim"),
        ({"kv_heads": 5}, "kv_heads: got 5, expected a divisor of heads 12"),
        ({"embed": 15, "heads": 5}, "head_dim: got 3, expected an even number for rotary"),
        ({"head_dim": 7}, "head_dim: got 7, expected an even number"),
        ({"norm": "rsm"}, "norm: got 'rsm', expected rms or layer or layer_no_bias; did you mean 'rms'"),
        ({"mlp_kind": "swigul"}, "mlp_kind: got 'swigul'.*did you mean 'swiglu'"),
        ({"positions": "rotery"}, "did you mean 'rotary'"),
        ({"norm_eps": 0.0}, "norm_eps: got 0.0, expected a number > 0"),
        ({"rotary_base": float("nan")}, "rotary_base: got nan"),
        ({"final_soft_cap": -1.0}, "final_soft_cap: got -1.0"),
        ({"attention_scale": float("inf")}, "attention_scale: got inf"),
        ({"dropout": 1.0}, "dropout: got 1.0, expected a rate"),
        ({"dropout": float("nan")}, "dropout: got nan"),
        ({"z_loss": -1e-4}, "z_loss: got -0.0001, expected a weight >= 0"),
        ({"windows": ()}, r"windows: got \(\), expected at least one entry"),
        ({"windows": (0,)}, "windows: got 0 in"),
        ({"windows": (4,) * 13}, "windows: got 13 entries, expected at most one for each of the 12 layers"),
        ({"positions": "learned", "rotary_scaling": Llama3Scaling()}, "rotary_scaling: got positions"),
        ({"norm": "layer", "norm_plus_one": True}, "norm_plus_one: got norm 'layer', expected 'rms'"),
    ],
)
def test_a_field_out_of_range_is_refused(fields, message):
    with pytest.raises(UserError, match=message):
        Decoder(**({"vocab": 8} | fields))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"factor": 0.0}, "rotary_scaling.factor: got 0.0"),
        ({"original_context": 0}, "rotary_scaling.original_context: got 0"),
        ({"low_freq_factor": 4.0}, "expected high_freq_factor to be greater"),
    ],
)
def test_a_scaling_out_of_range_is_refused(fields, message):
    with pytest.raises(UserError, match=message):
        Llama3Scaling(**fields)


def test_llama3_scaling_is_the_published_rule():
    scaling = Llama3Scaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context=8192)
    plain = 5e5 ** -np.linspace(0, 1, 64, endpoint=False)
    scaled = scaling(plain)
    for frequency, found in zip(plain, scaled, strict=True):
        wavelength = 2 * np.pi / frequency
        if wavelength < 8192 / 4:
            expected = frequency
        elif wavelength > 8192 / 1:
            expected = frequency / 8
        else:
            smooth = (8192 / wavelength - 1) / (4 - 1)
            expected = (1 - smooth) * frequency / 8 + smooth * frequency
        np.testing.assert_allclose(found, expected, rtol=1e-12)
    assert (plain == scaled).any()
    assert (plain / 8 == scaled).any()


def test_a_mistyped_field_is_answered_without_jax():
    code = """
import sys
from jaxscale.models.decoder import Decoder
from jaxscale.models.huggingface import read_config
try:
    Decoder(vocab=8, norm="rsm")
except ValueError as error:
    print(error)
assert not {"jax", "flax"} & set(sys.modules), "imported"
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "did you mean 'rms'" in done.stdout, done.stderr
    assert done.returncode == 0, done.stderr
