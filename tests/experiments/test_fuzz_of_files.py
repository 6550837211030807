"""The readers of files take what a fuzzer gives them: valid files, mutated ones, and what ended in a traceback once."""

import contextlib
import datetime
import importlib.util
import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from fault_injection.fuzz import TARGET_BY_NAME
from fault_injection.mutate import DEEP, mutated, with_changed_bytes
from fault_injection.planted import PLANTED
from fault_injection.readers import words_of

ROOT = Path(__file__).parents[2]
FAULTY_VALUES: list[tuple[str, int, tuple[str | int, ...], Any]] = [
    ("safetensors", 0, ("header", "b.weight", "shape"), [0, 2**62, 4]),
    ("tokenizer of a run", 1, ("alphabet",), "\ud800"),
    ("chats", 0, (0, "prompt"), "\ud83d"),
    ("experiment.json", 0, ("model", "type"), ".x:Model"),
    ("experiment.json", 0, ("model", "type"), f"{'a.' * 5000}a:Model"),
    ("token cache", 0, ("dtype",), "uint80"),
    ("token cache", 0, ("train",), "held_out"),
    ("token cache", 0, ("train", "documents"), "1"),
    ("token cache", 0, ("hash",), DEEP),
    ("source.json", 0, ("file",), {}),
    ("source.json", 0, ("file",), "."),
    ("source.json", 0, ("file",), "n" * 300),
    ("metrics.jsonl", 0, (0, "time"), "12"),
    ("metrics.jsonl", 0, (3, "process_start"), None),
    ("metrics.jsonl", 0, (8, "seconds_by_phase"), 3),
    ("metrics.jsonl", 0, (8, "seconds_by_phase", "starting"), "a"),
    ("metrics.jsonl", 0, (9, "loss"), 10**400),
    ("report", 0, ("metrics.jsonl", 0, "seconds"), 10**400),
    ("report", 0, ("metrics.jsonl", 0, "seconds"), -1e308),
    ("report", 0, ("metrics.jsonl", 2, "parameters"), 10**400),
    ("report", 0, ("metrics.jsonl", 9, "memory_bytes"), float("inf")),
    ("report", 0, ("metrics.jsonl", -2, "loss"), "text"),
    ("report", 0, ("metrics.jsonl",), [{"step": n, "kind": "train", "loss": (-1) ** n * 1e308} for n in (1, 2, 3)]),
    ("report", 0, ("metrics.jsonl", 9, "step"), 2**63 - 1),
    ("report", 0, ("metrics.jsonl", 0, "time"), 1e300),
    ("report", 0, ("plan.json", "zero"), []),
    ("report", 0, ("plan.json", "offload"), [1]),
    ("report", 0, ("plan.json", "pipeline"), "1f1b:2x4,correction=much"),
    ("report", 3, ("plan.json",), {"kernels": 3, "attention": "chunked"}),
    ("report", 0, ("layout.json", "mesh"), dict.fromkeys("abcd", 2**40)),
    ("report", 0, ("layout.json", "devices"), "two"),
    ("report", 0, ("layout.json", "parameters", 0, "shape", 0), "256"),
    ("report", 0, ("layout.json", "parameters", 0, "bytes"), "many"),
    ("report", 0, ("layout.json", "parameters", 0, "spec"), [3]),
    ("report", 0, ("layout.json", "memory", "batch"), 10**400),
    ("report", 0, ("samples.txt",), f"=== step 4 | prompt {'[' * 3000}\na\n"),
    ("report", 1, ("attempts.jsonl", 1, "number"), "1"),
    ("report", 1, ("attempts.jsonl", 0, "seconds_by_phase"), [1]),
    ("launch records", 0, ("attempts", 0, "end_time"), []),
    ("launch records", 0, ("failure", "code"), "9"),
    ("launch records", 0, ("rank 0", "rank"), 2**40),
    ("launch records", 0, ("rank 0", "since"), 10**400),
    ("launch records", 0, ("failure", "host"), DEEP),
    ("checkpoint", 0, ("jaxscale", "format"), "1"),
    ("checkpoint", 0, ("jaxscale",), {"format": 1, "step": 4}),
    ("checkpoint", 0, ("jaxscale", "arrays"), 3),
    ("checkpoint", 0, ("jaxscale", "arrays", "params/a", 1), "1,+"),
    ("host copy", 0, ("header", "parts", 0, 3), "1,+"),
    ("checkpoint", 0, ("jaxscale", "arrays", "params/a"), 3),
    ("checkpoint", 0, ("jaxscale", "arrays"), {f"a/{name}": [[2], "uint8", 1, 1] for name in ("codes.soft8", "scale")}),
    ("host copy", 0, ("header", "parts"), 3),
    ("host copy", 0, ("header", "parts", 0, 4), -8),
    ("host copy", 0, ("header", "parts", 0, 2), []),
    ("host copy", 0, ("header", "newest_checkpoint"), []),
    ("host copy", 0, ("header",), DEEP),
    ("record of host copies", 0, ("number",), DEEP),
    ("record of host copies", 0, ("number",), float("inf")),
    ("tokenizer.json", 3, ("model", "unk_token"), "[MISSING]"),
]
"""Target, number of the valid file, place of a value in it, and a value that ended in a traceback once."""


@pytest.fixture(autouse=True)
def _memory(monkeypatch, tmp_path):
    monkeypatch.setenv("JAXSCALE_MEMORY", str(tmp_path))  # two targets set it


@pytest.mark.parametrize("name", TARGET_BY_NAME)
@pytest.mark.parametrize("count", [200, pytest.param(4000, marks=pytest.mark.slow)])
def test_a_mutated_file_is_read_or_refused(name, count, tmp_path):
    seed = int(datetime.date.today().strftime("%Y%m%d"))
    target, rng = TARGET_BY_NAME[name], random.Random(f"{seed}/{name}/{count}")
    run, files = target.prepare(tmp_path)
    for file in files:
        run(file)
    words = words_of(target, files)
    for number in range(count // 8 if name in ("report", "checkpoint", "experiment.json") else count):
        data = rng.choice(files)
        for _ in range(rng.choice((1, 1, 2, 4))):
            data = mutated(data, target.form, words, rng)
        try:
            run(data)
        except Exception:
            print(f"seed {seed}, file {number}: {data!r}")
            raise


@pytest.mark.parametrize(("name", "file_number", "place", "value"), FAULTY_VALUES, ids=lambda value: repr(value)[:40])
def test_what_the_fuzzer_found_stays_mended(name, file_number, place, value, tmp_path):
    target = TARGET_BY_NAME[name]
    run, files = target.prepare(tmp_path)
    values = target.form.parse(files[file_number])
    container = values
    for key in place[:-1]:
        container = container[key]
    container[place[-1]] = value
    run(target.form.build(values))


@pytest.mark.parametrize("name", TARGET_BY_NAME)
def test_a_form_builds_the_files_that_it_parses(name, tmp_path):
    target = TARGET_BY_NAME[name]
    _, files = target.prepare(tmp_path)
    for file in files:
        values = target.form.parse(file)
        assert target.form.parse(target.form.build(values)) == values


def test_mutations_change_most_files_and_keep_their_form():
    rng = random.Random(0)
    target = TARGET_BY_NAME["plan.json"]
    file = b'{"mesh": "data:2", "zero": 3, "rules": {"embed": ["fsdp"]}}'
    mutations = [mutated(file, target.form, ("fsdp",), rng) for _ in range(400)]
    parsed_count = 0
    for mutation in mutations:
        with contextlib.suppress(ValueError, RecursionError):
            parsed_count += isinstance(json.loads(mutation), dict)
    assert len(set(mutations)) > 200
    assert 250 < parsed_count < 400
    assert len({with_changed_bytes(file, rng) for _ in range(100)}) > 60


def test_without_atheris_the_harness_names_the_command_that_installs_it():
    if importlib.util.find_spec("atheris") is not None:
        pytest.skip("atheris is installed")
    command = [sys.executable, str(ROOT / "experiments" / "faults.py"), "--part", "fuzz", "--tiny"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert result.returncode == 2
    assert "pip install 'jaxscale[fuzz]'" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANTED)
def test_the_fuzzer_finds_a_planted_fault(name):
    pytest.importorskip("atheris")
    command = [sys.executable, str(ROOT / "experiments" / "faults.py"), "--part", "fuzz", "--only", name]
    result = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stdout
    assert ": found" in result.stdout
