"""Bytes per parameter of optimizer states in few bits, read off programs compiled for TPU v5e and H100.

    python experiments/benchmarks/state_bytes.py [--tiny]

The layers of Llama 3 8B, stacked, over fsdp 16; gradients in bfloat16, weights in float32 or split. `state` is over
the quantized leaves; with embedding, head and norms, whose states stay float32, it is the last rows. `temporary` is
what the update needs beside its arguments. No program may hold a collective or a gather.

Measured 2026-11-22, JAX 0.12.0.1, libtpu 0.0.51 and the CUDA 13 compiler; bytes per parameter, every bar holds:

| update | state | temporary, v5e | temporary, H100 |
|---|---|---|---|
| adamw int8 | 2.032 | 0.064 | 0.023 |
| adamw dynamic8 | 2.032 | 0.058 | 0.078 |
| adamw fp8 | 2.032 | 0.064 | 0.022 |
| adamw int4 | 1.0625 | 0.075 | 0.078 |
| lion int8 | 1.016 | 0.031 | 0.011 |
| lion dynamic8 | 1.016 | 0.023 | 0.077 |
| adamw int8, split weights (7.032 with weights and gradient) | 2.032 | 0.062 | 0.026 |

States are alike on both, no program has a collective or a gather. Llama 3 8B whole, with what stays float32: 2.81 in 8
bits, 1.97 in 4.

On v5e that takes two forms of the same arithmetic, for `down`, whose shards of 896 rows have four blocks a layer (alone
of the leaves: the others have one). XLA for TPU does not fuse through a reshape of (layers, rows, columns) to (layers,
blocks, block, columns). Codes meet scales that are repeated to the array's shape; with the array reshaped int8 took
11.35 bytes. Scales, maxima over part of a dim, are taken of a rule that runs in blocks from the beginning
(`in_blocks.py`); with its result reshaped int8 took 2.16. (Both were measured before there was `in_blocks.py`.) Rules
that mix numbers (LAMB, Muon) keep that form. On H100 the array is reshaped: scales repeated cost 3.1 there (dynamic8,
two layers).
"""

import argparse

from figures import Figure, show
from update_program import LLAMA_8B, TINY, Stack, Update, compiled, described

BARS = {("adamw", 8): 2.04, ("adamw", 4): 1.07, ("lion", 8): 1.02, ("lion", 4): 0.54}
CASES = [
    *(("adamw", states) for states in ("int8", "dynamic8", "fp8", "int4")),
    *(("lion", states) for states in ("int8", "dynamic8")),
]
PLATFORMS = {"v5e": "tpu v5e:4x4", "h100": "gpu h100 x 16"}


def measure(platform: str, update: Update) -> list[Figure]:
    """Figures of one update on one platform."""
    found, bits = compiled(update, PLATFORMS[platform]), 4 if update.states == "int4" else 8
    name = f"{platform} {update.rule} {update.states}" + (" split" if update.weights == "split" else "")
    report, (bytes, numbers) = found.report, found.quantized
    assert report.argument_bytes is not None
    assert report.temp_bytes is not None
    total = report.argument_bytes / found.parameters
    weights = 2 if update.weights == "split" else 4
    assert abs(total - weights - 2 - found.state / found.parameters) < 0.01, (
        "the compiler holds another state than we do"
    )
    figures = [
        Figure(
            f"{name}: state",
            bytes / numbers * (1 if update.rule == "lion" else 2),
            "bytes/param",
            BARS[update.rule, bits],
        ),
        Figure(f"{name}: temporary", report.temp_bytes / found.parameters, "bytes/param", 0.3),
        Figure(f"{name}: collectives and gathers", len(report.collectives) + found.gathers, "operations", 0),
    ]
    if update.weights == "split":
        figures.append(Figure(f"{name}: weights + gradient + state", total, "bytes/param", 7.2))
    print(f"{name}: {', '.join(f'{figure.value:.4g}' for figure in figures)}", flush=True)
    return figures


def main() -> None:
    """Print the table; exit with 1 if a bar does not hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="one small update on each platform")
    parser.add_argument("--platform", choices=sorted(PLATFORMS), help="only this one")
    args = parser.parse_args()
    stack = TINY if args.tiny else LLAMA_8B
    cases = [Update(*case, stack=stack) for case in (CASES[:1] if args.tiny else CASES)]
    cases.append(Update("adamw", "int8", "split", stack))
    figures = [f for p in PLATFORMS if args.platform in (None, p) for case in cases for f in measure(p, case)]
    whole = Stack(vocab=128256)
    for states in ("float32", "int8", "int4"):
        parameters, _, state = described(Update("adamw", states, stack=whole))
        figures.append(Figure(f"whole Llama 3 8B, adamw {states}: state", state / parameters, "bytes/param"))
    if not show(figures, "Optimizer states, per parameter on a device") and not args.tiny:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
