"""Cuts of a chain of blocks into stages, with the features of every possible stage.

A *cut* is an array of boundaries, int[stages + 1]: stage s has the blocks cut[s] to cut[s + 1] - 1. A *linear* is an
array float[stage, feature] with the coefficients of a linear function of the stages' features. The seconds of a
pipeline are a maximum of linear functions, one for each path through the schedule. The bytes of a pipeline are a
maximum of linear functions too, one for each rank and moment.

Dynamic programming finds the cut for which one linear function is least: V(k, b) = min over e of value(k, b, e) + V(k +
1, e), where stage k has the blocks b to e - 1. V(k, b) is the least cost of stage k and all later stages. Added to the
cost of the stages before k, it is a lower bound for every cut that begins with these stages. A lower bound of one
function is also a lower bound of the maximum of several functions. Branch and bound finds cuts for which the maximum of
several functions is small.
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


def features(blocks: Sequence[Price], first: Price | None, last: Price | None, is_recomputed: bool) -> np.ndarray:
    """Return float[feature, begin, end]: the features of a stage with the blocks begin to end - 1.

    Args:
        blocks: price of each block.
        first: price of the embedding, before the first block.
        last: price of the head, after the last block.
        is_recomputed: whether a backward runs the forward again, so that only the stage's input is stashed.
    """
    block_count = len(blocks)
    table = np.zeros((len(FEATURES), block_count + 1, block_count + 1))
    block_costs = np.array([[getattr(block, name) for name in _SUM_FEATURES] for block in blocks])
    prefix_sums = np.concatenate([np.zeros((1, len(_SUM_FEATURES))), np.cumsum(block_costs, 0)])
    table[: len(_SUM_FEATURES)] = prefix_sums.T[:, None, :] - prefix_sums.T[:, :, None]
    working_bytes = np.array([block.working_bytes for block in blocks])
    for begin in range(block_count):
        table[INDEX["working_bytes"], begin, begin + 1 :] = np.maximum.accumulate(working_bytes[begin:])
    message_bytes = np.array([block.message_bytes for block in blocks[:-1]])
    table[INDEX["enters"], 1:block_count, :] = message_bytes[:, None]
    table[INDEX["leaves"], :, 1:block_count] = message_bytes[None, :]
    table[INDEX["one"]] = 1
    for price, region in ((first, np.s_[0, :]), (last, np.s_[:, block_count])):
        if price is not None:
            for name in _SUM_FEATURES:
                table[INDEX[name]][region] += getattr(price, name)
            stage_working_bytes = table[INDEX["working_bytes"]]
            stage_working_bytes[region] = np.maximum(stage_working_bytes[region], price.working_bytes)
    if is_recomputed:
        table[INDEX["input_gradient"]] += table[INDEX["forward"]]
        table[INDEX["working_bytes"]] += table[INDEX["stash_bytes"]]
        table[INDEX["stash_bytes"]] = table[INDEX["enters"]]
    return table


@dataclasses.dataclass(frozen=True)
class BoundedCuts:
    """The result of branch and bound.

    Args:
        cuts: int[cut, stages + 1], the cuts with an objective that may be below the ceiling.
        lower_bound: a lower bound on the objective of every cut that was dropped for lack of width; infinite if no cut
            was dropped for that reason.
    """

    cuts: np.ndarray
    lower_bound: float


class BlockChain:
    """A chain of blocks that is cut into stages of one block or more.

    Args:
        stages: number of stages.
        features: for each kind of device, float[feature, begin, end], as `features` returns it.
        kinds: for each stage, the kind of its device, an index into `features`.

    Attributes:
        stages: number of stages.
        blocks: number of blocks.
        possible: bool[stage, begin, end], whether a stage may have the blocks begin to end - 1.
    """

    def __init__(self, stages: int, features: Sequence[np.ndarray], kinds: Sequence[int]) -> None:
        self.stages, self.blocks = stages, features[0].shape[1] - 1
        self._features, self._kinds = features, tuple(kinds)
        stage, begin, end = np.ogrid[:stages, : self.blocks + 1, : self.blocks + 1]
        self.possible = (
            (begin < end)
            & (begin >= stage)
            & (end <= self.blocks - (stages - 1 - stage))
            & ((begin == 0) == (stage == 0))
            & ((end == self.blocks) == (stage == stages - 1))
        )

    def exclude_above(self, linear: np.ndarray, limit: float) -> None:
        """Exclude every stage whose contribution to a linear function, float[stage, feature], is above a limit."""
        self.possible &= self.contributions(linear) <= limit * (1 + 1e-12)

    def contributions(self, linear: np.ndarray) -> np.ndarray:
        """Return float[stage, begin, end]: what a stage adds to a linear function, infinite for impossible stages."""
        values = np.where(self.possible, 0.0, np.inf)
        for stage in np.flatnonzero(linear.any(1)):
            values[stage] += self._contribution(linear, stage)
        return values

    def largest_contributions(self, linears: Sequence[np.ndarray]) -> np.ndarray:
        """Return float[stage, begin, end]: the largest contribution of each stage to any of several linear functions.

        The functions must have coefficients >= 0. The contribution of an impossible stage is infinite.
        """
        largest = np.where(self.possible, 0.0, np.inf)
        for linear in linears:
            for stage in np.flatnonzero(linear.any(1)):
                np.maximum(largest[stage], self._contribution(linear, stage), out=largest[stage])
        return largest

    def _contribution(self, linear: np.ndarray, stage: int | np.integer) -> np.ndarray:
        """Return float[begin, end]: what a stage with the blocks begin to end - 1 adds to a linear function."""
        feature_indices = np.flatnonzero(linear[stage])
        features = self._features[self._kinds[stage]][feature_indices]
        return np.tensordot(linear[stage, feature_indices], features, 1)

    def stage_features(self, cuts: np.ndarray) -> np.ndarray:
        """Return float[cut, stage, feature]: the features of the stages of cuts, int[cut, stages + 1]."""
        begins, ends = cuts[:, :-1], cuts[:, 1:]
        return np.stack([self._features[kind][:, begins[:, s], ends[:, s]].T for s, kind in enumerate(self._kinds)], 1)

    def cost_to_go(self, values: np.ndarray, *, use_max: bool = False) -> np.ndarray:
        """Return float[stage + 1, begin]: the least cost of a stage that starts at block begin and all later stages.

        Args:
            values: float[stage, begin, end], the value of each possible stage.
            use_max: whether the cost is the maximum of the stages' values instead of their sum.
        """
        to_go = np.full((self.stages + 1, self.blocks + 1), np.inf)
        to_go[self.stages, self.blocks] = -np.inf if use_max else 0.0
        for stage in range(self.stages - 1, -1, -1):
            later_costs = to_go[stage + 1][None, :]
            to_go[stage] = (np.maximum(values[stage], later_costs) if use_max else values[stage] + later_costs).min(1)
        return to_go

    def least_cost_cut(self, values: np.ndarray, *, use_max: bool = False) -> tuple[float, np.ndarray]:
        """Return (sum, cut): the least sum of values over the stages of a cut, and the cut with this sum.

        Args:
            values: float[stage, begin, end], the value of each possible stage.
            use_max: whether to minimize the maximum of the values instead of their sum.
        """
        to_go = self.cost_to_go(values, use_max=use_max)
        boundaries = [0]
        for stage in range(self.stages):
            begin, later_costs = boundaries[-1], to_go[stage + 1]
            totals = np.maximum(values[stage, begin], later_costs) if use_max else values[stage, begin] + later_costs
            boundaries.append(int(totals.argmin()))
        return float(to_go[0, 0]), np.array(boundaries)

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
            paths: linears whose value for a cut is never above the objective.
            limit_linears: linears whose value for a cut must be at most 1.
            stage_bounds: float[stage, begin, end], a lower bound on the objective of every cut with this stage.
            ceiling: value that the objective must stay below.
            width: number of partial cuts that are kept.
        """
        # float[linear, stage, begin, end], and the least sums from each stage on, float[linear, stage, begin]
        values = np.stack([self.contributions(linear) for linear in (*paths, *limit_linears)])
        to_go = np.stack([self.cost_to_go(stage_values) for stage_values in values])
        highest_to_go = self.cost_to_go(stage_bounds, use_max=True)
        cuts = np.zeros((1, 1), int)  # int[cut, stages so far + 1], the boundaries of the partial cuts
        sums = np.zeros((1, len(values)))  # float[cut, linear], over the stages so far
        maxima = np.full(1, -np.inf)  # float[cut], the largest bound of a stage so far
        lower_bound = np.inf
        for stage in range(self.stages):
            frontier = cuts[:, -1]
            # for each extension of a partial cut by one stage: index of the partial cut, begin and end of the stage
            parent, end = np.nonzero(self.possible[stage][frontier])
            begin = frontier[parent]
            sums = sums[parent] + values[:, stage, begin, end].T
            totals = sums + to_go[:, stage + 1, end].T
            maxima = np.maximum(
                maxima[parent], np.maximum(stage_bounds[stage, begin, end], highest_to_go[stage + 1, end])
            )
            lower_bounds = np.maximum(maxima, totals[:, : len(paths)].max(1, initial=-np.inf))
            # indices of the extensions that may stay below the ceiling and within the limits
            survivors = np.flatnonzero((lower_bounds < ceiling) & (totals[:, len(paths) :] <= 1 + 1e-12).all(1))
            if len(survivors) > width:
                ranking = survivors[np.argsort(lower_bounds[survivors], kind="stable")]
                lower_bound = min(lower_bound, float(lower_bounds[ranking[width]]))
                survivors = ranking[:width]
            cuts = np.concatenate([cuts[parent[survivors]], end[survivors, None]], 1)
            sums, maxima = sums[survivors], maxima[survivors]
        return BoundedCuts(cuts, lower_bound)
