"""Documents one after another, cut into windows of equal length: nanoGPT's and most pretraining's layout.

Each epoch reads every window once. The windows do not overlap, and their common offset changes with the epoch, so
that a token sees other neighbours in each. (nanoGPT draws random crops instead: an epoch's worth of them misses a
token with probability 1/e.) A window may hold parts of several documents, which attend to each other.

What is held out is cut from its first token on, and a last window that is not full is filled up with targets that weigh
0: every target is scored once. (nanoGPT-like evaluations over rows leave out what does not fill one: up to context - 1
targets at the end. The other windows are the same.)
"""

import dataclasses

import numpy as np

from jaxscale.data.cache import Tokens
from jaxscale.data.shuffle import derive


@dataclasses.dataclass(frozen=True)
class Windows:
    """Rows of `context` targets cut from a sequence of tokens.

    Args:
        tokens: what is cut.
        context: targets per row.
        seed: of the offset of each epoch; `None` begins at the first token and reads every target.
    """

    tokens: Tokens
    context: int
    seed: int | None

    def __len__(self) -> int:
        """Rows of one epoch."""
        targets = len(self.tokens.ids) - 1
        if self.seed is None:
            return -(-targets // self.context) if targets >= self.context else 0
        # one window is given up so that an epoch has the same number of them whatever its offset
        return max((targets + 1) // self.context - 1, int(targets >= self.context), 0)

    @property
    def targets(self) -> int:
        """Targets of one epoch."""
        whole = len(self) * self.context
        return whole if self.seed is not None else min(whole, max(len(self.tokens.ids) - 1, 0))

    def offset(self, epoch: int) -> int:
        """Where the first window of an epoch begins."""
        if self.seed is None:
            return 0
        room = len(self.tokens.ids) - 1 - self.targets
        return derive(self.seed, "offset", epoch) % (min(self.context - 1, room) + 1)

    def read(self, rows: np.ndarray) -> dict[str, np.ndarray]:
        """Rows by their number in the endless sequence of epochs.

        Args:
            rows: [B] int64.

        Returns:
            `tokens` and `targets`, int32 [B, context]; `weights`, float32, where prompts weigh 0 or a row is not full.
        """
        epochs, inside = np.divmod(rows, len(self))
        seen, which = np.unique(epochs, return_inverse=True)
        offsets = np.array([self.offset(int(epoch)) for epoch in seen], np.int64)[which]
        at = (offsets + inside * self.context)[:, None] + np.arange(self.context + 1)[None, :]
        there = at < len(self.tokens.ids)
        at = np.where(there, at, 0)
        ids = np.where(there, self.tokens.ids[at], 0).astype(np.int32)
        batch: dict[str, np.ndarray] = {"tokens": ids[:, :-1], "targets": ids[:, 1:]}
        if self.tokens.learned is not None:
            batch["weights"] = (there & self.tokens.learned[at])[:, 1:].astype(np.float32)
        elif self.seed is None:
            batch["weights"] = there[:, 1:].astype(np.float32)
        return batch
