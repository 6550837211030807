"""The batch as a part of the plan: plans for growing batches, and the smallest batch that is about as fast as any.

    rows per second = B / t(B),  t(B) = t_passes B + t_update + t_exposed(B)

Here t(B) is the seconds of a step of B rows. A larger batch spreads the update and the exposed messages of a step over
more rows, until only the passes count. Beyond that, it takes more memory, and a run learns less from each row (the
critical batch). So the choice is the smallest batch whose speed is within `NEAR_SHARE` of the best. Batches are powers
of two times the odd part of the number of devices. Each batch has its own search, because seconds are not proportional
to rows: with few rows, reading the weights takes longer than the matrix products.

References:
    McCandlish et al. 2018, "An empirical model of large-batch training" (arXiv:1812.06162).
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from jaxscale.errors import UserError
from jaxscale.planning.search.advice import advice_for
from jaxscale.planning.search.choice import PlanChoice, check_verify, choice_of, search_for
from jaxscale.planning.search.comparison import choice_table
from jaxscale.planning.search.search import Search
from jaxscale.platforms.platform import Platform
from jaxscale.recipe.experiment import Experiment
from jaxscale.recipe.plan import Plan

NEAR_SHARE = 0.03
"""Share by which the rows per second of the chosen batch may be below those of the best one."""
LEAST_GAIN = 0.01
"""Least relative gain in rows per second of a doubled batch; below it, no larger batch is tried."""
MOST_DOUBLINGS = 12
"""Maximum number of times that the batch is doubled, starting from one row per device."""
MOST_HALVINGS = 3
"""Maximum number of times that one row per device is halved, for models that are split over several devices."""


@dataclasses.dataclass(frozen=True)
class BatchComparison:
    """The best plans of an experiment on one platform for growing batches.

    Args:
        choices: the choice for each batch, the smallest batch first; the last one may not fit.
    """

    choices: tuple[PlanChoice, ...]

    @property
    def best(self) -> PlanChoice:
        """The choice for the smallest batch that is about as fast as the fastest; the first one if none fits."""
        return self.choices[self.best_index]

    @property
    def best_index(self) -> int:
        """The index of the best choice."""
        speeds = [(index, choice.rows_per_second) for index, choice in enumerate(self.choices) if choice.fits]
        if not speeds:
            return 0
        most_rows = max(rows_per_second for _, rows_per_second in speeds)
        return next(index for index, rows_per_second in speeds if rows_per_second >= (1 - NEAR_SHARE) * most_rows)

    def __str__(self) -> str:
        return choice_table("batch", [str(choice.rows) for choice in self.choices], self.choices)

    __repr__ = __str__


def choose_batch(
    experiment: Experiment,
    platform: Platform | str = "local",
    plan: Plan | None = None,
    *,
    verify: int = 0,
    make: Callable[[int], Callable[[], Experiment]] | None = None,
    **options: Any,
) -> BatchComparison:
    """Choose a plan for each of several batches, until a larger one is hardly faster or does not fit.

    Args:
        experiment: the experiment to plan for; its own batch is ignored.
        platform: platform to plan for, such as "tpu v5e:4x4"; its devices need not be present.
        plan: plan with the fixed settings, and the settings that are not searched; the experiment's by default.
        verify: number of plans of the best batch that are compiled; of the next best one, if none of these fits.
        make: function that returns, for a batch, the argument `make` of `choose_plan`: a function that returns the
            experiment with this batch.
        options: further arguments of `choose_plan`: fixed, forbidden, limit and host_limit.

    Raises:
        UserError: an argument is invalid, or every plan of every batch is refused.

    Example:
        >>> from jaxscale.models import Decoder
        >>> from jaxscale.data import Text
        >>> model = Decoder(vocab=256, context=64, layers=2, embed=64, heads=4)
        >>> forbidden = ("pipeline", "offload", "tensor", "sequence", "microbatches", "memory")
        >>> experiment = Experiment("tiny", model, Text("text.txt"))
        >>> comparison = choose_batch(experiment, "gpu h100", limit="1GiB", forbidden=forbidden)
        >>> comparison.best.fits, comparison.best.rows >= 32
        (True, True)
    """
    check_verify(verify)
    if options.get("objective", "time") != "time":
        raise UserError(
            f"objective: got {options['objective']!r}, but a free batch is chosen by rows per second; omit it"
        )
    base_search = search_for(experiment, platform, plan, **options)
    searches: list[Search] = []
    choices: list[PlanChoice] = []
    last_error: UserError | None = None
    for batch in candidate_batches(base_search.platform.devices):
        try:
            resized_experiment = dataclasses.replace(experiment, batch=batch)
            search = search_for(resized_experiment, base_search.platform, plan, **options)
            choice = choice_of(search)
        except UserError as error:  # no mesh divides this batch, or a fixed setting does not suit it
            last_error = error
            continue
        is_hardly_faster = bool(choices) and choice.rows_per_second < (1 + LEAST_GAIN) * choices[-1].rows_per_second
        choices.append(choice)
        searches.append(search)
        if is_hardly_faster or not choice.fits:
            break
    if not choices:
        assert last_error is not None, "at least one batch is tried"
        raise last_error
    comparison = BatchComparison(tuple(choices))
    index = comparison.best_index
    compiled_indices: set[int] = set()
    while verify and comparison.best.fits and index not in compiled_indices:  # until the compiler agrees
        compiled_indices.add(index)
        choices[index] = choice_of(searches[index], verify, None if make is None else make(comparison.best.rows))
        comparison = BatchComparison(tuple(choices))
        index = comparison.best_index
    if not comparison.best.fits:
        advice = advice_for(searches[index], comparison.best.best)
        choices[index] = dataclasses.replace(comparison.best, advice=advice)
    return BatchComparison(tuple(choices))


def candidate_batches(device_count: int) -> Iterator[int]:
    """Yield the batches that may be tried on a number of devices, the smallest first.

    Example:
        >>> list(candidate_batches(6))[:4], list(candidate_batches(16))[:4]
        ([3, 6, 12, 24], [2, 4, 8, 16])
    """
    batch = device_count
    for _ in range(MOST_HALVINGS):
        if batch % 2 == 0:
            batch //= 2
    while batch <= device_count << MOST_DOUBLINGS:
        yield batch
        batch *= 2
