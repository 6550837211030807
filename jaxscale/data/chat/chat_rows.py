"""Turn chats in JSONL files into documents by a chat template, with loss on the answers alone.

The template renders the messages before an answer, with the generation prompt at the end; then the messages up to and
including the answer. The answer is what the second text adds to the first. The token ids are those of the whole
rendered text, as transformers' `apply_chat_template` returns them. A token has weight 1 if it contains a character of
an answer.

A template may render an answer differently once the chat goes on, for example without its reasoning. A model does not
write that later form, so the chat is split into several documents. Each document ends with an answer in the form that
the model is to write, and contains the earlier turns in the form that the model sees at that point. Messages after the
last answer are left out.
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
"""The roles of messages that templates accept."""
_ROLE_BY_OTHER_NAME: dict[str, str] = {
    **dict.fromkeys(["human", "prompter"], "user"),
    **dict.fromkeys(["gpt", "chatgpt", "bot", "ai", "model"], "assistant"),
}
"""The role that corresponds to each role name of other chat datasets."""
ANSWER_NAMES = ("completion", "answer", "response")
"""Accepted names of the answer in a row that has a `prompt`."""
_REASONING_NAMES = ("reasoning_content", "thinking", "reasoning")
"""Accepted names of a message's reasoning; templates read the first of these names."""
_VERSION = 1
"""Version of the conversion from rows to documents, a part of the cache key of the tokens."""
_GROUP_CHARACTERS = 500_000  # documents are encoded in groups of at least this many characters


class Chat(NamedTuple):
    """The chat in one row of a file.

    Args:
        place: file and line number, for messages.
        messages: the messages, in the form that the template takes.
        tools: descriptions of the tools that the assistant may call; `None` if there are none.
    """

    place: str
    messages: list[dict[str, Any]]
    tools: list[Any] | None


class Document(NamedTuple):
    """A rendered text, and the spans (start, end) of its answers in characters, in order."""

    text: str
    answer_spans: tuple[tuple[int, int], ...]


def read_chats(text: str, file: str) -> Iterator[Chat]:
    """Yield the chats in the text of a JSONL file.

    Raises:
        UserError: a line is not a chat; the message gives the line's number.
    """
    for line_number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            yield _chat_of(line, f"{file}:{line_number}")


def _chat_of(line: str, place: str) -> Chat:
    """Return the chat in a line of a file."""
    expected_text = (
        'expected {"messages": [{"role": "user", "content": ...}, ...]} or {"prompt": ..., "completion": ...}'
    )
    try:
        row = parse_json(line, "the line")
    except UserError as error:
        raise UserError(f"{place}: not JSON ({error}); {expected_text}") from None
    if not isinstance(row, dict):
        raise UserError(f"{place}: got a {type(row).__name__}, {expected_text}")
    if has_half_characters(line) or has_half_characters(_all_text(row)):
        raise UserError(f"{place}: has half a surrogate pair, such as \\ud83d: repair or remove that character")
    if "messages" in row:
        row_messages = row["messages"]
        if not isinstance(row_messages, list) or not row_messages:
            raise UserError(f"{place}: messages: got {row_messages!r:.60}, expected a list of messages")
        messages = [
            _template_message(message, f"{place}: message {index}") for index, message in enumerate(row_messages, 1)
        ]
    else:
        answer_name = next((name for name in ANSWER_NAMES if name in row), None)
        if answer_name is None or not isinstance(row.get("prompt"), str) or not isinstance(row[answer_name], str):
            wrong_entries = [
                (name, row[name]) for name in ("prompt", *ANSWER_NAMES) if not isinstance(row.get(name, ""), str)
            ]
            wrong_text = f", but {wrong_entries[0][0]} is {wrong_entries[0][1]!r:.40}" if wrong_entries else ""
            raise UserError(
                f"{place}: the line has the names {', '.join(map(repr, row))}; {expected_text}, both texts{wrong_text}"
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
    """Return all strings in a JSON value, with the names in its objects, as one concatenated string."""
    if isinstance(value, dict):
        return "".join(key + _all_text(each) for key, each in value.items())
    return "".join(map(_all_text, value)) if isinstance(value, list) else value if isinstance(value, str) else ""


def _template_message(message: Any, place: str) -> dict[str, Any]:
    """Return a message in the form that transformers passes to templates: no nulls, and reasoning under two names."""
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
    reasoning = next((message[name] for name in _REASONING_NAMES if name in message), None)
    return message if reasoning is None else {"thinking": reasoning, **message, "reasoning_content": reasoning}


def documents_of(chat: Chat, rendered_texts: list[str]) -> list[Document]:
    """Return the documents of a chat, given the texts that the template rendered.

    Args:
        chat: the chat.
        rendered_texts: two texts for each answer. The first renders the messages before the answer, and ends with the
            generation prompt. The second renders the messages up to and including the answer.

    Raises:
        UserError: the text up to an answer does not begin with the text before it, or adds nothing to that text.
    """
    documents: list[Document] = []
    for answer_number, (prompt_text, full_text) in enumerate(
        zip(rendered_texts[::2], rendered_texts[1::2], strict=True), 1
    ):
        place = f"{chat.place}: answer {answer_number}"
        if not full_text.startswith(prompt_text):
            differing_indices = (
                i for i, pair in enumerate(zip(prompt_text, full_text, strict=False)) if pair[0] != pair[1]
            )
            common_length = next(differing_indices, min(len(prompt_text), len(full_text)))
            raise UserError(
                f"{place}: the template asks for it with {prompt_text[max(common_length - 20, 0) :]!r:.80}, and the "
                f"text with the answer has {full_text[max(common_length - 20, 0) : common_length + 20]!r:.80} there, "
                "so what to learn is not defined: change the folder's chat template to render the same text in both"
            )
        if len(full_text) == len(prompt_text):
            raise UserError(f"{place}: the template renders nothing for it: change the folder's chat template")
        continues_last_document = bool(documents) and prompt_text.startswith(documents[-1].text)
        answer_spans = documents.pop().answer_spans if continues_last_document else ()
        documents.append(Document(full_text, (*answer_spans, (len(prompt_text), len(full_text)))))
    return documents


def learned_mask(document: Document, spans: np.ndarray) -> np.ndarray:
    """Return a mask of the tokens that contain a character of an answer, bool [tokens].

    A tokenizer may leave white space out of a token's span. A token of white space alone then has an empty span, at the
    token's end. An empty span counts as the character before it.

    Args:
        document: the document.
        spans: int32 [tokens, 2]; for each token, the index of its first character, and the index after its last one.
    """
    token_starts, token_ends = spans[:, 0], spans[:, 1]
    is_learned = np.zeros(len(spans), np.bool_)
    for answer_start, answer_end in document.answer_spans:
        is_learned |= (token_ends > answer_start) & ((token_starts < answer_end) | (token_ends == answer_end))
    return is_learned


@dataclasses.dataclass
class ChatRecipe:
    """How JSONL files of chats become two sequences of documents, one for training and one held out.

    Args:
        template: the chat template.
        date: day that the template sees as today, as YYYY-MM-DD.
        held_out: share of the chats that is held out, counted from the end.
        held_out_file_count: number of files at the end of the list whose chats are held out. If it is above 0,
            `held_out` is not used.
    """

    template: ChatTemplate
    date: str
    held_out: float
    held_out_file_count: int = 0
    is_masked: bool = dataclasses.field(default=True, init=False)
    _splits_and_documents: list[tuple[int, Document]] = dataclasses.field(default_factory=list, init=False)

    @property
    def identity(self) -> tuple[Any, ...]:
        """The values that determine the tokens of given files, for the cache key."""
        held_out_share = 0.0 if self.held_out_file_count else self.held_out
        return "chat", _VERSION, self.template.identity, self.date, held_out_share, self.held_out_file_count

    def count(self, files: list[str]) -> dict[str, Any]:
        """Render the chats in files. Return the counts of `documents.check_and_count`, and counts of the chats."""
        byte_count, chats, first_held_out_index = 0, list[Chat](), -1
        for index, file in enumerate(files):
            if self.held_out_file_count and index == len(files) - self.held_out_file_count:
                first_held_out_index = len(chats)
            content = source.read(file)
            byte_count += len(content)
            chats += read_chats(source.decode(content, file), file)
        if not self.held_out_file_count:
            first_held_out_index = int((1 - self.held_out) * len(chats))
        answered_chats = [chat for chat in chats if _renderings(chat)]
        if not answered_chats:
            raise UserError(f"{files[0]}: none of the {len(chats)} chats has a message of the role assistant to learn")
        split_index_by_place = {chat.place: int(index >= first_held_out_index) for index, chat in enumerate(chats)}
        self._splits_and_documents = []
        for chat, documents in self._chats_and_documents(answered_chats):
            self._splits_and_documents += [(split_index_by_place[chat.place], document) for document in documents]
        unanswered_places = [chat.place for chat in chats if not _renderings(chat)]
        return {
            "files": len(files),
            "bytes": byte_count,
            "characters": sum(len(document.text) for _, document in self._splits_and_documents),
            "documents": len(self._splits_and_documents),
            "marked": len(self._splits_and_documents),
            "chats": len(answered_chats),
            "unanswered": len(unanswered_places),
            "first_unanswered": unanswered_places[0] if unanswered_places else "",
        }

    def _chats_and_documents(self, chats: list[Chat]) -> Iterator[tuple[Chat, list[Document]]]:
        """Yield each chat with its documents."""
        jobs = (Job(chat.messages, chat.tools, _renderings(chat)) for chat in chats)
        with Renderer(self.template, self.date) as renderer:
            for chat, texts_or_failure in zip(chats, renderer.render(jobs), strict=False):
                if isinstance(texts_or_failure, Failure):
                    raise UserError(f"{chat.place}: {texts_or_failure.text} ({self.template.origin})")
                yield chat, documents_of(chat, texts_or_failure)

    def encode(self, tokenizer: Subwords) -> Iterator[LabeledParts]:
        """Yield the ids of the documents that `count` rendered; each part is a run of tokens of equal weight."""
        group: list[tuple[int, Document]] = []
        character_count = 0
        for index, (split_index, document) in enumerate(self._splits_and_documents):
            group.append((split_index, document))
            character_count += len(document.text)
            if character_count >= _GROUP_CHARACTERS or index == len(self._splits_and_documents) - 1:
                yield _labeled_runs(tokenizer, group, character_count)
                group, character_count = [], 0


def _renderings(chat: Chat) -> tuple[tuple[int, bool], ...]:
    """Return `Job.renderings` of a chat: for each answer, the messages before it, and then those up to its end."""
    answer_indices = [index for index, message in enumerate(chat.messages) if message["role"] == "assistant"]
    return tuple(rendering for index in answer_indices for rendering in ((index, True), (index + 1, False)))


def _labeled_runs(tokenizer: Subwords, group: list[tuple[int, Document]], character_count: int) -> LabeledParts:
    """Encode a group of pairs (split index, document). Return its runs of tokens of equal weight, with labels."""
    id_arrays, length_arrays, split_arrays, learned_arrays, start_arrays = [], [], [], [], []
    ids_and_spans = tokenizer.encode_with_spans([document.text for _, document in group])
    for (split_index, document), (document_ids, spans) in zip(group, ids_and_spans, strict=True):
        is_learned = learned_mask(document, spans)
        run_starts = np.flatnonzero(np.diff(is_learned, prepend=~is_learned[:1]))  # the first token begins a run
        id_arrays.append(document_ids)
        length_arrays.append(np.diff(run_starts, append=len(is_learned)))
        split_arrays.append(np.full(len(run_starts), split_index))
        learned_arrays.append(is_learned[run_starts].astype(np.int64))
        start_arrays.append((np.arange(len(run_starts)) == 0).astype(np.int64))
    concatenate = functools.partial(np.concatenate, axis=0)
    run_lengths = concatenate(length_arrays).astype(np.int64)
    encoded = Encoded(concatenate(id_arrays), run_lengths, np.arange(len(run_lengths)), character_count)
    return LabeledParts(encoded, concatenate(split_arrays), concatenate(learned_arrays), concatenate(start_arrays))
