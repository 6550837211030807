"""Bounds of the sizes that files and flags give, each checked before memory or time is spent on the size.

They lie far above what any run needs. They are there so that a mistyped or damaged number ends in a message, rather
than in a process that runs out of memory, or never answers.
"""

from jaxscale.errors import UserError

MAX_INT32 = 2**31 - 1
"""Largest step, row, position, token or seed: they are int32 on the devices."""
MAX_INT64 = 2**63 - 1
"""Largest whole number of any field: sizes in bytes are int64 in files and libraries."""
MAX_INT_BITS = 2**13
"""Most bits of a whole number of any field; Python cannot print more than 4,300 digits (14,284 bits)."""
MAX_WIDTH = 2**24
"""Largest width of a layer, number of heads or of classes: a matrix of two such dims takes 1 PiB."""
MAX_LAYERS = 2**16
"""Most layers: some lists have an entry for each layer; published networks have at most about 1,000."""
MAX_AXIS_DEVICES = 2**20
"""Most devices along a mesh axis; the largest machines have some 100,000."""
MAX_MICROBATCHES = 2**20
"""Most microbatches of a batch."""
MAX_SCHEDULE_FORWARDS = 2**19
"""Most forwards of a pipeline schedule (stages times microbatches): a schedule lists every action, some 10 us each."""
MAX_TEXT_BYTES = 2**20
"""Largest text form of a field."""
MAX_JSON_DEPTH = 64
"""Most levels of nested lists and objects in a JSON file; Python's stack holds about 1,000 calls."""
MAX_JSON_BYTES = 2**28
"""Largest JSON or CSV file: the largest tokenizer.json takes 35 MB. The safetensors header has the format's limit."""
MAX_LOCAL_PROCESSES = 1024
"""Most processes that a command starts on one machine."""
MAX_LOG_BYTES = 2**30
"""Largest metrics.jsonl or samples.txt that a report reads: some four million steps; a run may write more."""
MAX_LINE_BYTES = 2**24
"""Longest line of a log: a line is a few hundred bytes."""
MAX_RECORD_BYTES = 2**20
"""Largest heartbeat, or other record of a few numbers."""
MAX_NAME_BYTES = 255
"""Longest name of a file or folder on Linux and macOS."""

MAX_OF_FIELD = {
    **dict.fromkeys(("vocab", "context", "original_context", "image"), MAX_INT32),
    **dict.fromkeys(("embed", "heads", "kv_heads", "head_dim", "mlp", "classes", "channels", "width"), MAX_WIDTH),
    "layers": MAX_LAYERS,
    "patch": MAX_WIDTH,
}
"""Bounds of the sizes of models, by the name of the field."""


def check_at_most(name: str, count: int, maximum: int) -> None:
    """Raise UserError if a count exceeds its bound.

    Example:
        >>> check_at_most("layers", 10**9, MAX_LAYERS)
        Traceback (most recent call last):
        jaxscale.errors.UserError: layers: got 1,000,000,000, expected at most 65,536
    """
    if count > maximum:
        raise UserError(f"{name}: got {count:,}, expected at most {maximum:,}")
