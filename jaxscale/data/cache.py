"""A cache of tokens on disk: text is encoded once, then mapped into memory.

An entry is a folder named by the hash of everything that determines the content: the files' bytes, the tokenizer, and
the recipe of the documents. An entry is written under a temporary name and renamed, so a reader sees a complete entry
or none. A lock makes the processes of a machine wait for the first of them instead of encoding the same text again.
Where locks do not work (on some network disks), all processes encode, and the first to finish wins.
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
import zlib
from collections.abc import Iterable, Iterator
from typing import Any, BinaryIO, NamedTuple, Protocol, runtime_checkable

import numpy as np

from jaxscale.data import documents, source
from jaxscale.data.documents import DocumentRecipe
from jaxscale.data.tokenizer import Encoded, Tokenizer, fingerprint
from jaxscale.errors import UserError
from jaxscale.values.limits import MAX_INT64
from jaxscale.values.read_files import check_regular, is_regular, parse_json, read_bytes

_VERSION = 1
"""Version of the conversion from files to tokens, a part of an entry's key. A run continues only with the same key."""
SPLITS = ("train", "held_out")
FACTS = "facts.json"
MAX_CHECKED_BYTES = 1 << 30
"""Bytes of the largest file whose checksum is compared at each start; that takes half a second from memory."""
_MAX_VOCABULARY_BY_DTYPE = {"uint8": 2**8, "uint16": 2**16, "uint32": 2**32}
"""For each dtype, by name, the size of the largest vocabulary whose ids it can store."""


@dataclasses.dataclass(frozen=True)
class Tokens:
    """The tokens of one split of a corpus.

    Args:
        ids: [tokens] unsigned integers, ids of the tokens, mapped into memory.
        is_learned: [tokens] bool, False for targets of weight 0; `None` if all targets have weight 1.
        document_starts: [documents + 1] int64, index of each document's first token; the last entry is the number of
            tokens.
    """

    ids: np.ndarray
    is_learned: np.ndarray | None
    document_starts: np.ndarray


class LabeledParts(NamedTuple):
    """Encoded parts of documents, and arrays [parts] of their labels.

    Args:
        encoded: ids of the parts.
        split_indices: 0 for the training part, 1 for the held-out part.
        is_learned: 0 or 1, whether the part's tokens have weight 1.
        is_document_start: 0 or 1, whether the part is the first one of a document.
    """

    encoded: Encoded
    split_indices: np.ndarray
    is_learned: np.ndarray
    is_document_start: np.ndarray


@runtime_checkable
class EncodingRecipe(Protocol):
    """A recipe that encodes documents itself; `count` is called before `encode`."""

    is_masked: bool

    @property
    def identity(self) -> tuple[Any, ...]:
        """The values that determine the tokens of given files, for the cache key."""
        ...

    def count(self, files: list[str]) -> dict[str, Any]:
        """Read the files, and return the counts of `documents.check_and_count`, possibly with further metadata."""
        ...

    def encode(self, tokenizer: Any) -> Iterator[LabeledParts]:
        """Yield the ids of the documents in the files."""
        ...


@dataclasses.dataclass(frozen=True)
class Corpus:
    """An opened entry of the cache.

    Args:
        train: tokens of the training split.
        held_out: tokens of the evaluation split.
        facts: the entry's metadata: hash, folder, and the numbers of files, bytes, characters, documents and tokens.
    """

    train: Tokens
    held_out: Tokens
    facts: dict[str, Any]


def open_corpus(files: list[str], tokenizer: Tokenizer, recipe: DocumentRecipe | EncodingRecipe) -> Corpus:
    """Open the tokens of text files from the cache; on the first call, encode the files, with a progress bar.

    Args:
        files: paths of the text files.
        tokenizer: the tokenizer to encode with.
        recipe: how the files become documents.

    Raises:
        UserError: a file is empty, binary or not UTF-8, the recipe leaves no training text, or no folder is writable.
    """
    key = hashlib.sha256(
        json.dumps(
            [
                _VERSION,
                [source.digest(source.read(file)) for file in files],
                fingerprint(tokenizer),
                recipe.identity,
            ]
        ).encode()
    ).hexdigest()[:32]
    cache_folders = _cache_folders()
    for folder in cache_folders:
        if (corpus := _load(folder / key)) is not None:
            return corpus
    failure_texts = []
    for folder in cache_folders:
        try:
            with _lock_entry(folder, key):
                if (corpus := _load(folder / key)) is None:
                    _write(folder, key, files, tokenizer, recipe)
                    corpus = _load(folder / key)
                assert corpus is not None, f"the entry {key} has just been written, but cannot be read"
                return corpus
        except OSError as error:
            failure_texts.append(f"{folder}: {error.strerror or error}")
    raise UserError(
        f"tokens cannot be written to any folder ({', '.join(failure_texts)}): set JAXSCALE_CACHE to a folder with "
        "free space"
    )


def _cache_folders() -> list[pathlib.Path]:
    """Return the folders that may hold entries, the preferred folder first."""
    user_cache_folder = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path("~/.cache").expanduser())
    preferred_folder = pathlib.Path(os.environ.get("JAXSCALE_CACHE") or user_cache_folder / "jaxscale")
    fallback_folder = pathlib.Path(tempfile.gettempdir()) / f"jaxscale-{os.getuid()}"
    return [preferred_folder / "tokens", fallback_folder / "tokens"]


@contextlib.contextmanager
def _lock_entry(folder: pathlib.Path, key: str) -> Iterator[None]:
    """If the disk supports locks, lock the entry `key` of a folder while the context is open.

    Also remove unfinished drafts of the entry that killed processes have left behind.
    """
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    lock_path = folder / f"{key}.lock"
    with contextlib.suppress(OSError):
        if os.path.lexists(lock_path) and (lock_path.is_symlink() or not is_regular(lock_path)):
            _remove(lock_path)  # not a file: opening a pipe, for example, would wait forever
    with open(lock_path, "w") as lock_file:
        with contextlib.suppress(OSError):
            fcntl.flock(lock_file, fcntl.LOCK_EX)
        for draft in folder.glob(f".{key}.*"):  # left by a killed process; no write takes a day
            if time.time() - draft.stat().st_mtime > 86_400:
                shutil.rmtree(draft, ignore_errors=True)
        yield


def _write(
    folder: pathlib.Path, key: str, files: list[str], tokenizer: Tokenizer, recipe: DocumentRecipe | EncodingRecipe
) -> None:
    """Encode files into a temporary folder, and rename the complete folder to the entry `key` of `folder`."""
    draft = pathlib.Path(tempfile.mkdtemp(prefix=f".{key}.", dir=folder))
    try:
        facts = _encode(draft, files, tokenizer, recipe)
        facts = json.loads(json.dumps({**facts, "hash": key}))
        (draft / FACTS).write_text(json.dumps({**facts, "sha256": _digest(facts)}))
        if os.path.lexists(folder / key):  # it is not readable, since `_load` returned None
            _remove(folder / key)
        with contextlib.suppress(FileExistsError):  # another process finished first, with the same content
            try:
                os.rename(draft, folder / key)
            except OSError as error:
                if _load(folder / key) is None:
                    raise
                raise FileExistsError from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _remove(entry_folder: pathlib.Path) -> None:
    """Remove a folder, or the file or link in its place; what cannot be removed is left."""
    if entry_folder.is_dir() and not entry_folder.is_symlink():
        shutil.rmtree(entry_folder, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            entry_folder.unlink()


def _encode(
    draft: pathlib.Path, files: list[str], tokenizer: Tokenizer, recipe: DocumentRecipe | EncodingRecipe
) -> dict[str, Any]:
    """Encode files into the folder `draft`, and return `Corpus.facts` without the entry's hash and folder."""
    facts = documents.check_and_count(files, recipe) if isinstance(recipe, DocumentRecipe) else recipe.count(files)
    dtype = np.dtype(
        next(name for name, max_vocabulary in _MAX_VOCABULARY_BY_DTYPE.items() if tokenizer.size <= max_vocabulary)
    )
    with contextlib.ExitStack() as stack:
        writers = [stack.enter_context(_Writer(draft, name, dtype, recipe.is_masked)) for name in SPLITS]
        advance = stack.enter_context(_progress_bar("encoding " + _describe_files(files), facts["characters"]))
        is_document_recipe = isinstance(recipe, DocumentRecipe)
        for parts in _encode_texts(files, tokenizer, recipe, facts) if is_document_recipe else recipe.encode(tokenizer):
            for split_index, writer in enumerate(writers):
                writer.add(parts.encoded, parts.split_indices == split_index, parts.is_learned, parts.is_document_start)
            advance(parts.encoded.character_count)
    facts.update(dtype=dtype.name, masked=recipe.is_masked, vocabulary=tokenizer.size)
    for name, writer in zip(SPLITS, writers, strict=True):
        facts[name] = {"tokens": writer.token_count, "documents": len(writer.document_starts)}
        facts[name]["crc32"] = writer.crc32
    return facts


def _encode_texts(
    files: list[str], tokenizer: Tokenizer, recipe: DocumentRecipe, facts: dict[str, Any]
) -> Iterator[LabeledParts]:
    """Encode the documents in files, and yield labeled parts; `facts` has the counts of documents and characters."""
    held_out_start = int((1 - recipe.held_out) * facts["documents" if recipe.is_cut_at_document else "characters"])
    labels: list[tuple[int, bool, bool]] = []  # for each text, (split_index, is_document_start, is_learned)

    def label_texts() -> Iterator[str]:
        """Yield the texts to encode, and append each text's label to `labels`."""
        for split_index, is_document_start, is_learned, text in documents.labeled_texts(files, recipe, held_out_start):
            labels.append((split_index, is_document_start, is_learned))
            yield text

    previous_text_index = -1
    for encoded in tokenizer.encode_all(label_texts()):
        first_text_index = encoded.text_indices[0]
        text_labels = np.array(labels[first_text_index : encoded.text_indices[-1] + 1])
        # [parts] each, like the `text_indices`
        split_indices, is_document_start, is_learned = text_labels[encoded.text_indices - first_text_index].T
        # whether the part continues the text of the part before it
        is_continued = np.diff(encoded.text_indices, prepend=previous_text_index) == 0
        yield LabeledParts(encoded, split_indices, is_learned, is_document_start * ~is_continued)
        previous_text_index = encoded.text_indices[-1]


class _Writer:
    """Writes the files of one split of an entry.

    Args:
        draft: folder of the entry.
        name: name of the split.
        dtype: type of the stored ids.
        has_weights: whether to store which tokens have weight 1.

    Attributes:
        token_count: number of tokens written so far.
        document_starts: index of the first token of each document so far.
        crc32: checksum of the bytes written so far, by the suffix of the file.
    """

    def __init__(self, draft: pathlib.Path, name: str, dtype: np.dtype, has_weights: bool) -> None:
        self.token_count = 0
        self.crc32 = {"ids": 0, "learned": 0, "starts": 0}
        self.document_starts: list[int] = []
        self._dtype = dtype
        self._starts_path = draft / f"{name}.starts"
        self._ids_file = (draft / f"{name}.ids").open("wb")
        self._learned_file = (draft / f"{name}.learned").open("wb") if has_weights else None

    def add(
        self, encoded: Encoded, is_in_split: np.ndarray, is_learned: np.ndarray, is_document_start: np.ndarray
    ) -> None:
        """Append those parts of encoded texts that belong to this split.

        Args:
            encoded: ids of the parts.
            is_in_split: [parts] bool, whether the part belongs to this split.
            is_learned: [parts] 0 or 1, whether the part's tokens have weight 1.
            is_document_start: [parts] 0 or 1, whether the part is the first one of a document.
        """
        lengths = encoded.lengths[is_in_split]
        ids = encoded.ids[np.repeat(is_in_split, encoded.lengths)].astype(self._dtype)
        self._write("ids", self._ids_file, ids)
        if self._learned_file is not None:
            self._write("learned", self._learned_file, np.repeat(is_learned[is_in_split].astype(np.bool_), lengths))
        part_starts = self.token_count + np.cumsum(lengths) - lengths
        self.document_starts += part_starts[is_document_start[is_in_split].astype(np.bool_)].tolist()
        self.token_count += int(lengths.sum())

    def _write(self, suffix: str, file: BinaryIO, array: np.ndarray) -> None:
        """Append an array to a file, and its bytes to the file's checksum."""
        array_bytes = array.tobytes()
        file.write(array_bytes)
        self.crc32[suffix] = zlib.crc32(array_bytes, self.crc32[suffix])

    def __enter__(self) -> "_Writer":
        return self

    def __exit__(self, *_: object) -> None:
        self._ids_file.close()
        if self._learned_file is not None:
            self._learned_file.close()
        with self._starts_path.open("wb") as starts_file:
            self._write("starts", starts_file, np.array([*self.document_starts, self.token_count], np.int64))


def _load(entry_folder: pathlib.Path) -> Corpus | None:
    """Return an entry of the cache; `None` if it is missing, or the length or checksum of a file has changed."""
    try:
        facts = parse_json(read_bytes(entry_folder / FACTS), FACTS)
        if not _are_facts(facts, entry_folder.name) or facts.pop("sha256", "") != _digest(facts):
            return None
        dtype = np.dtype(facts["dtype"])
        split_tokens = []
        for name in SPLITS:
            token_count, document_count = facts[name]["tokens"], facts[name]["documents"]
            checksums = facts[name]["crc32"]
            ids = _map_array(entry_folder / f"{name}.ids", dtype, token_count, checksums["ids"])
            is_learned = None
            if facts["masked"]:
                is_learned = _map_array(
                    entry_folder / f"{name}.learned", np.dtype(bool), token_count, checksums["learned"]
                )
            document_starts = _map_array(
                entry_folder / f"{name}.starts", np.dtype(np.int64), document_count + 1, checksums["starts"]
            )
            split_tokens.append(Tokens(ids, is_learned, document_starts))
    except (OSError, ValueError):  # UserError is a ValueError
        return None
    return Corpus(split_tokens[0], split_tokens[1], {**facts, "cache": str(entry_folder)})


def _digest(facts: Any) -> str:
    """Return the SHA-256 of the JSON text of facts, in hexadecimal."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _are_facts(facts: Any, key: str) -> bool:
    """Return whether a JSON value holds the facts of the entry `key`, with valid values in all fields that are read."""
    if not isinstance(facts, dict) or not all(isinstance(facts.get(name), dict) for name in SPLITS):
        return False
    checksum_dicts = [facts[name].get("crc32") for name in SPLITS]
    if not all(isinstance(each, dict) and set(each) == {"ids", "learned", "starts"} for each in checksum_dicts):
        return False
    counts = [facts.get(name) for name in ("files", "bytes", "characters", "documents", "marked")]
    counts += [facts[name].get(count_name) for name in SPLITS for count_name in ("tokens", "documents")]
    return (
        all(type(count) is int and 0 <= count <= MAX_INT64 for count in counts)
        and facts.get("hash") == key
        and facts.get("dtype") in list(_MAX_VOCABULARY_BY_DTYPE)
        and isinstance(facts.get("masked"), bool)
    )


def _map_array(path: pathlib.Path, dtype: np.dtype, length: int, crc32: int) -> np.ndarray:
    """Map the array in a file into memory.

    Raises:
        ValueError: the file does not hold exactly `length` elements, or it has at most `MAX_CHECKED_BYTES` and
            its checksum differs from `crc32`.
    """
    if check_regular(path) != length * dtype.itemsize:
        raise ValueError(f"{path} does not hold {length} elements of {dtype}")
    if length == 0:  # an empty file cannot be mapped
        return np.zeros(0, dtype)
    # a plain array over the mapping, because indexing numpy's memmap class takes several times as long
    array = np.asarray(np.memmap(path, dtype, mode="r", shape=(length,)))
    if array.nbytes <= MAX_CHECKED_BYTES and zlib.crc32(array.data.cast("B")) != crc32:
        raise ValueError(f"{path} has changed since it was written: its checksum differs")
    return array


def _describe_files(files: Iterable[str]) -> str:
    """Return the first file's name and the number of other files, for the progress bar."""
    first_name, *other_names = [os.path.basename(file) for file in files]
    return first_name + (f" and {len(other_names)} more" if other_names else "")


@contextlib.contextmanager
def _progress_bar(description: str, total_character_count: int) -> Iterator[Any]:
    """Show a progress bar on stderr; yield a function that advances the bar by a number of characters."""
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
        task_id = progress.add_task(description, total=total_character_count)
        yield lambda character_count: progress.update(task_id, advance=character_count)
