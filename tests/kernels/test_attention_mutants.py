"""Tests of the tests: bugs planted in the GPU's forward, each of which the interpreter's race detector must find."""

import os
import pathlib
import subprocess
import sys

import pytest

import pallas_kernels
from tests.kernels import battery

pytestmark = pytest.mark.slow

FOLDER = pathlib.Path(pallas_kernels.__file__).parent
ATTENTION, SHARED = "attention/gpu.py", "mosaic_gpu.py"
PRODUCT = "acc = mg.matmul_add(acc, p.astype(v.dtype), v_s.at[slot], is_interpreted=sizes.is_interpreted)"
RELEASE = "mg.release(v_free.at[slot], was_loaded=sizes.is_interpreted)"
INDENT = "\n" + " " * 16
LAST = "plgpu.copy_smem_to_gmem(lse_s.at[wg], lse_g.at[b, n, rows])\n            plgpu.wait_smem_to_gmem(0)"
STORED = "jnp.log(total))\n            plgpu.commit_smem()"

MUTANTS = {
    "none": (ATTENTION, "", ""),
    "a product does not wait for its keys": (ATTENTION, "plgpu.barrier_wait(k_ready.at[slot])\n", "pass\n"),
    "the output is not committed before it is copied": (
        ATTENTION,
        STORED,
        STORED.replace("plgpu.commit_smem()", "pass"),
    ),
    "the copy out is not waited for": (ATTENTION, LAST, LAST.replace("plgpu.wait_smem_to_gmem(0)", "pass")),
    "the copier does not wait for a free slot": (SHARED, "plgpu.barrier_wait(free.at[slot])", "pass"),
    "a slot is released before its product": (ATTENTION, PRODUCT + INDENT + RELEASE, RELEASE + INDENT + PRODUCT),
    "one arrival too many": (ATTENTION, RELEASE, RELEASE + INDENT + RELEASE),
}

PROGRAM = """
import sys, types, pathlib
folder, file, old, new = sys.argv[1:]
import jax, jax.numpy as jnp
from pallas_kernels import mosaic_gpu
from pallas_kernels.attention import gpu
from pallas_kernels.attention.reference import Options

def changed(name, module):
    source = (pathlib.Path(folder) / name).read_text()
    if name == file:
        assert source.count(old) if old else True
        source = source.replace(old, new, 1) if old else source
    made = types.ModuleType(module.__name__)
    sys.modules[module.__name__] = made
    exec(compile(source, name, "exec"), made.__dict__)
    return made

shared = changed("mosaic_gpu.py", mosaic_gpu)
mutant = changed("attention/gpu.py", gpu)
mutant.mg = shared
q = jax.random.normal(jax.random.key(0), (1, 256, 2, 64), jnp.bfloat16)
tiles = mutant.Tiles(kv=64)
out = mutant.forward(q, q, q, None, None, None, Options(False, scale=0.1), tiles, "races")
jax.block_until_ready(out)
print("FINISHED")
"""


RACE = "RuntimeError: RACE DETECTED"
SAID = dict.fromkeys(MUTANTS, (RACE,)) | {
    "none": ("FINISHED",),
    # not a race of threads: the interpreter counts copies that nobody waited for
    "the copy out is not waited for": ("read-side operations completed before kernel finished",),
    # or a barrier that is a phase ahead of those who wait for it, where threads come to it in that order
    "one arrival too many": (RACE, "but no threads observed phase", "but barrier is already at phase"),
}
"""What the interpreter says of each, one of these."""


@pytest.mark.parametrize("name", MUTANTS if battery.GPU_INTERPRETER else [])
def test_planted_bugs_are_found(name):
    file, old, new = MUTANTS[name]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    command = [sys.executable, "-c", PROGRAM, str(FOLDER), file, old, new]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=120, env=environment, cwd=FOLDER.parent, check=False
        )
    except subprocess.TimeoutExpired:
        assert name == "one arrival too many", "it hangs"
        return
    said = done.stdout + done.stderr
    assert any(words in said for words in SAID[name]), said[-2000:]
    assert ("FINISHED" in done.stdout) == (name == "none"), said[-2000:]
