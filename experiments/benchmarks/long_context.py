"""Memory of attention and of its gradient up to 128k positions, on chips that are not here: linear in the length.

    python experiments/benchmarks/long_context.py                              # v5e and H200
    python experiments/benchmarks/long_context.py --platform "tpu v6e:1x1"

The gradient of causal attention by the kernel of the platform (16 query and 4 key heads of 128, bfloat16, one row) is
compiled; bytes are what the compiler says of temporary memory, arguments and results. For comparison, T x S scores of
16 heads in float32 would take 64 T^2 bytes: 1.1 TB at 128k.

JAX 0.10.2, libtpu 0.0.51 (2026-11-22), by the first command:

    positions         temporary MiB         all MiB
                      v5e      H200       v5e     H200
      8192              1        33        97      129
     32768            384       132       768      516
    131072           1792       528      3328     2064

On H200 that is 4,224 bytes a position: the output, kept for the backward, and two numbers per query and head. On v5e
what is moved to the kernel's order of dims comes on top; at 8k XLA finds room for it among the results.
"""

import argparse
import functools
from collections.abc import Sequence
from typing import Any

from figures import Figure, show

LENGTHS = (8192, 32768, 131072)
N, K, H = 16, 4, 128


def gradient(devices: Sequence[Any], length: int) -> Any:
    """The gradient of attention over a row of a length, lowered for the first device."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import AxisType, NamedSharding

    from pallas_kernels.attention.api import attention

    mesh = jax.make_mesh((1,), ("x",), axis_types=(AxisType.Auto,), devices=devices[:1])
    place = NamedSharding(mesh, jax.P())
    q, k = (jax.ShapeDtypeStruct((1, length, heads, H), jnp.bfloat16, sharding=place) for heads in (N, K))
    with jax.set_mesh(mesh):
        return jax.jit(jax.grad(lambda *x: attention(*x).astype(jnp.float32).sum(), (0, 1, 2))).lower(q, k, k)


def main() -> None:
    """Compile, show bytes, and hold them to the line from the second length to the third."""
    from jaxscale.compiler.compile import compile_report

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--platform", action="append", help="may be repeated; 'tpu v5e:1x1' and 'gpu h200'")
    parser.add_argument("--tiny", action="store_true", help="short rows, in plain JAX on the CPU: no compiler needed")
    asked = parser.parse_args()
    platforms = ["cpu x 1"] if asked.tiny else asked.platform or ["tpu v5e:1x1", "gpu h200"]
    lengths = (256, 1024, 4096) if asked.tiny else LENGTHS
    figures = []
    for platform in platforms:
        rows = []
        for length in lengths:
            report = compile_report(functools.partial(gradient, length=length), platform, cache=False)
            if report.crashed or report.oom:
                raise SystemExit(f"{platform}, {length} positions: {report.crashed or report.oom}")
            temp, whole = report.temp_bytes or 0, report.device_bytes or 0
            rows.append(whole)
            figures.append(Figure(f"{platform}, {length}: temporary", temp / 2**20, "MiB"))
            figures.append(Figure(f"{platform}, {length}: all", whole / 2**20, "MiB"))
        grown = rows[2] / rows[1]
        figures.append(Figure(f"{platform}: {lengths[2]} over {lengths[1]}", grown, "x", None if asked.tiny else 4.5))
    show(figures, "attention's gradient, one row of 16 heads of 128")


if __name__ == "__main__":
    main()
