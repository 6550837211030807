"""Seconds that the search for a plan takes, and the candidates and estimates that it makes.

    python experiments/benchmarks/plan_speed.py             # four models and machines
    python experiments/benchmarks/plan_speed.py --verify    # and compile each choice, which needs the extras aot
    python experiments/benchmarks/plan_speed.py --tiny      # one

Seconds are those of one process, imports left out; processor seconds stand beside them.
"""

import argparse
import time
from pathlib import Path

from figures import Figure, show

import jaxscale as jx
from jaxscale.planning.search.choice import plan_summary

EXPERIMENTS = Path(__file__).parents[1]
PAIRS = (
    ("llama_1b.py", "tpu v5e:4x4", 64),
    ("llama_8b.py", "tpu v5e:4x4", 64),
    ("llama_70b.py", "tpu v5p:4x8x8", 1024),
    ("llama_8b.py", "gpu h100 x 16", 128),
)
BAR = 25.0
"""Processor seconds for 70B on 256 chips."""


def main() -> bool:
    """Print the table, and return whether every figure reaches its bar."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="the first pair alone")
    parser.add_argument("--verify", action="store_true", help="compile each choice")
    arguments = parser.parse_args()
    figures = []
    for name, platform, batch in PAIRS[:1] if arguments.tiny else PAIRS:
        experiment, source = jx.load_file(str(EXPERIMENTS / name), None, {"batch": str(batch)})
        wall, processor = time.perf_counter(), time.process_time()
        choice = jx.choose_plan(experiment, platform)
        wall, processor = time.perf_counter() - wall, time.process_time() - processor
        print(
            f"{experiment.name} on {platform}: {plan_summary(choice.plan)}, {choice.outcome.candidate_count} candidates"
        )
        label = f"{experiment.name}_{platform.replace(' ', '_')}"
        figures += [
            Figure(f"{label}_processor_seconds", processor, "s", BAR if "70b" in name else None),
            Figure(f"{label}_wall_seconds", wall, "s"),
            Figure(f"{label}_candidates", choice.outcome.candidate_count, "plans"),
        ]
        if arguments.verify:
            verified = jx.choose_plan(experiment, platform, verify=3, make=source.remake)
            compiled = verified.outcome.rejected + verified.outcome.plans
            compile_count = sum(judged.report is not None for judged in compiled)
            error = verified.best.estimate.device_bytes / verified.best.device_bytes - 1
            figures += [
                Figure(f"{label}_fits_by_the_compiler", float(verified.fits), "", 1, ">="),
                Figure(f"{label}_compiled", compile_count, "plans"),
                Figure(f"{label}_estimate_error", error, "share"),
            ]
    return show(figures, "the search for a plan")


if __name__ == "__main__":
    raise SystemExit(0 if main() else 1)
