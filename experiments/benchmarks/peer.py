"""Language models on this machine's processors beside the same recipe in eager PyTorch, and beside a plain JAX loop.

    python experiments/benchmarks/peer.py [--tiny] [--size 128 | 512 | 512x8] [--rounds 5] [--seeds 3] [--torch PYTHON]

Sizes: 128 is the default experiment (4 layers, 128 wide, context 64, 12 rows a step); 512 is 4 layers of 512, context
256, 8 rows; 512x8 has 8 such layers. Each side trains in a process of its own, in turns: wall seconds with all cores
(jaxscale has one device per core), and processor seconds with one core, one thread and one device. jaxscale's are of
`jaxscale.train`, with its loop, log and data; PyTorch's of `nanogpt_torch.py`. A ratio is that of the median steps of a
round. The median over the rounds is compared with the bar; the smallest and the largest are printed. The hand-written
loop (`plain_loop.py`) has the default size alone. `--torch` is an interpreter that has torch (this one by default; left
out where it is missing). `--seeds N` trains the whole recipe N times for the held-out loss in nats per character.

docs/choosing/speed.md has the figures. The hand-written loop leaves the gradients of its weights to autodiff, which
transposes the wide activations (`layers/linear.py`).
"""

import argparse
import dataclasses
import importlib.util
import itertools
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from figures import Figure, figures_of_command, show

HERE = Path(__file__).resolve().parent
RECIPE = HERE.parent / "shakespeare.py"
SIZES = {
    "128": {"layers": 4, "embed": 128, "heads": 4, "context": 64, "batch": 12},
    "512": {"layers": 4, "embed": 512, "heads": 8, "context": 256, "batch": 8},
    "512x8": {"layers": 8, "embed": 512, "heads": 8, "context": 256, "batch": 8},
}
STEPS = {"128": 220, "512": 22, "512x8": 16}
"""Steps of a round, the first of which are not counted."""
WARM_SHARE = 10
"""A tenth of the steps of a round is not counted."""
BAR_OF_PLAIN_LOOP, BAR_OF_TORCH = 1.0, 1.0


def recipe(size: str) -> Any:
    """Return the experiment of a size; its layers are unrolled."""
    import jaxscale as jx

    experiment, _ = jx.load_file(str(RECIPE))
    sizes = dict(SIZES[size])
    batch = sizes.pop("batch")
    model: Any = experiment.model
    data: Any = experiment.data
    model, data = dataclasses.replace(model, **sizes), dataclasses.replace(data, context=sizes["context"])
    plan = dataclasses.replace(experiment.plan, unroll=sizes["layers"])
    return dataclasses.replace(experiment, model=model, data=data, batch=batch, plan=plan)


def train(size: str, steps: int, seed: int = 0, *, is_whole: bool = False) -> dict[str, Any]:
    """Train the recipe; return the seconds of each step and the held-out loss."""
    import jaxscale as jx
    from jaxscale.platforms.cpu_threads import limit_loop_depth
    from jaxscale.recipe.loop_depth import loop_depth_of

    experiment = dataclasses.replace(recipe(size), steps=steps, seed=seed)
    if not is_whole:  # speed alone: nothing between the steps
        experiment = dataclasses.replace(
            experiment,
            checkpoint=jx.Checkpointing(every=0),
            evaluation=jx.Evaluation(every=0, batches=1),
            samples=jx.Samples(every=0, tokens=1),
        )
    processor: list[float] = []

    def note(event: Any) -> None:
        if event.kind == "step":
            processor.append(time.process_time())

    limit_loop_depth(loop_depth_of(experiment))  # as `jaxscale train` does
    with tempfile.TemporaryDirectory() as folder:
        run = jx.train(experiment, out=Path(folder) / "run", quiet=True, callbacks=[note])
        wall = [row["step_seconds"] for row in run.metrics if row["kind"] == "train"]
        losses = [evaluation["loss"] for evaluation in run.evaluations]
    steps_apart = [later - earlier for earlier, later in itertools.pairwise(processor)]
    return {"wall": wall[1:], "processor": steps_apart, "held_out": losses[-1] if losses else None}


def train_by_hand(steps: int) -> dict[str, Any]:
    """Run the hand-written loop, whose batches are made and waited for as ours are; return the seconds of each step."""
    import jax
    import numpy as np
    import plain_loop

    from jaxscale.training.backend import start_backend

    start_backend()
    text = np.frombuffer((HERE.parent / "data" / "shakespeare.txt").read_bytes(), np.uint8)
    index = np.zeros(256, np.int32)
    index[np.unique(text)] = np.arange(len(np.unique(text)))
    data, rng = index[text], np.random.default_rng(0)
    start, step, rows = plain_loop.make_step(jax.devices(), recipe("128").plan.unroll)
    state: Any = start()

    def draw() -> dict[str, Any]:
        starts = rng.integers(0, len(data) - plain_loop.CONTEXT - 1, plain_loop.BATCH)[:, None]
        window = data[starts + np.arange(plain_loop.CONTEXT + 1)[None, :]]
        return jax.device_put({"tokens": window[:, :-1], "targets": window[:, 1:]}, rows)

    batch = draw()
    seconds: dict[str, list[float]] = {"wall": [], "processor": []}
    for _ in range(steps):
        begin = time.perf_counter(), time.process_time()
        state, metrics = step(state, batch)
        batch = draw()
        jax.block_until_ready(metrics)
        seconds["wall"].append(time.perf_counter() - begin[0])
        seconds["processor"].append(time.process_time() - begin[1])
    return seconds


def median_step(seconds: list[float]) -> float:
    """Return the median seconds of a step, without the first ones."""
    return statistics.median(seconds[max(1, len(seconds) // WARM_SHARE) :])


def measure(size: str, peer: str | None, rounds: int, steps: int) -> list[Figure]:
    """Return the figures of a size, in wall seconds and in processor seconds."""
    figures = []
    sizes = SIZES[size]
    for kind, thread_count in (("wall", len(os.sched_getaffinity(0))), ("processor", 1)):
        commands = {"jaxscale": [sys.executable, __file__, "--train", size, str(steps), str(thread_count)]}
        if size == "128":
            commands["hand-written JAX"] = [sys.executable, __file__, "--by-hand", str(steps), str(thread_count)]
        if peer is not None:
            flags = [word for name, value in sizes.items() for word in (f"--{name}", str(value))]
            script = [str(HERE / "nanogpt_torch.py"), "--steps", str(steps), "--threads", str(thread_count)]
            commands["PyTorch"] = [peer, *script, *flags]
        seconds_by_side: dict[str, list[float]] = {side: [] for side in commands}
        for turn in range(rounds):
            for side, command in commands.items():
                seconds_by_side[side].append(median_step(figures_of_command(command)[kind]))
            texts = [f"{side} {1000 * seconds[-1]:.1f} ms" for side, seconds in seconds_by_side.items()]
            print(f"{size}, {kind}, round {turn + 1}: {', '.join(texts)}", flush=True)
        own_seconds = seconds_by_side.pop("jaxscale")
        rate = sizes["batch"] * sizes["context"] / statistics.median(own_seconds)
        figures.append(Figure(f"{size}, {kind}: tokens per second", rate, "tokens/s"))
        for side, seconds in seconds_by_side.items():
            ratios = [theirs / own for theirs, own in zip(seconds, own_seconds, strict=True)]
            print(f"{size}, {kind}, {side} / jaxscale: {min(ratios):.2f}x to {max(ratios):.2f}x", flush=True)
            bar = BAR_OF_TORCH if side == "PyTorch" else BAR_OF_PLAIN_LOOP
            figures.append(Figure(f"{size}, {kind}: {side} / jaxscale", statistics.median(ratios), "x", bar, ">="))
    return figures


def main() -> None:
    """Print the table; exit with 1 if a bar does not hold at full size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="few steps, no seeds: shows that it works, not the figures")
    parser.add_argument("--size", action="append", choices=SIZES, help="a size; may be repeated (default: 128)")
    parser.add_argument("--rounds", type=int, default=5, help="turns of all sides (default: 5)")
    parser.add_argument("--seeds", type=int, default=0, help="whole trainings, for the held-out loss (default: 0)")
    parser.add_argument("--torch", default=None, metavar="PYTHON", help="an interpreter that has torch")
    parser.add_argument("--train", nargs=3, metavar=("SIZE", "STEPS", "THREADS"), help=argparse.SUPPRESS)
    parser.add_argument("--by-hand", nargs=2, metavar=("STEPS", "THREADS"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    words = arguments.train or arguments.by_hand
    if words is not None:
        if int(words[-1]) == 1:
            os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        run = train(words[0], int(words[1])) if arguments.train else train_by_hand(int(words[0]))
        print(json.dumps(run))
        return
    peer = arguments.torch or (sys.executable if importlib.util.find_spec("torch") else None)
    print(f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores, load {os.getloadavg()[0]:.1f}", flush=True)
    figures = []
    for size in arguments.size or ["128"]:
        rounds, steps = (1, 6) if arguments.tiny else (arguments.rounds, STEPS[size])
        figures += measure(size, peer, rounds, steps)
    if arguments.seeds and not arguments.tiny:
        losses = [train("128", 2000, seed, is_whole=True)["held_out"] for seed in range(arguments.seeds)]
        print("held-out loss per seed:", ", ".join(f"{loss:.4f}" for loss in losses))
        name = f"held-out loss, mean of {arguments.seeds} seeds"
        figures.append(Figure(name, statistics.mean(losses), "nats/character", 1.95, "<="))
    if not show(figures, "Language models and their peers") and not arguments.tiny:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
