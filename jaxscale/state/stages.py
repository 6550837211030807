"""Stages: which layers of a model's stack each stage of a pipeline has, and where their parameters lie.

A stacked parameter of a pipelined step has one row per layer in the order of the devices: rank by rank, chunk by
chunk, layer by layer, so that its first dim is sharded over the pipe axis. Stages of unlike depth are padded with rows
of zeros to the deepest. Where a schedule runs a stage on two ranks (Chimera), the rank of the first route has the
parameters, and the other is sent a copy at the start of every step.
"""

import dataclasses
import functools
import itertools

import numpy as np
from flax import nnx

from jaxscale.blocks import Model
from jaxscale.errors import UserError
from jaxscale.layers.stack import Chain
from jaxscale.pipeline.run.tables import tabulate
from jaxscale.pipeline.schedule import Schedule
from jaxscale.recipe.experiment import Experiment
from jaxscale.recipe.plan import Plan
from jaxscale.state.pure_model import PureModel
from jaxscale.trees import named_leaves


@dataclasses.dataclass(frozen=True)
class Stages:
    """The layers of each stage of a schedule.

    Args:
        schedule: whose stages they are.
        layers: of each stage, in the model's order.
        chain: where in the model the blocks are, if they are unlike (`layers.Chain`); `None` for a stack.

    Raises:
        UserError: a stage without a layer, or layers for another number of stages.

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
        """As many layers to each stage, the first ones taking what is left over.

        Args:
            schedule: of the pipeline.
            layers: of the model.
            period: stages begin with a multiple of so many layers.

        Raises:
            UserError: more stages than layers.
        """
        units = layers // period
        if units < schedule.stages:
            each = f" in steps of {period}" if period > 1 else ""
            raise UserError(
                f"pipeline {schedule.name}: {schedule.stages} stages, and the model has {layers} layers{each}; take "
                f"at most {units} stages, or a deeper model"
            )
        share, more = divmod(units, schedule.stages)
        counts = [period * (share + (stage < more)) for stage in range(schedule.stages)]
        counts[-1] += layers - units * period
        return cls(schedule, tuple(counts))

    def __str__(self) -> str:
        alike = len(set(self.layers)) == 1
        shown = f"{self.layers[0]} layers each" if alike else f"{', '.join(map(str, self.layers))} layers"
        return f"pipeline {self.schedule.name}: {len(self.layers)} stages of {shown}"

    @property
    def starts(self) -> tuple[int, ...]:
        """The first layer of each stage."""
        return tuple(itertools.accumulate((0, *self.layers[:-1])))

    @property
    def depth(self) -> int:
        """Rows of a chunk: layers of the deepest stage."""
        return max(self.layers)

    @functools.cached_property
    def homes(self) -> tuple[tuple[int, ...], ...]:
        """The stages whose parameters each rank has, chunk by chunk: those of the first route."""
        homes: list[list[int]] = [[] for _ in range(self.schedule.ranks)]
        for stage, rank in enumerate(self.schedule.routes[0]):
            homes[rank].append(stage)
        if len({len(stages) for stages in homes}) > 1:
            raise UserError(
                f"pipeline {self.schedule.name}: ranks have {', '.join(str(len(stages)) for stages in homes)} stages, "
                "expected as many each"
            )
        return tuple(map(tuple, homes))

    @functools.cached_property
    def rows(self) -> tuple[int, ...]:
        """The layer of each row of a stacked parameter; -1 for one that pads a chunk."""
        numbers = self.numbers
        return tuple(int(layer) for stages in self.homes for stage in stages for layer in numbers[stage])

    @functools.cached_property
    def numbers(self) -> np.ndarray:
        """The layers of each stage (stages, depth), int32; -1 behind the last."""
        numbers = np.full((len(self.layers), self.depth), -1, np.int32)
        for stage, (start, layers) in enumerate(zip(self.starts, self.layers, strict=True)):
            numbers[stage, :layers] = np.arange(start, start + layers)
        return numbers

    @functools.cached_property
    def copies(self) -> tuple[tuple[int, tuple[tuple[int, int], ...]], ...]:
        """What ranks hold beside their own stages: for each further chunk, (chunk sent, pairs of ranks from and to)."""
        copies = []
        for chunk in range(len(self.homes[0]), self.schedule.chunks):
            pairs, sent = [], set()
            for rank in range(self.schedule.ranks):
                stages = self.schedule.stages_of(rank)
                if chunk < len(stages):
                    home = self.schedule.routes[0][stages[chunk]]
                    sent.add(self.homes[home].index(stages[chunk]))
                    pairs.append((home, rank))
            if len(sent) > 1 or len({home for home, _ in pairs}) < self.schedule.ranks:
                raise UserError(
                    f"pipeline {self.schedule.name}: two ranks do the same stage, and copies of weights go from one "
                    "rank to several, or come from several; expected a second route that passes each rank's stage to "
                    "one other rank, as Chimera's does"
                )
            copies.append((sent.pop(), tuple(pairs)))
        return tuple(copies)


def stages_of(experiment: Experiment, plan: Plan) -> Stages:
    """The stages of a plan's pipeline for a model.

    Raises:
        UserError: the model shows no blocks, or holds running statistics; there are fewer blocks than stages, or others
            than the plan says, or stages whose copies or ticks a pipeline cannot run.
    """
    pipeline = plan.pipeline
    assert pipeline is not None
    pure_model = PureModel.of(experiment.model, experiment.seed)
    layers = [leaf.shape[0] for name, leaf in named_leaves(pure_model.params).items() if pure_model.stacked(name)]
    chains = chains_of(pure_model)
    if not layers and not chains:
        raise UserError(
            f"pipeline {pipeline}: this model has no blocks to cut into stages; build it of layers.Stack or "
            "layers.Chain"
        )
    stacks = [f"a stack of {count} blocks" for count in sorted(set(layers))]
    stacks += [f"a chain of {count} blocks" for count in chains.values()]
    if len(stacks) > 1:
        raise UserError(
            f"pipeline {pipeline}: this model has {' and '.join(stacks)}, and one is cut into stages; make it one "
            "stack, or one chain"
        )
    statistics = list(named_leaves(pure_model.rest))
    if statistics:
        raise UserError(
            f"pipeline {pipeline}: this model holds running statistics ({statistics[0]}), which microbatches would "
            "change one after the other, and stages at different times; use layer or group norm, or train without a "
            "pipeline"
        )
    (count,), chain = (set(layers), None) if layers else (chains.values(), next(iter(chains)))
    schedule = pipeline.schedule()
    period = period_of(experiment.model)
    layers = Stages.even(schedule, count, period).layers if pipeline.stages is None else pipeline.stages
    if sum(layers) != count:
        raise UserError(f"pipeline {pipeline}: stages of {sum(layers)} blocks together, and the model has {count}")
    stages = Stages(schedule, layers, chain)
    if any(start % period for start in stages.starts):
        raise UserError(
            f"pipeline {pipeline}: the blocks of this model repeat every {period}, so each "
            f"stage but the last takes a multiple of {period}"
        )
    assert len(stages.copies) == schedule.chunks - len(stages.homes[0])
    lockstep = schedule.versions is not None or tabulate(schedule, pipeline.stash).lockstep
    if pipeline.lowering == "phased" and not lockstep:
        raise UserError(
            f"lowering phased with pipeline {pipeline}: in some of its ticks some devices go forward and "
            "others backward; take lockstep or gpipe, or lowering switch"
        )
    return stages


def chains_of(pure_model: PureModel) -> dict[str, int]:
    """The chains of unlike blocks of a model, by where they are, and how many blocks each has.

    Example:
        >>> from jaxscale.models import ResNet
        >>> chains_of(PureModel.of(ResNet(stages=(2, 1), width=8), 0))
        {'blocks': 3}
    """
    module = nnx.merge(pure_model.graphdef, pure_model.whole, pure_model.rest)
    return {"/".join(map(str, path)): len(one.layers) for path, one in nnx.iter_graph(module) if isinstance(one, Chain)}


def period_of(model: Model) -> int:
    """Layers after which a model's blocks repeat: those of unlike attention come in turn, and a stage has whole turns.

    Example:
        >>> from jaxscale.models import Decoder
        >>> period_of(Decoder(vocab=8, context=8, layers=4, embed=8, heads=2, windows=(4, None)))
        2
    """
    return len(getattr(model, "windows", ()) or (None,))
