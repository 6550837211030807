"""Machines of one kind, smaller and larger than a given one, and the smallest on which an experiment fits."""

import dataclasses
import math
from collections.abc import Iterable, Iterator

from jaxscale.errors import UserError
from jaxscale.planning.search.ranked import JudgedPlan
from jaxscale.planning.search.search import LEAST_EXCESS, Search
from jaxscale.platforms.platform import Platform

MAX_GROWTH = 64
"""Largest machine that is tried, as a multiple of the user's."""


def smallest_machine(search: Search) -> tuple[Platform, JudgedPlan] | None:
    """Return the smallest larger machine of this kind that an experiment fits, with a plan; `None` if there is none.

    Args:
        search: a search for the machine on which nothing fits.
    """
    return first_that_fits(search, larger(search.platform))


def first_that_fits(search: Search, platforms: Iterable[Platform]) -> tuple[Platform, JudgedPlan] | None:
    """Return the first of several machines that an experiment fits, with the best plan there.

    Args:
        search: a search for a machine of the same kind, whose limits hold for all of them.
        platforms: the machines.
    """
    for platform in platforms:
        other_search = dataclasses.replace(search, platform=platform, objective="time", estimates=[])
        smallest = other_search.candidates[1]
        if search.limit is not None and all(LEAST_EXCESS * one.bytes > search.limit for one in smallest):
            continue
        try:
            best = other_search.run().plans[0]
        except UserError:  # every plan is refused
            continue
        if best.fits:
            return platform, best
    return None


def smaller(platform: Platform) -> Iterator[Platform]:
    """Yield machines of a kind up to one machine, the smallest first; the machine itself is the last.

    Example:
        >>> [str(machine) for machine in smaller(Platform.parse("tpu v5e:4x4"))]
        ['tpu v5e:1x1', 'tpu v5e:2x2', 'tpu v5e:2x4', 'tpu v5e:4x4']
        >>> [str(machine) for machine in smaller(Platform.parse("gpu h100 x 6"))]
        ['gpu h100', 'gpu h100 x 2', 'gpu h100 x 4', 'gpu h100 x 6']
    """
    if platform.chip.kind == "tpu":
        from jaxscale.platforms.tpu import topologies

        last_count = 0
        for topology in topologies(platform.chip.name):
            count = math.prod(topology)
            if last_count < count < platform.chips * platform.slices:
                last_count = count
                yield dataclasses.replace(platform, chips=count, topology=topology, slices=1)
    else:
        count = 1
        while count < platform.chips:
            yield dataclasses.replace(platform, chips=count)
            count *= 2
    yield platform


def larger(platform: Platform) -> Iterator[Platform]:
    """Yield larger machines of a kind, each at least twice as large as the one before.

    Example:
        >>> [str(machine) for machine in larger(Platform.parse("tpu v5e:4x4"))][:2]
        ['tpu v5e:4x8', 'tpu v5e:8x8']
        >>> [str(machine) for machine in larger(Platform.parse("gpu h100 x 8"))][:2]
        ['gpu h100 x 16', 'gpu h100 x 32']
    """
    if platform.chip.kind == "gpu":
        count = platform.chips * 2
        while count <= MAX_GROWTH * platform.chips:
            yield dataclasses.replace(platform, chips=count)
            count *= 2
    elif platform.chip.kind == "tpu":
        from jaxscale.platforms.tpu import topologies

        last_count = platform.chips
        for topology in topologies(platform.chip.name):
            count = math.prod(topology)
            if 2 * last_count <= count <= MAX_GROWTH * platform.chips:
                last_count = count
                yield dataclasses.replace(platform, chips=count, topology=topology)
