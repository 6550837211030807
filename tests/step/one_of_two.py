"""One of two processes of four CPU devices each, for test_two_processes.py: one_of_two.py PORT INDEX OUT PLAN."""

import json
import os
import sys

os.environ |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_backend_optimization_level=0"}

import jax
import numpy as np
from jax.experimental import multihost_utils
from test_equal_training import STEPS, an_experiment, layout, packed

from jaxscale.step.build import build
from jaxscale.values import override


def main() -> None:
    port, index, out, changes = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], json.loads(sys.argv[4])
    jax.config.update("jax_num_cpu_devices", 4)
    jax.config.update("jax_numpy_rank_promotion", "raise")
    jax.distributed.initialize(f"localhost:{port}", 2, index)
    step = build(an_experiment(), override(layout("1"), changes))
    part, parts = step.data_shard()
    # rows lie across the processes, or the stages of a pipeline do, and each has all rows
    assert (part, parts) == ((0, 1) if "pipeline" in changes else (index, 2))
    rows = {k: np.split(v, parts)[part] for k, v in packed().items()}
    state, batch, numbers, first = step.init(), step.place(rows), [], {}
    for i in range(STEPS):
        state, metrics = step(state, batch)
        numbers.append((float(metrics["loss"]), float(metrics["grad_norm"])))
        if i == 0:
            arrays = {k: v for k, v in step.to_canonical(state).items() if k.startswith("params/")}
            first = {k: multihost_utils.process_allgather(v, tiled=True) for k, v in arrays.items()}
    if index == 0:
        np.savez(out, numbers=np.array(numbers), **first)


if __name__ == "__main__":
    main()
