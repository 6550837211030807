"""Bounds of the sizes that files and flags specify. They are checked before memory or time is spent on such a size.

The bounds lie far above what any run needs. With them, a mistyped or damaged number leads to an error message, and not
to a process that runs out of memory or hangs.
"""

from jaxscale.errors import UserError

MAX_INT32 = 2**31 - 1
"""Largest step, row, position, token or seed, because these are int32 on the devices."""
MAX_INT64 = 2**63 - 1
"""Largest whole number in any field, because sizes in bytes are int64 in files and libraries."""
MAX_INT_BITS = 2**13
"""Most bits of a whole number in any field; Python cannot print more than 4,300 digits (14,284 bits)."""
MAX_WIDTH = 2**24
"""Largest width of a layer, number of heads, or number of classes. A matrix with two such dims takes 1 PiB."""
MAX_LAYERS = 2**16
"""Most layers, because some lists have an entry for each layer. Published networks have at most about 1,000."""
MAX_AXIS_DEVICES = 2**20
"""Most devices along a mesh axis; the largest machines have some 100,000."""
MAX_MICROBATCHES = 2**20
"""Most microbatches of a batch."""
MAX_SCHEDULE_FORWARDS = 2**19
"""Most forward passes of a pipeline schedule (stages times microbatches). Listing an action takes about 10 us."""
MAX_JSON_DEPTH = 64
"""Most levels of nested lists and objects in a JSON file; Python's stack holds about 1,000 calls."""
MAX_JSON_BYTES = 2**28
"""Most bytes of a JSON or CSV file: the largest tokenizer.json has 35 MB. Safetensors headers have another limit."""
MAX_LOCAL_PROCESSES = 1024
"""Most processes that a command starts on one machine."""
MAX_LOG_BYTES = 2**30
"""Most bytes of a metrics.jsonl or samples.txt that a report reads: about four million steps. A run may write more."""
MAX_LINE_BYTES = 2**24
"""Most bytes of a line of a log; a line usually has a few hundred bytes."""
MAX_RECORD_BYTES = 2**20
"""Most bytes of a heartbeat or another small record."""
MAX_NAME_BYTES = 255
"""Most bytes in the name of a file or folder on Linux and macOS."""

MAX_OF_FIELD = {
    **dict.fromkeys(("vocab", "context", "original_context", "image"), MAX_INT32),
    **dict.fromkeys(("embed", "heads", "kv_heads", "head_dim", "mlp", "classes", "channels", "width"), MAX_WIDTH),
    "layers": MAX_LAYERS,
    "patch": MAX_WIDTH,
}
"""Largest value of each size of a model, by the name of the field."""


def check_at_most(name: str, count: int, maximum: int) -> None:
    """Raise UserError if a count exceeds its bound.

    Example:
        >>> check_at_most("layers", 10**9, MAX_LAYERS)
        Traceback (most recent call last):
        jaxscale.errors.UserError: layers: got 1,000,000,000, expected at most 65,536
    """
    if count > maximum:
        raise UserError(f"{name}: got {count:,}, expected at most {maximum:,}")
