"""The documents of some files, and the start of the held-out part.

If whole documents are held out, the cut between the two parts falls between documents; otherwise it falls on a
character of their concatenation, and a document may lie on both sides. A prompt and its answer are encoded separately,
so that the prompt's ids are those it will have when a model continues it.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

from jaxscale.data import source
from jaxscale.errors import UserError


@dataclasses.dataclass(frozen=True)
class DocumentRecipe:
    """How files become two sequences of documents.

    Args:
        separator: text between documents, which is dropped; `None` makes each file one document.
        beginning: text put before every document.
        ending: text put after every document.
        prompt_end: marker that ends a prompt. Tokens up to its end have weight 0, as have all tokens of a document
            without the marker. With `None`, all tokens have weight 1.
        held_out: share of the text, at its end, that is held out from training, from 0 to 1.
        whole: whether to hold out whole documents; otherwise the cut falls on a character, as in nanoGPT.
    """

    separator: str | None
    beginning: str
    ending: str
    prompt_end: str | None
    held_out: float
    whole: bool

    def documents(self, text: str) -> list[str]:
        """The documents of one file, without empty ones."""
        return [text] if self.separator is None else [document for document in text.split(self.separator) if document]

    def parts(self, document: str) -> Iterator[tuple[str, bool]]:
        """Yield the parts of a document that are encoded separately, each with whether its tokens have weight 1."""
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


def survey(files: list[str], recipe: DocumentRecipe) -> dict[str, Any]:
    """Check every file, and count what determines where the held-out part starts.

    Returns:
        Numbers of "files", "bytes", "characters" and "documents", and of "marked" documents: those with a `prompt_end`.

    Raises:
        UserError: a file is not text, the files hold no document, or no document has a `prompt_end`.
    """
    document_count = character_count = total_bytes = marked_count = 0
    added_characters = len(recipe.beginning) + len(recipe.ending)
    for file in files:
        content = source.read(file)
        file_documents = recipe.documents(source.decode(content, file))
        total_bytes += len(content)
        document_count += len(file_documents)
        character_count += sum(map(len, file_documents)) + added_characters * len(file_documents)
        marked_count += sum(not recipe.prompt_end or recipe.prompt_end in document for document in file_documents)
    if not marked_count:
        raise UserError(
            f"prompt_end {recipe.prompt_end!r} occurs in none of the {document_count} documents: expected it in each. "
            "Check its spelling and the separator"
            if document_count
            else f"separator {recipe.separator!r} leaves no document: expected text between separators"
        )
    return {
        "files": len(files),
        "bytes": total_bytes,
        "characters": character_count,
        "documents": document_count,
        "marked": marked_count,
    }


def texts(files: list[str], recipe: DocumentRecipe, held_out_start: int) -> Iterator[tuple[int, bool, bool, str]]:
    """Yield every text to encode, as (split, begins, learned, text).

    `split` is 0 for training, 1 for the held-out part. `begins` is true if a document begins with the text. `learned`
    is true if its tokens have weight 1.

    Args:
        files: paths of the files.
        recipe: how files become documents.
        held_out_start: index of the first held-out document if the recipe holds out whole ones, otherwise of the first
            held-out character.
    """
    position = 0  # of a document if whole ones are held out, otherwise of a character
    for file in files:
        for document in recipe.documents(source.decode(source.read(file), file)):
            if recipe.whole:
                split, begins = int(position >= held_out_start), True
                for text, learned in recipe.parts(document):
                    if text:
                        yield split, begins, learned, text
                        begins = False
                position += 1
                continue
            split_begun = [False, False]
            for text, learned in recipe.parts(document):
                split_index = min(max(held_out_start - position, 0), len(text))
                for split, split_text in enumerate((text[:split_index], text[split_index:])):
                    if split_text:
                        yield split, not split_begun[split], learned, split_text
                        split_begun[split] = True
                position += len(text)
