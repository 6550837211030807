"""A run killed with SIGKILL at random moments, during saves too, ends as if nothing had happened: bit for bit."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from quick import FLAGS

from jaxscale.records.metrics import read_metrics
from tests.training.watching import EXACT, described, last_lines


def kill_and_compare(folder: Path, steps: int, kills: int, seed: int) -> None:
    (folder / "text.txt").write_text("".join(f"line {i * i % 97} of the text. " for i in range(300)))
    program = Path(__file__).with_name("killing.py")
    done = subprocess.run(
        [sys.executable, program, folder, str(steps), str(kills), str(seed)],
        env={"PATH": "/usr/bin:/bin", "HOME": str(folder), "JAXSCALE_CACHE": str(folder / "cache"), "XLA_FLAGS": FLAGS},
        capture_output=True,
        text=True,
        timeout=1500,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    died, during_save = map(int, re.findall(r"killed (\d+) during_save (\d+)", done.stdout)[0])
    assert died == kills
    assert during_save >= 1
    whole, killed = folder / "whole", folder / "killed"
    assert last_lines(killed) == last_lines(whole)
    assert list(last_lines(whole)) == list(range(1, steps + 1))
    resumed = [row["step"] for row in read_metrics(killed, "event") if row["name"] == "resume"]
    assert len(resumed) == kills
    assert resumed == sorted(set(resumed)), "each time from a newer checkpoint"
    # parameters, optimizer state and the next batch, by the checksums and the state of the data
    assert described(killed, steps)["arrays"] == described(whole, steps)["arrays"]
    assert described(killed, steps)["data"] == described(whole, steps)["data"]
    counted = [[{name: row[name] for name in EXACT} for row in read_metrics(run, "train")] for run in (whole, killed)]
    assert counted[0] == counted[1]
    assert [p.name for p in (killed / "checkpoints").iterdir() if "tmp" in p.name] == []


def test_three_kills(tmp_path):
    kill_and_compare(tmp_path, steps=80, kills=3, seed=0)


@pytest.mark.slow
def test_twenty_kills(tmp_path):
    kill_and_compare(tmp_path, steps=420, kills=20, seed=1)
