"""What the documents of some files are, and where the held-out part begins.

With whole documents held out, the cut falls between two of them; else it falls on a character of their concatenation,
and a document may lie on both sides. A prompt and its answer are encoded apart, so that the prompt's ids are those it
will have when a model is asked to go on from it.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

from jaxscale.data import source
from jaxscale.errors import UserError


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How files become two sequences of documents.

    Args:
        separator: what stands between documents, and is dropped; `None` makes each file one document.
        beginning: text put before every document.
        ending: text put after every document.
        prompt_end: marker up to whose end the tokens of a document weigh 0, as does a document without one.
        held_out: the last part of the text that is not trained on, from 0 to 1.
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
        return [text] if self.separator is None else [part for part in text.split(self.separator) if part]

    def parts(self, document: str) -> Iterator[tuple[str, bool]]:
        """What is encoded by itself, and whether it is learned: a prompt gets the ids it has when it stands alone."""
        if self.prompt_end is None:
            if self.beginning:
                yield self.beginning, True
            yield document, True
            if self.ending:
                yield self.ending, True
            return
        at = document.find(self.prompt_end)
        answer = len(document) if at < 0 else at + len(self.prompt_end)
        yield from (
            (self.beginning, False),
            (document[:answer], False),
            (document[answer:], True),
            (self.ending, at >= 0),
        )


def survey(files: list[str], recipe: Recipe) -> dict[str, Any]:
    """Counts that decide where the held-out part begins; every file is checked before any is encoded."""
    documents = characters = size = marked = 0
    around = len(recipe.beginning) + len(recipe.ending)
    for file in files:
        content = source.read(file)
        found = recipe.documents(source.decode(content, file))
        size += len(content)
        documents += len(found)
        characters += sum(map(len, found)) + around * len(found)
        marked += sum(recipe.prompt_end in document for document in found) if recipe.prompt_end else len(found)
    if not marked:
        raise UserError(
            f"prompt_end {recipe.prompt_end!r} occurs in none of the {documents} documents: expected it in each; "
            "check its spelling and the separator"
            if documents
            else f"separator {recipe.separator!r} leaves no document: expected text between separators"
        )
    return {"files": len(files), "bytes": size, "characters": characters, "documents": documents, "marked": marked}


def texts(files: list[str], recipe: Recipe, cut: int) -> Iterator[tuple[int, bool, bool, str]]:
    """Every text to encode: its split, whether a document begins with it, whether it is learned; and the text."""
    at = 0
    for file in files:
        for document in recipe.documents(source.decode(source.read(file), file)):
            if recipe.whole:
                split, begins = int(at >= cut), True
                for text, learned in recipe.parts(document):
                    if text:
                        yield split, begins, learned, text
                        begins = False
                at += 1
                continue
            begun = [False, False]
            for text, learned in recipe.parts(document):
                here = min(max(cut - at, 0), len(text))
                for split, part in enumerate((text[:here], text[here:])):
                    if part:
                        yield split, not begun[split], learned, part
                        begun[split] = True
                at += len(text)
