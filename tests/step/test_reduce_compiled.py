"""What a step with a codec sends, as the compilers of two TPU slices and of two GPU nodes have it: a cross-section of
`experiments/benchmarks/wire_bytes.py`, which has every codec.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[2] / "experiments" / "benchmarks" / "wire_bytes.py"


@pytest.mark.slow
@pytest.mark.parametrize(("platform", "compiler"), [("tpu", "libtpu"), ("gpu", "jax_plugins.xla_cuda13")])
def test_the_slow_axis_carries_codes_alone_and_a_planted_reduction_is_found(platform, compiler):
    pytest.importorskip(compiler)
    environment = {name: value for name, value in os.environ.items() if name not in ("JAX_PLATFORMS", "XLA_FLAGS")}
    command = [sys.executable, str(BENCHMARK), "--tiny", "--platform", platform]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert ended.stdout, ended.stderr
    figures = json.loads(ended.stdout.splitlines()[-1])
    assert len(figures) == 6
    assert [name for name, figure in figures.items() if not figure["holds"]] == []
