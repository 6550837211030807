"""Text to token ids and back: bytes, characters, or any Hugging Face `tokenizers` JSON file (BPE, WordPiece,
Unigram).

A tokenizer is a value: `to_json` and `from_json` store it with a run, to continue or sample from it. A tokenizer never
adds, cuts or pads tokens: a file's truncation, padding and template are switched off.
"""

import concurrent.futures
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
from jaxscale.data.joined import JoinedTexts, Marker, join_texts, marker_of, separate
from jaxscale.errors import UserError, unknown

KINDS = ("byte", "char")
"""The tokenizers that need no file."""

_CHUNK = 1024
"""Characters of a long text per call of a subword tokenizer; longer ones cost more per character."""
_GROUP = 2_000_000
"""Characters encoded between two updates of the progress bar."""
_CUT = re.compile(r"\S\n(?=\S)")
"""A long text is cut after a single newline between two visible characters, where usual pre-tokenizers cut too."""
_CHECKED = 16
"""Number of cuts, and of texts joined by a marker, whose ids are checked; later ones are not checked."""


class Encoded(NamedTuple):
    """Ids of some texts, or of parts of them; the parts of a text follow one another.

    Args:
        ids: int32, ids of all parts, one part after another.
        lengths: [parts] int64, number of ids of each part.
        texts: [parts] int64, index of the text of each part.
        characters: number of characters in all parts.
    """

    ids: np.ndarray
    lengths: np.ndarray
    texts: np.ndarray
    characters: int


@runtime_checkable
class Tokenizer(Protocol):
    """The interface of a tokenizer to the data and the trainer."""

    kind: ClassVar[str]
    """The name of its class: "byte", "char" or "subword"."""

    @property
    def size(self) -> int:
        """Size of the vocabulary that a model needs: every id is less than this number."""
        ...

    def encode(self, text: str) -> np.ndarray:
        """Ids of a text, int32."""
        ...

    def decode(self, ids: Iterable[SupportsInt]) -> str:
        """The text of ids."""
        ...

    def encode_all(self, texts: Iterable[str]) -> Iterator[Encoded]:
        """Yield the ids of many texts, in order, encoded on all cores if that is faster."""
        ...

    def to_json(self) -> str:
        """Text from which `from_json` makes an equal tokenizer."""
        ...


def fingerprint(tokenizer: Tokenizer) -> str:
    """Return the SHA-256 of everything that determines the ids of a tokenizer, in hexadecimal."""
    return hashlib.sha256(tokenizer.to_json().encode()).hexdigest()


@dataclasses.dataclass(frozen=True)
class Bytes:
    """UTF-8 bytes as ids 0 to 255: encodes every text, needs no file.

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
        """Ids of a text, int32."""
        return np.frombuffer(text.encode(), np.uint8).astype(np.int32)

    def decode(self, ids: Iterable[SupportsInt]) -> str:
        """The text of ids; bytes that are not UTF-8, such as half a character, become U+FFFD."""
        return bytes(int(i) for i in ids).decode("utf-8", errors="replace")

    def encode_all(self, texts: Iterable[str]) -> Iterator[Encoded]:
        """Yield the ids of many texts, in order."""
        return _encode_each(self, texts)

    def to_json(self) -> str:
        """Text from which `from_json` makes an equal tokenizer."""
        return json.dumps({"kind": self.kind})


@dataclasses.dataclass(frozen=True)
class Characters:
    """One id per character, in the order of their code points, as in nanoGPT.

    Args:
        alphabet: the known characters, sorted, each once.

    Example:
        >>> Characters.of(["abba", "c"]).encode("cab").tolist()
        [2, 0, 1]
    """

    alphabet: str
    kind: ClassVar[str] = "char"

    def __post_init__(self) -> None:
        if not self.alphabet or list(self.alphabet) != sorted(set(self.alphabet)):
            raise UserError(f"alphabet: got {self.alphabet!r}, expected sorted characters, each once, at least one")

    @classmethod
    def of(cls, texts: Iterable[str]) -> "Characters":
        """The tokenizer whose alphabet is the characters of some texts."""
        return cls("".join(sorted(set().union(*texts))))

    @property
    def size(self) -> int:
        """Number of characters of the alphabet."""
        return len(self.alphabet)

    @functools.cached_property
    def _ids(self) -> np.ndarray:
        """The id of every code point up to one beyond the alphabet; -1 for characters that the alphabet lacks."""
        code_points = np.frombuffer(self.alphabet.encode("utf-32-le"), np.uint32)
        ids = np.full(int(code_points[-1]) + 2, -1, np.int32)  # the last entry is for all larger code points
        ids[code_points] = np.arange(len(code_points), dtype=np.int32)
        return ids

    def encode(self, text: str) -> np.ndarray:
        """Ids of a text, int32.

        Raises:
            UserError: a character that the alphabet lacks.
        """
        code_points = np.frombuffer(text.encode("utf-32-le"), np.uint32)
        ids = self._ids[np.minimum(code_points, len(self._ids) - 1)]
        if len(ids) and ids.min() < 0:
            unknown_characters = sorted({text[i] for i in np.flatnonzero(ids < 0).tolist()})
            raise UserError(
                f"the text contains {', '.join(map(repr, unknown_characters[:5]))}, unknown to this alphabet of "
                f"{self.size} characters: remove them from the text, or train with a byte tokenizer, which has a token "
                "for every character"
            )
        return ids

    def decode(self, ids: Iterable[SupportsInt]) -> str:
        """The text of ids; an id beyond the alphabet (a padded vocabulary) becomes U+FFFD."""
        return "".join(self.alphabet[i] if 0 <= i < self.size else "\ufffd" for i in map(int, ids))

    def encode_all(self, texts: Iterable[str]) -> Iterator[Encoded]:
        """Yield the ids of many texts, in order."""
        return _encode_each(self, texts)

    def to_json(self) -> str:
        """Text from which `from_json` makes an equal tokenizer."""
        return json.dumps({"kind": self.kind, "alphabet": self.alphabet})


@dataclasses.dataclass(frozen=True)
class Subwords:
    """A tokenizer of the Hugging Face `tokenizers` library.

    Special tokens are recognised where a text spells them ("<|eos|>"), and never added.

    Args:
        definition: content of a `tokenizer.json`.
    """

    definition: str
    kind: ClassVar[str] = "subword"

    @functools.cached_property
    def _model(self) -> Any:
        """The library's tokenizer, without truncation and padding."""
        import tokenizers

        try:
            model = tokenizers.Tokenizer.from_str(self.definition)
        except Exception as error:  # the library raises bare Exception
            raise UserError(f"not a tokenizer.json of the tokenizers library ({error}): give such a file") from error
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
        """Ids of a text, int32."""
        return np.array(self._model.encode(text, add_special_tokens=False).ids, np.int32)

    def decode(self, ids: Iterable[SupportsInt]) -> str:
        """The text of ids, special tokens spelled out; ids beyond the vocabulary are left out."""
        return self._model.decode([int(i) for i in ids], skip_special_tokens=False)

    def encode_all(self, texts: Iterable[str]) -> Iterator[Encoded]:
        """Yield the ids of many texts, in order, encoded on all cores; a text may be cut if that keeps its ids."""
        # the next group is encoded while the ids of this one are extracted, which only one core can do
        is_marker_checked, marker = False, None
        with concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="encode") as executor:
            pending_groups: list[tuple[list[tuple[int, str]], list[JoinedTexts], concurrent.futures.Future[Any]]] = []
            for group in itertools.chain(_group_parts(self._parts(texts)), [None]):
                if group:
                    _, parts = zip(*group, strict=True)
                    if not is_marker_checked:
                        is_marker_checked, marker = True, self._marker(parts[:_CHECKED])
                    calls = list(join_texts(parts, marker, _CHUNK))
                    # the fast variant omits the offsets of tokens in the text, which are not needed
                    encode = self._model.encode_batch_fast
                    encodings = executor.submit(encode, [call.text for call in calls], add_special_tokens=False)
                    pending_groups.append((group, calls, encodings))
                if pending_groups and (len(pending_groups) == 2 or not group):
                    finished_group, calls, encodings = pending_groups.pop(0)
                    ids_by_call = [encoding.ids for encoding in encodings.result()]
                    yield _make_encoded(finished_group, *separate(ids_by_call, calls, marker))

    def _marker(self, texts: Sequence[str]) -> Marker | None:
        """Return a special token that separates these texts without changing their ids; `None` if there is none."""
        marker = marker_of(self._model)
        if marker is None or any(marker.text in text for text in texts):
            return None
        joint_ids = self.encode(marker.text.join(texts))
        separate_ids = [ids for text in texts for ids in (self.encode(text), [marker.id])]
        return marker if np.array_equal(joint_ids, np.concatenate(separate_ids)[:-1]) else None

    def _parts(self, texts: Iterable[str]) -> Iterator[tuple[int, str]]:
        """Yield parts of texts, each after its text's index. Long texts are cut until a checked cut changes the ids."""
        checks_left: float = _CHECKED  # minus infinity once a checked cut has changed the ids
        for text_index, text in enumerate(texts):
            if len(text) <= 2 * _CHUNK:
                yield text_index, text
                continue
            start = 0
            while len(text) - start > 2 * _CHUNK and (cut := _CUT.search(text, start + _CHUNK)):
                if checks_left > 0:
                    checks_left = checks_left - 1 if self._cut_keeps_ids(text, cut.end()) else float("-inf")
                if checks_left < 0:
                    break
                yield text_index, text[start : cut.end()]
                start = cut.end()
            yield text_index, text[start:]

    def _cut_keeps_ids(self, text: str, cut: int) -> bool:
        """Whether the 256 characters on each side of a cut have the same ids when they are encoded separately."""
        text_before, text_after = text[max(cut - 256, 0) : cut], text[cut : cut + 256]
        return np.array_equal(
            self.encode(text_before + text_after), np.concatenate([self.encode(text_before), self.encode(text_after)])
        )

    def to_json(self) -> str:
        """Text from which `from_json` makes an equal tokenizer."""
        return json.dumps({"kind": self.kind, "definition": self.definition})


def _make_encoded(group: list[tuple[int, str]], ids: np.ndarray, lengths: np.ndarray) -> Encoded:
    """Make the `Encoded` of a group.

    Args:
        group: pairs (index of the text, part).
        ids: ids of all parts, one part after another.
        lengths: number of ids of each part.
    """
    text_indices, parts = zip(*group, strict=True)
    return Encoded(ids, lengths, np.array(text_indices, np.int64), sum(map(len, parts)))


def _encode_each(tokenizer: "Bytes | Characters", texts: Iterable[str]) -> Iterator[Encoded]:
    """Yield the ids of many texts, encoded one by one on one core."""
    for group in _group_parts(enumerate(texts)):
        ids_by_text = [tokenizer.encode(text) for _, text in group]
        lengths = np.array([len(text_ids) for text_ids in ids_by_text], np.int64)
        text_indices = np.array([index for index, _ in group], np.int64)
        yield Encoded(np.concatenate(ids_by_text), lengths, text_indices, sum(len(text) for _, text in group))


def _group_parts(parts: Iterable[tuple[int, str]]) -> Iterator[list[tuple[int, str]]]:
    """Yield groups of (index of the text, part) pairs with at least `_GROUP` characters; the last may have less."""
    group: list[tuple[int, str]] = []
    characters = 0
    for index, part in parts:
        group.append((index, part))
        characters += len(part)
        if characters >= _GROUP:
            yield group
            group, characters = [], 0
    if group:
        yield group


def from_json(text: str) -> Tokenizer:
    """Return the tokenizer that `to_json` stored as `text`.

    Example:
        >>> from_json(Characters("abc").to_json())
        Characters(alphabet='abc')
    """
    fields = json.loads(text)
    class_of_kind = {"byte": Bytes, "char": Characters, "subword": Subwords}
    kind = fields.pop("kind")
    if kind not in class_of_kind:
        raise unknown("kind of tokenizer", kind, class_of_kind)
    return class_of_kind[kind](**fields)


def load(path: str) -> Subwords:
    """Read the tokenizer of a `tokenizer.json` file.

    Raises:
        UserError: the file is missing, or holds no tokenizer.
    """
    (name,) = source.find((path,))
    tokenizer = Subwords(source.decode(source.read(name), name))
    try:
        size = tokenizer.size
    except UserError as error:
        raise UserError(f"{path}: {error}") from error
    if size == 0:
        raise UserError(f"{path}: the tokenizer has no token; expected a trained one")
    return tokenizer
