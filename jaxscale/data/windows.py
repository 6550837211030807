"""Documents one after another, cut into windows of equal length: nanoGPT's and most pretraining's layout.

Each epoch reads every window once. The windows do not overlap, and their common offset changes with the epoch, so
that a token has other neighbours in each. (nanoGPT draws random crops instead: an epoch's worth of them misses a
token with probability 1/e.) A window may contain parts of several documents, which attend to each other.

The held-out part is cut from its first token on, and a last, incomplete window is padded with targets of weight 0:
every target is scored once. (nanoGPT-like evaluations over rows drop an incomplete window: up to context - 1 targets at
the end. The other windows are the same.)
"""

import dataclasses

import numpy as np

from jaxscale.data.cache import Tokens
from jaxscale.data.shuffle import derive


@dataclasses.dataclass(frozen=True)
class Windows:
    """Rows of `context` targets cut from a sequence of tokens.

    Args:
        tokens: the sequence.
        context: number of targets per row.
        seed: seed of the offset of each epoch; with `None`, windows begin at the first token and cover every target.
    """

    tokens: Tokens
    context: int
    seed: int | None

    def __len__(self) -> int:
        """Number of rows of one epoch."""
        target_count = len(self.tokens.ids) - 1
        if self.seed is None:
            return -(-target_count // self.context) if target_count >= self.context else 0
        # one window less than fits at offset 0, so that an epoch has equally many windows at every offset
        return max((target_count + 1) // self.context - 1, int(target_count >= self.context), 0)

    @property
    def targets(self) -> int:
        """Number of targets of one epoch."""
        full_target_count = len(self) * self.context
        return full_target_count if self.seed is not None else min(full_target_count, max(len(self.tokens.ids) - 1, 0))

    def offset(self, epoch: int) -> int:
        """Index of the token at which the first window of an epoch begins."""
        if self.seed is None:
            return 0
        spare_target_count = len(self.tokens.ids) - 1 - self.targets
        return derive(self.seed, "offset", epoch) % (min(self.context - 1, spare_target_count) + 1)

    def read(self, rows: np.ndarray) -> dict[str, np.ndarray]:
        """Read the rows with these numbers in the endless sequence of epochs.

        Args:
            rows: [B] int64, numbers of the rows.

        Returns:
            `tokens` and `targets`, int32 [B, context]; and `weights`, float32, if prompts have weight 0 or a
            row may be incomplete.
        """
        epochs, window_numbers = np.divmod(rows, len(self))
        distinct_epochs, epoch_index = np.unique(epochs, return_inverse=True)
        offsets = np.array([self.offset(int(epoch)) for epoch in distinct_epochs], np.int64)[epoch_index]
        token_index = (offsets + window_numbers * self.context)[:, None] + np.arange(self.context + 1)[None, :]
        is_in_range = token_index < len(self.tokens.ids)
        token_index = np.where(is_in_range, token_index, 0)
        ids = np.where(is_in_range, self.tokens.ids[token_index], 0).astype(np.int32)
        batch: dict[str, np.ndarray] = {"tokens": ids[:, :-1], "targets": ids[:, 1:]}
        if self.tokens.learned is not None:
            batch["weights"] = (is_in_range & self.tokens.learned[token_index])[:, 1:].astype(np.float32)
        elif self.seed is None:
            batch["weights"] = is_in_range[:, 1:].astype(np.float32)
        return batch
