"""Weights of a file, quantized matrix by matrix when their codes and scales are placed on devices."""

import dataclasses
import functools
from typing import Literal

import jax
import numpy as np

from jaxscale.lowbit.few_bit_weight import FORMATS, FewBitWeight
from jaxscale.state.pure_model import LayerIndex, LazyArray, PureModel
from jaxscale.typing import Array

EncodedPart = Literal["codes", "scale"]


@dataclasses.dataclass(frozen=True)
class EncodedArray:
    """The codes or the scales of an array. Indexing reads and quantizes the selected layers one by one.

    Args:
        array: the floating-point weight, of shape (*L, I, O): layers, inputs, outputs.
        format: key of `FORMATS`.
        block: number of inputs that share a scale.
        part: whether this object stands for the codes or for the scales.

    Example:
        >>> codes = EncodedArray(np.ones((3, 16, 2), np.float32), "int8", 8, "codes")
        >>> codes.shape, codes[1:2, :1].tolist()[0][0][0]
        ((3, 2, 8, 2), [127, 127])
    """

    array: LazyArray
    format: str
    block: int
    part: EncodedPart

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the codes or of the scales."""
        *layer_shape, in_size, out_size = self.array.shape
        byte_dim_sizes = (self.block // FORMATS[self.format].codes_per_byte,) if self.part == "codes" else ()
        return (*layer_shape, in_size // self.block, *byte_dim_sizes, out_size)

    def __getitem__(self, index: LayerIndex) -> np.ndarray:
        given_slices = index if isinstance(index, tuple) else (index,)
        slices = (*given_slices, *(slice(None),) * (len(self.shape) - len(given_slices)))
        layer_dim_count = len(self.array.shape) - 2
        layer_slices, (block_slice, *byte_slices, out_slice) = slices[:layer_dim_count], slices[layer_dim_count:]
        first_block, end_block, _ = block_slice.indices(self.shape[layer_dim_count])
        matrix_slices = (slice(first_block * self.block, end_block * self.block), out_slice)
        if not layer_slices:
            return self._encoded_part(self.array[matrix_slices])[(slice(None), *byte_slices)]
        layer_indices = range(self.shape[0])[layer_slices[0]]
        layer_arrays = (
            self.array[(slice(layer_index, layer_index + 1), *matrix_slices)] for layer_index in layer_indices
        )
        return np.stack(
            [self._encoded_part(layer_array[0])[(slice(None), *byte_slices)] for layer_array in layer_arrays]
        )

    def _encoded_part(self, matrix: np.ndarray | Array) -> np.ndarray:
        """Return the codes or the scales of a matrix."""
        return np.asarray(_encode(matrix, self.format, self.block, self.part))


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _encode(matrix: Array, format: str, block: int, part: EncodedPart) -> Array:
    """Return the codes or the scales of a matrix."""
    codes, scale = FORMATS[format].encode(matrix, block)
    return codes if part == "codes" else scale


def encoded_arrays(pure_model: PureModel, array_by_name: dict[str, LazyArray]) -> dict[str, LazyArray]:
    """Return the arrays of a file by name; codes and scales replace each weight that the model keeps quantized.

    Args:
        pure_model: the model as pure functions.
        array_by_name: the arrays of the file, with the names and shapes of float parameters.
    """

    def parts_by_name(name: str, array: LazyArray, weight: FewBitWeight) -> dict[str, LazyArray]:
        """Return the codes and the scales of one weight by name."""
        part_fn = functools.partial(EncodedArray, array, weight.format, weight.block)
        return {f"{name}/codes": part_fn("codes"), f"{name}/scale": part_fn("scale")}

    arrays: dict[str, LazyArray] = {}
    for name, array in array_by_name.items():
        weight = pure_model.few_bit_weights.get(name)
        arrays |= {name: array} if weight is None else parts_by_name(name, array, weight)
    return arrays
