"""Dims of the parameters of Flax's layers: how many are stacked, and how many are rows or columns of a matrix.

The class of a `flax.nnx` layer determines the dims of its parameters. Additional leading dims are those of a stack, as
`nnx.vmap` makes it. A kernel of `nnx.LinearGeneral`, such as (embed, heads, head) in attention, is the matrix of all
inputs and all outputs, and its bias (heads, head) is a vector. A parameter of a user's own class has as many stacked
dims as the Flax layers beside it or inside of its module, if all of these agree. Its other dims are unknown. The bridge
to Linen exposes no layers, so for a Linen module, the shapes of a layer's kernel and bias decide.
"""

from collections.abc import Mapping
from typing import Any

from flax import nnx

from jaxscale.model_traits import TensorDims


def tensor_dims(module: nnx.Module) -> dict[str, TensorDims]:
    """Return the numbers of stacked dims and of row dims of each parameter, by name; unknown row dims are `None`.

    Args:
        module: an NNX module, with arrays or shapes.

    Example:
        >>> attention = nnx.MultiHeadAttention(2, 8, rngs=nnx.Rngs(0))
        >>> dims = tensor_dims(attention)
        >>> dims["query/kernel"], dims["query/bias"], dims["out/kernel"]
        (TensorDims(stack=0, rows=1), TensorDims(stack=0, rows=0), TensorDims(stack=0, rows=2))
    """
    module_by_path = {path: node for path, node in nnx.iter_graph(module) if isinstance(node, nnx.Module)}
    known_dims_by_path: dict[tuple[Any, ...], TensorDims] = {}
    linen_shape_by_path: dict[tuple[Any, ...], tuple[int, ...]] = {}
    other_paths = []
    for path, variable in nnx.to_flat_state(nnx.state(module, nnx.Param)):
        layer = module_by_path.get(path[:-1])
        if layer is None or isinstance(layer, nnx.bridge.ToNNX):
            linen_shape_by_path[path] = tuple(variable.shape)
            continue
        row_and_column_counts = _layer_dim_counts(layer).get(str(path[-1]))
        stacked_dim_count = -1 if row_and_column_counts is None else len(variable.shape) - sum(row_and_column_counts)
        if row_and_column_counts is None or stacked_dim_count < 0:
            other_paths.append(path)
        else:
            known_dims_by_path[path] = TensorDims(stacked_dim_count, row_and_column_counts[0])
    for path in linen_shape_by_path:
        dims = _linen_dims(path, linen_shape_by_path)
        if dims is None:
            other_paths.append(path)
        else:
            known_dims_by_path[path] = dims
    other_dims_by_path = {
        path: TensorDims(_stacked_dims_beside(path, known_dims_by_path), None) for path in other_paths
    }
    return {"/".join(map(str, path)): dims for path, dims in (known_dims_by_path | other_dims_by_path).items()}


def _stacked_dims_beside(path: tuple[Any, ...], known_dims_by_path: dict[tuple[Any, ...], TensorDims]) -> int:
    """Return the number of stacked dims of the Flax layers in the smallest module around a path; 0 if they differ."""
    for length in range(len(path) - 1, -1, -1):
        stacked_dim_counts = {
            dims.stack for known_path, dims in known_dims_by_path.items() if known_path[:length] == path[:length]
        }
        if stacked_dim_counts:
            return stacked_dim_counts.pop() if len(stacked_dim_counts) == 1 else 0
    return 0


def _layer_dim_counts(layer: nnx.Module) -> dict[str, tuple[int, int]]:
    """Return (number of row dims, number of column dims) of each parameter of a Flax layer, by name."""
    vector_dim_counts = {"bias": (0, 1), "scale": (0, 1)}
    match layer:
        case nnx.LinearGeneral():
            in_dim_count, out_dim_count = len(layer.in_features), len(layer.out_features)
            return {"kernel": (in_dim_count, out_dim_count), "bias": (0, out_dim_count)}
        case nnx.Linear():
            return {"kernel": (1, 1), **vector_dim_counts}
        case nnx.Conv() | nnx.ConvTranspose():
            return {"kernel": (len(layer.kernel_size) + 1, 1), **vector_dim_counts}
        case nnx.Embed():
            return {"embedding": (1, 1)}
        case nnx.LoRA():
            return {"lora_a": (1, 1), "lora_b": (1, 1)}
        case nnx.LayerNorm() | nnx.RMSNorm():
            axes = layer.feature_axes
            axis_count = 1 if isinstance(axes, int) else len(axes)
            return {"bias": (0, axis_count), "scale": (0, axis_count)}
        case nnx.BatchNorm() | nnx.GroupNorm() | nnx.InstanceNorm():
            return vector_dim_counts
        case _:
            return {}


def _linen_dims(path: tuple[Any, ...], shape_by_path: Mapping[tuple[Any, ...], tuple[int, ...]]) -> TensorDims | None:
    """Infer the dims of a Linen parameter from its name and the shapes beside it; `None` if they are unknown.

    Args:
        path: path of the parameter.
        shape_by_path: shape of each parameter by path.
    """
    shape, name = shape_by_path[path], path[-1]
    kernel_shape, bias_shape = shape_by_path.get((*path[:-1], "kernel")), shape_by_path.get((*path[:-1], "bias"))
    if name == "scale" or (name == "bias" and kernel_shape is None):  # a norm's parameter
        return TensorDims(max(len(shape) - 1, 0), 0)
    if name not in ("kernel", "bias") or kernel_shape is None or bias_shape is None:
        return None
    is_stacked = (
        len(bias_shape) > 1
        and bias_shape[0] == kernel_shape[0]
        and bias_shape[1:] == kernel_shape[len(kernel_shape) - len(bias_shape) + 1 :]
    )
    if not is_stacked and bias_shape != kernel_shape[len(kernel_shape) - len(bias_shape) :]:
        return None
    stacked_dim_count = int(is_stacked)
    return TensorDims(stacked_dim_count, 0 if name == "bias" else len(kernel_shape) - len(bias_shape))
