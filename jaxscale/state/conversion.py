"""Conversion: restore a checkpoint whose optimizer state has other bits or blocks than the step's.

Names and shapes show the form of an array: NAME is a float32 array; NAME/codes.MAP and NAME/scale are a quantized one,
whose block (the numbers that share a scale) follows from the rows of its scale. If the step has shorter blocks, scales
are repeated, which is exact. For longer blocks, another map or float32, arrays are decoded and encoded again, one by
one, where they lie. Split weights (bfloat16 with corrections in the optimizer state) are joined, or weights are split.
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
from jaxscale.sharding.partition import dividing
from jaxscale.state.canonical import PARAMS
from jaxscale.state.naming import CODES, SCALE
from jaxscale.typing import Array, PyTree

Abstract: TypeAlias = Mapping[str, jax.ShapeDtypeStruct]
"""Shape, dtype and sharding of each array, by name."""


@dataclasses.dataclass(frozen=True)
class Conversion:
    """How the arrays of a checkpoint become those of a step.

    Args:
        abstract: shape, dtype and sharding of each array to read from the checkpoint, by name.
        convert: function from the arrays that were read, which are donated, to the arrays of the step.
        lines: notes for the user.
    """

    abstract: dict[str, jax.ShapeDtypeStruct]
    convert: Callable[[dict[str, Array]], dict[str, Array]]
    lines: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Form:
    """How a checkpoint or a step keeps an array: as plain float32, or quantized in codes with scales.

    Args:
        map: name of the map from codes to numbers; "" for a plain array.
        block: how many numbers of a column share a scale; 0 for a plain array.
    """

    map: str = ""
    block: int = 0

    def names(self, name: str) -> tuple[str, ...]:
        """Names of the arrays in which an array is kept.

        Args:
            name: name of the array.

        Example:
            >>> Form("soft8", 256).names("w"), Form().names("w")
            (('w/codes.soft8', 'w/scale'), ('w',))
        """
        return (f"{name}/{CODES}{self.map}", f"{name}/{SCALE}") if self.map else (name,)

    def __str__(self) -> str:
        return f"{self.map} in blocks of {self.block}" if self.map else "float32"


def forms_of(shapes: Mapping[str, Sequence[int]]) -> dict[str, Form]:
    """The form of each quantized array in a canonical form, by the array's name; plain arrays are left out.

    Args:
        shapes: shape of each array of the canonical form, by name.

    Example:
        >>> forms_of({"w/codes.soft8": (512, 4), "w/scale": (2, 4), "b": (4,)})
        {'w': Form(map='soft8', block=256)}
    """
    forms = {}
    for name, shape in shapes.items():
        base, _, last = name.rpartition("/")
        scale_shape = shapes.get(f"{base}/{SCALE}")
        if last.startswith(CODES) and last.removeprefix(CODES) in MAPS and scale_shape is not None and scale_shape[-2]:
            forms[base] = Form(last.removeprefix(CODES), shape[-2] // scale_shape[-2])
    return forms


def conversion(entries: Mapping[str, Sequence[PyTree]], abstract: Abstract) -> Conversion:
    """Return how the arrays of a checkpoint become those of a step.

    Args:
        entries: (shape, dtype) of each array of the checkpoint, by name.
        abstract: shape, dtype and sharding of each array of the step, by name. An array that the checkpoint has in no
            form is listed unchanged among those to read, and the reader reports it as missing.
    """
    saved_forms = forms_of({name: entry[0] for name, entry in entries.items()})
    step_forms = forms_of({name: leaf.shape for name, leaf in abstract.items()})
    plain_form = Form()
    form_changes: dict[str, tuple[Form, Form]] = {}
    for name in sorted({*saved_forms, *step_forms}):  # in one order on all processes
        old, new = saved_forms.get(name, plain_form), step_forms.get(name, plain_form)
        is_saved, is_in_step = name in saved_forms or name in entries, name in step_forms or name in abstract
        if is_saved and is_in_step and old != new:
            form_changes[name] = (old, new)
    sources = dict(abstract)
    for name, (old, new) in form_changes.items():
        leaf = abstract[new.names(name)[0]]
        for array_name in new.names(name):
            del sources[array_name]
        for array_name in old.names(name):
            shape, dtype = tuple(entries[array_name][0]), entries[array_name][1]
            sources[array_name] = jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=fitting(leaf.sharding, shape))
    saved_corrections, step_corrections = corrections(entries), corrections(abstract)
    weight_names = [
        name for name in abstract if name in entries and (name in saved_corrections) != (name in step_corrections)
    ]
    for name in weight_names:
        leaf = abstract[name]
        if name in saved_corrections:
            sources[name] = jax.ShapeDtypeStruct(leaf.shape, jnp.bfloat16, sharding=leaf.sharding)
            sources[saved_corrections[name]] = jax.ShapeDtypeStruct(leaf.shape, jnp.int8, sharding=leaf.sharding)
        else:
            sources[name] = jax.ShapeDtypeStruct(leaf.shape, jnp.float32, sharding=leaf.sharding)
            del sources[step_corrections[name]]

    def convert(arrays: dict[str, Array]) -> dict[str, Array]:
        arrays = dict(arrays)
        for name in weight_names:
            if name in saved_corrections:
                arrays[name] = _join_fn(abstract[name].sharding)(arrays[name], arrays.pop(saved_corrections[name]))
            else:
                arrays[name], arrays[step_corrections[name]] = _split_fn(abstract[name].sharding)(arrays[name])
        for name, (old, new) in form_changes.items():
            old_arrays = [arrays.pop(array_name) for array_name in old.names(name)]
            new_leaves = [abstract[array_name] for array_name in new.names(name)]
            convert_array = _change_fn(old, new, tuple((leaf.dtype, leaf.sharding) for leaf in new_leaves))
            # wait, because dozens of programs in flight can starve one another on a CPU
            new_arrays = jax.block_until_ready(convert_array(old_arrays))
            arrays |= dict(zip(new.names(name), new_arrays, strict=True))
            for old_array in old_arrays:
                if not any(old_array is new_array for new_array in new_arrays):
                    old_array.delete()
        return arrays

    lines = change_lines(form_changes.values())
    if weight_names:
        old_form, new_form = ("split", "float32") if saved_corrections else ("float32", "split")
        lines = (*lines, f"weights were {old_form} and are now {new_form}")
    return Conversion(sources, convert, lines)


def corrections(names: Iterable[str]) -> dict[str, str]:
    """The name of the array that corrects each split weight, by the name of the weight.

    Args:
        names: names of the arrays of a canonical form.

    Example:
        >>> corrections(["params/w", "optimizer/1/correction/w"])
        {'params/w': 'optimizer/1/correction/w'}
    """
    split_names = ((name, *name.partition("/correction/")) for name in names if name.startswith("optimizer/"))
    return {f"{PARAMS}/{rest}": name for name, _, middle, rest in split_names if middle}


@functools.lru_cache(maxsize=256)
def _join_fn(sharding: NamedSharding) -> Callable[[Array, Array], Array]:
    """A compiled function from a split weight and its correction to the float32 weight."""
    return jax.jit(join, out_shardings=sharding)


@functools.lru_cache(maxsize=256)
def _split_fn(sharding: NamedSharding) -> Callable[[Array], tuple[Array, Array]]:
    """A compiled function from a float32 weight to the split weight and its correction."""
    return jax.jit(split, out_shardings=(sharding, sharding))


def change_lines(changes: Iterable[tuple[Form, Form]]) -> tuple[str, ...]:
    """Notes for the user on arrays whose numbers change, a line for each pair of forms.

    Args:
        changes: old and new form of each array.

    Example:
        >>> change_lines([(Form(), Form("soft8", 256))] * 2 + [(Form("soft8", 256), Form("soft8", 128))])
        ('2 arrays of optimizer state were float32 and are now soft8 in blocks of 256',)
    """
    counts = collections.Counter((old, new) for old, new in changes if not _exact(old, new))
    return tuple(
        f"{count} array{'s' if count > 1 else ''} of optimizer state {'were' if count > 1 else 'was'} {old} and "
        f"{'are' if count > 1 else 'is'} now {new}"
        for (old, new), count in counts.items()
    )


def _exact(old: Form, new: Form) -> bool:
    """Whether a change keeps all codes: the new form has the same map, and blocks that divide the old ones."""
    return old.map == new.map and bool(new.block) and old.block % new.block == 0


@functools.lru_cache(maxsize=256)
def _change_fn(
    old: Form, new: Form, targets: tuple[tuple[np.dtype, NamedSharding], ...]
) -> Callable[[list[Array]], list[Array]]:
    """A compiled function from the arrays in which one form keeps an array to those in which another form keeps it.

    Args:
        old: form of the arrays that are read.
        new: form of the arrays of the step.
        targets: dtype and sharding of each array of the step.
    """

    def change(arrays: list[Array]) -> list[Array]:
        arrays = to_device(arrays)
        if _exact(old, new):
            codes, scale = arrays
            return [codes, jnp.repeat(scale, old.block // new.block, axis=-2)]
        array = arrays[0]
        if old.map:
            array = decode(Quantized(array.astype(MAPS[old.map].dtype), arrays[1], old.map, old.block))
        if not new.map:
            return [array.astype(targets[0][0])]
        quantized = encode(array, new.map, new.block)
        return [quantized.codes.astype(targets[0][0]), quantized.scale]

    return jax.jit(change, out_shardings=[sharding for _, sharding in targets])


def fitting(sharding: NamedSharding, shape: Sequence[int]) -> NamedSharding:
    """The sharding for an array of another shape: dims that it cannot split evenly stay whole."""
    spec = dividing(sharding.spec, shape, sharding.mesh)
    return NamedSharding(sharding.mesh, spec, memory_kind=sharding.memory_kind)
