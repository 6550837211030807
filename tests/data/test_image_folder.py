import numpy as np
import pytest
from PIL import Image

from jaxscale.data import ImageFolder
from jaxscale.data.image_folder import random_part
from jaxscale.errors import UserError


def write_image(path, width, height, value):
    """An image whose red is its column, whose green is its row and whose blue is `value`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.zeros((height, width, 3), np.uint8)
    pixels[..., 0], pixels[..., 1], pixels[..., 2] = np.arange(width), np.arange(height)[:, None], value
    Image.fromarray(pixels).save(path)


@pytest.fixture
def folder(tmp_path):
    for index in range(12):
        write_image(tmp_path / "photos" / ("cat" if index % 3 else "dog") / f"{index}.png", 24, 16, index)
    (tmp_path / "photos" / "dog" / "notes.txt").write_text("no image")
    (tmp_path / "photos" / ".hidden").mkdir()
    return tmp_path / "photos"


def raw(folder, **fields):
    """A folder read without normalization: the values of pixels, from 0 to 255."""
    return ImageFolder(folder, mean=(0, 0, 0), std=(1 / 255, 1 / 255, 1 / 255), workers=2, **fields)


def numbers(batch):
    """The number of each image, which its blue holds."""
    return batch["images"][:, 0, 0, 2].round().astype(int).tolist()


def test_every_image_is_trained_on_or_held_out_with_the_class_of_its_folder(folder):
    opened = raw(folder, size=14, held_out=0.25).open(4, 0)
    facts = {name: opened.facts[name] for name in ("classes", "shape", "rows", "held_out_rows")}
    assert facts == {"classes": 2, "shape": [14, 14, 3], "rows": 9, "held_out_rows": 3}
    labels = {}
    for batch in (opened.parts[0].read(np.arange(9)), *opened.evaluation()):
        assert (batch["images"].dtype, batch["labels"].dtype) == (np.float32, np.int32)
        weights = batch.get("weights", np.ones(len(batch["labels"])))
        rows = zip(numbers(batch), batch["labels"].tolist(), weights, strict=True)
        labels |= {number: label for number, label, weight in rows if weight}
    assert labels == {index: 0 if index % 3 else 1 for index in range(12)}


def test_an_evaluation_takes_the_middle_of_an_image(folder):
    # images of 24 x 16 need no scaling for a size of 14: 16 is 8 / 7 of it
    images = next(iter(raw(folder, size=14).open(1, 0).evaluation()))["images"]
    np.testing.assert_allclose(images[0, :, :, 0], np.broadcast_to(np.arange(5, 19), (14, 14)), atol=1e-3)
    np.testing.assert_allclose(images[0, :, :, 1], np.broadcast_to(np.arange(1, 15)[:, None], (14, 14)), atol=1e-3)


def test_values_are_normalized_channel_by_channel(folder):
    settings = {"size": 14, "held_out": 0.25}
    pixels = next(iter(raw(folder, **settings).open(3, 0).evaluation()))["images"]
    images = next(iter(ImageFolder(folder, **settings).open(3, 0).evaluation()))["images"]
    expected = (pixels / 255 - np.array([0.485, 0.456, 0.406])) / np.array([0.229, 0.224, 0.225])
    np.testing.assert_allclose(images, expected, atol=1e-5)


@pytest.mark.parametrize("crop", [None, (0.3, 1.0)], ids=str)
def test_random_parts_follow_from_the_seed_the_image_and_the_epoch(folder, crop):
    def images(seed, rows, **fields):
        return raw(folder, size=14, crop=crop, **fields).open(4, seed).parts[0].read(np.array(rows))["images"]

    np.testing.assert_array_equal(images(0, [3, 5, 7]), images(0, [3, 5, 7]))
    np.testing.assert_array_equal(images(0, [5])[0], images(0, [3, 5, 7])[1])
    assert not np.array_equal(images(0, range(9)), images(1, range(9)))
    assert not np.array_equal(images(0, range(9)), images(0, range(10, 19)))
    columns = images(0, range(80))[:, 7, :, 0]
    mirrored = [bool(row[0] > row[-1]) for row in columns]
    assert 20 < sum(mirrored) < 60
    assert not any(row[0] > row[-1] for row in images(0, range(80), flip=False)[:, 7, :, 0])
    assert len({round(float(row.min())) for row in columns}) > 3, "parts begin at different columns"


def test_random_parts_have_the_shares_and_ratios_that_are_asked_for():
    rng = np.random.default_rng(0)
    for _ in range(300):
        left, top, right, bottom = random_part((640, 480), (0.2, 0.5), rng)
        assert 0 <= left < right <= 640
        assert 0 <= top < bottom <= 480
        share, ratio = (right - left) * (bottom - top) / (640 * 480), (right - left) / (bottom - top)
        assert 0.19 < share < 0.51
        assert 0.74 < ratio < 1.35
    # no part of a usual ratio has all of a panorama
    assert random_part((300, 30), (1.0, 1.0), rng) == (130, 0, 170, 30)


def test_a_run_that_goes_on_has_the_batches_of_one_that_was_not_cut(folder):
    opened = ImageFolder(folder, size=14).open(4, 0)
    with opened.train() as batches:
        expected = [next(batches)["images"] for _ in range(5)]
    with opened.train() as batches:
        next(batches), next(batches)
        state = batches.get_state()
    with ImageFolder(folder, size=14, workers=1).open(4, 0).train(state) as batches:
        np.testing.assert_array_equal(next(batches)["images"], expected[2])


def test_processes_share_a_batch(folder):
    whole = next(raw(folder, size=14).open(4, 0).train())["images"]
    parts = [next(raw(folder, size=14).open(4, 0, process=rank, processes=2).train())["images"] for rank in range(2)]
    np.testing.assert_array_equal(np.concatenate(parts), whole)


def test_held_out_images_may_have_a_folder_of_their_own(folder, tmp_path):
    for name in ("cat", "dog"):
        write_image(tmp_path / "val" / name / "deep" / "a.jpg", 20, 20, 200)
    opened = ImageFolder(folder, held_out_path=tmp_path / "val", size=8).open(4, 0)
    assert (opened.facts["rows"], opened.facts["held_out_rows"]) == (12, 2)
    (tmp_path / "val" / "cow").mkdir()
    write_image(tmp_path / "val" / "cow" / "a.jpg", 20, 20, 200)
    with pytest.raises(UserError, match=r"3 classes and .* has 2, expected the same subfolders in both; 'cow'"):
        ImageFolder(folder, held_out_path=tmp_path / "val", size=8).open(4, 0)


def test_a_grey_image_becomes_red_green_and_blue(tmp_path):
    for name in "ab":
        (tmp_path / name).mkdir()
        Image.fromarray(np.full((8, 8), 100, np.uint8)).save(tmp_path / name / "grey.png")
    assert (raw(tmp_path, size=4, held_out=0.0).open(2, 0).parts[0].read(np.arange(2))["images"].round() == 100).all()


@pytest.mark.parametrize("content", [b"", b"no image", b"\x89PNG\r\n\x1a\n cut"])
def test_a_broken_image_is_named(folder, content):
    for file in folder.rglob("*.png"):
        file.write_bytes(content)
    with pytest.raises(UserError, match=r"\d+.png is not a complete image"):
        next(ImageFolder(folder, size=14).open(4, 0).train())


def test_folders_without_classes_or_images_are_refused(folder, tmp_path):
    for path, message in (
        (folder / "cat", "has no subfolders, expected one for each class"),
        (folder / "dog" / "notes.txt", "is a file, expected a folder"),
        (tmp_path / "photo", "no such file: .*did you mean 'photos'"),
    ):
        with pytest.raises(UserError, match=message):
            ImageFolder(path).open(2, 0)
    (folder / "bird").mkdir()
    with pytest.raises(UserError, match=r"bird holds no image, expected files that end in \.jpg"):
        ImageFolder(folder).open(2, 0)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("held_out", 1.0),
        ("size", 0),
        ("size", 10**6),
        ("workers", 0),
        ("crop", (0.5, 0.2)),
        ("crop", (0.5, 1.5)),
        ("mean", (0.1, float("nan"), 0.2)),
        ("std", (0.1, 0.0, 0.2)),
    ],
)
def test_a_wrong_value_cannot_be_made(name, value):
    with pytest.raises(UserError, match=f"{name}"):
        ImageFolder("photos", **{name: value})
