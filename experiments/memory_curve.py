"""The curve of time against memory of one block: every way to choose what the backward pass keeps, in one table.

    python experiments/memory_curve.py [--tiny] [-o memory_curve.svg]

A block of a Llama of 1B parameters (D 2048, F 5632, 16 and 8 heads, 2 x 2048 tokens, bfloat16, plain attention), 16 of
them, on a v5p: what is kept on the device against the modelled seconds that the backward pass takes longer. Nothing is
compiled and no device is needed. It gives

    MiB kept on the device a layer            8     16     31     45     75    138    260    382    504
    save, the optimal save set           +62.2% +28.9% +27.1% +25.2% +21.9% +15.9%  +9.7%  +4.9%  +0.0%
    chain, Rotor                         +49.2% +28.9% +27.1% +25.2% +21.8% +15.6%  +9.1%  +4.5%  +0.0%
    greedy                                    - +28.9% +28.9% +25.3% +21.9% +16.8% +11.1% +11.1% +11.1%
    dtr_static                                - +28.9% +28.9% +27.2% +27.2% +22.6% +10.8% +10.8% +10.8%
    offload:pofo                              - +25.2% +24.4% +22.6% +19.4% +13.1%  +8.3%  +4.2%  +0.0%
    offload:capuchin                          - +27.1% +27.1% +24.7% +20.5% +16.2% +11.2% +11.2%  +0.0%
    offload:vdnn                              - +2241% +2241% +2241% +2138% +1997% +1997% +1997%  +0.0%
    offload:tflms                             - +2241% +2241% +2203% +2203% +1997% +1819% +1819%  +0.0%
    offload:autoswap                          - +2241% +2241% +2203% +2203% +2039% +1701% +1701%  +0.0%
    offload:swapadvisor                       - +2241% +2218% +2180% +2105% +1956% +1701% +1384% +1101%
    full (nothing_saveable)                   - +28.9% +28.9% +28.9% +28.9% +28.9% +28.9% +28.9% +28.9%
    dots_with_no_batch_dims_saveable          -      -      -      -      -      - +15.6% +15.6% +15.6%
    none (everything_saveable)                -      -      -      -      -      -      -      -  +0.0%
    sqrt                                      -      -      -      -      - +33.3% +33.3% +33.3% +33.3%
    periodic:2                                -      -      -      - +33.3% +33.3% +33.3% +33.3% +33.3%
    revolve:4                                 -      -      - +56.3% +56.3% +56.3% +56.3% +56.3% +56.3%

POFO's combination of keeping, recomputing and offloading is ahead wherever blocks' inputs fit, with 28 MiB a layer on
the host, which is what the host link moves while the block computes. The rules that only swap (vDNN, TFLMS, AutoSwap,
SwapAdvisor) move up to 998 MiB a layer and add 11 to 22 times the time of the step: a v5p computes far faster than its
host link moves, and plain attention has scores to move. `dots` keeps these scores, and so more than `none` does.
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
