"""Tables: texts and numbers in .parquet and .arrow files and in saved datasets, against what was written."""

import json
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from flax import nnx

import jaxscale as jx
from jaxscale.data import Table, Text
from jaxscale.errors import UserError

POEMS = [f"poem {number}: {'la ' * (number % 7)}fin" for number in range(40)]


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("JAXSCALE_CACHE", str(tmp_path / "cache"))


def write_parquet(path, **columns):
    pq.write_table(pa.table(columns), path)
    return path


def write_stream(path, table):
    """The form of the files that `datasets` writes."""
    with pa.ipc.new_stream(path, table.schema) as writer:
        writer.write_table(table, max_chunksize=7)
    return path


def save_dataset(folder, table, parts=2):
    """A folder as `datasets.Dataset.save_to_disk` lays it out."""
    folder.mkdir(parents=True)
    names = [f"data-{part:05d}-of-{parts:05d}.arrow" for part in range(parts)]
    for part, name in enumerate(names):
        write_stream(folder / name, table.slice(part * 20, 20))
    state = {"_data_files": [{"filename": name} for name in names], "_fingerprint": "0f", "_format_type": None}
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "dataset_info.json").write_text(json.dumps({"features": {"text": {"dtype": "string"}}}))
    return folder


def decoded(opened):
    """The documents of all rows of an epoch, packed or not, as one sorted list of texts."""
    (rows,) = opened.parts
    batch = rows.read(np.arange(len(rows)))
    texts = []
    for tokens, targets, segments in zip(batch["tokens"], batch["targets"], batch["segments"], strict=True):
        for segment in range(1, segments.max() + 1):
            at = segments == segment
            texts.append(opened.tokenizer.decode([tokens[at][0], *targets[at]]))
    return sorted(texts)


def test_rows_of_every_form_of_a_table_are_the_documents_of_the_same_jsonl_file(tmp_path):
    (tmp_path / "poems.jsonl").write_text("\n".join(json.dumps({"text": poem}) for poem in POEMS))
    table = pa.table({"id": range(40), "text": POEMS})
    pq.write_table(table, tmp_path / "poems.parquet", row_group_size=9, use_dictionary=True)
    write_stream(tmp_path / "poems.arrow", table)
    with pa.ipc.new_file(tmp_path / "file.arrow", table.schema) as writer:
        writer.write_table(table)
    large = pa.table({"text": pa.array(POEMS).dictionary_encode().cast(pa.dictionary(pa.int32(), pa.large_string()))})
    pq.write_table(large, tmp_path / "large.parquet")
    for part in range(2):
        pq.write_table(table.slice(part * 20, 20), tmp_path / f"part-{part}.parquet")
    save_dataset(tmp_path / "saved", table)
    settings = {"layout": "packed", "context": 40, "fields": ("text",), "held_out": 0.2}
    expected = Text(tmp_path / "poems.jsonl", **settings).open(4, 0)
    assert decoded(expected) == sorted(POEMS[:32])
    paths = ["poems.parquet", "poems.arrow", "file.arrow", "large.parquet", "part-*.parquet", "saved"]
    paths = [tmp_path / path for path in paths] + [(tmp_path / "part-0.parquet", tmp_path / "part-1.parquet")]
    for path in paths:
        opened = Text(path, **settings).open(4, 0)
        assert decoded(opened) == decoded(expected), path
        np.testing.assert_array_equal(next(opened.train())["tokens"], next(expected.train())["tokens"])
    char = Text(tmp_path / "saved", "char", **settings).open(4, 0)
    assert char.tokenizer.alphabet == "".join(sorted(set("".join(POEMS))))
    assert decoded(char) == decoded(expected)


def test_a_prompt_and_its_answer_are_columns(tmp_path):
    path = write_parquet(tmp_path / "chat.parquet", question=["2 + 2?"] * 9, answer=["4!"] * 9)
    data = Text(path, layout="packed", context=16, fields=("question", "answer"), ending=".")
    batch = next(data.open(2, 0).train())
    learned = np.asarray(batch["targets"])[np.asarray(batch["weights"]) > 0]
    assert bytes(learned.astype(np.uint8).tolist()) == b"4!." * (len(learned) // 3)


def test_columns_of_numbers_are_arrays_and_a_run_on_them_is_reopened_and_continues_exactly(tmp_path):
    x = np.random.default_rng(0).normal(size=(40, 3)).astype(np.float32)
    fixed = pa.FixedSizeListArray.from_arrays(pa.array(x.reshape(-1)), 3)
    table = pa.table({"x": fixed, "y": x.sum(1).astype(np.float64), "even": np.arange(40) % 2 == 0})
    save_dataset(tmp_path / "saved", table)
    pq.write_table(table.set_column(0, "x", pa.array(x.tolist(), pa.list_(pa.float32()))), tmp_path / "list.parquet")
    opened = {path: Table(tmp_path / path, ("x", "y", "even")).open(4, 0) for path in ("saved", "list.parquet")}
    for each in opened.values():
        rows = each.parts[0].read(np.arange(36)), each.held_out[0].read(np.arange(4))
        assert {name: str(array.dtype) for name, array in rows[0].items()} == {
            "x": "float32",
            "y": "float32",
            "even": "bool",
        }
        both = {name: np.concatenate([part[name] for part in rows]) for name in rows[0]}
        order = np.argsort(both["y"])
        np.testing.assert_array_equal(both["x"][order], x[np.argsort(x.sum(1))])
    shards = [Table(tmp_path / "saved", ("x",)).open(4, 0, process=index, processes=2).train() for index in range(2)]
    whole = next(Table(tmp_path / "saved", ("x",)).open(4, 0).train())["x"]
    np.testing.assert_array_equal(np.concatenate([next(shard)["x"] for shard in shards]), whole)

    def experiment():
        def score(module, rows):
            return (module(rows["x"])[:, 0] - rows["y"]) ** 2

        model = jx.models.ForeignModel(lambda rngs: nnx.Linear(3, 1, rngs=rngs), score)
        data = Table(tmp_path / "saved", ("x", "y"))
        held_out = {"list": tmp_path / "list.parquet"}
        return jx.Experiment("t", model, data, held_out=held_out, steps=6, batch=4, plan=jx.Plan(mesh="1"))

    uncut = jx.train(experiment(), out=tmp_path / "uncut", quiet=True)
    jx.train(experiment(), out=tmp_path / "cut", quiet=True, callbacks=[lambda event: event.step == 2])
    continued = jx.train(experiment(), out=tmp_path / "cut", quiet=True)
    assert continued.evaluations[-1]["list/targets"] == 40
    for name in ("loss", "list/loss"):
        assert continued.evaluations[-1][name] == uncut.evaluations[-1][name]
    stored = json.loads((tmp_path / "cut" / "experiment.json").read_text())["data"]
    assert stored == {"type": "data.Table", "path": str(tmp_path / "saved"), "columns": ["x", "y"], "held_out": 0.1}


TEXT = {"fields": ("text",), "context": 8}


@pytest.mark.parametrize(
    ("columns", "data", "message"),
    [
        (
            {"txet": ["a"]},
            lambda p: Text(p, **TEXT),
            r"has no column 'text': .* txet; did you mean 'txet'",
        ),
        ({"text": ["a"]}, lambda p: Text(p), r"is a table, expected the name of its column of texts: set fields"),
        ({"text": [1]}, lambda p: Text(p, **TEXT), r"column 'text' holds int64, expected text"),
        ({"text": ["a", None]}, lambda p: Text(p, **TEXT), r"text of row 1 is null, expected a value"),
        ({"text": ["a", "b\0"]}, lambda p: Text(p, **TEXT), r"row 1: text contains a NUL character"),
        ({"text": pa.array([], pa.string())}, lambda p: Text(p, **TEXT), r"has no rows, expected texts"),
        ({"x": ["a"]}, lambda p: Table(p, ("x",)), r"column 'x' holds string, expected numbers, or lists of numbers"),
        (
            {"x": [[1], [1, 2]]},
            lambda p: Table(p, ("x",)),
            r"column 'x' has lists of 1 to 2 values, expected",
        ),
        ({"x": [[1], [None]]}, lambda p: Table(p, ("x",)), r"column 'x' has lists with nulls"),
        ({"x": [2**40]}, lambda p: Table(p, ("x",)), r"expected integers that fit in int32"),
        ({"x": [1.0]}, lambda p: Table(p, ("x", "y")), r"has no column 'y': its columns are x"),
        ({"x": pa.array([], pa.float32())}, lambda p: Table(p, ("x",)), r"the data has 0 rows"),
    ],
)
def test_a_column_that_cannot_be_read_is_refused(columns, data, message, tmp_path):
    for path in (
        write_parquet(tmp_path / "a.parquet", **columns),
        write_stream(tmp_path / "a.arrow", pa.table(columns)),
    ):
        with pytest.raises(UserError, match=message):
            data(path).open(1, 0)


@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
def test_a_damaged_table_is_refused(suffix, tmp_path):
    path = tmp_path / f"a.{suffix}"
    table = pa.table({"text": POEMS})
    pq.write_table(table, path) if suffix == "parquet" else write_stream(path, table)
    whole = path.read_bytes()
    for content in (b"", b"text", whole[: len(whole) // 2], b"\0" * 100, whole[:8] + b"\xff" * 60 + whole[68:]):
        path.write_bytes(content)
        with pytest.raises(
            UserError, match=r"a\.(parquet is not a complete Parquet|arrow is not a complete Arrow) file"
        ):
            Text(path, **TEXT).open(1, 0)


def test_a_folder_that_is_no_single_dataset_is_refused(tmp_path):
    (tmp_path / "splits").mkdir()
    (tmp_path / "splits" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(UserError, match=r"holds the splits train, test of a dataset, .*: give .*splits/train"):
        Text(tmp_path / "splits", **TEXT).open(1, 0)
    folder = save_dataset(tmp_path / "saved", pa.table({"text": POEMS}))
    state = json.loads((folder / "state.json").read_text())
    cases = [
        ({**state, "_indices_data_files": [{"filename": "indices.arrow"}]}, "saved by an early version of datasets"),
        ({**state, "_data_files": [{"filename": "../a.arrow"}]}, "state.json lists no files under _data_files"),
        ({**state, "_data_files": 3}, "state.json lists no files"),
        ([], "expected a JSON object"),
    ]
    for content, message in cases:
        (folder / "state.json").write_text(json.dumps(content))
        with pytest.raises(UserError, match=message):
            Text(folder, **TEXT).open(1, 0)
    (folder / "state.json").write_text("{")
    with pytest.raises(UserError, match=r"state\.json"):
        Text(folder, **TEXT).open(1, 0)
    (folder / "state.json").unlink()
    with pytest.raises(UserError, match="is a folder, expected text files"):
        Text(folder, **TEXT).open(1, 0)


def test_tables_need_pyarrow_and_fit_together(tmp_path, monkeypatch):
    paths = [write_parquet(tmp_path / f"{n}.parquet", x=x) for n, x in enumerate(([1.0] * 9, [1] * 9))]
    with pytest.raises(UserError, match=r"1\.parquet: each row of x is int32\[\], expected float32\[\], as in"):
        Table(tuple(paths), ("x",)).open(1, 0)
    (tmp_path / "a.csv").write_text("x")
    with pytest.raises(UserError, match=r"a\.csv is not a table, expected a name that ends in \.parquet or \.arrow"):
        Table(tmp_path / "a.csv", ("x",)).open(1, 0)
    for fields, message in (
        ({"columns": ("x", "x")}, "columns: got x, x, expected each name once"),
        ({"columns": ("x",), "held_out": 2.0}, r"held_out: got 2\.0, expected a share of the rows"),
        ({"columns": ("x",), "path": ()}, "path: got no path"),
    ):
        with pytest.raises(UserError, match=message):
            Table(**{"path": paths[0], **fields})
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(UserError, match=r"0\.parquet: tables need pyarrow .*pip install 'jaxscale\[parquet\]'"):
        Table(paths[0], ("x",)).open(1, 0)


def test_a_column_of_lists_is_read_in_a_fresh_process(tmp_path):
    """Where nothing else has imported the module of pyarrow that measures lists."""
    write_parquet(tmp_path / "rows.parquet", x=[[1.0, 2.0], [3.0, 4.0]])
    program = (
        "import sys; from jaxscale.data.arrow import read_arrays; content = open(sys.argv[1], 'rb').read();"
        "assert read_arrays(content, 'rows.parquet', ('x',))['x'].tolist() == [[1, 2], [3, 4]]"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path / "rows.parquet")], check=True)
