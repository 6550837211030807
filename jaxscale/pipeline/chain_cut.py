"""Cuts of a chain of blocks into stages: the features of every possible stage, dynamic programming over a linear
function of them, and branch and bound over a maximum of such functions.

What a pipeline takes, seconds as well as bytes, is a maximum of linear functions of its stages' features: of the
seconds of their passes along some path through the schedule, of the bytes that one rank holds at some moment. One
function alone is least where a shortest path says: V(k, b) = min over e of value(k, b, e) + V(k + 1, e). The same V,
as what the rest takes at least, bounds every cut that begins alike, for the maximum too.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from jaxscale.pipeline.price import Price

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
"""What is known of a stage: sums over its blocks, the most of working bytes, the messages at its ends, and 1."""
AT = {name: index for index, name in enumerate(FEATURES)}
_SUMS = FEATURES[: AT["working_bytes"]]


def features(blocks: Sequence[Price], first: Price | None, last: Price | None, recompute: bool) -> np.ndarray:
    """float[feature, begin, end]: of the stage of blocks begin..end-1, for each pair.

    Args:
        blocks: price of each.
        first: what stands before the first block (the embedding).
        last: what stands behind the last (the head).
        recompute: a backward runs the forward again, so that only what enters the stage waits for it.
    """
    count = len(blocks)
    found = np.zeros((len(FEATURES), count + 1, count + 1))
    sums = np.array([[getattr(block, name) for name in _SUMS] for block in blocks])
    until = np.concatenate([np.zeros((1, len(_SUMS))), np.cumsum(sums, 0)])
    found[: len(_SUMS)] = until.T[:, None, :] - until.T[:, :, None]
    working = np.array([block.working_bytes for block in blocks])
    for begin in range(count):
        found[AT["working_bytes"], begin, begin + 1 :] = np.maximum.accumulate(working[begin:])
    leaves = np.array([block.message_bytes for block in blocks[:-1]])
    found[AT["enters"], 1:count, :] = leaves[:, None]
    found[AT["leaves"], :, 1:count] = leaves[None, :]
    found[AT["one"]] = 1
    for price, where in ((first, np.s_[0, :]), (last, np.s_[:, count])):
        if price is not None:
            for name in _SUMS:
                found[AT[name]][where] += getattr(price, name)
            most = found[AT["working_bytes"]]
            most[where] = np.maximum(most[where], price.working_bytes)
    if recompute:
        found[AT["input_gradient"]] += found[AT["forward"]]
        found[AT["working_bytes"]] += found[AT["stash_bytes"]]
        found[AT["stash_bytes"]] = found[AT["enters"]]
    return found


@dataclasses.dataclass(frozen=True)
class Found:
    """What branch and bound found.

    Args:
        cuts: int[cuts, stages + 1], the boundaries of those that may be better than the ceiling.
        bound: no cut that is not among them is below this.
    """

    cuts: np.ndarray
    bound: float


class Chain:
    """A chain of blocks that is cut into stages of one block or more.

    Args:
        stages: how many.
        features: of each kind of device, float[feature, begin, end].
        kinds: the kind of each stage's device, an index into `features`.
    """

    def __init__(self, stages: int, features: Sequence[np.ndarray], kinds: Sequence[int]) -> None:
        self.stages, self.blocks = stages, features[0].shape[1] - 1
        self._features, self._kinds = features, tuple(kinds)
        begin, end = np.ogrid[: self.blocks + 1, : self.blocks + 1]
        self.possible = np.stack(
            [
                (begin < end)
                & (begin >= stage)
                & (end <= self.blocks - (stages - 1 - stage))
                & ((begin == 0) == (stage == 0))
                & ((end == self.blocks) == (stage == stages - 1))
                for stage in range(stages)
            ]
        )

    def allow(self, linear: np.ndarray, limit: float) -> None:
        """Forbid every stage that alone takes a linear function, float[stage, feature], beyond a limit."""
        self.possible &= self.values(linear) <= limit * (1 + 1e-12)

    def values(self, linear: np.ndarray) -> np.ndarray:
        """float[stage, begin, end]: what each stage adds to a linear function; infinite where it may not be."""
        out = np.full(self.possible.shape, np.inf)
        for stage, row in enumerate(linear):
            used = np.flatnonzero(row)
            value = np.tensordot(row[used], self._features[self._kinds[stage]][used], 1)
            out[stage] = np.where(self.possible[stage], value, np.inf)
        return out

    def largest(self, linears: Sequence[np.ndarray]) -> np.ndarray:
        """float[stage, begin, end]: the most that each possible stage alone adds to any of them, all >= 0."""
        out = np.where(self.possible, 0.0, np.inf)
        for linear in linears:
            for stage in np.flatnonzero(linear.any(1)):
                used = np.flatnonzero(linear[stage])
                value = np.tensordot(linear[stage, used], self._features[self._kinds[stage]][used], 1)
                np.maximum(out[stage], value, out=out[stage])
        return out

    def of(self, cuts: np.ndarray) -> np.ndarray:
        """float[cut, stage, feature] of int[cut, stages + 1] boundaries."""
        return np.stack(
            [self._features[kind][:, cuts[:, stage], cuts[:, stage + 1]].T for stage, kind in enumerate(self._kinds)],
            1,
        )

    def rest(self, values: np.ndarray, *, most: bool = False) -> np.ndarray:
        """float[stage + 1, begin]: what the stages from here on add at least; with `most`, the largest of them."""
        rest = np.full((self.stages + 1, self.blocks + 1), np.inf)
        rest[self.stages, self.blocks] = -np.inf if most else 0.0
        for stage in range(self.stages - 1, -1, -1):
            behind = rest[stage + 1][None, :]
            rest[stage] = (np.maximum(values[stage], behind) if most else values[stage] + behind).min(1)
        return rest

    def shortest(self, values: np.ndarray, *, most: bool = False) -> tuple[float, np.ndarray]:
        """The least sum (with `most`: the least maximum) over the stages, and int[stages + 1] boundaries of it."""
        rest = self.rest(values, most=most)
        cut = [0]
        for stage in range(self.stages):
            begin, behind = cut[-1], rest[stage + 1]
            whole = np.maximum(values[stage, begin], behind) if most else values[stage, begin] + behind
            cut.append(int(whole.argmin()))
        return float(rest[0, 0]), np.array(cut)

    def branch(
        self, times: Sequence[np.ndarray], holds: Sequence[np.ndarray], alone: np.ndarray, ceiling: float, width: int
    ) -> Found:
        """The cuts that may stay below a ceiling, found stage by stage.

        Of the beginnings that may still do, those of least bound are extended where there are more than `width`.

        Args:
            times: float[stage, feature] each, linear functions that are never above the objective.
            holds: the same, of what must not be above 1.
            alone: float[stage, begin, end], a bound on the objective by one stage.
            ceiling: of the objective.
            width: how many beginnings are kept.
        """
        values = np.stack([self.values(linear) for linear in (*times, *holds)])
        rests = np.stack([self.rest(value) for value in values])
        tall = self.rest(alone, most=True)
        cuts = np.zeros((1, 1), int)
        sums = np.zeros((1, len(values)))
        highest = np.full(1, -np.inf)
        bound = np.inf
        for stage in range(self.stages):
            begin = cuts[:, -1]
            row, end = np.nonzero(self.possible[stage][begin])
            here = begin[row]
            sums = sums[row] + values[:, stage, here, end].T
            whole = sums + rests[:, stage + 1, end].T
            highest = np.maximum(highest[row], np.maximum(alone[stage, here, end], tall[stage + 1, end]))
            lower = np.maximum(highest, whole[:, : len(times)].max(1, initial=-np.inf))
            keep = np.flatnonzero((lower < ceiling) & (whole[:, len(times) :] <= 1 + 1e-12).all(1))
            if len(keep) > width:
                order = keep[np.argsort(lower[keep], kind="stable")]
                bound = min(bound, float(lower[order[width]]))
                keep = order[:width]
            cuts = np.concatenate([cuts[row[keep]], end[keep, None]], 1)
            sums, highest = sums[keep], highest[keep]
        return Found(cuts, bound)
