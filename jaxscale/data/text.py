"""Text as data: files, tokenizer and layout, as values; the other modules of this folder do the work."""

import dataclasses
import functools
import hashlib
import os
from pathlib import Path
from typing import Any, Literal

from jaxscale.data import source
from jaxscale.data.cache import Corpus, open_corpus
from jaxscale.data.documents import DocumentRecipe
from jaxscale.data.loader import Opened
from jaxscale.data.pack import Packed
from jaxscale.data.shuffle import derive
from jaxscale.data.tokenizer import KINDS, Bytes, Characters, Tokenizer
from jaxscale.data.tokenizer import load as load_tokenizer
from jaxscale.data.windows import Windows
from jaxscale.errors import UserError, near_miss
from jaxscale.values import check_types

RowLayout = Literal["windows", "packed"]


@dataclasses.dataclass(frozen=True)
class Text:
    """Text files as batches of tokens.

    Args:
        path: a file, a glob, or several of them; gs:// and s3:// too.
        tokenizer: "byte", "char" (the alphabet of these files), or the path of a Hugging Face tokenizer.json.
        context: number of targets per row.
        layout: "windows" cuts the concatenated documents into rows; "packed" puts whole documents into rows, where no
            document sees another (`segments`, `positions`).
        held_out: share of the text for evaluation instead of training: its last characters (documents, if packed).
        separator: text between two documents; `None` makes each file one document.
        beginning: text put before every document, such as "<|bos|>".
        ending: text put after every document, such as "<|eos|>": without it a packed model never learns to stop.
        prompt_end: marker that ends a prompt, to train on answers alone. Targets up to its end have weight 0, as have
            all targets of a document without the marker.

    Raises:
        UserError: a value is out of range; on `open`, a file is missing, empty, binary, not UTF-8 or too short.

    Example:
        >>> Text("a.txt", held_out=1.5)
        Traceback (most recent call last):
        ...
        jaxscale.errors.UserError: held_out: got 1.5, expected a share of the text, 0 <= held_out < 1
    """

    path: str | Path | tuple[str | Path, ...] = dataclasses.field(metadata={"place": "content"})
    tokenizer: str | Path = dataclasses.field(default="byte", metadata={"place": "content"})
    context: int = 64
    layout: RowLayout = "windows"
    held_out: float = 0.1
    separator: str | None = None
    beginning: str = ""
    ending: str = ""
    prompt_end: str | None = None

    def __post_init__(self) -> None:
        check_types(self)
        if isinstance(self.path, str | os.PathLike):
            object.__setattr__(self, "path", source.absolute(self.path))
        else:
            object.__setattr__(self, "path", tuple(source.absolute(path) for path in self.path))
        if not self.path:
            raise UserError("path: got no path, expected at least one text file or glob")
        object.__setattr__(self, "tokenizer", _stored_tokenizer(os.fspath(self.tokenizer)))
        if self.context < 1:
            raise UserError(f"context: got {self.context!r}, expected a whole number of tokens >= 1")
        if not 0 <= self.held_out < 1:
            raise UserError(f"held_out: got {self.held_out!r}, expected a share of the text, 0 <= held_out < 1")
        for name in ("separator", "prompt_end"):
            if getattr(self, name) == "":
                raise UserError(f"{name}: got an empty text, expected a marker; leave it out to have none")

    @property
    def paths(self) -> tuple[str, ...]:
        """The paths and globs, absolute."""
        return tuple(map(str, self.path if isinstance(self.path, tuple) else (self.path,)))

    def open(self, batch: int, seed: int, *, process: int = 0, processes: int = 1) -> Opened:
        """Open the files, and return their batches, from the token cache if these files were encoded before.

        Args:
            batch: number of rows of the global batch.
            seed: seed of the order of rows.
            process: index of this process.
            processes: number of processes that share the batch; each gets contiguous rows.

        Returns:
            Opened data: `train()`, `evaluation()`, `tokenizer`, `facts`.

        Raises:
            UserError: a file is invalid, the text is too short for a row, or the batch cannot be shared.
        """
        return _open((self,), (1.0,), batch, seed, process, processes)

    def shapes(self, batch: int) -> dict[str, tuple[tuple[int, ...], str]]:
        """Shape and type of each array of a batch, without reading the files.

        Example:
            >>> Text("a.txt", context=64).shapes(8)["tokens"]
            ((8, 64), 'int32')
        """
        dtypes = {"tokens": "int32", "targets": "int32"}
        if self.layout == "packed":
            dtypes |= {"segments": "int32", "positions": "int32", "weights": "float32"}
        elif self.prompt_end is not None:
            dtypes |= {"weights": "float32"}
        return {name: ((batch, self.context), dtype) for name, dtype in dtypes.items()}


@dataclasses.dataclass(frozen=True)
class Mixture:
    """Several texts in one batch, mixed by weight.

    Each part is repeated as often as its share requires, and shuffled separately. The held-out texts of all parts are
    evaluated. Grain rounds shares to a hundredth of the smallest.

    Args:
        parts: texts with the same context, layout and tokenizer; the alphabet of "char" is that of all parts.
        weights: weight of each part; its share of the training rows is this weight divided by their sum.

    Raises:
        UserError: parts that differ in context, layout or tokenizer, or a weight that is not positive.

    Example:
        >>> Mixture((Text("a.txt"), Text("b.txt")), (3.0, 1.0)).context
        64
    """

    parts: tuple[Text, ...]
    weights: tuple[float, ...]

    def __post_init__(self) -> None:
        check_types(self)
        if not self.parts or len(self.parts) != len(self.weights):
            raise UserError(
                f"a mixture of {len(self.parts)} parts has {len(self.weights)} weights: expected one for each part"
            )
        for weight in self.weights:
            if not 0 < weight < float("inf"):
                raise UserError(f"weights: got {weight!r}, expected a positive number; leave the part out instead")
        for name in ("context", "layout", "tokenizer"):
            settings = sorted({str(getattr(part, name)) for part in self.parts})
            if len(settings) > 1:
                raise UserError(f"parts of a mixture have {name} {' and '.join(settings)}: expected the same in all")

    @property
    def context(self) -> int:
        """Number of targets per row."""
        return self.parts[0].context

    def open(self, batch: int, seed: int, *, process: int = 0, processes: int = 1) -> Opened:
        """Open the files, and return their batches; arguments, result and errors are those of `Text.open`."""
        return _open(self.parts, self.weights, batch, seed, process, processes)

    def shapes(self, batch: int) -> dict[str, tuple[tuple[int, ...], str]]:
        """Shape and type of each array of a batch: see `Text.shapes`."""
        return {name: shape for part in self.parts for name, shape in part.shapes(batch).items()}


def _stored_tokenizer(name: str) -> str:
    """Return the value to store for a tokenizer that the user names: its kind, or the absolute path of its file."""
    if name in KINDS:
        return name
    if os.sep not in name and "." not in name:
        raise UserError(
            f"unknown tokenizer {name!r}: expected byte, char or the path of a tokenizer.json{near_miss(name, KINDS)}"
        )
    return source.absolute(name)


def check_share(batch: int, process: int, processes: int) -> None:
    """Raise UserError unless a batch can be split evenly over the processes, and `process` is the index of one."""
    if batch < 1 or processes < 1 or batch % processes:
        raise UserError(
            f"a batch of {batch} rows cannot be split evenly over {processes} processes: give a multiple of {processes}"
        )
    if not 0 <= process < processes:
        raise UserError(f"process {process} of {processes}: expected an index from 0 to {processes - 1}")


def _open(
    parts: tuple[Text, ...], weights: tuple[float, ...], batch: int, seed: int, process: int, processes: int
) -> Opened:
    """Open the data of one text, or of the parts of a mixture."""
    check_share(batch, process, processes)
    files = [source.find(part.paths) for part in parts]
    tokenizer = _shared_tokenizer(parts, files)
    corpora = [open_corpus(part_files, tokenizer, _recipe(part)) for part, part_files in zip(parts, files, strict=True)]
    train_rows, held_out_rows = [], []  # rows of each part
    for index, (part, corpus) in enumerate(zip(parts, corpora, strict=True)):
        if part.layout == "packed":
            train_part, held_out_part = Packed(corpus.train, part.context), Packed(corpus.held_out, part.context)
        else:
            train_part = Windows(corpus.train, part.context, derive(seed, "windows", index))
            held_out_part = Windows(corpus.held_out, part.context, None)
        if not len(train_part):
            raise _too_short_error("training", part, corpus.facts["train"])
        if part.held_out and not len(held_out_part):
            raise _too_short_error("held-out", part, corpus.facts["held_out"])
        train_rows.append(train_part)
        held_out_rows.append(held_out_part)
    facts = _facts(parts, corpora, train_rows, held_out_rows, tokenizer)
    return Opened(tuple(train_rows), weights, tuple(held_out_rows), batch, seed, process, processes, tokenizer, facts)


def _recipe(part: Text) -> DocumentRecipe:
    """Return how the files of a text become documents; packed layouts hold out whole documents."""
    is_packed = part.layout == "packed"
    return DocumentRecipe(part.separator, part.beginning, part.ending, part.prompt_end, part.held_out, is_packed)


def _shared_tokenizer(parts: tuple[Text, ...], files_of_parts: list[list[str]]) -> Tokenizer:
    """Return the tokenizer that all parts share.

    Args:
        parts: texts with equal settings of the tokenizer.
        files_of_parts: files of each part, whose characters are the alphabet of "char".
    """
    kind_or_path = str(parts[0].tokenizer)
    if kind_or_path == "byte":
        return Bytes()
    if kind_or_path == "char":
        texts = (source.decode(source.read(file), file) for part_files in files_of_parts for file in part_files)
        return Characters.of([*(part.beginning + part.ending for part in parts), *map(_alphabet, texts)])
    return load_tokenizer(kind_or_path)


def _alphabet(text: str) -> str:
    """The characters of a text, each once."""
    return "".join(set(text))


def _too_short_error(split: str, part: Text, facts: dict[str, Any]) -> UserError:
    """Return the error for a split ("training", "held-out") of a text that has no row."""
    counts = f"the {split} part of {part.paths[0]} has {facts['tokens']} tokens in {facts['documents']} documents"
    if part.layout == "packed":
        return UserError(
            f"{counts}, and no target to learn: expected documents of two tokens or more. Whole documents are held out "
            f"(held_out {part.held_out:g}): give more documents, or the separator between them"
        )
    return UserError(
        f"{counts}, too few for a row of {part.context} targets, which needs {part.context + 1}: give a context of at "
        f"most {max(facts['tokens'] - 1, 0)}, more text, or another held_out (now {part.held_out:g})"
    )


def _facts(
    parts: tuple[Text, ...],
    corpora: list[Corpus],
    train_rows: list[Any],
    held_out: list[Any],
    tokenizer: Tokenizer,
) -> dict[str, Any]:
    """Return the facts of `Opened`: counts over all parts, the share of the positions that are targets, and hashes."""
    total_of = functools.partial(_sum_counts, corpora)
    target_count = sum(rows.targets for rows in train_rows)
    return {
        "kind": "text",
        "layout": parts[0].layout,
        "tokenizer": tokenizer.kind,
        "vocabulary": tokenizer.size,
        "files": total_of("files"),
        "bytes": total_of("bytes"),
        "characters": total_of("characters"),
        "documents": total_of("documents"),
        "documents_without_prompt_end": total_of("documents") - total_of("marked"),
        "tokens": sum(corpus.facts["train"]["tokens"] for corpus in corpora),
        "held_out_tokens": sum(corpus.facts["held_out"]["tokens"] for corpus in corpora),
        "rows": sum(map(len, train_rows)),
        "targets": target_count,
        "held_out_rows": sum(map(len, held_out)),
        "held_out_targets": sum(rows.targets for rows in held_out),
        "filled": target_count / (sum(map(len, train_rows)) * parts[0].context),
        "hash": hashlib.sha256(" ".join(corpus.facts["hash"] for corpus in corpora).encode()).hexdigest()[:16],
        "cache": [corpus.facts["cache"] for corpus in corpora],
    }


def _sum_counts(corpora: list[Corpus], name: str) -> int:
    """Sum the counts with this name over all corpora."""
    return sum(corpus.facts[name] for corpus in corpora)
