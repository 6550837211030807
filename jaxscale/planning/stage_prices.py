"""Prices of a model's stages on a platform: seconds by roofline and stashed bytes, per block and microbatch.

The model is traced for the devices of one stage, without a pipeline, and nothing is compiled. The forward time of a
block is the time of its operations by the roofline model. The backward pass consists of the input gradient I and the
weight gradient W. The gradient of a product with respect to a value that depends on the block's input belongs to I; the
gradient with respect to a weight belongs to W. Each gradient takes as long as the product. Both gradients of a kernel
or a loop together take twice as long as its forward pass and belong to I. The memory plan's recomputation also belongs
to I. Work outside the blocks (mostly the head) belongs to the last stage.

Left out: the embedding's lookup, collectives inside a stage, the gradient reduction and the update, and inefficiencies
that a roofline does not model.
"""

import dataclasses
import itertools
import operator
from collections.abc import Sequence

from jaxscale.errors import UserError
from jaxscale.memory.decide import decide
from jaxscale.memory.plan import MemoryPlan
from jaxscale.pipeline.charts.draw import schedule_to_draw
from jaxscale.pipeline.choose.partition import ModelPrices
from jaxscale.pipeline.choose.price import Price
from jaxscale.pipeline.clock.costs import Costs
from jaxscale.pipeline.clock.simulate import Simulation, simulate
from jaxscale.pipeline.orders import Schedule
from jaxscale.pipeline.plan import PipelinePlan
from jaxscale.planning.fusion import PRODUCTS
from jaxscale.planning.program import described_step
from jaxscale.platforms.platform import Platform
from jaxscale.programs import roofline
from jaxscale.programs.block import BlockGraph
from jaxscale.programs.collect import BlockCall
from jaxscale.programs.flop import jaxpr_flop
from jaxscale.recipe.experiment import Experiment
from jaxscale.recipe.plan import Plan
from jaxscale.state.batches import batch_shapes
from jaxscale.state.stages import Stages
from jaxscale.step.memory_resolve import traced_blocks
from jaxscale.step.train_step import TrainStep


def stage_costs(experiment: Experiment, platform: Platform, pipeline: PipelinePlan, schedule: Schedule) -> Costs:
    """Return the modeled seconds and the bytes of each stage of a schedule.

    The blocks are divided into stages as in the experiment's plan, or evenly if the plan's partition is not for this
    schedule.

    Args:
        experiment: the experiment to plan for.
        platform: platform that the step would run on; its devices need not be present.
        pipeline: pipeline plan, which specifies the number of microbatches.
        schedule: schedule of the pipeline.

    Raises:
        UserError: there are more stages than blocks; devices or rows cannot be split evenly; or the chip's rates are
            unknown.
    """
    _, microbatch_count = pipeline.shape()
    prices = model_prices(experiment, platform, schedule.ranks, microbatch_count)
    plan_pipeline = experiment.plan.pipeline
    layer_counts = None if plan_pipeline is None else plan_pipeline.stages
    if layer_counts is None or len(layer_counts) != schedule.stages or sum(layer_counts) != len(prices.blocks):
        layer_counts = Stages.even(schedule, len(prices.blocks)).layer_counts
    message_seconds = (message_seconds_of(platform, prices),) * schedule.ranks
    return costs_of(prices, layer_counts, message_seconds, recomputes_forward=experiment.plan.stages_keep == "input")


def simulation_of(experiment: Experiment, platform: Platform, plan: Plan) -> Simulation | None:
    """Simulate a plan's pipeline; return `None` if the chip's rates are unknown.

    Args:
        experiment: the experiment to plan for.
        platform: platform that the step would run on.
        plan: plan with a pipeline and a resolved mesh.
    """
    assert plan.pipeline is not None
    if roofline.rate(platform.chip, "bfloat16") is None:
        return None
    schedule = schedule_to_draw(plan.pipeline)
    costs = stage_costs(dataclasses.replace(experiment, plan=plan), platform, plan.pipeline, schedule)
    return simulate(schedule, costs)


def costs_of(
    prices: ModelPrices,
    layer_counts: Sequence[int],
    message_seconds: tuple[float, ...] = (),
    *,
    recomputes_forward: bool = False,
) -> Costs:
    """Return the costs of stages, computed from the prices of their blocks.

    Args:
        prices: prices of the model's blocks.
        layer_counts: number of blocks in each stage.
        message_seconds: for each rank, seconds of a message on the link to the next rank of the ring; `()` for 0.
        recomputes_forward: whether a stage keeps only its input and reruns its forward pass before its backward pass.

    Example:
        >>> costs_of(ModelPrices((Price(1, 1, 1),) * 3, last=Price(2, 2, 2)), (2, 1)).forward
        (2.0, 3.0)
    """
    stage_ranges = itertools.pairwise(itertools.accumulate(layer_counts, initial=0))
    prices_by_stage = [prices.blocks[start:stop] for start, stop in stage_ranges]
    if prices.first is not None:
        prices_by_stage[0] = (prices.first, *prices_by_stage[0])
    if prices.last is not None:
        prices_by_stage[-1] = (*prices_by_stage[-1], prices.last)

    def totals_of(field_name: str) -> tuple[float, ...]:
        """Return, for each stage, the sum of one field of the prices over its blocks."""
        return tuple(
            float(sum(getattr(price, field_name) for price in stage_prices)) for stage_prices in prices_by_stage
        )

    forward_seconds, input_gradient_seconds = totals_of("forward"), totals_of("input_gradient")
    stash_bytes = totals_of("stash_bytes")
    if recomputes_forward:
        input_gradient_seconds = tuple(map(operator.add, input_gradient_seconds, forward_seconds))
        stash_bytes = (0.0, *(prices.blocks[0].message_bytes for _ in prices_by_stage[1:]))
    return Costs(
        forward_seconds,
        input_gradient_seconds,
        totals_of("weight_gradient"),
        links=message_seconds,
        stash=stash_bytes,
        pending=totals_of("between_bytes"),
    )


def model_prices(experiment: Experiment, platform: Platform, rank_count: int, microbatch_count: int) -> ModelPrices:
    """Return the prices of a model's blocks and of its head, per device and microbatch.

    Args:
        experiment: the experiment to plan for; its plan specifies mesh, types, attention and memory.
        platform: platform that the model would run on.
        rank_count: number of ranks along the pipe axis; the devices of a rank share the rows of a microbatch.
        microbatch_count: number of microbatches of a global batch.

    Raises:
        UserError: devices or rows cannot be split evenly; the model exposes no blocks; or the chip's rates are unknown.
    """
    chip = platform.chip
    if roofline.rate(chip, "bfloat16") is None:
        raise UserError(
            f"platform {platform}: the rates of a {chip.name} are unknown; name a chip with known rates, such as "
            "--platform 'tpu v5e:4x4', or set the costs of the passes: --cost f=1,i=1,w=1"
        )
    if platform.devices % rank_count:
        raise UserError(
            f"pipeline of {rank_count} ranks: {platform} has {platform.devices} devices, expected a multiple of "
            f"{rank_count}; choose another number of ranks or another platform"
        )
    # trace the whole model on the devices of one stage
    plan = experiment.plan.without_pipeline()
    memory = MemoryPlan("none") if plan.memory.rule == "fit" else plan.memory
    plan = dataclasses.replace(plan, memory=memory, microbatches=microbatch_count)
    step = described_step(experiment, platform, plan, platform.devices // rank_count)
    calls = traced_blocks(step.objective, chip)
    if not calls:
        raise UserError(f"{experiment.name}: the model exposes no blocks; build it from layers.Stack or layers.Chain")
    decision = decide(step.plan.memory, calls, chip)
    block_count = sum(call.count for call in calls)
    stash_bytes, recompute_seconds = decision.bytes / block_count, decision.seconds / block_count
    prices: list[Price] = []
    for call in calls:
        input_gradient_seconds, weight_gradient_seconds = gradient_seconds(call.graph)
        price = Price(
            call.graph.seconds,
            input_gradient_seconds + recompute_seconds,
            weight_gradient_seconds,
            stash_bytes=stash_bytes,
            message_bytes=call.graph.carried_bytes,
        )
        prices += [price] * call.count
    return ModelPrices(tuple(prices), last=head_price(step, calls, platform))


def message_seconds_of(platform: Platform, prices: ModelPrices) -> float:
    """Return the seconds of a message between neighboring ranks over the platform's fastest kind of link.

    Return 0.0 if the platform has no known link, or only one device.
    """
    links = [link for link in platform.links if link.name in ("ici", "nvlink", "pcie")]
    return prices.blocks[0].message_bytes / links[0].bandwidth if links and platform.devices > 1 else 0.0


def gradient_seconds(graph: BlockGraph) -> tuple[float, float]:
    """Return the modeled seconds of a block's input gradient and of its weight gradient.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from jaxscale.programs.block import block_graph
        >>> from jaxscale.platforms.platform import chips
        >>> w, x = (jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16) for _ in range(2))
        >>> graph = block_graph(lambda w, x: x @ w, w, x, chip=chips()["v5e"])
        >>> [round(seconds / graph.seconds, 3) for seconds in gradient_seconds(graph)]
        [1.0, 1.0]
    """
    dependent_indices = set(graph.carried)  # indices of the values that depend on the block's input
    input_gradient_seconds = weight_gradient_seconds = 0.0
    for equation in graph.equations:
        # whether each operand depends on the block's input
        dependence_flags = [index in dependent_indices for index in equation.inputs]
        if any(dependence_flags):
            dependent_indices.update(equation.outputs)
        if not equation.flop:
            input_gradient_seconds += equation.seconds if any(dependence_flags) else 0.0
        elif equation.name in PRODUCTS:  # the gradient with respect to each operand is one product
            factor_flags = dependence_flags[:2] if len(dependence_flags) > 1 else dependence_flags * 2
            input_gradient_seconds += equation.seconds * sum(factor_flags)
            weight_gradient_seconds += equation.seconds * (len(factor_flags) - sum(factor_flags))
        else:
            input_gradient_seconds += 2 * equation.seconds
    return input_gradient_seconds, weight_gradient_seconds


def head_price(step: TrainStep, calls: Sequence[BlockCall], platform: Platform) -> Price | None:
    """Return the price of head and loss: the matrix products outside the blocks; `None` if there are none."""
    import jax

    objective, plan = step.objective, step.plan
    assert plan.mesh is not None
    abstract_microbatch = {
        name: jax.ShapeDtypeStruct((leaf.shape[0] // plan.microbatches, *leaf.shape[1:]), leaf.dtype)
        for name, leaf in batch_shapes(objective.planned.experiment).items()
    }
    row_count = next(iter(abstract_microbatch.values())).shape[0]
    # an abstract random key, and the abstract indices of the microbatch's rows
    abstract_key, abstract_indices = jax.eval_shape(
        lambda: (jax.random.key(0), jax.numpy.arange(row_count, dtype="int32"))
    )
    pure_model = step.pure_model
    with objective.planned.tracing(is_forward_only=True):
        loss_jaxpr = jax.make_jaxpr(lambda *args: objective.loss_of_masters(*args))(
            pure_model.abstract_module_params,
            pure_model.abstract_model_state,
            abstract_microbatch,
            abstract_key,
            abstract_indices,
        )
    block_flop = sum(call.count * call.graph.flop for call in calls)
    head_flop = max(0.0, jaxpr_flop(loss_jaxpr).total / plan.mesh.devices - block_flop)
    head_seconds = roofline.seconds(platform.chip, head_flop, 0)
    return Price(head_seconds, head_seconds, head_seconds) if head_seconds else None
