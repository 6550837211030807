"""Plans that the search chose, beside rivals that were fixed before it: bytes and seconds by the compiler.

    python experiments/benchmarks/plan_rivals.py --record     # search and compile; needs the extra aot-tpu
    python experiments/benchmarks/plan_rivals.py              # judge what was recorded
    python experiments/benchmarks/plan_rivals.py --tiny       # judge the first pair

`plan_rivals.json` names six pairs of a model and a TPU slice, and four plans for each that somebody with experience
might write. They were committed before any of these searches was run. A choice is compiled until it fits, at most three
times. Seconds are those of libtpu's schedule: the cycles that it estimates, kernels by their declared FLOP, collectives
by their bytes and links. No chip was timed. Plans that do not fit have no say.
"""

import argparse
import dataclasses
import itertools
import json
import math
from pathlib import Path
from typing import Any

from figures import Figure, show

import jaxscale as jx
from jaxscale.compiler.compile import compile_report
from jaxscale.compiler.report import CompileReport
from jaxscale.compiler.usable import usable_bytes
from jaxscale.planning.program import step_recipe
from jaxscale.planning.search.choice import plan_summary
from jaxscale.planning.search.compiler_seconds import compiler_seconds
from jaxscale.planning.search.step_seconds import StepSeconds, modeled_seconds
from jaxscale.planning.search.verification import NEAR_SHARE

FOLDER = Path(__file__).parent
PAIRS = FOLDER / "plan_rivals.json"
RECORDING = FOLDER / "plan_rivals.jsonl"
VERIFY = 2
"""Number of plans of a search that are compiled; one of them may be compiled with two sets of options."""
MAX_PROGRAMS = 3
"""Number of programs within which one must fit."""
FASTER = 0.05
"""Share by which a rival may be faster than the choice."""
Row = dict[str, Any]


def row_of(
    pair: Row,
    plan: jx.Plan,
    modeled: StepSeconds,
    report: CompileReport,
    clocked: StepSeconds | None,
    rival: int | None,
) -> Row:
    """Return what is recorded of a compiled plan; `rival` is `None` if the search compiled it, otherwise its number."""
    platform = jx.Platform.parse(pair["platform"])
    limit = usable_bytes(platform)
    return {
        "pair": name_of(pair),
        "plan": plan_summary(plan),
        "fits": report.oom is None and report.crashed is None and report.fits(limit or 0),
        "bytes": report.device_bytes,
        "modeled": modeled.total,
        "modeled_items": dict(modeled.items),
        "clocked": None if clocked is None else clocked.total,
        "clocked_items": None if clocked is None else dict(clocked.items),
        "flop": report.flop,
        "failure": report.crashed,
        "versions": dict(report.versions),
        "rival": rival,
    }


def name_of(pair: Row) -> str:
    """Return the name of a pair of model and platform."""
    return f"{pair.get('variant', Path(pair['file']).stem)} on {pair['platform']}"


def recorded() -> list[Row]:
    """Return what was recorded so far."""
    return [json.loads(line) for line in RECORDING.read_text().splitlines()] if RECORDING.exists() else []


def write(row: Row) -> None:
    """Append a row to the recording."""
    with RECORDING.open("a") as file:
        file.write(json.dumps(row) + "\n")
    seconds_text = "no seconds" if row["clocked"] is None else f"{row['clocked']:.3f} s"
    print(f"{row['pair']}: {row['plan']}: fits {row['fits']}, {seconds_text}", flush=True)


def record(word: str) -> None:
    """Search and compile what was not recorded yet, of the pairs with a word in their name."""
    for pair in json.loads(PAIRS.read_text()):
        if word not in name_of(pair):
            continue
        rows = [row for row in recorded() if row["pair"] == name_of(pair)]
        path, platform = FOLDER.parent / pair["file"], jx.Platform.parse(pair["platform"])
        experiment, source = jx.load_file(str(path), pair.get("variant"), {"batch": str(pair["batch"])})
        if not any(row["rival"] is None for row in rows):
            choice = jx.choose_plan(experiment, platform, verify=VERIFY, make=source.remake)
            outcome = choice.outcome
            compiled = [judged for judged in (*outcome.plans, *outcome.rejected) if judged.report is not None]
            for judged in compiled:
                assert judged.report is not None
                write(row_of(pair, judged.plan, judged.seconds, judged.report, judged.compiler_seconds, rival=None))
        for number, fields in enumerate(pair["rivals"]):
            if any(row["rival"] == number for row in rows):
                continue
            plan = dataclasses.replace(experiment.plan, **fields)
            report = compile_report(step_recipe(experiment, plan, source.remake), platform)
            clocked = compiler_seconds(report.schedule, plan, platform)
            modeled = modeled_seconds(experiment, platform, plan)
            write(row_of(pair, plan, modeled, report, clocked, rival=number))


def _order(row: Row) -> tuple[bool, float]:
    """Return the key by which plans are sorted: those that fit, by the compiler's clock."""
    return not row["fits"], row["clocked"] or math.inf


def main() -> bool:
    """Record or judge; return whether every figure reaches its bar."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", action="store_true", help="search, and compile what was not recorded yet")
    parser.add_argument("--pair", default="", help="with --record: a word in the names of the pairs to record")
    parser.add_argument("--tiny", action="store_true", help="judge the first pair")
    arguments = parser.parse_args()
    if arguments.record:
        record(arguments.pair)
        return True
    rows = recorded()
    names = list(dict.fromkeys(row["pair"] for row in rows))[: 1 if arguments.tiny else None]
    pair_count = same_order_count = 0  # of plans of one pair that differ by more than `FASTER` by the compiler
    figures = [Figure("pairs", len(names), "pairs", None if arguments.tiny else 6, ">=")]
    for name in names:
        group = [row for row in rows if row["pair"] == name]
        searched = [row for row in group if row["rival"] is None]
        fastest = min((row["modeled"] for row in searched if row["fits"]), default=math.inf)
        near = [
            row for row in searched if row["modeled"] <= (1 + NEAR_SHARE) * fastest
        ]  # the clock decides among these
        choice = min(near, key=_order)
        print(f"\n{name}{'':20}GiB   modeled   by the compiler")
        for row in sorted(group, key=_order):
            mark = "choice" if row is choice else "search" if row["rival"] is None else "rival"
            gib_text = f"{row['bytes'] / 2**30:6.1f}" if row["bytes"] else "     -"
            clocked_text = "does not fit" if not row["fits"] else f"{row['clocked']:.3f} s"
            print(f"  {mark:7}{row['plan'][:70]:70}{gib_text}{row['modeled']:9.3f} s   {clocked_text}")
        rivals = [row["clocked"] for row in group if row["rival"] is not None and row["fits"]]
        label = name.replace(" ", "_")
        figures.append(Figure(f"{label}_fits", float(choice["fits"]), "", 1, ">="))
        figures.append(Figure(f"{label}_compiles", len(searched), "programs", MAX_PROGRAMS))
        timed = [(row["modeled"], row["clocked"]) for row in group if row["fits"] and row["clocked"]]
        for (modeled, clocked), (other_modeled, other_clocked) in itertools.combinations(timed, 2):
            if abs(clocked / other_clocked - 1) > FASTER:
                pair_count += 1
                same_order_count += (modeled < other_modeled) == (clocked < other_clocked)
        if rivals:
            figures.append(Figure(f"{label}_rival_faster_by", 1 - min(rivals) / choice["clocked"], "share", FASTER))
    figures += [
        Figure("pairs_of_plans_that_differ", pair_count, "pairs"),
        Figure("of_these_in_the_modeled_order", same_order_count, "pairs"),
    ]
    return show(figures, "choices of the search beside fixed rivals")


if __name__ == "__main__":
    raise SystemExit(0 if main() else 1)
