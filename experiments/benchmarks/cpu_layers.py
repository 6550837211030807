"""Layers on one core of a CPU, each by the ways of computing it that were compared: convolutions, weights, GELU.

    python experiments/benchmarks/cpu_layers.py [--tiny] [--images 32] [--calls 11]

Convolutions: those of a ResNet-18's stages on images of 32 x 32, with 3 x 3 kernels, stride 1, in float32, 2.4 GFLOP
each for 32 images, and those of 64 channels on an image of 224 x 224, 3.7 GFLOP; and gradients of weights that narrow
an MLP, and exact GELUs of 2 million values. A figure is the median processor time of the calls. The error is the root
mean square of the difference from a sum in float64, divided by that sum's root mean square, for the first stage.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from figures import Figure, show

from jaxscale.layers.cpu_convolutions import patches, winograd
from jaxscale.layers.mlp import gelu

STAGES = ((64, 32), (128, 16), (256, 8), (512, 4), (64, 224))
"""Channels, and rows and columns, of each stage of a ResNet-18, and of large images."""
LARGE_SIZE = 128
"""Rows and columns above which a batch has one image in place of 32."""
SAME = ((1, 1), (1, 1))
NARROWED = ((2048, 1024, 256), (1024, 512, 128), (2048, 2048, 512))
"""Positions, inputs and outputs of the weights whose gradients are computed."""


def methods(size: int) -> dict[str, Callable[..., Any]]:
    """Return functions of (x, w, dy), by the name of the result and of the method."""

    def by_xla(x: Any, w: Any) -> Any:
        return jax.lax.conv_general_dilated(x, w, (1, 1), SAME, dimension_numbers=("NHWC", "HWIO", "NHWC"))

    return {
        "y, convolution": lambda x, w, dy: by_xla(x, w),
        "y, minimal filtering": lambda x, w, dy: winograd.convolve(x, w, SAME),
        "dx, convolution": lambda x, w, dy: jax.linear_transpose(lambda x: by_xla(x, w), x)(dy)[0],
        "dx, minimal filtering": lambda x, w, dy: winograd.input_gradient(dy, w, (size, size), SAME),
        "dw, convolution": lambda x, w, dy: jax.linear_transpose(lambda w: by_xla(x, w), w)(dy)[0],
        "dw, patches": lambda x, w, dy: patches.kernel_gradient(x, dy, (3, 3), (1, 1), SAME),
        "dw, minimal filtering": lambda x, w, dy: winograd.kernel_gradient(x, dy, SAME),
    }


def weight_figures(shape: tuple[int, int, int], calls: int) -> list[Figure]:
    """Return the times of the gradient of a weight with this number of positions, inputs and outputs."""
    positions, inputs, outputs = shape
    rng = np.random.default_rng(0)
    x, dy = (jnp.asarray(rng.normal(size=(positions, width)), jnp.float32) for width in (inputs, outputs))

    def narrow_product(x: Any, dy: Any) -> Any:
        return jax.lax.dot_general(dy, x, (((0,), (0,)), ((), ())))

    functions = {
        "transposition folded": lambda x, dy: narrow_product(x, dy).T,
        "transposed afterwards": lambda x, dy: jax.lax.optimization_barrier(narrow_product(x, dy)).T,
    }
    name = f"gradient of a weight, {positions} positions, {inputs} to {outputs}"
    return [
        Figure(f"{name}, {method}", milliseconds(jax.jit(function), [x, dy], calls), "ms")
        for method, function in functions.items()
    ]


def gelu_figures(count: int, calls: int) -> list[Figure]:
    """Return the times of a GELU of `count` values, and of its gradient, by erfc and by erf."""
    x, dy = (jnp.asarray(np.random.default_rng(seed).normal(size=count), jnp.float32) for seed in range(2))
    functions = {"erfc": lambda x: jax.nn.gelu(x, approximate=False), "erf": gelu}
    figures = []
    for name, function in functions.items():
        figures.append(Figure(f"GELU by {name}", milliseconds(jax.jit(function), [x], calls), "ms"))
        gradient = jax.jit(lambda x, dy, function=function: jax.vjp(function, x)[1](dy)[0])
        figures.append(Figure(f"gradient of GELU by {name}", milliseconds(gradient, [x, dy], calls), "ms"))
    return figures


def arrays(images: int, channels: int, size: int) -> list[np.ndarray]:
    """Return (x, w, dy) in float64."""
    rng = np.random.default_rng(0)
    shapes = ((images, size, size, channels), (3, 3, channels, channels), (images, size, size, channels))
    return [rng.normal(size=shape) for shape in shapes]


def exact(x: np.ndarray, w: np.ndarray, dy: np.ndarray) -> dict[str, np.ndarray]:
    """Return y, dx and dw in float64."""

    def shifted(array: np.ndarray, row: int, column: int) -> np.ndarray:
        padded = np.pad(array, ((0, 0), (1, 1), (1, 1), (0, 0)))
        return padded[:, row : row + array.shape[1], column : column + array.shape[2]]

    places = [(row, column) for row in range(3) for column in range(3)]
    return {
        "y": np.asarray(sum(shifted(x, *place) @ w[place] for place in places)),
        "dx": np.asarray(sum(shifted(dy, 2 - row, 2 - column) @ w[row, column].T for row, column in places)),
        "dw": np.reshape(
            [np.einsum("bpqc,bpqo->co", shifted(x, *place), dy, optimize=True) for place in places], w.shape
        ),
    }


def milliseconds(function: Callable[..., Any], operands: list[Any], calls: int) -> float:
    """Return the median processor time of some calls."""
    seconds = []
    for _ in range(calls + 2):
        start = time.process_time()
        jax.block_until_ready(function(*operands))
        seconds.append(time.process_time() - start)
    return 1000 * statistics.median(seconds[2:])


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--tiny", action="store_true", help="one image and one call: shows that it works, not the figures"
    )
    parser.add_argument("--images", type=int, default=32, help="images in a batch (default: 32)")
    parser.add_argument("--calls", type=int, default=11, help="timed calls (default: 11)")
    arguments = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    images, calls = (1, 1) if arguments.tiny else (arguments.images, arguments.calls)
    figures, errors = [], []
    for channels, size in ((8, 4),) if arguments.tiny else STAGES:
        wide = arrays(max(1, images // 32) if size > LARGE_SIZE else images, channels, size)
        narrow = [jnp.asarray(array, jnp.float32) for array in wide]
        expected = None if errors else exact(*wide)
        for name, function in methods(size).items():
            compiled = jax.jit(function)
            figures.append(
                Figure(f"{channels} channels, {size} x {size}: {name}", milliseconds(compiled, narrow, calls), "ms")
            )
            if expected is not None:
                sums = expected[name.partition(",")[0]]
                error = np.sqrt(np.mean((np.float64(compiled(*narrow)) - sums) ** 2) / np.mean(sums**2))
                errors.append(Figure(f"error: {name}", float(error), ""))
    for shape in ((16, 8, 4),) if arguments.tiny else NARROWED:
        figures += weight_figures(shape, calls)
    figures += gelu_figures(1024 if arguments.tiny else 2048 * 1024, calls)
    show([*figures, *errors], "Layers on one core")


if __name__ == "__main__":
    main()
