import dataclasses
import itertools
import logging
from typing import Any

import jax
import pytest

from jaxscale.platforms import detect as detect_module
from jaxscale.platforms.detect import detect, host_memory
from jaxscale.platforms.platform import Platform


@dataclasses.dataclass
class Device:
    """What `detect` reads of a jax.Device."""

    device_kind: str
    platform: str
    coords: tuple[int, ...] = ()
    slice_index: int = 0
    process_index: int = 0
    statistics: Any = None

    def memory_stats(self):
        return self.statistics


def test_this_machine():
    platform = detect()
    assert platform.chip.kind == "cpu"
    assert platform.devices == len(jax.devices()) == 8
    assert str(platform) == "cpu x 8"
    assert Platform.parse("local") == platform
    assert platform.peak("float32") is None
    assert platform.chip.host_memory == host_memory() > 2**28


def test_an_unknown_gpu_is_a_chip_without_a_peak():
    devices = [Device("NVIDIA GeForce RTX 4090", "gpu", statistics={"bytes_limit": 18 * 2**30}) for _ in range(2)]
    platform = detect(devices)
    assert (platform.chip.kind, platform.chips, platform.peak("bfloat16")) == ("gpu", 2, None)
    assert platform.device_memory == 18 * 2**30
    assert "RTX 4090" in str(platform)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("NVIDIA H100 80GB HBM3", "gpu h100 x 8"),
        ("NVIDIA H200", "gpu h200 x 8"),
        ("NVIDIA A100-SXM4-80GB", "gpu a100-80 x 8"),
        ("NVIDIA B200", "gpu b200 x 8"),
        ("Tesla T4", "gpu t4 x 8"),
        ("NVIDIA L4", "gpu l4 x 8"),
    ],
)
def test_gpus_by_the_names_jax_gives(kind, text):
    platform = detect([Device(kind, "gpu", process_index=index // 4) for index in range(8)])
    assert str(platform) == text
    assert platform.hosts == 2


def slice_of(kind: str, sides: tuple[int, int, int], per_chip: int = 1, slices: int = 1) -> list[Device]:
    places = itertools.product(range(slices), *map(range, sides))
    return [Device(kind, "tpu", place[1:], place[0]) for place in places for _ in range(per_chip)]


@pytest.mark.parametrize(
    ("devices", "text", "count"),
    [
        (slice_of("TPU v5 lite", (2, 4, 1)), "tpu v5e:2x4", 8),
        (slice_of("TPU v6 lite", (4, 4, 1), slices=2), "tpu v6e:4x4 x 2", 32),
        (slice_of("TPU v5p", (2, 2, 1)), "tpu v5p:2x2x1", 4),
        (slice_of("TPU v5", (2, 2, 2)), "tpu v5p:2x2x2", 8),
        (slice_of("TPU v4", (2, 2, 1)), "tpu v4:2x2x1", 4),
        (slice_of("TPU v4", (2, 2, 1), per_chip=2), "tpu v4:2x2x1", 8),
        (slice_of("TPU7x", (2, 2, 1), per_chip=2), "tpu 7x:2x2x1", 8),
    ],
)
def test_tpu_slices_from_coordinates(devices, text, count):
    platform = detect(devices)
    assert str(platform) == text
    assert platform.devices == count


def test_a_part_of_a_slice_has_no_topology():
    platform = detect(slice_of("TPU v5 lite", (2, 2, 1))[:3])
    assert (platform.topology, platform.chips) == (None, 3)


def test_memory_that_the_backend_cannot_tell():
    class Described(Device):
        def memory_stats(self):
            raise RuntimeError("MemoryStats is not supported")

    platform = detect([Described("TPU v5 lite", "tpu", (0, 0, 0))])
    assert platform.device_memory == int(15.75 * 2**30)


@pytest.mark.parametrize("here", [frozenset(), frozenset({"gpu"})])
def test_what_jax_says_of_a_plugin_without_its_gpu_is_not_shown(here, monkeypatch, caplog):
    monkeypatch.setattr(detect_module, "accelerators", lambda: here)
    logger = logging.getLogger("jax._src.xla_bridge")
    monkeypatch.setattr(logger, "filters", [])
    detect_module.hush_absent_gpus()
    logger.error("Jax plugin configuration error: Exception when calling %s.initialize()", "jax_plugins.xla_cuda13")
    logger.error("another matter")
    assert [record.getMessage()[:10] for record in caplog.records] == [*(["Jax plugin"] if here else []), "another ma"]
