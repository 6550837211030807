"""Threads of XLA:CPU where devices wait for one another."""

import os

import jax
import pytest

from jaxscale.platforms import cpu_threads
from jaxscale.platforms.cpu_threads import provide_threads


@pytest.fixture
def before_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process of 2 cores whose backend has not started, on 8 virtual devices."""
    monkeypatch.delenv("NPROC")
    monkeypatch.setattr(cpu_threads, "is_backend_started", lambda: False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1}, raising=False)


@pytest.mark.usefixtures("before_start")
@pytest.mark.parametrize(("flags", "threads"), [("--xla_force_host_platform_device_count=8", "24"), ("", None)])
def test_three_threads_a_device(monkeypatch: pytest.MonkeyPatch, flags: str, threads: str | None) -> None:
    monkeypatch.setenv("XLA_FLAGS", flags)
    assert not provide_threads()
    assert os.environ.get("NPROC") == threads


@pytest.mark.usefixtures("before_start")
def test_the_number_of_devices_may_be_a_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_threads, "_configured_device_count", lambda: 4)
    assert not provide_threads()
    assert os.environ["NPROC"] == "12"


@pytest.mark.usefixtures("before_start")
def test_what_the_environment_has_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NPROC", "2")
    assert not provide_threads()
    assert os.environ["NPROC"] == "2"


@pytest.mark.usefixtures("before_start")
def test_a_backend_that_runs_with_few_threads_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_threads, "is_backend_started", lambda: True)
    assert len(jax.devices()) == 8
    assert "set NPROC=24 in the environment before JAX starts" in provide_threads()
    assert "NPROC" not in os.environ
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(24)), raising=False)
    assert not provide_threads()
