"""The differences between the supported JAX versions, in one small function each, and nothing else."""

import inspect
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.custom_batching
from jax._src import compilation_cache, core, lru_cache, source_info_util, xla_bridge
from jax._src.interpreters import partial_eval
from jax._src.lib import version as jaxlib_version
from jax.experimental import compute_on as _compute_on
from jax.extend import core as jex


def compute_on_host(function: Callable[..., Any], spaces: Any) -> Callable[..., Any]:
    """Return a function that, when called under `jit`, runs `function` on the CPU of the device's host.

    Args:
        function: a function of arrays in host memory.
        spaces: `jax.memory.Space` of each result, as a tree whose structure is that of the results, or a prefix.

    References:
        `jax.experimental.compute_on`: `compute_on2` up to JAX 0.10, `compute_on` from 0.11.
    """
    run_on: Any = getattr(_compute_on, "compute_on2", None) or _compute_on.compute_on
    return run_on(function, compute_type="device_host", out_memory_spaces=spaces)


def rebind(eqn: Any, values: Sequence[Any]) -> list[Any]:
    """Run one equation of a jaxpr on values (tracers or arrays). Parameters and source information are kept.

    Args:
        eqn: equation of a jaxpr.
        values: values of the equation's inputs.

    Returns:
        Values of the equation's outputs.

    References:
        `jax.core.eval_jaxpr`; before JAX 0.11 an equation's functions are separate from its params.
    """
    bind_params = eqn.primitive.get_bind_params(eqn.params)
    functions, params = ((), bind_params) if isinstance(bind_params, dict) else bind_params
    name_stack = source_info_util.current_name_stack() + eqn.source_info.name_stack
    with source_info_util.user_context(eqn.source_info.traceback, name_stack=name_stack), eqn.ctx.manager:
        outputs = eqn.primitive.bind(*functions, *values, **params)
    return list(outputs) if eqn.primitive.multiple_results else [outputs]


def rebind_checkpoint(eqn: Any, function: Callable[..., Any], values: Sequence[Any]) -> Any:
    """Run a function in place of a checkpoint's own program, with the parameters of the checkpoint's equation.

    Args:
        eqn: equation of a differentiated `jax.checkpoint`.
        function: a function of arrays that returns a tree of arrays.
        values: arguments of the function.

    Returns:
        The function's tree of results.
    """
    closed_jaxpr, abstract_results = jax.make_jaxpr(function, return_shape=True)(*values)
    open_jaxpr: Any = partial_eval.convert_constvars_jaxpr(closed_jaxpr.jaxpr)
    jaxpr = jex.ClosedJaxpr(open_jaxpr, ()) if hasattr(eqn.params["jaxpr"], "jaxpr") else open_jaxpr
    outputs = rebind(eqn.replace(params={**eqn.params, "jaxpr": jaxpr}), [*closed_jaxpr.consts, *values])
    return jax.tree.unflatten(jax.tree.structure(abstract_results), outputs)


def source_line(eqn: Any) -> str:
    """Return the user's line that made an equation, such as "file.py:12 (function)"; "" if the line is unknown.

    Args:
        eqn: equation of a jaxpr.
    """
    frame = source_info_util.user_frame(eqn.source_info.traceback)
    if frame is None:
        return ""
    return f"{frame.file_name.rsplit('/', 1)[-1]}:{frame.start_line} ({frame.function_name})"


def scan_counts(params: Any) -> tuple[int, int]:
    """Return the number of a scan's constant inputs and the number of its carries. The scanned inputs follow these.

    Args:
        params: parameters of the scan's equation. Before JAX 0.12 they have `num_consts` and `num_carry`; from 0.12 on,
            a tree of all inputs.
    """
    if "num_carry" in params:
        return params["num_consts"], params["num_carry"]
    const_inputs, carry_inputs, _ = params["ft_in"].unpack()
    return len(const_inputs), len(carry_inputs)


def varying_axes(value: Any) -> frozenset[str]:
    """Return the manual mesh axes (`jax.shard_map`) over which a value may differ between devices.

    Args:
        value: an array, a tracer, or the type (`jax.typeof`) of an array or tracer. JAX up to 0.10 calls these axes
            `vma`.
    """
    value_type: Any = value if isinstance(value, core.AbstractValue) else jax.typeof(value)
    axis_type = getattr(value_type, "manual_axis_type", None)
    return frozenset(value_type.vma if axis_type is None else axis_type.varying)


def all_gather_invarying(value: Any, axis: str) -> Any:
    """Gather a value from all devices along an axis, and concatenate the pieces along the first dim.

    The type of the result does not vary over the axis.

    Args:
        value: this device's piece.
        axis: a manual mesh axis, or an axis of `jax.vmap`. A type never varies over an axis of `jax.vmap`. In that case
            the result is declared "varying", because JAX up to 0.10 cannot gather the value as "invarying".
    """
    return jax.lax.all_gather(value, axis, tiled=True, to="invarying" if axis in varying_axes(value) else "varying")


def sequential_on_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a version of `function` that `jax.vmap` on a CPU runs on one matrix after another.

    The LAPACK kernels of jaxlib 0.10 distribute a batch over the thread pool that runs the program. Each kernel blocks
    one of the pool's threads while it waits for the pool. So if there are as many kernels as threads, they deadlock. A
    single matrix is not distributed.

    Args:
        function: a function of matrices, without a batch dim, that uses decompositions of `jnp.linalg`.

    Example:
        >>> import jax.numpy as jnp
        >>> matrices = jnp.stack([2 * jnp.eye(3), 4 * jnp.eye(3)])
        >>> jax.vmap(sequential_on_cpu(jnp.linalg.cholesky))(matrices)[:, 0, 0].tolist()
        [1.4142135381698608, 2.0]
    """
    run_in_sequence = jax.custom_batching.sequential_vmap(function)

    def run(*matrices: Any) -> Any:
        """Return the function's result. On a CPU under `jax.vmap`, compute it matrix by matrix."""
        return jax.lax.platform_dependent(*matrices, cpu=run_in_sequence, default=function)

    return run


def prune(program: Any, is_result_used: Sequence[bool]) -> tuple[Any, list[bool]]:
    """Remove from a program the equations that only unused results need, including equations inside calls and scans.

    Args:
        program: the program, a closed jaxpr.
        is_result_used: for each result, whether it is used.

    Returns:
        The program that computes the used results; and for each input of the original program, whether the new program
        still takes that input.
    """
    jaxpr, is_input_used = partial_eval.dce_jaxpr(program.jaxpr, list(is_result_used))
    return jex.ClosedJaxpr(jaxpr, program.consts), is_input_used


def runs_recomputation_early() -> bool:
    """Return whether XLA:CPU drops the barriers of `jax.checkpoint` before it schedules a program.

    XLA does so up to jaxlib 0.10.
    """
    return jaxlib_version < (0, 11)


def is_backend_started() -> bool:
    """Return whether JAX has started its backends, after which their settings are fixed."""
    return xla_bridge.backends_are_initialized()


def has_collective_timeout() -> bool:
    """Return whether XLA has a flag for the timeout of XLA:CPU's collectives. An unknown flag ends the process."""
    return jaxlib_version < (0, 13)


def jit_options(lowered: Any) -> dict[str, Any]:
    """Return the compiler options that `jax.jit` received for a lowered program. The program's text does not show them.

    Example:
        >>> jit_options(jax.jit(lambda: 0.0, compiler_options={"xla_cpu_enable_fast_math": True}).lower())
        {'xla_cpu_enable_fast_math': True}
    """
    return dict(lowered._lowering._compiler_options_kvs)


def filter_compile_cache(accepts: Callable[[str, Any], bool]) -> None:
    """Filter the programs that JAX's persistent compile cache writes and reads.

    A rejected program is not written; if it was read, it is discarded and compiled again. The filter stays for the rest
    of the process. If a version of JAX does not allow the filter, the cache is disabled.

    Args:
        accepts: a function that returns whether to accept a program. Its arguments are the program's name ("" if the
            program was read from the cache), and the program as a `LoadedExecutable` of jaxlib.

    References:
        `jax._src.compiler.compile_or_get_cached`, which calls both wrapped functions by their names in
        `jax._src.compilation_cache`; their parameters differ by version.
    """
    read = getattr(compilation_cache, "get_executable_and_time", None)
    write = getattr(compilation_cache, "put_executable_and_time", None)
    if read is None or write is None or not {"module_name", "executable"} <= set(inspect.signature(write).parameters):
        jax.config.update("jax_enable_compilation_cache", False)
        compilation_cache.reset_cache()  # JAX checks only once whether there is a cache
        return
    write_signature = inspect.signature(write)

    def filtered_read(*args: Any, **kwargs: Any) -> Any:
        """Return (program, compilation time in seconds), as `read` does; (None, None) if the program is rejected."""
        executable, seconds = read(*args, **kwargs)
        return (executable, seconds) if executable is None or accepts("", executable) else (None, None)

    def filtered_write(*args: Any, **kwargs: Any) -> None:
        """Write a program to the cache with `write`, unless it is rejected."""
        argument_by_name = write_signature.bind(*args, **kwargs).arguments
        if accepts(argument_by_name["module_name"], argument_by_name["executable"]):
            write(*args, **kwargs)

    compilation_cache.get_executable_and_time = filtered_read
    compilation_cache.put_executable_and_time = filtered_write


def write_cached_programs_whole() -> None:
    """Make JAX's persistent compile cache write each program to a temporary file, and then rename the file.

    JAX itself writes to the final file directly. Another process may then read an incomplete program, and a process
    that is killed leaves an incomplete program that is never replaced. A cache with a limited size has a lock, and a
    bucket stores an object whole or not at all, so these two kinds of cache are left unchanged.

    References:
        `jax._src.lru_cache.LRUCache.put`.
    """
    cache_class: Any = lru_cache.LRUCache
    put = getattr(cache_class, "put", None)
    if put is None:
        return

    def put_whole(cache: Any, key: str, content: bytes) -> None:
        """Write the content of an entry, unless the cache already has the entry."""
        path = os.path.join(str(cache.path), f"{key}-cache")
        if cache.eviction_enabled or "://" in path:
            put(cache, key, content)
        elif not os.path.exists(path):
            draft_path = Path(f"{path}.{os.getpid()}")
            try:
                draft_path.write_bytes(content)
                draft_path.replace(path)
            finally:
                draft_path.unlink(missing_ok=True)

    cache_class.put = put_whole
