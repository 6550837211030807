"""With the compilers at hand: no pool of slots is copied in the loop of a pipeline (hazard 2)."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

OLD = jax.__version_info__ < (0, 11)
BENCHMARK = Path(__file__).parents[2] / "experiments" / "benchmarks" / "pipeline_memory.py"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("platform", "compiler"), [("tpu v5e:2x2", "libtpu"), ("gpu h100 x 4", "jax_plugins.xla_cuda13")]
)
def test_no_pool_is_copied_in_the_loop(platform, compiler):
    pytest.importorskip(compiler)
    environment = {name: value for name, value in os.environ.items() if name not in ("JAX_PLATFORMS", "XLA_FLAGS")}
    command = [sys.executable, str(BENCHMARK), "--platform", platform, "--only", "copies"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert ended.stdout, ended.stderr
    figures = json.loads(ended.stdout.splitlines()[-1])
    assert len(figures) == 8
    # XLA:GPU of JAX 0.10 copies pools of residuals that branches hand on
    copying = ["h100: 1f1b residuals: pools copied in the loop"] if "gpu" in platform and OLD else []
    assert [name for name, figure in figures.items() if not figure["holds"]] == copying
