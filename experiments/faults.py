"""Faults that are done to tiny runs on purpose, on virtual CPU devices.

    python experiments/faults.py                                all parts, with their full counts
    python experiments/faults.py --part kills --count 20        a piece: 20 kills
    python experiments/faults.py --part kills --only DiLoCo --seed 3
    python experiments/faults.py --part fuzz --only plan.json   a reader of files under Atheris (jaxscale[fuzz])

Each part runs in a process of its own. The seed changes every day and is printed; a case that fails prints the command
that repeats it, and the exit code is then 1. The last line is a JSON object. A kill takes 10 to 15 seconds on a busy
machine of two cores, twins included; a reader is fuzzed for up to 10 minutes.
"""

import argparse
import datetime
import importlib
import json
import subprocess
import sys
import time
from typing import Any

PARTS: dict[str, tuple[str, str, int, int]] = {
    "kills": ("kills", "run_kills", 200, 2),
    "files": ("damage", "run_damage", 600, 6),
    "disk": ("disk", "run_disk", 40, 3),
    "long": ("long_run", "run_long", 20_000, 2_000),
    "fuzz": ("fuzz", "run_fuzz", 100_000, 500),
    "values": ("values", "run_values", 10_000, 100),
    "steps": ("values", "run_steps", 300, 4),
    "commands": ("commands", "run_commands", 1000, 20),
}
"""Module in `fault_injection/`, function, full count and tiny count of each part."""


def main() -> int:
    """Run the parts, print a row for each case or group of cases, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=PARTS, action="append", help="one part; may be repeated")
    parser.add_argument("--count", type=int, help="kills, cases, steps or tries of the part")
    parser.add_argument("--seed", type=int, help="by default, the day as YYYYMMDD")
    parser.add_argument("--only", action="append", default=[], help="name of a subject or case; may be repeated")
    parser.add_argument("--tiny", action="store_true", help="a few cases of each part")
    arguments = parser.parse_args()
    seed = int(datetime.date.today().strftime("%Y%m%d")) if arguments.seed is None else arguments.seed
    parts = arguments.part or list(PARTS)
    if len(parts) > 1:
        return _run_in_processes(parts, seed, arguments)
    summary = run_part(parts[0], seed, arguments)
    print(json.dumps({name: value for name, value in summary.items() if name != "rows"}))
    return int(summary["faults"] > 0)


def run_part(part: str, seed: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Run one part in this process, and return its counts and rows."""
    module, function, full_count, tiny_count = PARTS[part]
    count = arguments.count or (tiny_count if arguments.tiny else full_count)
    summary: dict[str, Any] = {"part": part, "seed": seed, "tried": 0, "faults": 0, "rows": []}
    print(f"{part}: {count:,}, seed {seed}", flush=True)
    run = getattr(importlib.import_module(f"fault_injection.{module}"), function)
    start_time = time.monotonic()
    rows: list[dict[str, Any]] = []
    for row in run(count, seed, arguments.only) if arguments.only else run(count, seed):
        rows.append(row)
        print(f"{'    ' if row['is_sound'] else 'FAIL'} {row['name']}: {row['outcome']}  {row['detail']}", flush=True)
        if not row["is_sound"]:
            replay = row.get("replay", f"--part {part} --count {count} --seed {seed}")
            print(f"     again: python experiments/faults.py {replay}", flush=True)
    tried_count = sum(row.get("tried", 1) for row in rows)
    faults = sum(not row["is_sound"] for row in rows)
    seconds = round(time.monotonic() - start_time, 1)
    return {**summary, "tried": tried_count, "faults": faults, "seconds": seconds, "rows": rows}


def _run_in_processes(parts: list[str], seed: int, arguments: argparse.Namespace) -> int:
    """Run each part in a process of its own, so that none can harm another, and return the exit code."""
    summaries = []
    for part in parts:
        words = [sys.executable, __file__, "--part", part, "--seed", str(seed)]
        words += ["--tiny"] if arguments.tiny else []
        words += ["--count", str(arguments.count)] if arguments.count else []
        with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            line = ""
            for line in process.stdout:
                if not line.startswith("{"):
                    print(line, end="", flush=True)
        if line.startswith("{") and process.returncode in (0, 1):
            summaries.append(json.loads(line))
        else:
            print(f"FAIL {part}: the process ended with {process.returncode}", flush=True)
            summaries.append({"part": part, "seed": seed, "tried": 0, "faults": 1, "code": process.returncode})
    print(json.dumps({summary["part"]: summary for summary in summaries}))
    return int(any(summary["faults"] for summary in summaries))


if __name__ == "__main__":
    sys.exit(main())
