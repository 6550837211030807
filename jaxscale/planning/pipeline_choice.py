"""What `pipeline auto:P` comes to for an experiment on a platform: schedule, microbatches, stash and stages.

`pipeline/auto.py` tries every named synchronous schedule with the prices of the model's blocks (`stage_prices.py`),
for every number of microbatches that divides the batch; here it is told of the model, the platform and the memory that
weights and optimizer leave. A CPU's rates are unknown: there the prices are those of a TPU v5e, whose proportions
decide.
"""

import dataclasses
import functools

from jaxscale.costs import roofline
from jaxscale.errors import UserError
from jaxscale.pipeline.auto import Choice, choose
from jaxscale.pipeline.partition import Model
from jaxscale.pipeline.plan import PipelinePlan
from jaxscale.pipeline.price import Device
from jaxscale.planning.program import described_step
from jaxscale.planning.stage_prices import model_prices
from jaxscale.platforms.platform import Platform, chips
from jaxscale.platforms.usable import usable_bytes
from jaxscale.step.experiment import Experiment
from jaxscale.step.layout import local_bytes
from jaxscale.step.plan import Plan

STAND_IN = "v5e"
"""Whose rates price the blocks where nothing tells the platform's own."""
MOST = 16
"""Microbatches tried per device on the pipe axis, at most."""


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

    @functools.cache
    def prices(microbatches: int) -> Model:
        return model_prices(experiment, priced, ranks, microbatches)

    devices = None
    limit = usable_bytes(platform) if limit is None else limit
    if limit is not None:
        devices = [
            Device(memory_bytes=max(0, limit - _settled_bytes(experiment, platform, plan, ranks, counts)))
        ] * ranks
    found = choose(prices, ranks, counts, devices)
    layers = tuple(b - a for a, b in zip(found.partition.boundaries, found.partition.boundaries[1:], strict=False))
    settled = dataclasses.replace(
        plan,
        pipeline=PipelinePlan.parse(str(found.best)),
        stages=None if len(set(layers)) == 1 else layers,
        stash=found.best.stash,
    )
    return settled, found


def _settled_bytes(experiment: Experiment, platform: Platform, plan: Plan, ranks: int, counts: list[int]) -> int:
    """Bytes per device of weights, optimizer, the copy that computes and float32 gradients, stages alike."""
    pipeline = PipelinePlan.parse(f"gpipe:{ranks}x{counts[0]}")
    step = described_step(experiment, platform, dataclasses.replace(plan, pipeline=pipeline, stages=None))
    weights, optimizer = local_bytes(step.layout.abstract.params), local_bytes(step.layout.abstract.optimizer)
    return weights * 2 + optimizer + (weights // 2 if plan.precision == "bfloat16" else 0)
