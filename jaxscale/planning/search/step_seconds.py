"""Seconds of a train step, itemized, in closed form: the one scale on which plans are compared.

    compute  = sum over microbatches of forward + backward + recomputation, by roofline, at the chip's efficiency
    hidden   = min(compute of the pass, communication in that pass beside which products run)
    step     = compute + communication - 0.9 hidden + bubble + launches + copies to and from hosts + update

Gathers of weights and reductions of gradients overlap with the matrix products of the pass in which they occur.
Reductions between slices or hosts are an exception: in published runs, they add their whole time to a step. Messages of
activations (tensor, sequence and pipe axes) do not overlap, because the next product waits for them. Along a tensor
axis of 8 or more devices, however, libtpu divides the product and overlaps it with messages around a ring. In compiled
programs, it does so for half of the bytes of these messages; by published runs, nearly all are hidden. The bubble is
that of the schedule's simulation with equal stages. An update moves state, weights and gradients once through the
memory, or takes as long as its elementwise operations; several microbatches add up their gradients there.

Left out: operations that XLA cannot fuse outside of blocks, skew between devices, and the host's input.
"""

import dataclasses
import functools
from collections.abc import Mapping

from jaxscale.pipeline.charts.draw import schedule_to_draw
from jaxscale.pipeline.clock.costs import Costs
from jaxscale.pipeline.clock.simulate import simulate
from jaxscale.pipeline.plan import PipelinePlan
from jaxscale.planning.search.links import collective_seconds, route
from jaxscale.planning.search.model_costs import Kept, SplitCosts, rated, split_costs
from jaxscale.planning.search.space import Variant
from jaxscale.planning.search.traffic import Transfer, transfers
from jaxscale.platforms.platform import Platform
from jaxscale.platforms.processor import FORMAT_OPERATIONS as PROCESSOR_FORMAT_OPERATIONS
from jaxscale.platforms.processor import MEMORY_BANDWIDTH, memory_seconds
from jaxscale.platforms.processor import SUM_BYTES as PROCESSOR_SUM_BYTES
from jaxscale.recipe.experiment import Experiment
from jaxscale.recipe.plan import OffloadPlan, Plan
from jaxscale.sharding.mesh import MeshSpec
from jaxscale.values.units import duration

LAUNCH_SECONDS = 3e-6
"""Assumed seconds between one matrix product of a device and the next; with many small microbatches, they add up."""
INTERFERENCE = 0.1
"""Seconds by which hidden communication slows the products beside it, as an assumed share of its own seconds."""
HOST_BANDWIDTH = 200e9
"""Assumed bytes/s between a host's processors and its memory, which the devices of the host share in an update."""
VECTOR_SHARE = 1 / 32
"""Assumed rate of elementwise operations in float32, as a share of the peak of matrix products."""
UPDATE_OPERATIONS = 20
"""Assumed elementwise operations per weight in an AdamW update with float32 moments."""
FORMAT_OPERATIONS = {"float32": 0, "fp8": 10, "int8": 12, "dynamic8": 20, "int4": 40}
"""Assumed elementwise operations that convert an optimizer moment from a format and back."""
NOTICEABLE = 0.005
"""Items with a smaller share of a step's seconds are left out of texts."""
RING = 8
"""Least number of devices of a tensor axis along which libtpu divides products (seen in compiled programs)."""


@dataclasses.dataclass(frozen=True)
class StepSeconds:
    """Modeled seconds of one train step, by item.

    Args:
        items: seconds by item; items of communication count only the seconds that no computation hides.
        hidden: seconds of communication that computation hides.

    Example:
        >>> StepSeconds({"forward": 1.0, "backward": 2.0}).total
        3.0
    """

    items: Mapping[str, float]
    hidden: float = 0.0

    @property
    def total(self) -> float:
        """The seconds of the step."""
        return sum(self.items.values())

    def scaled(self, factor: float) -> "StepSeconds":
        """Return the seconds, multiplied by a factor."""
        return StepSeconds({name: factor * seconds for name, seconds in self.items.items()}, factor * self.hidden)

    def __str__(self) -> str:
        shares = ", ".join(
            f"{name} {seconds / self.total:.0%}"
            for name, seconds in self.items.items()
            if seconds >= NOTICEABLE * self.total
        )
        is_noticeable = self.hidden >= NOTICEABLE * self.total
        hidden_text = f"; {duration(self.hidden)} of communication beside the products" if is_noticeable else ""
        return f"{duration(self.total)} a step: {shares}{hidden_text}"


def step_seconds(layout: Plan, variant: Variant, kept: Kept, costs: SplitCosts, platform: Platform) -> StepSeconds:
    """Return the modeled seconds of a step, by item.

    Args:
        layout: plan with a mesh over which the batch can be split evenly.
        variant: memory rule, chunk of the loss and offload of the step.
        kept: what the memory rule keeps and recomputes for the rows of a microbatch on a device, over all stages.
        costs: costs of the model under the layout's split over tensor and sequence axes.
        platform: platform with known rates (`rated`).
    """
    mesh = layout.mesh
    assert mesh is not None
    seconds_by_item = computation(layout, variant, kept, costs, platform)
    head_seconds = seconds_by_item["head"]
    head_forward_seconds = head_seconds / head_passes(variant)
    block_backward_seconds = seconds_by_item["backward"] + seconds_by_item["recomputation"]
    compute_seconds_by_pass = {
        "forward": seconds_by_item["forward"] + head_forward_seconds,
        "backward": block_backward_seconds + head_seconds - head_forward_seconds,
        "update": 0.0,
    }
    reruns_stages = layout.pipeline is not None and layout.stages_keep == "input"
    row_count = round(costs.batch / mesh.batch_shards / layout.microbatches)
    stage_sizes, chip_kind = costs.sizes_of_stage(mesh.pipe), platform.chip.kind
    step_transfers = transfers(layout, stage_sizes, row_count, recomputed=kept.share + reruns_stages, chip=chip_kind)
    exposed_seconds_by_item, hidden_seconds = _communication(step_transfers, compute_seconds_by_pass, mesh, platform)
    all_seconds_by_item = {**seconds_by_item, **exposed_seconds_by_item}
    return StepSeconds({name: seconds for name, seconds in all_seconds_by_item.items() if seconds}, hidden_seconds)


def modeled_seconds(experiment: Experiment, platform: Platform, plan: Plan) -> StepSeconds:
    """Trace a model once, and return the modeled seconds of a step of one plan.

    Args:
        experiment: the experiment to plan for.
        platform: platform that the step would run on; if its rates are unknown, assumed rates are used (`rated`).
        plan: plan with a mesh over which the batch can be split evenly, and a resolved memory rule.

    Raises:
        UserError: the model cannot be split as the plan requires, or the memory rule does not suit it.
    """
    mesh, rated_platform = plan.mesh, rated(platform)
    assert mesh is not None
    costs = split_costs(experiment, rated_platform, plan, mesh.tensor, mesh.sequence)
    row_count = experiment.batch / mesh.batch_shards / plan.microbatches  # of one microbatch on a device
    return step_seconds(plan, Variant.of(plan), costs.kept(plan.memory, row_count), costs, rated_platform)


def computation(layout: Plan, variant: Variant, kept: Kept, costs: SplitCosts, platform: Platform) -> dict[str, float]:
    """Return the modeled seconds of a step by item, without communication. Their sum is a lower bound.

    Args:
        layout: plan with a mesh over which the batch can be split evenly.
        variant: memory rule, chunk of the loss and offload of the step.
        kept: what the memory rule keeps and recomputes for the rows of a microbatch on a device, over all stages.
        costs: costs of the model under the layout's split over tensor and sequence axes.
        platform: platform with known rates (`rated`).
    """
    mesh = layout.mesh
    assert mesh is not None
    row_count = costs.batch / mesh.batch_shards  # rows of all microbatches on a device
    work_share = row_count / costs.rows / mesh.pipe  # share of the blocks' traced work
    reruns_stages = layout.pipeline is not None and layout.stages_keep == "input"
    forward_seconds, backward_seconds = work_share * costs.forward_seconds, work_share * costs.backward_seconds
    recomputation_seconds = layout.microbatches * kept.seconds / mesh.pipe + (forward_seconds if reruns_stages else 0.0)
    bubble_share = 0.0 if layout.pipeline is None else bubble_of(layout.pipeline)
    update_seconds, copy_seconds = _update(layout, variant.offload, costs, platform)
    # each product of the forward pass has two in the backward pass
    is_recomputed = reruns_stages or kept.share > 0
    launch_count = 3 * layout.microbatches * costs.products / mesh.pipe * (1 + is_recomputed / 3)
    return {
        "forward": forward_seconds,
        "backward": backward_seconds,
        "recomputation": recomputation_seconds,
        "head": head_passes(variant) * costs.head_seconds * row_count / costs.rows,
        "bubble": bubble_share / (1 - bubble_share) * (forward_seconds + backward_seconds + recomputation_seconds),
        "launches": launch_count * LAUNCH_SECONDS,
        "memory": _processor_memory_seconds(layout, variant, kept, costs, platform),
        "update": update_seconds,
        "host copies": copy_seconds,
    }


def _processor_memory_seconds(
    layout: Plan, variant: Variant, kept: Kept, costs: SplitCosts, platform: Platform
) -> float:
    """Return the seconds of a step in which a CPU's memory moves data that its cache cannot hold; 0 on other chips."""
    if platform.chip.kind != "cpu":
        return 0.0
    mesh = layout.mesh
    assert mesh is not None
    scale = costs.batch / mesh.batch_shards / layout.microbatches / costs.rows
    loss_bytes, chunk_share = scale * costs.loss_bytes, 1.0
    if variant.loss_chunk is not None:  # a chunk's gradient takes the place of its logits
        loss_bytes, chunk_share = loss_bytes / 2, min(1.0, variant.loss_chunk / costs.positions)
    return memory_seconds(kept.kept_bytes / mesh.pipe, loss_bytes, chunk_share, layout.microbatches)


def head_passes(variant: Variant) -> int:
    """Return the head's seconds divided by those of its forward pass: 3, or 4 if a chunked loss reruns that pass."""
    return 3 if variant.loss_chunk is None else 4


def bubble_of(pipeline: PipelinePlan) -> float:
    """Return the idle share of a pipeline's ranks in a step, by simulation with equal stages.

    Example:
        >>> round(bubble_of(PipelinePlan.parse("gpipe:4x4")), 3)
        0.429
    """
    return _bubble(pipeline if pipeline.stages is None else dataclasses.replace(pipeline, stages=None))


@functools.lru_cache(maxsize=4096)
def _bubble(pipeline: PipelinePlan) -> float:
    """Return the ranks' idle share with equal stages; a backward pass takes as long as two forward passes."""
    schedule = schedule_to_draw(pipeline)
    stage_count = schedule.stages
    rerun_seconds = float(pipeline.stash == "input")
    stage_costs = Costs((1.0,) * stage_count, (1.0 + rerun_seconds,) * stage_count, (1.0,) * stage_count)
    return simulate(schedule, stage_costs).bubble


def _communication(
    step_transfers: tuple[Transfer, ...],
    compute_seconds_by_pass: Mapping[str, float],
    mesh: MeshSpec,
    platform: Platform,
) -> tuple[dict[str, float], float]:
    """Return the exposed seconds of communication, by purpose and axes, and the total of the hidden seconds."""
    exposed_seconds_by_item: dict[str, float] = {}
    overlapping_seconds_by_pass: dict[str, dict[str, float]] = {}  # seconds by pass and item
    for transfer in step_transfers:
        seconds = transfer.count * collective_seconds(transfer.kind, transfer.nbytes, transfer.axes, mesh, platform)
        item = f"{transfer.purpose} over {'+'.join(transfer.axes)}"
        is_overlapping = _overlaps(transfer, mesh, platform) and compute_seconds_by_pass[transfer.passes] > 0
        if is_overlapping:
            seconds_by_item = overlapping_seconds_by_pass.setdefault(transfer.passes, {})
        else:
            seconds_by_item = exposed_seconds_by_item
        seconds_by_item[item] = seconds_by_item.get(item, 0.0) + seconds
    hidden_seconds = 0.0
    for pass_name, overlapping_seconds_by_item in overlapping_seconds_by_pass.items():
        pass_seconds = sum(overlapping_seconds_by_item.values())
        hidden_pass_seconds = min(pass_seconds, compute_seconds_by_pass[pass_name])
        hidden_seconds += hidden_pass_seconds
        hidden_share = hidden_pass_seconds / pass_seconds if pass_seconds else 0.0
        exposed_share = 1 - (1 - INTERFERENCE) * hidden_share
        for item, seconds in overlapping_seconds_by_item.items():
            exposed_seconds_by_item[item] = exposed_seconds_by_item.get(item, 0.0) + exposed_share * seconds
    return exposed_seconds_by_item, hidden_seconds


def _overlaps(transfer: Transfer, mesh: MeshSpec, platform: Platform) -> bool:
    """Return whether a collective overlaps with the matrix products of its pass."""
    is_within_slice_or_host = route(transfer.axes, mesh, platform).parts == 1
    match transfer.purpose:
        case "weights":
            return True
        case "gradients":
            return is_within_slice_or_host
        case "activations":
            is_divided = platform.chip.kind == "tpu" and mesh.tensor >= RING and is_within_slice_or_host
            return is_divided and transfer.axes == ("tensor",) and transfer.kind != "all-reduce"
        case _:
            return False


def _update(layout: Plan, offload: OffloadPlan, costs: SplitCosts, platform: Platform) -> tuple[float, float]:
    """Return the seconds of an update, and the seconds of copying weights and state between device and host."""
    assert layout.mesh is not None
    shard_count = (layout.mesh.fsdp if layout.zero else 1) * layout.mesh.pipe
    weight_count, state_bytes = costs.weights / shard_count, costs.state_bytes / shard_count
    is_processor, device_count = platform.chip.kind == "cpu", platform.chip.devices
    bandwidth = MEMORY_BANDWIDTH if is_processor else platform.chip.device_bandwidth
    operations_by_format = PROCESSOR_FORMAT_OPERATIONS if is_processor else FORMAT_OPERATIONS
    assert bandwidth is not None, "the platform's rates are known"
    # state and float32 weights are read and written, gradients are read, and the compute copy is written
    update_bytes = 2 * state_bytes + (4 + 4 + 4 + 2) * weight_count
    operation_count = (UPDATE_OPERATIONS + 2 * operations_by_format[layout.state.moments]) * weight_count
    vector_rate = VECTOR_SHARE * (platform.chip.peak("float32") or 0.0) / device_count
    vector_seconds = operation_count / vector_rate if vector_rate and offload.optimizer_state != "host" else 0.0
    # several microbatches each read their gradients, and read and write the sum of the earlier ones
    gradient_shard_count = layout.mesh.fsdp if layout.zero >= 2 else 1
    sum_count = layout.microbatches - 1
    sum_bytes_per_weight = PROCESSOR_SUM_BYTES if is_processor else 3 * 4
    sum_bytes = sum_count * sum_bytes_per_weight * costs.weights / gradient_shard_count / layout.mesh.pipe
    link = next((link for link in platform.links if link.name == "pcie"), None)
    copied_bytes = host_seconds = 0.0
    if offload.optimizer_state == "streamed":
        copied_bytes = 2 * state_bytes
    elif offload.optimizer_state == "host":  # gradients go to the host, which updates, and weights come back
        copied_bytes = (4 + 4) * weight_count
        host_seconds = update_bytes * (platform.chip.chips_per_host or 1) * device_count / HOST_BANDWIDTH
        update_bytes = 0.0
    if offload.weights == "host":  # weights come for both passes of each microbatch
        copied_bytes += 2 * layout.microbatches * 2 * weight_count
    copy_seconds = 0.0 if link is None else copied_bytes * device_count / link.bandwidth
    update_seconds = max(update_bytes / bandwidth, vector_seconds) + host_seconds
    return update_seconds + sum_bytes / bandwidth, copy_seconds
