"""Trusted versions of libtpu: 0.0.51, and any other that reports the right bytes for a program whose bytes are known.

The meaning of `temp` depends on libtpu's version: 0.0.42 and 0.0.50 (pinned by `jax[tpu]` for JAX 0.10 and 0.12) report
up to one and a half times the right number, so a program that fits is rejected. The program of this module keeps the
inputs of eight layers, 128 MiB each. The passes need four more arrays of this size. Version 0.0.51 reports 1696 MiB for
the program, and the other two versions report 2080 MiB.
"""

import hashlib
import importlib.metadata
import importlib.util
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from jaxscale.errors import UserError
from jaxscale.values import read_json

TRUSTED = "0.0.51"
MIB = 2**20
KNOWN_BYTES = 1696 * MIB
"""Device bytes of `program`: 12 arrays of 128 MiB, 16 MiB of weights, 16 MiB of their gradient, and the input."""


def libtpu(environment: Mapping[str, str]) -> str | None:
    """Return a text that identifies the libtpu that a process in this environment loads; None if there is none.

    Returns:
        The version of the installed libtpu; or the path, size and modification time of the file that `TPU_LIBRARY_PATH`
        specifies.

    Raises:
        UserError: `TPU_LIBRARY_PATH` specifies a missing file.
    """
    spec = importlib.util.find_spec("libtpu")
    libtpu_folder = pathlib.Path(spec.origin).parent if spec is not None and spec.origin is not None else None
    library_path = environment.get("TPU_LIBRARY_PATH")
    # importing JAX sets the variable to the installed one
    if library_path and (libtpu_folder is None or pathlib.Path(library_path) != libtpu_folder / "libtpu.so"):
        try:
            file_status = os.stat(library_path)
        except OSError as error:
            raise UserError(f"TPU_LIBRARY_PATH: {error}; set it to the path of libtpu.so, or unset it") from None
        return f"{library_path} ({file_status.st_size} bytes of {int(file_status.st_mtime)})"
    return None if libtpu_folder is None else importlib.metadata.version("libtpu")


def program(devices: Sequence[Any]) -> Any:
    """Lower the loss and the gradient of eight layers that keep only their inputs, on one device; a recipe."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import SingleDeviceSharding

    def loss(x: Any, w: Any) -> Any:
        """Return the sum of the outputs, from inputs (65536, 1024) and the weights (8, 1024, 1024) of all layers."""

        def layer(x: Any, w: Any) -> Any:
            return x + jnp.tanh(x @ w) @ w.T, None

        return jax.lax.scan(jax.checkpoint(layer, prevent_cse=False), x, w)[0].sum()

    sharding = SingleDeviceSharding(devices[0])
    shapes = [(65536, 1024), (8, 1024, 1024)]
    abstract_args = [jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=sharding) for shape in shapes]
    return jax.jit(jax.value_and_grad(loss, 1)).lower(*abstract_args)


def is_right(device_bytes: int | None) -> bool:
    """Return whether the bytes that a version of libtpu reports for `program` are within 2 % of the known bytes."""
    return device_bytes is not None and abs(device_bytes - KNOWN_BYTES) <= 0.02 * KNOWN_BYTES


def verdict_file(folder: pathlib.Path, identity: str) -> pathlib.Path:
    """Return the file that stores the bytes reported by the libtpu with this identity (the result of `libtpu`)."""
    return folder / f"libtpu-{hashlib.sha256(identity.encode()).hexdigest()[:16]}.json"


def read_verdict(file: pathlib.Path) -> int | None:
    """Read from a verdict file the bytes that libtpu reported for `program`; None if that libtpu was not tested."""
    try:
        device_bytes = read_json(file)["device_bytes"]
    except (UserError, KeyError, TypeError):
        return None
    return device_bytes if isinstance(device_bytes, int) else None
