"""The plans among which the search chooses: layouts over the devices, and variants of each layout.

A layout is a mesh, a ZeRO stage, a pipeline and a number of microbatches. A variant is a memory rule, a chunk of the
loss and a place for weights and optimizer state. Settings that change what is computed (number formats, codecs,
DiLoCo) are those of the user's plan. A fixed setting keeps its value in the user's plan; a forbidden setting keeps its
default.
"""

import dataclasses
import math
from collections.abc import Collection, Iterator

from jaxscale.errors import UserError
from jaxscale.memory.plan import MemoryPlan
from jaxscale.model_traits import ModelTraits
from jaxscale.pipeline.plan import PipelinePlan
from jaxscale.planning.search.settings import check_settings
from jaxscale.platforms.platform import Platform
from jaxscale.recipe.experiment import Experiment
from jaxscale.recipe.plan import OffloadPlan, Plan
from jaxscale.sharding.mesh import MeshSpec

MEMORY_RULES = tuple(map(MemoryPlan.parse, ("none", "dots", "full")))
"""Memory rules with which plans are ranked; the best plans then get the cheapest rule that fits (`memory fit`)."""
SCHEDULE_FORMATS = (
    "1f1b:{}x{}",
    "1f1b:{}x{},stash=input",
    "interleaved:{}x{},v=2",
    "zb-h1:{}x{}",
    "zb-h1:{}x{},stash=input",
)
"""Schedules among which the search chooses, as format strings for the numbers of ranks and microbatches.

Each is tried with 1, 2, 4 and 8 microbatches per rank.
"""
MAX_TENSOR_SIZE = 16
"""Maximum size of the tensor axis on a TPU; on GPUs, the tensor axis also stays within a host."""
MAX_SEQUENCE_SIZE = 16
MAX_RANKS = 16
MAX_MICROBATCHES = 64
"""Maximum size of the sequence axis, number of ranks of a pipeline and number of microbatches that are tried."""
LONG_CONTEXT = 16384
"""Least number of positions in a row for which a sequence axis is tried even if all devices have enough rows."""
LOSS_CHUNK = 256
"""Number of positions of a row whose loss a chunked loss computes at a time."""
OFFLOAD_PLANS = (
    OffloadPlan(),
    OffloadPlan(optimizer_state="streamed"),
    OffloadPlan(optimizer_state="host"),
    OffloadPlan(weights="host", optimizer_state="streamed"),
    OffloadPlan(weights="host", gradients="host", optimizer_state="streamed"),
)
"""Places for weights and optimizer state, from the one that costs nothing to the one that takes the least memory."""


@dataclasses.dataclass(frozen=True)
class Choices:
    """Settings that the user has fixed or forbidden.

    Args:
        base: plan that holds the fixed settings, and the settings that are not searched.
        fixed: names of the settings that keep their values in `base`.
        forbidden: names of the settings that keep their defaults.

    Raises:
        UserError: a name is unknown, or both fixed and forbidden.
    """

    base: Plan
    fixed: frozenset[str] = frozenset()
    forbidden: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        check_settings(self.fixed, self.forbidden)
        if "mesh" in self.fixed and "pipeline" in self.forbidden and self.base.mesh and self.base.mesh.pipe > 1:
            raise UserError(
                f"pipeline: it is forbidden, but the fixed mesh {self.base.mesh} has an axis pipe; "
                "allow it, or set another mesh"
            )
        fixed_axes = sorted({"tensor", "sequence", "replica"} & self.fixed)
        if fixed_axes and self.base.mesh is None:
            raise UserError(
                f"{fixed_axes[0]}: it is fixed, but the plan has no mesh; set one, such as --plan.mesh tensor:2"
            )
        if "mesh" in self.fixed and self.base.mesh is None:
            raise UserError("mesh: it is fixed, but the plan has no mesh; set one, such as --plan.mesh fsdp:8")

    def is_open(self, name: str) -> bool:
        """Return whether the search chooses a setting."""
        return name not in self.fixed and name not in self.forbidden


@dataclasses.dataclass(frozen=True)
class Variant:
    """Settings of a plan that do not depend on its layout.

    Args:
        memory: memory rule.
        loss_chunk: number of positions of a row whose loss is computed at a time; `None` for all.
        offload: which tensors are in host memory.
    """

    memory: MemoryPlan
    loss_chunk: int | None = None
    offload: OffloadPlan = dataclasses.field(default_factory=OffloadPlan)

    @classmethod
    def of(cls, plan: Plan) -> "Variant":
        """Return the variant of a plan."""
        return cls(plan.memory, plan.kernels.loss_chunk, plan.offload)

    def applied_to(self, layout: Plan) -> Plan:
        """Return a layout with the settings of the variant."""
        kernels = dataclasses.replace(layout.kernels, loss_chunk=self.loss_chunk)
        return dataclasses.replace(layout, memory=self.memory, kernels=kernels, offload=self.offload)


def technique_count(layout: Plan, variant: Variant) -> int:
    """Return the number of techniques that a plan uses. Of two equally fast plans, the search prefers the simpler one.

    Example:
        >>> technique_count(Plan(mesh="data:2,fsdp:4", zero=3), Variant(MemoryPlan("full")))
        6
    """
    assert layout.mesh is not None
    axis_count = sum(axis_size > 1 for axis_size in layout.mesh.sizes.values())
    feature_flags = (layout.pipeline is not None, layout.microbatches > 1, variant.memory.rule != "none")
    return axis_count + layout.zero + sum(feature_flags) + (variant.loss_chunk is not None) + bool(str(variant.offload))


def divisors(number: int, max_divisor: int | None = None) -> list[int]:
    """Return the divisors of a number up to `max_divisor`, in ascending order.

    Example:
        >>> divisors(12), divisors(12, 4)
        ([1, 2, 3, 4, 6, 12], [1, 2, 3, 4])
    """
    small_divisors = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    all_divisors = sorted({*small_divisors, *(number // d for d in small_divisors)})
    return [d for d in all_divisors if max_divisor is None or d <= max_divisor]


def layouts(
    experiment: Experiment,
    platform: Platform,
    device_count: int,
    choices: Choices,
    refusals: set[str] | None = None,
) -> Iterator[Plan]:
    """Yield the layouts over a number of devices, in a fixed order.

    Layouts that `Plan` itself refuses are left out. Rules of combination that need the model or the experiment are
    checked later, when a step is built.

    Args:
        experiment: the experiment to plan for.
        platform: platform to plan for.
        device_count: number of devices of each mesh.
        choices: settings that the user has fixed or forbidden.
        refusals: set to which the reasons for leaving out layouts are added.
    """
    refusal_texts: set[str] = set() if refusals is None else refusals
    for mesh in meshes(experiment, platform, device_count, choices):
        yield from _layouts_of(mesh, experiment, choices, refusal_texts)


def meshes(experiment: Experiment, platform: Platform, device_count: int, choices: Choices) -> Iterator[MeshSpec]:
    """Yield the meshes of a number of devices over which the batch can be split evenly.

    Args:
        experiment: the experiment to plan for.
        platform: platform to plan for.
        device_count: number of devices of each mesh.
        choices: settings that the user has fixed or forbidden.
    """
    base = choices.base
    if "mesh" in choices.fixed:
        assert base.mesh is not None, "a fixed mesh is in the plan"
        if base.mesh.devices == device_count:
            yield base.mesh
        return
    traits = ModelTraits.of(experiment.model)
    if "pipeline" in choices.fixed and base.pipeline is not None:
        rank_counts = [base.pipeline.shape()[0]]
    elif choices.is_open("pipeline") and traits.layers:
        rank_counts = divisors(math.gcd(traits.layers, device_count), MAX_RANKS)
    else:
        rank_counts = [1]
    is_gpu = platform.chip.kind == "gpu"
    max_tensor_size = (
        min(MAX_TENSOR_SIZE, platform.chip.chips_per_host or MAX_TENSOR_SIZE) if is_gpu else MAX_TENSOR_SIZE
    )
    for replica_count in _replica_counts(experiment, platform, device_count, choices):
        for rank_count in rank_counts:
            for tensor_size in _axis_sizes("tensor", device_count, max_tensor_size, choices):
                for sequence_size in _axis_sizes("sequence", device_count, MAX_SEQUENCE_SIZE, choices):
                    shard_count, remainder = divmod(
                        device_count, replica_count * rank_count * tensor_size * sequence_size
                    )
                    if remainder or experiment.batch % (shard_count * replica_count):
                        continue
                    if sequence_size > 1 and not _is_worth_splitting(
                        traits.context, experiment, device_count // sequence_size
                    ):
                        continue
                    for fsdp_size in divisors(shard_count):
                        yield MeshSpec(
                            replica=replica_count,
                            data=shard_count // fsdp_size,
                            pipe=rank_count,
                            fsdp=fsdp_size,
                            sequence=sequence_size,
                            tensor=tensor_size,
                        )


def _is_worth_splitting(context: int | None, experiment: Experiment, device_count_without_split: int) -> bool:
    """Return whether to try a sequence axis: rows are long, or there is at most one row for each group of devices."""
    return context is not None and (context >= LONG_CONTEXT or experiment.batch <= device_count_without_split)


def variants(experiment: Experiment, platform: Platform, choices: Choices) -> list[Variant]:
    """Return the variants to try for each layout.

    Args:
        experiment: the experiment to plan for.
        platform: platform to plan for.
        choices: settings that the user has fixed or forbidden.
    """
    base = choices.base
    traits = ModelTraits.of(experiment.model)
    memory_rules: Collection[MemoryPlan] = MEMORY_RULES if choices.is_open("memory") else (base.memory,)
    if "memory" in choices.forbidden:
        memory_rules = (MemoryPlan("none"),)
    offload_plans: Collection[OffloadPlan] = (base.offload,) if "offload" in choices.fixed else (OffloadPlan(),)
    if choices.is_open("offload") and platform.chip.kind != "cpu":
        offload_plans = OFFLOAD_PLANS
    base_chunk = None if "loss_chunk" in choices.forbidden else base.kernels.loss_chunk
    loss_chunks = [base_chunk]
    if base_chunk is None and choices.is_open("loss_chunk") and not traits.foreign and base.kernels.scores == "auto":
        loss_chunks += [LOSS_CHUNK] if (traits.context or 0) > LOSS_CHUNK and traits.vocab else []
    return [
        Variant(rule, loss_chunk, offload)
        for loss_chunk in loss_chunks
        for offload in offload_plans
        for rule in memory_rules
    ]


def exchanges_updates(experiment: Experiment, plan: Plan) -> bool:
    """Return whether replicas exchange something other than plain gradients, which requires at least two replicas."""
    sends_momenta = experiment.optimizer.messages(experiment.steps) is not None
    return sends_momenta or plan.diloco is not None or (plan.reduce is not None and not isinstance(plan.reduce, str))


def _replica_counts(experiment: Experiment, platform: Platform, device_count: int, choices: Choices) -> list[int]:
    """Return the numbers of replicas to try: 1, and the number of slices or hosts, between which links are slow."""
    base, needs_replicas = choices.base, exchanges_updates(experiment, choices.base)
    if base.mesh is not None and ("replica" in choices.fixed or (needs_replicas and base.mesh.replica > 1)):
        return [base.mesh.replica]
    slice_or_host_count = platform.slices if platform.chip.kind == "tpu" else platform.hosts or 1
    replica_counts = {1} | (
        {slice_or_host_count} if choices.is_open("replica") and device_count % slice_or_host_count == 0 else set()
    )
    if needs_replicas:
        replica_counts = {slice_or_host_count} if slice_or_host_count > 1 else {2}
    return sorted(replica_counts)


def _axis_sizes(axis: str, device_count: int, max_size: int, choices: Choices) -> list[int]:
    """Return the sizes to try for a mesh axis, which is the tensor or the sequence axis."""
    if axis in choices.fixed and choices.base.mesh is not None:
        return [choices.base.mesh.sizes[axis]]
    return divisors(device_count, max_size) if choices.is_open(axis) else [1]


def _layouts_of(mesh: MeshSpec, experiment: Experiment, choices: Choices, refusals: set[str]) -> Iterator[Plan]:
    """Yield the layouts on a mesh: every ZeRO stage, pipeline and number of microbatches.

    The reasons for leaving out layouts are added to `refusals`.
    """
    base, row_count = choices.base, experiment.batch // mesh.batch_shards
    if experiment.batch % mesh.batch_shards:
        return
    zero_stages = [1, 2, 3] if mesh.fsdp > 1 else [0]
    if not choices.is_open("zero"):
        fixed_stage = base.zero if "zero" in choices.fixed else 0
        # Without ZeRO, a mesh with these devices along the data axis gives the same layout.
        has_equivalent_mesh = mesh.fsdp > 1 and fixed_stage == 0 and "mesh" not in choices.fixed
        zero_stages = [] if (fixed_stage and mesh.fsdp == 1) or has_equivalent_mesh else [fixed_stage]
    microbatch_counts = divisors(row_count, MAX_MICROBATCHES)
    if "microbatches" in choices.fixed:
        microbatch_counts = [base.microbatches] if row_count % base.microbatches == 0 else []
    elif "microbatches" in choices.forbidden:
        microbatch_counts = [1]
    is_sequence_parallel = mesh.tensor > 1 and "sequence_parallel" not in choices.forbidden
    if "sequence_parallel" in choices.fixed:
        is_sequence_parallel = base.sequence_parallel
    for zero_stage in zero_stages:
        for pipeline, microbatch_count in _pipelines_and_microbatch_counts(mesh, microbatch_counts, choices):
            try:
                yield dataclasses.replace(
                    base,
                    mesh=mesh,
                    zero=zero_stage,
                    sequence_parallel=is_sequence_parallel,
                    microbatches=microbatch_count,
                    pipeline=pipeline,
                    memory=MemoryPlan("none"),
                    offload=OffloadPlan(),
                )
            except UserError as error:
                refusals.add(str(error))


def _pipelines_and_microbatch_counts(
    mesh: MeshSpec, microbatch_counts: list[int], choices: Choices
) -> Iterator[tuple[PipelinePlan | None, int]]:
    """Yield the pipelines to try on a mesh, each with its number of microbatches; `None` means no pipeline."""
    if "pipeline" in choices.fixed and choices.base.pipeline is not None:
        microbatch_count = choices.base.pipeline.shape()[1]
        if microbatch_count in microbatch_counts:
            yield choices.base.pipeline, microbatch_count
    elif mesh.pipe == 1:
        for microbatch_count in microbatch_counts:
            yield None, microbatch_count
    else:
        for microbatch_count in microbatch_counts:
            for schedule_format in SCHEDULE_FORMATS:
                if microbatch_count in [mesh.pipe * 2**power for power in range(4)]:
                    yield PipelinePlan.parse(schedule_format.format(mesh.pipe, microbatch_count)), microbatch_count
