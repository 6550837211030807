"""Cuts of a chain of blocks into stages, with the features of every possible stage.

A *cut* is an array of boundaries, int[stages + 1]: stage s has the blocks cut[s] to cut[s + 1] - 1. A *linear* is an
array float[stage, feature] with the coefficients of a linear function of the stages' features. The seconds of a
pipeline are a maximum of linear functions, one for each path through the schedule. The bytes of a pipeline are a
maximum of linear functions too, one for each rank and point in time.

Dynamic programming finds the cut for which one linear function is least: V(k, b) = min over e of value(k, b, e) + V(k +
1, e), where stage k has the blocks b to e - 1. V(k, b) is the least cost of stage k and all later stages. Added to the
cost of the stages before k, it is a lower bound for every cut that begins with these stages. A lower bound of one
function is also a lower bound of the maximum of several functions. Branch and bound finds cuts for which this maximum
is small.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from jaxscale.pipeline.choose.price import Price

FEATURES = (
    "forward",
    "input_gradient",
    "weight_gradient",
    "weight_bytes",
    "version_bytes",
    "stash_bytes",
    "between_bytes",
    "working_bytes",
    "enters",
    "leaves",
    "one",
)
"""Features of a stage: sums over its blocks, the largest working bytes of a block, the bytes of the messages that enter
and leave the stage, and the constant 1."""
INDEX = {name: index for index, name in enumerate(FEATURES)}
"""The index of each feature."""
_SUM_FEATURES = FEATURES[: INDEX["working_bytes"]]  # features that are sums over the blocks


def features(
    block_prices: Sequence[Price], first_price: Price | None, last_price: Price | None, is_recomputed: bool
) -> np.ndarray:
    """Return float[feature, begin, end]: the features of a stage with the blocks begin to end - 1.

    Args:
        block_prices: price of each block.
        first_price: price of the embedding, before the first block; `None`: it costs nothing.
        last_price: price of the head, after the last block; `None`: it costs nothing.
        is_recomputed: whether only the stage's input is stashed and the backward runs the forward again.
    """
    block_count = len(block_prices)
    feature_table = np.zeros((len(FEATURES), block_count + 1, block_count + 1))
    block_features = np.array([[getattr(block_price, name) for name in _SUM_FEATURES] for block_price in block_prices])
    prefix_sums = np.concatenate([np.zeros((1, len(_SUM_FEATURES))), np.cumsum(block_features, 0)])
    feature_table[: len(_SUM_FEATURES)] = prefix_sums.T[:, None, :] - prefix_sums.T[:, :, None]
    working_bytes = np.array([block_price.working_bytes for block_price in block_prices])
    for begin in range(block_count):
        feature_table[INDEX["working_bytes"], begin, begin + 1 :] = np.maximum.accumulate(working_bytes[begin:])
    message_bytes = np.array([block_price.message_bytes for block_price in block_prices[:-1]])
    feature_table[INDEX["enters"], 1:block_count, :] = message_bytes[:, None]
    feature_table[INDEX["leaves"], :, 1:block_count] = message_bytes[None, :]
    feature_table[INDEX["one"]] = 1
    for price, region in ((first_price, np.s_[0, :]), (last_price, np.s_[:, block_count])):
        if price is not None:
            for name in _SUM_FEATURES:
                feature_table[INDEX[name]][region] += getattr(price, name)
            stage_working_bytes = feature_table[INDEX["working_bytes"]]
            stage_working_bytes[region] = np.maximum(stage_working_bytes[region], price.working_bytes)
    if is_recomputed:
        feature_table[INDEX["input_gradient"]] += feature_table[INDEX["forward"]]
        feature_table[INDEX["working_bytes"]] += feature_table[INDEX["stash_bytes"]]
        feature_table[INDEX["stash_bytes"]] = feature_table[INDEX["enters"]]
    return feature_table


@dataclasses.dataclass(frozen=True)
class BoundedCuts:
    """The result of branch and bound.

    Args:
        cuts: int[cut, stages + 1], the cuts whose objective may be below the ceiling.
        lower_bound: a lower bound on the objective of every cut that was dropped because more than `width` partial cuts
            were left; infinite if no cut was dropped for that reason.
    """

    cuts: np.ndarray
    lower_bound: float


class BlockChain:
    """A chain of blocks that is cut into stages of one block or more.

    Args:
        stages: number of stages.
        feature_tables: for each kind of device, float[feature, begin, end], as the function `features` returns it.
        kind_indices: for each stage, the index of its device's kind in `feature_tables`.

    Attributes:
        stages: number of stages.
        blocks: number of blocks.
        possible: bool[stage, begin, end], whether the stage may have the blocks begin to end - 1.
    """

    def __init__(self, stages: int, feature_tables: Sequence[np.ndarray], kind_indices: Sequence[int]) -> None:
        self.stages, self.blocks = stages, feature_tables[0].shape[1] - 1
        self._feature_tables, self._kind_indices = feature_tables, tuple(kind_indices)
        stage, begin, end = np.ogrid[:stages, : self.blocks + 1, : self.blocks + 1]
        self.possible = (
            (begin < end)
            & (begin >= stage)
            & (end <= self.blocks - (stages - 1 - stage))
            & ((begin == 0) == (stage == 0))
            & ((end == self.blocks) == (stage == stages - 1))
        )

    def exclude_above(self, linear: np.ndarray, limit: float) -> None:
        """Exclude every stage whose contribution to the linear function `linear` is above a limit."""
        self.possible &= self.contributions(linear) <= limit * (1 + 1e-12)

    def contributions(self, linear: np.ndarray) -> np.ndarray:
        """Return float[stage, begin, end]: what each stage adds to a linear function; infinite if it is impossible."""
        stage_contributions = np.where(self.possible, 0.0, np.inf)
        for stage in np.flatnonzero(linear.any(1)):
            stage_contributions[stage] += self._contribution(linear, stage)
        return stage_contributions

    def largest_contributions(self, linears: Sequence[np.ndarray]) -> np.ndarray:
        """Return float[stage, begin, end]: the largest contribution of each stage to any of several linear functions.

        The functions must have coefficients >= 0. The contribution of an impossible stage is infinite.
        """
        largest_by_stage = np.where(self.possible, 0.0, np.inf)
        for linear in linears:
            for stage in np.flatnonzero(linear.any(1)):
                np.maximum(largest_by_stage[stage], self._contribution(linear, stage), out=largest_by_stage[stage])
        return largest_by_stage

    def _contribution(self, linear: np.ndarray, stage: int | np.integer) -> np.ndarray:
        """Return float[begin, end]: what a stage with the blocks begin to end - 1 adds to a linear function."""
        feature_indices = np.flatnonzero(linear[stage])
        stage_features = self._feature_tables[self._kind_indices[stage]][feature_indices]
        return np.tensordot(linear[stage, feature_indices], stage_features, 1)

    def stage_features(self, cuts: np.ndarray) -> np.ndarray:
        """Return float[cut, stage, feature]: the features of the stages of cuts, int[cut, stages + 1]."""
        begins, ends = cuts[:, :-1], cuts[:, 1:]
        return np.stack(
            [
                self._feature_tables[kind_index][:, begins[:, s], ends[:, s]].T
                for s, kind_index in enumerate(self._kind_indices)
            ],
            1,
        )

    def cost_to_go(self, stage_values: np.ndarray, *, use_max: bool = False) -> np.ndarray:
        """Return float[stages + 1, begin]: the least cost of a stage that starts at block begin and all later stages.

        Args:
            stage_values: float[stage, begin, end], the value of each possible stage.
            use_max: whether the cost is the maximum of the stages' values instead of their sum.
        """
        costs_to_go = np.full((self.stages + 1, self.blocks + 1), np.inf)
        costs_to_go[self.stages, self.blocks] = -np.inf if use_max else 0.0
        for stage in range(self.stages - 1, -1, -1):
            later_costs = costs_to_go[stage + 1][None, :]
            costs_to_go[stage] = (
                np.maximum(stage_values[stage], later_costs) if use_max else stage_values[stage] + later_costs
            ).min(1)
        return costs_to_go

    def least_cost_cut(self, stage_values: np.ndarray, *, use_max: bool = False) -> tuple[float, np.ndarray]:
        """Return (cost, cut): the least cost of any cut, and the cut with this cost.

        Args:
            stage_values: float[stage, begin, end], the value of each possible stage.
            use_max: whether the cost is the maximum of the stages' values instead of their sum.
        """
        costs_to_go = self.cost_to_go(stage_values, use_max=use_max)
        boundaries = [0]
        for stage in range(self.stages):
            begin, later_costs = boundaries[-1], costs_to_go[stage + 1]
            total_costs = (
                np.maximum(stage_values[stage, begin], later_costs)
                if use_max
                else stage_values[stage, begin] + later_costs
            )
            boundaries.append(int(total_costs.argmin()))
        return float(costs_to_go[0, 0]), np.array(boundaries)

    def branch_and_bound(
        self,
        paths: Sequence[np.ndarray],
        limit_linears: Sequence[np.ndarray],
        stage_bounds: np.ndarray,
        ceiling: float,
        width: int,
    ) -> BoundedCuts:
        """Build, stage by stage, the cuts that may stay below a ceiling.

        If there are more than `width` partial cuts, those with the least lower bounds are extended.

        Args:
            paths: linears; for no cut is their value above the objective.
            limit_linears: linears; the value of each for a cut must be at most 1.
            stage_bounds: float[stage, begin, end], a lower bound on the objective of every cut with this stage.
            ceiling: value that the objective must stay below.
            width: the most partial cuts that are kept.
        """
        # float[linear, stage, begin, end], and float[linear, stage, begin]: the least sums over a stage and later ones
        linear_values = np.stack([self.contributions(linear) for linear in (*paths, *limit_linears)])
        costs_to_go = np.stack([self.cost_to_go(linear_stage_values) for linear_stage_values in linear_values])
        bounds_to_go = self.cost_to_go(stage_bounds, use_max=True)
        cuts = np.zeros((1, 1), int)  # int[cut, stages so far + 1], the boundaries of the partial cuts
        sums = np.zeros((1, len(linear_values)))  # float[cut, linear], over the stages so far
        maxima = np.full(1, -np.inf)  # float[cut], the largest bound of a stage so far
        lower_bound = np.inf
        for stage in range(self.stages):
            last_boundaries = cuts[:, -1]
            # for each extension of a partial cut by one stage: index of the partial cut, begin and end of the stage
            parents, ends = np.nonzero(self.possible[stage][last_boundaries])
            begins = last_boundaries[parents]
            sums = sums[parents] + linear_values[:, stage, begins, ends].T
            totals = sums + costs_to_go[:, stage + 1, ends].T
            maxima = np.maximum(
                maxima[parents], np.maximum(stage_bounds[stage, begins, ends], bounds_to_go[stage + 1, ends])
            )
            lower_bounds = np.maximum(maxima, totals[:, : len(paths)].max(1, initial=-np.inf))
            # indices of the extensions that may stay below the ceiling and within the limits
            survivors = np.flatnonzero((lower_bounds < ceiling) & (totals[:, len(paths) :] <= 1 + 1e-12).all(1))
            if len(survivors) > width:
                ranked_survivors = survivors[np.argsort(lower_bounds[survivors], kind="stable")]
                lower_bound = min(lower_bound, float(lower_bounds[ranked_survivors[width]]))
                survivors = ranked_survivors[:width]
            cuts = np.concatenate([cuts[parents[survivors]], ends[survivors, None]], 1)
            sums, maxima = sums[survivors], maxima[survivors]
        return BoundedCuts(cuts, lower_bound)
