"""Conversion: the arrays of a checkpoint whose optimizer state has other bits or blocks, as those that a step wants.

Names say it all: a float32 array is NAME; a quantized one NAME/codes.MAP and NAME/scale, whose rows give the block.
What a step wants in shorter blocks gets its scales repeated, to the bit; longer blocks, another map or float32 are
decoded and encoded anew, array by array, where they lie. Weights that were split are joined, and the other way round.
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


@dataclasses.dataclass(frozen=True)
class Conversion:
    """How the arrays of a checkpoint become those that are wanted.

    Args:
        abstract: what to read: name to shape, dtype and sharding.
        convert: from the arrays read, which are donated, to those wanted.
        lines: notes for the user.
    """

    abstract: dict[str, jax.ShapeDtypeStruct]
    convert: Callable[[dict[str, Array]], dict[str, Array]]
    lines: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Form:
    """How an array of a canonical form is kept.

    Args:
        map: of its codes; "" for a plain array.
        block: numbers of a column that share a scale; 0 for a plain array.
    """

    map: str = ""
    block: int = 0

    def names(self, name: str) -> tuple[str, ...]:
        """Of the arrays that are kept.

        Example:
            >>> Form("soft8", 256).names("w"), Form().names("w")
            (('w/codes.soft8', 'w/scale'), ('w',))
        """
        return (f"{name}/{CODES}{self.map}", f"{name}/{SCALE}") if self.map else (name,)

    def __str__(self) -> str:
        return f"{self.map} in blocks of {self.block}" if self.map else "float32"


def forms_of(shapes: Mapping[str, Sequence[int]]) -> dict[str, Form]:
    """The quantized arrays among the arrays of a canonical form, by name.

    Args:
        shapes: of its arrays.

    Example:
        >>> forms_of({"w/codes.soft8": (512, 4), "w/scale": (2, 4), "b": (4,)})
        {'w': Form(map='soft8', block=256)}
    """
    forms = {}
    for name, shape in shapes.items():
        base, _, last = name.rpartition("/")
        scale = shapes.get(f"{base}/{SCALE}")
        if last.startswith(CODES) and last.removeprefix(CODES) in MAPS and scale is not None and scale[-2]:
            forms[base] = Form(last.removeprefix(CODES), shape[-2] // scale[-2])
    return forms


def conversion(entries: Mapping[str, Sequence[PyTree]], abstract: Abstract) -> Conversion:
    """How the arrays of a checkpoint become those that a step wants.

    Args:
        entries: shape and dtype of each array of the checkpoint, by name.
        abstract: name to shape, dtype and sharding of what is wanted; what is missing in the checkpoint in every form
            is asked for as it is, and refused by whoever reads.
    """
    there = forms_of({name: entry[0] for name, entry in entries.items()})
    wanted = forms_of({name: leaf.shape for name, leaf in abstract.items()})
    plain = Form()
    changes: dict[str, tuple[Form, Form]] = {}
    for name in sorted({*there, *wanted}):  # in one order on all processes
        old, new = there.get(name, plain), wanted.get(name, plain)
        saved, asked = name in there or name in entries, name in wanted or name in abstract
        if saved and asked and old != new:
            changes[name] = (old, new)
    read = dict(abstract)
    for name, (old, new) in changes.items():
        like = abstract[new.names(name)[0]]
        for part in new.names(name):
            del read[part]
        for part in old.names(name):
            shape, dtype = tuple(entries[part][0]), entries[part][1]
            read[part] = jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=fitting(like.sharding, shape))
    have, want = corrections(entries), corrections(abstract)
    weights = [name for name in abstract if (name in have) != (name in want) and name in entries]
    for name in weights:
        like = abstract[name]
        if name in have:
            read[name] = jax.ShapeDtypeStruct(like.shape, jnp.bfloat16, sharding=like.sharding)
            read[have[name]] = jax.ShapeDtypeStruct(like.shape, jnp.int8, sharding=like.sharding)
        else:
            read[name] = jax.ShapeDtypeStruct(like.shape, jnp.float32, sharding=like.sharding)
            del read[want[name]]

    def convert(arrays: dict[str, Array]) -> dict[str, Array]:
        arrays = dict(arrays)
        for name in weights:
            if name in have:
                arrays[name] = _joined(abstract[name].sharding)(arrays[name], arrays.pop(have[name]))
            else:
                arrays[name], arrays[want[name]] = _split(abstract[name].sharding)(arrays[name])
        for name, (old, new) in changes.items():
            sources = [arrays.pop(part) for part in old.names(name)]
            targets = [abstract[part] for part in new.names(name)]
            change = _changed(old, new, tuple((leaf.dtype, leaf.sharding) for leaf in targets))
            results = jax.block_until_ready(change(sources))  # dozens in flight can starve one another on a CPU
            arrays |= dict(zip(new.names(name), results, strict=True))
            for array in sources:
                if not any(array is kept for kept in results):
                    array.delete()
        return arrays

    lines = change_lines(changes.values())
    if weights:
        lines = (*lines, f"weights were {'split' if have else 'float32'} and are now {'float32' if have else 'split'}")
    return Conversion(read, convert, lines)


def corrections(names: Iterable[str]) -> dict[str, str]:
    """The name of the correction of each parameter, by the parameter's.

    Example:
        >>> corrections(["params/w", "optimizer/1/correction/w"])
        {'params/w': 'optimizer/1/correction/w'}
    """
    split_names = ((name, *name.partition("/correction/")) for name in names if name.startswith("optimizer/"))
    return {f"{PARAMS}/{rest}": name for name, _, middle, rest in split_names if middle}


@functools.lru_cache(maxsize=256)
def _joined(sharding: NamedSharding) -> Callable[[Array, Array], Array]:
    return jax.jit(join, out_shardings=sharding)


@functools.lru_cache(maxsize=256)
def _split(sharding: NamedSharding) -> Callable[[Array], tuple[Array, Array]]:
    return jax.jit(split, out_shardings=(sharding, sharding))


def change_lines(changes: Iterable[tuple[Form, Form]]) -> tuple[str, ...]:
    """Notes for the user on changes, a line for each kind.

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
    """Whether codes stay as they are: shorter blocks of the same map."""
    return old.map == new.map and bool(new.block) and old.block % new.block == 0


@functools.lru_cache(maxsize=256)
def _changed(
    old: Form, new: Form, targets: tuple[tuple[np.dtype, NamedSharding], ...]
) -> Callable[[list[Array]], list[Array]]:
    """A compiled function from the arrays of one form to those of another."""

    def change(arrays: list[Array]) -> list[Array]:
        arrays = to_device(arrays)
        if _exact(old, new):
            codes, scale = arrays
            return [codes, jnp.repeat(scale, old.block // new.block, axis=-2)]
        whole = arrays[0]
        if old.map:
            whole = decode(Quantized(whole.astype(MAPS[old.map].dtype), arrays[1], old.map, old.block))
        if not new.map:
            return [whole.astype(targets[0][0])]
        quantized = encode(whole, new.map, new.block)
        return [quantized.codes.astype(targets[0][0]), quantized.scale]

    return jax.jit(change, out_shardings=[sharding for _, sharding in targets])


def fitting(sharding: NamedSharding, shape: Sequence[int]) -> NamedSharding:
    """The sharding of an array of another shape: whole along the dims that do not divide."""
    spec = dividing(sharding.spec, shape, sharding.mesh)
    return NamedSharding(sharding.mesh, spec, memory_kind=sharding.memory_kind)
