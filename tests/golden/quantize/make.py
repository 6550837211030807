"""Make `bitsandbytes.safetensors`: the dynamic maps of bitsandbytes, and its codes and scales of heavy-tailed values.

    pip install bitsandbytes==0.50.2 torch==2.13.0 safetensors && python tests/golden/quantize/make.py

Blocks of bitsandbytes are 256 values in a row; each is written here as a column, as ours are. The codes are those of
its "default" backend, an exact search of the map. Its CPU kernel looks values up in a table of 65,536 bins: 30 % of the
codes of such values are then not the nearest, by up to four.
"""

import importlib
import pathlib

import bitsandbytes._ops
import bitsandbytes.backends.default.ops as default_ops
import numpy as np
import torch
from bitsandbytes.functional import create_dynamic_map
from safetensors.numpy import save_file

BLOCK = 256
ROWS, COLUMNS = 512, 32


def default_kernel() -> object:
    """The function that bitsandbytes registers as the default backend's `quantize_blockwise`."""
    kernels = {}

    def register(name: str, backend: str) -> object:
        return lambda function: kernels.setdefault((name, backend), function)

    bitsandbytes._ops.register_kernel = register
    importlib.reload(default_ops)
    return kernels["bitsandbytes::quantize_blockwise", "default"]


def main() -> None:
    """Write the file beside this script."""
    draw = np.random.default_rng(0)
    x = (draw.normal(size=(ROWS, COLUMNS)) * np.exp(3 * draw.normal(size=(ROWS, COLUMNS)))).astype(np.float32)
    x[0] = 0.0
    x[:BLOCK, 1] = 0.0
    quantize = default_kernel()
    found = {"x": x}
    for name, signed, values in (("signed", True, x), ("unsigned", False, np.square(x))):
        table = create_dynamic_map(signed)
        columns = np.ascontiguousarray(values.reshape(-1, BLOCK, COLUMNS).swapaxes(1, 2))
        codes, scales = quantize(torch.from_numpy(columns), table, BLOCK)
        found[f"{name}/map"] = table.numpy()
        found[f"{name}/codes"] = np.ascontiguousarray(codes.numpy().swapaxes(1, 2)).reshape(values.shape)
        found[f"{name}/scales"] = scales.numpy().reshape(-1, COLUMNS)
    found["signed4/map"] = np.unique(create_dynamic_map(True, max_exponent_bits=3, total_bits=4).numpy())
    save_file(found, pathlib.Path(__file__).with_name("bitsandbytes.safetensors"))


if __name__ == "__main__":
    main()
