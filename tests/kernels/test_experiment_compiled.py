"""Llama 3.2 1B as users have it, `experiments/llama_1b.py`, compiled for 16 TPU v5e chips that need not be here."""

import functools
import re
import runpy
from pathlib import Path

import pytest

from tests.kernels import aot

FILE = Path(__file__).parents[2] / "experiments" / "llama_1b.py"


def llama_1b():
    """The experiment, of its default plan."""
    return runpy.run_path(str(FILE))["experiment"]()


@pytest.mark.slow
@aot.tpu_compiler
def test_llama_1b_takes_the_kernels_and_has_no_scores():
    from jaxscale.planning.program import lowered_step

    (found,) = aot.compiled("tpu v5e:4x4", {"step": functools.partial(lowered_step, make=llama_1b)}).values()
    assert found.error is None
    assert found.kernels == 4  # of attention: the forward, twice as nothing is kept, dq, dk and dv
    assert {"attention_forward", "attention_dq", "attention_dkv"} <= set(re.findall(r"attention_[a-z]+", found.hlo))
    # activations are (layers, rows, 2048, 2048) as well: scores have 32 heads, or 8 groups of 4, before them
    assert not re.search(r"\[(\d+,)*(32|8,4),2048,2048\]", found.hlo)
