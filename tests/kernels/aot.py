"""Kernels compiled for chips that are not here, by a child process: what the compiler made of them.

A program is a function of devices (and arguments) that returns a `jax.stages.Lowered`; `lowered` makes one. The child
compiles many programs of one platform, for loading the compiler takes longer than compiling a kernel.
"""

import dataclasses
import importlib.util
import json
import os
import pickle
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

from pallas_kernels.ahead import captured_output, spilled_bytes

HAS_TPU = importlib.util.find_spec("libtpu") is not None
HAS_GPU = importlib.util.find_spec("jax_plugins") is not None

tpu_compiler = pytest.mark.skipif(not HAS_TPU, reason="libtpu is not installed (jaxscale[aot-tpu])")
gpu_compiler = pytest.mark.skipif(not HAS_GPU, reason="the CUDA plugin is not installed (jaxscale[aot-gpu])")

_START = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from tests.kernels.aot import main; main()"


@dataclasses.dataclass(frozen=True)
class Compiled:
    """What a compiler made of a program; bytes and FLOP are per device.

    Args:
        kernels: how many of our kernels the program runs (in a loop's body: once).
        temp, arguments, outputs, aliased: bytes.
        flop, bytes_accessed: XLA's cost analysis.
        collectives, copies: how many.
        said: what the compiler printed: ptxas' registers and spills.
        hlo: the program's text.
        error: the compiler's words where it refused; all else is empty.
    """

    kernels: int = 0
    temp: int = 0
    arguments: int = 0
    outputs: int = 0
    aliased: int = 0
    flop: float = 0.0
    bytes_accessed: float = 0.0
    collectives: int = 0
    copies: int = 0
    said: str = ""
    hlo: str = ""
    error: str | None = None

    @property
    def spilled(self) -> int:
        """Bytes that ptxas spills, stores and loads, over all kernels."""
        return spilled_bytes(self.said)


def lowered(
    devices: Sequence[Any],
    function: Callable[..., Any],
    args: Sequence[Any],
    *,
    mesh: Mapping[str, int] | None = None,
    specs: Any = None,
    donate: tuple[int, ...] = (),
) -> Any:
    """A function lowered for devices.

    Args:
        devices: as many as the mesh needs, or more.
        function: of `args`.
        args: trees of `jax.ShapeDtypeStruct`.
        mesh: sizes of its axes; one device by default.
        specs: a PartitionSpec for each argument; whole by default.
        donate: positions of donated arguments.
    """
    import math

    import jax
    from jax.sharding import AxisType, NamedSharding

    mesh = mesh or {"x": 1}
    sizes = tuple(mesh.values())
    made = jax.make_mesh(
        sizes, tuple(mesh), axis_types=(AxisType.Auto,) * len(sizes), devices=devices[: math.prod(sizes)]
    )
    specs = specs or (jax.P(),) * len(args)
    placed = [
        jax.tree.map(lambda a, s=s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=NamedSharding(made, s)), arg)
        for arg, s in zip(args, specs, strict=True)
    ]
    with jax.set_mesh(made):
        return jax.jit(function, donate_argnums=donate).lower(*placed)


def compiled(platform: str, programs: Mapping[str, Callable[..., Any]], *, flags: str = "") -> dict[str, Compiled]:
    """Compile programs for a platform.

    Args:
        platform: "tpu v5e:2x2", "gpu h200 x 4".
        programs: by name, functions of devices that pickle (of a module, or `functools.partial` of one).
        flags: libtpu's (`LIBTPU_INIT_ARGS`).
    """
    from jaxscale.compiler.target import target
    from jaxscale.platforms.platform import Platform

    described = Platform.parse(platform)
    reached = target(described, frozenset())
    environment = dict(reached.environment) | {"MOSAIC_GPU_DUMP_PTXAS": "1", "TF_CPP_MIN_LOG_LEVEL": "2"}
    if flags:
        environment["LIBTPU_INIT_ARGS"] = flags
    paths = json.dumps([path or os.getcwd() for path in sys.path])
    request = pickle.dumps((described, reached, dict(programs)))
    command = [sys.executable, "-c", _START, paths]
    child = subprocess.run(command, input=request, capture_output=True, env=environment, check=False)
    if child.returncode:
        raise RuntimeError(f"the compiler's process ended with {child.returncode}: {child.stderr.decode()[-3000:]}")
    return pickle.loads(child.stdout[child.stdout.index(b"\0BEGIN\0") + 7 :])


def main() -> None:
    """The child: read a request from standard input, write what was compiled to standard output."""
    platform, reached, programs = pickle.loads(sys.stdin.buffer.read())
    from jaxscale.compiler.compile_child import _devices

    devices = _devices(platform, reached)
    done = pickle.dumps({name: _compile(program, devices) for name, program in programs.items()})
    sys.stdout.flush()
    sys.stdout.buffer.write(b"\0BEGIN\0" + done)


def _compile(program: Callable[..., Any], devices: Sequence[Any]) -> Compiled:
    try:
        with captured_output() as said:
            result: Any = program(devices).compile()
    except Exception as error:  # a refusal is an answer
        return Compiled(error=f"{type(error).__name__}: {error}"[:4000])
    words = "".join(said)
    hlo = result.as_text()
    memory, cost = result.memory_analysis(), result.cost_analysis() or {}
    kinds = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute"
    return Compiled(
        kernels=len(re.findall(r'custom_call_target="(?:tpu_custom_call|mosaic_gpu)', hlo)),
        temp=memory.temp_size_in_bytes,
        arguments=memory.argument_size_in_bytes,
        outputs=memory.output_size_in_bytes,
        aliased=memory.alias_size_in_bytes,
        flop=cost.get("flops", 0.0),
        bytes_accessed=cost.get("bytes accessed", 0.0),
        collectives=len(re.findall(rf"(?:{kinds})(?:-start)?\(", hlo)),
        copies=len(re.findall(r" copy(?:-start)?\(", hlo)),
        said=words,
        hlo=hlo,
    )
