"""The documents of some files, and the start of the held-out part.

With whole documents held out, the cut falls between two of them; else it falls on a character of their concatenation,
and a document may lie on both sides. A prompt and its answer are encoded separately, so that the prompt's ids are those
it will have when a model continues it.
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
        prompt_end: marker up to whose end the tokens of a document have weight 0, as does a document without one.
        held_out: share of the text, at its end, that is not trained on, from 0 to 1.
        whole: hold out whole documents; else the cut falls on a character, as in nanoGPT.
    """

    separator: str | None
    beginning: str
    ending: str
    prompt_end: str | None
    held_out: float
    whole: bool

    def documents(self, text: str) -> list[str]:
        """The documents of one file, those without a character left out."""
        return [text] if self.separator is None else [document for document in text.split(self.separator) if document]

    def parts(self, document: str) -> Iterator[tuple[str, bool]]:
        """The texts to encode separately, and whether each is learned: a prompt gets the ids that it has alone."""
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
    """Counts that determine the start of the held-out part; every file is checked before any is encoded."""
    documents = characters = size = with_prompt_end = 0
    added_characters = len(recipe.beginning) + len(recipe.ending)
    for file in files:
        content = source.read(file)
        file_documents = recipe.documents(source.decode(content, file))
        size += len(content)
        documents += len(file_documents)
        characters += sum(map(len, file_documents)) + added_characters * len(file_documents)
        with_prompt_end += (
            sum(recipe.prompt_end in document for document in file_documents)
            if recipe.prompt_end
            else len(file_documents)
        )
    if not with_prompt_end:
        raise UserError(
            f"prompt_end {recipe.prompt_end!r} occurs in none of the {documents} documents: expected it in each; "
            "check its spelling and the separator"
            if documents
            else f"separator {recipe.separator!r} leaves no document: expected text between separators"
        )
    return {
        "files": len(files),
        "bytes": size,
        "characters": characters,
        "documents": documents,
        "marked": with_prompt_end,
    }


def texts(files: list[str], recipe: DocumentRecipe, cut: int) -> Iterator[tuple[int, bool, bool, str]]:
    """Every text to encode: its split, whether a document begins with it, whether it is learned; and the text."""
    position = 0
    for file in files:
        for document in recipe.documents(source.decode(source.read(file), file)):
            if recipe.whole:
                split, begins = int(position >= cut), True
                for text, learned in recipe.parts(document):
                    if text:
                        yield split, begins, learned, text
                        begins = False
                position += 1
                continue
            split_begun = [False, False]
            for text, learned in recipe.parts(document):
                cut_in_text = min(max(cut - position, 0), len(text))
                for split, part in enumerate((text[:cut_in_text], text[cut_in_text:])):
                    if part:
                        yield split, not split_begun[split], learned, part
                        split_begun[split] = True
                position += len(text)
