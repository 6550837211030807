"""Runs in buckets: the claims of `jaxscale/records/storage.py`."""

import errno
import os
import tempfile
from pathlib import Path

import fsspec
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from etils.epath import backend

from jaxscale.checkpoint import mirror
from jaxscale.checkpoint import store as checkpoint
from jaxscale.errors import Preempted, UserError
from jaxscale.records.metrics import FILE, read_metrics
from jaxscale.records.storage import write_whole
from jaxscale.step.train_step import TrainStep
from jaxscale.training import loop
from jaxscale.training.evaluate import evaluate
from jaxscale.training.run import Run
from tests.training.bucket import Bucket, serve


@pytest.fixture(scope="module")
def buckets(tmp_path_factory):
    """gs:// and s3:// in a folder; its path, and what was asked of the gs:// server."""
    root = tmp_path_factory.mktemp("buckets")
    here = type("Here", (Bucket,), {"root": root})
    for name in ("gcs", "s3"):
        fsspec.register_implementation(name, here, clobber=True)
    with pytest.MonkeyPatch.context() as patch, serve(root) as (url, seen):
        patch.setenv("EPATH_USE_TF", "false")
        patch.setattr(tempfile, "tempdir", str(tmp_path_factory.mktemp("staging")))
        patch.setenv("TENSORSTORE_GCS_HTTP_URL", url)
        patch.setenv("GOOGLE_AUTH_TOKEN_FOR_TESTING", "nobody")
        backend.fsspec_backend._get_filesystem.cache_clear()
        yield root, seen
    backend.fsspec_backend._get_filesystem.cache_clear()


@pytest.mark.parametrize("scheme", ["gs", "s3"])
def test_checkpoints_in_a_bucket(buckets, scheme):
    root, _ = buckets
    there = f"{scheme}://bucket-{scheme}/alone"
    checkpoints = checkpoint.Checkpoints(there, keep=2)
    for step in (1, 2, 3):
        checkpoints.save_arrays({"x": jnp.full(100, step)}, checkpoint.Description(step, step, None, "toy"))
    assert checkpoints.wait().step == 3
    assert checkpoints.steps() == [2, 3]
    (root / f"bucket-{scheme}" / "alone" / "00000003" / "commit_success.txt").unlink()
    again = checkpoint.Checkpoints(there)
    assert again.steps() == [2], "what was not committed is cleaned"
    assert not (root / f"bucket-{scheme}" / "alone" / "00000003" / "state").exists()
    x = jnp.zeros(100, jnp.int32)
    restored = again.restore_arrays({"x": jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)})
    np.testing.assert_array_equal(restored.arrays["x"], 2)
    assert not list(Path(tempfile.gettempdir()).glob("jaxscale-checkpoint-*"))


def test_an_upload_that_breaks_off_is_no_checkpoint(buckets, monkeypatch):
    checkpoints = checkpoint.Checkpoints("s3://bucket-s3/broken")
    checkpoints.save_arrays({"x": jnp.zeros(3)}, checkpoint.Description(1, 1, None, "toy"), wait=True)
    real, count = mirror._copy, iter(range(99))

    def copy(source, target):
        if next(count) == 3:
            raise ConnectionError("the line is dead")
        real(source, target)

    monkeypatch.setattr(mirror, "_copy", copy)
    checkpoints.save_arrays({"x": jnp.zeros(3)}, checkpoint.Description(2, 2, None, "toy"))
    with pytest.raises(UserError, match=r"the line is dead\. The checkpoint of step 1 is intact"):
        checkpoints.wait()
    assert checkpoints.steps() == [1]
    assert not list(Path(tempfile.gettempdir()).glob("jaxscale-checkpoint-*"))


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["gs", "s3"])
def test_a_run_in_a_bucket_stops_and_continues_and_is_used(toy, whole, buckets, scheme, monkeypatch):
    root, seen = buckets
    out, folder = f"{scheme}://bucket-{scheme}/runs/toy", root / f"bucket-{scheme}" / "runs" / "toy"
    real = TrainStep.__call__

    def run(self, state, batch):
        if int(state.step) == 6:
            os.kill(os.getpid(), 15)
        return real(self, state, batch)

    monkeypatch.setattr(TrainStep, "__call__", run)
    with pytest.raises(Preempted, match="after step 7"):
        loop.train(toy(), out=out, quiet=True)
    monkeypatch.undo()
    assert len(read_metrics(out, "train")) == 7
    # the newest checkpoint is damaged meanwhile
    at = folder / "checkpoints" / "00000007"
    biggest = max((file for file in at.rglob("d/*") if file.is_file()), key=lambda file: file.stat().st_size)
    os.truncate(biggest, biggest.stat().st_size // 2)
    saved = checkpoint.Checkpoints.save

    def save(self, arrays, description, **options):
        lines = (folder / FILE).read_text().splitlines()
        assert any(f'"step": {description.step}, "kind": "train"' in line for line in lines), "the log comes first"
        return saved(self, arrays, description, **options)

    monkeypatch.setattr(checkpoint.Checkpoints, "save", save)
    loop.train(toy(), out=out, quiet=True)
    again = Run.open(out)
    assert again.step == 12
    assert [row["name"] for row in again.events].count("resume") == 1
    found = sorted(path.name for path in (folder / "checkpoints").iterdir())
    assert found == ["00000005", "00000007.damaged", "00000010", "00000012"]
    expected = Run.open(whole)
    np.testing.assert_array_equal(again.metrics.column("loss"), expected.metrics.column("loss"))
    assert again.generate("the ", tokens=8, temperature=0.0) == expected.generate("the ", tokens=8, temperature=0.0)
    assert evaluate(out)["loss"] == pytest.approx(evaluate(whole)["loss"], rel=1e-6)
    assert (folder / "report.html").exists()
    assert (folder / "tokenizer.json").exists()
    if scheme == "gs":
        assert {"GET", "POST"} <= set(seen), "TensorStore's own driver was at work"
    # the run returns to an earlier checkpoint, and makes the same steps again
    loop.train(toy(), out=out, from_step=5, quiet=True)
    returned = Run.open(out)
    np.testing.assert_array_equal(returned.metrics.column("loss"), expected.metrics.column("loss"))
    (event,) = [row for row in returned.events if row.get("returned")]
    assert event["aside"] == ["00000010.aside", "00000012.aside"]
    assert (folder / "returns.json").exists()
    folder_names = {path.name for path in (folder / "checkpoints").iterdir()}
    assert {"00000005", "00000010", "00000012", "00000010.aside", "00000012.aside"} <= folder_names
    # a new start leaves the old run aside
    loop.train(toy(), steps=1, out=out, resume="never", quiet=True)
    assert Run.open(f"{out}.1").step == 12
    assert Run.open(out).step == 1


def test_several_processes_do_not_save_to_s3(buckets, monkeypatch):
    monkeypatch.setattr("jax.process_count", lambda: 2)
    with pytest.raises(
        UserError, match="2 processes cannot save checkpoints there together: give a directory in a gs:// bucket"
    ):
        checkpoint.Checkpoints("s3://bucket-s3/several")


def test_a_write_that_fails_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "report.html"
    write_whole(path, "old")

    def no_space(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", no_space)
    with pytest.raises(OSError, match="No space left on device") as raised:
        write_whole(path, "new")
    assert raised.value.filename == str(path)
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [("report.html", "old")]
