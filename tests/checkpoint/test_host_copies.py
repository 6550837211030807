"""Copies of the state in the hosts' memory: they come back on any mesh, and what is torn or mixed never does."""

import dataclasses
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fault_injection.mutate import HOST_COPY
from jax.sharding import NamedSharding, PartitionSpec

from jaxscale.checkpoint.array_parts import region_of
from jaxscale.checkpoint.host_copies import HostCopies, forget_copies
from jaxscale.checkpoint.verified import Description
from jaxscale.errors import UserError
from jaxscale.sharding.mesh import MeshSpec


@pytest.fixture(autouse=True)
def _memory(tmp_path, monkeypatch):
    monkeypatch.setenv("JAXSCALE_MEMORY", str(tmp_path / "memory"))
    (tmp_path / "run").mkdir()


def _tree(mesh: str, spec: tuple[str | None, ...], seed: int = 0) -> dict[str, jax.Array]:
    """Arrays of several dtypes; the matrices are split as `spec` specifies."""
    devices = MeshSpec.parse(mesh).build()
    values = np.random.default_rng(seed).normal(size=(8, 12))
    arrays = {
        "w": jnp.asarray(values, jnp.float32),
        "moment": jnp.asarray(values * 100, jnp.int8),
        "small": jnp.asarray(values, jnp.int4),
        "half": jnp.asarray(values, jnp.bfloat16),
    }
    split = NamedSharding(devices, PartitionSpec(*spec))
    whole = NamedSharding(devices, PartitionSpec())
    step = jax.device_put(jnp.asarray(seed, jnp.int32), whole)
    return {name: jax.device_put(array, split) for name, array in arrays.items()} | {"step": step}


def _shapes(tree):
    return {name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding) for name, leaf in tree.items()}


def _copies(tmp_path, tree) -> HostCopies:
    return HostCopies(tmp_path / "run", _shapes(tree))


def _files(copies):
    return sorted(copies.folder.glob("start-*"))


def _assert_equal(arrays, tree):
    assert set(arrays) == set(tree)
    for name, leaf in tree.items():
        assert arrays[name].dtype == leaf.dtype
        assert arrays[name].sharding == leaf.sharding
        np.testing.assert_array_equal(np.asarray(arrays[name]), np.asarray(leaf))


@pytest.mark.parametrize(
    ("mesh", "spec"), [("fsdp:4", ("fsdp",)), ("data:8", ()), ("fsdp:2,tensor:2", ("tensor", "fsdp")), ("1", ())]
)
def test_a_copy_comes_back_on_another_mesh(mesh, spec, tmp_path):
    saved = _tree("fsdp:2,tensor:4", ("fsdp", "tensor"))
    copies = _copies(tmp_path, saved)
    copies.save_arrays(saved, Description(40, 9, {"row": 3}, "plays"))
    copies.wait()
    asked = _tree(mesh, spec)
    restored = _copies(tmp_path, asked).restore_arrays(_shapes(asked), 39, 100)
    _assert_equal(restored.arrays, asked)
    assert restored.description == Description(40, 9, {"row": 3}, "plays")
    assert restored.origin


def test_the_arrays_may_be_donated_and_the_two_newest_copies_are_kept(tmp_path):
    first = _tree("data:2", ())
    copies = _copies(tmp_path, first)
    for step in (10, 20, 30):
        tree = _tree("data:2", (), seed=step)
        copies.save_arrays(tree, Description(step, 0, None, "plays"))
        for leaf in tree.values():
            leaf.delete()
    copies.wait()
    assert len(_files(copies)) == 3  # the first one goes when the next one starts
    copies.save_arrays(_tree("data:2", (), seed=30), Description(30, 0, None, "plays"))
    copies.wait()
    assert len(_files(copies)) == 2
    _assert_equal(copies.restore_arrays(_shapes(first), 0, 100).arrays, _tree("data:2", (), seed=30))
    assert copies.restore_arrays(_shapes(first), 30, 100) is None
    copies.clear()
    assert not copies.folder.exists()


@pytest.mark.parametrize(
    "damage", ["torn", "half", "missing array", "more arrays", "other dtype", "other shape", "beyond the file"]
)
def test_a_copy_that_is_not_whole_gives_way_to_the_one_before(damage, tmp_path):
    tree = _tree("fsdp:4", ("fsdp",))
    copies = _copies(tmp_path, tree)
    for step in (10, 20):
        arrays = _tree("fsdp:4", ("fsdp",), seed=step)
        if damage == "missing array" and step == 20:
            arrays.pop("half")
        if damage == "more arrays" and step == 20:
            arrays["scale"] = arrays["step"]
        if damage == "other shape" and step == 20:  # as scales of blocks that the mesh cuts
            arrays["w"] = jax.device_put(jnp.zeros((16, 12)), arrays["w"].sharding)
        if damage == "other dtype" and step == 20:
            arrays["moment"] = arrays["moment"].astype(jnp.float32)
        copies.save_arrays(arrays, Description(step, 0, None, "plays"))
    copies.wait()
    newest = max(_files(copies))
    if damage == "torn":
        newest.write_bytes(newest.read_bytes()[:-5])
    if damage == "beyond the file":
        values = HOST_COPY.parse(newest.read_bytes())
        values["header"]["parts"][0][4] = 10**6
        newest.write_bytes(HOST_COPY.build(values))
    if damage == "half":
        newest.rename(newest.with_suffix(".half"))
    restored = copies.restore_arrays(_shapes(tree), 5, 100)
    _assert_equal(restored.arrays, _tree("fsdp:4", ("fsdp",), seed=10))


def test_parts_of_two_starts_are_not_mixed(tmp_path, monkeypatch):
    tree = _tree("fsdp:4", ("fsdp",))
    header = {"description": dataclasses.asdict(Description(20, 0, None, "plays")), "newest_checkpoint": 0}
    for start_time, rank in ((1_700_000_000, 0), (1_700_000_060, 1)):  # each start has written half of the tree
        monkeypatch.setattr("time.time", lambda start_time=start_time: start_time)
        copies = _copies(tmp_path, tree)
        monkeypatch.setattr("jaxscale.checkpoint.host_copies.process_index", lambda rank=rank: rank)
        half = [
            (name, leaf.shape, region_of(shard.index, leaf.shape), np.array(shard.data))
            for name, leaf in tree.items()
            for shard in leaf.addressable_shards[2 * rank : 2 * rank + 2]
        ]
        copies._write(half, dict(header))
        monkeypatch.setattr("jaxscale.checkpoint.host_copies.process_index", lambda: 0)
    assert len(_files(copies)) == 2
    assert copies.restore_arrays(_shapes(tree), 0, 100) is None


def test_a_copied_directory_has_copies_of_its_own(tmp_path):
    tree = _tree("data:2", ())
    copies = _copies(tmp_path, tree)
    copies.save_arrays(tree, Description(20, 0, None, "plays"))
    copies.wait()
    shutil.copytree(tmp_path / "run", tmp_path / "moved")
    assert HostCopies(tmp_path / "moved", _shapes(tree)).restore_arrays(_shapes(tree), 0, 100) is None
    assert _copies(tmp_path, tree).restore_arrays(_shapes(tree), 0, 100) is not None
    assert _copies(tmp_path, tree).restore_arrays(_shapes(tree), 0, 20) is None  # a run of 20 steps
    forget_copies(tmp_path / "run")
    assert _copies(tmp_path, tree).restore_arrays(_shapes(tree), 0, 100) is None


@pytest.mark.parametrize("content", ["", "{", '{"number": "x"}'])
def test_a_damaged_record_means_that_no_copy_is_read(content, tmp_path):
    tree = _tree("data:2", ())
    (tmp_path / "run" / "memory_copies").write_text(content)
    assert _copies(tmp_path, tree).restore_arrays(_shapes(tree), 0, 100) is None


def test_a_copy_that_cannot_be_written_is_reported_once(tmp_path, monkeypatch, capsys):
    tree = _tree("data:2", ())
    copies = _copies(tmp_path, tree)
    (copies.folder / "left.half").touch()
    full = OSError(28, "No space left on device")

    replace_file = Path.replace

    def replace(self, path):
        if copies.folder in self.parents:
            raise full
        return replace_file(self, path)

    monkeypatch.setattr("pathlib.Path.replace", replace)
    for step in (10, 20, 30):
        copies.save_arrays(tree, Description(step, 0, None, "plays"))
    copies.wait()
    assert capsys.readouterr().err.count("rank 0 cannot copy the state") == 1
    assert not _files(copies)
    monkeypatch.undo()
    monkeypatch.setenv("JAXSCALE_MEMORY", str(tmp_path / "memory"))
    _copies(tmp_path, tree)
    assert not list(copies.folder.glob("*.half"))  # of killed processes


def test_a_user_who_removes_checkpoints_goes_back_to_an_older_one(tmp_path):
    tree = _tree("data:2", ())
    copies = _copies(tmp_path, tree)
    copies.save_arrays(tree, Description(48, 0, None, "plays"), newest_checkpoint=40)
    copies.wait()
    assert copies.restore_arrays(_shapes(tree), 40, 100) is not None
    assert copies.restore_arrays(_shapes(tree), 30, 100) is None


def test_a_folder_that_cannot_be_made_is_refused(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("JAXSCALE_MEMORY", str(tmp_path / "file"))
    with pytest.raises(
        UserError, match=r"checkpoint\.memory_every: cannot write to .*set JAXSCALE_MEMORY to a folder in me"
    ):
        _copies(tmp_path, _tree("data:2", ()))


def test_a_run_does_not_read_the_copies_of_an_earlier_one_in_its_directory(tmp_path):
    tree = _tree("data:2", ())
    copies = _copies(tmp_path, tree)
    copies.save_arrays(tree, Description(20, 0, None, "plays"))
    copies.wait()
    (tmp_path / "run").rename(tmp_path / "run.1")
    (tmp_path / "run").mkdir()
    assert _copies(tmp_path, tree).restore_arrays(_shapes(tree), 0, 100) is None


def test_a_memory_without_room_is_refused_before_the_first_step(tmp_path, monkeypatch):
    free = type("Usage", (), {"free": 1000})
    monkeypatch.setattr("shutil.disk_usage", lambda folder: free)
    with pytest.raises(UserError, match=r"3 copies of 772 B do not fit into .*which has 1000 B: enlarge it"):
        _copies(tmp_path, _tree("data:2", ()))
