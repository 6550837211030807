"""What a test sees of a run from outside, while it goes on and after it was killed: its files alone."""

import json
from pathlib import Path

EXACT = ("step", "loss", "grad_norm", "learning_rate", "tokens")
"""Of a line of the log: what an interruption must not change by a bit."""


def last_lines(run: Path) -> dict[int, dict]:
    """The last line of each step, read without jaxscale."""
    found = {}
    for line in (run / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)  # a torn line would raise
        if row["kind"] == "train":
            found[row["step"]] = {name: row[name] for name in EXACT}
    return found


def lines(out: Path) -> int:
    """How many steps the log tells of."""
    log = out / "metrics.jsonl"
    return log.read_bytes().count(b'"kind": "train"') if log.exists() else 0


def saving(out: Path) -> bool:
    """Whether a checkpoint is being written."""
    folder = out / "checkpoints"
    return folder.exists() and any(".orbax-checkpoint-tmp" in item.name for item in folder.iterdir())


def newest(out: Path) -> int:
    """Step of the newest checkpoint that was saved to its end."""
    folder = out / "checkpoints"
    names = [item.name for item in folder.iterdir()] if folder.exists() else []
    return max((int(name) for name in names if name.isdigit()), default=0)


def described(run: Path, step: int) -> dict:
    """What the checkpoint of a step says of itself."""
    file = run / "checkpoints" / f"{step:08d}" / "_CHECKPOINT_METADATA"
    return json.loads(file.read_text())["custom_metadata"]["jaxscale"]
