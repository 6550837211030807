"""How fast batches come, and how long it takes to get to the first.

    python experiments/benchmarks/data.py [--tiny] [--torch PYTHON]

Tokens per second are of one core's time (the process is pinned to it, and the CPU time of all its threads counts, so
that other processes do not), context 64, batch 12; their bar is 20 times what the default experiment trains on.
Encoding is timed against the tokenizer's own `encode_batch` of the paragraphs, turn by turn in one run on all cores;
ours includes reading, checking, hashing and writing the cache. Images of 256 x 256 pixels are decoded, cut to 224 x
224, mirrored and normalized by two threads, and by two workers of PyTorch's DataLoader with the same random cuts, turn
by turn in wall seconds (`--torch`: an interpreter with torch and Pillow; this one by default).

Measured on 2 cores: windows 4.2 million tokens/s, packed 3.9, mixture 2.9; encoding 20 MB for windows 0.68x, for packed
rows, document by document, 0.89x; opening a cached text 0.03 s. Images, on 2 cores of an Intel Xeon, 2026-11-28: 900 a
second, 0.77x to 0.86x of the DataLoader, whose workers run already when the time starts.
"""

import argparse
import importlib.util
import itertools
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from figures import Figure, figures_of_command, show
from PIL import Image

from jaxscale.data import ImageFolder, Mixture, Text
from jaxscale.data.image_folder import FolderImages, decoded_image
from jaxscale.data.pack import best_fit

DATA = Path(__file__).parents[1] / "data"
SHAKESPEARE = DATA / "shakespeare.txt"
TOKENIZER = DATA / "tokenizer_8k.json"
CONTEXT, BATCH = 64, 12
DEFAULT_EXPERIMENT = 23_000
"""Tokens per second that the default experiment trains on, on the two cores these bars were set for."""


def seconds(action: Callable[[], Any]) -> float:
    """Wall-clock seconds of one call."""
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def tokens_per_second(data: Text | Mixture, batches: int, repeats: int) -> float:
    """Target positions per second of CPU time handed out by a running iterator, on one core: the median of several."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    try:
        with data.open(BATCH, 0).train() as train:  # its thread starts now, and inherits the core
            next(train)
            rates = []
            for _ in range(repeats):
                start = time.process_time()
                for _ in itertools.islice(train, batches):
                    pass
                rates.append(batches * BATCH * CONTEXT / (time.process_time() - start))
    finally:
        os.sched_setaffinity(0, cores)
    return statistics.median(rates)


def encoding(folder: Path, size: int, repeats: int) -> tuple[float, float, float]:
    """Seconds to encode a text and write its tokens over those of plain `encode_batch`, the median of pairs.

    Returns:
        The ratio for windows, that for packed paragraphs, and the seconds to open what was written.
    """
    text = SHAKESPEARE.read_text()
    text = (text * (size // len(text) + 1))[:size]
    path = folder / "big.txt"
    path.write_text(text)
    plain = tokenizers.Tokenizer.from_file(str(TOKENIZER))
    windows = Text(path, TOKENIZER, CONTEXT)
    packed = Text(path, TOKENIZER, CONTEXT, layout="packed", separator="\n\n")
    documents = [document for document in text.split("\n\n") if document]
    ratios = []
    for turn in range(repeats):
        os.environ["JAXSCALE_CACHE"] = str(folder / f"cache{turn}")
        contestants = [
            lambda: plain.encode_batch(documents, add_special_tokens=False),
            lambda: windows.open(BATCH, 0),
            lambda: packed.open(BATCH, 0),
        ]
        order = [(turn + place) % 3 for place in range(3)]  # each is first once in three turns
        took = {number: seconds(contestants[number]) for number in order}
        ratios.append([took[1] / took[0], took[2] / took[0]])
    of_windows, of_packed = map(statistics.median, zip(*ratios, strict=True))
    return of_windows, of_packed, seconds(lambda: windows.open(BATCH, 0))


class SameCuts(FolderImages):
    """The images of a folder with the cuts of `cuts.npy`, as the peer makes them."""

    cuts: np.ndarray

    def _pixels(self, row_index: int) -> np.ndarray:
        left, top, is_mirrored = self.cuts[row_index % len(self)]
        pixels = np.asarray(decoded_image(self.files[row_index % len(self)]))[top : top + 224, left : left + 224]
        return pixels[:, ::-1] if is_mirrored else pixels


def write_photos(folder: Path, count: int) -> None:
    """Write images of 256 x 256 pixels with the detail of photos, and their cuts."""
    rng = np.random.default_rng(0)
    (folder / "class").mkdir(parents=True)
    for index in range(count):
        coarse = Image.fromarray(rng.integers(0, 256, (24, 24, 3), dtype=np.uint8)).resize((256, 256))
        noise = rng.normal(0, 8, (256, 256, 3))
        pixels = np.clip(np.asarray(coarse) + noise, 0, 255).astype(np.uint8)
        Image.fromarray(pixels).save(folder / "class" / f"{index:05d}.jpg", quality=90)
    cuts = np.concatenate([rng.integers(0, 33, (count, 2)), rng.integers(0, 2, (count, 1))], 1)
    np.save(folder / "cuts.npy", cuts.astype(np.int32))


def images(folder: Path, count: int, rounds: int, python: str | None) -> list[Figure]:
    """Images per second of both sides, and the largest difference of their arrays."""
    write_photos(folder, count)
    opened = ImageFolder(folder, size=224, crop=None, held_out=0.0, workers=2).open(32, 0)
    files = sorted(str(file) for file in folder.rglob("*.jpg"))
    peer_file = folder / "peer.npy"
    rates, ratios = [], []

    def read_all() -> None:
        """Read each image once; no batch is read before the time runs."""
        with opened.train() as train:
            for _ in range(count // 32):
                next(train)

    for turn in range(rounds):
        rates.append(count // 32 * 32 / seconds(read_all))
        if python is None:
            continue
        words = [python, str(Path(__file__).with_name("images_torch.py")), str(folder), "2"]
        words += ["--save", str(peer_file)] if turn == 0 else []
        peer_rates = figures_of_command(words)["rates"]
        ratios.append(rates[-1] / peer_rates[-1])  # its workers run since the first round
    figures = [Figure("images_per_second", statistics.median(rates), "images/s")]
    if not ratios:
        return figures
    same = SameCuts(opened.parts[0].settings, files, np.zeros(count, np.int32), 0)
    same.cuts = np.load(folder / "cuts.npy")
    difference = float(np.abs(same.read(np.arange(count))["images"] - np.load(peer_file)).max())
    print(f"images, jaxscale / DataLoader: {min(ratios):.2f}x to {max(ratios):.2f}x", flush=True)
    return [
        *figures,
        Figure("images_over_dataloader", statistics.median(ratios), "x", 0.9, ">="),
        Figure("images_difference", difference, "", 1e-5),
    ]


def main() -> None:
    """Measure and show."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--tiny", action="store_true", help="small sizes, to see that it works; its figures mean nothing"
    )
    parser.add_argument("--torch", default=None, metavar="PYTHON", help="an interpreter that has torch and Pillow")
    arguments = parser.parse_args()
    tiny = arguments.tiny
    python = arguments.torch or (sys.executable if importlib.util.find_spec("torch") else None)
    batches, repeats, size, pieces = (20, 1, 100_000, 1_000) if tiny else (2_000, 5, 20_000_000, 1_000_000)

    windows = Text(SHAKESPEARE, "char", CONTEXT)
    packed = Text(SHAKESPEARE, "byte", CONTEXT, layout="packed", separator="\n\n")
    mixture = Mixture((Text(SHAKESPEARE), Text(TOKENIZER)), (3.0, 1.0))
    lengths = np.random.default_rng(0).integers(1, 2049, pieces)
    with tempfile.TemporaryDirectory() as name:
        os.environ["JAXSCALE_CACHE"] = name
        bar = 20 * DEFAULT_EXPERIMENT
        rates = [
            Figure(f"{what}_tokens_per_second", tokens_per_second(data, batches, repeats), "tokens/s", bar, ">=")
            for what, data in (("windows", windows), ("packed", packed), ("mixture", mixture))
        ]
        of_windows, of_packed, opening = encoding(Path(name), size, min(repeats, 3))
        fill = lengths.sum() / ((len(best_fit(lengths, 2048).row_starts) - 1) * 2048)
        show(
            [
                *rates,
                Figure("bpe_over_encode_batch", of_windows, "x", 1.1),
                Figure("bpe_packed_over_encode_batch", of_packed, "x", 1.1),
                Figure("open_cached_seconds", opening, "s"),
                Figure("pack_a_million_seconds", seconds(lambda: best_fit(lengths, 2048)), "s"),
                Figure("pack_a_million_filled", float(fill), "share of slots"),
                *images(Path(name) / "photos", 64 if tiny else 640, min(repeats, 3), python),
            ],
            f"Data: {len(os.sched_getaffinity(0))} cores, {size / 1e6:g} MB of text" + (", tiny" if tiny else ""),
        )


if __name__ == "__main__":
    main()
