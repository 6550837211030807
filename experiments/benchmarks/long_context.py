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
import json
from collections.abc import Sequence
from typing import Any

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
    """Compile, print bytes, and check that they are linear."""
    from jaxscale.platforms.compile import compile_report

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--platform", action="append", help="may be repeated; 'tpu v5e:1x1' and 'gpu h200'")
    platforms = parser.parse_args().platform or ["tpu v5e:1x1", "gpu h200"]
    result: dict[str, Any] = {}
    for platform in platforms:
        rows = {}
        for length in LENGTHS:
            report = compile_report(functools.partial(gradient, length=length), platform, cache=False)
            if report.crashed or report.oom:
                raise SystemExit(f"{platform}, {length} positions: {report.crashed or report.oom}")
            rows[length] = {"temp": report.temp_bytes, "device": report.device_bytes}
            mib = {name: value / 2**20 for name, value in rows[length].items()}
            each = report.temp_bytes / length
            print(
                f"{platform:12} {length:7} positions: temp {mib['temp']:8.1f} MiB ({each:.0f} bytes each), "
                f"all {mib['device']:8.1f} MiB"
            )
        short, long = (rows[length]["device"] for length in LENGTHS[1:])
        if long > 4.5 * short:
            raise SystemExit(f"{platform}: {short} bytes for {LENGTHS[1]} positions and {long} for four times as many")
        result[platform] = rows
    print(json.dumps(result))


if __name__ == "__main__":
    main()
