import pathlib

import numpy as np
import pytest

from jaxscale.data import Images
from jaxscale.errors import UserError

DIGITS = pathlib.Path(__file__).parents[2] / "experiments" / "data" / "digits.npz"


def test_every_digit_is_trained_on_or_held_out_scaled_and_with_its_label():
    opened = Images(DIGITS, scale=16.0, held_out=0.25).open(100, 0)
    assert opened.facts["classes"] == 10
    assert opened.facts["shape"] == [8, 8, 1]
    assert opened.tokenizer is None
    rows = opened.facts["rows"], opened.facts["held_out_rows"]
    assert rows == (1347, 450)
    with np.load(DIGITS) as file:
        expected = {(image.tobytes(), int(label)) for image, label in zip(file["x"], file["y"], strict=True)}
    found = []
    train = opened.parts[0].read(np.arange(rows[0]))
    for batch in (train, *opened.evaluation()):
        weights = batch.get("weights", np.ones(len(batch["labels"])))
        assert batch["images"].dtype == np.float32
        assert batch["labels"].dtype == np.int32
        assert batch["images"].max() <= 1
        found += [
            ((image[..., 0] * 16).astype(np.uint8).tobytes(), int(label))
            for image, label, weight in zip(batch["images"], batch["labels"], weights, strict=True)
            if weight
        ]
    assert len(found) == 1797
    assert set(found) == expected


def test_held_out_images_have_every_class_though_the_file_is_sorted(tmp_path):
    path = tmp_path / "sorted.npz"
    np.savez(path, x=np.zeros((200, 2, 2, 3), np.float32), y=np.repeat(np.arange(4), 50))
    opened = Images(path).open(8, 0)
    assert opened.facts["shape"] == [2, 2, 3]
    held_out = np.concatenate([batch["labels"][batch["weights"] > 0] for batch in opened.evaluation()])
    assert set(held_out.tolist()) == {0, 1, 2, 3}
    assert len(held_out) == 40


def arrays(**changes):
    return {"x": np.zeros((10, 2, 2), np.uint8), "y": np.arange(10) % 2, **changes}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (arrays(y=None), "has no array 'y': it holds x; name one of them in labels"),
        ({"y": np.arange(3), "X": np.zeros((3, 2, 2))}, "has no array 'x': it holds y, X"),
        (arrays(x=np.zeros((10, 4))), r"x is float64\[10, 4\]: expected numbers"),
        (arrays(x=np.full((10, 2, 2), "a")), "x is <U1"),
        (arrays(y=np.arange(9)), r"y is int64\[9\]: expected 10 whole numbers from 0"),
        (arrays(y=np.arange(10.0)), "y is float64"),
        (arrays(y=np.arange(10) - 1), "whole numbers from 0"),
        (arrays(y=np.array([None] * 10)), "not a complete .npz file of numbers"),
        (arrays(x=np.zeros((1, 2, 2)), y=np.zeros(1, int)), "holds 1 images: held_out 0.2 leaves none to train on"),
    ],
)
def test_arrays_that_are_no_images_are_refused(tmp_path, content, message):
    path = tmp_path / "a.npz"
    np.savez(path, **{name: values for name, values in content.items() if values is not None})
    with pytest.raises(UserError, match=message):
        Images(path).open(2, 0)


@pytest.mark.parametrize("content", [b"", b"PK\3\4 cut", b"text", DIGITS.read_bytes()[:20_000]])
def test_a_broken_file_is_refused(tmp_path, content):
    path = tmp_path / "a.npz"
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"a.npz is not a complete .npz file"):
        Images(path).open(2, 0)


def test_one_array_is_refused(tmp_path):
    np.save(tmp_path / "a.npy", np.zeros(3))
    with pytest.raises(UserError, match="holds one array"):
        Images(tmp_path / "a.npy").open(2, 0)


@pytest.mark.parametrize(("name", "value"), [("held_out", 1.5), ("scale", 0.0), ("scale", float("inf"))])
def test_a_wrong_value_cannot_be_made(name, value):
    with pytest.raises(UserError, match=f"{name}: got {value}"):
        Images("a.npz", **{name: value})
