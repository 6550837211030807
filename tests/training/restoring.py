"""One process of two, each with a copy of the checkpoints of its own, for test_processes.py: FOLDER PORT INDEX."""

import os
import shutil
import sys
from pathlib import Path

os.environ |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false"}

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec

from jaxscale.checkpoint.store import Checkpoints, Description
from jaxscale.sharding.mesh import MeshSpec


def main() -> None:
    folder, (port, index) = Path(sys.argv[1]), map(int, sys.argv[2:])
    jax.config.update("jax_num_cpu_devices", 2)
    jax.distributed.initialize(f"localhost:{port}", 2, index)
    split = NamedSharding(MeshSpec.parse("fsdp:4").build(), PartitionSpec("fsdp"))
    whole = NamedSharding(split.mesh, PartitionSpec())
    wanted = {
        "split": jax.ShapeDtypeStruct((1024, 64), jnp.float32, sharding=split),
        "whole": jax.ShapeDtypeStruct((64,), jnp.float32, sharding=whole),
    }
    checkpoints = Checkpoints(folder / "0", keep=10)
    for step in (1, 2, 3, 4):
        arrays = jax.jit(
            lambda n=step: {k: jnp.full(w.shape, n, w.dtype) for k, w in wanted.items()},
            out_shardings={k: w.sharding for k, w in wanted.items()},
        )()
        checkpoints.save_arrays(arrays, Description(step, step, None, "toy"), wait=True)
    multihost_utils.sync_global_devices("saved")
    if index == 1:
        shutil.copytree(folder / "0", folder / "1")
        shutil.rmtree(folder / "1" / "00000004")
        (folder / "1" / "00000003" / "_CHECKPOINT_METADATA").unlink()
        for file in (folder / "1" / "00000002").rglob("d/*"):
            file.unlink()
    multihost_utils.sync_global_devices("hidden")
    restored = Checkpoints(folder / str(index), write=False).restore_arrays(wanted)
    shard = restored.arrays["split"].addressable_shards[0].data
    print("RESTORED", restored.description.step, float(np.asarray(shard).mean()), sorted(restored.damaged), flush=True)
    for why in restored.damaged.values():
        print("WHY", why, flush=True)


if __name__ == "__main__":
    main()
