import json
import math
import resource
import signal
import struct
import subprocess
import sys
import textwrap

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxscale.errors import UserError
from jaxscale.records import storage
from jaxscale.records.metrics import FILE, MetricsLog, decode, drop_torn_line, encode, read_metrics
from jaxscale.records.record import RunRecord
from jaxscale.records.samples import Sample, append_sample, read_samples
from jaxscale.report.page import write_report
from jaxscale.report.summary import summary


def strict(text):
    def refuse(word):
        raise AssertionError(f"{word} is not JSON")

    return json.loads(text, parse_constant=refuse)


@given(st.floats(), st.floats(width=32))
def test_every_float_comes_back_in_every_bit_from_strict_json(double, single):
    line = encode({"step": 1, "kind": "train", "loss": double, "grad_norm": np.float32(single).item()})
    strict(line)
    back = decode(line)
    assert struct.pack("<f", back["grad_norm"]) == struct.pack("<f", single) or math.isnan(single)
    if math.isnan(double):
        assert math.isnan(back["loss"])
    else:
        assert struct.pack("<d", back["loss"]) == struct.pack("<d", double)


def test_the_file_is_one_json_object_a_line_with_step_and_kind(tmp_path):
    with MetricsLog(tmp_path, tensorboard=False) as log:
        log.append(1, "train", loss=np.float32(0.1), tokens=np.int64(768), skipped=np.bool_(True))
        log.append(2, "train", loss=float("nan"), grad_norm=float("inf"))
        log.append(2, "eval", loss=1.5)
        log.append(2, "event", name="compile", seconds=3.0, memory={"parameters": 12})
    rows = [strict(line) for line in (tmp_path / FILE).read_text().splitlines()]
    assert [(row["step"], row["kind"]) for row in rows] == [(1, "train"), (2, "train"), (2, "eval"), (2, "event")]
    assert rows[0]["loss"] == float(np.float32(0.1))
    assert rows[0]["tokens"] == 768
    assert rows[0]["skipped"] is True
    assert rows[1]["loss"] is None
    assert rows[1]["nonfinite"] == {"loss": "nan", "grad_norm": "inf"}
    train = read_metrics(tmp_path, "train")
    np.testing.assert_array_equal(train.column("grad_norm"), [math.nan, math.inf])
    np.testing.assert_array_equal(train[1:].column("loss"), [math.nan])
    assert "nonfinite" not in train[1]
    assert read_metrics(tmp_path, "event")[0]["memory"] == {"parameters": 12}


def test_a_jax_scalar_is_written_as_the_float_of_its_value(tmp_path):
    with MetricsLog(tmp_path, tensorboard=False) as log:
        log.append(1, "train", loss=jnp.float32(1 / 3), learning_rate=jnp.bfloat16(0.1))
    (row,) = read_metrics(tmp_path)
    assert row["loss"] == float(np.float32(1 / 3))
    assert row["learning_rate"] == 0.10009765625


def test_the_last_line_of_a_step_counts_and_resume_takes_back_what_came_after(tmp_path):
    with MetricsLog(tmp_path, tensorboard=False) as log:
        for step in range(1, 8):
            log.append(step, "train", loss=float(step))
        log.append(5, "eval", loss=50.0)
        log.append(7, "event", name="preempted")
    with MetricsLog(tmp_path, tensorboard=False) as log:
        log.append(4, "event", name="resume")
        log.append(5, "train", loss=-5.0)
        log.append(5, "train", loss=-5.5)
    train = read_metrics(tmp_path, "train")
    assert train.column("step").tolist() == [1, 2, 3, 4, 5]
    assert train.column("loss").tolist() == [1, 2, 3, 4, -5.5]
    assert read_metrics(tmp_path, "eval") == []
    assert [row["name"] for row in read_metrics(tmp_path, "event")] == ["preempted", "resume"]
    assert len((tmp_path / FILE).read_bytes().splitlines()) == 12, "nothing is rewritten"


@pytest.mark.parametrize(
    "tail", [b'{"step": 3, "ki', b'{"step": 3, "ki\n', b"\0" * 5000, b"{}\n", b'{"step"' + b" " * 200_000]
)
def test_a_torn_last_line_is_dropped(tmp_path, tail):
    whole = encode({"step": 1, "kind": "train", "loss": 1.0, "note": "x" * 70_000}) + encode(
        {"step": 2, "kind": "train"}
    )
    (tmp_path / FILE).write_bytes(whole + tail)
    assert len(read_metrics(tmp_path)) == 2
    with MetricsLog(tmp_path, tensorboard=False) as log:
        assert (tmp_path / FILE).read_bytes() == whole
        log.append(3, "train", loss=3.0)
    assert read_metrics(tmp_path).column("step").tolist() == [1, 2, 3]


def test_nothing_is_cut_off_a_whole_file(tmp_path):
    path = tmp_path / FILE
    for content in (b"", encode({"step": 1, "kind": "train"}), encode({"step": 1, "kind": "train"}) * 3):
        path.write_bytes(content)
        assert drop_torn_line(path) == 0
        assert path.read_bytes() == content
    path.write_bytes(b"torn")
    assert drop_torn_line(path) == 4
    assert path.read_bytes() == b""


DAMAGE = {
    "garbage": b"\x80\xff\x00garbage",
    "half a line": b'{"step": 2, "ki',
    "NUL bytes": b"\0" * 5000,
    "no object": b"[1, 2]",
    "no step": b'{"kind": "train"}',
    "a step of text": b'{"step": "2", "kind": "train"}',
    "a step that is a truth value": b'{"step": true, "kind": "train"}',
    "an unknown kind": b'{"step": 2, "kind": ["train"]}',
    "an event without a name": b'{"step": 2, "kind": "event"}',
    "texts that are no numbers": b'{"step": 2, "kind": "train", "nonfinite": {"loss": "x"}}',
    "nonfinite that is no object": b'{"step": 2, "kind": "train", "nonfinite": [1]}',
    "too many digits": b'{"step": ' + b"9" * 5000 + b', "kind": "train"}',
    "nested too deeply": b"[" * 100_000,
    "huge": b"x" * 2_000_000,
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_broken_line_in_the_middle_is_left_out_and_counted(tmp_path, name):
    lines = [encode({"step": step, "kind": "train", "time": 1.0, "loss": 1.0}) for step in (1, 2)]
    (tmp_path / FILE).write_bytes(lines[0] + DAMAGE[name] + b"\n" + lines[1])
    assert read_metrics(tmp_path).column("step").tolist() == [1, 2]
    note = "metrics.jsonl: 1 of 3 lines cannot be read (line 2) and is left out"
    assert RunRecord.read(tmp_path).unread == (note,)
    assert "1 of 3 lines cannot be read" in " ".join(summary(tmp_path, width=200).split())
    assert note in write_report(tmp_path).read_text()


def test_no_file_gives_no_rows(tmp_path):
    assert read_metrics(tmp_path / "nowhere") == []
    assert read_metrics(tmp_path).column("loss").shape == (0,)


def test_sigkill_loses_at_most_the_line_being_written(tmp_path):
    code = f"""
        from jaxscale.records.metrics import MetricsLog
        log = MetricsLog({str(tmp_path)!r}, tensorboard=False)
        step = 0
        while True:
            step += 1
            log.append(step, "train", loss=1 / step, text="x" * 5000)
            print(step, flush=True)
    """
    child = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    said = [child.stdout.readline() for _ in range(50)]
    child.send_signal(signal.SIGKILL)
    said += child.stdout.readlines()
    child.stdout.close()
    child.wait()
    last = max(int(word) for word in said if word.endswith("\n"))
    MetricsLog(tmp_path, tensorboard=False).close()
    rows = read_metrics(tmp_path)
    assert rows.column("step").tolist() == list(range(1, len(rows) + 1))
    assert len(rows) in (last, last + 1)


def write_many(log):
    for step in range(1, 1000):
        log.append(step, "train", loss=1.0)


def test_a_full_disk_raises_oserror_with_the_path_and_the_lines_before_stay(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    log = MetricsLog(tmp_path, tensorboard=False)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
        with pytest.raises(OSError, match=r"metrics\.jsonl") as caught:
            write_many(log)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert caught.value.filename == str(tmp_path / FILE)
    log.close()
    rows = read_metrics(tmp_path)
    assert len(rows) > 50
    assert rows.column("step").tolist() == list(range(1, len(rows) + 1))


def test_a_log_that_cannot_be_opened_is_named(tmp_path):
    (tmp_path / FILE).mkdir()  # permissions would not stop root
    with pytest.raises(UserError, match=r"metrics\.jsonl is a folder, expected a regular file"):
        MetricsLog(tmp_path, tensorboard=False)


def events(folder):
    """The events of TensorBoard files, read by an independent reader of the record format."""
    from tensorboardX.proto.event_pb2 import Event

    found = []
    for path in sorted(folder.iterdir()):
        data = path.read_bytes()
        while data:
            (length,) = struct.unpack("<Q", data[:8])
            found.append(Event.FromString(data[12 : 12 + length]))
            assert crc(data[:8]) == struct.unpack("<I", data[8:12])[0]
            assert crc(data[12 : 12 + length]) == struct.unpack("<I", data[12 + length : 16 + length])[0]
            data = data[16 + length :]
    return found


def crc(data):
    """Masked CRC-32C bit by bit, from its definition (RFC 3720, appendix B.4; masking as in TFRecord)."""
    value = 0xFFFFFFFF
    for byte in data:
        value ^= byte
        for _ in range(8):
            value = (value >> 1) ^ (0x82F63B78 if value & 1 else 0)
    value ^= 0xFFFFFFFF
    return (((value >> 15) | (value << 17)) + 0xA282EAD8) & 0xFFFFFFFF


def test_tensorboard_events_hold_the_scalars_and_a_resumed_run_purges(tmp_path):
    with MetricsLog(tmp_path) as log:
        for step in range(1, 4):
            log.append(step, "train", loss=step / 2, tokens_per_second=10.0, note="words")
        log.append(3, "eval", loss=0.25)
    first = events(tmp_path / "tensorboard")
    assert first[0].file_version == "brain.Event:2"
    scalars = [(e.step, v.tag, v.simple_value) for e in first for v in e.summary.value]
    assert (2, "train/loss", 1.0) in scalars
    assert (3, "eval/loss", 0.25) in scalars
    assert (2, "speed/tokens_per_second", 10.0) in scalars
    assert {tag for _, tag, _ in scalars} == {"train/loss", "eval/loss", "speed/tokens_per_second"}
    with MetricsLog(tmp_path) as log:
        log.append(2, "event", name="resume")
        log.append(3, "train", loss=9.0)
    files = sorted((tmp_path / "tensorboard").iterdir())
    assert len(files) == 2
    second = events(tmp_path / "tensorboard")[len(first) :]
    assert [(e.step, e.HasField("session_log"), e.HasField("summary")) for e in second] == [
        (0, False, False),
        (3, True, False),
        (3, False, True),
    ]
    assert second[1].session_log.status == second[1].session_log.START


def test_tensorboard_is_imported_only_when_written(tmp_path):
    code = f"""
        import sys
        from jaxscale.records.metrics import MetricsLog, read_metrics
        log = MetricsLog({str(tmp_path)!r})
        log.append(1, "train", loss=1.0)
        read_metrics({str(tmp_path)!r})
        assert not {{"tensorboardX", "jax", "flax", "etils"}} & set(sys.modules)
        log.close()
        assert "jax" not in sys.modules and "tensorboardX" in sys.modules
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True)


@pytest.fixture
def bucket(tmp_path, monkeypatch):
    """A bucket gs://bucket that is really a folder: epath goes to fsspec, and fsspec to this file system."""
    import fsspec
    from etils.epath import backend
    from fsspec.implementations.dirfs import DirFileSystem
    from fsspec.implementations.local import LocalFileSystem

    class Bucket(DirFileSystem):
        protocol = "gcs"
        cachable = False

        def __init__(self, **_):
            super().__init__(path=str(tmp_path), fs=LocalFileSystem(auto_mkdir=True))

        def _join(self, path):
            return super()._join(path.removeprefix("gs://"))

    fsspec.register_implementation("gcs", Bucket, clobber=True)
    monkeypatch.setenv("EPATH_USE_TF", "false")
    backend.fsspec_backend._get_filesystem.cache_clear()
    yield tmp_path / "bucket"
    backend.fsspec_backend._get_filesystem.cache_clear()


def test_a_run_in_a_bucket_uploads_now_and_then_and_appends_after_a_restart(bucket, monkeypatch):
    log = MetricsLog("gs://bucket/run")
    log.append(1, "train", loss=1.0)
    assert not (bucket / "run" / FILE).exists()
    monkeypatch.setattr(storage, "UPLOAD_SECONDS", 0.0)
    log.append(2, "train", loss=2.0)
    assert len((bucket / "run" / FILE).read_bytes().splitlines()) == 2
    monkeypatch.setattr(storage, "UPLOAD_SECONDS", 1e9)
    log.append(3, "train", loss=3.0)
    assert len((bucket / "run" / FILE).read_bytes().splitlines()) == 2
    log.flush()
    assert len((bucket / "run" / FILE).read_bytes().splitlines()) == 3
    log.close()
    with MetricsLog("gs://bucket/run") as log:
        log.append(4, "train", loss=4.0)
    assert read_metrics("gs://bucket/run", "train").column("loss").tolist() == [1, 2, 3, 4]
    assert len(events(bucket / "run" / "tensorboard")) == 2 + 4
    append_sample("gs://bucket/run", 1, "a", "b")
    append_sample("gs://bucket/run", 2, "a", "c")
    assert [sample.text for sample in read_samples("gs://bucket/run")] == ["b", "c"]


@given(
    st.lists(
        st.tuples(
            st.integers(0, 9),
            st.text(st.characters(exclude_categories=["Cs"]), max_size=20),
            st.sampled_from(
                [
                    "",
                    "\n",
                    "x\n\n",
                    "=== step 3 | prompt",
                    "\n== step",
                    "é\u2028\0",
                    "a\n=== ste",
                    "\n === step 1\n=== step 2 | prompt",
                ]
            ),
        ),
        max_size=6,
        unique_by=lambda sample: sample[:2],
    )
)
def test_samples_come_back(tmp_path_factory, samples):
    folder = tmp_path_factory.mktemp("samples")
    for sample in samples:
        append_sample(folder, *sample)
    assert read_samples(folder) == sorted((Sample(*sample) for sample in samples), key=lambda sample: sample.step)


def test_a_text_that_looks_like_a_header_cannot_break_the_file(tmp_path):
    append_sample(tmp_path, 1, "\n", 'a\n=== step 9 | prompt "x"\nb')
    append_sample(tmp_path, 2, "\n", "c")
    assert [(s.step, s.text) for s in read_samples(tmp_path)] == [(1, 'a\n=== step 9 | prompt "x"\nb'), (2, "c")]
    assert (tmp_path / "samples.txt").read_text().startswith('=== step 1 | prompt "\\n"\n\na\n')
