"""The batch as a part of the plan: plans for growing batches, and the smallest batch that is about as fast as any.

    rows per second = B / t(B),  t(B) = t_passes B + t_update + t_exposed(B)

Here t(B) is the seconds of a step of B rows. A larger batch spreads the update and the exposed messages of a step over
more rows, until only the passes count. Beyond that, it takes more memory, and a run learns less from each row (the
critical batch). So the choice is the smallest batch whose speed is within `NEAR_SHARE` of the best. From an eighth of a
row per device on, the batch is doubled until the next one is hardly faster, does not fit, or exceeds the rows of the
data. Each batch has its own search, because seconds are not proportional to rows: with few rows, reading the weights
takes longer than the matrix products.

References:
    McCandlish et al. 2018, "An empirical model of large-batch training" (arXiv:1812.06162).
"""

import dataclasses
from collections.abc import Callable, Collection, Iterator

from jaxscale.errors import UserError
from jaxscale.planning.search.advice import advice_for
from jaxscale.planning.search.choice import PlanChoice, check_verify, choice_of, search_for
from jaxscale.planning.search.comparison import choice_table
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
        note: why no larger batch was tried although the last one was faster than the one before; "" if it was not.
    """

    choices: tuple[PlanChoice, ...]
    note: str = ""

    @property
    def best(self) -> PlanChoice:
        """The choice for the smallest batch that is about as fast as the fastest; if none fits, the least bytes."""
        return self.choices[self.best_index]

    @property
    def best_index(self) -> int:
        """The index of the best choice."""
        speeds = [(index, choice.rows_per_second) for index, choice in enumerate(self.choices) if choice.fits]
        if not speeds:
            return min(range(len(self.choices)), key=lambda index: self.choices[index].best.device_bytes)
        most_rows = max(rows_per_second for _, rows_per_second in speeds)
        return next(index for index, rows_per_second in speeds if rows_per_second >= (1 - NEAR_SHARE) * most_rows)

    def __str__(self) -> str:
        table = choice_table("batch", [str(choice.rows) for choice in self.choices], self.choices)
        return f"{table}\n{self.note}" if self.note else table

    __repr__ = __str__


def choose_batch(
    experiment: Experiment,
    platform: Platform | str = "local",
    plan: Plan | None = None,
    *,
    fixed: Collection[str] = (),
    forbidden: Collection[str] = (),
    limit: int | str | None = None,
    host_limit: int | str | None = None,
    verify: int = 0,
    make: Callable[[int], Callable[[], Experiment]] | None = None,
) -> BatchComparison:
    """Choose a plan for each of several batches, until a larger one is hardly faster or does not fit.

    Args:
        experiment: the experiment to plan for; its own batch is ignored.
        platform: platform to plan for, such as "tpu v5e:4x4"; its devices need not be present.
        plan: plan with the fixed settings, and the settings that are not searched; the experiment's by default.
        fixed: names of the settings that keep their values in `plan`, as in `choose_plan`.
        forbidden: names of the settings that keep their defaults.
        limit: bytes of device memory per device to plan for, or a text such as "12GiB".
        host_limit: bytes of host memory per device, or a text.
        verify: number of plans of the best batch that are compiled; of the next best one, if none of these fits.
        make: function that returns, for a batch, the argument `make` of `choose_plan`: a function that returns the
            experiment with this batch.

    Raises:
        UserError: an argument is invalid, or every plan of every batch is refused.

    Example:
        >>> from jaxscale.models import Decoder
        >>> from jaxscale.data import Text
        >>> model = Decoder(vocab=256, context=64, layers=2, embed=64, heads=4)
        >>> forbidden = ("pipeline", "offload", "tensor", "sequence", "microbatches", "memory")
        >>> experiment = Experiment("tiny", model, Text("text.txt"))
        >>> comparison = choose_batch(experiment, "gpu h100", limit="16MiB", forbidden=forbidden)
        >>> comparison.best.fits, comparison.best.rows, [choice.rows for choice in comparison.choices]
        (True, 8, [1, 2, 4, 8, 16])
    """
    check_verify(verify)
    search = search_for(
        experiment, platform, plan, fixed=fixed, forbidden=forbidden, limit=limit, host_limit=host_limit
    )
    base_plan, device_count = search.choices.base, search.platform.devices
    has_fixed_mesh = "mesh" in fixed and base_plan.mesh is not None
    batch_unit = base_plan.mesh.batch_shards if has_fixed_mesh and base_plan.mesh is not None else device_count
    row_limit = getattr(experiment.data, "row_count", None)
    choices: list[PlanChoice] = []
    first_error: UserError | None = None
    note = f"larger batches than {batch_unit << MOST_DOUBLINGS} rows are not tried, and may be faster"
    for batch in candidate_batches(batch_unit):
        if row_limit is not None and batch > row_limit and choices:
            note = f"the data have {row_limit} rows: larger batches are not tried"
            break
        try:
            choice = choice_of(search.for_experiment(dataclasses.replace(experiment, batch=batch)))
        except UserError as error:  # no mesh divides this batch, or a fixed setting does not suit it
            if first_error is not None and str(error) == str(first_error):  # the batch is not the reason
                raise
            first_error = first_error or error
            continue
        is_hardly_faster = bool(choices) and choice.rows_per_second < (1 + LEAST_GAIN) * choices[-1].rows_per_second
        # a small batch may use few devices, which hold more bytes each
        is_too_large = not choice.fits and (choice.devices == device_count or any(earlier.fits for earlier in choices))
        choices.append(choice)
        if is_hardly_faster or is_too_large:
            note = ""
            break
    if not choices:
        assert first_error is not None, "at least one batch is tried"
        raise first_error
    comparison = BatchComparison(tuple(choices), note)
    compiled_batches: set[int] = set()
    while verify and comparison.best.fits and comparison.best.rows not in compiled_batches:  # until the compiler agrees
        index, batch = comparison.best_index, comparison.best.rows
        compiled_batches.add(batch)
        resized_search = search.for_experiment(dataclasses.replace(experiment, batch=batch))
        choice = choice_of(resized_search, verify, None if make is None else make(batch))
        later_choices = comparison.choices[index + 1 :] if choice.fits else ()  # a larger batch needs more memory
        comparison = BatchComparison((*comparison.choices[:index], choice, *later_choices), note)
    if comparison.best.fits:
        return comparison
    index = comparison.best_index
    resized_search = search.for_experiment(dataclasses.replace(experiment, batch=comparison.best.rows))
    best_with_advice = dataclasses.replace(comparison.best, advice=advice_for(resized_search, comparison.best.best))
    return BatchComparison((*comparison.choices[:index], best_with_advice, *comparison.choices[index + 1 :]), note)


def candidate_batches(unit: int) -> Iterator[int]:
    """Yield the batches that may be tried, the smallest first.

    Args:
        unit: number of rows that all devices share evenly: one for each device, or for each shard of a fixed mesh.

    Example:
        >>> list(candidate_batches(6))[:4], list(candidate_batches(16))[:4]
        ([3, 6, 12, 24], [2, 4, 8, 16])
    """
    batch = unit
    for _ in range(MOST_HALVINGS):
        if batch % 2 == 0:
            batch //= 2
    while batch <= unit << MOST_DOUBLINGS:
        yield batch
        batch *= 2
