"""Chats as data: JSONL rows of messages, rendered by a model folder's chat template, with loss on answers alone."""

import dataclasses
import datetime
import functools
import os
from pathlib import Path
from typing import Any

import numpy as np

from jaxscale.data import source
from jaxscale.data.cache import Corpus, Tokens, open_corpus
from jaxscale.data.chat.chat_rows import ChatRecipe
from jaxscale.data.chat.chat_template import ChatTemplate, folder_tokenizer, read_template
from jaxscale.data.loader import Opened
from jaxscale.data.pack import Packed
from jaxscale.data.text import check_share
from jaxscale.errors import UserError
from jaxscale.values import check_types


@dataclasses.dataclass(frozen=True)
class Chats:
    """Chats as packed rows of tokens, with loss on the answers alone.

    A row of a file is `{"messages": [{"role": "user", "content": ...}, {"role": "assistant", "content": ...}]}`, with
    `"tools"` if the template takes tools. A row may also be `{"prompt": ..., "completion": ...}`; `answer` and
    `response` are accepted in place of `completion`. The folder's chat template renders the rows; templates need Jinja2
    (`pip install 'jaxscale[chat]'`). The ids are those of transformers' `apply_chat_template`. The tokens of an answer
    have weight 1, including the token that ends the answer. A chat of more than `context` targets is cut after them.
    Chats are packed into rows like the documents of `Text`.

    Args:
        path: path of a JSONL file or a glob, or several of them; a path may begin with gs:// or s3://.
        folder: model folder that holds tokenizer.json and the chat template.
        context: number of targets per row.
        held_out: share of the chats held out for evaluation, counted from the end. Use 1 for data that serves only as a
            held-out set of an experiment.
        held_out_path: file or glob, or several of them, whose chats are held out. If it is given, `held_out` is not
            used.
        date: day that the template sees as today, as YYYY-MM-DD. The day is fixed, so a continued run renders the same
            texts. The default is the date of Llama's templates.

    Raises:
        UserError: a value is out of range; or, on `open`, a file or the folder is missing or not as described, or the
            template is broken, takes too long or refuses a chat.

    Example:
        >>> Chats("chats.jsonl", "smollm2", context=0)
        Traceback (most recent call last):
        jaxscale.errors.UserError: context: got 0, expected a whole number of tokens >= 1

    References:
        https://huggingface.co/docs/transformers/chat_templating
    """

    path: str | Path | tuple[str | Path, ...] = dataclasses.field(metadata={"place": "content"})
    folder: str | Path = dataclasses.field(metadata={"place": "content"})
    context: int = 1024
    held_out: float = 0.1
    held_out_path: str | Path | tuple[str | Path, ...] | None = dataclasses.field(
        default=None, metadata={"place": "content"}
    )
    date: str = "2024-07-26"

    layout = "packed"

    def __post_init__(self) -> None:
        check_types(self)
        for name in ("path", "held_out_path"):
            paths = getattr(self, name)
            if isinstance(paths, str | os.PathLike):
                object.__setattr__(self, name, source.absolute_path(paths))
            elif paths is not None:
                object.__setattr__(self, name, tuple(source.absolute_path(path) for path in paths))
            if paths == ():
                raise UserError(f"{name}: got no path, expected at least one JSONL file or glob")
        object.__setattr__(self, "folder", source.absolute_path(self.folder))
        if self.context < 1:
            raise UserError(f"context: got {self.context!r}, expected a whole number of tokens >= 1")
        if not 0 <= self.held_out <= 1:
            raise UserError(f"held_out: got {self.held_out!r}, expected a share of the chats from 0 to 1")
        try:
            datetime.date.fromisoformat(self.date)
        except ValueError:
            raise UserError(f"date: got {self.date!r:.40}, expected a day as YYYY-MM-DD, such as 2024-07-26") from None

    @functools.cached_property
    def template(self) -> ChatTemplate:
        """The folder's chat template."""
        return read_template(self.folder)

    def held_out_at(self, path: str | Path | tuple[str | Path, ...]) -> "Chats":
        """Return the chats at another path, with the same settings and all chats held out."""
        return dataclasses.replace(self, path=path, held_out=1.0, held_out_path=None)

    def open(self, batch: int, seed: int, *, process: int = 0, processes: int = 1) -> Opened:
        """Render and encode the chats, and return the opened data; for arguments and errors, see `Text.open`."""
        check_share(batch, process, processes)
        template, tokenizer = self.template, folder_tokenizer(self.folder)
        held_out_files = [] if self.held_out_path is None else source.find_files(_paths(self.held_out_path))
        files = [*source.find_files(_paths(self.path)), *held_out_files]
        is_all_held_out = self.held_out == 1 and not held_out_files
        held_out_share = 0.0 if is_all_held_out else self.held_out
        corpus = open_corpus(files, tokenizer, ChatRecipe(template, self.date, held_out_share, len(held_out_files)))
        rows, held_out_rows = (Packed(tokens, self.context, True) for tokens in (corpus.train, corpus.held_out))
        if not len(rows):
            raise UserError(f"{files[0]}: {_no_rows_text(corpus.train, self.context)} to train on; {_NO_ROWS_ADVICE}")
        if not len(held_out_rows) and (held_out_files or held_out_share):
            held_out_text = held_out_files[0] if held_out_files else f"held_out {self.held_out:g} of {files[0]}"
            raise UserError(
                f"{held_out_text}: {_no_rows_text(corpus.held_out, self.context)} to evaluate; {_NO_ROWS_ADVICE}"
            )
        facts = _facts(corpus, rows, held_out_rows, tokenizer)
        if is_all_held_out:
            rows, held_out_rows = held_out_rows, rows
        note = _note(corpus.facts, [corpus.train, corpus.held_out], self.context)
        return Opened(
            (rows,), (1.0,), (held_out_rows,), batch, seed, process, processes, tokenizer, facts, note, template
        )

    def shapes(self, batch: int) -> dict[str, tuple[tuple[int, ...], str]]:
        """Return the shape and dtype of each array in a batch, by name, without reading the files.

        Example:
            >>> Chats("chats.jsonl", "smollm2", context=512).shapes(8)["segments"]
            ((8, 512), 'int32')
        """
        dtype_by_name = dict.fromkeys(("tokens", "targets", "segments", "positions"), "int32") | {"weights": "float32"}
        return {name: ((batch, self.context), dtype) for name, dtype in dtype_by_name.items()}


_NO_ROWS_ADVICE = "give more chats, or a longer context if the prompts alone fill it"


def _no_rows_text(tokens: Tokens, context: int) -> str:
    """Return the reason why a split has no rows, as text for an error message."""
    return f"none of its {len(tokens.document_starts) - 1} chats has an answer in its first {context} tokens"


def _paths(path_or_paths: Any) -> tuple[str, ...]:
    """Return a path, or each of several paths, as text in a tuple."""
    return tuple(map(str, path_or_paths if isinstance(path_or_paths, tuple) else (path_or_paths,)))


def _facts(corpus: Corpus, rows: Packed, held_out_rows: Packed, tokenizer: Any) -> dict[str, Any]:
    """Return `Opened.facts`: counts, the share of the positions that hold targets, and hashes."""
    lengths_by_split = [np.diff(tokens.document_starts) for tokens in (corpus.train, corpus.held_out)]
    copied_names = ("files", "bytes", "characters", "documents", "chats", "unanswered")
    return {name: corpus.facts[name] for name in copied_names} | {
        "kind": "chats",
        "layout": "packed",
        "tokenizer": tokenizer.kind,
        "vocabulary": tokenizer.size,
        "tokens": corpus.facts["train"]["tokens"],
        "held_out_tokens": corpus.facts["held_out"]["tokens"],
        "longest": int(max((lengths.max() for lengths in lengths_by_split if len(lengths)), default=0)),
        "rows": len(rows),
        "targets": rows.targets,
        "held_out_rows": len(held_out_rows),
        "held_out_targets": held_out_rows.targets,
        "filled": rows.targets / (len(rows) * rows.context),
        "hash": corpus.facts["hash"][:16],
        "cache": [corpus.facts["cache"]],
    }


def _note(facts: dict[str, Any], tokens_by_split: list[Tokens], context: int) -> str | None:
    """Return a note about chats that are cut or that have no answer; `None` if there are no such chats."""
    cut_count = lost_token_count = 0
    for tokens in tokens_by_split:
        ends = tokens.document_starts[1:]
        cut_indices = np.minimum(tokens.document_starts[:-1] + context + 1, ends)
        assert tokens.is_learned is not None
        learned_counts_before = np.concatenate([[0], np.cumsum(tokens.is_learned, dtype=np.int64)])
        cut_count += int((cut_indices < ends).sum())
        lost_token_count += int((learned_counts_before[ends] - learned_counts_before[cut_indices]).sum())
    notes = []
    if cut_count:
        notes.append(
            f"{cut_count:,} of {facts['documents']:,} chats are longer than data.context ({context} tokens) and are "
            f"cut there, with {lost_token_count:,} tokens of answers"
        )
    if facts["unanswered"]:
        notes.append(f"{facts['unanswered']:,} chats without an answer are left out, first {facts['first_unanswered']}")
    return "; ".join(notes) or None
