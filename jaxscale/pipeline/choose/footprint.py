"""Footprints: the bytes that each rank of a schedule holds, as linear functions of the features of its stages.

A *linear* is an array float[stage, feature] with the coefficients of a linear function of the features in
`chain_cut.py`. A rank holds the weights of its stages (in an asynchronous schedule, several versions of them), the
activations that wait for a backward, the messages at both ends of its stages, and the working bytes of the stage that
runs. The number of waiting activations of each stage changes over time. One point in time covers another if, for every
stage, at least as many activations wait. A rank has one function for each stage that may run and each point in time
that no other covers. The rank needs the maximum of these functions.
"""

from typing import NamedTuple

import numpy as np

from jaxscale.pipeline.choose.chain_cut import FEATURES, INDEX
from jaxscale.pipeline.orders import Schedule
from jaxscale.pipeline.ticks import ticks
from jaxscale.pipeline.versions import ring_slot_count, version_lifetimes

END_MESSAGES = 2
"""Number of messages at each end of a stage: one that is sent and one that is received."""


class Footprint(NamedTuple):
    """The bytes of a rank at one point in time.

    Args:
        rank: the rank.
        linear: float[stage, feature], the bytes as a linear function of the features of `chain_cut.py`.
    """

    rank: int
    linear: np.ndarray


def footprints(schedule: Schedule) -> list[Footprint]:
    """Return the footprints of every rank at the points in time at which the rank may need the most memory.

    Example:
        >>> from jaxscale.pipeline.schedules import METHODS
        >>> rank_footprints = footprints(METHODS["1f1b"].schedule(4, 8))
        >>> [float(linear[rank, INDEX["stash_bytes"]]) for rank, linear in rank_footprints]
        [4.0, 3.0, 2.0, 1.0]
    """
    footprint_list = []
    # by stage, the lifetimes of the versions of its weights
    lifetimes = version_lifetimes(schedule, ticks(schedule)) if schedule.versions else {}
    for rank in range(schedule.ranks):
        stages = schedule.stages_of(rank)
        constant_linear = np.zeros((schedule.stages, len(FEATURES)))
        for stage in stages:
            constant_linear[stage, INDEX["weight_bytes"]] = 1
            constant_linear[stage, INDEX["version_bytes"]] = ring_slot_count(lifetimes[stage]) - 1 if lifetimes else 0
            constant_linear[stage, [INDEX["enters"], INDEX["leaves"]]] = END_MESSAGES
        fullest_counts: list[tuple[int, ...]] = []  # counts at the points in time that no other point covers
        for counts in sorted(schedule.activation_counts(rank), reverse=True):
            if not any(
                all(a <= b for a, b in zip(counts, fuller_counts, strict=True)) for fuller_counts in fullest_counts
            ):
                fullest_counts.append(counts)
        for counts in fullest_counts:
            for running_stage in stages:
                linear = constant_linear.copy()
                linear[list(stages), INDEX["stash_bytes"]] = counts[: len(stages)]
                linear[list(stages), INDEX["between_bytes"]] = counts[len(stages) :]
                linear[running_stage, INDEX["working_bytes"]] = 1
                footprint_list.append(Footprint(rank, linear))
    return footprint_list
