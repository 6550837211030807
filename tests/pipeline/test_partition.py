"""Partitions against brute force over every partition, the simulator and what can be told by hand."""

import dataclasses
import itertools
import random
from typing import Any, get_args

import numpy as np
import pytest

from jaxscale.errors import UserError
from jaxscale.pipeline.choose.footprint import footprints
from jaxscale.pipeline.choose.partition import ModelPrices, Partition, Stash, partition
from jaxscale.pipeline.choose.price import PipelineDevice, Price
from jaxscale.pipeline.choose.virtual_workers import virtual_workers
from jaxscale.pipeline.clock.clock import Clock
from jaxscale.pipeline.clock.costs import Costs
from jaxscale.pipeline.clock.simulate import simulate
from jaxscale.pipeline.orders import Kind, Schedule
from jaxscale.pipeline.schedules import METHODS
from jaxscale.pipeline.ticks import rows

ALIKE = Price(1, 1, 1)


def some_price(rng: random.Random) -> Price:
    seconds = [rng.uniform(0.5, 2) for _ in range(3)]
    return Price(
        *seconds,
        weight_bytes=rng.randint(1, 50),
        stash_bytes=rng.randint(1, 20),
        between_bytes=rng.randint(0, 5),
        message_bytes=rng.randint(1, 10),
        working_bytes=rng.randint(0, 10),
    )


def some_schedule(rng: random.Random) -> Schedule:
    name = rng.choice(["1f1b", "gpipe", "lockstep", "zb-h1", "zb-v", "interleaved", "chimera"])
    ranks = rng.choice([2, 4] if name == "chimera" else [2, 3, 4])
    return METHODS[name].schedule(ranks, ranks * rng.choice([1, 2]), 2 if name == "interleaved" else None)


class Told:
    """A partition priced block by block, without arrays: the definition that `partition` must agree with."""

    def __init__(
        self, models: dict[str, ModelPrices], schedule: Schedule, devices: list[PipelineDevice], stash: Stash
    ) -> None:
        self.models, self.schedule, self.devices, self.stash = models, schedule, devices, stash

    def stage(self, cut: tuple[int, ...], stage: int) -> dict[str, float]:
        model = self.models[self.devices[self.schedule.routes[0][stage]].kind]
        begin, end = cut[stage], cut[stage + 1]
        blocks = list(model.blocks[begin:end])
        ends = [model.first] * (begin == 0) + [model.last] * (end == len(model.blocks))
        blocks += [price for price in ends if price is not None]
        told: dict[str, float] = {
            field.name: sum(getattr(block, field.name) for block in blocks)
            for field in dataclasses.fields(Price)
            if field.name not in ("message_bytes", "working_bytes")
        }
        told["working"] = max(block.working_bytes for block in blocks)
        told["enters"] = model.blocks[begin - 1].message_bytes if begin else 0
        told["leaves"] = model.blocks[end - 1].message_bytes if end < len(model.blocks) else 0
        if self.stash == "input":
            told["input_gradient"] += told["forward"]
            told["working"] += told["stash_bytes"]
            told["stash_bytes"] = told["enters"]
        return told

    def costs(self, cut: tuple[int, ...]) -> Costs:
        stages = [self.stage(cut, stage) for stage in range(self.schedule.stages)]
        links = [0.0] * self.schedule.ranks
        for route in self.schedule.routes:
            for stage, (here, there) in enumerate(itertools.pairwise(route)):
                if here != there:
                    ring = {here, there} == {0, self.schedule.ranks - 1} and self.schedule.ranks > 2
                    link = max(here, there) if ring else min(here, there)
                    device = self.devices[link]
                    links[link] = max(links[link], stages[stage]["leaves"] / device.link + device.latency)
        names = ("forward", "input_gradient", "weight_gradient")
        return Costs(*(tuple(stage[name] for stage in stages) for name in names), links=tuple(links))

    def seconds(self, cut: tuple[int, ...]) -> float:
        return simulate(self.schedule, self.costs(cut)).seconds

    def bytes(self, cut: tuple[int, ...]) -> list[float]:
        stages = [self.stage(cut, stage) for stage in range(self.schedule.stages)]
        most = []
        for rank, order in enumerate(self.schedule.orders):
            own = [stages[stage] for stage in self.schedule.stages_of(rank)]
            always = sum(one["weight_bytes"] + 2 * one["enters"] + 2 * one["leaves"] for one in own)
            always += self.models[self.devices[rank].kind].shared_bytes + max(one["working"] for one in own)
            held = peak = 0.0
            for action in order:
                one = stages[action.stage]
                held += {Kind.F: one["stash_bytes"], Kind.I: one["between_bytes"]}.get(action.kind, 0)
                peak = max(peak, held)
                held -= one["stash_bytes"] if action.kind in (Kind.B, Kind.W) else 0
                held -= one["between_bytes"] if action.kind is Kind.W else 0
            most.append(always + peak)
        return most


def every(blocks: int, stages: int) -> list[tuple[int, ...]]:
    return [(0, *inner, blocks) for inner in itertools.combinations(range(1, blocks), stages - 1)]


@pytest.mark.parametrize("seed", range(40))
def test_no_partition_is_faster(seed: int) -> None:
    rng = random.Random(seed)
    schedule = some_schedule(rng)
    blocks = rng.randint(schedule.stages, 8)
    kinds = ["fast", "slow"] if len(schedule.routes) == 1 and rng.random() < 0.5 else ["fast"]
    stash = rng.choice(get_args(Stash))
    models = {
        kind: ModelPrices(
            tuple(some_price(rng) for _ in range(blocks)), some_price(rng), some_price(rng), rng.randint(0, 9)
        )
        for kind in kinds
    }
    devices = [
        PipelineDevice(kind=rng.choice(kinds), link=rng.uniform(5, 50), latency=rng.uniform(0, 0.1))
        for _ in range(schedule.ranks)
    ]
    told = Told(models, schedule, devices, stash)
    cuts = every(blocks, schedule.stages)
    least = min(max(told.bytes(cut)) for cut in cuts)
    if rng.random() < 0.7:
        memory = least * rng.choice([1.0, 1.05, 1.3])
        devices = [dataclasses.replace(device, memory_bytes=memory) for device in devices]
        cuts = [cut for cut in cuts if max(told.bytes(cut)) <= memory]
    best = min(map(told.seconds, cuts))

    found = partition(models, schedule, devices, stash=stash)
    assert found.seconds == pytest.approx(best, rel=1e-9)
    assert found.exact
    assert found.boundaries in cuts
    assert found.bytes == tuple(round(count) for count in told.bytes(found.boundaries))
    assert simulate(schedule, found.costs).seconds == pytest.approx(found.seconds, rel=1e-9)

    tight = [dataclasses.replace(device, memory_bytes=least * 0.99) for device in devices]
    with pytest.raises(UserError, match="no partition of"):
        partition(models, schedule, tight, stash=stash)


def in_plain_loops(schedule: Schedule, costs: Costs) -> float:
    """Seconds on the neighbour machine, tick by tick and rank by rank."""
    times = [0.0] * schedule.ranks
    for row in rows(schedule):
        later = {action for order in schedule.orders for action in order} - {action for action in row if action}
        sent = any(
            schedule.rank(source) != schedule.rank(action) and source in row
            for action in later
            for source in schedule.inputs(action)
        )
        times = [
            time + (costs.seconds(one.kind, one.stage) if one else 0) for time, one in zip(times, row, strict=True)
        ]
        if sent:
            ends, last = list(times), schedule.ranks - 1
            for rank in range(schedule.ranks):
                left, right = ends[rank - 1] + costs.links[rank - 1], ends[0 if rank == last else rank + 1]
                times[rank] = max(ends[rank], left, right + costs.links[rank])
    return max(times)


@pytest.mark.parametrize("name", ["1f1b", "gpipe", "lockstep", "zb-h1", "zb-h2", "zb-v", "chimera", "dualpipe-v"])
def test_the_clock_is_the_simulator(name: str) -> None:
    rng = random.Random(name)
    schedule = METHODS[name].schedule(4, 8)
    clock = Clock(schedule)
    batch = [
        Costs(
            *(tuple(rng.uniform(0.1, 2) for _ in range(schedule.stages)) for _ in range(3)),
            links=tuple(rng.uniform(0, 0.3) for _ in range(4)),
        )
        for _ in range(5)
    ]
    passes = [[costs.seconds(*one) for one in clock.passes] for costs in batch]
    seconds = clock.seconds(np.array(passes), np.array([costs.links for costs in batch]))
    assert seconds.tolist() == pytest.approx([simulate(schedule, costs).seconds for costs in batch])
    assert seconds.tolist() == pytest.approx([in_plain_loops(schedule, costs) for costs in batch])
    # a path is worth the seconds where it was found, and never more than them elsewhere
    for blur in (0.0, 0.5):
        path = clock.path(np.array(passes[0]), np.array(batch[0].links), blur)
        assert path.seconds == pytest.approx(seconds[0])
        worth = [
            float(path.pass_counts @ np.array(one) + path.link_counts @ np.array(c.links))
            for one, c in zip(passes, batch, strict=True)
        ]
        assert all(value <= limit + 1e-9 for value, limit in zip(worth, seconds, strict=True))
        if not blur:
            assert worth[0] == pytest.approx(seconds[0])


def test_bound_holds_where_not_all_is_looked_at() -> None:
    rng = random.Random(0)
    schedule = METHODS["1f1b"].schedule(4, 8)
    model = ModelPrices(tuple(some_price(rng) for _ in range(12)))
    told = Told({"": model}, schedule, [PipelineDevice()] * 4, "residuals")
    best = min(map(told.seconds, every(12, 4)))
    for width in (1, 2, 8):
        found = partition(model, schedule, width=width)
        assert found.bound <= best * (1 + 1e-9) <= found.seconds * (1 + 2e-9)


def test_a_head_of_128k_words_takes_the_place_of_blocks() -> None:
    # d 4096, ff 14336, 4096 tokens: FLOP of a block 2 * 4096 * (4 d^2 + 3 d ff), of the head 2 * 4096 * d * 131072
    block, head = 4 * 4096**2 + 3 * 4096 * 14336, 4096 * 131072
    parts = head / block
    logits = 4 * 4096 * 131072 / 16  # float32, in 16 chunks
    model = ModelPrices(
        (ALIKE,) * 32, first=Price(0.02, 0, 0.02), last=Price(parts, parts, parts, working_bytes=logits)
    )
    schedule = METHODS["lockstep"].schedule(4, 16)
    found = partition(model, schedule)
    equal = Told({"": model}, schedule, [PipelineDevice()] * 4, "residuals").seconds((0, 8, 16, 24, 32))
    assert len(found.stages[-1]) < 8
    assert found.seconds < 0.9 * equal
    assert found.bytes == (0, 0, 0, int(logits))


def test_stash_depends_on_the_schedule() -> None:
    model = ModelPrices((Price(1, 1, 1, stash_bytes=10),) * 8)
    devices = [PipelineDevice(memory_bytes=90)] * 4
    with pytest.raises(UserError, match=r"gpipe: no partition .* needs 320B on rank 0, which has 90B"):
        partition(model, METHODS["gpipe"].schedule(4, 16), [PipelineDevice(memory_bytes=90)] * 4)
    found = partition(model, METHODS["1f1b"].schedule(4, 16), devices)
    assert found.bytes == (80, 60, 40, 20)
    # where stage 0 may hold 40, it takes one block: four activations of it wait there
    tight = partition(model, METHODS["1f1b"].schedule(4, 16), [PipelineDevice(memory_bytes=60)] * 4)
    assert tight.boundaries == (0, 1, 3, 5, 8)
    # recomputation holds nothing but what enters
    again = partition(model, METHODS["gpipe"].schedule(4, 16), devices, stash="input")
    assert again.seconds > found.seconds - 1e9
    assert max(again.bytes) <= 90


def test_versions_of_weights_take_memory() -> None:
    model = ModelPrices((Price(1, 1, 1, weight_bytes=100, version_bytes=20),) * 4)
    held = {
        name: partition(model, METHODS[name].schedule(4, m, None, 12)).bytes
        for name, m in (("pipedream", 1), ("2bw", 4), ("pipemare", 1))
    }
    assert held == {"pipedream": (160, 140, 120, 100), "2bw": (120,) * 4, "pipemare": (100,) * 4}


def test_slow_link_is_crossed_where_messages_are_small() -> None:
    blocks = tuple(Price(1, 1, 1, message_bytes=8 if index % 2 else 80) for index in range(8))
    slow = [PipelineDevice(link=1.0), PipelineDevice(link=1.0)]
    assert partition(ModelPrices(blocks), METHODS["1f1b"].schedule(2, 4), slow).boundaries[1] % 2 == 0


def test_virtual_workers() -> None:
    kinds = {"new": 1.0, "old": 2.0}
    devices = [
        PipelineDevice(10, "old"),
        PipelineDevice(40, "new", link=5.0),
        PipelineDevice(20, "new"),
        PipelineDevice(15, "old", latency=1.0),
    ]
    places = virtual_workers(devices, kinds, 2)
    assert places == (PipelineDevice(20, "new", link=5.0), PipelineDevice(10, "old", latency=1.0))
    with pytest.raises(UserError, match="4 devices for 3 virtual workers"):
        virtual_workers(devices, kinds, 3)
    with pytest.raises(UserError, match="did you mean 'old'"):
        virtual_workers([PipelineDevice(kind="odl")], kinds, 1)


def test_what_is_refused() -> None:
    model = ModelPrices((ALIKE,) * 3)
    with pytest.raises(UserError, match="4 stages, but the model has 3 blocks"):
        partition(model, METHODS["1f1b"].schedule(4, 8))
    two = METHODS["1f1b"].schedule(2, 4)
    with pytest.raises(UserError, match="got 3 devices, expected 2: one for each rank of 1f1b"):
        partition(model, two, [PipelineDevice()] * 3)
    with pytest.raises(UserError, match=r"kind of device 'nwe'.*did you mean 'new'"):
        partition({"new": model}, two, [PipelineDevice(kind="nwe"), PipelineDevice(kind="new")])
    unlike = {"a": model, "b": ModelPrices((ALIKE,) * 2)}
    with pytest.raises(
        UserError, match="got prices of 2 blocks on devices of kind 'b', but prices of 3 blocks on kind 'a'"
    ):
        partition(unlike, two, [PipelineDevice(kind="a"), PipelineDevice(kind="b")])
    with pytest.raises(UserError, match="chimera runs every stage on several devices"):
        partition(
            {"a": model, "b": model},
            METHODS["chimera"].schedule(2, 2),
            [PipelineDevice(kind="a"), PipelineDevice(kind="b")],
        )
    for bad in ({"forward": -1.0}, {"stash_bytes": float("nan")}):
        with pytest.raises(UserError, match="expected a finite number >= 0"):
            dataclasses.replace(ALIKE, **bad)
    bad: dict[str, Any]
    for bad in ({"memory_bytes": 0}, {"link": 0.0}, {"latency": -1.0}):
        with pytest.raises(UserError, match="device: got"):
            PipelineDevice(**bad)


def test_one_device() -> None:
    parts = partition(ModelPrices((ALIKE,) * 3), METHODS["gpipe"].schedule(1, 2))
    assert isinstance(parts, Partition)
    assert (parts.boundaries, parts.seconds, parts.exact) == ((0, 3), 18.0, True)
    assert len(footprints(METHODS["gpipe"].schedule(1, 2))) == 1
