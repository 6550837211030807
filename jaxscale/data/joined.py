"""Short texts encoded several at a time, a special token between them.

A tokenizer of the `tokenizers` library finds special tokens before anything else, and encodes what lies between them
each by itself: the ids of "a<|eos|>b" are those of "a", that of the token, and those of "b". One call for several short
texts saves what each costs beside its characters. A tokenizer that looks beyond its special tokens (one that marks the
beginning of the whole text alone) is found out on the first texts, and then gets each by itself.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np


class Piece(NamedTuple):
    """Texts that are encoded by one call.

    Args:
        text: of all of them, the marker between.
        parts: how many they are.
    """

    text: str
    parts: int


class Marker(NamedTuple):
    """A special token that stands between texts."""

    text: str
    id: int


def marker_of(model: Any) -> Marker | None:
    """A special token that takes nothing of what lies around it; `None` where a tokenizer has none."""
    for number, token in sorted(model.get_added_tokens_decoder().items()):
        if token.special and token.content and not (token.lstrip or token.rstrip or token.single_word):
            return Marker(token.content, number)
    return None


def pieces(texts: Iterable[str], marker: Marker | None, characters: int) -> Iterator[Piece]:
    """The texts, short ones joined up to so many characters; a text that spells the marker stays alone.

    Example:
        >>> list(pieces(["a", "b", "c|", "d", "long"], Marker("|", 0), 3))
        [Piece(text='a|b', parts=2), Piece(text='c|', parts=1), Piece(text='d', parts=1), Piece(text='long', parts=1)]
    """
    if marker is None:
        yield from (Piece(text, 1) for text in texts)
        return
    waiting: list[str] = []
    held = 0
    for text in texts:
        alone = marker.text in text
        if waiting and (alone or held + len(text) >= characters):
            yield Piece(marker.text.join(waiting), len(waiting))
            waiting, held = [], 0
        if alone:
            yield Piece(text, 1)
        else:
            waiting.append(text)
            held += len(text)
    if waiting:
        yield Piece(marker.text.join(waiting), len(waiting))


def taken_apart(encoded: Sequence[Sequence[int]], given: Sequence[Piece], marker: Marker | None) -> tuple[Any, Any]:
    """Ids of all texts, one after another, and how many each has.

    Args:
        encoded: ids of each piece.
        given: the pieces.
        marker: that stands between the texts of a piece.

    Example:
        >>> ids, lengths = taken_apart([[5, 6, 0, 7], [0]], [Piece("a|b", 2), Piece("|", 1)], Marker("|", 0))
        >>> ids.tolist(), lengths.tolist()
        ([5, 6, 7, 0], [2, 1, 1])
    """
    ids: list[np.ndarray] = []
    lengths: list[np.ndarray] = []
    for numbers, piece in zip(encoded, given, strict=True):
        array = np.array(numbers, np.int32)
        if piece.parts == 1 or marker is None:
            ids.append(array)
            lengths.append(np.array([len(array)]))
            continue
        between = array == marker.id
        at = np.flatnonzero(between)
        assert len(at) == piece.parts - 1, "a special token was not found where it was written"
        ids.append(array[~between])
        lengths.append(np.diff(at, prepend=-1, append=len(array)) - 1)
    return np.concatenate(ids), np.concatenate(lengths).astype(np.int64)
