"""Prices of chips, read from a file of the user. They differ by contract, region and day, so none are shipped."""

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path

from jaxscale.errors import UserError
from jaxscale.platforms.platform import Platform
from jaxscale.values import read_json


@dataclasses.dataclass(frozen=True)
class ChipPrices:
    """Hourly prices of chips.

    Args:
        price_by_chip: price of one chip for an hour, by kind and name such as "tpu v5e" or "gpu h100".
        file_name: name of the file, for error messages.
    """

    price_by_chip: Mapping[str, float]
    file_name: str

    def of(self, platform: Platform) -> float:
        """Return the price of one hour of a whole platform.

        Raises:
            UserError: the file has no price for the platform's chips.

        Example:
            >>> ChipPrices({"tpu v5e": 1.5}, "prices.json").of(Platform.parse("tpu v5e:2x2"))
            6.0
        """
        chip_name = f"{platform.chip.kind} {platform.chip.name}"
        if chip_name not in self.price_by_chip:
            known_text = ", ".join(self.price_by_chip)
            raise UserError(
                f"{self.file_name}: no price for {chip_name!r}, only for {known_text}; add the price of one "
                "chip for an hour"
            )
        return self.price_by_chip[chip_name] * platform.chips * platform.slices


def read_prices(path: str) -> ChipPrices:
    """Read the prices of chips from a JSON file, such as {"tpu v5e": 1.2, "gpu h100": 3.0}.

    Raises:
        UserError: the file cannot be read, names an unknown chip, or has a price that is not a positive number.
    """
    price_by_name = read_json(Path(path))
    if not isinstance(price_by_name, dict) or not price_by_name:
        raise UserError(f'{path}: expected prices by chip, such as {{"tpu v5e": 1.2, "gpu h100": 3.0}}')
    price_by_chip: dict[str, float] = {}
    for name, price in price_by_name.items():
        is_number = isinstance(price, int | float) and not isinstance(price, bool)
        if not is_number or not math.isfinite(price) or price <= 0:
            raise UserError(f"{path}: {name}: got {price!r}, expected the price of one chip for an hour, above 0")
        chip_text = f"{name}:2x2" if name.startswith("tpu") else name
        try:
            chip = Platform.parse(chip_text).chip
        except UserError as error:
            if "has no slice" not in str(error):
                raise UserError(f"{path}: {name!r} is not a known chip: {error}") from None
            chip = Platform.parse(f"{name}:2x2x1").chip
        price_by_chip[f"{chip.kind} {chip.name}"] = float(price)
    return ChipPrices(price_by_chip, path)
