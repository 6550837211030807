"""The rules that decide whether and when another attempt of a run starts after one has ended."""

import dataclasses
from collections.abc import Sequence

from jaxscale.errors import DIVERGED, DONE, GAVE_UP, MISTAKE, SKIPPED, STOP_CODES
from jaxscale.records.attempts import Attempt

FIRST_DELAY, LONGEST_DELAY = 1.0, 300.0  # seconds before the next attempt
SAME_STEP_LIMIT, NO_PROGRESS_LIMIT = 3, 5
FINAL_CODES = (DONE, MISTAKE, DIVERGED, GAVE_UP, SKIPPED)
"""Exit codes after which another attempt would end in the same way."""


@dataclasses.dataclass(frozen=True)
class NextStep:
    """The decision after an attempt: start another attempt, or end the launch.

    Args:
        code: exit code of the launch; `None` if another attempt starts.
        delay: seconds before that attempt.
        reason: why the launch gives up; "" if another attempt starts, or if the exit code is final.
    """

    code: int | None
    delay: float = 0.0
    reason: str = ""


def decide(attempts: Sequence[Attempt]) -> NextStep:
    """Return whether and when another attempt follows the last attempt of a launch.

    A run that was stopped by a signal is started again, and the stop does not count as a failure. A finished run (even
    with many skipped steps), a user's mistake and a diverged loss are final. Other failures count: the launch ends with
    code 5 after three failures in a row at the same step, or after five failures in a row that got no further than an
    earlier attempt. The delay doubles with each failure without progress.

    Args:
        attempts: the attempts of the launch, at least one.

    Example:
        >>> decide([Attempt(1, "a", 137, 40), Attempt(2, "a", 75, 60)]).delay
        1.0
        >>> decide([Attempt(n, "a", 1, 7) for n in (1, 2, 3)])
        NextStep(code=5, delay=0.0, reason='three attempts in a row failed at step 7')
    """
    code = attempts[-1].code
    if code in FINAL_CODES:
        return NextStep(code)
    if code in STOP_CODES:
        return NextStep(None, FIRST_DELAY)
    failed_attempts = [attempt for attempt in attempts if attempt.code not in STOP_CODES]
    last_steps = [attempt.step for attempt in failed_attempts[-SAME_STEP_LIMIT:]]
    if len(last_steps) == SAME_STEP_LIMIT and len(set(last_steps)) == 1:
        place_text = f"at step {last_steps[0]}" if last_steps[0] else "before the first step"
        return NextStep(GAVE_UP, reason=f"three attempts in a row failed {place_text}")
    farthest_step, idle_count = 0, 0
    for attempt in failed_attempts:
        idle_count = 0 if attempt.step > farthest_step else idle_count + 1
        farthest_step = max(farthest_step, attempt.step)
    if idle_count >= NO_PROGRESS_LIMIT:
        return NextStep(GAVE_UP, reason=f"five attempts in a row failed without getting beyond step {farthest_step}")
    return NextStep(None, min(FIRST_DELAY * 2.0 ** max(idle_count - 1, 0), LONGEST_DELAY))
