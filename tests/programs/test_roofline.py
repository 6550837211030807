"""Rooflines are those of one device, also on a chip that has two."""

import dataclasses

import pytest

from jaxscale.platforms.platform import chips
from jaxscale.programs import roofline


def test_devices_of_a_chip_share_its_rates():
    """A TPU 7x has two devices: each has half of the peak and half of the bandwidth, as their memory is half."""
    chip = chips()["7x"]
    whole = dataclasses.replace(chip, devices=1)
    assert chip.devices == 2
    assert roofline.rate(chip, "bfloat16") == pytest.approx(roofline.DEFAULT_EFFICIENCY * 2307e12 / 2)
    for flop, nbytes in ((1e15, 1.0), (1.0, 1e12)):
        assert roofline.seconds(chip, flop, nbytes) == pytest.approx(2 * roofline.seconds(whole, flop, nbytes))
    assert chip.device_bandwidth == 7380e9 / 2
    assert dataclasses.replace(chip, memory_bandwidth=None).device_bandwidth is None


def test_clocks_are_those_of_the_peaks():
    """The peak of a TPU is a power of two of products in each cycle of its clock."""
    for name, products in {"v4": 2**17, "v5e": 2**16, "v5p": 2**17, "v6e": 2**18, "7x": 2**19}.items():
        chip = chips()[name]
        assert chip.clock is not None
        assert 2 * products * chip.clock == pytest.approx(chip.bfloat16, rel=0.01)
    assert chips()["h100"].clock is None
