"""Two processes of four devices train as one device does, each feeding its own rows, or running its own stages.

Variants: `platforms/test_join.py` has a run of two processes beside one of one process by default.
"""

import json
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from test_equal_training import SINGLE, an_experiment, packed, trajectory

HERE = Path(__file__).parent


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"mesh": "replica:2,fsdp:2,tensor:2", "zero": "3"}, marks=pytest.mark.variant),
        pytest.param({"pipeline": "1f1b:2x2", "mesh": "fsdp:2,tensor:2", "zero": "1"}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_two_processes_of_four_devices_train_as_one_device_does(changes, tmp_path):
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    out = tmp_path / "found.npz"
    words = [
        [sys.executable, str(HERE / "one_of_two.py"), str(port), str(i), str(out), json.dumps(changes)] for i in (0, 1)
    ]
    running = [subprocess.Popen(w, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) for w in words]
    expected, params = trajectory(an_experiment(), SINGLE, packed())
    said = [process.communicate(timeout=300)[0] for process in running]
    assert [process.returncode for process in running] == [0, 0], "\n".join(said)
    found = np.load(out)
    np.testing.assert_allclose(found["numbers"], expected, rtol=1e-5)
    assert set(found.files) - {"numbers"} == set(params)
    for key, value in params.items():
        np.testing.assert_allclose(found[key], value, rtol=1e-5, atol=1e-5 * np.abs(value).max(), err_msg=key)
