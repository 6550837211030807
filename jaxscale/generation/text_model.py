"""TextModel: a model of a run or of a Hugging Face folder that generates text, with tokenizer, template and stops.

If a model was trained on chats, or its folder has a chat template, a prompt is the message of a user. The template
renders the message, and the model answers it. Any other model continues its prompt. For a model folder, a prompt that
is continued begins with the special tokens that tokenizer.json adds, because some families generate nonsense without
them.
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
"""The pair (ids, texts): the token ids and the texts that end a generated text."""


def can_generate(model: Any, tokenizer: Any) -> bool:
    """Return whether the model has a KV cache for decoding, and the tokenizer is not `None`."""
    return tokenizer is not None and ModelTraits.of(model).generates


def check_can_generate(model: Any, tokenizer: Any) -> None:
    """Raise UserError if the model has no KV cache for decoding, or if the tokenizer is `None`."""
    if not can_generate(model, tokenizer):
        raise UserError(
            f"{type(model).__name__} with this data cannot generate text: that needs a KV cache and a tokenizer"
        )


def data_stops(data: Any, tokenizer: Any, template: ChatTemplate | None) -> Stops:
    """Return the ids and texts that end a generated text of a run.

    With a chat template, they end an answer. Without one, the text that ends each document of the data is used, if any.

    Args:
        data: the data of the experiment.
        tokenizer: the run's tokenizer.
        template: the run's chat template; `None` if there is none.
    """
    if template is not None:
        answer_ids, answer_texts = answer_stops(template, tokenizer)
        return tuple(answer_ids), tuple(answer_texts)
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
        tokenizer: the model's tokenizer.
        template: the model's chat template; `None` if there is none.
        stops: the ids and the texts that end a generated text.
        place: the run or folder, for error messages.
        begins_texts: whether the special tokens that tokenizer.json adds are put before a prompt that is continued.
    """

    generator: Any
    tokenizer: Any
    template: ChatTemplate | None
    stops: Stops
    place: str
    begins_texts: bool = False

    @classmethod
    def open(cls, place: Any, best: bool = False) -> "TextModel":
        """Open a run or a Hugging Face folder. `best` selects the best checkpoint of a run instead of the newest.

        Raises:
            UserError: there is no such run or folder, it has no tokenizer, or its model cannot generate text.
        """
        from jaxscale.checkpoint.restore import open_folder, read_template, read_tokenizer, restore_parameters
        from jaxscale.generation.generator import Generator

        if is_model_folder(place):
            if best:
                raise UserError(f"{place} is a model folder, which has no checkpoints: leave best out")
            tokenizer, template = folder_tokenizer(place), find_template(place)
            loaded_folder = open_folder(place)
            check_can_generate(loaded_folder.experiment.model, tokenizer)
            template_ids, template_texts = data_stops(None, tokenizer, template)
            stops = (
                (*template_ids, *(token_id for token_id in stop_ids(place, tokenizer) if token_id not in template_ids)),
                template_texts,
            )
            generator = Generator.of_step(loaded_folder.step, loaded_folder.state)
            return cls(generator, tokenizer, template, stops, str(place), begins_texts=True)
        trained_run = restore_parameters(place, best=best)
        tokenizer, template = read_tokenizer(place), read_template(place)
        check_can_generate(trained_run.experiment.model, tokenizer)
        stops = data_stops(trained_run.experiment.data, tokenizer, template)
        return cls(Generator.of_step(trained_run.step, trained_run.state), tokenizer, template, stops, str(place))

    def is_chat_message(self, chat: bool | None) -> bool:
        """Return whether to treat a prompt as a chat message. If `chat` is `None`, do so if there is a chat template.

        Raises:
            UserError: `chat` is true, and there is no chat template.
        """
        if chat and self.template is None:
            raise UserError(f"chat: {self.place} has no chat template to render a message with: leave chat out")
        return self.template is not None and chat is not False

    def render_prompts(self, prompt: str | Sequence[str], chat: bool | None) -> Any:
        """Return the text that the model continues for a prompt, or a list of such texts for several prompts."""
        if not self.is_chat_message(chat):
            return prompt
        assert self.template is not None
        return self.template.prompt(prompt) if isinstance(prompt, str) else [*map(self.template.prompt, prompt)]

    def encode(self, text: str, chat: bool | None) -> np.ndarray:
        """Return the int32 token ids of a text that `render_prompts` returned."""
        if self.begins_texts and not self.is_chat_message(chat):
            return self.tokenizer.encode_beginning(text)
        return np.asarray(self.tokenizer.encode(text), np.int32)

    def with_stops(self, sampling: Sampling) -> Sampling:
        """Return `sampling` with this model's stop ids and stop texts added."""
        ending_ids, ending_texts = self.stops
        return dataclasses.replace(
            sampling, stop_ids=(*sampling.stop_ids, *ending_ids), stop=(*sampling.stop, *ending_texts)
        )
