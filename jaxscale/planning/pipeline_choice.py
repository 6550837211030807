"""What `pipeline auto:P` comes to for an experiment on a platform: schedule, microbatches, stash and stages.

`pipeline/auto.py` tries every named synchronous schedule with the prices of the model's blocks (`stage_prices.py`),
for every number of microbatches that divides the batch; here it is told of the model, the platform and the memory that
weights and optimizer leave. A CPU's rates are unknown: there the prices are those of a TPU v5e, whose proportions
decide.
"""

import dataclasses
import functools
import itertools

from jaxscale.costs import roofline
from jaxscale.errors import UserError
from jaxscale.pipeline.auto import Candidate, Choice, choose
from jaxscale.pipeline.partition import Model
from jaxscale.pipeline.plan import PipelinePlan
from jaxscale.pipeline.price import Device, Price
from jaxscale.planning.estimate import estimate
from jaxscale.planning.program import described_step
from jaxscale.planning.stage_prices import model_prices
from jaxscale.platforms.platform import Platform, chips
from jaxscale.platforms.usable import usable_bytes
from jaxscale.step.experiment import Experiment
from jaxscale.step.layout import local_bytes
from jaxscale.step.plan import Plan
from jaxscale.step.stages import period_of
from jaxscale.values.units import size

STAND_IN = "v5e"
"""Whose rates price the blocks where nothing tells the platform's own."""
MOST = 16
"""Microbatches tried per device on the pipe axis, at most."""
TRIED = 24
"""Of the fastest, how many are weighed as whole steps until one fits."""


def pipeline_choice(
    experiment: Experiment, platform: Platform, limit: int | None = None, plan: Plan | None = None
) -> tuple[Plan, Choice]:
    """The plan with the best pipeline, and all that were weighed.

    Args:
        experiment: what to train.
        platform: where.
        limit: bytes of device memory per device; what the platform's programs may use by default.
        plan: with `pipeline auto:P`; the experiment's own by default.

    Raises:
        UserError: no schedule fits, or none is defined for the devices and the batch.
    """
    plan = experiment.plan if plan is None else plan
    experiment = dataclasses.replace(experiment, plan=plan)  # whose blocks are priced as it has them
    assert plan.pipeline is not None
    ranks = plan.pipeline.ranks
    assert ranks is not None
    if platform.devices % ranks:
        raise UserError(
            f"pipeline {plan.pipeline} does not divide the {platform.devices} devices of {platform}: take another P"
        )
    shards = platform.devices // ranks if plan.mesh is None else plan.mesh.batch_shards
    counts = [m for m in range(1, MOST * ranks + 1) if experiment.batch % (m * shards) == 0]
    if not counts:
        raise UserError(
            f"pipeline {plan.pipeline}: a batch of {experiment.batch} rows does not divide over {shards} devices: "
            f"choose a batch that is a multiple of {shards * ranks}"
        )
    priced = platform
    if roofline.rate(platform.chip, "bfloat16") is None:
        priced = dataclasses.replace(platform, chip=dataclasses.replace(chips()[STAND_IN], kind=platform.chip.kind))

    period = period_of(experiment.model)

    @functools.cache
    def prices(microbatches: int) -> Model:
        return in_turns(model_prices(experiment, priced, ranks, microbatches), period)

    devices = None
    limit = usable_bytes(platform) if limit is None else limit
    if limit is not None:
        devices = [
            Device(memory_bytes=max(1, limit - _settled_bytes(experiment, platform, plan, ranks, counts)))
        ] * ranks
    found = choose(prices, ranks, counts, devices)

    def settled(one: Candidate) -> Plan:
        assert one.partition is not None
        bounds = one.partition.boundaries
        layers = tuple(period * (after - before) for before, after in itertools.pairwise(bounds))
        schedule = PipelinePlan.parse(str(one))
        options = {"chunks": schedule.chunks, "stages": None if len(set(layers)) == 1 else layers, "stash": one.stash}
        assert plan.pipeline is not None
        numbers = {"name": schedule.name, "ranks": schedule.ranks, "microbatches": schedule.microbatches}
        return dataclasses.replace(plan, pipeline=dataclasses.replace(plan.pipeline, **numbers, **options))

    if limit is None:
        return settled(found.best), found
    least: tuple[int, Candidate] | None = None
    fastest = [one for one in found.candidates if one.partition is not None][:TRIED]
    for one in (found.best, *(one for one in fastest if one is not found.best)):
        # the prices know what waits for a backward; the estimate knows the rest of a step
        taken = estimate(experiment, platform, settled(one)).device_bytes
        if taken <= limit:
            return settled(one), found
        least = (taken, one) if least is None or taken < least[0] else least
    assert least is not None
    raise UserError(
        f"pipeline {plan.pipeline}: of the {len(fastest)} fastest none fits {size(limit)}; {least[1]} takes the least, "
        f"{size(least[0])}: take more devices, memory full, ZeRO over an fsdp axis, or a loss in chunks"
    )


def in_turns(model: Model, period: int) -> Model:
    """Prices of whole turns of unlike blocks, where a stage can begin with no other.

    Example:
        >>> from jaxscale.pipeline.price import Price
        >>> [price.forward for price in in_turns(Model((Price(1, 1, 1),) * 4), 2).blocks]
        [2, 2]
    """
    if period == 1:
        return model
    turns = [model.blocks[start : start + period] for start in range(0, len(model.blocks), period)]
    added = [field.name for field in dataclasses.fields(Price) if field.name not in ("message_bytes", "working_bytes")]
    return dataclasses.replace(
        model,
        blocks=tuple(
            dataclasses.replace(
                turn[0],
                working_bytes=max(one.working_bytes for one in turn),
                **{name: sum(getattr(one, name) for one in turn) for name in added},
            )
            for turn in turns
        ),
    )


def _settled_bytes(experiment: Experiment, platform: Platform, plan: Plan, ranks: int, counts: list[int]) -> int:
    """Bytes per device of weights, optimizer, the copy that computes and float32 gradients, stages alike."""
    pipeline = PipelinePlan.parse(f"gpipe:{ranks}x{counts[0]}")
    step = described_step(experiment, platform, dataclasses.replace(plan, pipeline=pipeline))
    weights, optimizer = local_bytes(step.layout.abstract.params), local_bytes(step.layout.abstract.optimizer)
    return weights * 2 + optimizer + (weights // 2 if plan.precision == "bfloat16" else 0)
