"""The best plans of an experiment on several platforms, side by side."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from jaxscale.planning.search.choice import PlanChoice, choose_plan, summary
from jaxscale.planning.search.prices import ChipPrices
from jaxscale.platforms.platform import Platform
from jaxscale.recipe.experiment import Experiment
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
        experiment: Experiment,
        platforms: Sequence[Platform],
        prices: ChipPrices | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> "PlatformComparison":
        """Choose a plan for each platform, and return the comparison.

        Args:
            experiment: the experiment to plan for.
            platforms: platforms to plan for; their devices need not be present.
            prices: prices of chips.
            options: further arguments of `choose_plan`.
        """
        return cls(tuple(choose_plan(experiment, platform, **(options or {})) for platform in platforms), prices)

    def positions_per_price(self, choice: PlanChoice) -> float:
        """Return the positions (tokens or rows) that a unit of money buys on a platform; 0 without prices."""
        if self.prices is None:
            return 0.0
        return choice.positions_per_second * 3600 / self.prices.of(choice.platform)

    def best(self, objective: str = "time") -> PlanChoice:
        """Return the best choice: one that fits, then by the objective.

        Args:
            objective: "time", the least seconds of a step; "memory", the least share of the device memory; "cost", the
                most positions for a unit of money; "chips", the fewest chips.
        """

        def order(choice: PlanChoice) -> tuple[bool, float]:
            """Return the key by which choices are compared."""
            if not choice.is_timed:  # its seconds are proportions alone
                return (True, math.inf)
            if objective == "chips":
                return (not choice.fits, float(choice.platform.chips * choice.platform.slices))
            if objective == "cost":
                return (not choice.fits, -self.positions_per_price(choice))
            if objective == "memory":
                return (not choice.fits, choice.best.device_bytes / (choice.limit or 1))
            return (not choice.fits, choice.best.seconds.total)

        return min(self.choices, key=order)

    def __str__(self) -> str:
        unit = "tokens" if self.choices[0].positions > 1 else "rows"
        heads = ["platform", "fits", "bytes", "step", f"{unit}/s", "of peak", "plan"]
        if self.prices is not None:
            heads.insert(6, f"{unit} for 1")
        rows = [heads]
        for choice in self.choices:
            mfu_text = "" if choice.mfu is None else f"{choice.mfu:.0%}"
            cells = [
                str(choice.platform),
                "yes" if choice.fits else "no",
                size(choice.best.device_bytes),
                duration(choice.best.seconds.total) if choice.is_timed else "",
                f"{choice.positions_per_second:,.0f}" if choice.is_timed else "",
                mfu_text,
            ]
            if self.prices is not None:
                cells.append(f"{self.positions_per_price(choice):,.0f}" if choice.is_timed else "")
            rows.append([*cells, summary(choice.plan)])
        widths = [max(len(row[column]) for row in rows) for column in range(len(heads) - 1)]
        return "\n".join(
            "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[-1]]).rstrip()
            for row in rows
        )

    __repr__ = __str__
