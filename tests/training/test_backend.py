"""What is set before a backend starts, seen from fresh processes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from jaxscale.platforms.cores import usable_cores
from jaxscale.platforms.detect import accelerators
from jaxscale.training.backend import make_cache_folder

SHOW = """
import json, jax
from jaxscale.training import backend
backend.accelerators = frozenset
backend.start_backend()
found = [jax.config.jax_platforms, jax.config.jax_num_cpu_devices, jax.config.jax_compilation_cache_dir]
print(json.dumps([*found, backend.usable_cores(), len(jax.devices())]))
"""


def started(**environment: str) -> list:
    kept = {name: text for name, text in os.environ.items() if name not in ("JAX_PLATFORMS", "XLA_FLAGS")}
    ended = subprocess.run(
        [sys.executable, "-c", SHOW], capture_output=True, text=True, check=True, env={**kept, **environment}
    )
    return json.loads(ended.stdout.splitlines()[-1])


def test_one_virtual_device_per_core_and_a_compile_cache(tmp_path: Path):
    platform, asked, cache, count, devices = started(JAXSCALE_CACHE=str(tmp_path))
    assert (platform, asked, devices) == ("cpu", count, count)
    assert cache == str(tmp_path / "compile")


def test_what_the_user_set_stays(tmp_path: Path):
    set_by_user = {"JAXSCALE_CACHE": str(tmp_path), "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "own")}
    assert started(**set_by_user, JAX_NUM_CPU_DEVICES="3")[1:3] == [3, str(tmp_path / "own")]
    flags = "--xla_force_host_platform_device_count=5"
    assert started(**set_by_user, XLA_FLAGS=flags)[-1] == 5


@pytest.mark.parametrize("names", [["accel0"], ["vfio", "vfio/0"], ["nvidia0"], ["kfd"]])
def test_accelerators_show_as_device_files(tmp_path: Path, names):
    (tmp_path / "null").touch()
    (tmp_path / "nvidia-caps").mkdir()
    assert not accelerators(tmp_path)
    *folders, file = names
    for folder in folders:
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "vfio").touch()  # there without any device, too
        assert not accelerators(tmp_path)
    (tmp_path / file).touch()
    assert accelerators(tmp_path)


def test_cores_within_a_quota(tmp_path: Path):
    quota = tmp_path / "cpu.max"
    whole = usable_cores(tmp_path / "none")
    assert whole >= 1
    for text, expected in {"max 100000": whole, "100000 100000": 1, "50000 100000": 1, "9900000 100000": whole}.items():
        quota.write_text(text)
        assert usable_cores(quota) == expected


def test_a_cache_that_cannot_be_written_is_left_out(tmp_path: Path, monkeypatch, capsys):
    (tmp_path / "file").touch()
    monkeypatch.setenv("JAXSCALE_CACHE", str(tmp_path / "file"))
    assert make_cache_folder() is None
    assert "compiled programs are not kept" in capsys.readouterr().err
