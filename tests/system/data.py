"""What the experiments of `tiny.py` read: text, images in classes, folders of transformers; the same each time."""

import shutil
from pathlib import Path

import numpy as np

from tests.models.goldens import GOLDEN


def write_data(folder: Path) -> None:
    """Write all of it into a folder."""
    (folder / "text.txt").write_text("".join(f"line {i * i % 97} of the text. " for i in range(200)))
    rng = np.random.default_rng(0)
    for name, side, channels, classes in (("small", 8, 1, 12), ("large", 32, 3, 10)):
        labels = np.arange(80) % classes
        shape = (80, side, side, channels)
        pixels = rng.integers(0, 200, shape) + 4 * labels[:, None, None, None]
        np.savez(folder / f"{name}.npz", x=pixels.astype(np.uint8), y=labels)
    for name in ("llama", "gpt2", "qwen3", "gemma2", "vit"):
        shutil.copytree(GOLDEN / name, folder / name, ignore=shutil.ignore_patterns("sharded", "bf16", "golden*"))
