"""The documents in text files, and their split into a training part and a held-out part.

If whole documents are held out, the cut between the two parts falls between documents. Otherwise, it falls on a
character of the concatenated documents, and one document may lie on both sides of the cut. A prompt and its answer are
encoded separately, so a prompt has the same ids in training as when a trained model continues the prompt.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from jaxscale.data import arrow, source
from jaxscale.errors import UserError
from jaxscale.values.read_files import parse_json

_BOUNDARY = "\0"
"""Character between a prompt and its answer; no text of a file contains it."""


def has_half_characters(text: str) -> bool:
    """Return whether a text contains half a surrogate pair, which JSON may spell, but UTF-8 cannot express.

    Example:
        >>> has_half_characters("\\ud83d"), has_half_characters("\N{GRINNING FACE}")
        (True, False)
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False


@dataclasses.dataclass(frozen=True)
class DocumentRecipe:
    """How files become two sequences of documents, one for training and one held out.

    Args:
        separator: text between documents, which belongs to none of them; `None` makes each file one document.
        beginning: text put before every document.
        ending: text put after every document.
        prompt_end: marker that ends a prompt. Tokens up to the end of the marker have weight 0, as do all tokens of a
            document without the marker. With `None`, all tokens have weight 1.
        held_out: share of the text, from 0 to 1, that is held out from training, counted from the end.
        is_cut_at_document: whether to hold out whole documents; otherwise the cut falls on a character, as in nanoGPT.
        fields: for JSONL files and tables, in which each line or row is a document: the name of its text, or the names
            of its prompt and its answer. Tokens of a prompt have weight 0. () for files of plain text.
    """

    separator: str | None
    beginning: str
    ending: str
    prompt_end: str | None
    held_out: float
    is_cut_at_document: bool
    fields: tuple[str, ...] = ()

    @property
    def identity(self) -> tuple[Any, ...]:
        """The settings, for the cache key; for plain text, the key is the same as in earlier versions."""
        settings = dataclasses.astuple(self)
        return settings if self.fields else settings[:-1]

    def alphabet_of(self, content: bytes, file: str) -> str:
        """Return each distinct character of a file once, in any order; with `fields`, only the documents count."""
        if not self.fields and not arrow.is_table(file):
            return "".join(set(source.decode(content, file)))
        return "".join(set().union(*self.documents_of(content, file)) - {_BOUNDARY})

    @property
    def is_masked(self) -> bool:
        """Whether some tokens have weight 0."""
        return self.prompt_end is not None or len(self.fields) == 2

    def documents_of(self, content: bytes, file: str) -> list[str]:
        """Return the documents of one file: the rows of a table, or the documents in the text of any other file.

        Args:
            content: the bytes of the file.
            file: path of the file, for messages.

        Raises:
            UserError: the file is not a text or a table, or a document cannot be encoded.
        """
        if not arrow.is_table(file):
            return self.documents(source.decode(content, file), file)
        if not self.fields:
            raise UserError(f"{file} is a table, expected the name of its column of texts: set fields, as in ('text',)")
        texts_by_row = arrow.read_texts(content, file, self.fields)
        return [
            self._document_of_texts(texts, f"{file}: row {row_index}") for row_index, texts in enumerate(texts_by_row)
        ]

    def documents(self, text: str, file: str) -> list[str]:
        """Return the documents in the text of one file; empty documents are left out.

        Args:
            text: the text.
            file: path of the file, for messages.
        """
        if self.fields:
            numbered_lines = enumerate(text.split("\n"), 1)  # a text may contain other line breaks
            return [
                self._document_of_line(line, f"{file}:{line_number}")
                for line_number, line in numbered_lines
                if line.strip()
            ]
        return [text] if self.separator is None else [document for document in text.split(self.separator) if document]

    def _document_of_line(self, line: str, place: str) -> str:
        """Return the document in a line of a JSONL file: its text, or its prompt and answer with a NUL between them.

        Args:
            line: the line.
            place: file and number of the line, for messages.

        Raises:
            UserError: the line is not a JSON object, lacks a text, or has a text that cannot be encoded.
        """
        try:
            line_json = parse_json(line, "the line")
        except UserError as error:
            raise UserError(f"{place}: not JSON ({error}); expected an object with {', '.join(self.fields)}") from None
        texts: list[str] = []
        for name in self.fields:
            text = line_json.get(name) if isinstance(line_json, dict) else None
            if not isinstance(text, str):
                content_text = f"a {type(line_json).__name__}, expected an object"
                if isinstance(line_json, dict):
                    content_text = f"the names {', '.join(map(repr, line_json))}"
                raise UserError(f"{place}: {name} is {text!r:.40}, expected text; the line has {content_text}")
            texts.append(text)
        return self._document_of_texts(texts, place)

    def _document_of_texts(self, texts: Sequence[str], place: str) -> str:
        """Check the texts of a document, and return them joined; a NUL separates a prompt from its answer.

        Args:
            texts: one text for each of `fields`.
            place: file and line or row of the texts, for messages.

        Raises:
            UserError: a text cannot be encoded.
        """
        for name, text in zip(self.fields, texts, strict=True):
            if _BOUNDARY in text:
                raise UserError(
                    f"{place}: {name} contains a NUL character, which separates prompt and answer: remove it"
                )
            if has_half_characters(text):
                raise UserError(
                    f"{place}: {name} contains half a surrogate pair, such as \\ud83d: repair or remove that character"
                )
        return _BOUNDARY.join(texts)

    def labeled_parts(self, document: str) -> Iterator[tuple[str, bool]]:
        """Yield the parts of a document to encode, as pairs (part, whether its tokens have weight 1)."""
        if len(self.fields) == 2:
            prompt, answer = document.split(_BOUNDARY)
            yield from ((self.beginning, False), (prompt, False), (answer, True), (self.ending, True))
            return
        if self.prompt_end is None:
            if self.beginning:
                yield self.beginning, True
            yield document, True
            if self.ending:
                yield self.ending, True
            return
        marker_index = document.find(self.prompt_end)
        answer_start = len(document) if marker_index < 0 else marker_index + len(self.prompt_end)
        yield from (
            (self.beginning, False),
            (document[:answer_start], False),
            (document[answer_start:], True),
            (self.ending, marker_index >= 0),
        )


def check_and_count(files: list[str], recipe: DocumentRecipe) -> dict[str, Any]:
    """Check every file, and return the counts from which the start of the held-out part is computed.

    Returns:
        A dict of the numbers of "files", "bytes", "characters", "documents", and of "marked" documents, which contain
        the recipe's `prompt_end`. If that is `None`, all documents count as marked.

    Raises:
        UserError: a file is not text, the files hold no document, or no document contains the recipe's `prompt_end`.
    """
    document_count = character_count = byte_count = marked_count = 0
    added_character_count = len(recipe.beginning) + len(recipe.ending)
    for file in files:
        content = source.read(file)
        file_documents = recipe.documents_of(content, file)
        byte_count += len(content)
        document_count += len(file_documents)
        boundary_count = len(file_documents) * (len(recipe.fields) == 2)
        character_count += sum(map(len, file_documents)) - boundary_count + added_character_count * len(file_documents)
        marked_count += sum(not recipe.prompt_end or recipe.prompt_end in document for document in file_documents)
    if not marked_count:
        raise UserError(
            f"prompt_end {recipe.prompt_end!r} occurs in none of the {document_count} documents: expected one in each. "
            "Check the spelling of prompt_end, and the separator"
            if document_count
            else f"{files[0]} has no rows, expected texts"
            if recipe.fields
            else f"separator {recipe.separator!r} leaves no document: expected text between separators"
        )
    return {
        "files": len(files),
        "bytes": byte_count,
        "characters": character_count,
        "documents": document_count,
        "marked": marked_count,
    }


def labeled_texts(
    files: list[str], recipe: DocumentRecipe, held_out_start: int
) -> Iterator[tuple[int, bool, bool, str]]:
    """Yield every text to encode with its labels, as tuples (split_index, is_document_start, is_learned, text).

    `split_index` is 0 for the training part and 1 for the held-out part. `is_document_start` is true if the text is the
    first one of its document in that part. `is_learned` is true if the text's tokens have weight 1.

    Args:
        files: paths of the files.
        recipe: how files become documents.
        held_out_start: index of the first held-out document if whole documents are held out; otherwise, index of the
            first held-out character.
    """
    position = 0  # index of a document if whole documents are held out, otherwise of a character
    for file in files:
        for document in recipe.documents_of(source.read(file), file):
            if recipe.is_cut_at_document:
                split_index, is_document_start = int(position >= held_out_start), True
                for text, is_learned in recipe.labeled_parts(document):
                    if text:
                        yield split_index, is_document_start, is_learned, text
                        is_document_start = False
                position += 1
                continue
            has_started = [False, False]  # for each split, whether it has a text of this document
            for text, is_learned in recipe.labeled_parts(document):
                cut_index = min(max(held_out_start - position, 0), len(text))  # index of the first held-out character
                for split_index, split_text in enumerate((text[:cut_index], text[cut_index:])):
                    if split_text:
                        yield split_index, not has_started[split_index], is_learned, split_text
                        has_started[split_index] = True
                position += len(text)
