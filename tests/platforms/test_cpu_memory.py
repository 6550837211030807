"""Freed memory is kept on a CPU: the steps of a loop of one's own have no page faults after the first ones."""

import ctypes
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import jax
import pytest

import jaxscale as jx
from jaxscale.platforms import cpu_memory
from jaxscale.platforms.cpu_memory import keep_freed_memory
from tests import quick

SETTINGS = (*cpu_memory._VARIABLES, "GLIBC_TUNABLES")
LOOP = """
import resource
import numpy as np
import jaxscale as jx

model = jx.models.Decoder(vocab=256, context=128, layers=2, embed=64, heads=4)
step = jx.build(jx.Experiment("loop", model, jx.data.Text("text.txt", context=128), batch=64), jx.Plan(mesh="1"))
tokens = np.zeros((64, 128), np.int32)
state, batch = step.init(), step.place({"tokens": tokens, "targets": tokens})
faults = []
for _ in range(8):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    state, metrics = step(state, batch)
    float(metrics["loss"])
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print(sorted(faults[2:])[2])  # a thread that joins late under load brings pages of its own
"""


@pytest.mark.skipif(sys.platform != "linux", reason="an option of glibc")
def test_a_step_of_a_loop_of_ones_own_reuses_its_memory() -> None:
    environment = {name: text for name, text in quick.environment().items() if name not in SETTINGS}
    process = subprocess.run([sys.executable, "-c", LOOP], env=environment, capture_output=True, check=True)
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

    for name in SETTINGS:
        monkeypatch.delenv(name, raising=False)
    if variable:
        monkeypatch.setenv(variable, "glibc.malloc.arena_max=2" if variable == "GLIBC_TUNABLES" else "2")
    monkeypatch.setattr(ctypes, "CDLL", lambda name: Library)
    monkeypatch.setattr(cpu_memory, "is_backend_started", lambda: True)
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    keep_freed_memory()
    assert bool(options) is is_kept


@pytest.mark.parametrize(
    ("platforms", "devices", "is_cpu"),
    [
        ("cpu", {"gpu"}, True),
        ("cpu,cuda", {"gpu"}, True),
        ("cuda,cpu", {"gpu"}, False),
        (None, {"tpu"}, False),
        (None, (), True),
    ],
)
def test_before_the_backend_starts_the_platform_follows_from_settings_and_devices(
    monkeypatch: pytest.MonkeyPatch, platforms: str | None, devices: Any, is_cpu: bool
) -> None:
    monkeypatch.setattr(cpu_memory, "is_backend_started", lambda: False)
    monkeypatch.setattr(cpu_memory, "accelerators", lambda: frozenset(devices))
    monkeypatch.setattr(cpu_memory, "jax", SimpleNamespace(config=SimpleNamespace(jax_platforms=platforms)))
    assert cpu_memory._computes_on_cpu() is is_cpu


def test_a_build_in_a_process_whose_backend_runs_leaves_the_allocator_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[None] = []
    monkeypatch.setattr("jaxscale.step.build.keep_freed_memory", lambda: calls.append(None))
    jax.devices()
    model = jx.models.Decoder(vocab=64, context=16, layers=1, embed=16, heads=2)
    experiment = jx.Experiment("small", model, jx.data.Text("text.txt", context=16), batch=8)
    jx.build(experiment, jx.Plan(mesh="1"))
    assert not calls
    monkeypatch.setattr("jaxscale.step.build.is_backend_started", lambda: False)
    jx.build(experiment, jx.Plan(mesh="1"))
    assert len(calls) == 1
