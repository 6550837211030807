"""Footprints: the bytes that each rank of a schedule holds, as linear functions of its stages' features.

A rank holds its stages' weights (of an asynchronous schedule: several versions), what waits for a backward, the
messages at its stages' ends, and what works at the time. What waits depends on the schedule: at some moments many
activations of one stage, at others of another. Each moment that no other covers is one function; the rank needs the
most of them.
"""

from typing import NamedTuple

import numpy as np

from jaxscale.pipeline.chain_cut import AT, FEATURES
from jaxscale.pipeline.schedule import Kind, Schedule
from jaxscale.pipeline.ticks import ticks
from jaxscale.pipeline.versions import lives, ring

MESSAGES = 2
"""At each end of a stage: one that goes, one that comes."""


class Footprint(NamedTuple):
    """What a rank holds at some moment.

    Args:
        rank: who.
        linear: float[stage, feature]: bytes, as a linear function of the features of `chain_cut.py`.
    """

    rank: int
    linear: np.ndarray


def footprints(schedule: Schedule) -> list[Footprint]:
    """Every moment of every rank that may be its fullest.

    Example:
        >>> from jaxscale.pipeline.schedules import METHODS
        >>> found = footprints(METHODS["1f1b"].schedule(4, 8))
        >>> [float(one.linear[one.rank, AT["stash_bytes"]]) for one in found]
        [4.0, 3.0, 2.0, 1.0]
    """
    found = []
    lived = lives(schedule, ticks(schedule)) if schedule.versions else {}
    for rank in range(schedule.ranks):
        stages = schedule.stages_of(rank)
        always = np.zeros((schedule.stages, len(FEATURES)))
        for stage in stages:
            always[stage, AT["weight_bytes"]] = 1
            always[stage, AT["version_bytes"]] = ring(lived[stage]) - 1 if lived else 0
            always[stage, [AT["enters"], AT["leaves"]]] = MESSAGES
        for moment in _moments(schedule, rank):
            for working in stages:
                linear = always.copy()
                linear[list(stages), AT["stash_bytes"]] = moment[: len(stages)]
                linear[list(stages), AT["between_bytes"]] = moment[len(stages) :]
                linear[working, AT["working_bytes"]] = 1
                found.append(Footprint(rank, linear))
    return found


def _moments(schedule: Schedule, rank: int) -> list[tuple[int, ...]]:
    """Activations of each stage of a rank that wait, then those of them between I and W; none covered by another."""
    stages = schedule.stages_of(rank)
    place = {stage: index for index, stage in enumerate(stages)}
    held = [0] * (2 * len(stages))
    seen = set()
    for action in schedule.orders[rank]:
        index = place[action.stage]
        between = index + len(stages)
        if action.kind is Kind.F:
            held[index] += 1
        elif action.kind is Kind.I:
            held[between] += 1
        seen.add(tuple(held))
        if action.kind in (Kind.B, Kind.W):
            held[index] -= 1
            held[between] -= action.kind is Kind.W
    fullest = []
    for one in sorted(seen, reverse=True):
        if not any(all(a <= b for a, b in zip(one, other, strict=True)) for other in fullest):
            fullest.append(one)
    return fullest
