"""One process of a run of several, over gloo on CPUs, for test_processes.py:

process.py FOLDER PORT INDEX STOP_AT [FROM_STEP]
"""

import os
import signal
import sys
from pathlib import Path

os.environ |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false"}

import jax

from jaxscale.data.text import Text
from jaxscale.errors import Preempted
from jaxscale.models.decoder import Decoder
from jaxscale.optim.optimizer import Optimizer
from jaxscale.recipe.experiment import Checkpointing, Evaluation, Experiment, Samples
from jaxscale.recipe.plan import Plan
from jaxscale.sharding.mesh import MeshSpec
from jaxscale.step.train_step import TrainStep
from jaxscale.training.loop import train


def main() -> None:
    folder, (port, index, stop_at, *from_steps) = Path(sys.argv[1]), map(int, sys.argv[2:])
    jax.config.update("jax_num_cpu_devices", 2 if port else 4)
    if port:
        jax.distributed.initialize(f"localhost:{port}", 2, index)
    experiment = Experiment(
        name="together",
        model=Decoder(vocab=256, context=16, layers=1, embed=8, heads=2, mlp=16),
        data=Text(folder / "text.txt", context=16),
        optimizer=Optimizer(warmup=5, learning_rate=1e-2),
        steps=12,
        batch=8,
        evaluation=Evaluation(every=6, batches=2),
        samples=Samples(prompts=("the ",), tokens=8),
        checkpoint=Checkpointing(every=5, minutes=None),
        plan=Plan(mesh=MeshSpec(data=2, fsdp=2), zero=2),
    )
    if stop_at:
        real, count = TrainStep.__call__, iter(range(1, 100))

        def run(self, state, batch):
            if next(count) == stop_at:
                os.kill(os.getpid(), signal.SIGTERM)
            return real(self, state, batch)

        TrainStep.__call__ = run
    try:
        run = train(
            experiment, out=folder / ("run" if port else "alone"), from_step=from_steps[0] if from_steps else None
        )
        print("DONE", run.step, flush=True)
    except Preempted as stopped:
        print("PREEMPTED", stopped, flush=True)


if __name__ == "__main__":
    main()
