"""Start the same few runs again and again from a warm compile cache, and count those that hang or crash.

    python tests/training/warm_starts.py --starts 20 --cold 5 --steps 30 ["zero 3" ...]

A start is a process: it trains a toy on 4 virtual CPU devices, evaluates, samples and saves on the way, and ends. The
"bare loop" is the smallest program that fails: a scan with collectives, and collectives beside it. The "own loop" is a
user's: a thousand steps and evaluations, none of which it waits for. What is slow, importing, is done once: every start
is a fork of this process, which starts no backend. Cold starts have no cache; the first warm one fills it, and is not
counted. A start hangs where neither its log nor the processor time that it has used gets anywhere: a busy machine does
not look like that.
"""

import argparse
import dataclasses
import importlib
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    FLAGS = "--xla_force_host_platform_device_count=4 --xla_backend_optimization_level=0"  # compiles in half the time
    os.environ |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": FLAGS}

import jax
import numpy as np

from jaxscale.compiler.kept_programs import keep_ordered_programs
from jaxscale.data.text import Text
from jaxscale.models.decoder import Decoder
from jaxscale.optim.optimizer import Optimizer
from jaxscale.recipe.experiment import Checkpointing, Evaluation, Experiment, Samples
from jaxscale.recipe.plan import Plan
from jaxscale.step.build import build
from jaxscale.training.loop import train
from jaxscale.values import override
from tests.plans import grouped

LAYOUTS = {
    "data": {"mesh": "data:4"},
    "zero 3": {"mesh": "fsdp:4", "zero": "3"},
    "zero 3, 2 microbatches": {"mesh": "fsdp:4", "zero": "3", "microbatches": "2", "memory": "full"},
    "tensor": {"mesh": "data:2,tensor:2", "sequence_parallel": "true"},
    "zero 3, tensor": {"mesh": "fsdp:2,tensor:2", "zero": "3"},
    "sequence": {"mesh": "data:2,sequence:2", "attention": "chunked"},
    "powersgd, zero 3": {"mesh": "replica:2,fsdp:2", "zero": "3", "reduce": "powersgd:4"},
    "diloco, zero 3": {"mesh": "replica:2,fsdp:2", "zero": "3", "diloco": "every=5"},
    "1f1b": {"mesh": "data:2", "pipeline": "1f1b:2x4"},
    "gpipe, phased": {"mesh": "data:2", "pipeline": "gpipe:2x4", "lowering": "phased"},
    "zb-h1": {"mesh": "data:2", "pipeline": "zb-h1:2x4"},
    "pipedream": {"mesh": "data:2", "pipeline": "pipedream:2"},
}
"""Changes of a plan, by name: one of each way to have collectives in a loop, and the plain one that has none."""
KINDS = ("float32", "int32", "uint32", "float16", "int16", "uint16")
QUIET = 60.0
"""Seconds without a line of the log that make a start a suspect."""
IDLE = 0.02
"""Share of those seconds on a processor, below which it hangs."""


def experiment(folder: Path, steps: int) -> Experiment:
    """The toy, and all that a run does beside its steps."""
    return Experiment(
        name="warm",
        model=Decoder(vocab=256, context=32, layers=2, embed=32, heads=4, mlp=64),
        data=Text(folder / "text.txt", context=32),
        optimizer=Optimizer(warmup=5, learning_rate=1e-2),
        steps=steps,
        batch=8,
        evaluation=Evaluation(every=10, batches=2),
        samples=Samples(every=0, prompts=("the",), tokens=2),
        checkpoint=Checkpointing(every=10, keep=1, minutes=None),
    )


def own_loop(folder: Path, steps: int) -> None:
    """Dispatch steps and evaluations of ZeRO 3 without a look at any result."""
    step = build(experiment(folder, 1000), override(Plan(), grouped(LAYOUTS["zero 3"])))
    tokens = np.arange(8 * 32, dtype=np.int32).reshape(8, 32)
    batch = step.place({"tokens": tokens, "targets": tokens})
    state, losses = step.init(), []
    for _ in range(35 * steps):
        state, _ = step(state, batch)
    for _ in range(35 * steps):
        losses.append(step.evaluate(state, batch))
    jax.block_until_ready((state, losses))


def bare_loop(folder: Path, steps: int) -> None:
    """Run a scan with collectives, and as many beside it, of which neither needs the other's results."""
    import jax.numpy as jnp

    keep_ordered_programs()
    mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))

    def busy(x: Any, turn: Any) -> Any:
        trips = 1 + 5 * ((jax.lax.axis_index("x") + turn) % 4)  # more work on some devices than on others
        return jax.lax.fori_loop(0, trips, lambda _, x: jnp.tanh(x @ x / 64), x)

    def program(first: Any, beside: Any, alone: Any) -> Any:
        last, _ = jax.lax.scan(lambda x, i: (jax.lax.psum(busy(x, i), "x") / 4, None), first, jnp.arange(40))
        kinds = [(reduce, kind) for kind in KINDS for reduce in (jax.lax.psum, jax.lax.pmax, jax.lax.pmin)]
        sums = [reduce(x.astype(kind), "x") for x, (reduce, kind) in zip(beside, kinds, strict=True)]  # not combined
        return last, sums, [jnp.tanh(x @ x / 64) for x in alone]

    whole, parts = jax.P(), jax.P("x")
    sharded = jax.shard_map(program, mesh=mesh, in_specs=parts, out_specs=(whole, whole, parts), check_vma=False)
    x, alone = jnp.ones((256, 64)), [jnp.ones((4 * width, width)) for width in range(100, 106)]
    values = jax.device_put((x, [x] * 3 * len(KINDS), alone), jax.sharding.NamedSharding(mesh, parts))
    compiled = jax.jit(sharded).lower(*values).compile()
    for _ in range(10 * steps):
        jax.block_until_ready(compiled(*values))


ALONE = {"bare loop": bare_loop, "own loop": own_loop}


def child(folder: Path, name: str, steps: int, cache: Path | None) -> int:
    """Number of the process that trains; its output is in the folder."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        for stream in (sys.stdout, sys.stderr):
            os.dup2(os.open(folder / "output.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream.fileno())
        events: list[str] = []
        jax.monitoring.register_event_listener(lambda event, **_: events.append(event.rsplit("/", 1)[-1]))
        jax.config.update("jax_enable_compilation_cache", cache is not None)
        jax.config.update("jax_compilation_cache_dir", None if cache is None else str(cache))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
        if name in ALONE:
            ALONE[name](folder, steps)
        else:
            train(experiment(folder, steps), override(Plan(), grouped(LAYOUTS[name])), out=folder / "run", quiet=True)
        counts = {name: events.count(name) for name in ("compile_requests_use_cache", "cache_hits")}
        (folder / "counts.json").write_text(json.dumps(counts))
        code = 0
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def processor_seconds(pid: int) -> float:
    """What a process has used so far, all its threads together."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def ends(pid: int, log: Path) -> bool:
    """Wait for a child; one that hangs is killed."""
    length, since, used = -1, time.monotonic(), processor_seconds(pid)
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            code = os.waitstatus_to_exitcode(status)
            if code in (-signal.SIGABRT, -signal.SIGSEGV):
                return False  # XLA gives up a rendezvous after a while, or finds it in disorder
            if code:
                output = (log.parent.parent / "output.txt").read_text()
                raise RuntimeError(f"a start failed: exit status {code}\n{output[-3000:]}")
            return True
        now = log.stat().st_size if log.exists() else 0
        if now != length:
            length, since, used = now, time.monotonic(), processor_seconds(pid)
        if time.monotonic() - since > QUIET:
            if processor_seconds(pid) - used < IDLE * QUIET:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                return False
            since, used = time.monotonic(), processor_seconds(pid)
        time.sleep(0.05)


@dataclasses.dataclass
class Tally:
    """Starts of one layout: those that ended, those that hung or crashed, and their seconds."""

    ended: int = 0
    failed: int = 0
    seconds: float = 0.0

    def add(self, ended: bool, seconds: float) -> None:
        self.ended, self.failed, self.seconds = self.ended + ended, self.failed + (not ended), self.seconds + seconds

    def __str__(self) -> str:
        mean = self.seconds / max(1, self.ended + self.failed)
        return f"{self.ended} ended, {self.failed} failed, {mean:.1f} s each"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("layouts", nargs="*", metavar="LAYOUT", help=f"{'; '.join((*ALONE, *LAYOUTS))}; all by default")
    parser.add_argument("--starts", type=int, default=20, help="warm starts of each layout")
    parser.add_argument("--cold", type=int, default=5, help="cold starts of each layout")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--unfiltered", action="store_true", help="keep and load every program, as JAX does: a control")
    given = parser.parse_args()
    for slow in ("grain", "orbax.checkpoint", "jaxscale.models.decoder_module", "jaxscale.report.page"):
        importlib.import_module(slow)
    if given.unfiltered:
        for module in (sys.modules[__name__], importlib.import_module("jaxscale.step.build")):
            vars(module)["keep_ordered_programs"] = lambda: None
    failed = 0
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        (folder / "text.txt").write_text("the cat sat on the mat. " * 400)
        for name in given.layouts or (*ALONE, *LAYOUTS):
            cache = folder / "programs"
            shutil.rmtree(cache, ignore_errors=True)

            def start(cache: Path | None, name: str = name) -> tuple[bool, float]:
                shutil.rmtree(folder / "run", ignore_errors=True)
                began = time.monotonic()
                ended = ends(child(folder, name, given.steps, cache), folder / "run" / "metrics.jsonl")
                return ended, time.monotonic() - began

            cold, warm = Tally(), Tally()
            for _ in range(given.cold):
                cold.add(*start(None))
            counts = {}
            if given.starts:
                start(cache)
            for _ in range(given.starts):
                warm.add(*start(cache))
                if (folder / "counts.json").exists():
                    counts = json.loads((folder / "counts.json").read_text())
            hits = f"{counts.get('cache_hits', '?')} of {counts.get('compile_requests_use_cache', '?')} programs loaded"
            print(f"{name:24} cold: {cold}; warm: {warm}; {hits}", flush=True)
            failed += cold.failed + warm.failed
    print(f"{failed} failed")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
