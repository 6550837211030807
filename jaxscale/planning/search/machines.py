"""Smaller and larger machines of the same kind as a given machine, and the smallest on which a plan fits."""

import dataclasses
import math
from collections.abc import Iterable, Iterator

from jaxscale.errors import UserError
from jaxscale.planning.search.ranked import JudgedPlan
from jaxscale.planning.search.search import LEAST_BYTES_RATIO, Search
from jaxscale.platforms.platform import Platform

MAX_GROWTH = 64
"""Number of chips of the largest machine that is tried, as a multiple of those of the user's machine."""


def smallest_machine(search: Search) -> tuple[Platform, JudgedPlan] | None:
    """Return the smallest sufficient machine of the same kind, with the best plan on it; `None` if there is none.

    Only machines that are larger than the machine of the search are tried.

    Args:
        search: a search for a machine on which no plan fits.
    """
    return first_that_fits(search, larger_machines(search.platform))


def first_that_fits(search: Search, platforms: Iterable[Platform]) -> tuple[Platform, JudgedPlan] | None:
    """Return the first machine on which a plan fits, and the best plan on it; `None` if there is no such machine.

    Args:
        search: a search for a machine of the same kind; its limits hold for all machines.
        platforms: the machines to try, in order.
    """
    for platform in platforms:
        platform_search = dataclasses.replace(search, platform=platform, objective="time", estimates=[])
        smallest_candidates = platform_search.candidates[1]
        if search.limit is not None and all(
            LEAST_BYTES_RATIO * candidate.bytes > search.limit for candidate in smallest_candidates
        ):
            continue
        try:
            best_plan = platform_search.run().plans[0]
        except UserError:  # every plan is refused
            continue
        if best_plan.fits:
            return platform, best_plan
    return None


def smaller_machines(platform: Platform) -> Iterator[Platform]:
    """Yield machines of a platform's kind up to its size, the smallest first; the platform itself comes last.

    Example:
        >>> [str(machine) for machine in smaller_machines(Platform.parse("tpu v5e:4x4"))]
        ['tpu v5e:1x1', 'tpu v5e:2x2', 'tpu v5e:2x4', 'tpu v5e:4x4']
        >>> [str(machine) for machine in smaller_machines(Platform.parse("gpu h100 x 6"))]
        ['gpu h100', 'gpu h100 x 2', 'gpu h100 x 4', 'gpu h100 x 6']
    """
    if platform.chip.kind == "tpu":
        from jaxscale.platforms.tpu import topologies

        last_chip_count = 0
        for topology in topologies(platform.chip.name):
            chip_count = math.prod(topology)
            if last_chip_count < chip_count < platform.chips * platform.slices:
                last_chip_count = chip_count
                yield dataclasses.replace(platform, chips=chip_count, topology=topology, slices=1)
    else:
        chip_count = 1
        while chip_count < platform.chips:
            yield dataclasses.replace(platform, chips=chip_count)
            chip_count *= 2
    yield platform


def larger_machines(platform: Platform) -> Iterator[Platform]:
    """Yield larger machines of a platform's kind, each at least twice as large as the one before.

    Example:
        >>> [str(machine) for machine in larger_machines(Platform.parse("tpu v5e:4x4"))][:2]
        ['tpu v5e:4x8', 'tpu v5e:8x8']
        >>> [str(machine) for machine in larger_machines(Platform.parse("gpu h100 x 8"))][:2]
        ['gpu h100 x 16', 'gpu h100 x 32']
    """
    if platform.chip.kind == "gpu":
        chip_count = platform.chips * 2
        while chip_count <= MAX_GROWTH * platform.chips:
            yield dataclasses.replace(platform, chips=chip_count)
            chip_count *= 2
    elif platform.chip.kind == "tpu":
        from jaxscale.platforms.tpu import topologies

        last_chip_count = platform.chips
        for topology in topologies(platform.chip.name):
            chip_count = math.prod(topology)
            if 2 * last_chip_count <= chip_count <= MAX_GROWTH * platform.chips:
                last_chip_count = chip_count
                yield dataclasses.replace(platform, chips=chip_count, topology=topology)
