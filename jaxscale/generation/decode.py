"""Decoding of tokens after prompts, in windows that are at most as long as the model's context.

In a window, the model reads the prompt at once, and then draws tokens until the text fills the model's positions. The
model draws one more token, but does not read it. If more tokens are to be drawn, the newer half of the text becomes the
prompt of the next window. So the model never runs at a position that it was not trained on, and each draw sees the
whole text or at least half a context of it. A row's windows do not depend on the other rows.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from jaxscale.errors import UserError
from jaxscale.generation.memory import check_memory
from jaxscale.generation.sampling import Sampling


@dataclasses.dataclass
class _Row:
    """A continuation in progress.

    Args:
        prompt_index, sample_index: index of the prompt, and index of this sample among the prompt's samples.
        ids: int32 ids of the prompt and of the tokens drawn so far.
        prompt_length: number of ids of the prompt.
        final_length: largest number of ids that the row may have.
        start: index in `ids` of the first id of the row's window.
        is_done: whether no more tokens are drawn.
    """

    prompt_index: int
    sample_index: int
    ids: np.ndarray
    prompt_length: int
    final_length: int
    start: int = 0
    is_done: bool = False

    @property
    def drawn_ids(self) -> np.ndarray:
        """The int32 ids drawn so far."""
        return self.ids[self.prompt_length :]

    @property
    def window_ids(self) -> np.ndarray:
        """The ids that the next window begins with."""
        return self.ids[self.start :]

    def extend(self, drawn_ids: np.ndarray, stop_ids: Sequence[int]) -> np.ndarray:
        """Append the ids before the first stop id or -1 (nothing was drawn), and return the appended ids."""
        if self.is_done:
            return drawn_ids[:0]
        stop_indices = np.flatnonzero(np.isin(drawn_ids, (*stop_ids, -1)))
        new_ids = drawn_ids[: stop_indices[0]] if len(stop_indices) else drawn_ids
        new_ids = new_ids[: self.final_length - len(self.ids)]
        self.ids = np.concatenate([self.ids, new_ids])
        self.is_done = bool(len(stop_indices)) or len(self.ids) == self.final_length
        return new_ids


class Decoding:
    """Draws tokens after each prompt; iterating yields the new ids of every row, as they are drawn.

    The rows are the samples of the first prompt, then those of the second one, and so on.

    Args:
        generator: the model and its programs.
        prompts: int32 ids of each prompt: at least one id, and at most as many as the model has positions.
        sampling: what to draw.
        id_limit: exclusive upper limit of the drawn ids; by default, the model's vocabulary size.
        tokens_per_yield: number of tokens to draw for each row between two yields; `None` for all tokens of a window.

    Raises:
        UserError: a prompt is empty or longer than the context, or the rows need more memory than the device has left.
    """

    def __init__(
        self,
        generator: Any,
        prompts: Sequence[np.ndarray],
        sampling: Sampling,
        *,
        id_limit: int | None = None,
        tokens_per_yield: int | None = None,
    ) -> None:
        self.generator, self.sampling, self.tokens_per_yield = generator, sampling, tokens_per_yield
        self.id_limit = id_limit or generator.model.vocab
        for prompt in prompts:
            check_prompt(generator.model, len(prompt))
        longest_length = max(len(prompt) for prompt in prompts)
        slot_count = min(longest_length + sampling.tokens - 1, generator.model.context)
        check_memory(generator, len(prompts) * sampling.samples, slot_count)
        self.rows = [
            _Row(prompt_index, sample_index, np.asarray(prompt, np.int32), len(prompt), len(prompt) + sampling.tokens)
            for prompt_index, prompt in enumerate(prompts)
            for sample_index in range(sampling.samples)
        ]

    def stop(self, row_index: int) -> None:
        """Draw no more tokens for a row."""
        self.rows[row_index].is_done = True

    def __iter__(self) -> Iterator[list[np.ndarray]]:
        is_first_window = True
        while not all(row.is_done for row in self.rows):
            yield from self._run_window(is_first_window)
            is_first_window = False

    def _run_window(self, is_first_window: bool) -> Iterator[list[np.ndarray]]:
        """Draw tokens until a row that is not done fills its window, and yield the new ids of every row.

        In the first window, the samples of a prompt share its forward pass.
        """
        context, sampling = self.generator.model.context, self.sampling
        for row in self.rows:
            if len(row.window_ids) > context:
                row.start = len(row.ids) - max(context // 2, 1)
        open_rows = [row for row in self.rows if not row.is_done]
        max_token_count = min(context - len(row.window_ids) for row in open_rows) + 1
        token_count = min(max_token_count, max(row.final_length - len(row.ids) for row in open_rows))
        copy_count = sampling.samples if is_first_window else 1
        # a row that is done stays in the batch, with a prompt of one token
        row_prompts = [row.window_ids[:1] if row.is_done else row.window_ids for row in self.rows]
        row_offsets = np.array([row.start for row in self.rows], np.int32)
        prompt_and_sample_indices = [(row.prompt_index, row.sample_index) for row in self.rows]
        session = self.generator.start(row_prompts[::copy_count], copy_count, token_count, (sampling, self.id_limit))
        yield self._extend_rows(session.prefill(prompt_and_sample_indices, row_offsets)[None])
        remaining_count = token_count - 1
        while remaining_count and not all(row.is_done for row in self.rows):
            step_count = min(remaining_count, self.tokens_per_yield or remaining_count)
            yield self._extend_rows(session.advance(step_count))
            remaining_count -= step_count

    def _extend_rows(self, drawn_ids: np.ndarray) -> list[np.ndarray]:
        """Append drawn ids [steps, B] to the rows, and return the ids that were appended to each row."""
        return [row.extend(drawn_ids[:, row_index], self.sampling.stop_ids) for row_index, row in enumerate(self.rows)]


def check_prompt(model: Any, id_count: int, name: str = "prompt") -> None:
    """Raise UserError if a prompt of `id_count` ids is empty or does not fit in the model's positions."""
    if not id_count:
        raise UserError(f"{name}: got no tokens, expected at least one, such as a line break")
    if id_count > model.context:
        raise UserError(
            f"{name}: got {id_count} tokens, expected at most {model.context}, the positions of the model: shorten it; "
            "a text goes on from the newer half of its tokens when it exceeds the positions"
        )
