"""TextStream: the text of a row while its tokens are drawn, in pieces that later tokens cannot change."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxscale.errors import UserError

_INCOMPLETE = "\ufffd"
"""The character to which tokenizers decode the bytes of an incomplete character."""


class TextStream:
    """Decodes ids into text as they are drawn; the text ends before the first stop text.

    A piece is held back while it may be the beginning of a character or of a stop text. All pieces joined are the text
    of all ids, cut before the first stop text.

    Args:
        tokenizer: decodes the ids.
        stop: texts that end the text.

    Example:
        >>> from jaxscale.data.tokenizer import Bytes
        >>> stream = TextStream(Bytes(), ("END",))
        >>> [stream.push(list(part)) for part in (b"a \\xc3", b"\\xa9E", b"Nd EN", b"D b")], stream.is_stopped
        (['a ', 'é', 'ENd ', ''], True)
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str] = ()) -> None:
        self._tokenizer, self._stop_texts = tokenizer, tuple(stop)
        self._ids: list[int] = []
        self.text = ""
        self.is_stopped = False

    def push(self, ids: Sequence[int] | np.ndarray, *, is_last: bool = False) -> str:
        """Append ids, and return the new text that later ids cannot change. With `is_last`, return all text left."""
        if self.is_stopped:
            return ""
        self._ids += [int(token_id) for token_id in ids]
        whole_text = self._tokenizer.decode(self._ids)
        stop_index = min((index for index in map(whole_text.find, self._stop_texts) if index >= 0), default=-1)
        if stop_index >= 0:
            self.is_stopped = True
            certain_text = whole_text[:stop_index]
        else:
            certain_text = whole_text if is_last else self._certain_text(whole_text)
        piece = certain_text[len(self.text) :]
        self.text += piece
        return piece

    def _certain_text(self, text: str) -> str:
        """Return the text without an ending that may be an incomplete character or the beginning of a stop text."""
        text = text.rstrip(_INCOMPLETE)
        overlap_lengths = (
            length
            for stop_text in self._stop_texts
            for length in range(1, min(len(stop_text), len(text) + 1))
            if text.endswith(stop_text[:length])
        )
        return text[: len(text) - max(overlap_lengths, default=0)]


def check_stop_texts(tokenizer: Any, stop: Sequence[str]) -> None:
    """Raise UserError if there is a stop text that the tokenizer cannot produce."""
    for stop_text in stop:
        try:
            decoded_text = tokenizer.decode(tokenizer.encode(stop_text))
        except UserError as error:
            raise UserError(f"stop: {stop_text!r}: {error}") from None
        if stop_text in decoded_text:
            continue
        try:  # a tokenizer of words may drop the space before the first word
            decoded_text = tokenizer.decode(tokenizer.encode(f"a{stop_text}a"))
        except UserError:
            decoded_text = ""
        if stop_text not in decoded_text:
            raise UserError(
                f"stop: got {stop_text!r}, expected a text that this tokenizer yields; it reads it as {decoded_text!r}"
            )
