"""What the scripts of this folder that compare variants of one experiment share: options, a run of each, a table."""

import argparse
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from jaxscale import Experiment, Run, train

WIRE = "bytes a step     fewer"
"""Columns of `wire`."""


def compare(
    doc: str | None,
    variants: Mapping[str, Callable[[], Experiment]],
    columns: str,
    row: Callable[[Experiment, Run], str],
    shorten: Callable[[Experiment, int], Experiment] = lambda made, steps: made,
) -> None:
    """Train variants that the command line chooses, and print a line of each as it ends.

    Args:
        doc: the script's, shown by `--help`.
        variants: by name, in the order of the table.
        columns: heads of what stands behind the held-out loss.
        row: these columns, of a variant and its run.
        shorten: what fewer steps than a variant's own ask to be changed in it, besides.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000, help="of each; few show that it runs")
    parser.add_argument("--only", nargs="+", choices=list(variants), default=list(variants), metavar="VARIANT")
    parser.add_argument("-o", "--out", type=Path, help="where run directories go; nowhere by default")
    arguments = parser.parse_args()
    width = max(map(len, variants)) + 1
    print(f"{'':{width}} held-out loss  {columns}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for name in arguments.only:
            made = shorten(variants[name](), arguments.steps)
            run = train(made, steps=arguments.steps, out=(arguments.out or Path(folder)) / name, quiet=True)
            print(f"{name:{width}} {run.held_out_loss:13.4f} {row(made, run)}", flush=True)


def wire(made: Experiment, run: Run) -> str:
    """Bytes that a replica sends in a step, and how many times fewer than gradients in float32."""
    whole = 4 * next(row["parameters"] for row in run.events if row["name"] == "predicted")
    # of two devices each sends half of an all-reduce there and half back
    sent = run.metrics.column("wire_bytes").mean() if "wire_bytes" in run.metrics[0] else whole
    return f"{sent:13,.0f} {whole / sent:9.1f}"
