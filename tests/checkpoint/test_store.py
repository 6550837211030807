import dataclasses
import json
import logging
import os
import resource
import shutil
import signal
import sys
import types
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxscale.checkpoint import store as module
from jaxscale.checkpoint.store import Checkpoints, DamagedError, Description
from jaxscale.checkpoint.verified import digest
from jaxscale.errors import UserError
from jaxscale.sharding.mesh import MeshSpec


def arrays(seed=0):
    rng = np.random.default_rng(seed)
    sharding = NamedSharding(MeshSpec.parse("data:2").build(), PartitionSpec("data"))
    tree = {
        "params/embed/weight": jnp.asarray(rng.normal(size=(64, 32)), jnp.float32),
        "params/blocks/layers/0/up": jnp.asarray(rng.normal(size=(32, 8)), jnp.bfloat16),
        "optimizer/0/count": jnp.asarray(rng.integers(0, 99, (8,)), jnp.int32),
    }
    return {name: jax.device_put(x, sharding) for name, x in tree.items()} | {"step": jnp.int32(seed)}


def abstract(mesh="1", axis=None, dtypes=None):
    sharding = NamedSharding(MeshSpec.parse(mesh).build(), PartitionSpec(axis))
    whole = NamedSharding(sharding.mesh, PartitionSpec())
    return {
        name: jax.ShapeDtypeStruct(x.shape, (dtypes or {}).get(name, x.dtype), sharding=sharding if x.ndim else whole)
        for name, x in arrays().items()
    }


def about(step, loss=None, **more):
    return Description(step=step, tokens=step * 10, data={"next": step}, experiment="toy", loss=loss, **more)


def saved(folder, *steps, **options):
    checkpoints = Checkpoints(folder, keep=10, **options)
    for step in steps:
        checkpoints.save_arrays(arrays(step), about(step), wait=True)
    return checkpoints


def equal(a, b):
    chex.assert_trees_all_equal({name: np.asarray(a[name]) for name in b}, jax.tree.map(np.asarray, dict(b)))


def biggest(folder):
    return max((f for f in folder.rglob("*") if f.is_file()), key=lambda f: f.stat().st_size)


def test_what_a_pipeline_has_in_flight_may_be_missing(tmp_path):
    checkpoints = saved(tmp_path / "c", 3)
    wanted = abstract()
    more = {"in_flight/pipedream-0123/tick": wanted["step"], "params/other": wanted["step"]}
    flight, other = ({**wanted, name: leaf} for name, leaf in more.items())
    found = checkpoints.restore_arrays(flight)
    assert found is not None
    assert set(found.arrays) == set(wanted)
    with pytest.raises(UserError, match="has no array 'params/other'"):
        checkpoints.restore_arrays(other)


def test_what_is_saved_comes_back(tmp_path):
    checkpoints = saved(tmp_path / "c", 3)
    restored = checkpoints.restore_arrays(abstract())
    equal(restored.arrays, arrays(3))
    assert restored.description == about(3, is_sound=True, first_rms=restored.description.first_rms)
    assert restored.damaged == {}


def test_nothing_saved_is_none(tmp_path):
    assert Checkpoints(tmp_path / "c").restore_arrays(abstract()) is None
    assert Checkpoints(tmp_path / "absent", write=False).steps() == []


@pytest.mark.parametrize(("mesh", "axis"), [("fsdp:4", "fsdp"), ("data:2,tensor:4", "tensor"), ("1", None)])
def test_restores_onto_another_mesh(tmp_path, mesh, axis):
    wanted = abstract(mesh, axis)
    restored = saved(tmp_path / "c", 1).restore_arrays(wanted)
    equal(restored.arrays, arrays(1))
    for name, leaf in wanted.items():
        assert restored.arrays[name].sharding.is_equivalent_to(leaf.sharding, leaf.ndim)


def test_restores_into_another_dtype(tmp_path):
    name = "params/embed/weight"
    restored = saved(tmp_path / "c", 1).restore_arrays(abstract("fsdp:2", "fsdp", {name: jnp.bfloat16}))
    assert restored.arrays[name].dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(restored.arrays[name]), np.asarray(arrays(1)[name].astype(jnp.bfloat16)))


def test_restores_a_part(tmp_path):
    wanted = {name: leaf for name, leaf in abstract().items() if name.startswith("params/")}
    restored = saved(tmp_path / "c", 1).restore_arrays(wanted)
    assert restored.arrays.keys() == wanted.keys()
    equal(restored.arrays, {name: arrays(1)[name] for name in wanted})


def test_a_save_may_be_followed_by_donation(tmp_path):
    checkpoints = Checkpoints(tmp_path / "c")
    tree = {"x": jnp.arange(1 << 18, dtype=jnp.float32)}
    checkpoints.save_arrays(tree, about(1))
    overwritten = jax.jit(lambda t: {"x": t["x"] * 0 - 1}, donate_argnums=0)(tree)
    assert float(overwritten["x"][0]) == -1.0
    checkpoints.wait()
    wanted = jax.ShapeDtypeStruct((1 << 18,), jnp.float32, sharding=overwritten["x"].sharding)
    restored = checkpoints.restore_arrays({"x": wanted})
    np.testing.assert_array_equal(np.asarray(restored.arrays["x"]), np.arange(1 << 18, dtype=np.float32))


def test_keeps_the_newest_and_the_best(tmp_path):
    checkpoints = Checkpoints(tmp_path / "c", keep=2)
    for step, loss in ((1, 3.0), (2, 1.0), (3, 2.0), (4, None), (5, float("nan"))):
        checkpoints.save_arrays(arrays(step), about(step, loss))
    checkpoints.wait()
    assert checkpoints.steps() == [2, 4, 5]
    assert checkpoints.best() == 2
    again = Checkpoints(tmp_path / "c", write=False)
    assert again.best() == 2


def test_a_step_is_saved_once(tmp_path):
    checkpoints = saved(tmp_path / "c", 1)
    assert checkpoints.save_arrays(arrays(7), about(1)) is False
    equal(checkpoints.restore_arrays(abstract()).arrays, arrays(1))


def corrupt_flip(folder):
    file = biggest(folder)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def corrupt_truncate(folder):
    file = biggest(folder)
    os.truncate(file, file.stat().st_size // 2)


def corrupt_missing(folder):
    biggest(folder).unlink()


def corrupt_description(folder):
    file = folder / "_CHECKPOINT_METADATA"
    file.write_text(file.read_text().replace('"tokens": 20', '"tokens": 21'))


def corrupt_description_of_other_types(folder):
    """A program that is not ours wrote it: the digest is right, the content is not."""
    file = folder / "_CHECKPOINT_METADATA"
    metadata = json.loads(file.read_text())
    content = metadata["custom_metadata"]["jaxscale"] | {"tokens": "many", "arrays": {"a": [[2], "object", 1, 1]}}
    metadata["custom_metadata"] = {"jaxscale": content, "sha256": digest(content)}
    file.write_text(json.dumps(metadata))


def corrupt_description_cut(folder):
    file = folder / "_CHECKPOINT_METADATA"
    file.write_text(file.read_text()[:100])


def corrupt_uncommitted(folder):
    (folder / "commit_success.txt").unlink()


def corrupt_empty(folder):
    shutil.rmtree(folder)
    folder.mkdir()


CORRUPTIONS = [value for name, value in sorted(globals().items()) if name.startswith("corrupt_")]


@pytest.mark.parametrize(
    "corrupt", [CORRUPTIONS[0], *(pytest.param(each, marks=pytest.mark.slow) for each in CORRUPTIONS[1:])]
)
def test_a_damaged_checkpoint_falls_back_to_the_one_before(tmp_path, corrupt):
    saved(tmp_path / "c", 1, 2)
    corrupt(tmp_path / "c" / "00000002")
    said = []
    checkpoints = Checkpoints(tmp_path / "c")
    restored = checkpoints.restore_arrays(abstract(), set_aside=True, say=said.append)
    assert restored.description.step == 1
    equal(restored.arrays, arrays(1))
    assert list(restored.damaged) == [2]
    assert "step 2 is damaged" in said[0]
    assert checkpoints.steps() == [1]
    assert (tmp_path / "c" / "00000002.damaged").exists()
    # the step can be saved again
    assert checkpoints.save_arrays(arrays(2), about(2), wait=True)
    equal(checkpoints.restore_arrays(abstract()).arrays, arrays(2))


def test_orbax_alone_does_not_see_a_wrong_value_and_the_checksum_does(tmp_path):
    """What is stored is another array, with all of Orbax's own marks right."""
    from orbax.checkpoint import v1 as ocp

    saved(tmp_path / "c", 1, 2)
    tree = arrays(2)
    changed = np.asarray(tree["params/embed/weight"]).copy()
    changed.view(np.uint32)[5, 3] ^= 1  # the least bit of one number
    ocp.save(tmp_path / "other", {**tree, "params/embed/weight": jnp.asarray(changed)})
    shutil.rmtree(tmp_path / "c" / "00000002" / "state")
    shutil.copytree(tmp_path / "other" / "state", tmp_path / "c" / "00000002" / "state")
    restored = Checkpoints(tmp_path / "c").restore_arrays(abstract())
    assert restored.description.step == 1
    assert "'params/embed/weight'" in restored.damaged[2]


def test_no_good_checkpoint_left_is_an_error(tmp_path):
    saved(tmp_path / "c", 1, 2)
    for step in (1, 2):
        corrupt_truncate(tmp_path / "c" / f"{step:08d}")
    with pytest.raises(UserError, match=r"no checkpoint in .* can be used \(step 2: .*step 1: "):
        Checkpoints(tmp_path / "c").restore_arrays(abstract())


def test_a_newer_format_is_refused_by_name(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "FORMAT", 7)
    saved(tmp_path / "c", 1)
    monkeypatch.undo()
    with pytest.raises(UserError, match="format 7, but this version of jaxscale reads only formats up to 1"):
        Checkpoints(tmp_path / "c").restore_arrays(abstract())


def test_another_model_is_refused_by_array(tmp_path):
    checkpoints = saved(tmp_path / "c", 1)
    wanted = abstract()
    with pytest.raises(UserError, match=r"has no array 'params/new'"):
        checkpoints.restore_arrays({**wanted, "params/new": wanted["step"]})
    shape = jax.ShapeDtypeStruct((64, 16), jnp.float32, sharding=wanted["step"].sharding)
    with pytest.raises(UserError, match=r"'params/embed/weight' has shape \(64, 32\), but the model needs \(64, 16\)"):
        checkpoints.restore_arrays({**wanted, "params/embed/weight": shape})


def test_what_a_killed_run_left_is_cleaned(tmp_path):
    saved(tmp_path / "c", 1)
    dead = tmp_path / "c" / "00000002.orbax-checkpoint-tmp-17"
    shutil.copytree(tmp_path / "c" / "00000001", dead)
    assert Checkpoints(tmp_path / "c", write=False).steps() == [1]
    assert dead.exists(), "a reader leaves a run that may be going on alone"
    Checkpoints(tmp_path / "c")
    assert not dead.exists()


def test_a_folder_that_a_failed_save_still_fills_is_cleaned(tmp_path, monkeypatch):
    dead = tmp_path / "c" / "00000002.orbax-checkpoint-tmp-17"
    (dead / "state").mkdir(parents=True)
    remove_folder, late_files = os.rmdir, ["a", "b"]

    def remove_folder_late(path, *args, **kwargs):
        if late_files and Path(path).name == "state":  # a thread of the failed save writes once more
            (dead / "state" / late_files.pop()).write_text("late")
        remove_folder(path, *args, **kwargs)

    monkeypatch.setattr(os, "rmdir", remove_folder_late)
    Checkpoints(tmp_path / "c")
    assert not late_files
    assert not dead.exists()


def test_a_file_in_the_place_of_the_folder(tmp_path):
    (tmp_path / "c").write_text("")
    with pytest.raises(UserError, match=f"cannot write checkpoints to {tmp_path / 'c'}"):
        Checkpoints(tmp_path / "c")


def test_a_full_disk_leaves_the_older_checkpoints(tmp_path):
    checkpoints = saved(tmp_path / "c", 1)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, before[1]))
        with pytest.raises(UserError, match=r"cannot write checkpoints to .*step 1 is intact"):
            checkpoints.save_arrays(arrays(2), about(2), wait=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    again = Checkpoints(tmp_path / "c")
    equal(again.restore_arrays(abstract()).arrays, arrays(1))
    assert again.steps() == [1]


def test_describes_a_step(tmp_path):
    saved(tmp_path / "c", 4)
    reader = Checkpoints(tmp_path / "c", write=False)
    assert reader.describe(4).tokens == 40
    (tmp_path / "c" / "00000004" / "_CHECKPOINT_METADATA").write_text("{")
    with pytest.raises(DamagedError):
        Checkpoints(tmp_path / "c", write=False).describe(4)
    assert Checkpoints(tmp_path / "c", write=False).best() is None


def test_the_description_is_plain_json(tmp_path):
    saved(tmp_path / "c", 4)
    file = tmp_path / "c" / "00000004" / "_CHECKPOINT_METADATA"
    content = json.loads(file.read_text())["custom_metadata"]["jaxscale"]
    assert content["format"] == 1
    assert content["arrays"]["params/embed/weight"][:2] == [[64, 32], "float32"]


def test_a_copy_that_does_not_fit_is_told():
    class Small:
        def memory_stats(self):
            return {"bytes_limit": 10_000_000_000}

    assert module.save_memory_warning(6_000_000_000, 4_000_000_000, Small()) is None
    told = module.save_memory_warning(6_000_000_000, 5_000_000_000, Small())
    assert "The state and its copy need 11.0 GB, but the device has 10.0 GB" in told
    assert module.save_memory_warning(6_000_000_000, 5_000_000_000, jax.devices()[0]) is None, "a CPU does not tell"
    assert module.save_memory_warning(6_000_000_000, 5_000_000_000, None) is None


@pytest.mark.parametrize("is_disk", [True, False])
def test_a_full_disk_is_explained_and_a_full_device_is_not(tmp_path, monkeypatch, is_disk):
    disk_text = "RESOURCE_EXHAUSTED: Failed to write 3675 bytes: No space left on device [os_error_code='28']"
    text = disk_text if is_disk else "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 1024 bytes."

    def fail(*_, **__):
        raise ValueError(text)

    checkpoints = Checkpoints(tmp_path)
    assert checkpoints.save_arrays({"x": jnp.ones(3)}, Description(1, 1, None, "toy"), wait=True)
    monkeypatch.setattr("orbax.checkpoint.v1.save_async", fail)
    message = "cannot write checkpoints to .*No space left.*step 1 is intact" if is_disk else "Out of memory"
    with pytest.raises(ValueError, match=message) as caught:
        checkpoints.save_arrays({"x": jnp.ones(3)}, Description(2, 2, None, "toy"))
    assert isinstance(caught.value, UserError) == is_disk


def test_the_last_good_checkpoint_is_the_newest_sound_one_and_is_never_pruned(tmp_path):
    checkpoints = Checkpoints(tmp_path / "c", keep=1, best=False)
    whole = {"params/w": jnp.ones(4), "optimizer/0/mu/w": jnp.ones(4), "watch/in_row": jnp.int32(0)}
    spoiled = [
        {"params/w": jnp.full(4, 9e28)},
        {"params/w": jnp.full(4, jnp.nan)},
        {"optimizer/0/mu/w": jnp.full(4, jnp.inf)},
        {"rest/variance": jnp.array([1.0, jnp.inf])},
        {"params/w": jnp.full(4, 101.0)},  # more than a hundred times as large as in the first checkpoint
        {"watch/in_row": jnp.int32(2)},
    ]
    checkpoints.save_arrays(whole, about(1), wait=True)
    for step, change in enumerate(spoiled, 2):
        checkpoints.save_arrays({**whole, **change}, about(step), wait=True)
        assert checkpoints.steps() == [1, step]
        assert checkpoints.last_good() == 1
    assert Checkpoints(tmp_path / "c", write=False).last_good() == 1  # from the files
    assert checkpoints.describe(7).skipped_in_row == 2
    assert checkpoints.describe(7).is_sound
    checkpoints.save_arrays({**whole, "optimizer/0/best": jnp.float32(jnp.inf)}, about(8), wait=True)
    assert checkpoints.steps() == [8]
    assert checkpoints.last_good() == 8


def test_a_continued_run_is_judged_by_its_first_checkpoint(tmp_path):
    whole = NamedSharding(MeshSpec.parse("1").build(), PartitionSpec())
    for step, size in enumerate((0.5, 40.0, 60.0), 1):
        checkpoints = Checkpoints(tmp_path / "c", keep=1, best=False)
        if step > 1:
            checkpoints.restore_arrays({"params/w": jax.ShapeDtypeStruct((4,), jnp.float32, sharding=whole)})
        checkpoints.save_arrays({"params/w": jnp.full(4, size)}, about(step), wait=True)
    assert checkpoints.steps() == [2, 3]
    assert checkpoints.last_good() == 2
    assert checkpoints.describe(3).first_rms == 0.5


def test_a_checkpoint_without_a_record_of_its_state_counts_as_good():
    content = dataclasses.asdict(about(3))
    del content["is_sound"], content["skipped_in_row"], content["first_rms"]
    assert Description.of(content) == about(3)
    assert about(3).is_good
    with pytest.raises(KeyError):
        Description.of({name: value for name, value in content.items() if name != "tokens"})


def test_late_errors_of_a_failed_save_are_dropped_and_others_are_not(tmp_path, monkeypatch):
    """TensorStore's threads report that the loop of a save that has failed is closed: once per write."""
    shown = []
    monkeypatch.setattr(sys, "unraisablehook", shown.append)
    checkpoints = Checkpoints(tmp_path)
    for step in (1, 2):
        checkpoints.save_arrays({"x": jnp.ones(3)}, about(step), wait=True)
    assert not isinstance(sys.unraisablehook.hook, type(sys.unraisablehook)), "wrapped once"
    late, other = RuntimeError("Event loop is closed"), RuntimeError("another")
    for error in (late, other):
        sys.unraisablehook(types.SimpleNamespace(exc_value=error))
    assert [unraisable.exc_value for unraisable in shown] == [other]


def test_orbax_logs_no_traceback_of_a_save_that_fails(tmp_path):
    Checkpoints(tmp_path).save_arrays({"x": jnp.ones(3)}, about(1), wait=True)
    logger = logging.getLogger("absl")
    assert not logger.filter(logging.makeLogRecord({"msg": "[process=%d] _SignalingThread.run() raised: %s"}))
    assert logger.filter(logging.makeLogRecord({"msg": "another error"}))
