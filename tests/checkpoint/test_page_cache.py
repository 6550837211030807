"""Pages that a save has written are dropped from the page cache, and nothing of this harms the save."""

import os
import sys
import threading
import time
from functools import partial
from types import SimpleNamespace
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxscale.checkpoint import page_cache as module
from jaxscale.checkpoint import store, verified
from jaxscale.checkpoint.mirror import UNFINISHED_MARK
from jaxscale.checkpoint.page_cache import drop_written_pages
from jaxscale.checkpoint.store import Checkpoints, Description
from jaxscale.checkpoint.verified import has_ended

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="other systems lack these calls")
RNG = np.random.default_rng(0)
ARRAYS = {f"params/{name}": jnp.asarray(RNG.random((5 << 20,), np.float32)) for name in "abcd"}  # 84 MB
DESCRIPTION = Description(1, 0, None, "toy")


class Save:
    """A save like Orbax's, which lasts until it is released, and may then fail."""

    running: ClassVar[list] = []

    def __init__(self, error=None):
        self.error, self.released = error, threading.Event()
        self.running.append(self)

    def result(self, timeout=None):
        if not self.released.wait(timeout):
            raise TimeoutError
        if self.error is not None:
            raise self.error


@pytest.fixture(autouse=True)
def no_thread_remains():
    """Release the saves of a test, also of one that failed, so that the next test starts without threads."""
    yield
    while Save.running:
        Save.running.pop().released.set()
    wait_until(lambda: not followers())


def wait_until(holds):
    limit = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < limit
        time.sleep(0.01)


def followers():
    return [thread for thread in threading.enumerate() if thread.name == "drop-written-pages"]


def open_files(folder):
    """Names of the files in a folder that this process has open."""
    names = set()
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{descriptor}")
        except OSError:  # the one that lists the folder
            continue
        if target.startswith(str(folder)):
            names.add(os.path.basename(target))
    return names


def data_file(path, process=0):
    """A file of a save that Orbax has not committed."""
    folder = path.with_name(path.name + UNFINISHED_MARK) / "state" / f"ocdbt.process_{process}" / "d"
    folder.mkdir(parents=True)
    return folder / f"data{process}"


@pytest.fixture
def calls(monkeypatch):
    """Each call that writes out or drops: its kind, the path of the file, and the first and last offset."""
    rows = []
    sync_range, fadvise = module._sync_range, os.posix_fadvise

    def path_of(descriptor):
        return os.readlink(f"/proc/self/fd/{descriptor}")

    def record_sync(descriptor, start, stop, flags):
        sync_range(descriptor, start, stop, flags)
        rows.append(("start" if flags == 2 else "wait", path_of(descriptor), start, stop))

    def record_fadvise(descriptor, start, length, advice):
        fadvise(descriptor, start, length, advice)
        assert advice == os.POSIX_FADV_DONTNEED
        rows.append(("drop", path_of(descriptor), start, start + length))

    monkeypatch.setattr(module, "_sync_range", record_sync)
    monkeypatch.setattr(os, "posix_fadvise", record_fadvise)
    return rows


def ranges(calls, kind):
    return [row[2:] for row in calls if row[0] == kind]


def check_covered(calls, kind, file_name, byte_count):
    """Assert that the ranges of a file's calls follow each other from its first byte to its last."""
    offset = 0
    for _, _, start, stop in [row for row in calls if row[0] == kind and row[1].endswith(file_name)]:
        assert start == offset < stop
        offset = stop
    assert offset == byte_count


def check_restored(checkpoints):
    abstract = {name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding) for name, x in ARRAYS.items()}
    restored = checkpoints.restore_arrays(abstract)
    for name, array in ARRAYS.items():
        np.testing.assert_array_equal(restored.arrays[name], array)


def test_all_pages_of_a_save_are_written_out_and_dropped_and_it_is_restored_bit_for_bit(tmp_path, calls):
    checkpoints = Checkpoints(tmp_path)
    assert checkpoints.save_arrays(ARRAYS, DESCRIPTION, wait=True)
    wait_until(lambda: not followers())
    files = [file for file in tmp_path.glob("*/*/ocdbt.process_0/d/*") if file.is_file()]
    assert sum(file.stat().st_size for file in files) > module._MIN_BYTES
    for file in files:
        check_covered(calls, "wait", file.name, file.stat().st_size)
        check_covered(calls, "drop", file.name, file.stat().st_size)
    assert {os.path.basename(path) for _, path, _, _ in calls} == {file.name for file in files}
    assert not open_files(tmp_path)
    check_restored(checkpoints)


def test_pages_are_dropped_while_the_file_grows(tmp_path, calls):
    file, save, window = data_file(tmp_path / "1"), Save(), bytes(module._WINDOW_BYTES)
    windows = [(index * len(window), (index + 1) * len(window)) for index in range(3)]
    drop_written_pages(partial(has_ended, save), tmp_path / "1", 1 << 40)
    with file.open("wb", buffering=0) as writer:
        for count in range(1, 4):
            writer.write(window)
            wait_until(lambda count=count: ranges(calls, "start") == windows[:count])
            wait_until(lambda count=count: ranges(calls, "drop") == windows[: count - 1])  # the last is being written
    save.released.set()
    wait_until(lambda: not followers())
    check_covered(calls, "drop", file.name, 3 * len(window))


def test_a_file_that_no_longer_grows_is_dropped_and_closed_and_followed_again_if_it_grows(tmp_path, calls, monkeypatch):
    monkeypatch.setattr(module, "_QUIET_S", 0.2)
    file, save = data_file(tmp_path / "1"), Save()
    drop_written_pages(partial(has_ended, save), tmp_path / "1", 1 << 40)
    for byte_count in (1000, 3000):
        with file.open("ab") as writer:
            writer.write(bytes(byte_count - writer.tell()))
        wait_until(lambda byte_count=byte_count: any(row[0] == "drop" and row[3] == byte_count for row in calls))
        wait_until(lambda: not open_files(tmp_path))
        assert followers()
    save.released.set()
    wait_until(lambda: not followers())
    check_covered(calls, "drop", file.name, 3000)


@pytest.mark.parametrize("process", [1, 10])
def test_only_the_files_of_this_process_are_followed(tmp_path, calls, monkeypatch, process):
    for index in (0, 1, 10):
        data_file(tmp_path / "1", index).write_bytes(bytes(1000))
    monkeypatch.setattr(jax, "process_index", lambda: process)
    save = Save()
    drop_written_pages(partial(has_ended, save), tmp_path / "1", 1 << 40)
    save.released.set()
    wait_until(lambda: not followers())
    assert {os.path.basename(path) for _, path, _, _ in calls} == {f"data{process}"}


@pytest.mark.parametrize(("path", "byte_count"), [("small", module._MIN_BYTES - 1), ("gs://bucket/1", 1 << 40)])
def test_small_states_and_buckets_are_not_followed(tmp_path, path, byte_count):
    drop_written_pages(partial(has_ended, Save()), path if "://" in path else tmp_path / path, byte_count)
    assert not followers()


def test_the_bytes_are_those_that_this_process_writes():
    shards = SimpleNamespace(addressable_devices={0, 1}, device_set=set(range(8)))
    arrays = {name: SimpleNamespace(nbytes=4000, sharding=shards) for name in "ab"}
    assert verified._written_byte_count(arrays) == 2 * 1000
    assert verified._written_byte_count(ARRAYS) == sum(array.nbytes for array in ARRAYS.values())
    assert verified._written_byte_count({"a": np.zeros(10, np.float32)}) == 40


@pytest.mark.parametrize("is_staged", [False, True])
def test_files_that_are_uploaded_after_the_save_stay_in_the_page_cache(tmp_path, calls, monkeypatch, is_staged):
    uploads = []

    def upload(orbax_save, local_folder, bucket_path):
        uploads.append((local_folder, bucket_path))
        return orbax_save

    monkeypatch.setattr(store, "is_mirrored", lambda path: is_staged)
    monkeypatch.setattr(store, "make_staging_path", lambda path: tmp_path / "staging" / path.name)
    monkeypatch.setattr(store, "upload", upload)
    checkpoints = Checkpoints(tmp_path / "bucket")
    (tmp_path / "staging").mkdir()
    checkpoints.save_arrays(ARRAYS, DESCRIPTION)
    checkpoints._running_save[1].result()
    wait_until(lambda: not followers())
    assert len(uploads) == is_staged
    assert bool(calls) == (not is_staged)


@pytest.mark.parametrize("error", [OSError("not supported"), ValueError("unexpected")])
def test_an_error_of_the_thread_leaves_the_save_intact(tmp_path, monkeypatch, error):
    """What the system refuses ends the thread; an error of any other kind is shown, too."""
    refusals, shown_errors = [], []
    monkeypatch.setattr(threading, "excepthook", lambda event: shown_errors.append(event.exc_value))

    def refuse(*_):
        refusals.append(error)
        raise error

    monkeypatch.setattr(module, "_sync_range", refuse)
    checkpoints = Checkpoints(tmp_path)
    assert checkpoints.save_arrays(ARRAYS, DESCRIPTION, wait=True)
    wait_until(lambda: not followers())
    assert refusals == [error]  # the first one ends the thread
    assert shown_errors == ([] if isinstance(error, OSError) else [error])
    assert not open_files(tmp_path)
    check_restored(checkpoints)


def test_a_system_without_a_free_thread_leaves_the_save_intact(tmp_path, monkeypatch):
    def refuse(self):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    drop_written_pages(partial(has_ended, Save()), tmp_path / "1", 1 << 40)
    assert not followers()


def test_the_thread_ends_when_the_save_fails(tmp_path):
    file, save = data_file(tmp_path / "1"), Save(RuntimeError("the disk is full"))
    file.write_bytes(bytes(1000))
    drop_written_pages(partial(has_ended, save), tmp_path / "1", 1 << 40)
    wait_until(lambda: open_files(tmp_path))
    assert followers()
    save.released.set()
    wait_until(lambda: not followers())
    assert not open_files(tmp_path)


def test_the_thread_ends_when_nothing_grows_and_the_save_never_ends(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_LONGEST_QUIET_S", 0.2)
    drop_written_pages(partial(has_ended, Save()), tmp_path / "1", 1 << 40)
    wait_until(lambda: not followers())
