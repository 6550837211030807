"""How much of a pipeline is idle: the simulator against the formulas of the papers.

    python experiments/benchmarks/bubble.py [--tiny] [--only formulas|executor]

With the dataflow machine, p in {2, 4, 8, 16}, three F:I:W, differences in the bubble (of 1), and of zero bubble, whose
formulas are of seconds, in idle seconds relative to the makespan; bar 1e-9:

    gpipe, 1f1b    (p-1) / (m+p-1), every m to 8p
    interleaved    (p-1) / (vm+p-1), v in {2, 4}, m a multiple of p to 8p
    chimera        m = kp: F = B (p-2) / (2m+p-2), B = 2F (k+1)(p-2) / (k(4p-2)+p-2), k to 8
    zb-h1          (p-1) max(F+I-W, I, F) seconds beyond the work, every m from p to 8p
    zb-v           (p-1) F / 2 seconds beyond the work for F = I = W, and none within a device's span, m from 2p-1 to 8p

Told beside them, for p=4, m=8, what waiting for neighbours adds to a schedule (ours is one program on all devices).

Measured on 2 cores (AMD EPYC), November 2026, 44 s of processor time: differences of 6e-17 (chimera) to 1.4e-14 (zb-v),
over every m. Waiting adds nothing to gpipe, lockstep, chimera, zb-h1 and zb-v where F = I = W; 1f1b idles 40 % instead
of 27, interleaved 29 instead of 16. With passes that sleep (p=4, m=8, a forward 0.5 s), a step of the executor takes
the neighbour machine's seconds to within 0.27 % (gpipe), and 0.12 % or less for the other six: 27.00 units for zb-h1.
"""

import argparse
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from figures import Figure, show
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from jaxscale.pipeline.clock.costs import Costs
from jaxscale.pipeline.clock.simulate import MachineModel, Simulation, simulate
from jaxscale.pipeline.orders import Schedule
from jaxscale.pipeline.run.execute import At, execute
from jaxscale.pipeline.run.tables import tabulate
from jaxscale.pipeline.schedules import METHODS

RATIOS = ((1.0, 1.0, 1.0), (1.0, 1.3, 0.6), (0.7, 0.8, 1.1))
"""Seconds of F, I, W."""
NAMES = ("gpipe", "1f1b", "lockstep", "interleaved", "chimera", "zb-h1", "zb-v")
BAR = 1e-9


def simulations(
    name: str, p: int, m: int, ratios: tuple[tuple[float, float, float], ...] = RATIOS, v: int | None = None
) -> Iterator[tuple[tuple[float, float, float], Simulation]]:
    """A schedule on the dataflow machine, under each of some ratios."""
    schedule = METHODS[name].schedule(p, m, v)
    for ratio in ratios:
        yield ratio, simulate(schedule, Costs.alike(schedule, *ratio), "dataflow")


def one_stage_a_device(name: str, p: int, counts: list[int]) -> float:
    """Largest difference of gpipe or 1f1b."""
    found = [abs(one.bubble - (p - 1) / (m + p - 1)) for m in counts for _, one in simulations(name, p, m)]
    return max(found)


def interleaved(p: int, counts: list[int]) -> float:
    """Largest difference of Megatron's interleaving."""
    return max(
        abs(one.bubble - (p - 1) / (v * m + p - 1))
        for m in counts
        if m % p == 0
        for v in (2, 4)
        for _, one in simulations("interleaved", p, m, v=v)
    )


def chimera(p: int, counts: list[int]) -> float:
    """Largest difference of Chimera, where a backward takes as long as a forward and where it takes twice as long."""
    worst = 0.0
    for m in counts:
        if m % p:
            continue
        k = m // p
        bubbles = [one.bubble for _, one in simulations("chimera", p, m, ((1.0, 0.5, 0.5), (1.0, 1.0, 1.0)))]
        exact = [(p - 2) / (2 * m + p - 2), (k + 1) * (p - 2) / (k * (4 * p - 2) + p - 2)]
        worst = max(worst, *(abs(found - formula) for found, formula in zip(bubbles, exact, strict=True)))
    return worst


def zb_h1(p: int, counts: list[int]) -> float:
    """Largest difference of ZB-H1's idle seconds, relative to the makespan."""
    return max(
        abs(one.seconds - m * (f + i + w) - (p - 1) * max(f + i - w, i, f)) / one.seconds
        for m in counts
        if m >= p
        for (f, i, w), one in simulations("zb-h1", p, m)
    )


def zb_v(p: int, counts: list[int]) -> float:
    """Largest difference of ZB-V's idle seconds, of the makespan and within a device's span, relative to it."""
    worst = 0.0
    for m in counts:
        if m < 2 * p - 1:
            continue
        for (f, _, _), one in simulations("zb-v", p, m, ((1.0, 1.0, 1.0), (0.3, 0.3, 0.3))):
            beyond = abs(one.seconds - 3 * f * m - (p - 1) * f / 2)
            worst = max(worst, beyond / one.seconds, abs(one.bubble_own_span))
    return worst


def closed_forms(ranks: tuple[int, ...], most: int) -> list[Figure]:
    """Largest differences to every formula, and how long they took to find."""
    start, counts = time.process_time(), {p: list(range(1, most * p + 1)) for p in ranks}
    figures = [
        Figure(f"{name}_difference", max(one_stage_a_device(name, p, counts[p]) for p in ranks), "of 1", BAR)
        for name in ("gpipe", "1f1b")
    ]
    for name, check in (("interleaved", interleaved), ("chimera", chimera), ("zb-h1", zb_h1), ("zb-v", zb_v)):
        figures.append(Figure(f"{name}_difference", max(check(p, counts[p]) for p in ranks), "of 1", BAR))
    return [*figures, Figure("seconds_of_all", time.process_time() - start, "s")]


def waiting(p: int, m: int) -> list[Figure]:
    """Bubbles of both machines, F = I = W."""
    machines: tuple[MachineModel, ...] = ("neighbour", "dataflow")
    figures = []
    for name in NAMES:
        schedule = METHODS[name].schedule(p, m)
        for machine in machines:
            found = simulate(schedule, Costs.alike(schedule), machine)
            figures.append(Figure(f"{name}_{p}x{m}_{machine}", 100 * found.bubble, "% bubble"))
    return figures


def step_seconds(schedule: Schedule, costs: Costs, unit: float) -> float:
    """Seconds of a step of the executor whose passes sleep as long as the costs say, times `unit`, less one awake."""
    passes, asleep = {"F": costs.forward, "I": costs.input, "W": costs.weight}, [0.0]

    def sleep(kind: str, stage: Any, after: Any) -> Any:
        def rest(stage: Any, after: Any) -> np.ndarray:
            time.sleep(asleep[0] * passes[kind][int(stage)])
            return np.zeros((), np.float32)

        return jax.pure_callback(rest, jax.ShapeDtypeStruct((), jnp.float32), stage, after)

    @jax.custom_vjp
    def product(x: Any, weight: Any, stage: Any) -> Any:
        return x @ weight + sleep("F", stage, x[0, 0])

    def forward(x: Any, weight: Any, stage: Any) -> Any:
        return product(x, weight, stage), (x, weight, stage)

    def backward(kept: Any, g: Any) -> Any:
        x, weight, stage = kept
        inner = sleep("I", stage, g[0, 0])
        outer = sleep("W", stage, inner)  # one after the other, as the work they stand for
        return g @ weight.T + inner, x.T @ g + outer, np.zeros((), jax.dtypes.float0)

    product.defvjp(forward, backward)

    def stage(weights: Any, shared: Any, x: Any, microbatch: Any, at: At, key: Any) -> Any:
        del shared, key
        y = product(jnp.where(at.stage == 0, microbatch, x), weights, at.stage)
        return y, jnp.where(at.stage == schedule.stages - 1, y.sum(), 0.0), {}

    tables, message = tabulate(schedule, "residuals"), jax.ShapeDtypeStruct((2, 4), jnp.float32)

    def body(weights: Any, batch: Any) -> Any:
        return execute(tables, stage, weights[0], {}, batch, None, message).weight_gradients[None]

    mesh = Mesh(np.array(jax.devices()[: schedule.ranks]), ("pipe",), axis_types=(AxisType.Auto,))
    step = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=(P("pipe"), P()), out_specs=P("pipe"), axis_names={"pipe"}))
    given = jnp.full((schedule.ranks, schedule.chunks, 4, 4), 0.25), jnp.ones((schedule.microbatches, 2, 4))
    compiled = step.lower(*given).compile()
    seconds = []
    for asleep[0] in (0.0, 0.0, unit):  # the first starts threads
        start = time.monotonic()
        jax.block_until_ready(compiled(*given))
        seconds.append(time.monotonic() - start)
    return seconds[2] - seconds[1]


def executed(p: int, m: int, unit: float) -> list[Figure]:
    """How far a step of the executor, less the same without sleeping, is from what the neighbour machine says."""
    figures = []
    for name in NAMES:
        schedule = METHODS[name].schedule(p, m)
        costs = Costs.alike(schedule)
        units = step_seconds(schedule, costs, unit) / unit
        off = units / simulate(schedule, costs).seconds - 1
        figures.append(Figure(f"{name}_{p}x{m}_executed", units, "units"))
        figures.append(Figure(f"{name}_{p}x{m}_executed_off_neighbour", abs(100 * off), "%", 5))
    return figures


def main() -> bool:
    """Every figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="2 and 4 devices, few microbatches: does it run?")
    parser.add_argument("--unit", type=float, default=0.5, help="seconds that a forward sleeps")
    parser.add_argument("--only", choices=("formulas", "executor"), help="leave the other part out")
    arguments = parser.parse_args()
    figures = []
    if arguments.only != "executor":
        figures += closed_forms((2, 4), 2) if arguments.tiny else closed_forms((2, 4, 8, 16), 8)
        figures += waiting(4, 8)
    if arguments.only != "formulas":
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", 4)
        figures += executed(4, 4, 0.01) if arguments.tiny else executed(4, 8, arguments.unit)
    return show(figures, "idle share of pipelines") or arguments.tiny


if __name__ == "__main__":
    raise SystemExit(0 if main() else 1)
