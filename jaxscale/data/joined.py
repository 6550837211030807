"""Encode several short texts at a time, with a special token between them.

A tokenizer of the `tokenizers` library finds special tokens first, and encodes the texts between them separately: the
ids of "a<|eos|>b" are those of "a", that of the token, and those of "b". One call for several short texts saves the
overhead per call. A tokenizer that looks beyond its special tokens (one that marks only the beginning of the whole
text) is detected on the first texts, and then encodes each text separately.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np


class JoinedTexts(NamedTuple):
    """Texts that are encoded by one call.

    Args:
        text: texts joined by the marker.
        text_count: number of these texts.
    """

    text: str
    text_count: int


class Marker(NamedTuple):
    """A special token between texts: its spelling and its id."""

    text: str
    id: int


def marker_of(model: Any) -> Marker | None:
    """Return a special token that absorbs no text around it; `None` if a model of the library has none."""
    for token_id, token in sorted(model.get_added_tokens_decoder().items()):
        if token.special and token.content and not (token.lstrip or token.rstrip or token.single_word):
            return Marker(token.content, token_id)
    return None


def join_texts(texts: Iterable[str], marker: Marker | None, characters: int) -> Iterator[JoinedTexts]:
    """Yield the texts, of which short ones are joined up to `characters`; a text with the marker in it stays alone.

    Example:
        >>> [tuple(piece) for piece in join_texts(["a", "b", "c|", "d", "long"], Marker("|", 0), 3)]
        [('a|b', 2), ('c|', 1), ('d', 1), ('long', 1)]
    """
    if marker is None:
        yield from (JoinedTexts(text, 1) for text in texts)
        return
    pending_texts: list[str] = []
    pending_characters = 0
    for text in texts:
        has_marker = marker.text in text
        if pending_texts and (has_marker or pending_characters + len(text) >= characters):
            yield JoinedTexts(marker.text.join(pending_texts), len(pending_texts))
            pending_texts, pending_characters = [], 0
        if has_marker:
            yield JoinedTexts(text, 1)
        else:
            pending_texts.append(text)
            pending_characters += len(text)
    if pending_texts:
        yield JoinedTexts(marker.text.join(pending_texts), len(pending_texts))


def separate(call_ids: Sequence[Sequence[int]], calls: Sequence[JoinedTexts], marker: Marker | None) -> tuple[Any, Any]:
    """Return the ids of all texts, one after another, and the number of ids of each text.

    Args:
        call_ids: ids that each call returned.
        calls: the joined texts of each call.
        marker: special token between texts; `None` if none are joined.

    Example:
        >>> calls = [JoinedTexts("a|b", 2), JoinedTexts("|", 1)]
        >>> ids, lengths = separate([[5, 6, 0, 7], [0]], calls, Marker("|", 0))
        >>> ids.tolist(), lengths.tolist()
        ([5, 6, 7, 0], [2, 1, 1])
    """
    ids: list[np.ndarray] = []
    lengths: list[np.ndarray] = []
    for ids_of_call, joined_texts in zip(call_ids, calls, strict=True):
        id_array = np.array(ids_of_call, np.int32)
        if joined_texts.text_count == 1 or marker is None:
            ids.append(id_array)
            lengths.append(np.array([len(id_array)]))
            continue
        is_marker = id_array == marker.id
        marker_index = np.flatnonzero(is_marker)
        assert len(marker_index) == joined_texts.text_count - 1, "a special token was not found where it was written"
        ids.append(id_array[~is_marker])
        lengths.append(np.diff(marker_index, prepend=-1, append=len(id_array)) - 1)
    return np.concatenate(ids), np.concatenate(lengths).astype(np.int64)
