"""Train the toy in children that are killed; run by test_kill.py as a program: killing.py FOLDER STEPS KILLS SEED.

What is slow, importing, is done once: every child is a fork of this process, which has started no backend.
"""

import os
import random
import signal
import sys
import time
from pathlib import Path

os.environ |= {
    "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": "--xla_force_host_platform_device_count=2 --xla_cpu_multi_thread_eigen=false "
    + os.environ.get("XLA_FLAGS", ""),
}

import importlib

import jax
from watching import lines, newest, saving

from jaxscale.data.text import Text
from jaxscale.models.decoder import Decoder
from jaxscale.optim.optimizer import Optimizer
from jaxscale.recipe.experiment import Checkpointing, Evaluation, Experiment, Samples
from jaxscale.training.loop import train

EVERY = 7

for slow in (
    "grain",
    "orbax.checkpoint",
    "jaxscale.models.decoder_module",
    "jaxscale.planning.fit",
    "jaxscale.report.page",
    "jaxscale.step.build",
):
    importlib.import_module(slow)


def experiment(folder: Path, steps: int) -> Experiment:
    return Experiment(
        name="killed",
        model=Decoder(vocab=256, context=16, layers=1, embed=8, heads=2, mlp=16, dropout=0.1),
        data=Text(folder / "text.txt", context=16),
        optimizer=Optimizer(warmup=5, learning_rate=1e-2),
        steps=steps,
        batch=4,
        evaluation=Evaluation(every=20, batches=1),
        samples=Samples(prompts=()),
        checkpoint=Checkpointing(every=EVERY, keep=2, minutes=None),
    )


def child(folder: Path, out: Path, steps: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        jax.config.update("jax_compilation_cache_dir", str(folder / "programs"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
        train(experiment(folder, steps), out=out, quiet=True)
        code = 0
    finally:
        os._exit(code)


def main() -> None:
    folder, (steps, kills, seed) = Path(sys.argv[1]), map(int, sys.argv[2:])
    whole, killed, chance = folder / "whole", folder / "killed", random.Random(seed)
    _, status = os.waitpid(child(folder, whole, steps), 0)
    assert status == 0, "the uninterrupted run failed"
    died = during_save = 0
    for number in range(kills):
        before = newest(killed)
        pid, more = child(folder, killed, steps), chance.randint(0, 5)
        saved_at = None
        while os.waitpid(pid, os.WNOHANG)[0] == 0:
            if saved_at is None and newest(killed) > before:
                saved_at = lines(killed)
            # once a checkpoint is there, every other kill waits for the next save, the rest for a few steps
            if saved_at is not None and (saving(killed) if number % 2 else lines(killed) >= saved_at + more):
                time.sleep(chance.uniform(0, 0.003))
                during_save += saving(killed)
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                died += 1
                break
            time.sleep(0.0002)
        else:
            break  # it got to its end before it could be killed
    _, status = os.waitpid(child(folder, killed, steps), 0)
    assert status == 0, "the killed run could not be finished"
    print(f"killed {died} during_save {during_save}")


if __name__ == "__main__":
    main()
