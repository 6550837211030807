"""Chats in JSONL files, rendered by a template, as documents in which the answers alone are learned.

An answer is the difference that it makes to the template's output: what the messages up to it render, less what the
messages before it render with the prompt for an answer. The ids are those of the whole rendered text, as
`apply_chat_template` of transformers returns them; a token is learned if it has a character of an answer.

A template may render an answer differently once the chat goes on, such as without its reasoning. The model never saw
the later form as its own, so the chat is cut into documents there: each ends with an answer in the form in which it is
given, after earlier turns in the form in which they are seen. Messages after the last answer are left out.
"""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from jaxscale.data import source
from jaxscale.data.cache import LabeledParts
from jaxscale.data.chat.chat_template import ChatTemplate, Failure, Job, Renderer
from jaxscale.data.documents import has_half_characters
from jaxscale.data.tokenizer import Encoded, Subwords
from jaxscale.errors import UserError, near_miss
from jaxscale.values.read_files import parse_json

ROLES = ("system", "developer", "user", "assistant", "tool")
"""The roles of messages that templates know."""
_ROLE_BY_OTHER_NAME: dict[str, str] = {
    **dict.fromkeys(["human", "prompter"], "user"),
    **dict.fromkeys(["gpt", "chatgpt", "bot", "ai", "model"], "assistant"),
}
"""The role that is meant by a name of other sets of chats."""
ANSWERS = ("completion", "answer", "response")
"""Names of the answer in a row with a `prompt`."""
_REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names of a message's reasoning; templates read the first one."""
_VERSION = 1
"""Version of the documents that rows give, a part of the key of the cached tokens."""
_GROUP_CHARACTERS = 500_000


class Chat(NamedTuple):
    """A row of a file.

    Args:
        place: file and number of the line.
        messages: the messages, as the template takes them.
        tools: descriptions of tools; `None` for none.
    """

    place: str
    messages: list[dict[str, Any]]
    tools: list[Any] | None


class Document(NamedTuple):
    """A rendered text, and the spans of its answers in characters, in order."""

    text: str
    answers: tuple[tuple[int, int], ...]


def read_chats(text: str, file: str) -> Iterator[Chat]:
    """Yield the chats in the text of a JSONL file.

    Raises:
        UserError: a line is no chat; the message gives its number.
    """
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            yield _chat_of(line, f"{file}:{number}")


def _chat_of(line: str, place: str) -> Chat:
    """Return the chat in a line of a file."""
    expected = 'expected {"messages": [{"role": "user", "content": ...}, ...]} or {"prompt": ..., "completion": ...}'
    try:
        row = parse_json(line, "the line")
    except UserError as error:
        raise UserError(f"{place}: not JSON ({error}); {expected}") from None
    if not isinstance(row, dict):
        raise UserError(f"{place}: got a {type(row).__name__}, {expected}")
    if has_half_characters(line) or has_half_characters(_all_text(row)):
        raise UserError(f"{place}: has half a surrogate pair, such as \\ud83d: repair or remove that character")
    if "messages" in row:
        messages = row["messages"]
        if not isinstance(messages, list) or not messages:
            raise UserError(f"{place}: messages: got {messages!r:.60}, expected a list of messages")
        messages = [_message(message, f"{place}: message {index}") for index, message in enumerate(messages, 1)]
    else:
        answer_name = next((name for name in ANSWERS if name in row), None)
        if answer_name is None or not isinstance(row.get("prompt"), str) or not isinstance(row[answer_name], str):
            wrong = [(name, row[name]) for name in ("prompt", *ANSWERS) if not isinstance(row.get(name, ""), str)]
            wrong_text = f", but {wrong[0][0]} is {wrong[0][1]!r:.40}" if wrong else ""
            raise UserError(
                f"{place}: the line has the names {', '.join(map(repr, row))}; {expected}, both texts{wrong_text}"
            )
        messages = [
            {"role": "user", "content": row["prompt"]},
            {"role": "assistant", "content": row[answer_name]},
        ]
    tools = row.get("tools")
    if tools is not None and not isinstance(tools, list):
        raise UserError(f"{place}: tools: got a {type(tools).__name__}, expected a list of descriptions of functions")
    return Chat(place, messages, tools or None)


def _all_text(value: Any) -> str:
    """Return all texts in a JSON value, joined."""
    if isinstance(value, dict):
        return "".join(key + _all_text(each) for key, each in value.items())
    return "".join(map(_all_text, value)) if isinstance(value, list) else value if isinstance(value, str) else ""


def _message(message: Any, place: str) -> dict[str, Any]:
    """Return a message as transformers hands it to a template: without nulls, and with reasoning under each name."""
    if not isinstance(message, dict):
        raise UserError(f"{place}: got a {type(message).__name__}, expected an object with role and content")
    role, content = message.get("role"), message.get("content")
    if role not in ROLES:
        meant_role = _ROLE_BY_OTHER_NAME.get(str(role).lower())
        advice_text = f"; did you mean {meant_role!r}?" if meant_role else near_miss(str(role), ROLES)
        if role is None and {"from", "value"} <= set(message):
            advice_text = "; the message has the names from and value: rename them to role and content"
        raise UserError(f"{place}: unknown role {role!r:.60}, expected one of {', '.join(ROLES)}{advice_text}")
    if not isinstance(content, str) and not (content is None and message.get("tool_calls")):
        raise UserError(f"{place}: content: got a {type(content).__name__}, expected a text (images are not supported)")
    message = {name: value for name, value in message.items() if value is not None}
    reasoning = next((message[name] for name in _REASONING if name in message), None)
    return message if reasoning is None else {"thinking": reasoning, **message, "reasoning_content": reasoning}


def documents_of(chat: Chat, texts: list[str]) -> list[Document]:
    """Return the documents of a chat from what the template rendered.

    Args:
        chat: the chat.
        texts: for each answer, the text of the messages before it with the prompt for an answer, and the text of the
            messages up to it.

    Raises:
        UserError: the text up to an answer does not begin with the prompt for it, or does not have it.
    """
    documents: list[Document] = []
    for number, (prompt, whole) in enumerate(zip(texts[::2], texts[1::2], strict=True), 1):
        place = f"{chat.place}: answer {number}"
        if not whole.startswith(prompt):
            differing = (i for i, pair in enumerate(zip(prompt, whole, strict=False)) if pair[0] != pair[1])
            common = next(differing, min(len(prompt), len(whole)))
            raise UserError(
                f"{place}: the template asks for it with {prompt[max(common - 20, 0) :]!r:.80}, and the text with the "
                f"answer has {whole[max(common - 20, 0) : common + 20]!r:.80} there, so that what to learn is not "
                "defined: change the folder's chat template to render the same text in both"
            )
        if len(whole) == len(prompt):
            raise UserError(f"{place}: the template renders nothing for it: change the folder's chat template")
        has_earlier_answers = bool(documents) and prompt.startswith(documents[-1].text)
        answers = documents.pop().answers if has_earlier_answers else ()
        documents.append(Document(whole, (*answers, (len(prompt), len(whole)))))
    return documents


def learned_mask(document: Document, spans: np.ndarray) -> np.ndarray:
    """Return which tokens have a character of an answer, bool [tokens].

    A tokenizer may leave white space out of the span of a token, so a token of white space alone has an empty span at
    its end: it counts as the character before that place.

    Args:
        document: the document.
        spans: int32 [tokens, 2], first character of each token, and the character after its last one.
    """
    starts, ends = spans[:, 0], spans[:, 1]
    mask = np.zeros(len(spans), np.bool_)
    for start, end in document.answers:
        mask |= (ends > start) & ((starts < end) | (ends == end))
    return mask


@dataclasses.dataclass
class ChatRecipe:
    """How JSONL files of chats become two sequences of documents, one for training and one held out.

    Args:
        template: the chat template.
        date: day that the template sees as today, as YYYY-MM-DD.
        held_out: share of the chats, at their end, that is held out.
        held_out_files: number of files, at the end of the list, whose chats are held out instead.
    """

    template: ChatTemplate
    date: str
    held_out: float
    held_out_files: int = 0
    is_masked: bool = dataclasses.field(default=True, init=False)
    _documents: list[tuple[int, Document]] = dataclasses.field(default_factory=list, init=False)

    @property
    def identity(self) -> tuple[Any, ...]:
        """What determines the tokens of files, for a hash."""
        share = 0.0 if self.held_out_files else self.held_out
        return "chat", _VERSION, self.template.identity, self.date, share, self.held_out_files

    def count(self, files: list[str]) -> dict[str, Any]:
        """Render the chats in files, and return counts: those of `documents.check_and_count`, and more."""
        byte_count, chats, first_held_out = 0, list[Chat](), -1
        for index, file in enumerate(files):
            if self.held_out_files and index == len(files) - self.held_out_files:
                first_held_out = len(chats)
            content = source.read(file)
            byte_count += len(content)
            chats += read_chats(source.decode(content, file), file)
        if not self.held_out_files:
            first_held_out = int((1 - self.held_out) * len(chats))
        answered = [chat for chat in chats if _parts(chat)]
        if not answered:
            raise UserError(f"{files[0]}: none of the {len(chats)} chats has a message of the role assistant to learn")
        split_by_place = {chat.place: int(index >= first_held_out) for index, chat in enumerate(chats)}
        self._documents = []
        for chat, documents in self._rendered(answered):
            self._documents += [(split_by_place[chat.place], document) for document in documents]
        unanswered = [chat.place for chat in chats if not _parts(chat)]
        return {
            "files": len(files),
            "bytes": byte_count,
            "characters": sum(len(document.text) for _, document in self._documents),
            "documents": len(self._documents),
            "marked": len(self._documents),
            "chats": len(answered),
            "unanswered": len(unanswered),
            "first_unanswered": unanswered[0] if unanswered else "",
        }

    def _rendered(self, chats: list[Chat]) -> Iterator[tuple[Chat, list[Document]]]:
        """Yield each chat with its documents."""
        jobs = (Job(chat.messages, chat.tools, _parts(chat)) for chat in chats)
        with Renderer(self.template, self.date) as renderer:
            for chat, texts in zip(chats, renderer.render(jobs), strict=False):
                if isinstance(texts, Failure):
                    raise UserError(f"{chat.place}: {texts.text} ({self.template.origin})")
                yield chat, documents_of(chat, texts)

    def encode(self, tokenizer: Subwords) -> Iterator[LabeledParts]:
        """Yield the ids of the documents that `count` rendered; a part is a run of tokens that are learned, or not."""
        group: list[tuple[int, Document]] = []
        character_count = 0
        for index, (split, document) in enumerate(self._documents):
            group.append((split, document))
            character_count += len(document.text)
            if character_count >= _GROUP_CHARACTERS or index == len(self._documents) - 1:
                yield _encoded(tokenizer, group, character_count)
                group, character_count = [], 0


def _parts(chat: Chat) -> tuple[tuple[int, bool], ...]:
    """Return what to render of a chat: for each answer, the messages before it, and those up to it."""
    answers = [index for index, message in enumerate(chat.messages) if message["role"] == "assistant"]
    return tuple(part for index in answers for part in ((index, True), (index + 1, False)))


def _encoded(tokenizer: Subwords, group: list[tuple[int, Document]], character_count: int) -> LabeledParts:
    """Return the labeled runs of tokens of a group of documents, each with its split."""
    ids, lengths, splits, learned, starts = [], [], [], [], []
    encodings = tokenizer.encode_with_spans([document.text for _, document in group])
    for (split, document), (document_ids, spans) in zip(group, encodings, strict=True):
        mask = learned_mask(document, spans)
        run_starts = np.flatnonzero(np.diff(mask, prepend=~mask[:1]))  # the first token begins a run
        ids.append(document_ids)
        lengths.append(np.diff(run_starts, append=len(mask)))
        splits.append(np.full(len(run_starts), split))
        learned.append(mask[run_starts].astype(np.int64))
        starts.append((np.arange(len(run_starts)) == 0).astype(np.int64))
    concatenate = functools.partial(np.concatenate, axis=0)
    run_lengths = concatenate(lengths).astype(np.int64)
    encoded = Encoded(concatenate(ids), run_lengths, np.arange(len(run_lengths)), character_count)
    return LabeledParts(encoded, concatenate(splits), concatenate(learned), concatenate(starts))
