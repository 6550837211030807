"""The watcher of a run's steps: a thread that ends a process whose step waits endlessly for its devices.

A collective waits until every device of its group has reached it. If a device never does, because a callback blocks or
the devices disagree on the order, the step never ends. XLA:CPU then aborts the process after its own time limit;
`training/backend.py` raises that limit so that this thread comes first. The thread reports the step and the step's
collectives.

Slow is not stuck. The time of a step is unknown before the first step has ended, so there is no limit until then. After
that, the limit is 30 s or 20 median steps, whichever is longer. The thread counts time only while the main thread is
inside of `heartbeat.awaiting`, which excludes evaluations, saves, callbacks, data and compilation. Time in which the
process is paused does not count either: a check counts for two seconds at most, however long ago the last check was.
With several processes, time counts only while all processes are in a step: if one of them evaluates, saves or is
paused, the other processes wait for it.
"""

import collections
import re
import statistics
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from jaxscale import heartbeat

LEAST_SECONDS = 30.0
MEDIAN_FACTOR = 20
LOOK_SECONDS = 1.0
_STEP_COUNT = 101
"""Number of the most recent steps over which the median is taken."""
_COLLECTIVE = re.compile(
    r" (?P<kind>all-reduce|all-gather|all-to-all|ragged-all-to-all|reduce-scatter|collective-permute"
    r"|collective-broadcast)(?:-start)?\(.*channel_id=(?P<channel>\d+)(?:.*op_name=\"(?P<name>[^\"]*)\")?"
)
_COMPILER_FILE = "/jax/_src/compiler.py"


class StuckWatch:
    """Watches the steps of one run, in a thread, while the context is open.

    Args:
        end_process: function that ends the process; its arguments are the number of the stuck step, the seconds that it
            has waited, and the limit in seconds.
        process_count: number of processes of the run.
        clock: function that returns the time in seconds.

    Example:
        >>> with StuckWatch(lambda step, seconds, limit: None) as watch:
        ...     watch.note_step()  # after the first step, which took no time here
        >>> watch.limit_seconds()
        30.0
    """

    def __init__(
        self,
        end_process: Callable[[int, float, float], None],
        process_count: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._end_process, self._process_count, self._clock = end_process, process_count, clock
        self._step_seconds: collections.deque[float] = collections.deque(maxlen=_STEP_COUNT)
        self._last_step_time = self._last_look_time = clock()
        self._last_step_and_wait_number: tuple[int, int] | None = None
        self._waited_seconds = 0.0
        self._beat_number_by_rank: dict[int, int] = {}  # number of the last heartbeat of each process, by rank
        self._stop_event = threading.Event()
        self._thread = threading.Thread(target=self._run, name="stuck steps", daemon=True)

    def __enter__(self) -> "StuckWatch":
        self._last_step_time = self._last_look_time = self._clock()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop_event.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def note_step(self) -> None:
        """Record that a step has ended."""
        now = self._clock()
        self._step_seconds.append(now - self._last_step_time)
        self._last_step_time = now

    def limit_seconds(self) -> float | None:
        """Return the seconds that a step may wait; `None` before the first step has ended."""
        if not self._step_seconds:
            return None
        return max(LEAST_SECONDS, MEDIAN_FACTOR * statistics.median(self._step_seconds))

    def look(self) -> None:
        """Check once whether the step is stuck; if it is, call the function that ends the process."""
        now = self._clock()
        counted_seconds, self._last_look_time = min(now - self._last_look_time, 2 * LOOK_SECONDS), now
        step_and_wait_number, limit_seconds = heartbeat.awaited_step(), self.limit_seconds()
        are_peers_in_step, are_peers_alive = self._look_at_peers()
        if (
            step_and_wait_number is None
            or step_and_wait_number != self._last_step_and_wait_number
            or limit_seconds is None
            or _is_compiling()
            or not are_peers_in_step
        ):
            self._last_step_and_wait_number, self._waited_seconds = step_and_wait_number, 0.0
            return
        self._waited_seconds += counted_seconds if are_peers_alive else 0.0
        if self._waited_seconds > limit_seconds:
            self._stop_event.set()
            self._end_process(step_and_wait_number[0], self._waited_seconds, limit_seconds)

    def _run(self) -> None:
        """Check once a second until the context ends, or the step is stuck."""
        while not self._stop_event.wait(LOOK_SECONDS):
            self.look()

    def _look_at_peers(self) -> tuple[bool, bool]:
        """Return whether all processes are in a step, and whether all have written a heartbeat since the last call."""
        if self._process_count == 1:
            return True, True
        peer_beats = heartbeat.peer_heartbeats()
        number_by_rank = {rank: beat.beat for rank, beat in peer_beats.items()}
        earlier_number_by_rank, self._beat_number_by_rank = self._beat_number_by_rank, number_by_rank
        are_all_in_step = len(peer_beats) >= self._process_count and all(
            beat.is_in_step for beat in peer_beats.values()
        )
        return are_all_in_step, all(number_by_rank[rank] != earlier_number_by_rank.get(rank) for rank in number_by_rank)


def _is_compiling() -> bool:
    """Return whether the main thread is compiling a program; a step may compile one for a meeting of replicas."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None:
        if frame.f_code.co_filename.endswith(_COMPILER_FILE):
            return True
        frame = frame.f_back
    return False


def collectives_by_channel(program: str) -> dict[str, str]:
    """Return, by channel, the kind and the origin of each collective of a compiled program.

    If XLA:CPU warns of a collective that may be stuck, it gives the channel as `op_id`.

    Args:
        program: `compiled.as_text()`.

    Example:
        >>> collectives_by_channel('%s = f32[2]{0} all-reduce(%x), channel_id=1, metadata={op_name="jit(f)/psum"}')
        {'1': 'all-reduce jit(f)/psum'}
    """
    matches = map(_COLLECTIVE.search, program.splitlines())
    return {match["channel"]: f"{match['kind']} {match['name'] or ''}".strip() for match in matches if match}


def collectives_text(program: str, mesh: Any) -> str:
    """Return the collectives of a compiled program as text, such as "all-reduce over data (3)", or "none"."""
    from jaxscale.compiler.collectives import collectives

    count_by_text: collections.Counter[str] = collections.Counter()
    for collective in collectives(program, mesh):
        axes_text = "" if collective.axes is None else f" over {', '.join(collective.axes)}"
        count_by_text[f"{collective.kind}{axes_text}"] += 1
    return ", ".join(f"{text} ({count})" for text, count in count_by_text.most_common()) or "none"
