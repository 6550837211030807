"""Footprints: the bytes that each rank of a schedule holds, as linear functions of its stages' features.

A rank holds its stages' weights (of an asynchronous schedule: several versions), the activations that wait for a
backward, the messages at its stages' ends, and the working bytes of the running stage. The waiting activations depend
on the schedule: at some moments many of one stage, at others of another. Each moment that no other covers is one
function; the rank needs their maximum.
"""

from typing import NamedTuple

import numpy as np

from jaxscale.pipeline.choose.chain_cut import FEATURES, INDEX
from jaxscale.pipeline.schedule import Kind, Schedule
from jaxscale.pipeline.ticks import ticks
from jaxscale.pipeline.versions import lives, ring

MESSAGES = 2
"""Messages at each end of a stage: one sent, one received."""


class Footprint(NamedTuple):
    """The bytes of a rank at some moment.

    Args:
        rank: the rank.
        linear: float[stage, feature]: bytes, as a linear function of the features of `chain_cut.py`.
    """

    rank: int
    linear: np.ndarray


def footprints(schedule: Schedule) -> list[Footprint]:
    """Every moment of every rank that may be its fullest.

    Example:
        >>> from jaxscale.pipeline.schedules import METHODS
        >>> moments = footprints(METHODS["1f1b"].schedule(4, 8))
        >>> [float(linear[rank, INDEX["stash_bytes"]]) for rank, linear in moments]
        [4.0, 3.0, 2.0, 1.0]
    """
    moments = []
    lifetimes = lives(schedule, ticks(schedule)) if schedule.versions else {}
    for rank in range(schedule.ranks):
        stages = schedule.stages_of(rank)
        constant = np.zeros((schedule.stages, len(FEATURES)))
        for stage in stages:
            constant[stage, INDEX["weight_bytes"]] = 1
            constant[stage, INDEX["version_bytes"]] = ring(lifetimes[stage]) - 1 if lifetimes else 0
            constant[stage, [INDEX["enters"], INDEX["leaves"]]] = MESSAGES
        for waiting in _moments(schedule, rank):
            for running in stages:
                linear = constant.copy()
                linear[list(stages), INDEX["stash_bytes"]] = waiting[: len(stages)]
                linear[list(stages), INDEX["between_bytes"]] = waiting[len(stages) :]
                linear[running, INDEX["working_bytes"]] = 1
                moments.append(Footprint(rank, linear))
    return moments


def _moments(schedule: Schedule, rank: int) -> list[tuple[int, ...]]:
    """Waiting activations of each stage of a rank, then those of them between I and W; no moment covers another."""
    stages = schedule.stages_of(rank)
    position = {stage: index for index, stage in enumerate(stages)}
    counts = [0] * (2 * len(stages))
    moments = set()
    for action in schedule.orders[rank]:
        index = position[action.stage]
        between_index = index + len(stages)
        if action.kind is Kind.F:
            counts[index] += 1
        elif action.kind is Kind.I:
            counts[between_index] += 1
        moments.add(tuple(counts))
        if action.kind in (Kind.B, Kind.W):
            counts[index] -= 1
            counts[between_index] -= action.kind is Kind.W
    fullest = []
    for moment in sorted(moments, reverse=True):
        if not any(all(a <= b for a, b in zip(moment, larger, strict=True)) for larger in fullest):
            fullest.append(moment)
    return fullest
