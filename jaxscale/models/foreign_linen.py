"""Foreign Linen modules: an NNX module around a Linen module, and the blocks among its submodules.

`flax.nnx.bridge` exposes the variables of a Linen module, but not its submodules. So this module intercepts the calls
of submodules (`linen.intercept_methods`): once without data, to find the submodules that repeat, and then in each trace
of a loss. There, a block is lifted (`flax.core.lift.pack`) to a pure function of (parameters, other variables and
random keys, arrays).

Left out: blocks with another module among their attributes or arguments, such as a shared embedding.
"""

import contextlib
import dataclasses
import functools
import inspect
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen, nnx
from flax.core import lift, unfreeze
from flax.linen import meta
from flax.linen.transforms import get_module_scopes, lift_direct_transform

from jaxscale.errors import unknown
from jaxscale.trees import path_name
from jaxscale.values import check_types

TRAINING_ARGUMENTS: Mapping[str, bool] = {
    "train": True,
    "training": True,
    "is_training": True,
    "deterministic": False,
    "use_running_average": False,
}
"""Arguments of a module's `__call__` that set its mode, with their values in training; evaluation negates the values.
"""
_Wrapper = Callable[[Callable[..., Any]], Callable[..., Any]]
"""Maps a block's pure function to the function to call instead."""


@dataclasses.dataclass(frozen=True)
class FromLinen:
    """Builds an NNX module around a Linen module, and initializes its variables by a forward pass over zeros.

    Args:
        module: Linen module.
        inputs: shapes and types of the arrays of one call.
    """

    module: Any
    inputs: tuple[jax.ShapeDtypeStruct, ...]

    def __post_init__(self) -> None:
        check_types(self)

    def __call__(self, rngs: nnx.Rngs) -> nnx.Module:
        """Return the NNX module that `flax.nnx.bridge` makes of the Linen module."""
        module = nnx.bridge.ToNNX(self.module, rngs=rngs)
        zeros = [jnp.zeros(abstract_input.shape, abstract_input.dtype) for abstract_input in self.inputs]
        nnx.bridge.lazy_init(module, *zeros, **mode_arguments(self.module, is_training=False))
        return module

    @functools.cached_property
    def block_paths(self) -> tuple[str, ...]:
        """The paths of the outermost submodules that repeat, such as "Block_0", in the order of their numbers.

        Two submodules repeat if their names are one stem with different numbers, and they are of one class and have
        parameters of the same names, shapes and types. Layers of Flax itself are too small to be blocks.

        Example:
            >>> class Block(linen.Module):
            ...     @linen.compact
            ...     def __call__(self, x):
            ...         return x + linen.Dense(4)(x)
            >>> layers = linen.Sequential([Block(), Block()])
            >>> FromLinen(layers, (jax.ShapeDtypeStruct((1, 4), "float32"),)).block_paths
            ('layers_0', 'layers_1')
        """
        signature_by_path: dict[tuple[str, ...], Any] = {}

        def record(next_call: Callable[..., Any], args: Any, kwargs: Any, context: Any) -> Any:
            """Call a method of a submodule, and record the class and the parameters of a possible block."""
            module, output = context.module, next_call(*args, **kwargs)
            is_flax_layer = type(module).__module__.startswith("flax.") and not isinstance(module, linen.Sequential)
            if context.method_name != "__call__" or is_flax_layer or not module.path:
                return output
            if len(get_module_scopes(module, args, kwargs)[0]) > 1:
                return output
            params = _array_by_name(module.variables.get("params", {}))
            param_signature = tuple((name, array.shape, str(array.dtype)) for name, array in params.items())
            if param_signature:
                signature_by_path[module.path] = (type(module), param_signature)
            return output

        def init(*arrays: Any) -> Any:
            with linen.intercept_methods(record):
                key_by_stream = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
                return self.module.init(key_by_stream, *arrays, **mode_arguments(self.module, is_training=False))

        jax.eval_shape(init, *self.inputs)
        paths_by_group: dict[Any, list[tuple[str, ...]]] = defaultdict(list)
        for path, (cls, _) in signature_by_path.items():
            if re.search(r"\d$", path[-1]):
                paths_by_group[(path[:-1], path[-1].rstrip("0123456789"), cls)].append(path)
        block_paths: list[tuple[str, ...]] = []
        for (parent_path, _, _), paths in sorted(paths_by_group.items(), key=lambda group: len(group[0][0])):
            is_in_block = any(parent_path[: len(block_path)] == block_path for block_path in block_paths)
            if not is_in_block and len({signature_by_path[path] for path in paths}) < len(paths):
                block_paths += sorted(paths, key=lambda path: int(re.findall(r"\d+$", path[-1])[0]))
        return tuple(map("/".join, block_paths))

    def list_member_paths(self, blocks: str) -> tuple[str, ...]:
        """Return the block paths that consist of the stem `blocks`, such as "decoder/Block", and a number."""
        paths_by_stem = defaultdict(list)
        for path in self.block_paths:
            paths_by_stem[path.rstrip("0123456789").rstrip("_")].append(path)
        stem = blocks.replace(".", "/").rstrip("_")
        if stem not in paths_by_stem:
            raise unknown("list of blocks", blocks, paths_by_stem)
        return tuple(paths_by_stem[stem])


def mode_arguments(module: Any, is_training: bool) -> dict[str, bool]:
    """Return the mode arguments that the module's `__call__` has, with their values for training or evaluation."""
    parameters = inspect.signature(type(module).__call__).parameters
    return {
        name: value_in_training == is_training
        for name, value_in_training in TRAINING_ARGUMENTS.items()
        if name in parameters
    }


def unbox_params(module: nnx.Module) -> None:
    """Remove Linen's boxes with axis names (`linen.Partitioned`), which would otherwise place the parameters."""
    for _, variable in nnx.to_flat_state(nnx.state(module, nnx.Param)):
        if "linen_meta_type" in variable.get_metadata():
            variable.del_metadata("linen_meta_type")


@contextlib.contextmanager
def wrap_linen_blocks(paths: Sequence[str], wrapper_of: Callable[[str], _Wrapper]) -> Iterator[set[str]]:
    """Return a context in which traced calls of Linen submodules go through a wrapper; yield the called paths.

    Args:
        paths: paths of the submodules.
        wrapper_of: function that returns the wrapper of the block at a path.
    """
    called_paths: set[str] = set()
    running_paths: set[str] = set()

    def intercept(next_call: Callable[..., Any], args: Any, kwargs: Any, context: Any) -> Any:
        """Call a method of a module; a block is called through its wrapper."""
        path = "/".join(context.module.path or ())
        if context.method_name != "__call__" or path not in paths or path in running_paths:
            return next_call(*args, **kwargs)
        called_paths.add(path)
        running_paths.add(path)
        try:
            return _call_lifted(context.module, args, kwargs, wrapper_of(path))
        finally:
            running_paths.discard(path)

    with linen.intercept_methods(intercept):
        yield called_paths


def _call_lifted(module: Any, args: Any, kwargs: Any, wrapper: _Wrapper) -> Any:
    """Call a Linen module as a pure function, through a wrapper, and return its output.

    Args:
        module: the module, bound to its variables.
        args: positional arguments of the call.
        kwargs: named arguments of the call.
        wrapper: maps the pure function to the function to call instead.
    """
    leaves, treedef = jax.tree.flatten((args, kwargs))
    is_array_flags = [isinstance(leaf, jax.Array) or hasattr(leaf, "__array_interface__") for leaf in leaves]
    static_leaves = [None if is_array else leaf for leaf, is_array in zip(leaves, is_array_flags, strict=True)]

    def call(bound_module: Any, arrays: Sequence[Any]) -> Any:
        """Call the module with its arguments, whose arrays are replaced by `arrays`."""
        remaining_arrays = iter(arrays)
        new_leaves = [
            next(remaining_arrays) if is_array else static_leaf
            for static_leaf, is_array in zip(static_leaves, is_array_flags, strict=True)
        ]
        new_args, new_kwargs = jax.tree.unflatten(treedef, new_leaves)
        return bound_module(*new_args, **new_kwargs)

    def call_through_wrapper(call_in_scope: Callable[..., Any], scopes: Any, arrays: Sequence[Any]) -> Any:
        """Run `call_in_scope` through the wrapper; `flax.core.lift` passes the scope's variables and random keys."""

        def run(scope_fn: Any, repack_fn: Any, variable_groups: Any, rng_groups: Any, arrays: Any) -> Any:
            param_groups, other_groups = variable_groups
            boxed_groups = unfreeze(param_groups)

            def block(params: Any, state: Any, arrays: Any) -> Any:
                """Return the output of the block, and its new variables."""
                traced_other_groups, traced_rng_groups = state
                packed_scopes = scope_fn((_refill_boxes(boxed_groups, params), traced_other_groups), traced_rng_groups)
                return call_in_scope(packed_scopes, arrays), repack_fn(packed_scopes)

            (param_group,) = param_groups
            params = _array_by_name(param_group.get("params", {}))
            return wrapper(block)(params, (other_groups, rng_groups), arrays)

        return lift.pack(run, ("params", True), (True,), (True,), name="block")(scopes, arrays)

    arrays = [leaf for leaf, is_array in zip(leaves, is_array_flags, strict=True) if is_array]
    return lift_direct_transform(call_through_wrapper, (call,), module, arrays)


def _array_by_name(params: Any) -> dict[str, Any]:
    """Return the arrays of nested parameters by name, sorted by name, without their boxes (`linen.Partitioned`)."""
    paths_and_leaves = jax.tree_util.tree_leaves_with_path(unfreeze(params), is_leaf=_is_box)
    return dict(sorted((path_name(path), jax.tree.leaves(leaf)[0]) for path, leaf in paths_and_leaves))


def _refill_boxes(boxed_groups: Any, params: Mapping[str, Any]) -> Any:
    """Return `boxed_groups`, which has one group of variables, with its parameters replaced by `params`."""
    (group,) = boxed_groups

    def refill(path: Any, leaf: Any) -> Any:
        return jax.tree.unflatten(jax.tree.structure(leaf), [params[path_name(path)]])

    filled_params = jax.tree_util.tree_map_with_path(refill, group.get("params", {}), is_leaf=_is_box)
    return ({**group, "params": filled_params},) if "params" in group else (group,)


def _is_box(node: Any) -> bool:
    """Return whether a node is a Flax box: an array with metadata."""
    return isinstance(node, meta.AxisMetadata)
