"""Resolve `pipeline auto:P` for an experiment on a platform: choose the schedule, microbatches, stash and stages.

`pipeline/choose/auto.py` tries every named synchronous schedule with the prices of the model's blocks
(`stage_prices.py`), for every number of microbatches that divides the batch. This module supplies the prices, and the
memory that weights and optimizer state leave free. The candidates are then ranked by the modeled seconds of a whole
step, on the scale of `jaxscale plan`, which add launches and communication to the simulated passes. If rates are
unknown, as on a CPU, assumed ones are used (`rated`). Left out: candidates whose passes alone, without a bubble, take
longer than those of the fastest one.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence

from jaxscale.compiler.usable import usable_bytes
from jaxscale.errors import UserError
from jaxscale.memory.plan import MemoryPlan
from jaxscale.pipeline.choose.auto import PipelineCandidate, choose_pipeline
from jaxscale.pipeline.choose.partition import ModelPrices, Partition
from jaxscale.pipeline.choose.price import PipelineDevice, Price
from jaxscale.planning.estimate import estimate
from jaxscale.planning.program import described_step
from jaxscale.planning.search.model_costs import rated, step_costs
from jaxscale.planning.search.space import Variant
from jaxscale.planning.search.step_seconds import step_seconds
from jaxscale.planning.stage_prices import model_prices
from jaxscale.platforms.platform import Platform
from jaxscale.recipe.experiment import Experiment, plan_of
from jaxscale.recipe.plan import Plan
from jaxscale.state.layout import local_bytes
from jaxscale.state.stages import period_of
from jaxscale.step.train_step import TrainStep
from jaxscale.values.units import size

MAX_MICROBATCHES = 16
"""Maximum number of microbatches per rank of the pipeline."""
SIMULATED_ITEMS = ("forward", "backward", "recomputation", "head", "bubble")
"""Items of a step's seconds that the simulation of a pipeline includes."""
MAX_ESTIMATES = 24
"""Maximum number of candidates, the fastest first, for which the whole step is estimated."""


def pipeline_choice(
    experiment: Experiment, platform: Platform, limit: int | None = None, plan: Plan | None = None
) -> Plan:
    """Return the plan with the fastest pipeline whose memory fits.

    Args:
        experiment: the experiment to plan for.
        platform: platform to train on.
        limit: bytes of device memory per device; by default the bytes that the platform's programs may use.
        plan: a plan with `pipeline auto:P` for P ranks; the experiment's plan by default.

    Raises:
        UserError: no schedule fits the memory, or no schedule is defined for the devices and the batch.
    """
    plan = plan_of(experiment, plan)
    experiment = dataclasses.replace(experiment, plan=plan)  # the plan determines the prices of the blocks
    assert plan.pipeline is not None
    rank_count = plan.pipeline.ranks
    assert rank_count is not None
    if platform.devices % rank_count:
        raise UserError(
            f"pipeline {plan.pipeline}: {platform} has {platform.devices} devices, expected a multiple of "
            f"{rank_count}; choose another number P in auto:P"
        )
    shard_count = platform.devices // rank_count if plan.mesh is None else plan.mesh.batch_shards
    possible_counts = range(1, MAX_MICROBATCHES * rank_count + 1)
    microbatch_counts = [count for count in possible_counts if experiment.batch % (count * shard_count) == 0]
    if not microbatch_counts:
        raise UserError(
            f"pipeline {plan.pipeline}: a batch of {experiment.batch} rows cannot be split evenly into "
            f"{shard_count} shards; choose a multiple of {shard_count * rank_count} rows, to give each rank a "
            "microbatch"
        )
    rated_platform = rated(platform)
    period = period_of(experiment.model)

    @functools.cache
    def prices_of(microbatch_count: int) -> ModelPrices:
        """Return the prices of the model's blocks for this number of microbatches."""
        return prices_of_periods(model_prices(experiment, rated_platform, rank_count, microbatch_count), period)

    pipe_devices = None
    limit = usable_bytes(platform) if limit is None else limit
    pipeline = dataclasses.replace(plan.pipeline, name="gpipe", microbatches=microbatch_counts[0])
    # `memory fit` is resolved after the pipeline; until then, memory full stands for what it can save
    frugal_plan = dataclasses.replace(plan, memory=MemoryPlan("full")) if plan.memory.rule == "fit" else plan
    equal_step = described_step(experiment, platform, dataclasses.replace(frugal_plan, pipeline=pipeline))
    if limit is not None:
        fixed_bytes = _fixed_bytes(equal_step, plan)
        pipe_devices = [PipelineDevice(memory_bytes=max(1, limit - fixed_bytes))] * rank_count
    choice = choose_pipeline(prices_of, rank_count, microbatch_counts, pipe_devices)

    def plan_with_pipeline(candidate: PipelineCandidate) -> Plan:
        """Return the plan with the pipeline of a candidate."""
        assert plan.pipeline is not None
        assert candidate.partition is not None
        layer_counts = layer_counts_of(candidate.partition, period)
        pipeline = dataclasses.replace(
            plan.pipeline,
            name=candidate.name,
            ranks=candidate.ranks,
            microbatches=candidate.microbatches,
            chunks=candidate.chunks,
            stages=None if len(set(layer_counts)) == 1 else layer_counts,
            stash=candidate.stash,
        )
        return dataclasses.replace(plan, pipeline=pipeline)

    seconds_of = _seconds_of_candidates(
        dataclasses.replace(experiment, plan=dataclasses.replace(equal_step.plan, memory=plan.memory)), rated_platform
    )
    seconds_and_candidates = [
        (seconds_of(candidate, plan_with_pipeline(candidate)), candidate)
        for candidate in choice.candidates
        if candidate.partition is not None
    ]
    fastest_candidates = [candidate for _, candidate in sorted(seconds_and_candidates, key=_rank)]
    if limit is None:
        return plan_with_pipeline(fastest_candidates[0])
    bytes_and_candidates: list[tuple[int, PipelineCandidate]] = []  # needed bytes, candidate
    for candidate in fastest_candidates[:MAX_ESTIMATES]:
        # prices include only the bytes kept for backward passes; the estimate covers the whole step
        candidate_plan = plan_with_pipeline(candidate)
        estimated_plan = dataclasses.replace(candidate_plan, memory=frugal_plan.memory)
        needed_bytes = estimate(experiment, platform, estimated_plan).device_bytes
        if needed_bytes <= limit:
            return candidate_plan
        bytes_and_candidates.append((needed_bytes, candidate))
    least_bytes, smallest_candidate = min(bytes_and_candidates, key=lambda pair: pair[0])
    raise UserError(
        f"pipeline {plan.pipeline}: none of the {len(bytes_and_candidates)} fastest candidates fits {size(limit)}; "
        f"{smallest_candidate} needs the least, {size(least_bytes)}. "
        "Use more devices, memory full, ZeRO over fsdp, or a loss in chunks"
    )


def prices_of_periods(prices: ModelPrices, period: int) -> ModelPrices:
    """Return prices that count each period of blocks as one block, so that no stage starts inside a period.

    Args:
        prices: prices of the model's blocks.
        period: number of blocks in a period. A period is the group of different blocks that the model repeats.

    Example:
        >>> from jaxscale.pipeline.choose.price import Price
        >>> [price.forward for price in prices_of_periods(ModelPrices((Price(1, 1, 1),) * 4), 2).blocks]
        [2, 2]
    """
    starts = range(0, len(prices.blocks), period)
    return dataclasses.replace(
        prices, blocks=tuple(_total_price(prices.blocks[start : start + period]) for start in starts)
    )


def _total_price(block_prices: Sequence[Price]) -> Price:
    """Return the price of consecutive blocks that are treated as one block."""
    field_names = [field.name for field in dataclasses.fields(Price)]
    total_by_field: dict[str, float] = {
        name: sum(getattr(price, name) for price in block_prices) for name in field_names
    }
    total_by_field["message_bytes"] = block_prices[0].message_bytes
    total_by_field["working_bytes"] = max(price.working_bytes for price in block_prices)
    return Price(**total_by_field)


def layer_counts_of(partition: Partition, period: int) -> tuple[int, ...]:
    """Return the number of blocks in each stage of a partition into whole periods of `period` blocks each."""
    return tuple(period * len(periods) for periods in partition.stages)


def _rank(seconds_and_candidate: tuple[float, PipelineCandidate]) -> tuple[float, int]:
    """Return the key by which candidates are sorted: seconds, and among equal seconds the bytes of the fullest rank."""
    seconds, candidate = seconds_and_candidate
    assert candidate.partition is not None
    return float(f"{seconds:.9g}"), int(max(candidate.partition.bytes))


def _seconds_of_candidates(experiment: Experiment, platform: Platform) -> Callable[[PipelineCandidate, Plan], float]:
    """Return a function from a candidate and its plan to the modeled seconds of a whole step.

    The step's items are those of `step_seconds`, except that the passes and the bubble are as simulated for the
    candidate's partition, whose stages may be unequal. If a whole step cannot be modeled, the simulated seconds count.

    Args:
        experiment: the experiment, whose plan has a resolved mesh.
        platform: platform with known rates (`rated`).
    """
    mesh, memory = experiment.plan.mesh, experiment.plan.memory
    assert mesh is not None
    memory = MemoryPlan("none") if memory.rule == "fit" else memory  # as in the prices of the passes
    costs = step_costs(experiment, platform)
    if costs is None or not costs.suits(memory):
        return lambda candidate, plan: candidate.seconds

    def seconds_of(candidate: PipelineCandidate, plan: Plan) -> float:
        """Return the modeled seconds of a step with the candidate's pipeline."""
        plan = dataclasses.replace(plan, mesh=mesh, memory=memory, microbatches=candidate.microbatches)
        row_count = experiment.batch / mesh.batch_shards / candidate.microbatches
        seconds = step_seconds(plan, Variant.of(plan), costs.kept(memory, row_count), costs, platform)
        other_seconds = (value for name, value in seconds.items.items() if name not in SIMULATED_ITEMS)
        return candidate.seconds + sum(other_seconds)

    return seconds_of


def _fixed_bytes(step: TrainStep, plan: Plan) -> int:
    """Return the bytes per device of weights, optimizer state, compute copy and gradients, for equal stages."""
    weight_bytes = local_bytes(step.layout.abstract.params)
    optimizer_state_bytes = local_bytes(step.layout.abstract.optimizer)
    # weights and their float32 gradients, optimizer state, and the bfloat16 compute copy
    return weight_bytes * 2 + optimizer_state_bytes + (weight_bytes // 2 if plan.precision == "bfloat16" else 0)
