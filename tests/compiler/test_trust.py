import json

import pytest

from jaxscale.compiler import compile as judge
from jaxscale.compiler import trust
from jaxscale.compiler.report import CompileReport, OutOfMemory
from jaxscale.errors import UserError
from tests.compiler import programs


@pytest.fixture
def libtpu(tmp_path, monkeypatch):
    """A libtpu that the user names, and what it would say of the known program."""
    monkeypatch.setenv("JAXSCALE_CACHE", str(tmp_path / "cache"))
    file = tmp_path / "libtpu.so"
    file.write_bytes(b"another")
    monkeypatch.setenv("TPU_LIBRARY_PATH", str(file))
    asked = []

    def says(report):
        monkeypatch.setattr(judge, "_run_request", lambda *_: asked.append(1) or report)
        return asked

    return says


def report(device_bytes):
    return CompileReport("tpu v5e:2x2", argument_bytes=0, output_bytes=0, alias_bytes=0, temp_bytes=device_bytes)


def test_one_that_counts_too_much_is_refused_and_remembered(libtpu):
    asked = libtpu(report(2080 * trust.MIB))  # what 0.0.42 and 0.0.50 say
    for _ in range(2):
        with pytest.raises(UserError, match=r"reports 2080 MiB for a program of 1696 MiB; install libtpu==0.0.51"):
            judge.compile_report(programs.train_step, "tpu v5e:2x2")
    assert len(asked) == 1


def test_one_that_agrees_may_judge(libtpu, tmp_path):
    asked = libtpu(report(trust.KNOWN_BYTES + trust.MIB))
    judge.compile_report(programs.train_step, "tpu v5e:2x2")
    judge.compile_report(programs.train_step, "tpu v5e:2x2")
    assert len(asked) == 3  # the check, and each program
    verdicts = [json.loads(path.read_text()) for path in (tmp_path / "cache" / "reports").iterdir()]
    assert [one["device_bytes"] for one in verdicts] == [trust.KNOWN_BYTES + trust.MIB]


@pytest.mark.parametrize(
    "broken",
    [
        CompileReport("tpu v5e:2x2", crashed="the compiler died by SIGSEGV"),
        CompileReport("tpu v5e:2x2", oom=OutOfMemory(9, 1, "on-chip", "E1001")),
    ],
)
def test_one_that_dies_is_refused(libtpu, broken):
    libtpu(broken)
    with pytest.raises(UserError, match="is not trusted"):
        judge.compile_report(programs.train_step, "tpu v5e:2x2")


def test_a_file_that_is_not_there(monkeypatch):
    with pytest.raises(UserError, match=r"TPU_LIBRARY_PATH: .*/nowhere/libtpu.so"):
        trust.libtpu({"TPU_LIBRARY_PATH": "/nowhere/libtpu.so"})


def test_a_verdict_that_cannot_be_read_is_none(tmp_path):
    file = trust.verdict_file(tmp_path, "0.0.50")
    assert trust.read_verdict(file) is None
    for text in ("", "{}", "[1]", '{"device_bytes": "many"}', "[" * 100_000):
        file.write_text(text)
        assert trust.read_verdict(file) is None
