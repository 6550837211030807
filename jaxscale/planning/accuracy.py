"""How far estimates have been off, and the factors that were fitted: from `accuracy.json`, which
`experiments/benchmarks/fit_accuracy.py --write` writes.
"""

import dataclasses
import functools
import json
from pathlib import Path

FILE = Path(__file__).with_name("accuracy.json")

PIPELINED_FILE = Path(__file__).with_name("accuracy_pipelined.json")
"""The same of pipelined steps, by kind of platform: `experiments/benchmarks/pipeline_fit.py --write`."""

MARGIN = 0.15
"""An estimate nearer to the limit than this share of it is too close to call, and worth measuring."""

NEARER_MARGIN = 0.12
"""The same where the piece of the step that decides was compiled."""

UNKNOWN_MARGIN = 0.3
"""The same of pipelined steps, where fewer than `ENOUGH` were compiled for that kind of platform."""

ENOUGH = 5
"""Compiled pipelined programs of a kind of platform that make the margin of its others good for them too."""


@dataclasses.dataclass(frozen=True)
class Factors:
    """What was fitted to compiled programs of one kind of platform.

    Args:
        packing: bytes that a compiler takes for what lives within a step, by the bytes that are alive at once.
        gather: share of a gathered weight that is there at a time.
    """

    packing: float = 1.0
    gather: float = 1.0


@dataclasses.dataclass(frozen=True)
class Accuracy:
    """How far the estimates of compiled programs were off.

    Args:
        programs: how many.
        median: of the distances, as a share of what the compiler said.
        worst: the largest.
        compiled: the piece that decides was compiled.
        pipelined: they have a pipeline.
    """

    programs: int
    median: float
    worst: float
    compiled: bool = False
    pipelined: bool = False

    def __str__(self) -> str:
        which = "pipelined " * self.pipelined
        how = " with the fullest piece compiled" if self.compiled else ""
        return (
            f"estimates{how} of {self.programs} compiled {which}train steps were off by {self.median:.0%} in the "
            f"median, {self.worst:.0%} at worst"
        )


@functools.cache
def _recorded() -> dict:
    found = json.loads(FILE.read_text()) if FILE.exists() else {}
    return found | {"pipelined": json.loads(PIPELINED_FILE.read_text()) if PIPELINED_FILE.exists() else {}}


def factors(kind: str) -> Factors:
    """The factors of a kind of platform: "tpu", "gpu" or "cpu"."""
    return Factors(**_recorded().get("factors", {}).get(kind, {}))


def recorded(kind: str, *, compiled: bool = False, pipelined: bool = False) -> Accuracy | None:
    """How far estimates for a kind of platform have been off; `None` where none was recorded.

    Args:
        kind: "tpu", "gpu" or "cpu".
        compiled: those for which the piece that decides was compiled.
        pipelined: those of pipelined steps.
    """
    which = "pipelined" if pipelined else "compiled" if compiled else "accuracy"
    found = _recorded().get(which, {}).get(kind)
    return None if found is None else Accuracy(**found, compiled=compiled, pipelined=pipelined)


def margin(kind: str, *, compiled: bool = False, pipelined: bool = False) -> float:
    """An estimate nearer to the limit than this share of it is too close to call.

    Args:
        kind: "tpu", "gpu" or "cpu".
        compiled: the piece that decides was compiled.
        pipelined: it is of a pipelined step.
    """
    if pipelined and ((known := recorded(kind, pipelined=True)) is None or known.programs < ENOUGH):
        return UNKNOWN_MARGIN
    return NEARER_MARGIN if compiled else MARGIN
