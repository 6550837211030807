"""The best plans of an experiment on several platforms, side by side."""

import dataclasses
import math
from collections.abc import Callable, Sequence

from jaxscale.planning.search.choice import PlanChoice, summary
from jaxscale.planning.search.prices import ChipPrices
from jaxscale.platforms.platform import Platform
from jaxscale.values.units import duration, size


@dataclasses.dataclass(frozen=True)
class PlatformComparison:
    """The best plan of an experiment on each of several platforms.

    Args:
        choices: the choice for each platform.
        prices: prices of chips; `None` without prices.
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
        """Return the positions (tokens or rows) that a unit of money buys on a platform; 0 without prices."""
        if self.prices is None:
            return 0.0
        return choice.positions_per_second * 3600 / self.prices.of(choice.platform)

    def best(self, objective: str = "time") -> PlanChoice:
        """Return the best choice by the objective; choices whose plan fits come first.

        Args:
            objective: "time", the most positions (tokens or rows) a second; "memory", the least share of the device
                memory; "cost", the most positions for a unit of money; "chips", the fewest chips.
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
        names = [str(choice.platform) for choice in self.choices]
        if self.prices is None:
            return choice_table("platform", names, self.choices)
        bought_counts = [
            f"{self.positions_per_price(choice):,.0f}" if choice.is_timed else "" for choice in self.choices
        ]
        return choice_table("platform", names, self.choices, bought_counts)

    __repr__ = __str__


def choice_table(
    heading: str, names: Sequence[str], choices: Sequence[PlanChoice], bought_positions: Sequence[str] = ()
) -> str:
    """Return a table of choices as text, one line each: whether the plan fits, bytes, seconds, speed and plan.

    Args:
        heading: heading of the first column.
        names: cells of the first column.
        choices: the choices, one for each name.
        bought_positions: cells of a column with the positions that a unit of money buys; without them, no column.
    """
    unit = "tokens" if choices[0].positions > 1 else "rows"
    headings = [
        heading,
        "fits",
        "bytes",
        "step",
        f"{unit}/s",
        "of peak",
        *([f"{unit} for 1"] if bought_positions else []),
    ]
    rows = [[*headings, "plan"]]
    for index, (name, choice) in enumerate(zip(names, choices, strict=True)):
        cells = [
            name,
            "yes" if choice.fits else "no",
            size(choice.best.device_bytes),
            duration(choice.best.seconds.total) if choice.is_timed else "",
            f"{choice.positions_per_second:,.0f}" if choice.is_timed else "",
            "" if choice.mfu is None else f"{choice.mfu:.0%}",
            *([bought_positions[index]] if bought_positions else []),
        ]
        rows.append([*cells, summary(choice.plan)])
    widths = [max(len(row[column]) for row in rows) for column in range(len(headings))]
    return "\n".join(
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[-1]]).rstrip()
        for row in rows
    )
