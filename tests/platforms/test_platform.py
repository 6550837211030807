import dataclasses
import importlib
import importlib.util
import math
import subprocess
import sys

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from jaxscale.errors import UserError
from jaxscale.platforms.platform import Platform, chips
from jaxscale.platforms.tpu import topologies

TEXTS = [
    "cpu",
    "cpu x 8",
    "gpu h100",
    "gpu h100 x 64",
    "gpu a100-40 x 8",
    "tpu v5p:4x4x4",
    "tpu v5e:4x4",
    "tpu v6e:16x16 x 4",
    "gpu h100 x 128 over 100Gb/s",
    "tpu v5e:16x16 x 2 over 12.5Gb/s",
    "gpu h100 x 16 over 999999Gb/s",
    "gpu h100 x 16 over 0.000000008Gb/s",
]


@pytest.mark.parametrize("text", TEXTS)
def test_text_round_trips(text):
    platform = Platform.parse(text)
    assert str(platform) == text
    assert Platform.parse(str(platform)) == platform


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("gpu h100:8", "gpu h100 x 8"),
        ("gpu h100x8", "gpu h100 x 8"),
        ("  GPU  A100  x  8 ", "gpu a100-80 x 8"),
        ("cpu:2", "cpu x 2"),
        ("tpu tpu7x:2x2x1", "tpu 7x:2x2x1"),
        ("tpu v5e : 4x4", "tpu v5e:4x4"),
        ("GPU h100x16  over  12.5 GB/s", "gpu h100 x 16 over 100Gb/s"),
    ],
)
def test_other_spellings(text, canonical):
    assert str(Platform.parse(text)) == canonical


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "expected 'local'"),
        ("tpx v5e:4x4", "did you mean 'tpu'"),
        ("h100 x 8", "did you mean 'gpu h100 x 8'"),
        ("v5e:4x4", "did you mean 'tpu v5e:4x4'"),
        ("loca", "did you mean 'local'"),
        ("local x 2", "after 'local'"),
        ("tpu v5q:4x4", "did you mean"),
        ("tpu v5e", "expected chips along each axis"),
        ("tpu v5e:16", "tpu v5e:4x4"),
        ("tpu v5e:2x8", "has no slice 2x8 (16 chips)"),
        ("tpu v5e:0x4", "has no slice"),
        ("tpu v5e:16x20", "has no slice"),
        ("tpu v5p:8x4x4", "did you mean tpu v5p:4x4x8"),
        ("tpu v5p:4x4", "has no slice"),
        ("tpu v4:3x3x3", "did you mean tpu v4:2x2x4 or tpu v4:2x4x4?"),
        ("gpu h10", "did you mean 'h100'"),
        ("gpu h10x8", "did you mean 'h100'"),
        ("gpu rtx4090", "unknown gpu 'rtx4090'"),
        ("gpu", "names no gpu: expected one of"),
        ("gpu h100 x 0", "expected a count"),
        ("gpu h100 x", "expected a count"),
        ("gpu h100 8", "expected a count"),
        ("cpu x -1", "expected a count"),
        ("tpu v5e:4x4 y 2", "expected a count"),
        ("gpu h100 x 8 over", "got '' for the network of a chip, expected Gb/s (bits) or GB/s (bytes)"),
        ("gpu h100 x 8 over 100gb/s", "got '100gb/s' for the network"),
        ("gpu h100 x 8 over 0Gb/s", "got '0Gb/s' for the network"),
        ("gpu h100 x 8 over 9Gb/s over 9Gb/s", "got '9Gb/s over 9Gb/s' for the network"),
        ("gpu h100 x 8 over 0.000000001Gb/s", "got '0.000000001Gb/s' for the network"),
        ("gpu t4 x 8 over 10Gb/s", "the number of t4 in a host is unknown, so that all count as one host"),
        ("cpu x 8 over 1Gb/s", "expected a count"),
    ],
)
def test_refusals_say_what_to_do(text, says):
    with pytest.raises(UserError) as error:
        Platform.parse(text)
    assert says in str(error.value)


WORDS = st.sampled_from(
    ["tpu", "gpu", "cpu", " ", "v5e", "v5p", "h100", ":", "x", "4x4", "2x2x2", "0", "8", "\n", "²", "over", "9Gb/s"]
)


@given(st.lists(WORDS, max_size=7).map("".join) | st.text(max_size=20) | st.integers().map("cpu x {}".format))
@example("gpu h100 x " + "9" * 5000)
@example("tpu v5e:" + "4x" * 500 + "4")
def test_any_text_parses_or_is_the_users_mistake(text):
    if text.strip() == "local":
        return
    try:
        platform = Platform.parse(text)
    except UserError:
        return
    assert Platform.parse(str(platform)) == platform


def test_a_network_of_its_own_replaces_that_of_the_table():
    platform = Platform.parse("gpu h100 x 16 over 100Gb/s")
    links = {link.name: link for link in platform.links}
    table_links = {link.name: link for link in Platform.parse("gpu h100 x 16").links}
    assert links.pop("dcn").bandwidth == 12.5e9
    assert table_links.pop("dcn").bandwidth == 50e9
    assert links == table_links
    with pytest.raises(UserError, match="got a network of 0 bytes/s, expected more than 0"):
        dataclasses.replace(platform, network=0)


@given(st.floats(min_value=1e-8, max_value=120_000), st.sampled_from(["Gb/s", "GB/s"]))
def test_any_network_rate_round_trips(rate, unit):
    platform = Platform.parse(f"gpu h100 x 16 over {rate:.9f}{unit}")
    assert Platform.parse(str(platform)) == platform


@pytest.mark.parametrize("chip", chips().values(), ids=chips())
def test_every_row_has_a_source_and_sane_facts(chip):
    assert chip.source
    assert all(link.source for link in chip.links)
    for field in dataclasses.fields(chip):
        value = getattr(chip, field.name)
        if isinstance(value, (int, float)):
            assert value > 0, field.name
    if chip.kind != "cpu":
        # a wrong power of ten: a product reads two operands, so today's chips do 100 to 700 FLOP for a byte of memory
        best = chip.bfloat16 or chip.float16
        assert 100 < best / chip.memory_bandwidth < 700
        assert 1e10 < chip.memory < 1e12
        assert all(1e9 < link.bandwidth < chip.memory_bandwidth for link in chip.links)
    if chip.usable_memory is not None:
        assert 0.9 * chip.memory < chip.usable_memory <= chip.memory
    if chip.int8 is not None and chip.bfloat16 is not None:
        assert 1 <= chip.int8 / chip.bfloat16 <= 2.01


def test_device_kinds_name_one_chip_each():
    kinds = [kind for chip in chips().values() for kind in chip.device_kinds]
    assert len(kinds) == len(set(kinds))


def test_peaks_agree_with_the_table_that_jax_ships():
    tpu_info = next(filter(importlib.util.find_spec, ("jax._src.tpu_info", "jax._src.pallas.mosaic.tpu_info")))
    tpu_info = importlib.import_module(tpu_info)
    for name in ("v4", "v5e", "v5p", "v6e", "7x"):
        chip, cores = chips()[name], 2 if name in ("v4", "v5p", "7x") else 1
        facts = tpu_info.get_tpu_info_for_chip(tpu_info.ChipVersion(name), 1)
        assert chip.bfloat16 == pytest.approx(cores * facts.bf16_ops_per_second, rel=0.01)
        assert chip.memory == pytest.approx(cores * facts.hbm_capacity_bytes, rel=0.01)
        assert chip.memory_bandwidth == pytest.approx(cores * facts.mem_bw_bytes_per_second, rel=0.13)


def test_peak_follows_the_precision_that_jax_defaults_to():
    platform = Platform.parse("gpu h100 x 8")
    assert platform.peak("bfloat16") == 8 * 989.4e12
    assert platform.peak("float32") == 8 * platform.chip.tf32
    assert platform.peak("float8_e4m3fn") == 8 * platform.chip.float8
    assert Platform.parse("tpu v5e:4x4").peak("float32") == 16 * 197e12
    assert Platform.parse("gpu t4").peak("bfloat16") is None
    assert Platform.parse("cpu x 8").peak("float32") is None


def test_two_devices_of_a_chip_share_its_memory():
    platform = Platform.parse("tpu 7x:2x2x1")
    assert platform.devices == 8
    assert platform.device_memory == platform.chip.usable_memory // 2
    assert Platform.parse("tpu v5e:4x4 x 2").devices == 32
    assert Platform.parse("tpu v5e:4x4 x 2").hosts == 4


@pytest.mark.parametrize(("name", "most"), [("v4", 4096), ("v5p", 6144), ("7x", 9216), ("v5e", 256), ("v6e", 256)])
def test_topologies_are_unique_and_end_at_the_largest_job(name, most):
    shapes = topologies(name)
    assert len(shapes) == len(set(shapes))
    assert max(map(math.prod, shapes)) <= most
    assert all(Platform.parse(f"tpu {name}:{'x'.join(map(str, shape))}").topology == shape for shape in shapes[:12])


def test_the_published_v5p_shapes_exist():
    # Cloud TPU documentation, TPU v5p, table of single-slice shapes
    published = "2x2x1 2x2x2 2x4x4 4x4x4 4x4x8 4x8x8 8x8x8 8x8x16 8x16x16 16x16x16 16x16x24"
    assert {tuple(map(int, text.split("x"))) for text in published.split(" ")} <= set(topologies("v5p"))


def test_facts_need_no_jax():
    program = (
        "import sys; from jaxscale.platforms.platform import Platform; Platform.parse('tpu v5e:4x4'); "
        "Platform.parse('gpu h100 x 8'); sys.exit('jax' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
