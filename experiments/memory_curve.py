"""The curve of time against memory of one block: every way to choose what the backward pass keeps, in one table.

    python experiments/memory_curve.py [--tiny] [-o memory_curve.svg]

A block of a Llama of 1B parameters (D 2048, F 5632, 16 and 8 heads, 2 x 2048 tokens, bfloat16, plain attention), 16 of
them, on a v5p: what is kept on the device against the modelled seconds that the backward pass takes longer. Nothing is
compiled and no device is needed. It gives

    MiB kept on the device a layer            8     16     72    129    242    488    960   1904
    save, the optimal save set           +63.3% +29.9% +24.2% +20.2% +16.4% +11.0%  +4.1%  +0.0%
    chain, Rotor                         +50.2% +29.9% +24.6% +20.2% +15.8% +11.0%  +4.1%  +0.0%
    greedy                                    - +29.9% +24.9% +21.6% +17.0% +17.0%  +6.5%  +3.2%
    dtr_static                                - +29.9% +29.4% +26.1% +16.8% +16.4%  +6.2%  +3.2%
    offload:pofo                              - +26.2% +22.1% +17.5% +15.3% +10.8%  +3.9%  +0.0%
    offload:capuchin                          - +29.9% +25.2% +21.9% +17.3% +14.4% +14.4%  +0.0%
    offload:vdnn                              - +3216% +3136% +3057% +2841% +2783% +1628%  +0.0%
    offload:tflms                             - +3216% +3136% +3057% +2819% +2646% +2169%  +0.0%
    offload:autoswap                          - +3216% +3133% +3089% +2851% +2440% +1747%  +0.0%
    offload:swapadvisor                       - +3216% +3118% +3013% +2809% +2368% +1516%  +0.0%
    full (nothing_saveable)                   - +29.9% +29.9% +29.9% +29.9% +29.9% +29.9% +29.9%
    dots_with_no_batch_dims_saveable          -      -      -      - +19.7% +19.7% +19.7% +19.7%
    dots (dots_saveable)                      -      -      -      -      -      - +15.7% +15.7%
    none (everything_saveable)                -      -      -      -      -      -      -  +0.0%
    sqrt, periodic:4                          -      -      -      -      - +33.3% +33.3% +33.3%
    periodic:2                                -      -      -      -      - +33.3% +33.3% +33.3%
    revolve:4                                 -      -      - +56.3% +56.3% +56.3% +56.3% +56.3%

POFO's combination of keeping, recomputing and offloading is ahead wherever blocks' inputs fit, with 37 MiB a layer on
the host, which is what the host link moves while the block computes. The rules that only swap (vDNN, TFLMS, AutoSwap,
SwapAdvisor) move up to 1838 MiB a layer and add 7 to 32 times the time of the step: a v5p computes far faster than its
host link moves, and plain attention has scores to move.
"""

import argparse
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxscale import Context, Platform, menu
from jaxscale.memory import BlockGraph, collect
from jaxscale.models import Decoder

PLATFORM = Platform.parse("tpu v5p:2x2x1")
LAYERS = 16


def llama(tiny: bool) -> BlockGraph:
    """The block, on one device."""
    embed, mlp, length = (128, 384, 128) if tiny else (2048, 5632, 2048)
    config = Decoder(vocab=32, context=length, layers=2, embed=embed, heads=16, kv_heads=8, mlp=mlp)
    graphdef, state = nnx.split(nnx.eval_shape(lambda: config.build(nnx.Rngs(0)).blocks))
    params = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.bfloat16), nnx.to_pure_dict(state))
    x = jax.ShapeDtypeStruct((2, length, embed), jnp.bfloat16)

    def forward(params: Any, x: Any) -> Any:
        return nnx.merge(graphdef, params, copy=True)(x, context=Context(attention="plain"))

    [call] = collect(forward, params, x, chip=PLATFORM.chip)
    return call.graph


def main() -> None:
    """Choose, print, draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a small block")
    parser.add_argument("-o", "--output", type=Path, default=Path("memory_curve.svg"), help="where to draw")
    arguments = parser.parse_args()
    found = menu(llama(arguments.tiny), platform=PLATFORM, layers=LAYERS)
    print(found)
    found.write(arguments.output)
    print(f"drawn to {arguments.output}")


if __name__ == "__main__":
    main()
