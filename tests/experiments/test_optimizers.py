"""The experiments of optimizers across devices: every variant is refused nothing, and a few steps give their table."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "experiments"
FILES = ("diloco_shakespeare", "low_bit_states")


@pytest.mark.parametrize("name", FILES)
def test_every_variant_is_an_experiment_of_its_own(name: str) -> None:
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    made = [make() for make in module.VARIANTS.values()]
    assert module.experiment() in made
    assert len({one.name for one in made}) == len(made)
    assert len({(str(one.plan), one.optimizer) for one in made}) == len(made)


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_a_few_steps_give_a_table(name: str) -> None:
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    command = [sys.executable, str(FOLDER / f"{name}.py"), "--steps", "4"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert ended.returncode == 0, ended.stderr[-4000:]
    rows = {
        line.split()[0]: [float(v.replace(",", "")) for v in line.split()[1:]] for line in ended.stdout.splitlines()[1:]
    }
    if name == "low_bit_states":
        assert len(rows) == 10
        each = {way: values[1] for way, values in rows.items()}
        assert each["float32"] > 2 * each["int8"] > 2 * each["int4"]
        assert each["lion-int8"] < 0.6 * each["int8"]
    else:
        fewer = {way: values[2] for way, values in rows.items()}
        assert fewer["exact"] == 1
        assert fewer["int8"] > 3.5
        assert all(3.5 < values[0] < 4.5 for values in rows.values())
