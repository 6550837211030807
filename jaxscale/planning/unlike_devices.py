"""Partition of a model's blocks over different kinds of devices, so that faster devices get more blocks.

Groups of devices are placed along the pipe in the given order. If there are N times as many devices as ranks, N
pipelines run side by side (HetPipe's virtual workers). The devices are sorted by speed and divided into sets of N
neighbors. Each worker gets one device of every set, so that the workers are about equally fast. The workers share the
rows of a microbatch. `pipeline.choose.partition` computes the partition from the roofline prices of each kind of chip.

    Park et al. 2020, "HetPipe" (arXiv:2005.14038); Zhan and Zhang 2019, "Pipe-torch" (CBD).

Left out: memory (use `fit` for the platform with the least memory); the links between machines of different kinds
(no table lists them, so each rank is assumed to have the link of its own chip); and training, because one program needs
devices of one kind. The result is printed as the plan's pipeline, with its option `stages`.
"""

import dataclasses
import math
from collections.abc import Sequence

from jaxscale.errors import UserError
from jaxscale.pipeline.choose.partition import ModelPrices, Partition, partition
from jaxscale.pipeline.choose.price import PipelineDevice
from jaxscale.pipeline.choose.virtual_workers import virtual_workers
from jaxscale.pipeline.orders import Schedule
from jaxscale.pipeline.plan import PipelinePlan
from jaxscale.planning.pipeline_choice import layer_counts_of, prices_of_periods
from jaxscale.planning.stage_prices import model_prices
from jaxscale.platforms.platform import Platform
from jaxscale.recipe.experiment import Experiment
from jaxscale.state.stages import period_of


@dataclasses.dataclass(frozen=True)
class Assignment:
    """The blocks of a model assigned to different kinds of devices.

    Args:
        pipeline: pipeline plan, with the number of blocks in each stage.
        partition: partition of the model's periods into stages. A period is the group of different blocks that the
            model repeats, or a single block if all blocks are alike.
        chip_names: name of each rank's chip; if several workers have different chips at a rank, the slowest chip.
        worker_count: number of pipelines that run side by side.
    """

    pipeline: PipelinePlan
    partition: Partition
    chip_names: tuple[str, ...]
    worker_count: int

    def __str__(self) -> str:
        workers_text = f", {self.worker_count} virtual workers side by side" if self.worker_count > 1 else ""
        excess_share = self.partition.seconds / self.partition.bound - 1
        accuracy_text = "" if self.partition.exact else f" (at most {excess_share:.1%} slower than the fastest)"
        return f"ranks on {', '.join(self.chip_names)}{workers_text}: --plan.pipeline {self.pipeline}{accuracy_text}"


def parse_groups(text: str, rank_count: int) -> tuple[Platform, ...]:
    """Parse groups of devices, such as "gpu h100 x 2, gpu a100 x 2", in their order along the pipe.

    Args:
        text: the platforms of the groups, separated by commas.
        rank_count: number of ranks of the pipeline, which must divide the number of devices.

    Raises:
        UserError: the text names fewer than two kinds of chips, or the number of devices is not a multiple of
            the number of ranks.

    Example:
        >>> [group.devices for group in parse_groups("gpu h100 x 2, gpu a100 x 2", 4)]
        [2, 2]
    """
    groups = tuple(Platform.parse(group_text) for group_text in text.split(",") if group_text.strip())
    device_count = sum(group.devices for group in groups)
    if len({group.chip.name for group in groups}) < 2:
        raise UserError(f"--devices {text!r}: expected two kinds of chips or more; for one kind, use --platform")
    if device_count % rank_count:
        raise UserError(
            f"--devices {text!r}: got {device_count} devices for {rank_count} ranks, expected {rank_count} or a "
            "multiple of it"
        )
    return groups


def assign(
    experiment: Experiment, groups: Sequence[Platform], pipeline: PipelinePlan, schedule: Schedule
) -> Assignment:
    """Assign an experiment's blocks to different kinds of devices, by the fastest partition.

    Args:
        experiment: the experiment to plan for; its plan specifies types, attention and memory.
        groups: groups of devices, in their order along the pipe.
        pipeline: pipeline plan, which specifies the number of microbatches.
        schedule: schedule of the pipeline.

    Raises:
        UserError: the rates of a chip are unknown, rows cannot be split evenly, or the schedule's microbatches take
            several routes.
    """
    worker_count = sum(group.devices for group in groups) // schedule.ranks
    _, microbatch_count = pipeline.shape()
    period = period_of(experiment.model)
    prices_by_chip: dict[str, ModelPrices] = {}
    bandwidth_by_chip: dict[str, float] = {}
    for group in {group.chip.name: group for group in groups}.values():
        chip_platform = Platform(group.chip, max(1, schedule.ranks * worker_count // group.chip.devices))
        chip_prices = model_prices(experiment, chip_platform, schedule.ranks, microbatch_count)
        prices_by_chip[group.chip.name] = prices_of_periods(chip_prices, period)
        link_bandwidths = [link.bandwidth for link in group.links if link.name != "dcn"]
        bandwidth_by_chip[group.chip.name] = max(link_bandwidths, default=math.inf)
    chip_names = [group.chip.name for group in groups for _ in range(group.devices)]
    pipe_devices = tuple(PipelineDevice(kind=name, link=bandwidth_by_chip[name]) for name in chip_names)
    if worker_count > 1:
        forward_seconds_by_chip = {
            name: sum(price.forward for price in prices.blocks) for name, prices in prices_by_chip.items()
        }
        slowness_by_chip = {
            name: seconds / min(forward_seconds_by_chip.values()) for name, seconds in forward_seconds_by_chip.items()
        }
        pipe_devices = virtual_workers(pipe_devices, slowness_by_chip, worker_count)
    fastest_partition = partition(prices_by_chip, schedule, pipe_devices, stash=experiment.plan.stages_keep)
    stage_pipeline = dataclasses.replace(pipeline, stages=layer_counts_of(fastest_partition, period))
    rank_chip_names = tuple(device.kind for device in pipe_devices)
    return Assignment(stage_pipeline, fastest_partition, rank_chip_names, worker_count)
