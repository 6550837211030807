"""Errors for the user. Their messages suffice to correct the mistake.

Every message names the given value, the expected value, and what to do. This module does not import JAX, so that a typo
is reported before JAX is imported.
"""

import difflib
from collections.abc import Collection, Iterable

MAX_MESSAGE_CHARACTERS = 4000
"""Longest message of a `UserError`; the value that a user gives may have millions of characters."""
MAX_WORD_CHARACTERS = 200
"""Longest word for which similar words are searched. For a word of millions of characters, the search takes seconds."""


class UserError(ValueError):
    """A mistake of the user: the command line prints only the message and exits with code 2.

    Characters that cannot be printed, such as terminal control characters, are written as escapes. If a message has
    more than 4,000 characters, its middle is left out.

    Args:
        message: what was given, what was expected, and what to do.
        page: name of a helpful page of the documentation, which `jaxscale docs` shows; the message ends with this name.
    """

    def __init__(self, message: str = "", *, page: str | None = None) -> None:
        printed_message = printable(message)
        super().__init__(printed_message if page is None else f"{printed_message} (jaxscale docs {page})")


class Diverged(RuntimeError):
    """The loss is no longer finite, or keeps spiking: restarting would not help. Exit code 4."""


class MostlySkipped(RuntimeError):
    """The run has ended, but skipped more than a tenth of its steps. A restart would end the same way. Exit code 6."""


class Stuck(RuntimeError):
    """A step never ends, for example because one device does not reach a collective. Exit code 7."""


class Preempted(Exception):
    """The run received a signal to stop, and has a checkpoint from which a new start continues. Exit code 75.

    Args:
        message: what stopped the run, and what to do.
        is_saved: whether the run has saved its last step. If so, the process ends normally; if not, because the signal
            came before the first step, the process ends at once.
    """

    def __init__(self, message: str = "", *, is_saved: bool = True) -> None:
        super().__init__(message)
        self.is_saved = is_saved


DONE, CRASHED, MISTAKE, DIVERGED, GAVE_UP, SKIPPED, STUCK, PREEMPTED, INTERRUPTED = 0, 1, 2, 4, 5, 6, 7, 75, 130
"""Exit codes of `train` and `launch`."""
STOP_CODES = (PREEMPTED, INTERRUPTED)
"""Exit codes of a process that a stop signal ended; `PREEMPTED` means that the process has saved."""
EXIT_CODES: dict[type[BaseException], int] = {
    UserError: MISTAKE,
    Diverged: DIVERGED,
    MostlySkipped: SKIPPED,
    Stuck: STUCK,
    Preempted: PREEMPTED,
    KeyboardInterrupt: INTERRUPTED,
}
"""Exit codes of errors; any other error is a crash."""


def printable(text: str, max_characters: int = MAX_MESSAGE_CHARACTERS) -> str:
    """Return a text with unprintable characters escaped; if the text is too long, leave out its middle.

    Example:
        >>> printable("a\\x1b[31m"), printable("x" * 100, max_characters=20)
        ('a\\\\x1b[31m', 'xxxxxxxxx ... xxxxxx')
    """
    escaped_text = "".join(
        character if character.isprintable() or character in "\n\t" else character.encode("unicode_escape").decode()
        for character in _shorten(text, max_characters)
    )
    return _shorten(escaped_text, max_characters)


def _shorten(text: str, max_characters: int) -> str:
    """Return a text; if it is longer than `max_characters`, leave out its middle."""
    if len(text) <= max_characters:
        return text
    end_length = (max_characters - 5) * 2 // 5
    return f"{text[: max_characters - 5 - end_length]} ... {text[-end_length:]}"


def near_miss(word: str, known: Iterable[str]) -> str:
    """Return a suggestion to append to an error about an unknown word; "" if no known word is similar.

    A word is also similar to a name if it has the name's letters, initials, or last part.

    Example:
        >>> near_miss("tarin", ["train", "generate"])
        "; did you mean 'train'?"
        >>> near_miss("lr", ["steps", "learning_rate"]), near_miss("--optimizer.rate", ["--optimizer.learning-rate"])
        ("; did you mean 'learning_rate'?", "; did you mean '--optimizer.learning-rate'?")
        >>> near_miss("zzz", ["train"])
        ''
    """
    if len(word) > MAX_WORD_CHARACTERS:
        return ""
    known_words = list(known)
    short_words = [known_word for known_word in known_words if abbreviates(word, known_word)]
    field_name = word.lstrip("-")
    close_words = [known_word for known_word in known_words if known_word.rpartition(".")[2] == field_name]
    close_words = close_words or [known_word for known_word in short_words if not known_word.endswith(field_name)]
    if not close_words:  # the dashes of flags are no likeness
        name_by_word = {known_word: known_word.lstrip("-") for known_word in known_words}
        close_names = difflib.get_close_matches(word.lstrip("-"), name_by_word.values(), n=1, cutoff=0.6)
        close_words = [known_word for known_word, name in name_by_word.items() if name in close_names]
    # short words fall below the cutoff
    close_words = close_words or [known_word for known_word in known_words if sorted(known_word) == sorted(word)]
    close_words = close_words or (short_words if len(short_words) == 1 else [])
    return f"; did you mean {close_words[0]!r}?" if close_words else ""


def abbreviates(word: str, known_word: str) -> bool:
    """Return whether a word consists of a name's initials, or is its last part. The name must have several parts."""
    parts = known_word.lstrip("-").rpartition(".")[2].replace("-", "_").split("_")
    last_part = word.lstrip("-").rpartition(".")[2]
    return len(parts) > 1 and last_part in ("".join(part[:1] for part in parts), parts[-1])


def near_argument(name: str, argument_names: Collection[str]) -> str:
    """Return a suggestion to append to an error about an unknown argument; "" if no argument is similar.

    Names that other frameworks use for an argument count as similar.

    Example:
        >>> near_argument("lr", ["steps", "learning_rate"]), near_argument("batch_size", ["batch"])
        ("; did you mean 'learning_rate'?", "; did you mean 'batch'?")
    """
    argument_name, addition = _ARGUMENT_BY_OTHER_NAME.get(name, ("", ""))
    if argument_name in argument_names:
        return f"; did you mean {argument_name!r}{addition}?"
    return near_miss(name, argument_names)


_ARGUMENT_BY_OTHER_NAME = {
    "lr": ("learning_rate", ""),
    "lr_schedule": ("schedule", ""),
    "betas": ("b1", " and 'b2'"),
    "grad_clip": ("clip", ""),
    "max_grad_norm": ("clip", ""),
    "warmup_steps": ("warmup", ""),
    "epochs": ("steps", ", the number of rows times the epochs divided by batch"),
    "max_steps": ("steps", ""),
    "batch_size": ("batch", ""),
    "train_data": ("data", ""),
    "eval_data": ("held_out", ", a dict of sets by name"),
    "loss": ("score", ""),
    "loss_fn": ("score", ""),
}
"""(argument, text to append to the suggestion), by the name that other frameworks use for the argument."""


def unknown(kind: str, word: str, known: Iterable[str]) -> UserError:
    """Return the error for an unknown name; `kind` is the kind of thing that it should name, such as "variant".

    Example:
        >>> unknown("variant", "tny", ["tiny", "long"])
        UserError("unknown variant 'tny': expected one of long, tiny; did you mean 'tiny'?")
    """
    known_names = sorted(known)
    return UserError(
        f"unknown {kind} {word!r}: expected one of {', '.join(known_names) or '(none)'}{near_miss(word, known_names)}"
    )
