"""Random combinations of techniques, each trained two steps beside its plain twin.

python experiments/composition.py --seed S --draws N       each draw with its verdict, compile and run seconds
python experiments/composition.py --seed S --only 17       one of them again
"""

import argparse
import collections
import dataclasses
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

FLAGS = " ".join(
    [
        "--xla_force_host_platform_device_count=8 --xla_disable_hlo_passes=all-reduce-promotion",
        "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1",
        *(["--xla_cpu_use_fusion_emitters=false"] if version("jaxlib") < "0.11" else []),
    ]
)
"""Eight virtual devices; code of the first level, which is three times faster to compile."""


def main() -> None:
    """Judge each draw in a child process, which may crash or hang."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="of the draws")
    parser.add_argument("--draws", type=int, default=40, help="how many")
    parser.add_argument("--only", type=int, nargs="+", help="numbers of draws")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds after which a draw counts as hung")
    parser.add_argument("-o", "--out", type=Path, help="a file for the verdicts, a JSON object a line")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        return child()
    numbers = arguments.only or range(arguments.draws)
    counts: collections.Counter[str] = collections.Counter()
    out = arguments.out.open("a") if arguments.out else None
    judge = Children(arguments.timeout)
    for number in numbers:
        verdict = judge(arguments.seed, number)
        counts[verdict["outcome"]] += 1
        print(
            f"{number:4} {verdict['outcome']:8} compile {verdict['compile_seconds']:5.1f} s, run "
            f"{verdict['run_seconds']:5.1f} s, {verdict['worst']:5.2f} of the tolerance  {verdict['draw']}",
            flush=True,
        )
        if verdict["reason"]:
            print(f"     {verdict['reason']}", flush=True)
        if out:
            print(json.dumps({"seed": arguments.seed, "number": number, **verdict}), file=out, flush=True)
    judge.close()
    print(json.dumps({"seed": arguments.seed, "draws": len(list(numbers)), **counts}))
    return None


class Children:
    """A process that judges draws, started again after a crash, a hang, and a number of draws."""

    def __init__(self, timeout: float, recycle: int = 20) -> None:
        self.timeout, self.recycle = timeout, recycle
        self.process: subprocess.Popen[str] | None = None
        self.judged = 0

    def __call__(self, seed: int, number: int) -> dict[str, Any]:
        """The verdict on a draw."""
        if self.process is None or self.judged >= self.recycle:
            self.close()
            self._start()
        assert self.process is not None
        assert self.process.stdin is not None
        self.judged += 1
        start = time.perf_counter()
        print(json.dumps([seed, number]), file=self.process.stdin, flush=True)
        try:
            line = self.lines.get(timeout=self.timeout)
        except queue.Empty:
            line = None
        if line:
            return json.loads(line)
        outcome = "hung" if line is None else "crashed"
        seconds = time.perf_counter() - start
        self.close()
        from composing.draws import draw

        return {
            "outcome": outcome,
            "reason": f"the process was {'killed' if line is None else 'lost'} after {seconds:.0f} s",
            "compile_seconds": 0.0,
            "run_seconds": 0.0,
            "worst": 0.0,
            "draw": str(draw(seed, number)),
        }

    def _start(self) -> None:
        environment = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": FLAGS, **os.environ}
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--child"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
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


def child() -> None:
    """Judge draws whose seed and number stand on standard input."""
    from composing.draws import draw
    from composing.judge import judge

    for line in sys.stdin:
        one = draw(*json.loads(line))
        print(json.dumps({**dataclasses.asdict(judge(one)), "draw": str(one)}), flush=True)


if __name__ == "__main__":
    main()
