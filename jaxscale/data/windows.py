"""Concatenated documents, cut into windows of equal length, as in nanoGPT and most pretraining.

Each epoch reads every window once. The windows do not overlap, and their common offset changes with the epoch, so a
token has different neighbors in each epoch. (nanoGPT draws random crops instead; an epoch of random crops misses a
token with probability 1/e.) A window may contain parts of several documents, which attend to each other.

The held-out part is cut into windows from its first token on. A last, incomplete window is padded with targets of
weight 0, so every target is evaluated once. (Evaluations in the manner of nanoGPT drop an incomplete window, with up to
context - 1 targets; the other windows are the same.)
"""

import dataclasses

import numpy as np

from jaxscale.data.cache import Tokens
from jaxscale.data.shuffle import derive_seed


@dataclasses.dataclass(frozen=True)
class Windows:
    """Rows of `context` targets cut from a sequence of tokens.

    Args:
        tokens: the sequence of tokens.
        context: number of targets per row.
        seed: seed of the epochs' offsets; with `None`, windows begin at the first token and cover every target.
    """

    tokens: Tokens
    context: int
    seed: int | None

    def __len__(self) -> int:
        """Number of rows in one epoch."""
        target_count = len(self.tokens.ids) - 1
        if self.seed is None:
            return -(-target_count // self.context) if target_count >= self.context else 0
        # one window fewer than fits at offset 0, so that epochs have the same number of windows at every offset
        return max((target_count + 1) // self.context - 1, int(target_count >= self.context), 0)

    @property
    def targets(self) -> int:
        """Number of targets in one epoch."""
        full_target_count = len(self) * self.context
        return full_target_count if self.seed is not None else min(full_target_count, max(len(self.tokens.ids) - 1, 0))

    def offset(self, epoch: int) -> int:
        """Return the index of the token at which the first window of an epoch begins."""
        if self.seed is None:
            return 0
        spare_target_count = len(self.tokens.ids) - 1 - self.targets
        return derive_seed(self.seed, "offset", epoch) % (min(self.context - 1, spare_target_count) + 1)

    def read(self, row_indices: np.ndarray) -> dict[str, np.ndarray]:
        """Read the rows with these indices in the endless sequence of epochs.

        Args:
            row_indices: [B] int64, indices of the rows.

        Returns:
            The batch: `tokens` and `targets`, int32 [B, context]; and `weights`, float32 [B, context], if prompts have
            weight 0 or a row may be incomplete.
        """
        # [B] each: the index of each row's epoch, and of its window in the epoch
        epochs, window_indices = np.divmod(row_indices, len(self))
        distinct_epochs, distinct_indices = np.unique(epochs, return_inverse=True)
        offsets = np.array([self.offset(int(epoch)) for epoch in distinct_epochs], np.int64)[distinct_indices]
        token_indices = (offsets + window_indices * self.context)[:, None] + np.arange(self.context + 1)[None, :]
        is_in_range = token_indices < len(self.tokens.ids)
        valid_indices = np.where(is_in_range, token_indices, 0)
        ids = np.where(is_in_range, self.tokens.ids[valid_indices], 0).astype(np.int32)
        batch: dict[str, np.ndarray] = {"tokens": ids[:, :-1], "targets": ids[:, 1:]}
        if self.tokens.is_learned is not None:
            batch["weights"] = (is_in_range & self.tokens.is_learned[valid_indices])[:, 1:].astype(np.float32)
        elif self.seed is None:
            batch["weights"] = is_in_range[:, 1:].astype(np.float32)
        return batch
