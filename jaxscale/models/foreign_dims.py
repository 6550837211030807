"""Dims of the parameters of Flax's layers: which are stacked, and which are rows and columns of a matrix.

A layer of `flax.nnx` determines the dims of one layer's parameters. Dims that its arrays have before those are the dims
of a stack, as `nnx.vmap` makes them. A kernel of `nnx.LinearGeneral`, such as (embed, heads, head) in attention, is the
matrix of all inputs and all outputs, and its bias (heads, head) is a vector. A parameter of a user's own class has the
stack of the Flax layers beside it or inside of its module, if all of those agree; its dims are otherwise unknown. The
bridge to Linen exposes no layers, so there the shapes of a layer's kernel and bias decide.
"""

from collections.abc import Mapping
from typing import Any

from flax import nnx

from jaxscale.model_traits import TensorDims


def tensor_dims(module: nnx.Module) -> dict[str, TensorDims]:
    """Return the stacked dims and the rows of a module's parameters, by name; the rows of unknown ones are `None`.

    Args:
        module: an NNX module, with arrays or shapes.

    Example:
        >>> attention = nnx.MultiHeadAttention(2, 8, rngs=nnx.Rngs(0))
        >>> dims = tensor_dims(attention)
        >>> dims["query/kernel"], dims["query/bias"], dims["out/kernel"]
        (TensorDims(stack=0, rows=1), TensorDims(stack=0, rows=0), TensorDims(stack=0, rows=2))
    """
    layers = {path: node for path, node in nnx.iter_graph(module) if isinstance(node, nnx.Module)}
    known_dims: dict[tuple[Any, ...], TensorDims] = {}
    linen_shapes: dict[tuple[Any, ...], tuple[int, ...]] = {}
    other_paths = []
    for path, variable in nnx.to_flat_state(nnx.state(module, nnx.Param)):
        layer = layers.get(path[:-1])
        if layer is None or isinstance(layer, nnx.bridge.ToNNX):
            linen_shapes[path] = tuple(variable.shape)
            continue
        row_and_column_dims = _layer_dims(layer).get(str(path[-1]))
        stack = -1 if row_and_column_dims is None else len(variable.shape) - sum(row_and_column_dims)
        if row_and_column_dims is None or stack < 0:
            other_paths.append(path)
        else:
            known_dims[path] = TensorDims(stack, row_and_column_dims[0])
    for path in linen_shapes:
        dims = _linen_dims(path, linen_shapes)
        if dims is None:
            other_paths.append(path)
        else:
            known_dims[path] = dims
    other_dims = {path: TensorDims(_stack_beside(path, known_dims), None) for path in other_paths}
    return {"/".join(map(str, path)): dims for path, dims in (known_dims | other_dims).items()}


def _stack_beside(path: tuple[Any, ...], known_dims: dict[tuple[Any, ...], TensorDims]) -> int:
    """Return the number of stacked dims of the Flax layers in the smallest module around a path; 0 if they differ."""
    for length in range(len(path) - 1, -1, -1):
        stacks = {dims.stack for known_path, dims in known_dims.items() if known_path[:length] == path[:length]}
        if stacks:
            return stacks.pop() if len(stacks) == 1 else 0
    return 0


def _layer_dims(layer: nnx.Module) -> dict[str, tuple[int, int]]:
    """Return, for each parameter of a layer of Flax by name, the number of dims of its rows and of its columns."""
    vectors = {"bias": (0, 1), "scale": (0, 1)}
    match layer:
        case nnx.LinearGeneral():
            in_dims, out_dims = len(layer.in_features), len(layer.out_features)
            return {"kernel": (in_dims, out_dims), "bias": (0, out_dims)}
        case nnx.Linear():
            return {"kernel": (1, 1), **vectors}
        case nnx.Conv() | nnx.ConvTranspose():
            return {"kernel": (len(layer.kernel_size) + 1, 1), **vectors}
        case nnx.Embed():
            return {"embedding": (1, 1)}
        case nnx.LoRA():
            return {"lora_a": (1, 1), "lora_b": (1, 1)}
        case nnx.LayerNorm() | nnx.RMSNorm():
            axes = layer.feature_axes
            axis_count = 1 if isinstance(axes, int) else len(axes)
            return {"bias": (0, axis_count), "scale": (0, axis_count)}
        case nnx.BatchNorm() | nnx.GroupNorm() | nnx.InstanceNorm():
            return vectors
        case _:
            return {}


def _linen_dims(path: tuple[Any, ...], shapes: Mapping[tuple[Any, ...], tuple[int, ...]]) -> TensorDims | None:
    """Return the dims of a Linen module's parameter by its name and the shapes beside it; `None` if they are unknown.

    Args:
        path: path of the parameter.
        shapes: shape of each parameter by path.
    """
    shape, name = shapes[path], path[-1]
    kernel, bias = shapes.get((*path[:-1], "kernel")), shapes.get((*path[:-1], "bias"))
    if name == "scale" or (name == "bias" and kernel is None):  # of a norm
        return TensorDims(max(len(shape) - 1, 0), 0)
    if name not in ("kernel", "bias") or kernel is None or bias is None:
        return None
    is_stacked = len(bias) > 1 and bias[0] == kernel[0] and bias[1:] == kernel[len(kernel) - len(bias) + 1 :]
    if not is_stacked and bias != kernel[len(kernel) - len(bias) :]:
        return None
    stack = int(is_stacked)
    return TensorDims(stack, 0 if name == "bias" else len(kernel) - len(bias))
