"""Pipelined steps on CPU devices, with and without branches that write in place: seconds, bytes, and equal results.

    python experiments/benchmarks/pipeline_steps.py          # two devices, five schedules
    python experiments/benchmarks/pipeline_steps.py --tiny   # one schedule of a small model, two steps

In each tick of a pipelined step, a device takes one branch, which writes into the activations that wait for their
backward pass. By default, XLA for CPUs copies all of these activations in every tick; with an option that `build` sets
(`IN_PLACE_BRANCHES`), it does not. Steps of both programs run in turns.

Two cores of an AMD EPYC, JAX 0.10.2, 2026-11-30, two and a half minutes: with the copies, steps take 1.21 (1f1b) to
2.04 times as long (zb-v), 1.30 to 2.20 times the processor seconds and 1.47 to 1.77 times the temporaries.
"""

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the package need not be installed

from figures import Figure, show

import jaxscale as jx
from jaxscale.platforms.compiler_options import IN_PLACE_BRANCHES

SCHEDULES = ("gpipe:2x8", "1f1b:2x8", "interleaved:2x8,v=2", "zb-h1:2x8", "zb-v:2x8")
ROWS = 16
CONTEXT = 256


class Run:
    """Steps of one program.

    Args:
        pipeline: text of the pipeline.
        compiler: text of the compiler's options.
        width: width of the model.

    Attributes:
        temporary_bytes: bytes of the program's temporaries on each device.
        seconds, processor_seconds: of each step after the first.
        state: the state after the steps.
    """

    def __init__(self, pipeline: str, compiler: str, width: int) -> None:
        import jax

        model = jx.models.Decoder(vocab=1024, context=CONTEXT, layers=4, embed=width, heads=4, mlp=4 * width)
        tokens = jax.random.randint(jax.random.key(0), (ROWS, CONTEXT + 1), 0, 1024, "int32")
        self.batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}
        plan = jx.Plan(mesh="pipe:2", pipeline=pipeline, memory="none", precision="float32", compiler=compiler)
        data = jx.data.Arrays(self.batch)
        self.step = jx.build(jx.Experiment("pipeline", model, data, batch=ROWS, plan=plan))
        self.temporary_bytes = self.step.compile(self.batch).temp_bytes
        self.state: Any = self.step.init()
        self.seconds: list[float] = []
        self.processor_seconds: list[float] = []
        self.run()
        del self.seconds[:], self.processor_seconds[:]

    def run(self) -> None:
        """Run one step."""
        import jax

        start, processor_start = time.perf_counter(), time.process_time()
        self.state, metrics = self.step(self.state, self.batch)
        jax.block_until_ready(metrics)
        self.seconds.append(time.perf_counter() - start)
        self.processor_seconds.append(time.process_time() - processor_start)


def figures_of(pipeline: str, width: int, step_count: int) -> list[Figure]:
    """Return the figures of one schedule."""
    import jax
    import numpy as np

    runs = [Run(pipeline, compiler, width) for compiler in ("default", f"{IN_PLACE_BRANCHES['cpu']}=false")]
    for _ in range(step_count):
        for run in runs:
            run.run()
    in_place_run, copying_run = runs
    states = zip(jax.tree.leaves(in_place_run.state), jax.tree.leaves(copying_run.state), strict=True)
    unequal_count = sum(not np.array_equal(value, other_value) for value, other_value in states)
    seconds, copying_seconds = (statistics.median(run.seconds) for run in runs)
    processor, copying_processor = (statistics.median(run.processor_seconds) for run in runs)
    temporaries_ratio = in_place_run.temporary_bytes / copying_run.temporary_bytes
    name = pipeline.partition(":")[0]
    return [
        Figure(f"{name}: seconds of a step, in place", seconds, "s"),
        Figure(f"{name}: seconds, copied / in place", copying_seconds / seconds, "x"),
        Figure(f"{name}: processor seconds, copied / in place", copying_processor / processor, "x"),
        Figure(f"{name}: temporaries, in place / copied", temporaries_ratio, "x", 1.0),
        Figure(f"{name}: arrays of the state that differ", unequal_count, "arrays", 0),
    ]


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="one schedule of a small model, two steps")
    args = parser.parse_args()
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 2)
    schedules, width, step_count = (SCHEDULES[:1], 64, 2) if args.tiny else (SCHEDULES, 256, 10)
    figures = [figure for pipeline in schedules for figure in figures_of(pipeline, width, step_count)]
    show(figures, "Pipelined steps whose branches write in place")


if __name__ == "__main__":
    main()
