"""What a pipelined step computes and compiles: no work while idle, and a program that does not grow with microbatches.

    python experiments/benchmarks/pipeline_work.py [--tiny]

A callback in the stage counts its forwards, input gradients and weight gradients, per stage, for every synchronous
schedule (p=4, m=8). Then processor seconds of a step of lock-step 1F1B with a branch per tick, where idle devices do
nothing, and without any, where they compute on zeros. Then processor seconds of lowering and compiling 1F1B of 16 and
of 512 ticks, best of 3, and instructions of the two programs.

Measured on 2 cores on 2026-11-22 (JAX 0.10.2, virtual CPU devices): no schedule off by a pass. A step with a branch per
tick takes 0.60 of the processor time of one without at m=2, and 1.17 at m=8, for XLA:CPU copies the slots in every
branch, which v5e and H100 do not (`pipeline_memory.py`). 512 ticks compile in 1.007 to 1.16 times the processor
seconds of 16, to as many instructions (539).
"""

import argparse
import collections
import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from figures import Figure, show
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from jaxscale.compiler.hlo_program import HloProgram
from jaxscale.errors import UserError
from jaxscale.pipeline.orders import Schedule
from jaxscale.pipeline.run.execute import At, Lowering, StageFunction, execute
from jaxscale.pipeline.run.lifetimes import Stash
from jaxscale.pipeline.run.tables import tabulate
from jaxscale.pipeline.schedules import METHODS

RANKS = 4


def gradients(schedule: Schedule, stage: StageFunction, rows: int, width: int, stash: Stash, lowering: Lowering) -> Any:
    """The jitted gradients of a schedule whose messages are (rows, width), and arguments for it."""
    mesh = Mesh(np.array(jax.devices()[: schedule.ranks]), ("pipe",), axis_types=(AxisType.Auto,))
    tables = tabulate(schedule, stash)
    message = jax.ShapeDtypeStruct((rows, width), jnp.float32)

    def body(weights: Any, batch: Any) -> Any:
        found = execute(tables, stage, weights[0], {}, batch, None, message, lowering=lowering)
        return found.weight_gradients[None]

    mapped = jax.shard_map(body, mesh=mesh, in_specs=(P("pipe"), P()), out_specs=P("pipe"), axis_names={"pipe"})
    weights = jnp.full((schedule.ranks, schedule.chunks, width, width), 1 / width)
    return jax.jit(mapped), (weights, jnp.ones((schedule.microbatches, rows, width)))


def product_stage(product: Callable[..., Any], stages: int) -> StageFunction:
    """A stage that is one product of its weights."""

    def stage(weights: Any, shared: Any, x: Any, microbatch: Any, at: At, key: Any) -> Any:
        del shared, key
        y = product(jnp.where(at.stage == 0, microbatch, x), weights, at.stage)
        return y, jnp.where(at.stage == stages - 1, y.sum(), 0.0), {}

    return stage


def counted(schedule: Schedule) -> collections.Counter[tuple[str, int]]:
    """How often each (pass, stage) runs in a step."""
    counts: collections.Counter[tuple[str, int]] = collections.Counter()

    def note(what: str, stage: Any) -> np.ndarray:
        counts[what, int(stage)] += 1
        return np.zeros((), np.float32)

    def run(what: str, stage: Any) -> Any:
        return jax.pure_callback(functools.partial(note, what), jax.ShapeDtypeStruct((), jnp.float32), stage)

    @jax.custom_vjp
    def product(x: Any, weight: Any, stage: Any) -> Any:
        return x @ weight + run("forward", stage)

    def forward(x: Any, weight: Any, stage: Any) -> Any:
        return product(x, weight, stage), (x, weight, stage)

    def backward(kept: Any, g: Any) -> Any:
        x, weight, stage = kept
        no_gradient = np.zeros((), jax.dtypes.float0)
        return g @ weight.T + run("input gradient", stage), x.T @ g + run("weight gradient", stage), no_gradient

    product.defvjp(forward, backward)
    step, given = gradients(schedule, product_stage(product, schedule.stages), 2, 4, "residuals", "switch")
    jax.block_until_ready(step(*given))
    return counts


def idle_work(microbatches: int) -> list[Figure]:
    """The largest difference to m of any pass of any stage, for each schedule."""
    figures = []
    for name, method in METHODS.items():
        if method.steps:
            continue
        try:
            schedule = method.schedule(RANKS, microbatches)
        except UserError:
            continue
        counts = counted(schedule)
        passes = [
            (what, stage)
            for what in ("forward", "input gradient", "weight gradient")
            for stage in range(schedule.stages)
        ]
        off = max(abs(counts[one] - microbatches) for one in passes)
        figures.append(Figure(f"{name}: passes of a stage, off {microbatches} by at most", off, "passes", 0))
    return figures


def step_seconds(microbatches: int, lowering: Lowering, width: int) -> float:
    """Processor seconds of a step of lock-step 1F1B, best of 3."""
    schedule = METHODS["lockstep"].schedule(RANKS, microbatches)
    stage = product_stage(lambda x, weight, _: jnp.tanh(jnp.tanh(x @ weight) @ weight.T), RANKS)
    step, given = gradients(schedule, stage, width, width, "residuals", lowering)
    jax.block_until_ready(step(*given))
    return best(lambda: jax.block_until_ready(step(*given)))


def compiled(ticks: int) -> tuple[float, int]:
    """Processor seconds of lowering and compiling 1F1B, best of 3, and the instructions of the program."""
    schedule = METHODS["1f1b"].schedule(RANKS, ticks // 2 - RANKS + 1)
    assert tabulate(schedule).tick_count == ticks
    stage = product_stage(lambda x, weight, _: x + jnp.tanh(jnp.tanh(x @ weight) @ weight.T), RANKS)

    def run() -> Any:
        jax.clear_caches()
        step, given = gradients(schedule, stage, 8, 16, "residuals", "switch")
        return step.lower(*given).compile()

    seconds = best(run)
    parsed = HloProgram(run().as_text())
    return seconds, sum(len(computation.instructions) for computation in parsed.computations.values())


def best(run: Callable[[], Any]) -> float:
    """Processor seconds of a call, the best of 3."""
    found = []
    for _ in range(3):
        start = time.process_time()
        run()
        found.append(time.process_time() - start)
    return min(found)


def main() -> None:
    """Print the table; exit with 1 if a bar does not hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="small products, fewer ticks: does it run?")
    tiny = parser.parse_args().tiny
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", RANKS)
    figures = idle_work(4 if tiny else 8)
    for microbatches in (2, 8):
        own = {
            lowering: step_seconds(microbatches, lowering, 32 if tiny else 1024) for lowering in ("switch", "phased")
        }
        figures += [Figure(f"lockstep {lowering} m={microbatches}", value, "CPU s") for lowering, value in own.items()]
        ratio = own["switch"] / own["phased"]
        figures.append(Figure(f"lockstep switch / phased m={microbatches}", ratio, "x"))
    short, long = compiled(16), compiled(64 if tiny else 512)
    figures += [
        Figure("compile, few ticks", short[0], "CPU s"),
        Figure("compile, many ticks / few", long[0] / short[0], "x", 1.2),
        Figure("instructions, few ticks", short[1], "instructions"),
        Figure("instructions, many ticks / few, off 1 by", abs(long[1] / short[1] - 1), "x", 0.01),
    ]
    if not show(figures, f"Work and size of a pipelined step, p={RANKS}") and not tiny:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
