"""Partitions: how fast blocks are cut into stages, how near the bound, and what cutting by cost gains.

    python experiments/benchmarks/partition.py [--tiny]

128 unlike blocks, an embedding and a head that takes four blocks' time on 16 devices, 32 microbatches, for each
schedule with a bound on memory and links that take time: processor seconds of one search, how far its seconds are above
the proved bound, and how many times as long stages of equally many blocks take.

Measured 2026-11-22 on 2 cores of an x86 machine: one stage a device 0.13 to 0.38 s, two (interleaved, zb-v, dualpipe-v)
0.63 to 0.75 s. Stages of equally many blocks take 1.08 (chimera, which evens out by itself) to 1.28 times as long
(zb-h2). What was found is at most 6.6 to 10.5 % above the bound, with two stages a device 20 to 27 %: how much
of that is the bound's, these sizes do not tell; at 32 blocks on 4 devices partitions are exact.
"""

import argparse
import random
import time

from figures import Figure, show

from jaxscale.pipeline.choose.partition import ModelPrices, Partition, partition
from jaxscale.pipeline.choose.price import PipelineDevice, Price
from jaxscale.pipeline.clock.simulate import simulate
from jaxscale.pipeline.orders import Schedule
from jaxscale.pipeline.schedules import METHODS

NAMES = ("1f1b", "gpipe", "lockstep", "zb-h1", "zb-h2", "chimera", "interleaved", "zb-v", "dualpipe-v")


def unlike(rng: random.Random, blocks: int) -> ModelPrices:
    """Blocks of about 1 s forward and backward each half, an embedding, and a head as long as four blocks."""
    prices = tuple(
        Price(rng.uniform(0.8, 1.2), rng.uniform(0.8, 1.3), rng.uniform(0.6, 1.1), 10, 0, 3, 1, 1, 1)
        for _ in range(blocks)
    )
    head = Price(4, 4, 4, weight_bytes=100, stash_bytes=5, working_bytes=40)
    return ModelPrices(prices, first=Price(0.1, 0.0, 0.1, weight_bytes=100), last=head)


def equal(model: ModelPrices, schedule: Schedule, devices: list[PipelineDevice]) -> float:
    """Seconds of stages of as many blocks each, told by a model of exactly that many blocks as stages."""
    each = len(model.blocks) // schedule.stages
    merged = []
    for stage in range(schedule.stages):
        part = model.blocks[stage * each : (stage + 1) * each]
        seconds = (sum(getattr(one, name) for one in part) for name in ("forward", "input_gradient", "weight_gradient"))
        merged.append(Price(*seconds, message_bytes=part[-1].message_bytes))
    links = [PipelineDevice(link=device.link) for device in devices]
    return partition(ModelPrices(tuple(merged), model.first, model.last), schedule, links).seconds


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="32 blocks on 4 devices")
    tiny = parser.parse_args().tiny
    blocks, ranks, microbatches = (32, 4, 8) if tiny else (128, 16, 32)
    model = unlike(random.Random(0), blocks)
    figures = []
    for name in NAMES:
        schedule = METHODS[name].schedule(ranks, microbatches)
        live = max(schedule.live) / schedule.chunks if name != "chimera" else max(schedule.live)
        # enough for equal stages and their head, and a tenth more
        memory = 1.1 * (blocks / ranks * (10 * (2 if name == "chimera" else 1) + 4 * live) + 250)
        devices = [PipelineDevice(memory_bytes=memory, link=10.0) for _ in range(ranks)]
        found, seconds = timed(model, schedule, devices)
        assert abs(simulate(schedule, found.costs).seconds - found.seconds) < 1e-6
        figures.append(Figure(f"{name}_search", seconds, "s", 1.0))
        figures.append(Figure(f"{name}_above_bound", 100 * (found.seconds / found.bound - 1), "%"))
        figures.append(Figure(f"{name}_equal_stages", equal(model, schedule, devices) / found.seconds, "x"))
    show(figures, f"{blocks} blocks on {ranks} devices, {microbatches} microbatches")


def timed(model: ModelPrices, schedule: Schedule, devices: list[PipelineDevice]) -> tuple[Partition, float]:
    """A partition and the processor seconds it took, the best of 3."""
    taken = []
    for _ in range(3):
        start = time.process_time()
        found = partition(model, schedule, devices)
        taken.append((time.process_time() - start, found))
    seconds, found = min(taken, key=lambda one: one[0])
    return found, seconds


if __name__ == "__main__":
    main()
