"""What generates text: the model of a run or of a Hugging Face folder, its tokenizer, its chat template, and its stops.

A model that was trained on chats, and a folder with a chat template, answer: a prompt is the message of a user, which
the template renders. Any other model continues its prompt. Of a folder, a prompt that is continued begins with the
special tokens that tokenizer.json puts there, since some families are lost without them.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxscale.data.chat.chat_template import ChatTemplate, answer_stops, find_template, folder_tokenizer, stop_ids
from jaxscale.errors import UserError
from jaxscale.generation.sampling import Sampling
from jaxscale.model_traits import ModelTraits
from jaxscale.models.huggingface import is_model_folder

Stops = tuple[tuple[int, ...], tuple[str, ...]]
"""Ids and texts that end what a model generates."""


def can_generate(model: Any, tokenizer: Any) -> bool:
    """Return whether the model has a KV cache for decoding, and the tokenizer is not `None`."""
    return tokenizer is not None and ModelTraits.of(model).generates


def check_can_generate(model: Any, tokenizer: Any) -> None:
    """Raise UserError for a model without a KV cache for decoding, or data without a tokenizer."""
    if not can_generate(model, tokenizer):
        raise UserError(
            f"{type(model).__name__} with this data cannot generate text: that needs a KV cache and a tokenizer"
        )


def data_stops(data: Any, tokenizer: Any, template: ChatTemplate | None) -> Stops:
    """Return what ends a text of a run: the text with which its data ends documents, or the end of an answer.

    Args:
        data: the data of the experiment.
        tokenizer: the run's tokenizer.
        template: the run's chat template; `None` without one.
    """
    if template is not None:
        ids, texts = answer_stops(template, tokenizer)
        return tuple(ids), tuple(texts)
    ending = getattr(data, "ending", None)
    if not isinstance(ending, str) or not ending:
        return (), ()
    ending_ids = tokenizer.encode(ending)
    return ((int(ending_ids[0]),), ()) if len(ending_ids) == 1 else ((), (ending,))


@dataclasses.dataclass(frozen=True)
class TextModel:
    """A model that generates text.

    Args:
        generator: the model and its parameters (`generation.generator.Generator`).
        tokenizer: its tokenizer.
        template: its chat template; `None` without one.
        stops: ids and texts that end a text.
        place: the run or folder, for messages.
        begins_texts: whether a prompt that is continued begins with the special tokens of tokenizer.json.
    """

    generator: Any
    tokenizer: Any
    template: ChatTemplate | None
    stops: Stops
    place: str
    begins_texts: bool = False

    @classmethod
    def open(cls, place: Any, best: bool = False) -> "TextModel":
        """Open a run, with its newest or its best checkpoint, or a Hugging Face folder.

        Raises:
            UserError: there is no such run or folder, it has no tokenizer, or its model cannot generate text.
        """
        from jaxscale.checkpoint.restore import open_folder, read_template, read_tokenizer, restore_parameters
        from jaxscale.generation.generator import Generator

        if is_model_folder(place):
            if best:
                raise UserError(f"{place} is a model folder, which has no checkpoints: leave best out")
            tokenizer, template = folder_tokenizer(place), find_template(place)
            model = open_folder(place)
            check_can_generate(model.experiment.model, tokenizer)
            ids, texts = data_stops(None, tokenizer, template)
            stops = (*ids, *(i for i in stop_ids(place, tokenizer) if i not in ids)), texts
            generator = Generator.of_step(model.step, model.state)
            return cls(generator, tokenizer, template, stops, str(place), begins_texts=True)
        trained = restore_parameters(place, best=best)
        tokenizer, template = read_tokenizer(place), read_template(place)
        check_can_generate(trained.experiment.model, tokenizer)
        stops = data_stops(trained.experiment.data, tokenizer, template)
        return cls(Generator.of_step(trained.step, trained.state), tokenizer, template, stops, str(place))

    def answers(self, chat: bool | None) -> bool:
        """Return whether a prompt is the message of a user; `chat` requires it or not, `None` if there is a template.

        Raises:
            UserError: `chat` is true, and there is no template.
        """
        if chat and self.template is None:
            raise UserError(
                f"chat: {self.place} has no chat template, so that it has no form for messages: leave chat out"
            )
        return self.template is not None and chat is not False

    def rendered(self, prompt: str | Sequence[str], chat: bool | None) -> Any:
        """Return a prompt, or several, as the text that the model continues."""
        if not self.answers(chat):
            return prompt
        assert self.template is not None
        return self.template.prompt(prompt) if isinstance(prompt, str) else [*map(self.template.prompt, prompt)]

    def encode(self, text: str, chat: bool | None) -> np.ndarray:
        """Return the ids of a text that `rendered` returned."""
        if self.begins_texts and not self.answers(chat):
            return self.tokenizer.encode_beginning(text)
        return np.asarray(self.tokenizer.encode(text), np.int32)

    def stopping(self, sampling: Sampling) -> Sampling:
        """Return `sampling`, which stops also at what ends a text of this model."""
        ids, texts = self.stops
        return dataclasses.replace(sampling, stop_ids=(*sampling.stop_ids, *ids), stop=(*sampling.stop, *texts))
