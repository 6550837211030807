"""Stages: the layers of a model's stack that each stage of a pipeline runs, and the placement of their parameters.

A rank is a device of the pipe axis, a chunk is a stage on a rank, and a route is the list of ranks that a microbatch
visits, stage by stage. A stacked parameter of a pipelined step has one row for each layer, ordered by rank, then by
chunk, then by layer, so that the pipe axis splits its first dim. Rows of zeros pad stages that have fewer layers than
the deepest stage. Some schedules (Chimera) run a stage on two ranks. Then the rank on the first route is the home of
the stage and has its parameters, and the other rank receives a copy of them at the start of every step.
"""

import dataclasses
import functools
import itertools

import numpy as np
from flax import nnx

from jaxscale.blocks import Model
from jaxscale.errors import UserError
from jaxscale.layers.stack import chain_block_paths
from jaxscale.model_traits import ModelTraits
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
        layer_counts: number of layers of each stage, in the model's order.
        chain: paths of the blocks in the model, if the blocks are not the rows of a stack; () for a stack.

    Raises:
        UserError: a stage has no layer, or the length of `layer_counts` is not the schedule's number of stages.

    Example:
        >>> from jaxscale.pipeline.plan import PipelinePlan
        >>> stages = Stages.even(PipelinePlan.parse("1f1b:2x4").schedule(), 5)
        >>> stages.layer_counts, stages.first_layers, stages.layer_of_row
        ((3, 2), (0, 3), (0, 1, 2, 3, 4, -1))
    """

    schedule: Schedule
    layer_counts: tuple[int, ...]
    chain: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if len(self.layer_counts) != self.schedule.stages or min(self.layer_counts) < 1:
            counts_text = ", ".join(map(str, self.layer_counts))
            raise UserError(
                f"pipeline {self.schedule.name}: got stages of {counts_text} layers, expected {self.schedule.stages} "
                "stages of at least one layer"
            )

    @classmethod
    def even(cls, schedule: Schedule, layer_count: int, period: int = 1) -> "Stages":
        """Return stages whose numbers of layers are as equal as possible.

        Periods that are left over go to the first stages, one to each. Layers after the last whole period go to the
        last stage.

        Args:
            schedule: the schedule of the pipeline.
            layer_count: number of layers of the model.
            period: number of layers after which the kinds of blocks repeat; stages start at multiples of this number.

        Raises:
            UserError: there are more stages than layers, or than periods of layers.
        """
        period_count = layer_count // period
        if period_count < schedule.stages:
            period_text = f" in groups of {period}" if period > 1 else ""
            raise UserError(
                f"pipeline {schedule.name}: got {schedule.stages} stages, but the model has {layer_count} layers"
                f"{period_text}; take at most {period_count} stages, or a deeper model"
            )
        periods_per_stage, left_over_count = divmod(period_count, schedule.stages)
        layer_counts = [period * (periods_per_stage + (stage < left_over_count)) for stage in range(schedule.stages)]
        layer_counts[-1] += layer_count - period_count * period
        return cls(schedule, tuple(layer_counts))

    def __str__(self) -> str:
        is_even = len(set(self.layer_counts)) == 1
        counts_text = ", ".join(map(str, self.layer_counts))
        layers_text = f"{self.layer_counts[0]} layers each" if is_even else f"{counts_text} layers"
        return f"pipeline {self.schedule.name}: {len(self.layer_counts)} stages of {layers_text}"

    @property
    def first_layers(self) -> tuple[int, ...]:
        """Index of the first layer of each stage."""
        return tuple(itertools.accumulate((0, *self.layer_counts[:-1])))

    @property
    def depth(self) -> int:
        """Number of layers of the deepest stage, which is the number of rows of every chunk."""
        return max(self.layer_counts)

    @functools.cached_property
    def home_stages(self) -> tuple[tuple[int, ...], ...]:
        """For each rank, the stages whose home is the rank, in the order of the rank's chunks."""
        home_stages: list[list[int]] = [[] for _ in range(self.schedule.ranks)]
        for stage, rank in enumerate(self.schedule.routes[0]):
            home_stages[rank].append(stage)
        if len({len(rank_stages) for rank_stages in home_stages}) > 1:
            raise UserError(
                f"pipeline {self.schedule.name}: ranks have "
                f"{', '.join(str(len(rank_stages)) for rank_stages in home_stages)} stages, expected the same "
                "number on every rank"
            )
        return tuple(map(tuple, home_stages))

    @functools.cached_property
    def layer_of_row(self) -> tuple[int, ...]:
        """Index of the layer in each row of a stacked parameter; -1 for a row that pads a chunk."""
        layer_of_stage_row = self.layer_of_stage_row
        return tuple(
            int(layer)
            for rank_stages in self.home_stages
            for stage in rank_stages
            for layer in layer_of_stage_row[stage]
        )

    @functools.cached_property
    def layer_of_stage_row(self) -> np.ndarray:
        """Index of the layer in each row of every stage, int32 (stages, depth); -1 for a row that pads a stage."""
        layer_of_stage_row = np.full((len(self.layer_counts), self.depth), -1, np.int32)
        for stage, (first_layer, layer_count) in enumerate(zip(self.first_layers, self.layer_counts, strict=True)):
            layer_of_stage_row[stage, :layer_count] = np.arange(first_layer, first_layer + layer_count)
        return layer_of_stage_row

    @functools.cached_property
    def copy_transfers(self) -> tuple[tuple[int, tuple[tuple[int, int], ...]], ...]:
        """The transfers that copy stages to other ranks: (sent chunk, rank pairs) for each chunk of copies.

        Each home rank sends the chunk with the index "sent chunk" among its own chunks. A rank pair is (home rank that
        sends the chunk, rank that receives the copy).
        """
        copy_transfers = []
        for chunk in range(len(self.home_stages[0]), self.schedule.chunks):
            rank_pairs, sent_chunks = [], set()
            for rank in range(self.schedule.ranks):
                rank_stages = self.schedule.stages_of(rank)
                if chunk < len(rank_stages):
                    home_rank = self.schedule.routes[0][rank_stages[chunk]]
                    sent_chunks.add(self.home_stages[home_rank].index(rank_stages[chunk]))
                    rank_pairs.append((home_rank, rank))
            if len(sent_chunks) > 1 or len({home_rank for home_rank, _ in rank_pairs}) < self.schedule.ranks:
                raise UserError(
                    f"pipeline {self.schedule.name}: the copies of stage weights do not pair the ranks. Expected a "
                    "second route on which each rank runs the stages of exactly one other rank, as in Chimera: change "
                    "the routes of the schedule"
                )
            copy_transfers.append((sent_chunks.pop(), tuple(rank_pairs)))
        return tuple(copy_transfers)


def stages_of(experiment: Experiment, plan: Plan) -> Stages:
    """Return the stages of a plan's pipeline for a model.

    Args:
        experiment: the experiment, with its model.
        plan: the plan, with a pipeline.

    Raises:
        UserError: the model has no blocks, more than one stack or chain, or running statistics; it has fewer blocks
            than stages, or a number of blocks other than the plan specifies; or the pipeline does not support the
            copies of stages or the ticks of its schedule.
    """
    pipeline = plan.pipeline
    assert pipeline is not None
    pure_model = PureModel.of(experiment.model, experiment.seed)
    stack_depths = {
        leaf.shape[0]
        for name, leaf in named_leaves(pure_model.abstract_params).items()
        if name in pure_model.block_param_names and pure_model.is_stacked(name)
    }
    chains = chains_of(pure_model)
    if not stack_depths and not chains:
        raise UserError(
            f"pipeline {pipeline}: this model has no blocks to cut into stages"
            f"{_parts_text(experiment.model, pure_model)}"
        )
    block_texts = [f"a stack of {depth} blocks" for depth in sorted(stack_depths)]
    block_texts += [f"a chain of {len(chain)} blocks ({chain[0]}, ...)" for chain in chains]
    if len(block_texts) > 1:
        raise UserError(
            f"pipeline {pipeline}: this model has {' and '.join(block_texts)}, and only one can be cut into stages; "
            "build the model of one stack, or of one chain, or name the blocks of one with ForeignModel(blocks=...)"
        )
    statistic_names = pure_model.statistics
    if statistic_names:
        raise UserError(
            f"pipeline {pipeline}: this model holds running statistics ({statistic_names[0]}), which microbatches "
            "would change one after the other, and stages at different times; use layer or group norm, or train "
            "without a pipeline"
        )
    chain = next(iter(chains), ())
    block_count = max(stack_depths, default=len(chain))
    schedule = pipeline.schedule()
    period = period_of(experiment.model)
    layer_counts = pipeline.stages
    if layer_counts is None:
        layer_counts = Stages.even(schedule, block_count, period).layer_counts
    if sum(layer_counts) != block_count:
        raise UserError(
            f"pipeline {pipeline}: got stages of {sum(layer_counts)} blocks in total, expected {block_count}, the "
            "number of blocks of the model; change the option stages"
        )
    stages = Stages(schedule, layer_counts, chain)
    if any(first_layer % period for first_layer in stages.first_layers):
        raise UserError(
            f"pipeline {pipeline}: the kinds of blocks in this model repeat every {period} blocks; take a "
            f"multiple of {period} blocks for each stage but the last"
        )
    assert len(stages.copy_transfers) == schedule.chunks - len(stages.home_stages[0])
    is_lockstep = schedule.versions is not None or tabulate(schedule, pipeline.stash).is_lockstep
    if pipeline.lowering == "phased" and not is_lockstep:
        raise UserError(
            f"lowering phased with pipeline {pipeline}: in some of its ticks, some devices run forward passes and "
            "others backward passes, but phased needs passes of one kind in each tick; take lockstep or gpipe, or "
            "lowering switch"
        )
    return stages


def _parts_text(model: Model, pure_model: PureModel) -> str:
    """Return the end of an error message: the parts of a model without blocks, and what to do."""
    if not ModelTraits.of(model).foreign:
        return "; build it of layers.Stack or layers.Chain"
    name_words = [name.split("/") for name in named_leaves(pure_model.abstract_params)]
    part_names = sorted({words[0] for words in name_words})
    parts_text = f": its parts are {', '.join(part_names[:6])}{', ...' if len(part_names) > 6 else ''}"
    list_names = sorted({words[0] for words in name_words if len(words) > 2 and words[1].isdecimal()})
    if list_names:
        return (
            f"{parts_text}, and the members of {list_names[0]} are not alike modules of a class of your own; if each "
            f"reads the result of the one before, ForeignModel(blocks={list_names[0]!r}) makes them blocks"
        )
    return (
        f"{parts_text}, and none is a list of alike submodules; keep the layers that repeat in an nnx.List of modules "
        "of a class of your own, or name them with ForeignModel(blocks=...), or train without a pipeline"
    )


def chains_of(pure_model: PureModel) -> list[tuple[str, ...]]:
    """Return the chains of blocks in a model; a chain is the tuple of the paths of its blocks.

    Example:
        >>> from jaxscale.models import ResNet
        >>> chains_of(PureModel.of(ResNet(stages=(2, 1), width=8), 0))
        [('blocks/layers/0', 'blocks/layers/1', 'blocks/layers/2')]
    """
    module = nnx.merge(pure_model.graphdef, pure_model.abstract_module_params, pure_model.abstract_model_state)
    find_block_chains = getattr(pure_model.model, "block_chains", None)
    if find_block_chains is not None:
        return find_block_chains(module)
    return chain_block_paths(module)


def period_of(model: Model) -> int:
    """Return the number of layers after which the kinds of attention in a model repeat; 1 if all layers are alike.

    Example:
        >>> from jaxscale.models import Decoder
        >>> period_of(Decoder(vocab=8, context=8, layers=4, embed=8, heads=2, windows=(4, None)))
        2
    """
    return len(ModelTraits.of(model).windows) or 1
