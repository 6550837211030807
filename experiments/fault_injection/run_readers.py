"""The readers of a run directory as targets of a fuzzer: checkpoints, metrics, reports and records of a launch."""

import dataclasses
import json
import os
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from fault_injection import mutate
from fault_injection.mutate import dumps
from fault_injection.readers import Prepared, Target, check_message, written

FIELDS_OF_TRAIN: dict[str, Any] = {
    "loss": 5.5,
    "grad_norm": 1.1,
    "learning_rate": 0.01,
    "tokens": 64,
    "step_seconds": 0.2,
    "tokens_per_second": 282.0,
    "flop_per_second": 6.5e6,
    "mfu": 0.4,
    "memory_bytes": 4096,
}


def _rows() -> list[dict[str, Any]]:
    """Return rows of metrics as a run writes them, with a resume, a step that was skipped, and the hours."""
    seconds = {"starting": 1.0, "compiling": 2.0, "stepping": 0.5}
    events: list[dict[str, Any]] = [
        {"step": 0, "name": "compile", "seconds": 2.0, "argument_bytes": 65_276, "temp_bytes": 171_120, "flop": 8e5},
        {"step": 0, "name": "kernels", "platform": "cpu", "attention": "plain", "why": {"attention": "no TPU"}},
        {"step": 0, "name": "predicted", "model_flop": 1_474_560, "parameters": 5416, "batch_bytes": 256},
        {"step": 1, "name": "hours", "at": "first new step", "process_start": 1.0, "seconds_by_phase": seconds},
        {"step": 2, "name": "skipped", "reason": "the loss is not finite"},
        {"step": 2, "name": "checkpoint", "path": "checkpoints/2", "seconds": 0.1, "bytes": 4000},
        {"step": 1, "name": "resume"},
        {"step": 4, "name": "finished"},
        {"step": 4, "name": "hours", "at": "end", "process_start": 1.0, "seconds_by_phase": seconds},
    ]
    rows = [{"kind": "event", "time": 10.0 + number, **event} for number, event in enumerate(events)]
    rows += [{"step": step, "kind": "train", "time": 12.0 + step, **FIELDS_OF_TRAIN} for step in (1, 2, 2, 3, 4)]
    rows[-2] |= {"loss": None, "nonfinite": {"loss": "nan"}}
    return [*rows, {"step": 4, "kind": "eval", "time": 17.0, "loss": 4.9, "accuracy": 0.5, "targets": 64}]


def _prepare_metrics(folder: Path) -> Prepared:
    from jaxscale.records.hours import hours
    from jaxscale.records.metrics import FILE, drop_torn_line, last_logged_step, read_metrics, unreadable_lines_note

    def read() -> None:
        rows = read_metrics(folder)
        for name in ("loss", "step"):
            rows.column(name)
        assert unreadable_lines_note(folder) is not None
        str(hours(folder))
        last_logged_step(folder)
        drop_torn_line(folder / FILE)

    return written(folder / FILE, read), [b"\n".join(map(dumps, _rows())) + b"\n", dumps(_rows()[-2]) + b"\n"]


def _layout() -> dict[str, Any]:
    """Return the content of layout.json."""
    entry = {"shape": [256, 8], "dtype": "float32", "bytes": 8192, "bytes_per_device": 4096}
    entries = [{"name": "embedding/weight", "spec": [], **entry}, {"name": "a/b", "spec": [["data"], None], **entry}]
    facts = {"mesh": {"data": 2}, "devices": 2, "kind": "cpu", "parameters": entries, "unsplit": ["a/b"]}
    return {**facts, "capacity_bytes": 2**30, "memory": {"parameters": 21_664, "batch": 256}, "host_memory": {"a": 8}}


def _record_files(folder: Path) -> dict[str, Path]:
    """Return the path of each file of a run that a report reads, by the file's name."""
    names = {name: name for name in ("experiment.json", "plan.json", "layout.json", "metrics.jsonl", "samples.txt")}
    names |= {"source.json": "source/source.json", "heartbeat": "processes/rank-00000.json"}
    names |= {"attempts.jsonl": "processes/attempts.jsonl"}
    return {name: folder / path for name, path in names.items()}


def _write_record(paths: dict[str, Path], record: Any) -> None:
    """Write the files of a run: lines for lists, texts as they are, anything else as JSON."""
    for name, path in paths.items():
        content = record.get(name) if isinstance(record, dict) else None
        if content is None:
            path.unlink(missing_ok=True)
        elif isinstance(content, str) and content != mutate.DEEP:
            path.write_bytes(content.encode("utf-8", "replace"))
        else:
            path.write_bytes(b"\n".join(map(dumps, content)) if isinstance(content, list) else dumps(content))


def _heartbeat(**fields: Any) -> dict[str, Any]:
    """Return the content of a heartbeat file."""
    from jaxscale.heartbeat import Heartbeat

    seconds = {"starting": 1.0, "stepping": 2.5}
    beat = Heartbeat(0, "host", os.getpid(), 2, "stepping", 7, 0.5, 3.5, 9, seconds, place="loop.py:1 train")
    return {**dataclasses.asdict(beat), **fields}


def _attempts() -> list[dict[str, Any]]:
    """Return the records of attempts."""
    from jaxscale.records.attempts import Attempt

    attempts = [
        Attempt(1, "launch", 137, 4, 0.5, 11.0, "rank 0 was ended by SIGKILL", {"stepping": 3.0}),
        Attempt(2, "launch", 0, 8, 11.0, 20.0, "", {"stepping": 3.0, "compiling": 2.0}),
    ]
    return [dataclasses.asdict(attempt) for attempt in attempts]


def _prepare_report(folder: Path) -> Prepared:
    from jaxscale.records.record import RunRecord
    from jaxscale.report.page import report_html
    from jaxscale.report.summary import _summary_rows, summary

    paths = _record_files(folder)
    for path in paths.values():
        path.parent.mkdir(exist_ok=True)
    plan = {"version": 2, "mesh": "data:2", "zero": 3, "microbatches": 2, "pipeline": "1f1b:2x4,stages=3+1,stash=input"}
    plan |= {"precision": "bfloat16", "matmul": "int8", "reduce": "int8", "memory": "save:1MiB", "kernels": "auto"}
    plan |= {"offload": {"weights": "host"}, "state": {"moments": "int8", "master": "split"}, "diloco": "every=3"}
    record = {
        "experiment.json": {"name": "a", "steps": 8, "batch": 4, "seed": 1, "model": {"type": "models.Decoder"}},
        "plan.json": plan,
        "layout.json": _layout(),
        "metrics.jsonl": _rows(),
        "samples.txt": '=== step 4 | prompt "a"\na text\n\n',
        "source.json": {"relative": "a.py", "variant": "tiny", "overrides": {"batch": "8"}, "versions": {"jax": "1"}},
    }
    launch = {"heartbeat": _heartbeat(), "attempts.jsonl": _attempts()}
    version_1 = {"plan.json": {"stages": [3, 1], "pipeline": "2bw:2x4", "state": "int8", "weights": "host"}}

    def run(data: bytes) -> None:
        try:
            values = json.loads(data)
        except (ValueError, RecursionError):
            return
        _write_record(paths, values)
        run_record = RunRecord.read(folder)
        report_html(run_record).encode(errors="replace")
        if zlib.crc32(data) % 8 == 0:  # rich takes as long as all the rest
            summary(folder, width=80).encode(errors="replace")
        else:
            with np.errstate(all="ignore"):
                _summary_rows(run_record)

    return run, [dumps(record), dumps({**record, **launch}), dumps({**record, **version_1}), dumps(launch)]


def _prepare_launch(folder: Path) -> Prepared:
    from jaxscale.errors import UserError
    from jaxscale.heartbeat import heartbeat_file
    from jaxscale.launch.host import record_earlier_attempt
    from jaxscale.launch.status import status
    from jaxscale.launch.verdict import Ending
    from jaxscale.launch.watch import FAILURE
    from jaxscale.records.attempts import FILE

    paths = {"attempts": folder / FILE, "failure": folder / FAILURE}
    paths |= {f"rank {rank}": heartbeat_file(folder, rank) for rank in (0, 1)}
    failure = dataclasses.asdict(Ending(1, "host", 2, "exit", -9))
    record = {"attempts": _attempts(), "failure": failure, "rank 0": _heartbeat(), "rank 1": _heartbeat(rank=1, step=6)}

    def run(data: bytes) -> None:
        try:
            values = json.loads(data)
        except (ValueError, RecursionError):
            return
        _write_record(paths, values)
        try:
            status(folder)
        except UserError as error:
            check_message(error)
        record_earlier_attempt(folder, 3)

    return run, [dumps(record), dumps({**record, "failure": {**failure, "cause": "timeout", "seconds": 60.0}})]


# -- checkpoints -------------------------------------------------------------------------------------------------------


def _arrays() -> dict[str, Any]:
    import jax.numpy as jnp

    return {"params/a": jnp.ones((2, 3)), "params/b": jnp.zeros(4, jnp.bfloat16), "optimizer/count": jnp.array(3)}


def _prepare_checkpoint(folder: Path) -> Prepared:
    import jax

    from jaxscale.checkpoint.store import Checkpoints
    from jaxscale.checkpoint.verified import DamagedError, Description, _check_arrays, read_content
    from jaxscale.state.conversion import conversion

    arrays = _arrays()
    description = Description(4, 64, {"next": 4}, "fuzzed", 2.5, 2.5, {"jax": "1"})
    Checkpoints(folder).save_arrays(arrays, description, wait=True)
    leaves = {
        name: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding) for name, array in arrays.items()
    }
    path = folder / "00000004" / "_CHECKPOINT_METADATA"

    def read() -> None:
        content = read_content(path.parent)
        assert isinstance(Description.of(content).is_good, bool)
        converter = conversion(content["arrays"], leaves)
        _check_arrays(content["arrays"], converter.abstract, path.parent)

    return written(path, read, (DamagedError,)), [path.read_bytes()]


def _prepare_host_copy(folder: Path) -> Prepared:
    import jax

    from jaxscale.checkpoint.host_copies import FOLDER_VARIABLE, HostCopies
    from jaxscale.checkpoint.verified import Description

    os.environ[FOLDER_VARIABLE] = str(folder)
    run_dir = folder / "run"
    run_dir.mkdir()
    arrays = _arrays()
    leaves = {
        name: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding) for name, array in arrays.items()
    }
    copies = HostCopies(run_dir, leaves)
    copies.save_arrays(arrays, Description(4, 64, {"next": 4}, "fuzzed"))
    copies.wait()
    (path,) = copies.folder.glob("start-*")
    return written(path, lambda: copies.restore_arrays(leaves, 0, 8)), [path.read_bytes()]


def _prepare_copies_record(folder: Path) -> Prepared:
    from jaxscale.checkpoint.host_copies import FOLDER_VARIABLE, RUN_FILE, HostCopies

    os.environ[FOLDER_VARIABLE] = str(folder)
    run_dir = folder / "run"
    run_dir.mkdir()
    HostCopies(run_dir, {})
    path = run_dir / RUN_FILE
    return written(path, lambda: HostCopies(run_dir, {}).restore_arrays({}, 0, 8)), [path.read_bytes()]


def _prepare_init_from(folder: Path) -> Prepared:
    from jaxscale.checkpoint.init_from import FILE, Match, WarmStart, recorded_source
    from jaxscale.checkpoint.weights import WeightSource

    source = WeightSource("source", 4, {"params/a": (2,)}, True, lambda leaves, say: {})
    record = WarmStart(source, Match.of(source.shapes, {"params/a": (3,)}), {"params/a": (3,)}).record

    def read() -> None:
        path, step = recorded_source(folder, None, True)
        if path is not None:
            WeightSource.open(path, step)

    return written(folder / FILE, read), [dumps(record), dumps({**record, "step": None})]


RUN_TARGETS = (
    Target("init_from.json", mutate.JSON, _prepare_init_from, ("gs://a/b", "/dev/zero", "~")),
    Target("metrics.jsonl", mutate.LINES, _prepare_metrics),
    Target(
        "report", mutate.FOLDER, _prepare_report, ("expert", "correction=a", "anneal=1", "data:2,x:3", "loss_chunk=8")
    ),
    Target("launch records", mutate.FOLDER, _prepare_launch, ("frozen", "missing", "saving", "finished")),
    Target("checkpoint", mutate.DESCRIPTION, _prepare_checkpoint, ("params/a/codes.soft8", "params/a/scale", "uint8")),
    Target("host copy", mutate.HOST_COPY, _prepare_host_copy),
    Target("record of host copies", mutate.JSON, _prepare_copies_record),
)
