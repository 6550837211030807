"""The reader and writer of safetensors against the safetensors library, and against files cut and bent."""

import json
import shutil

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from jaxscale.errors import UserError
from jaxscale.models import safetensors_folder
from tests.models.goldens import GOLDEN


def arrays(seed=0):
    rng = np.random.default_rng(seed)
    return {
        "a.weight": rng.normal(size=(3, 5)).astype(np.float32),
        "b": rng.normal(size=(7,)).astype(ml_dtypes.bfloat16),
        "c.empty": np.zeros((0, 4), np.float16),
        "d.scalar": np.array(3, np.int64),
        "e": rng.normal(size=(2, 2, 2)),
    }


@pytest.mark.parametrize("folder", ["llama", "llama/bf16", "llama/sharded"])
def test_reads_what_the_library_reads(folder):
    found = safetensors_folder.read(GOLDEN / folder)
    wanted = {}
    for path in (GOLDEN / folder).glob("model*.safetensors"):
        wanted |= safetensors.numpy.load_file(path)
    assert found.keys() == wanted.keys()
    for name in wanted:
        assert found[name].dtype == wanted[name].dtype
        np.testing.assert_array_equal(found[name], wanted[name])
        assert not found[name].flags.writeable  # mapped, not copied


@pytest.mark.parametrize("shard_bytes", [1_000_000, 50, 1])
def test_the_library_reads_what_is_written(tmp_path, shard_bytes):
    given = arrays()
    safetensors_folder.write(tmp_path, given, shard_bytes=shard_bytes)
    wanted = {}
    files = sorted(tmp_path.glob("*.safetensors"))
    for path in files:
        wanted |= safetensors.numpy.load_file(path)
    assert (len(files) > 1) == (shard_bytes < 1_000_000) == (tmp_path / "model.safetensors.index.json").exists()
    for found in (wanted, safetensors_folder.read(tmp_path)):
        assert found.keys() == given.keys()
        for name, array in given.items():
            assert found[name].dtype == array.dtype
            assert found[name].shape == array.shape
            np.testing.assert_array_equal(found[name], array)
    assert not list(tmp_path.glob("*.partial"))
    if len(files) > 1:
        index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
        assert index["metadata"]["total_size"] == sum(array.nbytes for array in given.values())


def test_a_file_cut_anywhere_is_refused(tmp_path):
    whole = (GOLDEN / "llama" / "bf16" / "model.safetensors").read_bytes()
    for size in [0, 5, 8, 100, 1000, len(whole) // 2, len(whole) - 1]:
        (tmp_path / "model.safetensors").write_bytes(whole[:size])
        with pytest.raises(UserError, match=r"model\.safetensors: (its header|tensor \S+ ends at byte).*copy it again"):
            safetensors_folder.read(tmp_path)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"dtype": "F4", "shape": [2], "data_offsets": [0, 1]}, "tensor x has dtype .F4., expected one of F64"),
        (
            {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]},
            "tensor x of shape .3,. has bytes 0 to 8, expected 12",
        ),
        ({"dtype": "F32", "shape": [2], "data_offsets": [8, 0]}, "tensor x of shape .2,. has bytes 8 to 0"),
        ({"dtype": "F32", "shape": [2], "data_offsets": [8, 16]}, "tensor x ends at byte 16 of the data, which has 8"),
        ({"dtype": "F32", "shape": "two"}, "tensor x: expected dtype, shape .* data_offsets"),
        (7, "tensor x: expected dtype, shape .* got 7"),
    ],
)
def test_a_bent_header_is_refused(tmp_path, entry, message):
    header = json.dumps({"x": entry}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    with pytest.raises(UserError, match=message):
        safetensors_folder.read(tmp_path)


def test_a_header_that_is_no_json_is_refused(tmp_path):
    (tmp_path / "model.safetensors").write_bytes((4).to_bytes(8, "little") + b"\xff{[}")
    with pytest.raises(UserError, match="header is not a JSON object"):
        safetensors_folder.read(tmp_path)


@pytest.fixture
def sharded(tmp_path):
    shutil.copytree(GOLDEN / "llama" / "sharded", tmp_path / "sharded")
    return tmp_path / "sharded"


def change(folder, edit):
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    edit(index)
    path.write_text(json.dumps(index))


def test_an_absent_shard_is_named(sharded):
    (sharded / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(
        UserError, match=r"tensor model\.layers\.0\S+ lies in model-00002-of-00003\.safetensors, which is missing"
    ):
        safetensors_folder.read(sharded)


def test_an_index_and_shards_that_disagree_are_refused(sharded):
    change(sharded, lambda index: index["weight_map"].update({"model.norm.weight": "model-00001-of-00003.safetensors"}))
    with pytest.raises(UserError, match=r"the index lists tensor model\.norm\.weight in this file, which lacks it"):
        safetensors_folder.read(sharded)
    change(sharded, lambda index: index["weight_map"].pop("model.norm.weight"))
    with pytest.raises(
        UserError, match=r"model-00003\S+ tensor model\.norm\.weight is not in model\.safetensors\.index"
    ):
        safetensors_folder.read(sharded)


def test_an_index_that_points_outside_or_is_no_index_is_refused(sharded):
    change(sharded, lambda index: index["weight_map"].update({"model.norm.weight": "../model.safetensors"}))
    with pytest.raises(
        UserError, match=r"model\.norm\.weight lies in '\.\./model\.safetensors', expected a file of the same"
    ):
        safetensors_folder.read(sharded)
    change(sharded, lambda index: index.update(weight_map=[1]))
    with pytest.raises(UserError, match="expected a weight_map of tensor names to file names"):
        safetensors_folder.read(sharded)
    (sharded / "model.safetensors.index.json").write_text("{")
    with pytest.raises(UserError, match="expected JSON with a weight_map"):
        safetensors_folder.read(sharded)


def test_nothing_to_read_is_said_with_what_is_there(tmp_path):
    with pytest.raises(UserError, match="found nothing; give the folder of a saved model"):
        safetensors_folder.read(tmp_path)
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(UserError, match=r"found pytorch_model\.bin; save the model with safe_serialization=True"):
        safetensors_folder.read(tmp_path)


def _bare_file(folder, header_text, body_bytes):
    header = header_text if isinstance(header_text, bytes) else header_text.encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(body_bytes))


A = '"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}'


@pytest.mark.parametrize(
    ("header", "body_bytes", "message"),
    [
        ("{" + A + ',"b":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}', 4, "two tensors share bytes"),
        ("{" + A + ',"b":{"dtype":"F32","shape":[1],"data_offsets":[8,12]}}', 12, "some bytes belong to no tensor"),
        ("{" + A + "}", 5, "some bytes belong to no tensor"),
        ("{}", 1, "some bytes belong to no tensor"),
        ("{" + A + "," + A + "}", 4, "'a' occurs twice"),
        ("{" + A + ',"__metadata__":[1]}', 4, "__metadata__: expected a JSON object of texts"),
        ("{" + A + ',"__metadata__":{"x":1}}', 4, "__metadata__: expected a JSON object of texts"),
        ('{"a":{"dtype":"F32","shape":[-1],"data_offsets":[0,4]}}', 4, "whole numbers >= 0"),
        ('{"a":{"dtype":"F32","shape":[1.0],"data_offsets":[0,4]}}', 4, "whole numbers >= 0"),
        ('{"a":{"dtype":["F32"],"shape":[1],"data_offsets":[0,4]}}', 4, "tensor a: expected dtype"),
        ('{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4],"more":1}}', 4, "tensor a: expected dtype"),
        ('{"a":{"dtype":"F32","shape":[' + "1," * 99 + '1],"data_offsets":[0,4]}}', 4, "at most 32 dims"),
        (b'{"\xff":1}', 0, "not a JSON object"),
        (" {}", 0, "not a JSON object"),
        ("[" * 100_000, 0, "not a JSON object"),
        ('{"a":' + "9" * 5000 + "}", 0, "not a JSON object"),
    ],
)
def test_a_file_is_read_strictly(tmp_path, header, body_bytes, message):
    _bare_file(tmp_path, header, body_bytes)
    with pytest.raises(UserError, match=message) as error:
        safetensors_folder.read(tmp_path)
    assert str(tmp_path / "model.safetensors") in str(error.value)


@pytest.mark.parametrize("shard", ["../x", "/etc/passwd", "", "..\\x", "n" * 300, "missing"])
def test_an_index_names_files_of_its_folder(tmp_path, shard):
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": shard}}))
    with pytest.raises(UserError, match=r"index\.json: tensor a lies in"):
        safetensors_folder.read(tmp_path)
