"""The default experiment beside a hand-written JAX loop, and beside the same recipe in eager PyTorch.

    python experiments/benchmarks/peer.py [--tiny] [--seeds 3] [--torch PYTHON]

Tokens per second are medians over steps, on two virtual CPU devices, one per core: jaxscale's from the run's own
metrics, the hand-written loop's with its own batches, in turns in one process. PyTorch runs in turns too, by an
interpreter that has it (`--torch`; this one by default; left out where it is missing). `--seeds N` trains the whole
recipe N times for the held-out loss in nats per character.

Measured on 2 cores (AMD EPYC), JAX 0.10.2, PyTorch 2.13, with `--seeds 3` (6.5 minutes): jaxscale 31,000 tokens/s,
1.33x the hand-written loop (23,400; bar 0.97) and 1.34x PyTorch (23,000; bar 1.0), medians of five turns whose ratios
lie between 1.28 and 1.46. The hand-written loop leaves the gradients of its weights to autodiff, which transposes the
wide activations (`layers/linear.py`). Held-out loss of seeds 0, 1, 2: 1.924, 1.930, 1.925 (bar 1.95).
"""

import argparse
import dataclasses
import importlib.util
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import plain_loop
from figures import Figure, show

from jaxscale.recipe.experiment import Checkpointing, Evaluation, Samples
from jaxscale.records.source import load_file
from jaxscale.training.loop import train

HERE = Path(__file__).resolve().parent
RECIPE = HERE.parent / "shakespeare.py"
TOKENS = plain_loop.BATCH * plain_loop.CONTEXT
WARM = 20


def ours(steps: int, seed: int, folder: Path, plain: bool = True) -> tuple[list[float], float]:
    """(tokens per second of each step, held-out loss) of the default experiment as a user runs it."""
    experiment, _ = load_file(RECIPE)
    if plain:  # speed alone: nothing between the steps
        quiet = {"evaluation": Evaluation(every=0, batches=1), "samples": Samples(every=0, tokens=1)}
        experiment = dataclasses.replace(experiment, checkpoint=Checkpointing(every=0), **quiet)
    run = train(dataclasses.replace(experiment, steps=steps, seed=seed), out=folder, quiet=True)
    rows = [row for row in run.metrics if row["kind"] == "train"]
    return [row["tokens_per_second"] for row in rows[WARM:]], run.evaluations[-1]["loss"]


def by_hand(steps: int) -> list[float]:
    """Tokens per second of each step of the hand-written loop, its batches made and waited for as ours are."""
    text = np.frombuffer((HERE.parent / "data" / "shakespeare.txt").read_bytes(), np.uint8)
    index = np.zeros(256, np.int32)
    index[np.unique(text)] = np.arange(len(np.unique(text)))
    data, rng = index[text], np.random.default_rng(0)
    start, step, rows = plain_loop.make_step(jax.devices(), load_file(RECIPE)[0].plan.unroll)
    state, rates = start(), []

    def draw() -> dict[str, Any]:
        at = rng.integers(0, len(data) - plain_loop.CONTEXT - 1, plain_loop.BATCH)[:, None]
        window = data[at + np.arange(plain_loop.CONTEXT + 1)[None, :]]
        return jax.device_put({"tokens": window[:, :-1], "targets": window[:, 1:]}, rows)

    batch = draw()
    for _ in range(steps):
        begun = time.perf_counter()
        state, metrics = step(state, batch)
        batch = draw()
        jax.block_until_ready(metrics)
        rates.append(TOKENS / (time.perf_counter() - begun))
    return rates[WARM:]


def torch_rate(python: str, steps: int) -> dict[str, Any] | None:
    """What the PyTorch peer prints; `None` where there is no torch."""
    command = [python, str(HERE / "nanogpt_torch.py"), "--steps", str(steps)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else None


def main() -> None:
    """Print the table; exit with 1 if a bar does not hold at full size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="few steps, no seeds: shows that it works, not the figures")
    parser.add_argument("--seeds", type=int, default=0, help="whole trainings, for the held-out loss (default: 0)")
    parser.add_argument("--torch", default=None, metavar="PYTHON", help="an interpreter that has torch")
    args = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 2)
    rounds, steps = (1, WARM + 5) if args.tiny else (5, WARM + 200)
    python = args.torch or (sys.executable if importlib.util.find_spec("torch") else None)
    rates: dict[str, list[float]] = {"ours": [], "hand": [], "torch": []}
    figures = []
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(rounds):
            rates["hand"].append(statistics.median(by_hand(steps)))
            rates["ours"].append(statistics.median(ours(steps, 0, Path(folder) / f"speed{turn}")[0]))
            found = torch_rate(python, steps) if python else None
            if found is not None:
                rates["torch"].append(found["tokens_per_second"])
            told = ", ".join(f"{name} {values[-1]:,.0f}" for name, values in rates.items() if values)
            print(f"turn {turn + 1}, tokens/s: {told}", flush=True)
        speed = {name: statistics.median(values) for name, values in rates.items() if values}
        figures.append(Figure("tokens per second, jaxscale", speed["ours"], "tokens/s"))
        figures.append(Figure("tokens per second, hand-written JAX", speed["hand"], "tokens/s"))
        ratio = statistics.median(a / b for a, b in zip(rates["ours"], rates["hand"], strict=True))
        figures.append(Figure("jaxscale / hand-written JAX", ratio, "x", 0.97, ">="))
        if "torch" in speed:
            ratio = statistics.median(a / b for a, b in zip(rates["ours"], rates["torch"], strict=True))
            figures.append(Figure("tokens per second, PyTorch", speed["torch"], "tokens/s"))
            figures.append(Figure("jaxscale / PyTorch", ratio, "x", 1.0, ">="))
        if args.seeds and not args.tiny:
            losses = [ours(2000, seed, Path(folder) / f"whole{seed}", plain=False)[1] for seed in range(args.seeds)]
            print("held-out loss per seed:", ", ".join(f"{loss:.4f}" for loss in losses))
            name = f"held-out loss, mean of {args.seeds} seeds"
            figures.append(Figure(name, statistics.mean(losses), "nats/character", 1.95, "<="))
    if not show(figures, "The default experiment and its peers") and not args.tiny:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
