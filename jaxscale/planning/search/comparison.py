"""The best plans of an experiment on several platforms, side by side."""

import dataclasses
import math
from collections.abc import Callable, Sequence

from jaxscale.planning.search.choice import PlanChoice, plan_summary
from jaxscale.planning.search.prices import ChipPrices
from jaxscale.platforms.platform import Platform
from jaxscale.values.units import duration, size


@dataclasses.dataclass(frozen=True)
class PlatformComparison:
    """The best plan of an experiment on each of several platforms.

    Args:
        choices: the choice for each platform.
        prices: prices of chips; `None` if unknown.
    """

    choices: tuple[PlanChoice, ...]
    prices: ChipPrices | None = None

    @classmethod
    def of(
        cls,
        platforms: Sequence[Platform],
        choose: Callable[[Platform], PlanChoice],
        prices: ChipPrices | None = None,
    ) -> "PlatformComparison":
        """Choose a plan for each platform, and return the comparison.

        Args:
            platforms: platforms to plan for; their devices need not be present.
            choose: function that returns the choice for a platform.
            prices: prices of chips.
        """
        return cls(tuple(choose(platform) for platform in platforms), prices)

    def positions_per_price(self, choice: PlanChoice) -> float:
        """Return the positions (tokens or rows) that are trained per unit of money; 0 if prices are unknown."""
        if self.prices is None:
            return 0.0
        return choice.positions_per_second * 3600 / self.prices.of(choice.platform)

    def best(self, objective: str = "time") -> PlanChoice:
        """Return the best choice by the objective; choices whose plan fits come first.

        Args:
            objective: "time", the most positions (tokens or rows) per second; "memory", the least share of the device
                memory; "cost", the most positions per unit of money; "chips", the fewest chips.
        """

        def sort_key(choice: PlanChoice) -> tuple[bool, float]:
            """Return the key by which choices are compared."""
            if not choice.is_timed:  # its seconds are only relative
                return (True, math.inf)
            if objective == "chips":
                return (not choice.fits, float(choice.platform.chips * choice.platform.slices))
            if objective == "cost":
                return (not choice.fits, -self.positions_per_price(choice))
            if objective == "memory":
                return (not choice.fits, choice.best.device_bytes / (choice.limit or 1))
            return (not choice.fits, -choice.positions_per_second)

        return min(self.choices, key=sort_key)

    def __str__(self) -> str:
        has_one_batch = len({choice.rows for choice in self.choices}) == 1
        platform_texts = [
            str(choice.platform) if has_one_batch else f"{choice.platform}, batch {choice.rows}"
            for choice in self.choices
        ]
        if self.prices is None:
            return choice_table("platform", platform_texts, self.choices)
        bought_position_texts = [
            f"{self.positions_per_price(choice):,.0f}" if choice.is_timed else "" for choice in self.choices
        ]
        return choice_table("platform", platform_texts, self.choices, bought_position_texts)

    __repr__ = __str__


def choice_table(
    heading: str, row_labels: Sequence[str], choices: Sequence[PlanChoice], bought_position_texts: Sequence[str] = ()
) -> str:
    """Return a table of choices as text, one line each: whether the plan fits, bytes, seconds, speed and plan.

    Args:
        heading: heading of the first column.
        row_labels: cells of the first column.
        choices: the choices, one for each row.
        bought_position_texts: cells of the column that shows the tokens (or rows) trained per unit of money; by
            default, the column is left out.
    """
    unit = "tokens" if choices[0].positions > 1 else "rows"
    headings = [
        heading,
        "fits",
        "bytes",
        "step",
        f"{unit}/s",
        "of peak",
        *([f"{unit} for 1"] if bought_position_texts else []),
    ]
    rows = [[*headings, "plan"]]
    for index, (row_label, choice) in enumerate(zip(row_labels, choices, strict=True)):
        cells = [
            row_label,
            "yes" if choice.fits else "no",
            size(choice.best.device_bytes),
            duration(choice.best.seconds.total) if choice.is_timed else "",
            f"{choice.positions_per_second:,.0f}" if choice.is_timed else "",
            "" if choice.mfu is None else f"{choice.mfu:.0%}",
            *([bought_position_texts[index]] if bought_position_texts else []),
        ]
        rows.append([*cells, plan_summary(choice.plan)])
    column_widths = [max(len(row[column]) for row in rows) for column in range(len(headings))]
    return "\n".join(
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, column_widths, strict=False)), row[-1]]).rstrip()
        for row in rows
    )
