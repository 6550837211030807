"""Freed memory is kept on a CPU: the steps of a loop of one's own have no page faults after the first ones."""

import ctypes
import subprocess
import sys

import jax
import pytest

from jaxscale.platforms import cpu_memory
from jaxscale.platforms.cpu_memory import keep_freed_memory
from tests import quick

LOOP = """
import resource
import numpy as np
import jaxscale as jx

model = jx.models.Decoder(vocab=256, context=128, layers=2, embed=64, heads=4)
step = jx.build(jx.Experiment("loop", model, jx.data.Text("text.txt", context=128), batch=64), jx.Plan(mesh="1"))
tokens = np.zeros((64, 128), np.int32)
state, batch = step.init(), step.place({"tokens": tokens, "targets": tokens})
faults = []
for _ in range(4):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    state, metrics = step(state, batch)
    float(metrics["loss"])
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print(faults[-1])
"""


@pytest.mark.skipif(sys.platform != "linux", reason="an option of glibc")
def test_a_step_of_a_loop_of_ones_own_reuses_its_memory() -> None:
    process = subprocess.run([sys.executable, "-c", LOOP], env=quick.environment(), capture_output=True, check=True)
    # its logits alone, of 8 MiB, are 2,048 pages, which a step without kept memory touches anew
    assert int(process.stdout) < 500


@pytest.mark.parametrize(
    ("variable", "backend", "is_kept"),
    [("", "cpu", True), ("MALLOC_ARENA_MAX", "cpu", False), ("GLIBC_TUNABLES", "cpu", False), ("", "gpu", False)],
)
def test_other_backends_and_settings_of_the_environment_are_left_alone(
    monkeypatch: pytest.MonkeyPatch, variable: str, backend: str, is_kept: bool
) -> None:
    options: list[int] = []

    class Library:
        @staticmethod
        def mallopt(option: int, number: int) -> None:
            options.append(option)

    for name in (*cpu_memory._VARIABLES, "GLIBC_TUNABLES"):
        monkeypatch.delenv(name, raising=False)
    if variable:
        monkeypatch.setenv(variable, "glibc.malloc.arena_max=2" if variable == "GLIBC_TUNABLES" else "2")
    monkeypatch.setattr(ctypes, "CDLL", lambda name: Library)
    monkeypatch.setattr(cpu_memory, "is_backend_started", lambda: True)
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    keep_freed_memory()
    assert bool(options) is is_kept


def test_before_the_backend_starts_the_platform_follows_from_settings_and_devices(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cpu_memory, "is_backend_started", lambda: False)
    monkeypatch.setattr(cpu_memory, "accelerators", lambda: frozenset({"gpu"}))
    assert cpu_memory._computes_on_cpu() is (jax.config.jax_platforms == "cpu")
