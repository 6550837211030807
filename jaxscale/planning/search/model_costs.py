"""Costs of a model's passes on a platform, from a few traces: the numbers from which closed forms rank many plans.

A model is traced once for each split over tensor and sequence axes (`split_costs`), without ZeRO, pipeline or memory
rule, for the rows that a device would have. Everything that depends on the rows is proportional to them: seconds, FLOP
and bytes of activations. So one trace serves all meshes with this split, and all numbers of microbatches.
"""

import dataclasses
from typing import Any, Literal

from jaxscale.errors import UserError
from jaxscale.memory.decide import decide
from jaxscale.memory.plan import MemoryPlan
from jaxscale.planning.estimate import of_step
from jaxscale.planning.program import described_step
from jaxscale.planning.search.traffic import Sizes, sizes_of
from jaxscale.planning.stage_prices import gradient_seconds, head_price
from jaxscale.platforms.platform import Chip, Platform, chips
from jaxscale.platforms.processor import rated_processor
from jaxscale.programs import roofline
from jaxscale.programs.collect import BlockCall
from jaxscale.recipe.experiment import Experiment
from jaxscale.recipe.plan import OffloadPlan, Plan
from jaxscale.sharding.mesh import MeshSpec
from jaxscale.state.batches import batch_shapes
from jaxscale.state.layout import local_bytes
from jaxscale.step.memory_resolve import traced_blocks

STAND_IN = "v5e"
"""Chip whose rates and links are assumed if those of a GPU or TPU are unknown; only their proportions matter."""
_STATIC_KINDS = ("kept activations", "gradients", "compute copy", "gathered weights")


@dataclasses.dataclass(frozen=True)
class Kept:
    """What a memory rule keeps for the backward pass, and what it recomputes, on one device.

    Args:
        kept_bytes: bytes of activations kept by all blocks.
        seconds: seconds of recomputation in all blocks.
        share: share of the blocks' forward pass that runs again.
    """

    kept_bytes: float
    seconds: float
    share: float

    @property
    def figures(self) -> tuple[float, float, float]:
        """The kept bytes, the seconds and the share, in this order."""
        return self.kept_bytes, self.seconds, self.share


@dataclasses.dataclass(frozen=True, eq=False)
class SplitCosts:
    """Costs of a step on one device for `rows` rows, with a model that is split over tensor and sequence axes.

    Args:
        batch: rows of the global batch.
        rows: rows for which the model was traced.
        sizes: sizes of the model's weights and activations on the device.
        forward_seconds: seconds of the blocks' forward pass, by roofline.
        backward_seconds: seconds of the blocks' backward pass, by roofline, without recomputation.
        head_seconds: seconds of the matrix products outside the blocks in the forward pass, such as the head's; the
            backward pass takes twice as long.
        block_bytes: bytes that one block keeps for its backward pass if it keeps everything.
        input_bytes: bytes of the activations that enter a block.
        loss_bytes: peak of the bytes of the loss (logits and their gradient).
        working_bytes: peak of the bytes of all other values, except kept activations, gradients, the compute copy and
            gathered weights.
        weight_bytes: bytes of the weights between steps.
        state_bytes: bytes of the optimizer state.
        positions: number of positions of a row on the device; 1 if the model has no context.
        row_positions: number of positions of a whole row.
        step_flop: FLOP of the model in a step, without recomputation, summed over all devices.
        calls: the calls of the model's blocks.
        chip: the chip, with known rates.
        products: number of matrix products in the forward pass of all blocks.
        kept_by_rule: results of `kept` for the traced rows, computed on demand.
        stage_sizes: results of `sizes_of_stage`, computed on demand.
    """

    batch: int
    rows: int
    sizes: Sizes
    forward_seconds: float
    backward_seconds: float
    head_seconds: float
    block_bytes: float
    input_bytes: float
    loss_bytes: float
    working_bytes: float
    weight_bytes: float
    state_bytes: float
    positions: int
    row_positions: int
    step_flop: float
    calls: tuple[BlockCall, ...] = dataclasses.field(repr=False)
    chip: Chip = dataclasses.field(repr=False)
    products: int = 0
    kept_by_rule: dict[MemoryPlan, Kept] = dataclasses.field(default_factory=dict, repr=False)
    stage_sizes: dict[int, Sizes] = dataclasses.field(default_factory=dict, repr=False)

    @property
    def weights(self) -> int:
        """The number of elements of the weights on the device."""
        return self.sizes.block_weights + self.sizes.other_weights

    @property
    def budget_rule(self) -> Literal["chain", "save"]:
        """The memory rule that is optimal for a budget: `chain` for a chain of different blocks, otherwise `save`."""
        is_chain = len(self.calls) > 1 and all(call.count == 1 for call in self.calls)
        return "chain" if is_chain else "save"

    def sizes_of_stage(self, ranks: int) -> Sizes:
        """Return the sizes of a rank's part of the model, in a pipeline of `ranks` ranks."""
        if ranks not in self.stage_sizes:
            self.stage_sizes[ranks] = dataclasses.replace(
                self.sizes, block_weights=self.sizes.block_weights // ranks, layers=self.sizes.layers // ranks
            )
        return self.stage_sizes[ranks]

    def kept(self, memory: MemoryPlan, rows: float) -> Kept:
        """Return what a memory rule keeps and recomputes in all blocks, for `rows` rows of a microbatch on a device.

        Raises:
            UserError: the rule does not suit the model, or its budget is too small.
        """
        if not self.calls and memory.rule == "none":
            return Kept(0, 0, 0)
        scale = rows / self.rows
        traced_memory = memory
        if memory.budget is not None:
            traced_memory = dataclasses.replace(memory, budget=int(memory.budget / scale))
        if traced_memory not in self.kept_by_rule:
            decision = decide(traced_memory, self.calls, self.chip)
            flop = sum(call.count * call.graph.flop for call in self.calls)
            recomputed_share = decision.flop / flop if flop else 0
            self.kept_by_rule[traced_memory] = Kept(decision.bytes, decision.seconds, recomputed_share)
        kept = self.kept_by_rule[traced_memory]
        return Kept(scale * kept.kept_bytes, scale * kept.seconds, kept.share)

    def suits(self, memory: MemoryPlan) -> bool:
        """Return whether a memory rule suits the model."""
        try:
            self.kept(memory, self.rows)
        except UserError:
            return False
        return True


def rated(platform: Platform) -> Platform:
    """Return the platform, with assumed rates and links if those of its chip are unknown, as on a CPU.

    Example:
        >>> rated(Platform.parse("cpu x 8")).chip.peak("float32")
        350000000000.0
    """
    chip = platform.chip
    if has_rates(platform):  # without bfloat16, XLA converts the operands of products to float32
        return platform if chip.bfloat16 is not None else replaced(platform, bfloat16=chip.float32)
    if chip.kind == "cpu":
        return rated_processor(platform)
    stand_in_chip = chips()[STAND_IN]
    field_names = ("bfloat16", "float16", "tf32", "float32", "float8", "int8", "memory_bandwidth", "links")
    rate_by_field = {name: getattr(stand_in_chip, name) for name in field_names}
    return replaced(platform, **rate_by_field)


def has_rates(platform: Platform) -> bool:
    """Return whether a chip's rates are known, so that modeled seconds are absolute rather than only relative.

    Example:
        >>> has_rates(Platform.parse("gpu t4")), has_rates(Platform.parse("cpu"))
        (True, False)
    """
    chip = platform.chip
    return chip.memory_bandwidth is not None and (chip.bfloat16 is not None or chip.float32 is not None)


def replaced(platform: Platform, **rates: Any) -> Platform:
    """Return the platform with these rates of its chip replaced."""
    return dataclasses.replace(platform, chip=dataclasses.replace(platform.chip, **rates))


def split_costs(experiment: Experiment, platform: Platform, plan: Plan, tensor: int, sequence: int) -> SplitCosts:
    """Trace a model for a split over tensor and sequence axes, and return its costs on one device.

    Args:
        experiment: the experiment to plan for.
        platform: platform with known rates (`rated`).
        plan: plan whose number formats, kernels and rules are used.
        tensor: number of devices along the tensor axis.
        sequence: number of devices along the sequence axis.

    Raises:
        UserError: the model cannot be split in this way.
    """
    rows = max(1, experiment.batch * tensor * sequence // platform.devices)
    mesh = MeshSpec(tensor=tensor, sequence=sequence)
    plain_plan = without_layout(plan, mesh)
    traced_experiment = dataclasses.replace(experiment, batch=rows)
    optimizer = experiment.optimizer
    if optimizer.messages(experiment.steps) is not None:  # replicas send momenta, but the traced mesh has no replicas
        name = optimizer.name.removeprefix("one_bit_").replace("adam", "adamw")
        traced_experiment = dataclasses.replace(
            traced_experiment, optimizer=dataclasses.replace(optimizer, name=name, freeze=None)
        )
    frugal_plan = dataclasses.replace(plain_plan, memory=MemoryPlan("full"))  # its working set has no kept activations
    try:
        step = described_step(traced_experiment, platform, frugal_plan, mesh.devices)
    except UserError:  # the model has no blocks, or the split is refused, as the next call reports
        step = described_step(traced_experiment, platform, plain_plan, mesh.devices)
    calls = traced_blocks(step.objective, platform.chip)
    price_of_head = head_price(step, calls, platform)
    head_flop = (
        0.0 if price_of_head is None else price_of_head.forward * (roofline.rate(platform.chip, "bfloat16") or 0.0)
    )
    forward_flop = mesh.devices * (head_flop + sum(call.count * call.graph.flop for call in calls))
    input_seconds, weight_seconds = map(sum, zip(*map(_gradient_seconds, calls), strict=True)) if calls else (0.0, 0.0)
    abstract_batch = batch_shapes(traced_experiment)
    moments = of_step(step, abstract_batch, platform).timeline.moments
    loss_bytes = max((moment.bytes_by_kind.get("loss", 0) for moment in moments), default=0)
    working_byte_counts = (
        sum(count for kind, count in moment.bytes_by_kind.items() if kind not in (*_STATIC_KINDS, "loss"))
        for moment in moments
    )
    position_count = abstract_batch["tokens"].shape[1] if "tokens" in abstract_batch else 1
    return SplitCosts(
        batch=experiment.batch,
        rows=rows,
        sizes=sizes_of(step, calls),
        forward_seconds=sum(call.count * call.graph.seconds for call in calls),
        backward_seconds=input_seconds + weight_seconds,
        head_seconds=0.0 if price_of_head is None else price_of_head.forward,
        block_bytes=max((call.graph.needed_bytes for call in calls), default=0),
        input_bytes=max((call.input_bytes for call in calls), default=0),
        loss_bytes=loss_bytes,
        working_bytes=max(working_byte_counts, default=0),
        weight_bytes=local_bytes(step.layout.abstract.params),
        state_bytes=local_bytes(step.layout.abstract.optimizer),
        positions=max(1, position_count // sequence),
        row_positions=position_count,
        step_flop=3 * forward_flop * experiment.batch / rows,
        calls=calls,
        chip=platform.chip,
        products=sum(call.count * sum(equation.flop > 0 for equation in call.graph.equations) for call in calls),
    )


def step_costs(experiment: Experiment, platform: Platform) -> SplitCosts | None:
    """Return the costs of an experiment's model under its plan; `None` if the model cannot be traced for them.

    The model is traced for the rows of one device and without a pipeline. A user's model may raise an error for that.

    Args:
        experiment: the experiment, whose plan has a resolved mesh.
        platform: platform with known rates (`rated`).
    """
    mesh = experiment.plan.mesh
    assert mesh is not None
    try:
        return split_costs(experiment, platform, experiment.plan, mesh.tensor, mesh.sequence)
    except Exception:  # of any type: the model is the user's code
        return None


def without_layout(plan: Plan, mesh: MeshSpec | None = None) -> Plan:
    """Return the plan on another mesh; its settings of parallelism, memory and offload are reset to the defaults.

    Example:
        >>> str(without_layout(Plan(mesh="fsdp:4", zero=3, precision="bfloat16"), MeshSpec()).zero)
        '0'
    """
    return dataclasses.replace(
        plan,
        mesh=mesh,
        zero=0,
        sequence_parallel=False,
        microbatches=1,
        pipeline=None,
        reduce=plan.reduce if isinstance(plan.reduce, str) else None,
        diloco=None,
        memory=MemoryPlan("none"),
        offload=OffloadPlan(),
        kernels=dataclasses.replace(plan.kernels, loss_chunk=None),
    )


def _gradient_seconds(call: BlockCall) -> tuple[float, float]:
    """Return the seconds of the input gradients and of the weight gradients of all runs of a block."""
    input_seconds, weight_seconds = gradient_seconds(call.graph)
    return call.count * input_seconds, call.count * weight_seconds
