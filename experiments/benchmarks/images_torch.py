"""The peer of the images in `data.py`: PyTorch's DataLoader over Pillow, with two workers.

    python experiments/benchmarks/images_torch.py FOLDER ROUNDS [--save FILE]      needs torch and Pillow

FOLDER holds images of 256 x 256 pixels and `cuts.npy`, int32 [N, 3]: left, top, and whether to mirror, for each image
in the order of their paths. Each round decodes, cuts 224 x 224 pixels, mirrors and normalizes all of them, in batches
of 32. It uses nothing of jaxscale. Its last line is one JSON object: images per second of each round.
"""

import argparse
import json
import time
from pathlib import Path

import numpy as np

# torch is no dependency: it is measured where it happens to be
# pyright: reportMissingImports=false
import torch
from PIL import Image

SIZE, BATCH = 224, 32
MEAN, STD = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])


class Images(torch.utils.data.Dataset):
    """The images of a folder, cut, mirrored and normalized, with channels first as PyTorch's models take them."""

    def __init__(self, folder: Path) -> None:
        self.files, self.cuts = sorted(folder.rglob("*.jpg")), np.load(folder / "cuts.npy")

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self.files)

    def __getitem__(self, index: int) -> torch.Tensor:
        """Return one image, float32 [3, SIZE, SIZE]."""
        left, top, is_mirrored = map(int, self.cuts[index])
        image = Image.open(self.files[index]).convert("RGB").crop((left, top, left + SIZE, top + SIZE))
        if is_mirrored:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        values = torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous().to(torch.float32).div(255)
        return values.sub_(MEAN[:, None, None]).div_(STD[:, None, None])


def main() -> None:
    """Read all images in each round, and print how many a second there were."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("rounds", type=int)
    parser.add_argument("--save", type=Path, default=None, metavar="FILE", help="save all images of a round")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    images = Images(arguments.folder)
    loader = torch.utils.data.DataLoader(images, batch_size=BATCH, num_workers=2, persistent_workers=True)
    if arguments.save is not None:
        np.save(arguments.save, torch.cat(list(loader)).permute(0, 2, 3, 1).numpy())
    rates = []
    for _ in range(arguments.rounds):
        start, count = time.perf_counter(), 0
        for batch in loader:
            count += len(batch)
        rates.append(count / (time.perf_counter() - start))
    print(json.dumps({"rates": rates}))


if __name__ == "__main__":
    main()
