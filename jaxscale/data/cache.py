"""Tokens on disk: encoded once, then mapped into memory.

An entry is a folder named by the hash of everything that determines its content: the files' bytes, the tokenizer, and
the recipe of the documents. It is written under a temporary name and renamed, so that a reader sees all of it or
nothing; a lock makes processes of one machine wait for the first of them instead of encoding the same text again. If
locks do not work (some network disks), all encode, and the first to finish wins.
"""

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import os
import pathlib
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from jaxscale.data import documents, source
from jaxscale.data.documents import DocumentRecipe
from jaxscale.data.tokenizer import Encoded, Tokenizer, fingerprint
from jaxscale.errors import UserError

_VERSION = 1
"""Version of the format of an entry."""
SPLITS = ("train", "held_out")


@dataclasses.dataclass(frozen=True)
class Tokens:
    """One split of a corpus.

    Args:
        ids: [tokens] unsigned integers, ids of the tokens, mapped into memory.
        learned: [tokens] bool, False for a target of weight 0; `None` if all have weight 1.
        starts: [documents + 1] int64, first token of each document; the last entry is the number of tokens.
    """

    ids: np.ndarray
    learned: np.ndarray | None
    starts: np.ndarray


@dataclasses.dataclass(frozen=True)
class Corpus:
    """An entry of the cache, opened.

    Args:
        train: the training split.
        held_out: the evaluation split.
        facts: counts of files, bytes, characters, documents and tokens; the entry's hash and folder.
    """

    train: Tokens
    held_out: Tokens
    facts: dict[str, Any]


def open_corpus(files: list[str], tokenizer: Tokenizer, recipe: DocumentRecipe) -> Corpus:
    """Open the tokens of some files: from the cache, or encoded now with a progress bar on a terminal.

    Raises:
        UserError: a file is empty, binary or not UTF-8, the recipe leaves no training text, or no folder is writable.
    """
    key = hashlib.sha256(
        json.dumps(
            [
                _VERSION,
                [source.digest(source.read(file)) for file in files],
                fingerprint(tokenizer),
                dataclasses.astuple(recipe),
            ]
        ).encode()
    ).hexdigest()[:32]
    folders = _folders()
    for folder in folders:
        if (corpus := _load(folder / key)) is not None:
            return corpus
    failures = []
    for folder in folders:
        try:
            with _lock_entry(folder, key):
                if (corpus := _load(folder / key)) is None:
                    _write(folder, key, files, tokenizer, recipe)
                    corpus = _load(folder / key)
                assert corpus is not None, f"the entry {key} just written cannot be read"
                return corpus
        except OSError as error:
            failures.append(f"{folder}: {error.strerror or error}")
    raise UserError(
        f"tokens can't be written to any folder ({', '.join(failures)}): set JAXSCALE_CACHE to one with free space"
    )


def _folders() -> list[pathlib.Path]:
    """Return the folders for entries, the preferred one first."""
    home = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path("~/.cache").expanduser())
    preferred = pathlib.Path(os.environ.get("JAXSCALE_CACHE") or home / "jaxscale")
    fallback = pathlib.Path(tempfile.gettempdir()) / f"jaxscale-{os.getuid()}"
    return [preferred / "tokens", fallback / "tokens"]


@contextlib.contextmanager
def _lock_entry(folder: pathlib.Path, key: str) -> Iterator[None]:
    """Lock an entry for this process while the context is open, if the disk supports locks.

    Drafts of the entry that killed processes left are removed.
    """
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    with open(folder / f"{key}.lock", "w") as lock:
        with contextlib.suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX)
        for draft in folder.glob(f".{key}.*"):  # left by a killed process; no write takes a day
            if time.time() - draft.stat().st_mtime > 86_400:
                shutil.rmtree(draft, ignore_errors=True)
        yield


def _write(folder: pathlib.Path, key: str, files: list[str], tokenizer: Tokenizer, recipe: DocumentRecipe) -> None:
    """Encode files into a temporary folder, and rename it to the entry `key` once complete."""
    draft = pathlib.Path(tempfile.mkdtemp(prefix=f".{key}.", dir=folder))
    try:
        facts = _encode(draft, files, tokenizer, recipe)
        (draft / "facts.json").write_text(json.dumps({**facts, "hash": key}))
        if (folder / key).exists():  # unreadable, or `_load` would have returned it
            shutil.rmtree(folder / key, ignore_errors=True)
        with contextlib.suppress(FileExistsError):  # another process was first, with the same content
            try:
                os.rename(draft, folder / key)
            except OSError as error:
                if _load(folder / key) is None:
                    raise
                raise FileExistsError from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _encode(draft: pathlib.Path, files: list[str], tokenizer: Tokenizer, recipe: DocumentRecipe) -> dict[str, Any]:
    """Encode files into the folder `draft`, and return the facts of the entry, as in `Corpus`."""
    facts = documents.survey(files, recipe)
    held_out_start = int((1 - recipe.held_out) * facts["documents" if recipe.whole else "characters"])
    dtype = np.dtype(np.uint8 if tokenizer.size <= 2**8 else np.uint16 if tokenizer.size <= 2**16 else np.uint32)
    with contextlib.ExitStack() as stack:
        writers = [stack.enter_context(_Writer(draft, name, dtype, recipe.prompt_end is not None)) for name in SPLITS]
        advance = stack.enter_context(_progress("encoding " + _describe_files(files), facts["characters"]))
        labels: list[tuple[int, bool, bool]] = []  # (split, begins, learned) of each text, as in `documents.texts`

        def label_texts() -> Iterator[str]:
            """Yield the texts to encode, and append (split, begins, learned) of each to `labels`."""
            for split, begins, learned, text in documents.texts(files, recipe, held_out_start):
                labels.append((split, begins, learned))
                yield text

        last_text = -1
        for encoded in tokenizer.encode_all(label_texts()):
            first_text = encoded.texts[0]
            text_labels = np.array(labels[first_text : encoded.texts[-1] + 1])
            splits, begins, learned = text_labels[encoded.texts - first_text].T  # [parts] each
            is_continued = np.diff(encoded.texts, prepend=last_text) == 0  # a later part of the same text
            for split_number, writer in enumerate(writers):
                writer.add(encoded, splits == split_number, learned, begins * ~is_continued)
            last_text = encoded.texts[-1]
            advance(encoded.characters)
    facts.update(dtype=dtype.name, masked=recipe.prompt_end is not None, vocabulary=tokenizer.size)
    for name, writer in zip(SPLITS, writers, strict=True):
        facts[name] = {"tokens": writer.token_count, "documents": len(writer.starts)}
    return facts


class _Writer:
    """Writes the files of one split of an entry.

    Args:
        draft: folder of the entry.
        name: name of the split.
        dtype: type of the stored ids.
        masked: whether to store which tokens have weight 1.
    """

    def __init__(self, draft: pathlib.Path, name: str, dtype: np.dtype, masked: bool) -> None:
        self.token_count = 0
        self.starts: list[int] = []
        self._dtype = dtype
        self._starts_path = draft / f"{name}.starts"
        self._ids_file = (draft / f"{name}.ids").open("wb")
        self._learned_file = (draft / f"{name}.learned").open("wb") if masked else None

    def add(self, encoded: Encoded, selected: np.ndarray, learned: np.ndarray, begins: np.ndarray) -> None:
        """Append those parts of some texts that belong to this split.

        Args:
            encoded: ids of the parts.
            selected: [parts] bool, whether the part belongs to this split.
            learned: [parts] bool, whether the part's tokens have weight 1.
            begins: [parts] bool, whether a document begins with the part.
        """
        selected_lengths = encoded.lengths[selected]
        self._ids_file.write(encoded.ids[np.repeat(selected, encoded.lengths)].astype(self._dtype).tobytes())
        if self._learned_file is not None:
            self._learned_file.write(np.repeat(learned[selected].astype(np.bool_), selected_lengths).tobytes())
        part_starts = self.token_count + np.cumsum(selected_lengths) - selected_lengths
        self.starts += part_starts[begins[selected].astype(np.bool_)].tolist()
        self.token_count += int(selected_lengths.sum())

    def __enter__(self) -> "_Writer":
        return self

    def __exit__(self, *_: object) -> None:
        self._ids_file.close()
        if self._learned_file is not None:
            self._learned_file.close()
        self._starts_path.write_bytes(np.array([*self.starts, self.token_count], np.int64).tobytes())


def _load(folder: pathlib.Path) -> Corpus | None:
    """Return the entry in a folder; `None` if it is missing, or if a file is shorter or longer than its facts say."""
    try:
        facts = json.loads((folder / "facts.json").read_text())
        dtype = np.dtype(facts["dtype"])
        splits = []
        for name in SPLITS:
            token_count, document_count = facts[name]["tokens"], facts[name]["documents"]
            ids = _map_array(folder / f"{name}.ids", dtype, token_count)
            learned = _map_array(folder / f"{name}.learned", np.dtype(bool), token_count) if facts["masked"] else None
            starts = _map_array(folder / f"{name}.starts", np.dtype(np.int64), document_count + 1)
            splits.append(Tokens(ids, learned, starts))
    except (OSError, ValueError, KeyError):
        return None
    return Corpus(splits[0], splits[1], {**facts, "cache": str(folder)})


def _map_array(path: pathlib.Path, dtype: np.dtype, length: int) -> np.ndarray:
    """Map the array in a file into memory.

    Raises:
        ValueError: the file does not hold exactly `length` elements.
    """
    if path.stat().st_size != length * dtype.itemsize:
        raise ValueError(f"{path} does not hold {length} elements of {dtype}")
    if length == 0:  # nothing can be mapped
        return np.zeros(0, dtype)
    # a plain array over the mapping: indexing numpy's memmap class costs several times as much
    return np.asarray(np.memmap(path, dtype, mode="r", shape=(length,)))


def _describe_files(files: Iterable[str]) -> str:
    """Return the first file's name and the number of other files, for the progress bar."""
    first_name, *other_names = [os.path.basename(file) for file in files]
    return first_name + (f" and {len(other_names)} more" if other_names else "")


@contextlib.contextmanager
def _progress(description: str, characters: int) -> Iterator[Any]:
    """Show a progress bar on the error stream; yields a function of the number of characters just encoded."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeRemainingColumn(elapsed_when_finished=True),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task(description, total=characters)
        yield lambda encoded_characters: progress.update(task, advance=encoded_characters)
