"""Stages: which layers of a model's stack each stage of a pipeline has, and where their parameters lie.

A rank is a device of the pipe axis, a chunk is a stage on a rank, and a route is the list of ranks that a microbatch
visits, stage by stage. A stacked parameter of a pipelined step has one row per layer in the order of the devices: rank
by rank, chunk by chunk, layer by layer, so that its first dim is sharded over the pipe axis. Stages with fewer layers
than the deepest are padded with rows of zeros. If a schedule runs a stage on two ranks (Chimera), the rank of the first
route, its home, has the parameters, and the other one receives a copy at the start of every step.
"""

import dataclasses
import functools
import itertools

import numpy as np
from flax import nnx

from jaxscale.blocks import Model
from jaxscale.errors import UserError
from jaxscale.layers.stack import Chain
from jaxscale.pipeline.orders import Schedule
from jaxscale.pipeline.run.tables import tabulate
from jaxscale.recipe.experiment import Experiment
from jaxscale.recipe.plan import Plan
from jaxscale.state.pure_model import PureModel
from jaxscale.trees import named_leaves


@dataclasses.dataclass(frozen=True)
class Stages:
    """The layers of each stage of a schedule.

    Args:
        schedule: the schedule that runs the stages.
        layers: number of layers of each stage, in the model's order.
        chain: path of the `layers.Chain` in the model, if the blocks are unlike; `None` for a stack.

    Raises:
        UserError: a stage has no layer, or `layers` is for another number of stages.

    Example:
        >>> from jaxscale.pipeline.plan import PipelinePlan
        >>> stages = Stages.even(PipelinePlan.parse("1f1b:2x4").schedule(), 5)
        >>> stages.layers, stages.starts, stages.rows
        ((3, 2), (0, 3), (0, 1, 2, 3, 4, -1))
    """

    schedule: Schedule
    layers: tuple[int, ...]
    chain: str | None = None

    def __post_init__(self) -> None:
        if len(self.layers) != self.schedule.stages or min(self.layers) < 1:
            raise UserError(
                f"pipeline {self.schedule.name}: got stages of {', '.join(map(str, self.layers))} layers, expected "
                f"{self.schedule.stages} stages of at least one layer"
            )

    @classmethod
    def even(cls, schedule: Schedule, layers: int, period: int = 1) -> "Stages":
        """Stages with equal numbers of layers; the first stages take one more each if some are left over.

        Args:
            schedule: the schedule of the pipeline.
            layers: number of layers of the model.
            period: number of layers after which the model's blocks repeat; each stage starts at a multiple of it.

        Raises:
            UserError: there are more stages than layers (or than periods).
        """
        units = layers // period
        if units < schedule.stages:
            groups_text = f" in groups of {period}" if period > 1 else ""
            raise UserError(
                f"pipeline {schedule.name}: got {schedule.stages} stages, but the model has {layers} layers"
                f"{groups_text}; take at most {units} stages, or a deeper model"
            )
        units_per_stage, left_over = divmod(units, schedule.stages)
        layer_counts = [period * (units_per_stage + (stage < left_over)) for stage in range(schedule.stages)]
        layer_counts[-1] += layers - units * period
        return cls(schedule, tuple(layer_counts))

    def __str__(self) -> str:
        is_even = len(set(self.layers)) == 1
        layers_text = f"{self.layers[0]} layers each" if is_even else f"{', '.join(map(str, self.layers))} layers"
        return f"pipeline {self.schedule.name}: {len(self.layers)} stages of {layers_text}"

    @property
    def starts(self) -> tuple[int, ...]:
        """Number of the first layer of each stage."""
        return tuple(itertools.accumulate((0, *self.layers[:-1])))

    @property
    def depth(self) -> int:
        """Number of rows of every chunk, which is the number of layers of the deepest stage."""
        return max(self.layers)

    @functools.cached_property
    def homes(self) -> tuple[tuple[int, ...], ...]:
        """For each rank, the stages whose home it is, chunk by chunk."""
        homes: list[list[int]] = [[] for _ in range(self.schedule.ranks)]
        for stage, rank in enumerate(self.schedule.routes[0]):
            homes[rank].append(stage)
        if len({len(stages) for stages in homes}) > 1:
            raise UserError(
                f"pipeline {self.schedule.name}: ranks have {', '.join(str(len(stages)) for stages in homes)} stages, "
                "expected the same number on every rank"
            )
        return tuple(map(tuple, homes))

    @functools.cached_property
    def rows(self) -> tuple[int, ...]:
        """The layer in each row of a stacked parameter; -1 for a row that pads a chunk."""
        numbers = self.numbers
        return tuple(int(layer) for stages in self.homes for stage in stages for layer in numbers[stage])

    @functools.cached_property
    def numbers(self) -> np.ndarray:
        """The layer in each row of every stage, int32 of shape (stages, depth); -1 for rows that pad a stage."""
        numbers = np.full((len(self.layers), self.depth), -1, np.int32)
        for stage, (start, layers) in enumerate(zip(self.starts, self.layers, strict=True)):
            numbers[stage, :layers] = np.arange(start, start + layers)
        return numbers

    @functools.cached_property
    def copies(self) -> tuple[tuple[int, tuple[tuple[int, int], ...]], ...]:
        """The copies that ranks hold of other ranks' stages: for each, (chunk that is sent, pairs of ranks).

        Each pair is (home rank that sends the chunk, rank that receives the copy).
        """
        copies = []
        for chunk in range(len(self.homes[0]), self.schedule.chunks):
            pairs, sent_chunks = [], set()
            for rank in range(self.schedule.ranks):
                stages = self.schedule.stages_of(rank)
                if chunk < len(stages):
                    home = self.schedule.routes[0][stages[chunk]]
                    sent_chunks.add(self.homes[home].index(stages[chunk]))
                    pairs.append((home, rank))
            if len(sent_chunks) > 1 or len({home for home, _ in pairs}) < self.schedule.ranks:
                raise UserError(
                    f"pipeline {self.schedule.name}: two ranks run the same stage, but weights would be copied from "
                    "one rank to several, or from several to one; expected a second route on which the stages of each "
                    "rank are run by one other rank, as in Chimera"
                )
            copies.append((sent_chunks.pop(), tuple(pairs)))
        return tuple(copies)


def stages_of(experiment: Experiment, plan: Plan) -> Stages:
    """The stages of a plan's pipeline for a model.

    Args:
        experiment: the experiment, with its model.
        plan: the plan, with a pipeline.

    Raises:
        UserError: the model has no blocks, or holds running statistics; it has fewer blocks than stages, or another
            number than the plan specifies; or the pipeline cannot run the stages' copies or ticks.
    """
    pipeline = plan.pipeline
    assert pipeline is not None
    pure_model = PureModel.of(experiment.model, experiment.seed)
    depths = {leaf.shape[0] for name, leaf in named_leaves(pure_model.params).items() if pure_model.stacked(name)}
    chains = chains_of(pure_model)
    if not depths and not chains:
        raise UserError(
            f"pipeline {pipeline}: this model has no blocks to cut into stages; build it of layers.Stack or "
            "layers.Chain"
        )
    stack_texts = [f"a stack of {count} blocks" for count in sorted(depths)]
    stack_texts += [f"a chain of {count} blocks" for count in chains.values()]
    if len(stack_texts) > 1:
        raise UserError(
            f"pipeline {pipeline}: this model has {' and '.join(stack_texts)}, and only one can be cut into stages; "
            "build the model of one stack, or of one chain"
        )
    statistics = list(named_leaves(pure_model.rest))
    if statistics:
        raise UserError(
            f"pipeline {pipeline}: this model holds running statistics ({statistics[0]}), which microbatches would "
            "change one after the other, and stages at different times; use layer or group norm, or train without a "
            "pipeline"
        )
    count, chain = max(depths or chains.values()), next(iter(chains), None)
    schedule = pipeline.schedule()
    period = period_of(experiment.model)
    layers = Stages.even(schedule, count, period).layers if pipeline.stages is None else pipeline.stages
    if sum(layers) != count:
        raise UserError(
            f"pipeline {pipeline}: its stages have {sum(layers)} blocks in total, but the model has {count} blocks"
        )
    stages = Stages(schedule, layers, chain)
    if any(start % period for start in stages.starts):
        raise UserError(
            f"pipeline {pipeline}: the kinds of blocks in this model repeat every {period} blocks; take a "
            f"multiple of {period} blocks for each stage but the last"
        )
    assert len(stages.copies) == schedule.chunks - len(stages.homes[0])
    lockstep = schedule.versions is not None or tabulate(schedule, pipeline.stash).is_lockstep
    if pipeline.lowering == "phased" and not lockstep:
        raise UserError(
            f"lowering phased with pipeline {pipeline}: in some of its ticks some devices go forward and "
            "others backward, and phased needs all alike; take lockstep or gpipe, or lowering switch"
        )
    return stages


def chains_of(pure_model: PureModel) -> dict[str, int]:
    """The number of blocks of each chain of unlike blocks in a model, by the path of the chain.

    Example:
        >>> from jaxscale.models import ResNet
        >>> chains_of(PureModel.of(ResNet(stages=(2, 1), width=8), 0))
        {'blocks': 3}
    """
    module = nnx.merge(pure_model.graphdef, pure_model.whole, pure_model.rest)
    nodes = nnx.iter_graph(module)
    return {"/".join(map(str, path)): len(node.layers) for path, node in nodes if isinstance(node, Chain)}


def period_of(model: Model) -> int:
    """Number of layers after which a model's blocks repeat, if kinds of attention alternate; 1 if all are alike.

    Example:
        >>> from jaxscale.models import Decoder
        >>> period_of(Decoder(vocab=8, context=8, layers=4, embed=8, heads=2, windows=(4, None)))
        2
    """
    return len(getattr(model, "windows", ()) or (None,))
