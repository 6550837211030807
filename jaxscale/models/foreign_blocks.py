"""The blocks of a foreign module: its repeated submodules, run through `blocks.wrap` from outside.

A block is one of several similar submodules: members of one list (`nnx.List`, `nnx.Sequential`), or attributes whose
names are one stem and a number (`block0`, `block1`). While a loss is traced, the `__call__` of exactly these instances
goes through `blocks.wrap` as a pure function of (parameters, other variables, arguments), so that `jax.checkpoint` sees
every input; the function also returns updated batch statistics and dropout counts. The user's class is restored when
the trace ends.

Left out: blocks inside the user's `nnx.scan` or `nnx.vmap` (one submodule with stacked parameters), blocks run by a
method other than `__call__`, and one block called several times under several names (tied layers). For a model with
such blocks, name the blocks with `ForeignModel(blocks=...)`; otherwise the whole forward pass is one block.
"""

import contextlib
import re
import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxscale import blocks
from jaxscale.errors import UserError, unknown
from jaxscale.models.foreign_linen import wrap_linen_blocks

ModulePath = tuple[Any, ...]
PureBlock = Callable[[Any, Any, Any], Any]
"""A block as a function of (parameters, other variables, arrays) that returns (results, new variables)."""
BlockWrapper = Callable[[PureBlock], PureBlock]
_NUMBERED = re.compile(r"(.*?)(\d+)")
_patch_lock = threading.RLock()


def repeated_block_paths(module: nnx.Module) -> tuple[str, ...]:
    """Return the paths of the outermost submodules that repeat: "layers/0", "layers/1", ...

    Two submodules repeat if they lie in the same list (or their names are the same stem with different numbers), are of
    the same class, and have parameters of the same names, shapes and types. Then all submodules of this class in the
    list are blocks. Layers of Flax itself (`nnx.Linear`, ...) are too small to be blocks, but containers
    (`nnx.Sequential`) may be.

    Example:
        >>> class Block(nnx.Module):
        ...     def __init__(self, rngs):
        ...         self.linear = nnx.Linear(4, 4, rngs=rngs)
        ...     def __call__(self, x):
        ...         return x + self.linear(x)
        >>> class Net(nnx.Module):
        ...     def __init__(self, rngs):
        ...         self.layers = nnx.List([Block(rngs) for _ in range(3)])
        >>> repeated_block_paths(Net(nnx.Rngs(0)))
        ('layers/0', 'layers/1', 'layers/2')
    """
    module_by_path = _submodules(module)
    paths_by_group: dict[tuple[ModulePath, str, type], list[ModulePath]] = defaultdict(list)
    for path, node in module_by_path.items():
        stem = _stem(path[-1]) if path else None
        if stem is not None and _may_be_block(node):
            paths_by_group[(path[:-1], stem, type(node))].append(path)
    block_paths: list[ModulePath] = []
    for parent_path, stem, cls in sorted(paths_by_group, key=lambda group: len(group[0])):
        paths = paths_by_group[(parent_path, stem, cls)]
        is_in_block = any(parent_path[: len(block_path)] == block_path for block_path in block_paths)
        if not is_in_block and len({_signature(module_by_path[path]) for path in paths}) < len(paths):
            block_paths += sorted(paths, key=lambda path: int(re.findall(r"\d+", str(path[-1]))[-1]))
    return tuple("/".join(map(str, path)) for path in block_paths)


def list_member_paths(module: nnx.Module, blocks: str | Sequence[str]) -> tuple[str, ...]:
    """Return the paths of the blocks that a user specifies by their paths, or by the path of a list.

    Args:
        module: the module.
        blocks: paths of submodules, or the path of a list of submodules, such as "encoder/layers".

    Example:
        >>> module = nnx.List([nnx.Linear(4, 4, rngs=nnx.Rngs(0)) for _ in range(2)])
        >>> list_member_paths(nnx.Dict(layers=module), "layers")
        ('layers/0', 'layers/1')
    """
    if not isinstance(blocks, str):
        return tuple(blocks)
    paths = ["/".join(map(str, path)) for path in _submodules(module)]
    list_path = blocks.replace(".", "/")
    paths_by_list: dict[str, list[str]] = defaultdict(list)
    for path in paths:
        parent, _, name = path.rpartition("/")
        if name.isascii() and name.isdecimal():
            paths_by_list[parent].append(path)
    if list_path not in paths_by_list:
        raise unknown("list of blocks", blocks, paths_by_list)
    return tuple(sorted(paths_by_list[list_path], key=lambda path: int(path.rpartition("/")[2])))


@contextlib.contextmanager
def wrap_blocks(
    module: nnx.Module, paths: Sequence[str], wrapper_of: Callable[[str], BlockWrapper] | None = None
) -> Iterator[None]:
    """Return a context in which traced calls of the submodules at `paths` go through `blocks.wrap`.

    Args:
        module: the module.
        paths: paths of its blocks.
        wrapper_of: function that returns the wrapper of the block at a path; `blocks.wrap` by default.

    Raises:
        UserError: a submodule does not exist, or a plan treats blocks but the forward pass called none of them.
    """
    if not paths or (wrapper_of is None and _is_untreated()):
        yield
        return
    if isinstance(module, nnx.bridge.ToNNX):
        with wrap_linen_blocks(
            paths, lambda path: _treat_block if wrapper_of is None else wrapper_of(path)
        ) as called_paths:
            yield
        _check_called(paths, called_paths)
        return
    module_by_path = {"/".join(map(str, path)): node for path, node in _submodules(module).items()}
    for path in paths:
        if path not in module_by_path:
            raise unknown("block", path, [name for name in module_by_path if name])
    wrapper_by_id = {
        id(module_by_path[path]): _treat_block if wrapper_of is None else wrapper_of(path) for path in paths
    }
    called_ids: set[int] = set()
    # the lock is held while tracing: a patch of another thread must not be restored out of order
    with _patch_lock, contextlib.ExitStack() as patch_stack:
        for cls in {type(module_by_path[path]) for path in paths}:
            patch_stack.enter_context(_patch_calls(cls, _call_maker(wrapper_by_id, called_ids)))
        yield
    _check_called(paths, called_ids)


def _check_called(paths: Sequence[str], called_blocks: Collection[Any]) -> None:
    """Raise UserError if the forward pass called no block; `called_blocks` has one entry per called block."""
    if not called_blocks:
        raise UserError(
            f"blocks {', '.join(paths[:3])}{', ...' if len(paths) > 3 else ''} were found, but the forward pass calls "
            "none of them (or a method other than __call__), so the plan's treatment of blocks would have no effect. "
            "Use ForeignModel(blocks=()) to treat the whole forward pass as one block"
        )


def run_as_one_block(function: Callable[..., Any], *args: Any, wrapper: BlockWrapper | None = None) -> Any:
    """Run `function(*args)` through `blocks.wrap`, or through another wrapper, as one block, and return its result.

    The variables of modules among the arguments, or inside them, are updated as by a plain call. A variable that the
    call creates (`sow`) is added.
    """
    if wrapper is None and _is_untreated():
        return function(*args)
    graphdef, params, state, arrays = nnx.split(args, nnx.Param, nnx.Variable, ...)

    def block(params: Any, state: Any, arrays: Any) -> Any:
        """Return the function's result, and the new state of the modules among the arguments."""
        block_args = nnx.merge(graphdef, params, state, arrays, copy=True)
        output = function(*block_args)
        return output, nnx.split(block_args, nnx.Param, nnx.Variable, ...)[2]

    output, new_state = (wrapper or _treat_block)(block)(params, state, arrays)
    existing_paths = {path for path, _ in nnx.to_flat_state(state)}
    updated_variable_by_path, new_variable_by_path = {}, {}
    for path, variable in nnx.to_flat_state(new_state):
        (updated_variable_by_path if path in existing_paths else new_variable_by_path)[path] = variable
    nnx.update(args, nnx.from_flat_state(updated_variable_by_path))
    for path, variable in new_variable_by_path.items():
        parent: Any = args
        for name in path[:-1]:
            parent = parent[name] if isinstance(name, int) or isinstance(parent, dict) else getattr(parent, name)
        setattr(parent, path[-1], variable)
    return output


def _treat_block(block: PureBlock) -> PureBlock:
    """Return the block with the plan's treatment, such as remat."""
    return blocks.wrap(block, rolled=False)


def _is_untreated() -> bool:
    """Return whether the plan leaves blocks untreated, so that calls stay unchanged."""
    return blocks.wrap(_is_untreated, rolled=False) is _is_untreated


@contextlib.contextmanager
def cast_arguments(module: nnx.Module, dtype: Any) -> Iterator[None]:
    """Return a context in which calls of this instance cast their float arguments of two or more dims to `dtype`.

    A vector, such as the time steps of a diffusion model, keeps its dtype, as do arrays that the score itself reads.
    """

    def cast(x: Any) -> Any:
        is_castable = getattr(x, "ndim", 0) >= 2 and jnp.issubdtype(x.dtype, jnp.floating)
        return jnp.asarray(x, dtype) if is_castable else x

    def make_call(original_call: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            args, kwargs = (
                (args, kwargs) if self is not module else jax.tree.map(cast, (args, kwargs), is_leaf=_is_module)
            )
            return original_call(self, *args, **kwargs)

        return call

    with _patch_lock, _patch_calls(type(module), make_call):
        yield


def _call_maker(
    wrapper_by_id: Mapping[int, BlockWrapper], called_ids: set[int]
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a function that maps a class's `__call__` to a version that runs some instances as blocks.

    Args:
        wrapper_by_id: wrapper of each instance that is a block, by the instance's `id`.
        called_ids: set to which the ids of called blocks are added.
    """

    def make_call(original_call: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            if id(self) not in wrapper_by_id:  # another module, or its own copy inside the block
                return original_call(self, *args, **kwargs)
            called_ids.add(id(self))
            return run_as_one_block(
                lambda self, args, kwargs: original_call(self, *args, **kwargs),
                self,
                args,
                kwargs,
                wrapper=wrapper_by_id[id(self)],
            )

        return call

    return make_call


@contextlib.contextmanager
def _patch_calls(cls: type, make_call: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """Return a context in which a class's `__call__` is replaced by `make_call(cls.__call__)`."""
    original_call: Any = cls.__call__
    has_own_call = "__call__" in vars(cls)
    setattr(cls, "__call__", make_call(original_call))  # noqa: B010 - a method of a foreign class
    try:
        yield
    finally:
        if has_own_call:
            setattr(cls, "__call__", original_call)  # noqa: B010
        else:
            del cls.__call__


def _is_module(value: Any) -> bool:
    """Return whether a value is a module, which tree functions must not enter although it is a pytree."""
    return isinstance(value, nnx.Module)


def _submodules(module: nnx.Module) -> dict[ModulePath, nnx.Module]:
    """Return the module and all its submodules, by path."""
    return {path: node for path, node in nnx.iter_graph(module) if isinstance(node, nnx.Module)}


def _stem(name: Any) -> str | None:
    """Return the name without its number: "" for a list member, "block" for block0, `None` without a number."""
    if isinstance(name, int):
        return ""
    match = _NUMBERED.fullmatch(str(name))
    return match[1] if match else None


def _may_be_block(node: nnx.Module) -> bool:
    """Return whether a submodule is callable, has parameters, and is not a layer of Flax itself."""
    is_not_flax_layer = not type(node).__module__.startswith("flax.") or isinstance(node, nnx.Sequential)
    return is_not_flax_layer and callable(node) and bool(jax.tree.leaves(nnx.state(node, nnx.Param)))


def _signature(node: nnx.Module) -> Any:
    """Return the names, shapes and types of a submodule's parameters, which repeated submodules have in common."""
    paths_and_params = nnx.to_flat_state(nnx.state(node, nnx.Param))
    return tuple((path, tuple(param.shape), str(param.dtype)) for path, param in paths_and_params)
