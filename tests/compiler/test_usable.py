import dataclasses

import pytest

from jaxscale.compiler.gpu_target import TARGETS, target_config, topology_text
from jaxscale.compiler.usable import usable_bytes
from jaxscale.errors import UserError
from jaxscale.platforms.detect import host_memory
from jaxscale.platforms.platform import GiB, Platform, chips

NAME = "XLA_PYTHON_CLIENT_MEM_FRACTION"


@pytest.fixture(autouse=True)
def unset(monkeypatch):
    monkeypatch.delenv(NAME, raising=False)


@pytest.mark.parametrize(
    ("text", "gib"),
    [("v4:2x2x1", 30.75), ("v5e:4x4", 15.75), ("v5p:2x2x1", 95.73), ("v6e:2x2", 31.24), ("7x:2x2x1", 94.74)],
)
def test_a_tpu_s_is_what_its_compiler_grants(text, gib):
    assert usable_bytes(Platform.parse(f"tpu {text}")) == pytest.approx(gib * GiB)


def test_a_gpu_s_is_jaxs_pool(monkeypatch):
    platform = Platform.parse("gpu h100 x 8")
    assert usable_bytes(platform) == int(0.75 * 84942979072)
    monkeypatch.setenv(NAME, "0.9")
    assert usable_bytes(platform) == int(0.9 * 84942979072)
    granted = dataclasses.replace(platform, chip=dataclasses.replace(platform.chip, usable_memory=60 * GiB))
    assert usable_bytes(granted) == 60 * GiB
    for text in ("half", "0", "-1", "nan"):
        monkeypatch.setenv(NAME, text)
        with pytest.raises(UserError, match=f"{NAME}='{text}'.*such as 0.9"):
            usable_bytes(platform)


def test_virtual_cpu_devices_share_the_host():
    assert usable_bytes(Platform.parse("cpu x 8")) == host_memory() // 8


def test_target_configurations_fit_the_chip_table():
    known = chips()
    assert {"a100-80", "h100", "h200", "b200"} <= set(TARGETS)
    for name, target in TARGETS.items():
        # the driver reports a little more than the datasheet's 10^9 bytes, or what error correction leaves of it
        assert 0.97 < target.memory_bytes / known[name].memory < 1.08, name
        text = target_config(known[name])
        assert f"core_count: {target.core_count}" in text
        assert f'device_description_str: "{known[name].device_kinds[0]}"' in text


def test_gpus_lie_in_hosts():
    texts = {"gpu h100": "1x1x1", "gpu h100 x 4": "1x1x4", "gpu h100 x 8": "1x1x8", "gpu h100 x 64": "1x8x8"}
    assert {text: topology_text(Platform.parse(text)) for text in texts} == texts
