"""Encode several short texts at a time, with a special token between them.

A tokenizer of the `tokenizers` library finds special tokens first, and encodes the texts between them separately. So
the ids of "a<|eos|>b" are the ids of "a", the id of "<|eos|>" and the ids of "b", and one call can encode several short
texts, which saves overhead. Some tokenizers look beyond their special tokens; for example, a tokenizer may mark only
the beginning of the whole text. A check of the first texts detects such a tokenizer, which then gets one text per call.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np


class JoinedTexts(NamedTuple):
    """Texts that are encoded by one call.

    Args:
        text: the texts, joined by the marker.
        text_count: number of the joined texts.
    """

    text: str
    text_count: int


class Marker(NamedTuple):
    """A special token that is put between texts.

    Args:
        text: spelling of the token.
        id: id of the token.
    """

    text: str
    id: int


def marker_of(model: Any) -> Marker | None:
    """Return a special token that absorbs none of the text around it; `None` if the tokenizer has no such token.

    Args:
        model: a `tokenizers.Tokenizer`.
    """
    for token_id, token in sorted(model.get_added_tokens_decoder().items()):
        if token.special and token.content and not (token.lstrip or token.rstrip or token.single_word):
            return Marker(token.content, token_id)
    return None


def join_texts(texts: Iterable[str], marker: Marker | None, max_characters: int) -> Iterator[JoinedTexts]:
    """Yield the texts in order, with short neighbors joined; a text that contains the marker is not joined.

    Args:
        texts: the texts to encode.
        marker: special token to put between joined texts; with `None`, no texts are joined.
        max_characters: exclusive upper limit of the number of characters in joined texts.

    Example:
        >>> [tuple(joined) for joined in join_texts(["a", "b", "c|", "d", "long"], Marker("|", 0), 3)]
        [('a|b', 2), ('c|', 1), ('d', 1), ('long', 1)]
    """
    if marker is None:
        yield from (JoinedTexts(text, 1) for text in texts)
        return
    pending_texts: list[str] = []
    pending_character_count = 0
    for text in texts:
        has_marker = marker.text in text
        if pending_texts and (has_marker or pending_character_count + len(text) >= max_characters):
            yield JoinedTexts(marker.text.join(pending_texts), len(pending_texts))
            pending_texts, pending_character_count = [], 0
        if has_marker:
            yield JoinedTexts(text, 1)
        else:
            pending_texts.append(text)
            pending_character_count += len(text)
    if pending_texts:
        yield JoinedTexts(marker.text.join(pending_texts), len(pending_texts))


def separate_ids(
    ids_by_call: Sequence[Sequence[int]],
    texts_by_call: Sequence[JoinedTexts],
    marker: Marker | None,
    encode: Callable[[str], np.ndarray],
) -> tuple[np.ndarray, np.ndarray]:
    """Separate the ids of joined texts into the ids of each text.

    Args:
        ids_by_call: for each call of the tokenizer, the ids that it returned.
        texts_by_call: for each call, the joined texts that it encoded.
        marker: special token between joined texts; `None` if no texts are joined.
        encode: function that returns the ids of one text. It is called if the ids of joined texts have the marker's id
            elsewhere as well, for example as the id of an unknown character.

    Returns:
        int32 ids of all texts, one text after another, without markers; and the int64 number of ids of each text.

    Example:
        >>> texts_by_call = [JoinedTexts("a|b", 2), JoinedTexts("|", 1)]
        >>> ids, lengths = separate_ids([[5, 6, 0, 7], [0]], texts_by_call, Marker("|", 0), np.array)
        >>> ids.tolist(), lengths.tolist()
        ([5, 6, 7, 0], [2, 1, 1])
    """
    id_arrays: list[np.ndarray] = []
    length_arrays: list[np.ndarray] = []
    for call_ids, joined_texts in zip(ids_by_call, texts_by_call, strict=True):
        call_id_array = np.array(call_ids, np.int32)
        if joined_texts.text_count == 1 or marker is None:
            id_arrays.append(call_id_array)
            length_arrays.append(np.array([len(call_id_array)]))
            continue
        is_marker = call_id_array == marker.id
        marker_positions = np.flatnonzero(is_marker)
        if len(marker_positions) != joined_texts.text_count - 1:
            ids_by_text = [encode(text) for text in joined_texts.text.split(marker.text)]
            id_arrays += ids_by_text
            length_arrays.append(np.array([len(ids) for ids in ids_by_text]))
            continue
        id_arrays.append(call_id_array[~is_marker])
        length_arrays.append(np.diff(marker_positions, prepend=-1, append=len(call_id_array)) - 1)
    return np.concatenate(id_arrays), np.concatenate(length_arrays).astype(np.int64)
