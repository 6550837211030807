"""The child process of a compilation: it builds a recipe's program, compiles it and writes a report.

The parent (`compiler/compile.py`) sets the environment, which JAX reads when it is first imported. The child writes one
file, which contains a report, a user's mistake or the recipe's error. If the file is missing, the child has died.
"""

import importlib.metadata
import importlib.util
import json
import pathlib
import pickle
import re
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

from jaxscale.compat import jit_options
from jaxscale.compiler import report_cache
from jaxscale.compiler.collectives import collectives
from jaxscale.compiler.described import LoweredFor
from jaxscale.compiler.hlo_flop import program_flop
from jaxscale.compiler.hlo_program import HloProgram
from jaxscale.compiler.live import Live, live_at_the_peak
from jaxscale.compiler.report import CompileReport, out_of_memory, program_hash
from jaxscale.compiler.schedule import ProgramSchedule, schedule_of
from jaxscale.compiler.target import Target
from jaxscale.errors import UserError
from jaxscale.platforms.platform import Platform

_OPTIONS_BY_FAILURE: Mapping[str, Mapping[str, bool]] = {
    "Couldn't find output tile sizes": {"xla_gpu_enable_triton_gemm": False},
}
"""Options with which a program is compiled again, by a part of the message with which the compiler fails. XLA:GPU finds
no tiles for some products that it compiles itself, such as those of a ViT; with the option, a library computes them."""


def main() -> None:
    """Read a request from the folder that the command line names, and write the reply to the same folder."""
    folder = pathlib.Path(sys.argv[2])
    request = pickle.loads((folder / "request").read_bytes())
    try:
        reply = {"report": make_report(request).json()}
    except UserError as error:
        reply = {"mistake": str(error)}
    except _DevicesUnavailable:
        reply = {"unavailable": True}
    except Exception:  # the recipe may raise anything
        reply = {"failed": traceback.format_exc()}
    partial_file = folder / "result.part"
    partial_file.write_text(json.dumps(reply))
    partial_file.rename(folder / "result")


def make_report(request: Mapping[str, Any]) -> CompileReport:
    """Return the report that a request asks for, from the cache or from the compiler."""
    platform: Platform = request["platform"]
    if request["main"] is not None:
        _import_main(request["main"])
    recipe = pickle.loads(request["recipe"])
    target: Target = request["target"]
    devices = _devices(platform, target)
    lowered = recipe(devices)
    lowered = lowered.lower() if hasattr(lowered, "jaxpr") else lowered
    if not hasattr(lowered, "compile"):
        raise UserError(
            f"a recipe must return a jax.stages.Lowered or Traced (jax.jit(f).lower(...)), got {type(lowered).__name__}"
        )
    versions = {package: importlib.metadata.version(package) for package in ("jax", "jaxlib")}
    versions |= target.compiler
    cache_key = report_cache.report_key(
        lowered, platform, versions, request["options"], request["explain"], target.attached
    )
    if request["cache"] is not None:
        cached_report = report_cache.read_report(pathlib.Path(request["cache"]), cache_key)
        if cached_report is not None:
            return cached_report
    fields = {"platform": str(platform), "versions": versions, "attached": target.attached, "key": cache_key}
    report = _compile(lowered, devices, fields, request["options"], request["explain"])
    if request["cache"] is not None and report.crashed is None:
        report_cache.store_report(pathlib.Path(request["cache"]), report)
    return report


def example(devices: Sequence[Any]) -> Any:
    """Lower the matrix product of a (256, 128) array, whose rows all devices share, and a (128, 64) array; a recipe."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import AxisType, NamedSharding, PartitionSpec

    mesh = jax.make_mesh((len(devices),), ("data",), axis_types=(AxisType.Auto,), devices=devices)
    row_sharding, replicated_sharding = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in (("data",), ()))
    abstract_x = jax.ShapeDtypeStruct((256, 128), jnp.float32, sharding=row_sharding)
    abstract_w = jax.ShapeDtypeStruct((128, 64), jnp.float32, sharding=replicated_sharding)
    return jax.jit(jnp.dot).lower(abstract_x, abstract_w)


def _import_main(path: str) -> None:
    """Run the parent's script as a module, so that `pickle` finds the script's functions."""
    spec = importlib.util.spec_from_file_location("__mp_main__", path)
    assert spec is not None, f"the parent has run {path}, so it can be imported"
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["__main__"] = sys.modules["__mp_main__"] = module
    spec.loader.exec_module(module)


class _DevicesUnavailable(Exception):
    """The attached devices are not available: another process holds them, or they are not those of the platform."""


def _devices(platform: Platform, target: Target) -> list[Any]:
    """Return the platform's devices, attached or described.

    Raises:
        _DevicesUnavailable: the target is attached, and its devices are not available.
    """
    import jax

    config: Any = jax.config
    config.update("jax_enable_compilation_cache", False)  # cannot be read for described devices
    if target.backend == "cpu":
        config.update("jax_num_cpu_devices", platform.devices)
        return jax.devices("cpu")
    if target.attached:
        try:
            devices = jax.devices(target.backend)
        except RuntimeError:
            raise _DevicesUnavailable from None
        if devices[0].device_kind not in platform.chip.device_kinds or len(devices) < platform.devices:
            raise _DevicesUnavailable
        return devices[: platform.devices]
    from jax.experimental import topologies

    return list(topologies.get_topology_desc(platform=target.backend, **target.arguments).devices)


def _compile(
    lowered: Any, devices: Sequence[Any], fields: dict[str, Any], options: Mapping[str, Any], explain: bool
) -> CompileReport:
    """Compile a program and report on it; `fields` are the fields of the report that are already known, by name."""
    with tempfile.TemporaryDirectory(prefix="jaxscale-dump-") as dump_folder:
        has_dump = explain or devices[0].platform == "tpu"  # jaxlib cannot print every program of libtpu
        dump_options = {"xla_dump_to": dump_folder, "xla_dump_hlo_as_text": True} if has_dump else {}
        start = time.perf_counter()
        compiled, message = _compiled_or_message(lowered, {**options, **dump_options})
        set_options = {**jit_options(lowered.lowered if isinstance(lowered, LoweredFor) else lowered), **options}
        for failure, other_options in _OPTIONS_BY_FAILURE.items():
            if failure in message and not other_options.keys() & set_options.keys():
                recompiled, other_message = _compiled_or_message(lowered, {**options, **other_options, **dump_options})
                if recompiled is not None or out_of_memory(other_message) is not None:
                    compiled, message, fields["added_options"] = recompiled, other_message, dict(other_options)
        fields["seconds"] = time.perf_counter() - start
        live_buffers = _live_buffers(dump_folder, devices) if explain else None
        text_fields = (
            {} if compiled is None else _fields_from_text(compiled, _axis_sizes(compiled, devices), dump_folder)
        )
    live_fields = {} if live_buffers is None else {"live": live_buffers.tensors, "timeline": live_buffers.timeline}
    if compiled is None:
        return _failure_report(message, fields, live_fields)
    memory_stats = compiled.memory_analysis()
    stat_names = ("argument", "output", "alias", "temp")
    return CompileReport(
        **fields,
        **{f"{stat_name}_bytes": getattr(memory_stats, f"{stat_name}_size_in_bytes") for stat_name in stat_names},
        **{
            f"host_{stat_name}_bytes": getattr(memory_stats, f"host_{stat_name}_size_in_bytes")
            for stat_name in stat_names
        },
        **text_fields,
        **live_fields,
    )


def _compiled_or_message(lowered: Any, options: Mapping[str, Any]) -> tuple[Any, str]:
    """Return the compiled program and an empty text, or None and the message with which the compiler fails."""
    import jax

    try:
        return lowered.compile(compiler_options=dict(options) or None), ""
    except jax.errors.JaxRuntimeError as error:
        return None, str(error)


def _fields_from_text(compiled: Any, axis_sizes: Any, dump_folder: str) -> dict[str, Any]:
    """Return the report fields that are read from the program's text.

    If the text cannot be parsed, return only the field `unread`, with the error.
    """
    import jax

    try:
        text = _text(compiled, pathlib.Path(dump_folder))
        program = HloProgram(text)
        flop_counts = program_flop(program)
        program_collectives = tuple(collectives(program, axis_sizes))
    except (AssertionError, LookupError, ValueError, jax.errors.JaxRuntimeError) as error:
        # an unknown format, or a program that XLA fails to print, must not prevent the report
        return {"unread": f"the program's text could not be read: {error!r}"}
    return {
        "flop": flop_counts.total,
        "unknown_loops": flop_counts.unknown_loops,
        "silent_kernels": flop_counts.silent_kernels,
        "collectives": program_collectives,
        "schedule": _schedule(program, axis_sizes),
        "program_hash": program_hash(text),
    }


def _schedule(program: HloProgram, axis_sizes: Any) -> ProgramSchedule | None:
    """Return a program's schedule; None if its compiler estimates no cycles, or if its text has an unknown format."""
    try:
        return schedule_of(program, axis_sizes)
    except (AssertionError, LookupError, ValueError):
        return None


def _text(compiled: Any, dump_folder: pathlib.Path) -> str:
    """Return the text of a compiled program.

    jaxlib refuses to print some instructions of libtpu, such as asynchronous gathers of v5p; libtpu prints them itself.

    Raises:
        JaxRuntimeError: XLA cannot print the program, and there is no dump of it.
    """
    import jax

    try:
        return compiled.as_text()
    except jax.errors.JaxRuntimeError:
        dump_files = sorted(dump_folder.glob("*after_codegen.txt"), key=lambda path: path.stat().st_size)
        if not dump_files:
            raise
        return dump_files[-1].read_text()


def _live_buffers(dump_folder: str, devices: Sequence[Any]) -> Live | None:
    """Return the live buffers from a dump's folder; None if XLA wrote no dump, or a dump in an unknown format."""
    try:
        return live_at_the_peak(pathlib.Path(dump_folder), devices[0].platform)
    except (AssertionError, LookupError, ValueError):  # an unknown format, as in `_fields_from_text`
        return None


def _failure_report(message: str, fields: dict[str, Any], live_fields: Mapping[str, Any]) -> CompileReport:
    """Return the report of a program that was not compiled.

    Args:
        message: the compiler's error message.
        fields: fields of the report that are already known, by name.
        live_fields: fields of the report that describe its live buffers, by name.

    Raises:
        UserError: an option of the compiler is wrong, or ptxas is missing.
    """
    if match := re.search(r"No such compile option: '([^']*)'", message):
        raise UserError(f"the compiler of {fields['platform']} has no option {match[1]!r}; leave it out")
    if "INVALID_ARGUMENT" in message and "setting option" in message:
        raise UserError(f"the compiler of {fields['platform']} rejects an option: {message}")
    if "ptxas" in message:
        raise UserError(
            f"{fields['platform']}: a kernel needs ptxas, which is missing; install jaxscale[aot-gpu]: {message}"
        )
    oom = out_of_memory(message)
    if oom is None:
        return CompileReport(**fields, crashed=f"the compiler failed: {message.strip()}")
    return CompileReport(**fields, oom=oom, **live_fields)


def _axis_sizes(compiled: Any, devices: Sequence[Any]) -> Any:
    """Return the axis sizes of the largest mesh that shards a program's arguments and results; {} without a mesh.

    Raises:
        UserError: the program is for other devices than those passed to the recipe.
    """
    import jax
    from jax.sharding import NamedSharding

    shardings = jax.tree.leaves((compiled.input_shardings, compiled.output_shardings))
    recipe_devices = set(devices)
    program_devices = {device for sharding in shardings for device in sharding.device_set}
    if shardings and not program_devices <= recipe_devices:
        kinds_text = ", ".join(sorted({device.device_kind for device in program_devices - recipe_devices}))
        raise UserError(
            f"the recipe made a program for other devices ({kinds_text}) than it received ({devices[0].device_kind}): "
            "shard its arguments over a mesh of the devices passed to the recipe"
        )
    named_meshes = [sharding.mesh for sharding in shardings if isinstance(sharding, NamedSharding)]
    return max(named_meshes, key=lambda mesh: mesh.size).shape if named_meshes else {}
