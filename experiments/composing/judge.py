"""The verdict on a combination: it equals its twins, it is refused for a reason, or it is a fault."""

import dataclasses
import traceback
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from composing.draws import Draw, draw
from composing.pairs import drawn, key
from composing.twins import Trained, asynchronous, lossy_changes, lower, plain_twin, train

from jaxscale.errors import UserError
from jaxscale.sharding.mesh import MeshSpec
from jaxscale.step.combinations import Incompatible

Outcome = Literal["equal", "refused", "wrong", "crashed", "hung"]

EXACT = 2e-5
"""Relative difference that the order of float32 sums may make."""
ROUNDING = {
    "precision=bfloat16": (1.4e-3, 1.0e-2, 4.6e-3, 2.7e-2),
    "matmul=fp8": (3.9e-2, 1.8e-1, 1.1e-2, 9.9e-2),
    "matmul=int8": (5.8e-3, 3.2e-2, 3.8e-3, 5.5e-2),
    "matmul=int4": (5.1e-2, 5.7e-1, 3.8e-2, 4.7e-1),
}
"""Largest relative difference of loss and norm, of the first step and the second, that each type shows alone beside
float32: 12 batches of 1 and 3 rows, SGD and AdamW. A combination may differ by twice as much."""
CODING = {
    "reduce=int8": (1.8e-07, 1.7e-04, 3.2e-04, 3.6e-03),
    "reduce=int4": (1.8e-07, 3.6e-03, 7.7e-04, 1.3e-02),
    "reduce=onebit": (1.8e-07, 1.3e-03, 3.2e-03, 1.3e-02),
    "reduce=qsgd:4bit": (1.8e-07, 6.1e-03, 2.0e-03, 3.1e-02),
    "reduce=qsgd:8bit": (1.8e-07, 5.3e-04, 4.7e-04, 6.6e-03),
    "reduce=topk:0.05": (1.8e-07, 8.6e-03, 1.2e-03, 2.9e-02),
    "reduce=topk:0.25": (1.8e-07, 4.4e-03, 6.4e-04, 1.4e-02),
    "reduce=dgc:0.05": (1.8e-07, 8.6e-03, 1.2e-03, 1.1e-02),
    "reduce=dgc:0.25": (1.8e-07, 4.4e-03, 6.4e-04, 1.1e-02),
    "reduce=powersgd:1": (1.8e-07, 2.1e-01, 1.0e-02, 1.8e-01),
    "reduce=powersgd:4": (1.8e-07, 1.9e-01, 1.4e-02, 9.5e-02),
}
"""The same of techniques that round the numbers of a block together, from layout to layout, for a block ends where a
shard does: `composition.py --tolerances`."""
CODED = ("reduce", "state", "master")
"""Fields of such techniques. A value that the table lacks may differ by three times what it changes alone."""
CONDITIONING = 10.0
"""What rounding changes in one program it may change so many times over in another."""


@dataclasses.dataclass(frozen=True)
class Comparison:
    """One figure of a combination beside a twin's.

    Args:
        what: the figure, and whose it is compared with.
        value: the combination's.
        twin: the twin's.
        tolerance: largest relative difference allowed.
    """

    what: str
    value: float
    twin: float
    tolerance: float

    @property
    def difference(self) -> float:
        """Relative."""
        return relative(self.value, self.twin)

    @property
    def holds(self) -> bool:
        """Whether the difference is within the tolerance; not a number never is."""
        return self.difference <= self.tolerance

    def __str__(self) -> str:
        return (
            f"{self.what}: {self.value:.7g} and {self.twin:.7g}, off by {self.difference:.1e} of {self.tolerance:.1e}"
        )


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What became of a combination.

    Args:
        outcome: "equal" is a success, "refused" one if its reason is true; all others are faults.
        reason: of a refusal or a fault.
        compile_seconds: of the combination.
        run_seconds: likewise, of two steps.
        worst: largest difference, as a share of its tolerance.
        by_rule: it is refused by a row of `step/combinations.py`; otherwise for a value, such as a budget too small.
    """

    outcome: Outcome
    reason: str = ""
    compile_seconds: float = 0.0
    run_seconds: float = 0.0
    worst: float = 0.0
    by_rule: bool = False


def relative(value: float, twin: float) -> float:
    """Difference relative to the twin."""
    return abs(value - twin) / max(abs(twin), 1e-30)


def named(task: Mapping[str, Any]) -> tuple[str, Draw]:
    """The name and the combination of a task of `composition.py`: a draw's number, or a pair's two labels."""
    if "pair" in task:
        i, j = task["pair"]
        return key(i, j), drawn(i, j)
    seed, number = task["draw"]
    return str(number), draw(seed, number)


def verdict_on(task: Mapping[str, Any]) -> dict[str, Any]:
    """The verdict on a task of `composition.py`, as JSON."""
    name, one = named(task)
    verdict = judge(one, task.get("lower"))
    return {"name": name, **dataclasses.asdict(verdict), "draw": str(one)}


def judge(one: Draw, platform: str | None = None) -> Verdict:
    """Train a combination and its twins, and compare them.

    Args:
        one: the combination.
        platform: lower it for devices that are not here, such as "tpu v5e:2x4", in place of training it.
    """
    try:
        if platform is not None:
            return Verdict("equal", compile_seconds=lower(one, platform))
        trained = train(one, one.plan)
    except UserError as error:
        return Verdict("refused", str(error), by_rule=isinstance(error, Incompatible))
    except Exception as error:  # a fault of whatever kind is the finding
        where = traceback.extract_tb(error.__traceback__)
        ours = [frame for frame in where if "jaxscale" in frame.filename and "composing" not in frame.filename]
        place = f" ({ours[-1].filename.rpartition('jaxscale/')[2]}:{ours[-1].lineno})" if ours else ""
        return Verdict("crashed", f"{type(error).__name__}{place}: {str(error)[:600]}")
    comparisons = list(compare(one, trained))
    worst = max(figure.difference / figure.tolerance for figure in comparisons)
    failures = [str(figure) for figure in comparisons if not figure.holds]
    if failures:
        return Verdict("wrong", "; ".join(failures), trained.compile_seconds, trained.run_seconds, worst)
    return Verdict("equal", "", trained.compile_seconds, trained.run_seconds, worst)


def rounding(one: Draw) -> tuple[float, ...]:
    """What the types that a combination computes in may change, and its codes, added up: the tables' four figures."""
    names = [row_name(choice) for choice in one.plan.items()]
    shown = [(ROUNDING | (CODING if recoded(one) else {})).get(name, (0.0,) * 4) for name in names]
    later = 3 if asynchronous(one) else 1  # more steps come before the two that are compared
    return tuple(2 * later * sum(figures) for figures in zip(*shown, strict=True))


def recoded(one: Draw) -> bool:
    """Whether blocks of codes end elsewhere than in the twin."""
    mesh = MeshSpec.parse(one.plan["mesh"])
    return mesh.devices > mesh.replica or "pipeline" in one.plan


def row_name(choice: tuple[str, str]) -> str:
    """The row of the tables for a field's value, such as "reduce=qsgd:4bit": without what follows a comma."""
    field, text = choice
    return f"{field}={text.partition(',')[0]}"


def compare(one: Draw, trained: Trained) -> Iterator[Comparison]:
    """Figures of a combination beside those of its twins."""
    lossy = lossy_changes(one)
    twin = train(one, lossy)
    nudged = train(one, lossy, nudged=True)
    slack = [EXACT + share for share in rounding(one)]
    plain = twin
    if not asynchronous(one):
        plain = twin if lossy == {"mesh": "1"} else train(plain_twin(one), {"mesh": "1"})
        yield Comparison("first loss, plain twin", trained.losses[0], plain.losses[0], slack[0])
        if not set(lossy) - {"mesh", "precision", "matmul"} and not one.optimizer["name"].startswith("one_bit"):
            yield Comparison("first norm, plain twin", trained.norms[0], plain.norms[0], slack[1])
    unmeasured = [name for name in CODED if name in lossy and row_name((name, lossy[name])) not in CODING]
    layout = recoded(one) and (unmeasured or one.optimizer["name"].startswith("one_bit"))
    if layout and asynchronous(one):
        plain = train(one, {name: text for name, text in lossy.items() if name not in CODED})
    for number, name in enumerate(("first", "second")):
        for what, figures in enumerate(("losses", "norms")):
            value, of_twin, of_nudged, of_plain = (
                getattr(each, figures)[number] for each in (trained, twin, nudged, plain)
            )
            tolerance = slack[2 * number + what] + CONDITIONING * relative(of_nudged, of_twin)
            tolerance += 3 * relative(of_plain, of_twin) if layout else 0.0
            yield Comparison(f"{name} {figures[:-1]}, lossy twin", value, of_twin, tolerance)
