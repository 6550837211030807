import itertools
import types

import hypothesis.strategies as st
import jax
import pytest
from hypothesis import given

from jaxscale.errors import UserError
from jaxscale.sharding.mesh import AXES, MeshSpec


@given(st.dictionaries(st.sampled_from(AXES), st.integers(1, 64)))
def test_the_text_form_round_trips(sizes):
    mesh = MeshSpec(**sizes)
    assert MeshSpec.parse(str(mesh)) == mesh


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("fdsp:4", "did you mean 'fsdp'"),
        ("data", "expected AXIS:DEVICES"),
        ("4", "expected AXIS:DEVICES, such as data:4, with one of data, expert, fsdp"),
        ("fsdp=2", "expected AXIS:DEVICES, such as fsdp:2"),
        ("data:two", "expected AXIS:DEVICES"),
        ("data:2,data:4", "got axis data twice, expected it once"),
        ("data:0", "expected a whole number of devices >= 1"),
    ],
)
def test_a_bad_mesh_says_what_is_wrong(text, says):
    with pytest.raises(UserError, match=says):
        MeshSpec.parse(text)


def test_a_mesh_of_more_devices_than_there_are_is_refused():
    with pytest.raises(UserError, match="takes 16 devices, but there are 8"):
        MeshSpec(fsdp=16).build()


def test_the_mesh_has_every_axis_and_its_devices():
    mesh = MeshSpec(data=2, tensor=2).build()
    assert mesh.axis_names == AXES
    assert dict(mesh.shape) == {**dict.fromkeys(AXES, 1), "data": 2, "tensor": 2}
    assert list(mesh.devices.flat) == jax.devices()[:4]


def test_a_mesh_that_leaves_a_process_without_devices_is_refused():
    devices = [types.SimpleNamespace(process_index=index // 4, device_kind="cpu", slice_index=0) for index in range(8)]
    with pytest.raises(UserError, match="takes 4 of 8 devices, so that 1 of 2 processes have none: use a mesh of 8 "):
        MeshSpec(fsdp=4).build(devices)


@pytest.mark.parametrize("text", ["fsdp:8,tensor:2", "data:2,fsdp:8", "fsdp:2,tensor:8", "fsdp:4,tensor:4", "fsdp:16"])
def test_axes_that_are_parts_of_the_torus(monkeypatch, text):
    """Every mesh of powers of two lies on a 4x4 slice of v6e; its innermost axis joins neighbors."""
    kinds = {"platform": "tpu", "device_kind": "TPU v6 lite", "process_index": 0, "core_on_chip": 0}
    devices = [types.SimpleNamespace(**kinds, coords=(x, y, 0)) for y in range(4) for x in range(4)]
    monkeypatch.setattr(jax.sharding, "Mesh", lambda placed, axes, axis_types: placed)
    spec = MeshSpec.parse(text)
    placed = spec.build(devices)
    assert placed.shape == tuple(spec.sizes.values())
    assert {device.coords for device in placed.flat} == {device.coords for device in devices}
    for row in placed.reshape(-1, spec.tensor):
        for one, other in itertools.pairwise(device.coords for device in row):
            assert sum(abs(a - b) for a, b in zip(one, other, strict=True)) <= 2
