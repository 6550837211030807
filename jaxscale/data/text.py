"""Text as data: `Text` and `Mixture` specify files, a tokenizer and a layout, and open the files as batches."""

import dataclasses
import functools
import hashlib
import os
from pathlib import Path
from typing import Any, Literal, NoReturn

from jaxscale.data import source
from jaxscale.data.cache import Corpus, open_corpus
from jaxscale.data.documents import DocumentRecipe
from jaxscale.data.loader import Opened
from jaxscale.data.pack import Packed
from jaxscale.data.shuffle import derive_seed
from jaxscale.data.tokenizer import KINDS, Bytes, Characters, Tokenizer
from jaxscale.data.tokenizer import load as load_tokenizer
from jaxscale.data.windows import Windows
from jaxscale.errors import UserError, near_miss
from jaxscale.values import check_types
from jaxscale.values.short_repr import short_repr

RowLayout = Literal["windows", "packed"]


@dataclasses.dataclass(frozen=True)
class Text:
    """Text files as batches of tokens.

    Args:
        path: path of a file or a glob, or several of them; a path may begin with gs:// or s3://. A file may be a table
            (.parquet, .arrow). A path may be the folder to which Hugging Face's `Dataset.save_to_disk` saved a dataset.
        tokenizer: "byte", "char" (with the alphabet of these files), or the path of a Hugging Face tokenizer.json.
        context: number of targets per row.
        layout: "windows" cuts the concatenated documents into rows; "packed" puts whole documents into rows, and no
            document attends to another (the batch has `segments` and `positions`).
        held_out: share of the text held out for evaluation: its last characters or, if the layout is "packed", its last
            documents. Use 1 for data that serves only as a held-out set of an experiment.
        separator: text between two documents; `None` makes each file one document.
        beginning: text put before every document, such as "<|bos|>".
        ending: text put after every document, such as "<|eos|>"; without it, a model of packed documents never learns
            to stop.
        prompt_end: marker that ends a prompt, for training on answers alone. Targets up to the end of the marker have
            weight 0, as do all targets of a document without the marker.
        fields: for JSONL files and tables, in which each line or row is a document: the name of its text, such as
            ("text",), or the names of its prompt and its answer, such as ("prompt", "answer"). Targets in a prompt have
            weight 0. () reads plain text.

    Raises:
        UserError: a value is out of range; or, on `open`, a file is missing, empty, binary, not UTF-8 or too short.

    Example:
        >>> Text("a.txt", held_out=1.5)
        Traceback (most recent call last):
        ...
        jaxscale.errors.UserError: held_out: got 1.5, expected a share of the text, 0 <= held_out <= 1
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
    fields: tuple[str, ...] = ()

    __repr__ = short_repr

    def __post_init__(self) -> None:
        check_types(self)
        if isinstance(self.path, str | os.PathLike):
            object.__setattr__(self, "path", source.absolute_path(self.path))
        else:
            object.__setattr__(self, "path", tuple(source.absolute_path(path) for path in self.path))
        if not self.path:
            raise UserError("path: got no path, expected at least one text file or glob")
        object.__setattr__(self, "tokenizer", _kind_or_absolute_path(os.fspath(self.tokenizer)))
        if self.context < 1:
            raise UserError(f"context: got {self.context!r}, expected a whole number of tokens >= 1")
        if not 0 <= self.held_out <= 1:
            raise UserError(f"held_out: got {self.held_out!r}, expected a share of the text, 0 <= held_out <= 1")
        for name in ("separator", "prompt_end"):
            if getattr(self, name) == "":
                raise UserError(f"{name}: got an empty text, expected a marker; leave {name} out to have none")

        if len(self.fields) > 2:
            raise UserError(f"fields: got {', '.join(self.fields)}, expected the text, or a prompt and its answer")
        if self.fields and (self.separator is not None or self.prompt_end is not None):
            name = "separator" if self.separator is not None else "prompt_end"
            raise UserError(
                f"{name}: a line of a JSONL file is a document, and fields names its texts; leave {name} out"
            )

    @property
    def paths(self) -> tuple[str, ...]:
        """The paths and globs, as absolute paths."""
        return tuple(map(str, self.path if isinstance(self.path, tuple) else (self.path,)))

    def held_out_at(self, path: str | Path | tuple[str | Path, ...]) -> "Text":
        """Return the text at another path, with the same settings and all of it held out."""
        return dataclasses.replace(self, path=path, held_out=1.0)

    def open(
        self, batch: int, seed: int, *, process: int = 0, processes: int = 1, tokenizer: Tokenizer | None = None
    ) -> Opened:
        """Open the files, and return their batches; the token cache is used if these files were encoded before.

        Args:
            batch: number of rows in the global batch.
            seed: seed of the order of rows.
            process: index of this process.
            processes: number of processes that share the batch; each process gets contiguous rows.
            tokenizer: tokenizer to encode with, such as that of other data; by default, that of this text's settings.

        Returns:
            The opened data, with `train()`, `evaluation()`, `tokenizer` and `facts`.

        Raises:
            UserError: a file is invalid, the text is too short for a row, or the batch cannot be split evenly.
        """
        return _open((self,), (1.0,), batch, seed, process, processes, tokenizer)

    def shapes(self, batch: int) -> dict[str, tuple[tuple[int, ...], str]]:
        """Return the shape and dtype of each array in a batch, by name, without reading the files.

        Example:
            >>> Text("a.txt", context=64).shapes(8)["tokens"]
            ((8, 64), 'int32')
        """
        dtype_by_name = {"tokens": "int32", "targets": "int32"}
        if self.layout == "packed":
            dtype_by_name |= {"segments": "int32", "positions": "int32", "weights": "float32"}
        elif self.prompt_end is not None or len(self.fields) == 2:
            dtype_by_name |= {"weights": "float32"}
        return {name: ((batch, self.context), dtype) for name, dtype in dtype_by_name.items()}


@dataclasses.dataclass(frozen=True)
class Mixture:
    """Several texts in one batch, mixed by weight.

    Each part is repeated as often as its share requires, and shuffled separately. The held-out texts of all parts are
    evaluated. Grain rounds shares to a hundredth of the smallest share.

    Args:
        parts: texts with the same context, layout and tokenizer; "char" uses the alphabet of all parts together.
        weights: weight of each part; a part's share of the training rows is its weight divided by the sum of weights.

    Raises:
        UserError: the parts differ in context, layout or tokenizer, or a weight is not positive.

    Example:
        >>> Mixture((Text("a.txt"), Text("b.txt")), (3.0, 1.0)).context
        64
    """

    parts: tuple[Text, ...]
    weights: tuple[float, ...]

    __repr__ = short_repr

    def __post_init__(self) -> None:
        for name in ("parts", "weights"):
            if isinstance(getattr(self, name), list):
                object.__setattr__(self, name, tuple(getattr(self, name)))
        for part in self.parts if isinstance(self.parts, tuple) else ():
            if not isinstance(part, Text):
                _refuse_part(part)
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
                raise UserError(
                    f"parts of a mixture have {name} {' and '.join(settings)}: expected the same {name} in all parts"
                )

    @property
    def context(self) -> int:
        """Number of targets per row."""
        return self.parts[0].context

    @property
    def tokenizer(self) -> str | Path:
        """The tokenizer of all parts."""
        return self.parts[0].tokenizer

    def held_out_at(self, path: str | Path | tuple[str | Path, ...]) -> Text:
        """Return the text at another path, with the settings of the first part and all of it held out."""
        return self.parts[0].held_out_at(path)

    def open(
        self, batch: int, seed: int, *, process: int = 0, processes: int = 1, tokenizer: Tokenizer | None = None
    ) -> Opened:
        """Open the files of all parts, and return mixed batches; for arguments and errors, see `Text.open`."""
        return _open(self.parts, self.weights, batch, seed, process, processes, tokenizer)

    def shapes(self, batch: int) -> dict[str, tuple[tuple[int, ...], str]]:
        """Return the shape and dtype of each array in a batch, by name, without reading the files."""
        return {name: shape_and_dtype for part in self.parts for name, shape_and_dtype in part.shapes(batch).items()}


def _refuse_part(part: Any) -> NoReturn:
    """Raise the error for a part of a mixture that is not a `Text`."""
    class_name = type(part).__name__
    advice_text = ""
    if isinstance(part, str | os.PathLike):
        advice_text = f": write Text({os.fspath(part)!r})"
    elif class_name == "Chats":
        advice_text = ": give the files of several sets of chats to one Chats, as in Chats(path=('a.jsonl', 'b.jsonl'))"
    raise UserError(f"parts: got a {class_name}, expected a Text, since a mixture joins texts{advice_text}")


def _kind_or_absolute_path(kind_or_path: str) -> str:
    """Return the text to store for a tokenizer: its kind, or the absolute path of its file."""
    if kind_or_path in KINDS:
        return kind_or_path
    if os.sep not in kind_or_path and "." not in kind_or_path:
        raise UserError(
            f"unknown tokenizer {kind_or_path!r}: expected byte, char or the path of a tokenizer.json"
            f"{near_miss(kind_or_path, KINDS)}"
        )
    return source.absolute_path(kind_or_path)


def check_share(batch: int, process: int, processes: int) -> None:
    """Raise UserError if a batch cannot be split evenly over `processes`, or `process` is not a valid index."""
    if batch < 1 or processes < 1 or batch % processes:
        raise UserError(
            f"a batch of {batch} rows cannot be split evenly over {processes} processes: give a multiple of {processes}"
        )
    if not 0 <= process < processes:
        raise UserError(f"process {process} of {processes}: expected an index from 0 to {processes - 1}")


def _open(
    parts: tuple[Text, ...],
    weights: tuple[float, ...],
    batch: int,
    seed: int,
    process: int,
    processes: int,
    tokenizer: Tokenizer | None,
) -> Opened:
    """Open the data of one text, or of the parts of a mixture."""
    check_share(batch, process, processes)
    files_by_part = [source.find_files(part.paths) for part in parts]
    if tokenizer is None:
        tokenizer = _shared_tokenizer(parts, files_by_part)
    corpora = [open_corpus(files, tokenizer, _recipe(part)) for part, files in zip(parts, files_by_part, strict=True)]
    train_rows, held_out_rows = [], []  # the `EpochRows` of each part
    for index, (part, corpus) in enumerate(zip(parts, corpora, strict=True)):
        if part.layout == "packed":
            part_train_rows = Packed(corpus.train, part.context)
            part_held_out_rows = Packed(corpus.held_out, part.context)
        else:
            part_train_rows = Windows(corpus.train, part.context, derive_seed(seed, "windows", index))
            part_held_out_rows = Windows(corpus.held_out, part.context, None)
        if not len(part_train_rows) and part.held_out < 1:
            raise _too_short_error("training", part, corpus.facts["train"])
        if part.held_out and not len(part_held_out_rows):
            raise _too_short_error("held-out", part, corpus.facts["held_out"])
        train_rows.append(part_train_rows)
        held_out_rows.append(part_held_out_rows)
    facts = _facts(parts, corpora, train_rows, held_out_rows, tokenizer)
    return Opened(tuple(train_rows), weights, tuple(held_out_rows), batch, seed, process, processes, tokenizer, facts)


def _recipe(part: Text) -> DocumentRecipe:
    """Return the recipe by which the files of a text become documents; a packed layout holds out whole documents."""
    is_packed = part.layout == "packed"
    return DocumentRecipe(
        part.separator, part.beginning, part.ending, part.prompt_end, part.held_out, is_packed, part.fields
    )


def _shared_tokenizer(parts: tuple[Text, ...], files_by_part: list[list[str]]) -> Tokenizer:
    """Return the tokenizer that all parts share.

    Args:
        parts: texts with the same tokenizer setting.
        files_by_part: files of each part; the alphabet of "char" has all their characters.
    """
    kind_or_path = str(parts[0].tokenizer)
    if kind_or_path == "byte":
        return Bytes()
    if kind_or_path == "char":
        alphabets = (
            _recipe(part).alphabet_of(source.read(file), file)
            for part, files in zip(parts, files_by_part, strict=True)
            for file in files
        )
        return Characters.of([*(part.beginning + part.ending for part in parts), *alphabets])
    return load_tokenizer(kind_or_path)


def _too_short_error(split_name: str, part: Text, facts: dict[str, Any]) -> UserError:
    """Return the error for a split of a text that is too short for a row.

    Args:
        split_name: "training" or "held-out".
        part: the text.
        facts: the numbers of "tokens" and "documents" in the split.
    """
    counts_text = (
        f"the {split_name} part of {part.paths[0]} has {facts['tokens']} tokens in {facts['documents']} documents"
    )
    if part.layout == "packed":
        return UserError(
            f"{counts_text}, and no target to learn: expected documents of two tokens or more. Whole documents are "
            f"held out (held_out {part.held_out:g}): give more documents, or the separator between them"
        )
    return UserError(
        f"{counts_text}, too few for a row of {part.context} targets, which needs {part.context + 1}: give a context "
        f"of at most {max(facts['tokens'] - 1, 0)}, more text, or another held_out (now {part.held_out:g})"
    )


def _facts(
    parts: tuple[Text, ...],
    corpora: list[Corpus],
    train_rows: list[Any],
    held_out_rows: list[Any],
    tokenizer: Tokenizer,
) -> dict[str, Any]:
    """Return `Opened.facts`: counts over all parts, the share of the positions that hold targets, and hashes."""
    sum_counts = functools.partial(_sum_counts, corpora)
    target_count = sum(rows.targets for rows in train_rows)
    return {
        "kind": "text",
        "layout": parts[0].layout,
        "tokenizer": tokenizer.kind,
        "vocabulary": tokenizer.size,
        "files": sum_counts("files"),
        "bytes": sum_counts("bytes"),
        "characters": sum_counts("characters"),
        "documents": sum_counts("documents"),
        "documents_without_prompt_end": sum_counts("documents") - sum_counts("marked"),
        "tokens": sum(corpus.facts["train"]["tokens"] for corpus in corpora),
        "held_out_tokens": sum(corpus.facts["held_out"]["tokens"] for corpus in corpora),
        "rows": sum(map(len, train_rows)),
        "targets": target_count,
        "held_out_rows": sum(map(len, held_out_rows)),
        "held_out_targets": sum(rows.targets for rows in held_out_rows),
        "filled": target_count / (max(1, sum(map(len, train_rows))) * parts[0].context),
        "hash": hashlib.sha256(" ".join(corpus.facts["hash"] for corpus in corpora).encode()).hexdigest()[:16],
        "cache": [corpus.facts["cache"] for corpus in corpora],
    }


def _sum_counts(corpora: list[Corpus], name: str) -> int:
    """Return the sum of the count `facts[name]` over all corpora."""
    return sum(corpus.facts[name] for corpus in corpora)
