"""Conversion: restore a checkpoint whose optimizer state is quantized in another way than the step's optimizer state.

Names and shapes show the storage format (`Form`) of an array. NAME is a float32 array. NAME/codes.MAP and NAME/scale
are a quantized array, whose block size (the number of elements that share a scale) follows from the shape of the scale.
If the block size of the step divides that of the checkpoint, scales are repeated, and the conversion is exact. For any
other block size, another map or float32, the devices dequantize and quantize arrays one by one. If only the checkpoint
has split weights (bfloat16, with corrections in the optimizer state), they are joined. If only the step has split
weights, float32 weights are split.
"""

import collections
import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from jaxscale.lowbit.codebooks import MAPS
from jaxscale.lowbit.quantize import Quantized, decode, encode
from jaxscale.lowbit.split_weights import join, split
from jaxscale.sharding.memory_space import to_device
from jaxscale.sharding.partition import divisible_spec
from jaxscale.state.canonical import PARAMS
from jaxscale.state.naming import CODES, SCALE
from jaxscale.typing import Array, PyTree

Abstract: TypeAlias = Mapping[str, jax.ShapeDtypeStruct]
"""Shape, dtype and sharding of each array, by name."""


@dataclasses.dataclass(frozen=True)
class Conversion:
    """The arrays to read from a checkpoint, and the function that converts these arrays to the arrays of a step.

    Args:
        abstract: shape, dtype and sharding of each array to read from the checkpoint, by name.
        convert: function from the arrays that were read to the arrays of the step, both by name. It deletes
            the arrays of optimizer state whose format it has changed, but not weights that are split or joined.
        lines: lines for the user on the arrays whose format changes.
    """

    abstract: dict[str, jax.ShapeDtypeStruct]
    convert: Callable[[dict[str, Array]], dict[str, Array]]
    lines: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Form:
    """The storage format of an array in a checkpoint or a step: plain float32, or codes with scales.

    Args:
        map: name of the map from codes to values; "" for a plain array.
        block: number of elements of a column that share a scale; 0 for a plain array.
    """

    map: str = ""
    block: int = 0

    def names(self, name: str) -> tuple[str, ...]:
        """Return the names of the arrays that store an array of this format: two if it is quantized, otherwise one.

        Args:
            name: name of the array.

        Example:
            >>> Form("soft8", 256).names("w"), Form().names("w")
            (('w/codes.soft8', 'w/scale'), ('w',))
        """
        return (f"{name}/{CODES}{self.map}", f"{name}/{SCALE}") if self.map else (name,)

    def __str__(self) -> str:
        return f"{self.map} in blocks of {self.block}" if self.map else "float32"


def forms_of(shape_by_name: Mapping[str, Sequence[int]]) -> dict[str, Form]:
    """Return the format of each quantized array of a canonical form, by the array's name.

    Args:
        shape_by_name: shape of each array of the canonical form, by name.

    Example:
        >>> forms_of({"w/codes.soft8": (512, 4), "w/scale": (2, 4), "b": (4,)})
        {'w': Form(map='soft8', block=256)}
    """
    form_by_name = {}
    for full_name, shape in shape_by_name.items():
        name, _, role = full_name.rpartition("/")
        map_name, scale_shape = role.removeprefix(CODES), shape_by_name.get(f"{name}/{SCALE}")
        if not role.startswith(CODES) or map_name not in MAPS or scale_shape is None:
            continue
        if len(shape) >= 2 and len(scale_shape) >= 2 and scale_shape[-2]:
            form_by_name[name] = Form(map_name, shape[-2] // scale_shape[-2])
    return form_by_name


def conversion(entry_by_name: Mapping[str, Sequence[PyTree]], abstract_by_name: Abstract) -> Conversion:
    """Return the conversion from the arrays of a checkpoint to those of a step.

    If the checkpoint has an array in no format, the array is listed among the arrays to read in the step's format, so
    the reader reports it as missing.

    Args:
        entry_by_name: (shape, dtype) of each array of the checkpoint, by name; further members of an entry are ignored.
        abstract_by_name: shape, dtype and sharding of each array of the step, by name.
    """
    saved_form_by_name = forms_of({name: entry[0] for name, entry in entry_by_name.items()})
    step_form_by_name = forms_of({name: leaf.shape for name, leaf in abstract_by_name.items()})
    plain_form = Form()
    form_change_by_name: dict[str, tuple[Form, Form]] = {}
    for name in sorted({*saved_form_by_name, *step_form_by_name}):  # in one order on all processes
        saved_form, step_form = saved_form_by_name.get(name, plain_form), step_form_by_name.get(name, plain_form)
        is_saved, is_in_step = (
            name in saved_form_by_name or name in entry_by_name,
            name in step_form_by_name or name in abstract_by_name,
        )
        if is_saved and is_in_step and saved_form != step_form:
            form_change_by_name[name] = (saved_form, step_form)
    abstract_sources = dict(abstract_by_name)  # the arrays to read
    for name, (saved_form, step_form) in form_change_by_name.items():
        leaf = abstract_by_name[step_form.names(name)[0]]
        for array_name in step_form.names(name):
            del abstract_sources[array_name]
        for array_name in saved_form.names(name):
            shape, dtype = tuple(entry_by_name[array_name][0]), entry_by_name[array_name][1]
            abstract_sources[array_name] = jax.ShapeDtypeStruct(
                shape, jnp.dtype(dtype), sharding=fitting_sharding(leaf.sharding, shape)
            )
    saved_correction_names, step_correction_names = correction_names(entry_by_name), correction_names(abstract_by_name)
    changed_weight_names = [
        name
        for name in abstract_by_name
        if name in entry_by_name and (name in saved_correction_names) != (name in step_correction_names)
    ]
    for name in changed_weight_names:
        leaf = abstract_by_name[name]
        if name in saved_correction_names:
            abstract_sources[name] = jax.ShapeDtypeStruct(leaf.shape, jnp.bfloat16, sharding=leaf.sharding)
            abstract_sources[saved_correction_names[name]] = jax.ShapeDtypeStruct(
                leaf.shape, jnp.int8, sharding=leaf.sharding
            )
        else:
            abstract_sources[name] = jax.ShapeDtypeStruct(leaf.shape, jnp.float32, sharding=leaf.sharding)
            del abstract_sources[step_correction_names[name]]

    def convert(saved_array_by_name: dict[str, Array]) -> dict[str, Array]:
        array_by_name = dict(saved_array_by_name)
        for name in changed_weight_names:
            if name in saved_correction_names:
                array_by_name[name] = _join_fn(abstract_by_name[name].sharding)(
                    array_by_name[name], array_by_name.pop(saved_correction_names[name])
                )
            else:
                array_by_name[name], array_by_name[step_correction_names[name]] = _split_fn(
                    abstract_by_name[name].sharding
                )(array_by_name[name])
        for name, (saved_form, step_form) in form_change_by_name.items():
            old_arrays = [array_by_name.pop(array_name) for array_name in saved_form.names(name)]
            abstract_arrays = [abstract_by_name[array_name] for array_name in step_form.names(name)]
            dtypes_and_shardings = tuple((leaf.dtype, leaf.sharding) for leaf in abstract_arrays)
            change_form = _change_fn(saved_form, step_form, dtypes_and_shardings)
            # wait, because dozens of programs in flight can starve one another on a CPU
            new_arrays = jax.block_until_ready(change_form(old_arrays))
            array_by_name |= dict(zip(step_form.names(name), new_arrays, strict=True))
            for old_array in old_arrays:
                if not any(old_array is new_array for new_array in new_arrays):
                    old_array.delete()
        return array_by_name

    lines = change_lines(form_change_by_name.values())
    if changed_weight_names:
        old_form, new_form = ("split", "float32") if saved_correction_names else ("float32", "split")
        lines = (*lines, f"weights were {old_form} and are now {new_form}")
    return Conversion(abstract_sources, convert, lines)


def correction_names(names: Iterable[str]) -> dict[str, str]:
    """Return the name of the array with each split weight's correction, by the name of the weight.

    Args:
        names: names of the arrays of a canonical form.

    Example:
        >>> correction_names(["params/w", "optimizer/1/correction/w"])
        {'params/w': 'optimizer/1/correction/w'}
    """
    correction_array_names = [name for name in names if name.startswith("optimizer/") and "/correction/" in name]
    return {f"{PARAMS}/{name.partition('/correction/')[2]}": name for name in correction_array_names}


@functools.lru_cache(maxsize=256)
def _join_fn(sharding: NamedSharding) -> Callable[[Array, Array], Array]:
    """Return a compiled function from a split weight and its correction to the float32 weight."""
    return jax.jit(join, out_shardings=sharding)


@functools.lru_cache(maxsize=256)
def _split_fn(sharding: NamedSharding) -> Callable[[Array], tuple[Array, Array]]:
    """Return a compiled function from a float32 weight to the split weight and its correction."""
    return jax.jit(split, out_shardings=(sharding, sharding))


def change_lines(form_changes: Iterable[tuple[Form, Form]]) -> tuple[str, ...]:
    """Return a line for the user on each pair of old and new formats.

    There is no line for a pair whose conversion keeps all codes.

    Args:
        form_changes: old and new format of each array.

    Example:
        >>> change_lines([(Form(), Form("soft8", 256))] * 2 + [(Form("soft8", 256), Form("soft8", 128))])
        ('2 arrays of optimizer state were float32 and are now soft8 in blocks of 256',)
    """
    change_counts = collections.Counter(
        (old_form, new_form) for old_form, new_form in form_changes if not _is_exact(old_form, new_form)
    )
    return tuple(
        f"{count} array{'s' if count > 1 else ''} of optimizer state {'were' if count > 1 else 'was'} {old_form} and "
        f"{'are' if count > 1 else 'is'} now {new_form}"
        for (old_form, new_form), count in change_counts.items()
    )


def _is_exact(old_form: Form, new_form: Form) -> bool:
    """Return whether a change keeps all codes: the map is the same, and the new block size divides the old one."""
    return old_form.map == new_form.map and bool(new_form.block) and old_form.block % new_form.block == 0


@functools.lru_cache(maxsize=256)
def _change_fn(
    old_form: Form, new_form: Form, dtypes_and_shardings: tuple[tuple[np.dtype, NamedSharding], ...]
) -> Callable[[list[Array]], list[Array]]:
    """Return a jitted function from the arrays of one tensor in an old format to its arrays in a new format.

    Args:
        old_form: format of the arrays that are read.
        new_form: format of the step's arrays.
        dtypes_and_shardings: (dtype, sharding) of each array of the step.
    """
    first_dtype = dtypes_and_shardings[0][0]

    def change(arrays: list[Array]) -> list[Array]:
        device_arrays = to_device(arrays)
        if _is_exact(old_form, new_form):
            codes, scale = device_arrays
            return [codes, jnp.repeat(scale, old_form.block // new_form.block, axis=-2)]
        plain_array = device_arrays[0]
        if old_form.map:
            codes, scale = device_arrays
            plain_array = decode(Quantized(codes.astype(MAPS[old_form.map].dtype), scale, old_form.map, old_form.block))
        if not new_form.map:
            return [plain_array.astype(first_dtype)]
        quantized = encode(plain_array, new_form.map, new_form.block)
        return [quantized.codes.astype(first_dtype), quantized.scale]

    return jax.jit(change, out_shardings=[sharding for _, sharding in dtypes_and_shardings])


def fitting_sharding(sharding: NamedSharding, shape: Sequence[int]) -> NamedSharding:
    """Return `sharding` for an array of shape `shape`; dims that cannot be split evenly stay whole."""
    spec = divisible_spec(sharding.spec, shape, sharding.mesh)
    return NamedSharding(sharding.mesh, spec, memory_kind=sharding.memory_kind)
