"""The batch as a part of the plan: rows per second of growing batches, and the smallest one that is about the fastest.

    rows per second = B / t(B),  t(B) = t_passes B + t_update + t_exposed(B)

A larger batch spreads the update and the messages of a step over more rows, until the passes are all that counts.
Beyond that, it costs memory and learns less from each row (the critical batch). So the choice is the smallest batch
whose speed is within `NEAR` of the best. Batches are powers of two times the odd part of the number of devices. Each
has a search of its own: reading the weights takes longer than the products of few rows, so seconds are not
proportional to rows.

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

NEAR = 0.03
"""Share by which the rows per second of the chosen batch may be below those of the best one."""
LEAST_GAIN = 0.01
"""Gain of a doubled batch in rows per second below which no larger batch is tried."""
MOST_DOUBLINGS = 12
"""Maximum number of times that the batch is doubled, from one row per device on."""
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
        fitting = [choice for choice in self.choices if choice.fits]
        if not fitting:
            return self.choices[0]
        most_rows = max(choice.rows_per_second for choice in fitting)
        return next(choice for choice in fitting if choice.rows_per_second >= (1 - NEAR) * most_rows)

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
    """Choose a plan for each of several batches, until a larger one brings nothing or does not fit.

    Args:
        experiment: the experiment to plan for; its own batch does not count.
        platform: platform to plan for, such as "tpu v5e:4x4"; its devices need not be present.
        plan: plan with the fixed settings, and the settings that are not searched; the experiment's by default.
        verify: number of plans of the best batch that are compiled.
        make: function that takes a batch, and returns the function which makes the experiment with this batch in the
            process that compiles.
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
        raise UserError(f"objective: got {options['objective']!r}, but a free batch is chosen by rows per second")
    first = search_for(experiment, platform, plan, **options)
    searches: list[Search] = []
    choices: list[PlanChoice] = []
    reason: UserError | None = None
    for batch in candidate_batches(first.platform.devices):
        try:
            resized = dataclasses.replace(experiment, batch=batch)
            search = search_for(resized, first.platform, plan, **options)
            choice = choice_of(search)
        except UserError as error:  # no mesh divides this batch, or a fixed setting does not suit it
            reason = error
            continue
        is_slower = bool(choices) and choice.rows_per_second < (1 + LEAST_GAIN) * choices[-1].rows_per_second
        choices.append(choice)
        searches.append(search)
        if is_slower or not choice.fits:
            break
    if not choices:
        assert reason is not None, "at least one batch is tried"
        raise reason
    best = BatchComparison(tuple(choices)).best
    index = next(number for number, choice in enumerate(choices) if choice is best)
    if verify:
        choices[index] = choice_of(searches[index], verify, None if make is None else make(best.rows))
    if not best.fits:
        choices[index] = dataclasses.replace(best, advice=advice_for(searches[index], best.best))
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
