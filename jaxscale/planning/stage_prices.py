"""What the stages of a model take on a platform: seconds by roofline, bytes that wait, for each block and microbatch.

The model is traced as one stage's devices would train it, without a pipeline, and nothing is compiled. The forward of a
block is the roofline of its operations. Of its backward, a product's gradient with respect to what depends on the
block's input belongs to I, the gradient with respect to weights to W, each as long as the product; a kernel or a loop
takes twice its forward. What the memory plan recomputes belongs to I. What lies outside the blocks (the head, mostly)
is the last stage's.

Left out: the embedding's lookup, collectives inside a stage, the gradient reduction and the update, and what lies
beneath a roofline.
"""

import dataclasses
from collections.abc import Sequence

from jaxscale.costs import roofline
from jaxscale.costs.block import BlockGraph
from jaxscale.costs.collect import BlockCall
from jaxscale.costs.trace import jaxpr_flop
from jaxscale.errors import UserError
from jaxscale.memory.decide import decide
from jaxscale.memory.plan import MemoryPlan
from jaxscale.pipeline.costs import Costs
from jaxscale.pipeline.draw import drawable
from jaxscale.pipeline.partition import Model
from jaxscale.pipeline.plan import PipelinePlan
from jaxscale.pipeline.price import Price
from jaxscale.pipeline.schedule import Schedule
from jaxscale.pipeline.simulate import Simulation, simulate
from jaxscale.platforms.platform import Platform
from jaxscale.step.build import build
from jaxscale.step.experiment import Experiment
from jaxscale.step.plan import Plan
from jaxscale.step.remember import traced_blocks
from jaxscale.step.rows import batch_shapes
from jaxscale.step.stages import Stages
from jaxscale.step.train_step import TrainStep

PRODUCTS = ("dot_general", "conv_general_dilated", "ragged_dot_general")
"""Operations with a gradient for each operand, of one product each."""


def stage_costs(experiment: Experiment, platform: Platform, pipeline: PipelinePlan, schedule: Schedule) -> Costs:
    """Seconds and bytes of a schedule's stages, blocks dealt out as the experiment's plan says, evenly by default.

    Args:
        experiment: what to train.
        platform: where; it need not be here.
        pipeline: says how many microbatches.
        schedule: whose stages to price.

    Raises:
        UserError: more stages than blocks, devices or rows that do not divide, a chip whose rates nothing tells.
    """
    model = model_prices(experiment, platform, schedule.ranks, pipeline.shape()[1])
    planned = experiment.plan.pipeline
    layers = None if planned is None else planned.stages
    if layers is None or len(layers) != schedule.stages or sum(layers) != len(model.blocks):
        layers = Stages.even(schedule, len(model.blocks)).layers
    links = (link_seconds(platform, model),) * schedule.ranks
    return costs_of(model, layers, links, recompute=experiment.plan.stages_keep == "input")


def simulated(experiment: Experiment, platform: Platform, plan: Plan) -> Simulation | None:
    """A plan's pipeline with the seconds of its stages; `None` where nothing tells how fast the chip is.

    Args:
        experiment: what to train.
        platform: where.
        plan: with a pipeline, and its mesh settled.
    """
    assert plan.pipeline is not None
    if roofline.rate(platform.chip, "bfloat16") is None:
        return None
    schedule = drawable(plan.pipeline)
    costs = stage_costs(dataclasses.replace(experiment, plan=plan), platform, plan.pipeline, schedule)
    return simulate(schedule, costs)


def costs_of(model: Model, layers: Sequence[int], links: tuple[float, ...] = (), *, recompute: bool = False) -> Costs:
    """The costs of stages of so many blocks each.

    Args:
        model: prices of its blocks.
        layers: blocks of each stage.
        links: seconds of a message on each link of the ring.
        recompute: a stage keeps its input alone, and its forward runs again before its backward.

    Example:
        >>> costs_of(Model((Price(1, 1, 1),) * 3, last=Price(2, 2, 2)), (2, 1)).forward
        (2.0, 3.0)
    """
    stages: list[list[Price]] = []
    start = 0
    for count in layers:
        stages.append(list(model.blocks[start : start + count]))
        start += count
    first, last = ([] if price is None else [price] for price in (model.first, model.last))
    stages[0], stages[-1] = first + stages[0], stages[-1] + last

    def total(name: str) -> tuple[float, ...]:
        return tuple(float(sum(getattr(price, name) for price in stage)) for stage in stages)

    forward, inner, stash = total("forward"), total("input_gradient"), total("stash_bytes")
    if recompute:
        inner = tuple(a + b for a, b in zip(inner, forward, strict=True))
        stash = (0.0, *(model.blocks[0].message_bytes for _ in stages[1:]))
    return Costs(
        forward,
        inner,
        total("weight_gradient"),
        links=links,
        stash=stash,
        pending=total("between_bytes"),
    )


def model_prices(experiment: Experiment, platform: Platform, ranks: int, microbatches: int) -> Model:
    """Prices of a model's blocks, and of what stands behind them, per device and microbatch.

    Args:
        experiment: what to train; its plan says mesh, types, attention and what blocks keep.
        platform: where.
        ranks: devices along the pipe axis; the others share the rows.
        microbatches: of a global batch.

    Raises:
        UserError: as `stage_costs`.
    """
    chip = platform.chip
    if roofline.rate(chip, "bfloat16") is None:
        raise UserError(
            f"platform {platform}: nothing tells how fast a {chip.name} is; name one whose rates are known, such as "
            "--platform 'tpu v5e:4x4', or give --cost f=1,i=1,w=1"
        )
    if platform.devices % ranks:
        raise UserError(
            f"a pipeline of {ranks} devices does not divide the {platform.devices} of {platform}: take another P, or "
            "another platform"
        )
    step = _step_of_a_stage(experiment, platform, ranks, microbatches)
    calls = traced_blocks(step.objective, chip)
    if not calls:
        raise UserError(f"{experiment.name}: its model shows no blocks; build it of layers.Stack or layers.Chain")
    decision = decide(step.plan.memory, calls, chip)
    blocks = sum(call.count for call in calls)
    waits, again = decision.bytes / blocks, decision.seconds / blocks
    prices = [_price(call.graph, waits, again) for call in calls for _ in range(call.count)]
    return Model(tuple(prices), last=_behind(step, calls, platform))


def link_seconds(platform: Platform, model: Model) -> float:
    """Seconds of a message between neighbours on the pipe axis: along one of the chip's fastest links."""
    wires = [link for link in platform.links if link.name in ("ici", "nvlink", "pcie")]
    return model.blocks[0].message_bytes / wires[0].bandwidth if wires and platform.devices > 1 else 0.0


def _step_of_a_stage(experiment: Experiment, platform: Platform, ranks: int, microbatches: int) -> TrainStep:
    """The step as the devices of one stage would do it if they held the whole model."""
    from jax.sharding import AbstractDevice

    plan = experiment.plan
    memory = MemoryPlan("none") if plan.memory.rule == "fit" else plan.memory
    alone = dataclasses.replace(plan.without_pipeline(), memory=memory, microbatches=microbatches)
    device = AbstractDevice(platform.chip.device_kinds[0], None, platform.chip.kind)
    return build(experiment, alone, devices=[device] * (platform.devices // ranks))


def _price(graph: BlockGraph, waits: float, again: float) -> Price:
    """One block, with bytes that wait for its backward and seconds of what is done again before it."""
    inner, weight = gradient_seconds(graph)
    return Price(
        graph.seconds,
        inner + again,
        weight,
        stash_bytes=waits,
        message_bytes=graph.carried_bytes,
    )


def gradient_seconds(graph: BlockGraph) -> tuple[float, float]:
    """Seconds of a block's input gradient and of its weight gradient.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from jaxscale.costs.block import block_graph
        >>> from jaxscale.platforms.platform import chips
        >>> w, x = (jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16) for _ in range(2))
        >>> graph = block_graph(lambda w, x: x @ w, w, x, chip=chips()["v5e"])
        >>> [round(seconds / graph.seconds, 3) for seconds in gradient_seconds(graph)]
        [1.0, 1.0]
    """
    moving = set(graph.carried)
    inner = weight = 0.0
    for equation in graph.equations:
        depends = [value in moving for value in equation.inputs]
        if any(depends):
            moving.update(equation.outputs)
        if not equation.flop:
            inner += equation.seconds if any(depends) else 0.0
        elif equation.name in PRODUCTS:
            operands = depends[:2] if len(depends) > 1 else depends * 2
            inner += equation.seconds * sum(operands)
            weight += equation.seconds * (len(operands) - sum(operands))
        else:
            inner += 2 * equation.seconds
    return inner, weight


def _behind(step: TrainStep, calls: Sequence[BlockCall], platform: Platform) -> Price | None:
    """What the forward does outside its blocks, as products at the platform's rate: head and loss."""
    import jax

    objective, plan = step.objective, step.plan
    assert plan.mesh is not None
    batch = {
        name: jax.ShapeDtypeStruct((rows.shape[0] // plan.microbatches, *rows.shape[1:]), rows.dtype)
        for name, rows in batch_shapes(objective.planned.experiment).items()
    }
    count = next(iter(batch.values())).shape[0]
    key, examples = jax.eval_shape(lambda: (jax.random.key(0), jax.numpy.arange(count, dtype="int32")))
    functional = step.functional
    with objective.planned.tracing(plainly=True):
        whole = jax.make_jaxpr(lambda *given: objective.loss_of_masters(*given))(
            functional.whole, functional.rest, batch, key, examples
        )
    inside = sum(call.count * call.graph.flop for call in calls)
    seconds = roofline.seconds(platform.chip, max(0.0, jaxpr_flop(whole).total / plan.mesh.devices - inside), 0)
    return Price(seconds, seconds, seconds) if seconds else None
