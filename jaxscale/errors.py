"""What a user can get wrong, said so that the message alone mends it.

Every message names what was given, what was expected, and what to do. This module knows no JAX: a typo is answered
before JAX is imported.
"""

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """The user's mistake: the command line prints the message alone and exits with 2."""


class Diverged(RuntimeError):
    """The loss stopped being finite, or kept spiking: restarting would not help. Exit code 4."""


class Preempted(Exception):
    """The run was told to stop, and has saved: starting it again continues it. Exit code 75."""


def near_miss(word: str, known: Iterable[str]) -> str:
    """The suggestion to append to an error about an unknown word; empty where nothing is near.

    Example:
        >>> near_miss("tarin", ["train", "generate"])
        "; did you mean 'train'?"
        >>> near_miss("zzz", ["train"])
        ''
    """
    names = list(known)
    swapped = [name for name in names if sorted(name) == sorted(word)]  # short words fall below the cutoff
    found = difflib.get_close_matches(word, names, n=1, cutoff=0.6) or swapped
    return f"; did you mean {found[0]!r}?" if found else ""


def unknown(kind: str, word: str, known: Iterable[str]) -> UserError:
    """The error for a name that is none of the known ones.

    Example:
        >>> unknown("variant", "tny", ["tiny", "long"])
        UserError("unknown variant 'tny': expected one of long, tiny; did you mean 'tiny'?")
    """
    names = sorted(known)
    return UserError(f"unknown {kind} {word!r}: expected one of {', '.join(names) or '(none)'}{near_miss(word, names)}")
