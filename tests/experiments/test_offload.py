"""The offload benchmark works; with the TPU's compiler at hand, its bars hold."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[2] / "experiments" / "benchmarks" / "offload.py"


def figures(*arguments):
    environment = {name: value for name, value in os.environ.items() if name not in ("JAX_PLATFORMS", "XLA_FLAGS")}
    command = [sys.executable, str(BENCHMARK), *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert ended.stdout, ended.stderr
    return json.loads(ended.stdout.splitlines()[-1])


@pytest.mark.slow
def test_offload_runs():
    found = figures("--tiny")
    assert {"pofo_over_the_best_of_the_others", "swapping_alone_over_pofo"} <= set(found)
    assert found["pofo_over_the_best_of_the_others"]["holds"]


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="asks the TPU's compiler")
@pytest.mark.parametrize("part", ["STATE", "ACTIVATIONS"])
def test_the_bytes_that_offload_saves(part):
    found = figures("--only", part)
    assert [name for name, figure in found.items() if not figure["holds"]] == []
