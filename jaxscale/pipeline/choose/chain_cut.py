"""Cuts of a chain of blocks into stages, with the features of every possible stage.

Dynamic programming finds the cut with the least linear function of the features, and branch and bound finds cuts with
a low maximum of several linear functions.

A *linear* is float[stage, feature], the coefficients of a linear function of the stages' features. A pipeline's
seconds, and its bytes, are a maximum of linear functions of its stages' features: the seconds of the passes along a
path through the schedule, or the bytes that one rank holds at some moment. A shortest path minimises one such function:
V(k, b) = min over e of value(k, b, e) + V(k + 1, e), where stage k holds the blocks b to e - 1. V(k, b) is the least
cost of stage k and all later ones, so it is a lower bound for every cut with the same first stages, and for the maximum
of several functions.
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
"""Features of a stage: sums over its blocks, the largest working bytes, the messages at its ends, and 1."""
INDEX = {name: index for index, name in enumerate(FEATURES)}
_SUMS = FEATURES[: INDEX["working_bytes"]]  # features that are sums over the blocks


def features(blocks: Sequence[Price], first: Price | None, last: Price | None, recomputes: bool) -> np.ndarray:
    """Return float[feature, begin, end]: the features of a stage that holds the blocks begin to end - 1.

    Args:
        blocks: price of each block.
        first: price of the embedding, before the first block.
        last: price of the head, behind the last block.
        recomputes: whether a backward runs the forward again, so that only the stage's input is stashed.
    """
    block_count = len(blocks)
    table = np.zeros((len(FEATURES), block_count + 1, block_count + 1))
    block_costs = np.array([[getattr(block, name) for name in _SUMS] for block in blocks])
    prefix_sums = np.concatenate([np.zeros((1, len(_SUMS))), np.cumsum(block_costs, 0)])
    table[: len(_SUMS)] = prefix_sums.T[:, None, :] - prefix_sums.T[:, :, None]
    working_bytes = np.array([block.working_bytes for block in blocks])
    for begin in range(block_count):
        table[INDEX["working_bytes"], begin, begin + 1 :] = np.maximum.accumulate(working_bytes[begin:])
    leaving_bytes = np.array([block.message_bytes for block in blocks[:-1]])
    table[INDEX["enters"], 1:block_count, :] = leaving_bytes[:, None]
    table[INDEX["leaves"], :, 1:block_count] = leaving_bytes[None, :]
    table[INDEX["one"]] = 1
    for price, region in ((first, np.s_[0, :]), (last, np.s_[:, block_count])):
        if price is not None:
            for name in _SUMS:
                table[INDEX[name]][region] += getattr(price, name)
            stage_working_bytes = table[INDEX["working_bytes"]]
            stage_working_bytes[region] = np.maximum(stage_working_bytes[region], price.working_bytes)
    if recomputes:
        table[INDEX["input_gradient"]] += table[INDEX["forward"]]
        table[INDEX["working_bytes"]] += table[INDEX["stash_bytes"]]
        table[INDEX["stash_bytes"]] = table[INDEX["enters"]]
    return table


@dataclasses.dataclass(frozen=True)
class BoundedCuts:
    """The result of branch and bound.

    Args:
        cuts: int[cuts, stages + 1], the boundaries of the cuts that may be below the ceiling.
        bound: a lower bound on the objective of every other cut.
    """

    cuts: np.ndarray
    bound: float


class BlockChain:
    """A chain of blocks that is cut into stages of one block or more.

    Args:
        stages: number of stages.
        features: for each kind of device, float[feature, begin, end].
        kinds: the kind of each stage's device, an index into `features`.
    """

    def __init__(self, stages: int, features: Sequence[np.ndarray], kinds: Sequence[int]) -> None:
        self.stages, self.blocks = stages, features[0].shape[1] - 1
        self._features, self._kinds = features, tuple(kinds)
        # whether each stage may hold the blocks begin..end-1
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
        self.possible &= self.values(linear) <= limit * (1 + 1e-12)

    def values(self, linear: np.ndarray) -> np.ndarray:
        """Return float[stage, begin, end]: what each stage adds to a linear function; infinite if it is impossible."""
        values = np.where(self.possible, 0.0, np.inf)
        for stage in np.flatnonzero(linear.any(1)):
            values[stage] += self._contribution(linear, stage)
        return values

    def largest(self, linears: Sequence[np.ndarray]) -> np.ndarray:
        """Return float[stage, begin, end]: the most that each stage adds to any of some linear functions, all >= 0.

        The number is infinite for impossible stages.
        """
        largest = np.where(self.possible, 0.0, np.inf)
        for linear in linears:
            for stage in np.flatnonzero(linear.any(1)):
                np.maximum(largest[stage], self._contribution(linear, stage), out=largest[stage])
        return largest

    def _contribution(self, linear: np.ndarray, stage: int | np.integer) -> np.ndarray:
        """Return float[begin, end]: the addition of a stage of the blocks begin to end - 1 to a linear function."""
        active = np.flatnonzero(linear[stage])
        return np.tensordot(linear[stage, active], self._features[self._kinds[stage]][active], 1)

    def stage_features(self, cuts: np.ndarray) -> np.ndarray:
        """Return float[cut, stage, feature]: the features of the stages of cuts, boundaries int[cut, stages + 1]."""
        begins, ends = cuts[:, :-1], cuts[:, 1:]
        return np.stack([self._features[kind][:, begins[:, s], ends[:, s]].T for s, kind in enumerate(self._kinds)], 1)

    def cost_to_go(self, values: np.ndarray, *, use_max: bool = False) -> np.ndarray:
        """Return float[stage + 1, begin]: the least sum of `values` over the stages from a stage and first block on.

        With `use_max` it is their least maximum instead of their least sum.
        """
        to_go = np.full((self.stages + 1, self.blocks + 1), np.inf)
        to_go[self.stages, self.blocks] = -np.inf if use_max else 0.0
        for stage in range(self.stages - 1, -1, -1):
            later_costs = to_go[stage + 1][None, :]
            to_go[stage] = (np.maximum(values[stage], later_costs) if use_max else values[stage] + later_costs).min(1)
        return to_go

    def shortest(self, values: np.ndarray, *, use_max: bool = False) -> tuple[float, np.ndarray]:
        """Return the least sum of float[stage, begin, end] over the stages, and its boundaries, int[stages + 1].

        With `use_max` it is their least maximum instead of their least sum.
        """
        to_go = self.cost_to_go(values, use_max=use_max)
        cut = [0]
        for stage in range(self.stages):
            begin, later_costs = cut[-1], to_go[stage + 1]
            totals = np.maximum(values[stage, begin], later_costs) if use_max else values[stage, begin] + later_costs
            cut.append(int(totals.argmin()))
        return float(to_go[0, 0]), np.array(cut)

    def branch(
        self, paths: Sequence[np.ndarray], limits: Sequence[np.ndarray], bounds: np.ndarray, ceiling: float, width: int
    ) -> BoundedCuts:
        """Build, stage by stage, the cuts that may stay below a ceiling.

        If there are more than `width` partial cuts, those with the least bounds are extended.

        Args:
            paths: float[stage, feature] each, linear functions that are never above the objective.
            limits: float[stage, feature] each, linear functions that must be at most 1.
            bounds: float[stage, begin, end], a lower bound on the objective of every cut with that stage.
            ceiling: value that the objective must stay below.
            width: number of partial cuts that are kept.
        """
        # float[function, stage, begin, end], and the least sums from each stage on, float[function, stage, begin]
        values = np.stack([self.values(linear) for linear in (*paths, *limits)])
        to_go = np.stack([self.cost_to_go(stage_values) for stage_values in values])
        highest_to_go = self.cost_to_go(bounds, use_max=True)
        cuts = np.zeros((1, 1), int)  # int[cut, stages so far + 1], the boundaries of the partial cuts
        sums = np.zeros((1, len(values)))  # float[cut, function], over the stages so far
        maxima = np.full(1, -np.inf)  # float[cut], the largest bound of one stage so far
        bound = np.inf
        for stage in range(self.stages):
            frontier = cuts[:, -1]
            # each extension of a partial cut by one stage: index of the partial cut, and begin and end of the stage
            parent, end = np.nonzero(self.possible[stage][frontier])
            begin = frontier[parent]
            sums = sums[parent] + values[:, stage, begin, end].T
            totals = sums + to_go[:, stage + 1, end].T
            maxima = np.maximum(maxima[parent], np.maximum(bounds[stage, begin, end], highest_to_go[stage + 1, end]))
            lower_bounds = np.maximum(maxima, totals[:, : len(paths)].max(1, initial=-np.inf))
            # indices of the extensions that may stay below the ceiling within the limits
            survivors = np.flatnonzero((lower_bounds < ceiling) & (totals[:, len(paths) :] <= 1 + 1e-12).all(1))
            if len(survivors) > width:
                ranking = survivors[np.argsort(lower_bounds[survivors], kind="stable")]
                bound = min(bound, float(lower_bounds[ranking[width]]))
                survivors = ranking[:width]
            cuts = np.concatenate([cuts[parent[survivors]], end[survivors, None]], 1)
            sums, maxima = sums[survivors], maxima[survivors]
        return BoundedCuts(cuts, bound)
