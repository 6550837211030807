import json
import os
import time

import pytest

from jaxscale.errors import UserError
from jaxscale.models.decoder import Decoder
from jaxscale.pipeline.csv import parse_csv, read_csv
from jaxscale.pipeline.plan import PipelinePlan
from jaxscale.recipe.experiment import Checkpointing, Experiment
from jaxscale.recipe.plan import Plan, read_plan
from jaxscale.sharding.mesh import MeshSpec
from jaxscale.values.limits import MAX_JSON_DEPTH
from jaxscale.values.read_files import parse_json, read_bytes

MODEL = Decoder(vocab=16, context=8, layers=1, embed=8, heads=1)


@pytest.mark.parametrize(
    ("make", "bound"),
    [
        (lambda: Decoder(vocab=2**31), "vocab: got .* at most 2,147,483,647"),
        (lambda: Decoder(vocab=16, context=2**31), "context: got .* at most 2,147,483,647"),
        (lambda: Decoder(vocab=16, layers=10**9), "layers: got .* at most 65,536"),
        (lambda: Decoder(vocab=16, embed=10**9), "embed: got .* at most 16,777,216"),
        (lambda: Decoder(vocab=16, norm_eps=10**400), "norm_eps: got .*expected a number"),
        (lambda: Decoder(vocab=10**5000), "vocab: got a number of more than 4,300 digits"),
        (lambda: Plan(microbatches=10**9), "microbatches: got .* at most 1,048,576"),
        (lambda: MeshSpec(data=10**9), "mesh axis data: got .* at most 1,048,576"),
        (lambda: PipelinePlan.parse("1f1b:2x99999999"), "got 199,999,998, expected at most 524,288"),
        (lambda: Checkpointing(every=10**400), "checkpoint.every: got .* at most 9,223,372,036,854,775,807"),
        (lambda: Experiment("n" * 256, MODEL, None), "name: number of bytes .* at most 255"),
        (lambda: Experiment("\ud800", MODEL, None), "a character that no file name can have"),
    ],
)
def test_a_size_above_its_bound_is_refused_by_name(make, bound):
    with pytest.raises(UserError, match=bound):
        make()


@pytest.mark.parametrize("text", ["data:²", "data:٣", "data:" + "9" * 5000])
def test_only_ascii_digits_are_a_mesh_size(text):
    with pytest.raises(UserError, match="expected AXIS:DEVICES"):
        MeshSpec.parse(text)


def test_a_large_table_is_made_when_it_is_needed():
    start = time.perf_counter()
    assert PipelinePlan.parse("1f1b:512x512").shape() == (512, 512)
    assert time.perf_counter() - start < 1


@pytest.mark.parametrize("text", ["chimera:3x6", "chimera:4x6", "interleaved:2x4,v=1", "2bw:4x2", "1f1b:2x4,v=2"])
def test_numbers_without_a_schedule_are_refused_without_a_table(text):
    with pytest.raises(UserError, match="schedule"):
        PipelinePlan.parse(text)


def test_json_is_bounded():
    assert parse_json("[" * MAX_JSON_DEPTH + "]" * MAX_JSON_DEPTH, "a")
    for text, message in [
        ("[" * (MAX_JSON_DEPTH + 1) + "]" * (MAX_JSON_DEPTH + 1), "at most 64 levels"),
        ("[" * 100_000, "at most 64 levels"),
        ("9" * 5000, "more than 4,300 digits"),
        (b"\xff", "is not JSON"),
    ]:
        with pytest.raises(UserError, match=message):
            parse_json(text, "a")


@pytest.mark.parametrize("read", [read_plan, read_csv, read_bytes])
def test_only_regular_files_are_read(tmp_path, read):
    os.mkfifo(tmp_path / "pipe")
    for path, kind in [("/dev/zero", "a device"), (tmp_path / "pipe", "a pipe"), (tmp_path, "a folder")]:
        with pytest.raises(UserError, match=f"is {kind}, expected a regular file"):
            read(type(tmp_path)(path))
    with pytest.raises(UserError, match="cannot read"):
        read(tmp_path / ("n" * 300))
    (tmp_path / "large").write_bytes(b"12345")
    with pytest.raises(UserError, match="has 5 bytes, expected at most 4"):
        read_bytes(tmp_path / "large", 4)


@pytest.mark.parametrize("text", ["0F" + "9" * 5000, "x" * 200_000, "\x00"])
def test_a_csv_cell_is_bounded(text):
    with pytest.raises(UserError):
        parse_csv(text)


def test_a_csv_whose_stages_and_microbatches_are_many_is_refused_at_once():
    start = time.perf_counter()
    cells = [f"{stage}F0" for stage in range(20_000)] + [f"0F{microbatch}" for microbatch in range(1, 20_000)]
    with pytest.raises(UserError):
        parse_csv("\n".join([",".join(cells), ",".join(f"{s}B19999" for s in range(20_000))]))
    assert time.perf_counter() - start < 5


def test_a_plan_file_nested_deeply_is_refused(tmp_path):
    (tmp_path / "plan.json").write_text(json.dumps({"mesh": None})[:-1] + ', "rules": ' + "[" * 5000 + "]" * 5000 + "}")
    with pytest.raises(UserError, match=r"plan\.json: its JSON is nested too deeply"):
        read_plan(tmp_path / "plan.json")
