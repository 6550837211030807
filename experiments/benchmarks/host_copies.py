"""What a copy of the state in the host's memory costs, beside a step and beside a checkpoint.

    python experiments/benchmarks/host_copies.py            # experiments/shakespeare.py
    python experiments/benchmarks/host_copies.py --tiny     # two rounds

A copy and a checkpoint hold the next step up while the state leaves the device, and go on in the background; both are
timed to the call's return and to the end. Rounds take turns, and each figure is a median.
"""

import argparse
import functools
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from figures import Figure, show

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


def seconds_of(call: Callable[[], Any], finish: Callable[[], Any]) -> tuple[float, float]:
    """Return the seconds until a call returns, and until what it started is finished."""
    start = time.perf_counter()
    call()
    returned = time.perf_counter()
    finish()
    return returned - start, time.perf_counter() - start


def main() -> None:
    """Measure and print the figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tiny", action="store_true", help="two rounds")
    rounds = 2 if parser.parse_args().tiny else 9

    from jaxscale.training.backend import start_backend

    start_backend()
    import jax
    from shakespeare import experiment

    import jaxscale as jx
    from jaxscale.checkpoint.host_copies import HostCopies
    from jaxscale.checkpoint.verified import Description

    step = jx.build(experiment())
    opened = experiment().data.open(experiment().batch, 0)
    batch = step.place(next(opened.train()))
    state, _ = step(step.init(), batch)
    folder = Path(tempfile.mkdtemp())
    checkpoints, run = jx.Checkpoints(folder / "checkpoints", keep=1), folder / "run"
    run.mkdir()
    leaves = step.canonical_abstract()
    copies = HostCopies(run, leaves)
    state_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves.values())
    times: dict[str, list[tuple[float, float]]] = {"step": [], "copy": [], "checkpoint": []}
    for number in range(1, rounds + 1):
        start = time.perf_counter()
        state, metrics = step(state, batch)
        jax.block_until_ready((state, metrics))
        times["step"].append((time.perf_counter() - start, 0.0))
        arrays = jax.block_until_ready(step.to_canonical(state))
        description = Description(number, 0, None, "benchmark")
        for name, target in (("copy", copies), ("checkpoint", checkpoints)):
            times[name].append(seconds_of(functools.partial(target.save_arrays, arrays, description), target.wait))
    copies.clear()
    shutil.rmtree(folder)
    held, whole = (
        {name: statistics.median(pair[n] for pair in pairs) for name, pairs in times.items()} for n in (0, 1)
    )
    figures = [
        Figure("state", state_bytes / 1e6, "MB"),
        Figure("step", held["step"], "s"),
        Figure("copy: the next step waits", held["copy"], "s"),
        Figure("copy: until it is whole", whole["copy"], "s"),
        Figure("checkpoint: the next step waits", held["checkpoint"], "s"),
        Figure("checkpoint: until it is committed", whole["checkpoint"], "s"),
        Figure("wait for a copy, of that for a checkpoint", held["copy"] / held["checkpoint"], "x", 1.0),
    ]
    print(f"{os.cpu_count()} cores, {jax.default_backend()}, JAX {jax.__version__}")
    show(figures, f"A copy of the state in memory, median of {rounds} rounds")


if __name__ == "__main__":
    main()
