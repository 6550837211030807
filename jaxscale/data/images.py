"""Batches of labeled images, from the arrays of an .npz file, without augmentation."""

import dataclasses
import functools
import os
import zipfile
from io import BytesIO
from pathlib import Path

import numpy as np

from jaxscale.data import source
from jaxscale.data.loader import Opened
from jaxscale.data.shuffle import split_rows
from jaxscale.data.text import check_share
from jaxscale.errors import UserError, near_miss
from jaxscale.values import check_types
from jaxscale.values.short_repr import short_repr


@dataclasses.dataclass(frozen=True)
class Images:
    """Labeled images as batches of `images` float32 [B, height, width, C] and `labels` int32 [B].

    Args:
        path: path of an .npz file, which may begin with gs:// or s3://.
        held_out: share of the images held out for evaluation; the choice depends only on the number of images. Use 1
            for data that serves only as a held-out set of an experiment.
        scale: pixel value that becomes 1.0.
        images: name of the array of images, numbers of shape [N, height, width] or [N, height, width, C].
        labels: name of the array of class labels, integers [N] from 0.

    Raises:
        UserError: a value is out of range; or, on `open`, the file is missing or lacks one of the two arrays.

    Example:
        >>> Images("digits.npz", scale=16.0).held_out
        0.2
    """

    path: str | Path = dataclasses.field(metadata={"place": "content"})
    held_out: float = 0.2
    scale: float = 255.0
    images: str = "x"
    labels: str = "y"

    __repr__ = short_repr

    def __post_init__(self) -> None:
        check_types(self)
        object.__setattr__(self, "path", source.absolute_path(os.fspath(self.path)))
        if not 0 <= self.held_out <= 1:
            raise UserError(f"held_out: got {self.held_out!r}, expected a share of the images, 0 <= held_out <= 1")
        if not 0 < self.scale < float("inf"):
            raise UserError(f"scale: got {self.scale!r}, expected the positive value that becomes 1.0")

    def held_out_at(self, path: str | Path) -> "Images":
        """Return the images at another path, with the same settings and all images held out."""
        return dataclasses.replace(self, path=path, held_out=1.0)

    def open(self, batch: int, seed: int, *, process: int = 0, processes: int = 1) -> Opened:
        """Open the file, and return its batches.

        Args:
            batch: number of images in the global batch.
            seed: seed of the order of the images.
            process: index of this process.
            processes: number of processes that share the batch; each process gets contiguous rows.

        Returns:
            The opened data, without a tokenizer; `facts["classes"]` is one more than the largest label.

        Raises:
            UserError: the file is invalid, or too few images are left to train or evaluate on.
        """
        check_share(batch, process, processes)
        (file,) = source.find_files((str(self.path),))
        content = source.read(file)
        pixels, labels = self._read_arrays(content)
        split_indices = split_rows(len(labels), self.held_out, f"{self.path} holds {len(labels)} images")
        train_images, held_out_images = (
            LabeledImages(pixels[row_indices], labels[row_indices], self.scale) for row_indices in split_indices
        )
        facts = {
            "kind": "images",
            "shape": list(train_images.shape),
            "classes": int(labels.max()) + 1,
            "rows": len(train_images),
            "targets": len(train_images),
            "held_out_rows": len(held_out_images),
            "held_out_targets": len(held_out_images),
            "hash": source.digest(repr((source.digest(content), dataclasses.astuple(self)[1:])).encode())[:16],
        }
        return Opened((train_images,), (1.0,), (held_out_images,), batch, seed, process, processes, None, facts)

    def _read_arrays(self, content: bytes) -> tuple[np.ndarray, np.ndarray]:
        """Check the file's content, and return its images [N, height, width, C] and labels [N]."""
        try:
            array_or_archive = np.load(BytesIO(content), allow_pickle=False)
            if isinstance(array_or_archive, np.ndarray):
                raise UserError(f"{self.path} holds one array: expected an .npz file of images and labels")
            with array_or_archive as archive:
                for name in (self.images, self.labels):
                    if name not in archive.files:
                        raise UserError(
                            f"{self.path} has no array {name!r}: it holds {', '.join(archive.files)}; name one of them "
                            f"in {'images' if name == self.images else 'labels'}{near_miss(name, archive.files)}"
                        )
                pixels, labels = archive[self.images], archive[self.labels]
        except UserError:
            raise
        except (ValueError, EOFError, OSError, zipfile.BadZipFile) as error:
            raise UserError(
                f"{self.path} is not a complete .npz file of numbers ({error}): write it with numpy.savez"
            ) from error
        if pixels.ndim not in (3, 4) or pixels.dtype.kind not in "uifb":
            raise UserError(
                f"{self.images} is {pixels.dtype}{list(pixels.shape)}: expected numbers [N, height, width] or "
                "[N, height, width, channels]"
            )
        if labels.shape != pixels.shape[:1] or labels.dtype.kind not in "ui" or (len(labels) and labels.min() < 0):
            raise UserError(
                f"{self.labels} is {labels.dtype}{list(labels.shape)}: expected {len(pixels)} whole numbers from 0, "
                "one for each image"
            )
        return pixels if pixels.ndim == 4 else pixels[..., None], labels


@dataclasses.dataclass(frozen=True)
class LabeledImages:
    """Rows of images with their labels.

    Args:
        pixels: images [N, height, width, C].
        labels: class of each image, [N].
        scale: pixel value that becomes 1.0.
    """

    pixels: np.ndarray
    labels: np.ndarray
    scale: float

    def __len__(self) -> int:
        """Number of images in one epoch."""
        return len(self.labels)

    @property
    def targets(self) -> int:
        """Number of labels in one epoch."""
        return len(self)

    @functools.cached_property
    def shape(self) -> tuple[int, ...]:
        """Height, width and number of channels of one image."""
        return self.pixels.shape[1:]

    def read(self, row_indices: np.ndarray) -> dict[str, np.ndarray]:
        """Read the rows with these indices, [B] int64, in the endless sequence of epochs."""
        indices_in_epoch = row_indices % len(self)
        images = self.pixels[indices_in_epoch].astype(np.float32) / np.float32(self.scale)
        return {"images": images, "labels": self.labels[indices_in_epoch].astype(np.int32)}
