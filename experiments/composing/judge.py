"""The verdict on a combination: it equals its twins, it is refused for a reason, or it is a fault."""

import dataclasses
import traceback
from collections.abc import Mapping
from typing import Any, Literal

from composing.comparing import compare
from composing.draws import Draw, draw
from composing.pairs import combination, key
from composing.twins import built, lower, train

from jaxscale.errors import UserError
from jaxscale.recipe.combinations import Incompatible

Outcome = Literal["equal", "lowered", "refused", "invalid", "wrong", "crashed", "hung"]


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What became of a combination.

    Args:
        outcome: "equal" and "lowered" are successes, "refused" is one if its reason is true: a row of
            `recipe/combinations.py` refuses it before anything is traced. All others are faults; "invalid" is
            one of the draw: a value that means nothing there, such as a budget too small.
        reason: of a refusal or a fault.
        compile_seconds: of the combination.
        run_seconds: likewise, of its steps.
        worst: largest difference, as a share of its tolerance.
    """

    outcome: Outcome
    reason: str = ""
    compile_seconds: float = 0.0
    run_seconds: float = 0.0
    worst: float = 0.0


def combination_of(task: Mapping[str, Any]) -> tuple[str, Draw]:
    """The name and the combination of a task of `composition.py`: a draw's number, or a pair's two labels."""
    if "pair" in task:
        i, j = task["pair"]
        return key(i, j), combination(i, j)
    seed, number = task["draw"]
    return str(number), draw(seed, number)


def verdict_on(task: Mapping[str, Any]) -> dict[str, Any]:
    """The verdict on a task of `composition.py`, as JSON."""
    name, one = combination_of(task)
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
            return Verdict("lowered", compile_seconds=lower(one, platform))
        built(one)
    except Incompatible as refusal:
        return Verdict("refused", str(refusal))
    except UserError as error:
        return Verdict("invalid", str(error))
    except Exception as error:  # a fault of whatever kind is the finding
        return Verdict("crashed", _place_of(error))
    try:
        trained = train(one, one.plan)
    except Exception as error:
        return Verdict("crashed", _place_of(error))
    comparisons = compare(one, trained)
    worst = max(figure.difference / figure.tolerance for figure in comparisons)
    failures = [str(figure) for figure in comparisons if not figure.holds]
    outcome = "wrong" if failures else "equal"
    return Verdict(outcome, "; ".join(failures), trained.compile_seconds, trained.run_seconds, worst)


def _place_of(error: Exception) -> str:
    """An error, and the last line of ours that it passed."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if "jaxscale" in frame.filename and "composing" not in frame.filename]
    place = f" ({ours[-1].filename.rpartition('jaxscale/')[2]}:{ours[-1].lineno})" if ours else ""
    return f"{type(error).__name__}{place}: {str(error)[:600]}"
