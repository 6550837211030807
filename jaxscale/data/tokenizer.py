"""Text to token ids and back: bytes, characters, or any Hugging Face `tokenizers` file (BPE, WordPiece, Unigram).

A run stores its tokenizer with `to_json`; a continued run, and a program that samples from the model, restore it with
`from_json`. A tokenizer never adds, truncates or pads tokens; a file's settings for doing so are ignored.
"""

import concurrent.futures
import contextlib
import dataclasses
import functools
import hashlib
import itertools
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol, SupportsInt, runtime_checkable

import numpy as np

from jaxscale.data import source
from jaxscale.data.documents import has_half_characters
from jaxscale.data.joined import JoinedTexts, Marker, join_texts, marker_of, separate_ids
from jaxscale.errors import UserError, unknown
from jaxscale.values.limits import MAX_INT32, check_at_most
from jaxscale.values.read_files import parse_json, read_bytes

KINDS = ("byte", "char")
"""The tokenizers that need no file."""

_CHUNK_CHARACTERS = 1024
"""Number of characters of a long text per call of a subword tokenizer; longer calls take more time per character."""
_GROUP_CHARACTERS = 2_000_000
"""Number of characters encoded between two updates of the progress bar."""
_CUT = re.compile(r"\S\n(?=\S)")
"""A long text is cut after a single newline between visible characters, where common pre-tokenizers cut, too."""
_CHECK_COUNT = 16
"""Number of cuts, and of joined texts, that are checked for unchanged ids; later cuts and texts are not checked."""


class Encoded(NamedTuple):
    """The ids of several texts, or of parts of texts; the parts of a text follow one another.

    Args:
        ids: int32, ids of all parts, one part after another.
        lengths: [parts] int64, number of ids of each part.
        text_indices: [parts] int64, index of the text to which each part belongs.
        character_count: number of characters in all parts.
    """

    ids: np.ndarray
    lengths: np.ndarray
    text_indices: np.ndarray
    character_count: int


@runtime_checkable
class Tokenizer(Protocol):
    """The interface of a tokenizer that the data and the trainer use."""

    kind: ClassVar[str]
    """The kind of tokenizer, as `to_json` stores it: "byte", "char" or "subword"."""

    @property
    def size(self) -> int:
        """Size of the vocabulary that a model needs: every id is less than this number."""
        ...

    def encode(self, text: str) -> np.ndarray:
        """Return the int32 ids of a text."""
        ...

    def decode(self, ids: Iterable[SupportsInt]) -> str:
        """Return the text that these ids spell."""
        ...

    def encode_all(self, texts: Iterable[str]) -> Iterator[Encoded]:
        """Yield the ids of many texts, in order, encoded on all cores if that is faster."""
        ...

    def to_json(self) -> str:
        """Return a text from which `from_json` restores an equal tokenizer."""
        ...


def fingerprint(tokenizer: Tokenizer) -> str:
    """Return the SHA-256 of everything that determines the ids of a tokenizer, in hexadecimal."""
    return hashlib.sha256(tokenizer.to_json().encode()).hexdigest()


@dataclasses.dataclass(frozen=True)
class Bytes:
    """UTF-8 bytes as ids from 0 to 255; this tokenizer encodes every text and needs no file.

    Example:
        >>> Bytes().encode("Où").tolist()
        [79, 195, 185]
        >>> Bytes().decode([79, 195, 185])
        'Où'
    """

    kind: ClassVar[str] = "byte"

    @property
    def size(self) -> int:
        """Size of the vocabulary, 256."""
        return 256

    def encode(self, text: str) -> np.ndarray:
        """Return the int32 ids of a text.

        Raises:
            UserError: the text contains half a surrogate pair, which UTF-8 cannot express.
        """
        if has_half_characters(text):
            raise UserError("the text contains half a surrogate pair, such as \\ud83d: repair or remove that character")
        return np.frombuffer(text.encode(), np.uint8).astype(np.int32)

    def decode(self, ids: Iterable[SupportsInt]) -> str:
        """Return the text that these ids spell; bytes that are not UTF-8, such as half a character, become U+FFFD."""
        return bytes(int(i) for i in ids).decode("utf-8", errors="replace")

    def encode_all(self, texts: Iterable[str]) -> Iterator[Encoded]:
        """Yield the ids of many texts, in order."""
        return _encode_each(self, texts)

    def to_json(self) -> str:
        """Return a text from which `from_json` restores an equal tokenizer."""
        return json.dumps({"kind": self.kind})


@dataclasses.dataclass(frozen=True)
class Characters:
    """One id per character, in the order of code points, as in nanoGPT.

    Args:
        alphabet: the known characters, each once, sorted.

    Example:
        >>> Characters.of(["abba", "c"]).encode("cab").tolist()
        [2, 0, 1]
    """

    alphabet: str
    kind: ClassVar[str] = "char"

    def __post_init__(self) -> None:
        if not self.alphabet or list(self.alphabet) != sorted(set(self.alphabet)) or has_half_characters(self.alphabet):
            raise UserError(f"alphabet: got {self.alphabet!r}, expected one or more sorted characters, each once")

    @classmethod
    def of(cls, texts: Iterable[str]) -> "Characters":
        """Return the tokenizer with the alphabet of all characters in these texts."""
        return cls("".join(sorted(set().union(*texts))))

    @property
    def size(self) -> int:
        """Number of characters in the alphabet."""
        return len(self.alphabet)

    @functools.cached_property
    def _ids_by_code_point(self) -> np.ndarray:
        """Ids by code point, up to the alphabet's last code point plus 1; -1 for characters that the alphabet lacks."""
        code_points = np.frombuffer(self.alphabet.encode("utf-32-le"), np.uint32)
        ids = np.full(int(code_points[-1]) + 2, -1, np.int32)  # the last entry is for all larger code points
        ids[code_points] = np.arange(len(code_points), dtype=np.int32)
        return ids

    def encode(self, text: str) -> np.ndarray:
        """Return the int32 ids of a text.

        Raises:
            UserError: the text contains a character that the alphabet lacks.
        """
        code_points = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
        ids = self._ids_by_code_point[np.minimum(code_points, len(self._ids_by_code_point) - 1)]
        if len(ids) and ids.min() < 0:
            unknown_characters = sorted({text[index] for index in np.flatnonzero(ids < 0).tolist()})
            raise UserError(
                f"the text contains {', '.join(map(repr, unknown_characters[:5]))}, unknown to this alphabet of "
                f"{self.size} characters: remove them from the text, or train with a byte tokenizer, which has a token "
                "for every character"
            )
        return ids

    def decode(self, ids: Iterable[SupportsInt]) -> str:
        """Return the text that these ids spell; an id beyond the alphabet (of a padded vocabulary) becomes U+FFFD."""
        return "".join(self.alphabet[i] if 0 <= i < self.size else "\ufffd" for i in map(int, ids))

    def encode_all(self, texts: Iterable[str]) -> Iterator[Encoded]:
        """Yield the ids of many texts, in order."""
        return _encode_each(self, texts)

    def to_json(self) -> str:
        """Return a text from which `from_json` restores an equal tokenizer."""
        return json.dumps({"kind": self.kind, "alphabet": self.alphabet})


@dataclasses.dataclass(frozen=True)
class Subwords:
    """A tokenizer of the Hugging Face `tokenizers` library.

    Special tokens are recognized where the text spells them ("<|eos|>"), and are never added.

    Args:
        definition: content of a `tokenizer.json`.
    """

    definition: str
    kind: ClassVar[str] = "subword"

    @functools.cached_property
    def _model(self) -> Any:
        """The library's tokenizer, without truncation or padding."""
        import tokenizers

        with _explain_errors("not a tokenizer.json of the tokenizers library", "give such a file"):
            model = tokenizers.Tokenizer.from_str(self.definition)
        model.no_truncation()
        model.no_padding()
        return model

    @functools.cached_property
    def _size(self) -> int:
        return max(self._model.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    @property
    def size(self) -> int:
        """One more than the largest id."""
        return self._size

    def encode(self, text: str) -> np.ndarray:
        """Return the int32 ids of a text.

        Raises:
            UserError: the tokenizer cannot encode the text; for example, its token for unknown characters is missing.
        """
        model = self._model
        with _explain_errors("the tokenizer cannot encode the text", "repair its tokenizer.json"):
            return np.array(model.encode(text, add_special_tokens=False).ids, np.int32)

    def encode_beginning(self, text: str) -> np.ndarray:
        """Return the int32 ids of a text that begins a document, with the special tokens that the file puts around it.

        Models of some families, such as Gemma, need the token at the beginning to write sensible text.
        """
        model = self._model
        with _explain_errors("the tokenizer cannot encode the text", "repair its tokenizer.json"):
            return np.array(model.encode(text, add_special_tokens=True).ids, np.int32)

    def encode_with_spans(self, texts: Sequence[str]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return, for each text, its int32 ids and the span of each token in characters, int32 [tokens, 2]."""
        with _explain_errors("the tokenizer cannot encode the text", "repair its tokenizer.json"):
            encodings = self._model.encode_batch(list(texts), add_special_tokens=False)
        return [
            (np.array(encoding.ids, np.int32), np.array(encoding.offsets, np.int32).reshape(-1, 2))
            for encoding in encodings
        ]

    @functools.cached_property
    def special_ids(self) -> frozenset[int]:
        """The ids of the special tokens."""
        with _explain_errors("not a tokenizer.json of the tokenizers library", "give such a file"):
            return frozenset(
                token_id for token_id, token in self._model.get_added_tokens_decoder().items() if token.special
            )

    def decode(self, ids: Iterable[SupportsInt]) -> str:
        """Return the text that these ids spell, including special tokens; ids beyond the vocabulary are left out."""
        model = self._model
        with _explain_errors("the tokenizer cannot decode the ids", "repair its tokenizer.json"):
            return model.decode([int(i) for i in ids], skip_special_tokens=False)

    def encode_all(self, texts: Iterable[str]) -> Iterator[Encoded]:
        """Yield the ids of many texts, in order, encoded on all cores; cuts in long texts leave the ids unchanged."""
        # while the ids of one group are extracted, which only one core can do, the next group is encoded
        is_marker_checked, marker = False, None
        with concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="encode") as executor:
            pending_encodings: list[
                tuple[list[tuple[int, str]], list[JoinedTexts], concurrent.futures.Future[Any]]
            ] = []
            for group in itertools.chain(_group_parts(self._indexed_parts(texts)), [None]):
                if group:
                    _, parts = zip(*group, strict=True)
                    if not is_marker_checked:
                        is_marker_checked, marker = True, self._safe_marker(parts[:_CHECK_COUNT])
                    texts_by_call = list(join_texts(parts, marker, _CHUNK_CHARACTERS))
                    # the fast variant omits the offsets of tokens in the text, which are not needed
                    encode_batch = self._model.encode_batch_fast
                    future = executor.submit(
                        encode_batch, [joined_texts.text for joined_texts in texts_by_call], add_special_tokens=False
                    )
                    pending_encodings.append((group, texts_by_call, future))
                if pending_encodings and (len(pending_encodings) == 2 or not group):
                    earlier_group, earlier_texts_by_call, earlier_future = pending_encodings.pop(0)
                    with _explain_errors("the tokenizer cannot encode the text", "repair its tokenizer.json"):
                        ids_by_call = [encoding.ids for encoding in earlier_future.result()]
                    yield _make_encoded(
                        earlier_group, *separate_ids(ids_by_call, earlier_texts_by_call, marker, self.encode)
                    )

    def _safe_marker(self, texts: Sequence[str]) -> Marker | None:
        """Return a special token that separates these texts without changing their ids; `None` if there is none."""
        marker = marker_of(self._model)
        if marker is None or any(marker.text in text for text in texts):
            return None
        joined_ids = self.encode(marker.text.join(texts))
        expected_id_lists = [ids for text in texts for ids in (self.encode(text), [marker.id])]
        return marker if np.array_equal(joined_ids, np.concatenate(expected_id_lists)[:-1]) else None

    def _indexed_parts(self, texts: Iterable[str]) -> Iterator[tuple[int, str]]:
        """Yield pairs (index of the text, part). Long texts are cut into parts until a checked cut changes the ids."""
        checks_left: float = _CHECK_COUNT  # minus infinity once a checked cut has changed the ids
        for text_index, text in enumerate(texts):
            if len(text) <= 2 * _CHUNK_CHARACTERS:
                yield text_index, text
                continue
            start = 0
            while len(text) - start > 2 * _CHUNK_CHARACTERS and (
                cut_match := _CUT.search(text, start + _CHUNK_CHARACTERS)
            ):
                if checks_left > 0:
                    checks_left = checks_left - 1 if self._is_cut_safe(text, cut_match.end()) else float("-inf")
                if checks_left < 0:
                    break
                yield text_index, text[start : cut_match.end()]
                start = cut_match.end()
            yield text_index, text[start:]

    def _is_cut_safe(self, text: str, cut_index: int) -> bool:
        """Return whether the 256 characters on each side of a cut have the same ids when encoded separately."""
        text_before, text_after = text[max(cut_index - 256, 0) : cut_index], text[cut_index : cut_index + 256]
        return np.array_equal(
            self.encode(text_before + text_after), np.concatenate([self.encode(text_before), self.encode(text_after)])
        )

    def to_json(self) -> str:
        """Return a text from which `from_json` restores an equal tokenizer."""
        return json.dumps({"kind": self.kind, "definition": self.definition})


@contextlib.contextmanager
def _explain_errors(fault: str, advice: str) -> Iterator[None]:
    """Turn an error of the tokenizers library into a UserError.

    The library raises plain `Exception`, and a panic in its Rust code becomes a `BaseException`.
    """
    try:
        yield
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt | SystemExit | MemoryError | GeneratorExit):
            raise
        raise UserError(f"{fault} ({error}): {advice}") from error


def _make_encoded(indexed_parts: list[tuple[int, str]], ids: np.ndarray, lengths: np.ndarray) -> Encoded:
    """Return the `Encoded` of parts that were encoded together.

    Args:
        indexed_parts: pairs (index of the text, part).
        ids: int32 ids of all parts, one part after another.
        lengths: [parts] int64, number of ids of each part.
    """
    text_indices, parts = zip(*indexed_parts, strict=True)
    return Encoded(ids, lengths, np.array(text_indices, np.int64), sum(map(len, parts)))


def _encode_each(tokenizer: "Bytes | Characters", texts: Iterable[str]) -> Iterator[Encoded]:
    """Yield the ids of many texts, in order, encoded one by one on one core."""
    for indexed_texts in _group_parts(enumerate(texts)):
        ids_by_text = [tokenizer.encode(text) for _, text in indexed_texts]
        lengths = np.array([len(text_ids) for text_ids in ids_by_text], np.int64)
        text_indices = np.array([index for index, _ in indexed_texts], np.int64)
        yield Encoded(np.concatenate(ids_by_text), lengths, text_indices, sum(len(text) for _, text in indexed_texts))


def _group_parts(indexed_parts: Iterable[tuple[int, str]]) -> Iterator[list[tuple[int, str]]]:
    """Group pairs (index of the text, part); all groups but the last have `_GROUP_CHARACTERS` characters or more."""
    group: list[tuple[int, str]] = []
    character_count = 0
    for text_index, part in indexed_parts:
        group.append((text_index, part))
        character_count += len(part)
        if character_count >= _GROUP_CHARACTERS:
            yield group
            group, character_count = [], 0
    if group:
        yield group


def from_json(text: str) -> Tokenizer:
    """Return the tokenizer that `to_json` stored as `text`.

    Example:
        >>> from_json(Characters("abc").to_json())
        Characters(alphabet='abc')
    """
    fields = parse_json(text, "the text")
    if not isinstance(fields, dict) or not all(isinstance(field, str) for field in fields.values()):
        raise UserError("expected a JSON object of texts, with a kind")
    class_by_kind = {"byte": Bytes, "char": Characters, "subword": Subwords}
    kind = fields.pop("kind", "")
    if kind not in class_by_kind:
        raise unknown("kind of tokenizer", kind, class_by_kind)
    return class_by_kind[kind](**fields)


def load(path: str) -> Subwords:
    """Read the tokenizer of a `tokenizer.json` file.

    Raises:
        UserError: the file is missing or too large, or does not hold a tokenizer.
    """
    (file,) = source.find_files((path,))
    tokenizer = Subwords(source.decode(read_bytes(source.path_object(file)), file))
    try:
        vocab_size = tokenizer.size
    except UserError as error:
        raise UserError(f"{path}: {error}") from error
    check_at_most(f"{path}: size of the vocabulary", vocab_size, MAX_INT32)
    if vocab_size == 0:
        raise UserError(f"{path}: the tokenizer has no tokens; expected a trained tokenizer")
    return tokenizer
