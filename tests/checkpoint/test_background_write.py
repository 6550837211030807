"""Threads that write a checkpoint yield to the steps, and the pages they have written are dropped."""

import os
import sys
import threading
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxscale.checkpoint import background_write as module
from jaxscale.checkpoint.background_write import BackgroundWrite
from jaxscale.checkpoint.store import Checkpoints, Description
from jaxscale.errors import UserError

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="other systems lack these calls")
FOLLOWER = "write-behind"
ARRAYS = {"params/weight": jnp.asarray(np.random.default_rng(0).normal(size=(2048, 1024)), jnp.float32)}  # 8 MB
ABSTRACT = {name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding) for name, x in ARRAYS.items()}


class Save:
    """A save like Orbax's, which a thread named like TensorStore's runs until it is released."""

    def __init__(self):
        self.released, self.named = threading.Event(), threading.Event()
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()
        self.named.wait()

    def run(self):
        self.thread_id = threading.get_native_id()
        Path(f"/proc/self/task/{self.thread_id}/comm").write_text("ts_pool_worker")
        self.named.set()
        self.released.wait()

    def result(self, timeout=None):
        self.thread.join(timeout)
        if self.thread.is_alive():
            raise TimeoutError

    def niceness(self):
        return os.getpriority(os.PRIO_PROCESS, self.thread_id) - os.getpriority(os.PRIO_PROCESS, os.getpid())


def wait_until(holds):
    limit = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < limit
        time.sleep(0.01)


def followers():
    return [thread for thread in threading.enumerate() if thread.name == FOLLOWER]


def test_writers_yield_until_somebody_waits(tmp_path):
    save = Save()
    write = BackgroundWrite(save, tmp_path / "1", 1 << 40)
    wait_until(lambda: save.niceness() > 0)
    with pytest.raises(TimeoutError):  # a poll leaves the priority low
        write.result(timeout=0)
    assert save.niceness() > 0
    own_niceness = os.getpriority(os.PRIO_PROCESS, os.getpid())
    waiter = threading.Thread(target=write.result)
    waiter.start()
    if os.geteuid() == 0:  # others may not decrease a nice value
        wait_until(lambda: save.niceness() == 0)
    save.released.set()
    waiter.join()
    wait_until(lambda: not followers())
    assert os.getpriority(os.PRIO_PROCESS, os.getpid()) == own_niceness


@pytest.mark.parametrize(("path", "byte_count"), [("small", 1 << 20), ("gs://bucket/1", 1 << 40)])
def test_small_states_and_buckets_are_not_followed(tmp_path, path, byte_count):
    save = Save()
    write = BackgroundWrite(save, path if "://" in path else tmp_path / path, byte_count)
    assert not followers()
    save.released.set()
    write.result()


def test_written_pages_are_dropped_and_the_content_stays(tmp_path):
    content = np.random.default_rng(0).bytes(4 * module._WINDOW_BYTES)
    path = tmp_path / "file"
    with path.open("wb", buffering=0) as writer:
        file = module._GrowingFile(str(path))
        for start in range(0, len(content), module._WINDOW_BYTES):
            writer.write(content[start : start + module._WINDOW_BYTES])
            file.drop_written()
    os.close(file.descriptor)
    assert file._dropped == 3 * module._WINDOW_BYTES  # the last window is being written
    assert path.read_bytes() == content


def test_a_followed_save_is_restored_bit_for_bit(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_MIN_BYTES", 0)
    monkeypatch.setattr(module, "_WINDOW_BYTES", 1 << 12)
    monkeypatch.setattr(module, "_LOOK_S", 0.0)
    checkpoints = Checkpoints(tmp_path)
    for step in range(3):
        checkpoints.save_arrays(ARRAYS, Description(step, 0, None, "toy"), wait=step == 2)
    assert checkpoints.steps() == [0, 1, 2]
    restored = checkpoints.restore_arrays(ABSTRACT)
    np.testing.assert_array_equal(restored.arrays["params/weight"], ARRAYS["params/weight"])
    wait_until(lambda: not followers())


def test_a_file_system_without_the_calls_only_loses_the_drops(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError("not supported")

    monkeypatch.setattr(module, "_MIN_BYTES", 0)
    monkeypatch.setattr(module, "_WINDOW_BYTES", 0)
    monkeypatch.setattr(module, "_LOOK_S", 0.0)
    monkeypatch.setattr(module, "_sync_range", refuse)
    checkpoints = Checkpoints(tmp_path)
    assert checkpoints.save_arrays(ARRAYS, Description(1, 0, None, "toy"), wait=True)
    assert checkpoints.restore_arrays(ABSTRACT).description.step == 1


def test_the_follower_of_a_failed_save_ends(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_MIN_BYTES", 0)
    checkpoints = Checkpoints(tmp_path / "folder")
    (tmp_path / "folder").rmdir()
    (tmp_path / "folder").write_text("a file is in the way")
    with pytest.raises(UserError, match="cannot write checkpoints"):
        checkpoints.save_arrays(ARRAYS, Description(1, 0, None, "toy"), wait=True)
    wait_until(lambda: not followers())
