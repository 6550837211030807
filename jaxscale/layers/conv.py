"""Convolutions and batch norm (Ioffe and Szegedy 2015) of images in the layout (batch, height, width, channels).

Mixed precision is as in `linear.py`: a convolution computes in the type of its input, and the gradient of the kernel
has the type of the kernel. Left out: grouped and transposed convolutions; on a CPU, forward-mode differentiation, which
a custom backward pass excludes.

On a CPU, products of matrices compute a convolution in float32 (`cpu_convolutions`). If its kernel is 3 x 3, its
stride 1, and it has many channels (`FILTERED`), it is computed by minimal filtering. Otherwise, only its gradients are
products, of patches: XLA:CPU computes a forward convolution near the speed of a product, but the gradient of the kernel
as a convolution whose window is the whole image, which takes up to twice as long, and for small images it spends much
of the gradient of the input on flipping the kernel.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from jaxscale.blocks import Context
from jaxscale.errors import UserError
from jaxscale.layers.cpu_convolutions import patches, winograd
from jaxscale.layers.linear import Initializer, add_bias
from jaxscale.layers.norm import as_row
from jaxscale.layers.shards import batch_shard_count
from jaxscale.layers.traced_device import traced_device
from jaxscale.sharding.place import MeshAndRules, constrain, current, reopened_layout
from jaxscale.typing import Array, Float

Padding = str | int | Sequence[tuple[int, int]]
"""Rows and columns of zeros around an image: "SAME", "VALID", one number for all sides, or (low, high) per dim."""

_NHWC = ("NHWC", "HWIO", "NHWC")
"""Order of the dims of images, of kernels and of outputs."""
_TO_KERNEL = jax.lax.ConvDimensionNumbers(lhs_spec=(3, 0, 1, 2), rhs_spec=(3, 0, 1, 2), out_spec=(2, 3, 0, 1))
"""Order of the dims in the convolution that computes the kernel's gradient. The input's channels serve as the batch,
and the output's gradient serves as the kernel."""

MAX_POSITIONS_PER_IMAGE = 4096
"""Output positions of an image up to which products compute `dw`: the patches of larger images do not stay in the
cache."""
MAX_POSITIONS = 2048
"""Output positions of a shard of the batch up to which a product computes `dx`. It makes `h w C` floats per position,
which more positions would write to memory and read again."""


@dataclasses.dataclass(frozen=True)
class TileLimits:
    """Limits of what `winograd` computes.

    Args:
        least_channels: fewest channels, of input and of output.
        most_positions: most output positions of an image.
    """

    least_channels: int
    most_positions: int


FILTERED = TileLimits(32, 128 * 128)
"""Limits for a convolution and `dx`. Tiles of larger images do not stay in the cache: an image of 224 x 224 with 64
channels takes 1.9 times as long by tiles as by a convolution (`experiments/benchmarks/cpu_layers.py`)."""
FILTERED_KERNEL = TileLimits(128, MAX_POSITIONS_PER_IMAGE)
"""Limits for `dw`."""


def _pads(padding: Padding, image_size: Sequence[int], window: Sequence[int], strides: Sequence[int]) -> Any:
    """Return the numbers of padding rows and of padding columns, each as the pair (low, high)."""
    if isinstance(padding, str):
        if padding not in ("SAME", "VALID"):
            raise UserError(f"padding: got {padding!r}, expected SAME, VALID, a number, or (low, high) per dim")
        return tuple(jax.lax.padtype_to_pads(image_size, window, strides, padding))
    return ((padding, padding),) * len(window) if isinstance(padding, int) else tuple(map(tuple, padding))


def _convolve(x: Any, w: Any, strides: Any, pads: Any) -> Any:
    """Compute the cross-correlation of `x` with `w`, in the type of `x`, without a custom backward pass."""
    return jax.lax.conv_general_dilated(x, w.astype(x.dtype), strides, pads, dimension_numbers=_NHWC)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _convolve_mixed(x: Any, w: Any, strides: Any, pads: Any) -> Any:
    """Compute `_convolve` for `x` and `w` of different types; the gradient of `w` has the type of `w`."""
    return _convolve(x, w, strides, pads)


def _convolve_mixed_forward(x: Any, w: Any, strides: Any, pads: Any) -> Any:
    return _convolve(x, w, strides, pads), (x, w)


def _convolve_mixed_backward(strides: Any, pads: Any, residuals: Any, dy: Any) -> Any:
    """Return the gradients of `x` and `w`; `residuals` is the pair (x, w), and `dy` is the gradient of the output."""
    x, w = residuals
    (dx,) = jax.linear_transpose(lambda x: _convolve(x, w, strides, pads), x)(dy)
    # low padding is as in the forward pass; high padding gives the output the size of the kernel, and is negative if
    # the strides do not reach the last rows
    dw_pads = [
        (pads[dim][0], w.shape[dim] + (dy.shape[1 + dim] - 1) * strides[dim] - x.shape[1 + dim] - pads[dim][0])
        for dim in range(2)
    ]
    dw = jax.lax.conv_general_dilated(
        x, dy, (1, 1), dw_pads, rhs_dilation=strides, dimension_numbers=_TO_KERNEL, preferred_element_type=w.dtype
    )
    return dx, dw.astype(w.dtype)


_convolve_mixed.defvjp(_convolve_mixed_forward, _convolve_mixed_backward)


def _is_by_tiles(
    image_shape: Sequence[int], kernel_shape: Sequence[int], strides: Any, pads: Any, limits: TileLimits
) -> bool:
    """Return whether `winograd` computes a convolution of images with a kernel of these shapes, or a gradient of it."""
    output = [image_shape[1 + dim] + sum(pads[dim]) - 2 for dim in range(2)]
    return (
        tuple(kernel_shape[:2]) == (3, 3)
        and tuple(strides) == (1, 1)
        and min(kernel_shape[2:]) >= limits.least_channels
        and min(*image_shape[:3], *output) > 0
        and math.prod(output) <= limits.most_positions
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def _convolve_on_cpu(x: Any, w: Any, strides: Any, pads: Any, layout: MeshAndRules | None) -> Any:
    """Compute `_convolve` for `x` and `w` in float32 by products. `layout` is the one in force."""
    if _is_by_tiles(x.shape, w.shape, strides, pads, FILTERED):
        with reopened_layout(layout):
            return winograd.convolve(x, w, pads)
    return _convolve(x, w, strides, pads)


def _convolve_on_cpu_forward(x: Any, w: Any, strides: Any, pads: Any, layout: MeshAndRules | None) -> Any:
    return _convolve_on_cpu(x, w, strides, pads, layout), (x, w)


def _convolve_on_cpu_backward(strides: Any, pads: Any, layout: MeshAndRules | None, residuals: Any, dy: Any) -> Any:
    """Return the gradients of `x` and `w`; `residuals` is the pair (x, w), and `dy` is the gradient of the output."""
    x, w = residuals
    position_count = dy.shape[1] * dy.shape[2]
    with reopened_layout(layout):
        if _is_by_tiles(x.shape, w.shape, strides, pads, FILTERED):
            dx = winograd.input_gradient(dy, w, x.shape[1:3], pads)
        elif 0 < position_count * dy.shape[0] // batch_shard_count(x.shape) <= MAX_POSITIONS:
            dx = patches.input_gradient(dy, w, x.shape[1:3], strides, pads)
        else:
            (dx,) = jax.linear_transpose(lambda x: _convolve(x, w, strides, pads), x)(dy)
        if _is_by_tiles(x.shape, w.shape, strides, pads, FILTERED_KERNEL):
            dw = winograd.kernel_gradient(x, dy, pads)
        elif dy.size > 0 and position_count <= MAX_POSITIONS_PER_IMAGE:
            dw = patches.kernel_gradient(x, dy, w.shape[:2], strides, pads)
        else:
            (dw,) = jax.linear_transpose(lambda w: _convolve(x, w, strides, pads), w)(dy)
    return dx, dw


_convolve_on_cpu.defvjp(_convolve_on_cpu_forward, _convolve_on_cpu_backward)


def convolve(
    x: Float[Array, "B I J C"], w: Float[Array, "h w C O"], *, stride: int = 1, padding: Padding = "SAME"
) -> Float[Array, "B P Q O"]:
    """Compute the cross-correlation of `x` with `w`, in the type of `x`; the gradient of `w` has the type of `w`.

    A convolution in float32 on a CPU has no forward-mode derivative (`jax.jvp`); one of mixed types has none anywhere.

    y[b, p, q, o] = sum over i, j, c of x[b, s p + i - low, s q + j - low, c] * w[i, j, c, o].

    Args:
        x: images (batch, height, width, channels).
        w: kernel (height, width, channels in, channels out), in any float type.
        stride: step s between output positions, in both dims.
        padding: zeros around the images; "SAME" gives ceil(size / stride) rows and columns.

    Example:
        >>> import jax.numpy as jnp
        >>> convolve(jnp.ones((1, 4, 4, 1)), jnp.ones((3, 3, 1, 1)), stride=2)[0, :, :, 0].tolist()
        [[9.0, 6.0], [6.0, 4.0]]
    """
    strides = (stride, stride)
    pads = _pads(padding, x.shape[1:3], w.shape[:2], strides)
    if x.dtype != w.dtype:
        return _convolve_mixed(x, w, strides, pads)
    if x.dtype == jnp.float32 and traced_device()[0] == "cpu":
        return _convolve_on_cpu(x, w, strides, pads, current())
    return _convolve(x, w, strides, pads)


class Conv(nnx.Module):
    """A convolution over height and width.

    Args:
        in_channels: channels of the input.
        out_channels: channels of the output.
        window: height and width of the kernel.
        stride: step between output positions.
        padding: zeros around the images, as "SAME", "VALID", a number, or (low, high) per dim.
        bias: whether the layer has a bias, initially zeros.
        axes: logical axes of the kernel (height, width, in, out); the bias has the last axis.
        init: initializer of the kernel; by default normal with variance 2 / (window^2 * out_channels) (He et al. 2015).
        rngs: random streams; the kernel is drawn from `params`.

    Example:
        >>> from flax import nnx
        >>> Conv(3, 8, window=3, stride=2, rngs=nnx.Rngs(0))(jnp.ones((2, 6, 6, 3))).shape
        (2, 3, 3, 8)
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        *,
        window: int = 3,
        stride: int = 1,
        padding: Padding = "SAME",
        bias: bool = False,
        axes: tuple[str | None, ...] = (None, None, None, "channels"),
        init: Initializer | None = None,
        rngs: nnx.Rngs,
    ):
        for name, length in (("window", window), ("stride", stride)):
            if length < 1:
                raise UserError(f"convolution: got {name} {length}, expected at least 1")
        init = nnx.initializers.variance_scaling(2.0, "fan_out", "normal") if init is None else init
        kernel_shape = (window, window, in_channels, out_channels)
        self.stride, self.padding = stride, padding
        self.weight = nnx.Param(init(rngs.params(), kernel_shape, jnp.float32), out_sharding=axes)
        self.bias = nnx.Param(jnp.zeros((out_channels,), jnp.float32), out_sharding=axes[-1:]) if bias else None

    def __call__(self, x: Float[Array, "B I J C"]) -> Float[Array, "B P Q O"]:
        """Return the convolution of `x`, in the type of `x`."""
        y = convolve(x, self.weight[...], stride=self.stride, padding=self.padding)
        y = y if self.bias is None else add_bias(y, self.bias[...])
        return constrain(checkpoint_name(y, "conv"), "batch", None, None, "channels")


class BatchNorm(nnx.Module):
    """`(x - mean) / sqrt(var + eps) * w + b` per channel, with statistics in float32 over all other dims.

    In training (the context has a key) the statistics are those of the **microbatch**, over the rows of all devices.
    So, unlike in any other layer, the result depends on the number of microbatches; it does not depend on the mesh.
    Once per microbatch, `running <- momentum * running + (1 - momentum) * batch`, with the biased variance as in Flax
    (PyTorch uses the unbiased variance). Evaluation uses the running statistics.

    Args:
        size: number of channels.
        momentum: decay of the running statistics.
        eps: constant added to the variance.
        gain: initial value of every entry of `w`. With 0 in the last norm of a residual branch, the block is initially
            the identity (Goyal et al. 2017, arXiv:1706.02677).
        rngs: random streams, which are not used.

    Attributes:
        mean, var: running statistics of the channels.

    Example:
        >>> import jax
        >>> from flax import nnx
        >>> norm, x = BatchNorm(1, momentum=0.5), jnp.array([[1.0], [3.0]])
        >>> norm(x, context=Context(key=jax.random.key(0))).round(2).tolist(), norm.mean[...].tolist()
        ([[-1.0], [1.0]], [1.0])
        >>> norm(x).round(2).tolist()
        [[0.0], [2.0]]
    """

    def __init__(
        self, size: int, *, momentum: float = 0.9, eps: float = 1e-5, gain: float = 1.0, rngs: nnx.Rngs | None = None
    ):
        if not 0 <= momentum < 1:
            raise UserError(f"batch norm: got momentum {momentum!r}, expected at least 0 and less than 1")
        self.momentum, self.eps = momentum, eps
        self.weight = nnx.Param(jnp.full((size,), gain, jnp.float32), out_sharding=("norm",))
        self.bias = nnx.Param(jnp.zeros((size,), jnp.float32), out_sharding=("norm",))
        self.mean = nnx.BatchStat(jnp.zeros((size,), jnp.float32))
        self.var = nnx.BatchStat(jnp.ones((size,), jnp.float32))

    def __call__(self, x: Float[Array, "*B C"], *, context: Context = Context()) -> Float[Array, "*B C"]:
        """Return `x` normalized per channel, in the type of `x`."""
        x_float32 = x.astype(jnp.float32)
        averaged_dims = tuple(range(x.ndim - 1))

        if context.key is None:
            mean, var = self.mean[...], self.var[...]
            centered = x_float32 - as_row(mean, x)
        else:
            mean = x_float32.mean(averaged_dims)
            centered = x_float32 - as_row(mean, x)
            var = jnp.square(centered).mean(averaged_dims)
            for average, statistic in ((self.mean, mean), (self.var, var)):
                average[...] = self.momentum * average[...] + (1 - self.momentum) * jax.lax.stop_gradient(statistic)
        scale = jax.lax.rsqrt(var + self.eps) * self.weight[...].astype(jnp.float32)
        return (centered * as_row(scale, x) + as_row(self.bias[...], x)).astype(x.dtype)


def max_pool(
    x: Float[Array, "B I J C"], *, window: int, stride: int, padding: Padding = "SAME"
) -> Float[Array, "B P Q C"]:
    """Return the largest value of each window; padding counts as minus infinity.

    Example:
        >>> max_pool(jnp.arange(16.0).reshape(1, 4, 4, 1), window=2, stride=2)[0, :, :, 0].tolist()
        [[5.0, 7.0], [13.0, 15.0]]
    """
    pads = _pads(padding, x.shape[1:3], (window, window), (stride, stride))
    # a NumPy number: under jit a JAX array is traced, and reduce_window has a derivative only for a constant
    minus_infinity = np.asarray(-np.inf, x.dtype)
    return jax.lax.reduce_window(
        x, minus_infinity, jax.lax.max, (1, window, window, 1), (1, stride, stride, 1), ((0, 0), *pads, (0, 0))
    )
