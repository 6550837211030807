"""Batches of labeled images from a folder with a subfolder for each class, decoded and augmented by threads."""

import concurrent.futures
import dataclasses
import functools
import io
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxscale.data import source
from jaxscale.data.loader import Opened
from jaxscale.data.shuffle import derive_seed, split_rows
from jaxscale.data.text import check_share
from jaxscale.errors import UserError
from jaxscale.platforms.cores import usable_cores
from jaxscale.values import check_types
from jaxscale.values.limits import check_at_most
from jaxscale.values.short_repr import short_repr

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp")
"""The extensions of image files; other files are ignored."""
_ASPECT_RATIOS = (3 / 4, 4 / 3)
"""Smallest and largest ratio of width to height of a random crop."""


@dataclasses.dataclass(frozen=True)
class ImageFolder:
    """Labeled images from class folders, as batches of `images` float32 [B, size, size, 3] and `labels` int32 [B].

    The classes are the subfolders in the order of their names, and their images are the files in them, at any depth. A
    value x of a channel becomes (x / 255 - mean) / std. For training, a random crop of an image is scaled to `size` and
    mirrored at random; the draws depend only on the seed, the image and the epoch. For evaluation, the shorter side of
    an image is scaled to 8 / 7 of `size`, and the center crop is taken. Threads decode images while the devices
    compute. Decoding needs Pillow (`pip install 'jaxscale[images]'`).

    Args:
        path: folder with a subfolder for each class.
        held_out: share of the images held out for evaluation; the choice depends only on the number of images.
        held_out_path: folder of the held-out images, with the same subfolders. If it is given, `held_out` is not used.
        size: height and width of the images in a batch, in pixels.
        crop: smallest and largest share of an image's area in a random crop, whose ratio of width to height is from
            3 / 4 to 4 / 3. `None` scales the image as for evaluation, and takes a random square of `size` pixels.
        flip: whether to mirror each training image horizontally with probability 1 / 2.
        mean: mean of each channel (red, green, blue), for values from 0 to 1.
        std: standard deviation of each channel.
        workers: number of threads that decode images; `None` for one per core that this process may use.

    Raises:
        UserError: a value is out of range; or, on `open`, a folder is missing or has no images; or, while batches are
            read, a file is not an image.

    Example:
        >>> ImageFolder("imagenet/train", held_out_path="imagenet/val").size
        224
        >>> ImageFolder("imagenet/train", crop=(0.0, 1.0))
        Traceback (most recent call last):
        jaxscale.errors.UserError: crop: got (0.0, 1.0), expected shares of the area, 0 < smallest <= largest <= 1

    References:
        Szegedy et al. 2015, "Going Deeper with Convolutions", section 6, for the random crops.
    """

    path: str | Path = dataclasses.field(metadata={"place": "content"})
    held_out: float = 0.1
    held_out_path: str | Path | None = dataclasses.field(default=None, metadata={"place": "content"})
    size: int = 224
    crop: tuple[float, float] | None = (0.08, 1.0)
    flip: bool = True
    mean: tuple[float, float, float] = (0.485, 0.456, 0.406)
    std: tuple[float, float, float] = (0.229, 0.224, 0.225)
    workers: int | None = None

    __repr__ = short_repr

    def __post_init__(self) -> None:
        check_types(self)
        object.__setattr__(self, "path", source.absolute_path(os.fspath(self.path)))
        if self.held_out_path is not None:
            object.__setattr__(self, "held_out_path", source.absolute_path(os.fspath(self.held_out_path)))
        if not 0 <= self.held_out < 1:
            raise UserError(f"held_out: got {self.held_out!r}, expected a share of the images, 0 <= held_out < 1")
        for name, largest_count in {"size": 2**14, "workers": 1024}.items():
            count = getattr(self, name)
            if count is not None and count < 1:
                raise UserError(f"{name}: got {count!r}, expected a whole number >= 1")
            check_at_most(name, count or 1, largest_count)
        if self.crop is not None and not 0 < self.crop[0] <= self.crop[1] <= 1:
            raise UserError(f"crop: got {self.crop!r}, expected shares of the area, 0 < smallest <= largest <= 1")
        if not all(math.isfinite(mean) for mean in self.mean):
            raise UserError(f"mean: got {self.mean!r}, expected the mean of each channel, such as 0.5")
        if not all(0 < std < math.inf for std in self.std):
            raise UserError(f"std: got {self.std!r}, expected a positive standard deviation of each channel")

    def held_out_at(self, path: str | Path) -> "ImageFolder":
        """Return this folder, with the images of another folder as its held-out part."""
        return dataclasses.replace(self, held_out_path=path)

    def open(self, batch: int, seed: int, *, process: int = 0, processes: int = 1) -> Opened:
        """List the images, and return their batches.

        Args:
            batch: number of images in the global batch.
            seed: seed of the order of the images, and of their random crops.
            process: index of this process.
            processes: number of processes that share the batch; each process gets contiguous rows.

        Returns:
            The opened data, without a tokenizer; `facts["classes"]` is the number of classes.

        Raises:
            UserError: a folder is missing or without images, too few images are left to train or evaluate on, the two
                folders have different classes, or Pillow is not installed.
        """
        check_share(batch, process, processes)
        _pillow()
        class_names, files, labels = _list_images(str(self.path))
        if self.held_out_path is None:
            train_indices, held_out_indices = split_rows(
                len(files), self.held_out, f"{self.path} holds {len(files)} images"
            )
            held_out_files, held_out_labels = [files[index] for index in held_out_indices], labels[held_out_indices]
            files, labels = [files[index] for index in train_indices], labels[train_indices]
        else:
            held_out_class_names, held_out_files, held_out_labels = _list_images(str(self.held_out_path))
            if held_out_class_names != class_names:
                unmatched_names = sorted(set(class_names) ^ set(held_out_class_names))
                raise UserError(
                    f"held_out_path: {self.held_out_path} has {len(held_out_class_names)} classes and {self.path} has "
                    f"{len(class_names)}, expected the same subfolders in both; {unmatched_names[0]!r} is in only "
                    "one of them"
                )
        train_images = FolderImages(self, files, labels, derive_seed(seed, "augment", 0))
        held_out_images = FolderImages(self, held_out_files, held_out_labels, None)
        settings = {**dataclasses.asdict(self), "path": "", "held_out_path": "", "workers": None}
        relative_paths = [file.removeprefix(str(self.path)) for file in files]
        relative_paths += [file.removeprefix(str(self.held_out_path or self.path)) for file in held_out_files]
        facts = {
            "kind": "images",
            "shape": [self.size, self.size, 3],
            "classes": len(class_names),
            "rows": len(train_images),
            "targets": len(train_images),
            "held_out_rows": len(held_out_images),
            "held_out_targets": len(held_out_images),
            "hash": source.digest(repr((relative_paths, sorted(settings.items()))).encode())[:16],
        }
        return Opened((train_images,), (1.0,), (held_out_images,), batch, seed, process, processes, None, facts)


class FolderImages:
    """The images of one split (`EpochRows`).

    Args:
        settings: how images are read.
        files: path of each image, [N].
        labels: class of each image, int32 [N].
        seed: seed of the random crops; `None` for center crops, as in evaluation.
    """

    def __init__(self, settings: ImageFolder, files: Sequence[str], labels: np.ndarray, seed: int | None) -> None:
        self.settings, self.files, self.labels, self.seed = settings, files, labels, seed
        mean, std = np.array(settings.mean), np.array(settings.std)
        self._scale, self._shift = (1 / (255 * std)).astype(np.float32), (mean / std).astype(np.float32)

    def __len__(self) -> int:
        """Number of images in one epoch."""
        return len(self.files)

    @property
    def targets(self) -> int:
        """Number of labels in one epoch."""
        return len(self)

    @functools.cached_property
    def _executor(self) -> concurrent.futures.ThreadPoolExecutor:
        """The pool of threads that decode images."""
        worker_count = self.settings.workers or usable_cores()
        return concurrent.futures.ThreadPoolExecutor(worker_count, thread_name_prefix="images")

    def read(self, row_indices: np.ndarray) -> dict[str, np.ndarray]:
        """Read the rows with these indices, [B] int64, in the endless sequence of epochs."""
        size = self.settings.size
        images = np.empty((len(row_indices), size, size, 3), np.float32)

        def read_image(position: int) -> None:
            """Decode the image at a position of the batch into `images`."""
            np.multiply(self._pixels(int(row_indices[position])), self._scale, out=images[position])
            images[position] -= self._shift

        for _ in self._executor.map(read_image, range(len(row_indices))):  # raises what a thread raised
            pass
        return {"images": images, "labels": self.labels[row_indices % len(self)]}

    def _pixels(self, row_index: int) -> np.ndarray:
        """Return the cropped and scaled image of a row, uint8 [size, size, 3]."""
        file, size = self.files[row_index % len(self)], self.settings.size
        image = decoded_image(file)
        if self.seed is None:
            image = _scaled_image(image, size)
            return _square_part(image, (image.width - size) // 2, (image.height - size) // 2, size)
        rng = np.random.default_rng((self.seed, row_index))
        if self.settings.crop is None:
            image = _scaled_image(image, size)
            left, top = (int(rng.integers(0, side - size + 1)) for side in image.size)
            pixels = _square_part(image, left, top, size)
        else:
            box = random_part(image.size, self.settings.crop, rng)
            pixels = np.asarray(image.crop(box).resize((size, size), _pillow().Resampling.BILINEAR))
        return pixels[:, ::-1] if self.settings.flip and rng.random() < 0.5 else pixels


def random_part(
    image_size: tuple[int, int], area_shares: tuple[float, float], rng: np.random.Generator
) -> tuple[int, int, int, int]:
    """Draw a random crop of an image, and return it as (left, top, right, bottom) in pixels.

    Args:
        image_size: width and height of the image, in pixels.
        area_shares: smallest and largest share of the image's area.
        rng: source of the draws.

    Example:
        >>> random_part((100, 100), (1.0, 1.0), np.random.default_rng(0))
        (0, 0, 100, 100)
    """
    width, height = image_size
    low_log_ratio, high_log_ratio = map(math.log, _ASPECT_RATIOS)
    for _ in range(10):
        area = width * height * rng.uniform(*area_shares)
        ratio = math.exp(rng.uniform(low_log_ratio, high_log_ratio))
        part_width, part_height = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < part_width <= width and 0 < part_height <= height:
            left, top = rng.integers(0, width - part_width + 1), rng.integers(0, height - part_height + 1)
            return int(left), int(top), int(left) + part_width, int(top) + part_height
    # none of the drawn crops fits: take a center crop
    part_width = min(width, max(1, round(height * _ASPECT_RATIOS[1])))
    part_height = min(height, max(1, round(width / _ASPECT_RATIOS[0])))
    left, top = (width - part_width) // 2, (height - part_height) // 2
    return left, top, left + part_width, top + part_height


def _list_images(folder: str) -> tuple[list[str], list[str], np.ndarray]:
    """Return the names of the classes in a folder, the paths of all images, and the label of each image, int32."""
    location = source.path_object(folder)
    if not location.is_dir():
        source.find_files((folder,))  # raises an error that suggests a similar name, if the folder is missing
        raise UserError(f"{folder} is a file, expected a folder with a subfolder for each class")
    class_folders = sorted((entry for entry in location.iterdir() if entry.is_dir()), key=lambda entry: entry.name)
    class_folders = [entry for entry in class_folders if not entry.name.startswith(".")]
    if not class_folders:
        raise UserError(f"{folder} has no subfolders, expected one for each class, with the class's images in it")
    files: list[str] = []
    labels: list[int] = []
    for label, class_folder in enumerate(class_folders):
        image_files = sorted(os.fspath(file) for file in class_folder.rglob("*") if file.suffix.lower() in SUFFIXES)
        if not image_files:
            raise UserError(
                f"{class_folder} holds no image, expected files that end in {', '.join(SUFFIXES)}: add some, or remove "
                "the folder"
            )
        files += image_files
        labels += [label] * len(image_files)
    return [entry.name for entry in class_folders], files, np.array(labels, np.int32)


def _pillow() -> Any:
    """Import Pillow's module `Image` at its first use, and return it."""
    try:
        from PIL import Image
    except ImportError as error:
        raise UserError(f"images need Pillow ({error}): pip install 'jaxscale[images]'") from error
    return Image


def decoded_image(file: str) -> Any:
    """Decode an image file, and return a Pillow image in RGB."""
    pillow = _pillow()
    try:
        return pillow.open(io.BytesIO(source.read(file))).convert("RGB")
    except (OSError, SyntaxError, ValueError, pillow.DecompressionBombError) as error:
        raise UserError(f"{file} is not a complete image ({error}): replace it, or remove it") from error


def _scaled_image(image: Any, size: int) -> Any:
    """Scale an image so that its shorter side is 8 / 7 of `size`."""
    shorter_side = round(size * 8 / 7)
    if min(image.size) == shorter_side:
        return image
    width, height = (max(shorter_side, round(side * shorter_side / min(image.size))) for side in image.size)
    return image.resize((width, height), _pillow().Resampling.BILINEAR)


def _square_part(image: Any, left: int, top: int, size: int) -> np.ndarray:
    """Return a square crop of an image, uint8 [size, size, 3]."""
    return np.asarray(image)[top : top + size, left : left + size]
