"""Recorded errors of estimates, and fitted factors: from `accuracy.json`, which
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
"""The same if the piece of the step that needs the most memory was compiled."""

UNKNOWN_MARGIN = 0.3
"""The same for pipelined steps if fewer than `ENOUGH` were compiled for that kind of platform."""

ENOUGH = 5
"""Compiled pipelined programs of a kind of platform from which its usual margin applies to pipelined steps."""


@dataclasses.dataclass(frozen=True)
class Factors:
    """Factors fitted to compiled programs of one kind of platform.

    Args:
        packing: compiled bytes of temporaries, divided by the live bytes at the peak.
        gather: share of a gathered weight that is in memory at a time.
    """

    packing: float = 1.0
    gather: float = 1.0


@dataclasses.dataclass(frozen=True)
class Accuracy:
    """Errors of the estimates of compiled programs.

    Args:
        programs: number of programs.
        median: of the absolute errors, as a share of the compiled bytes.
        worst: the largest error.
        compiled: whether the piece that needs the most memory was compiled.
        pipelined: whether the programs have a pipeline.
    """

    programs: int
    median: float
    worst: float
    compiled: bool = False
    pipelined: bool = False

    def __str__(self) -> str:
        kind = "pipelined " * self.pipelined
        method = " with the fullest piece compiled" if self.compiled else ""
        return (
            f"estimates{method} of {self.programs} compiled {kind}train steps were off by {self.median:.0%} in the "
            f"median, {self.worst:.0%} at worst"
        )


@functools.cache
def _recorded() -> dict:
    accuracy = json.loads(FILE.read_text()) if FILE.exists() else {}
    return accuracy | {"pipelined": json.loads(PIPELINED_FILE.read_text()) if PIPELINED_FILE.exists() else {}}


def factors(kind: str) -> Factors:
    """The factors of a kind of platform: "tpu", "gpu" or "cpu"."""
    return Factors(**_recorded().get("factors", {}).get(kind, {}))


def recorded(kind: str, *, compiled: bool = False, pipelined: bool = False) -> Accuracy | None:
    """Errors of the estimates for a kind of platform; `None` if none are recorded.

    Args:
        kind: "tpu", "gpu" or "cpu".
        compiled: errors with the piece that needs the most memory compiled.
        pipelined: errors of pipelined steps.
    """
    section = "pipelined" if pipelined else "compiled" if compiled else "accuracy"
    fields = _recorded().get(section, {}).get(kind)
    return None if fields is None else Accuracy(**fields, compiled=compiled, pipelined=pipelined)


def margin(kind: str, *, compiled: bool = False, pipelined: bool = False) -> float:
    """Share of the limit: an estimate nearer to it than that is too close to call.

    Args:
        kind: "tpu", "gpu" or "cpu".
        compiled: whether the piece that needs the most memory was compiled.
        pipelined: whether the step is pipelined.
    """
    if pipelined and ((accuracy := recorded(kind, pipelined=True)) is None or accuracy.programs < ENOUGH):
        return UNKNOWN_MARGIN
    return NEARER_MARGIN if compiled else MARGIN
