"""Random combinations of techniques, each trained a few steps beside its twins.

    python experiments/composition.py --seed S --draws N       each draw with its verdict, compile and run seconds
    python experiments/composition.py --seed S --only 17       one of them again
    python experiments/composition.py --seed S --draws 40 --lower "tpu v5e:2x4"     lowered for absent devices
    python experiments/composition.py --pairs                  judges the pairs that composing/pairs.json lacks
    python experiments/composition.py --table                  prints the documentation's table of pairs
    python experiments/composition.py --tolerances             measures what few bits change from layout to layout

A draw takes 3 to 6 techniques from the fields of the plan and what these need: rows of 64 or 2,048 tokens with uneven
weights, 1 to 3 rows a device and microbatch, SGD with momentum and without clipping in half of them. It *equals* its
twins if loss and gradient norm of its first step and its last do (`composing/comparing.py` has the tolerances), or it
is *refused* by a rule before it is traced; what is *invalid*, *wrong*, *crashed* or *hung* is a fault, and the exit
code is then 1. On 8 virtual CPU devices; a draw takes 5 to 60 processor seconds.
"""

import argparse
import collections
import json
import os
import queue
import subprocess
import sys
import threading
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

DEVICES = "--xla_force_host_platform_device_count=8 --xla_disable_hlo_passes=all-reduce-promotion"
QUICK = "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1"
FLAGS = {
    True: DEVICES,
    False: f"{DEVICES} {QUICK}" + " --xla_cpu_use_fusion_emitters=false" * (version("jaxlib") < "0.11"),
}
"""Eight virtual devices. Long rows run optimized code, all others code that is three times faster to compile."""
SHORT = 64
"""Positions of a row that is not long."""
FAULTS = ("wrong", "invalid", "crashed", "hung")


def main() -> int:
    """Judge each draw or pair in a child process, which may crash or hang."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="of the draws")
    parser.add_argument("--draws", type=int, default=40, help="how many")
    parser.add_argument("--only", type=int, nargs="+", help="numbers of draws")
    parser.add_argument(
        "--lower", metavar="PLATFORM", help='lower for devices that are not here, such as "gpu h100 x 8"'
    )
    parser.add_argument("--pairs", action="store_true", help="judge pairs in place of draws, and record them")
    parser.add_argument("--table", action="store_true", help="print the documentation's table of the pairs recorded")
    parser.add_argument(
        "--tolerances", action="store_true", help="measure the figures of composing/tolerances.json; hours"
    )
    parser.add_argument("--part", default="0/1", metavar="I/N", help="every N-th draw, pair or row, from the I-th on")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds after which one counts as hung")
    parser.add_argument("-o", "--out", type=Path, help="a file for the verdicts, a JSON object a line")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        return child()
    index, count = map(int, arguments.part.split("/"))
    if arguments.tolerances:
        os.environ.update({"JAX_PLATFORMS": "cpu", "XLA_FLAGS": FLAGS[False], **os.environ})
        from composing.tolerances import TECHNIQUES, measure

        measure(TECHNIQUES[index::count])
        return 0
    from composing import pairs

    if arguments.table:
        print(pairs.table(pairs.read()))
        return 0
    tasks: list[dict[str, Any]]
    if arguments.pairs:
        tasks = [{"pair": pair} for pair in pairs.missing()]
    else:
        tasks = [{"draw": (arguments.seed, number)} for number in arguments.only or range(arguments.draws)]
    counts: collections.Counter[str] = collections.Counter()
    out = arguments.out.open("a") if arguments.out else None
    judge = Children(arguments.timeout)
    for task in tasks[index::count]:
        verdict = judge({**task, "lower": arguments.lower})
        counts[verdict["outcome"]] += 1
        print(
            f"{verdict['name']:>4} {verdict['outcome']:8} compile {verdict['compile_seconds']:5.1f} s, run "
            f"{verdict['run_seconds']:5.1f} s, {verdict['worst']:5.2f} of the tolerance  {verdict['draw']}",
            flush=True,
        )
        if verdict["reason"]:
            print(f"     {verdict['reason']}", flush=True)
        if out:
            print(json.dumps(verdict), file=out, flush=True)
        if arguments.pairs and verdict["outcome"] not in FAULTS:
            pairs.record(verdict["name"], verdict["reason"])
    judge.close()
    judged = len(tasks[index::count])
    share = round(counts["refused"] / max(judged, 1), 3)
    print(json.dumps({"seed": arguments.seed, "judged": judged, "refused share": share, **counts}))
    return int(any(counts[fault] for fault in FAULTS))


class Children:
    """A process that judges, started again after a crash, a hang, and a number of tasks."""

    def __init__(self, timeout: float, recycle: int = 20) -> None:
        self.timeout, self.recycle = timeout, recycle
        self.process: subprocess.Popen[str] | None = None
        self.judged, self.long = 0, False

    def __call__(self, task: dict[str, Any]) -> dict[str, Any]:
        """The verdict on a task."""
        from composing.judge import combination_of

        name, one = combination_of(task)
        long = one.length > SHORT
        if self.process is None or self.judged >= self.recycle or long != self.long:
            self.close()
            self._start(long)
        assert self.process is not None
        assert self.process.stdin is not None
        self.judged += 1
        start = time.perf_counter()
        print(json.dumps(task), file=self.process.stdin, flush=True)
        try:
            line = self.lines.get(timeout=self.timeout)
        except queue.Empty:
            line = None
        if line:
            return json.loads(line)
        outcome = "hung" if line is None else "crashed"
        seconds = time.perf_counter() - start
        self.close()
        reason = f"the process was {'killed' if line is None else 'lost'} after {seconds:.0f} s"
        figures = dict.fromkeys(("compile_seconds", "run_seconds", "worst"), 0.0)
        return {"name": name, "outcome": outcome, "reason": reason, **figures, "draw": str(one)}

    def _start(self, long: bool) -> None:
        self.long = long
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--child"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={"JAX_PLATFORMS": "cpu", "XLA_FLAGS": FLAGS[long], **os.environ},
        )
        self.judged = 0
        self.lines: queue.Queue[str] = queue.Queue()

        def read(process: Any, lines: Any) -> None:
            for line in process.stdout:
                if line.startswith("{"):
                    lines.put(line)
            lines.put("")

        threading.Thread(target=read, args=(self.process, self.lines), daemon=True).start()

    def close(self) -> None:
        """End the process."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None


def child() -> int:
    """Judge the tasks that stand on standard input, a JSON object a line."""
    from composing.judge import verdict_on

    for line in sys.stdin:
        print(json.dumps(verdict_on(json.loads(line))), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
