"""What a save of a gigabyte costs the steps that run beside it, and a restore beside `dd` of the same files.

    python experiments/benchmarks/checkpoint.py [--tiny] [--rounds 3]

A decoder of 83 million parameters with AdamW in float32: 1 GB of state. In each round some steps run alone, then the
state is saved, and steps run until it is committed: they are compared with the steps alone, their number by the
seconds of the save. Then the page cache of the files is dropped and `dd` reads them, it is dropped again and the
state is restored, up to the arrays on the device, and `dd` reads them once more; its faster time counts, because a
virtual machine's host may keep the files after the first read. On a CPU a save and the steps share the cores, so what
it computes (hashes, copies) slows the steps; on an accelerator it does not. "Steps lose" is the time that the steps
beside the save take longer than alone: a longer save may slow more steps by less. "Threads that write" is the processor
time of TensorStore's threads, which other programs on the machine change less than the seconds. The first round, which
imports, is not counted. Beside them stand a plain write of as many bytes by one thread, and a plain read of the files
into new memory: no checkpoint can be cheaper without sharing memory with the file.

On 2026-11-28, on 2 cores of an Intel Xeon, JAX 0.10.2: the next step waits 0.81 s, steps beside the save take 1.33x,
it is committed after 4.0 to 7.4 s; a restore takes 1.3 to 1.6 s, 0.35x of the speed of `dd`. Both bars are missed.

On 2026-11-30, on 2 cores of AMD EPYC (Zen 5), JAX 0.10.2, quiet, before `checkpoint/page_cache.py`: the next step waits
0.46 s, steps beside the save take 1.34x, it is committed after 4.1 s, steps lose 1.0 s; a restore takes 1.07 s, 0.26x
of `dd`. With it, three times on the same day: the next step waits 0.44 to 0.53 s, steps beside the save take 1.20 to
1.33x, it is committed after 2.2 to 2.7 s, steps lose 0.30 to 0.47 s; a restore takes 0.80 to 0.89 s, 0.32 to 0.39x of
`dd` in the two runs in which `dd` read from the host's memory. Beside a plain write of as many bytes the steps take
1.19 and 1.32x: on two cores the bar of 1.05x is below what the file system costs. A plain read into new memory is as
fast as `dd`, so the restore has room.
"""

import argparse
import contextlib
import os
import shutil
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from figures import Figure, show

WRITE_BLOCK = 16 << 20
"""Bytes of one `write`."""


def seconds(action: Callable[[], Any]) -> float:
    """Wall-clock seconds of one call."""
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def drop_from_cache(files: list[Path]) -> None:
    """Drop the pages of files from the page cache."""
    os.sync()
    for file in files:
        descriptor = os.open(file, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def processor_seconds() -> dict[int, float]:
    """Return the processor time of each of TensorStore's threads that run now, by the thread's id (Linux)."""
    seconds_by_id: dict[int, float] = {}
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # it has ended
            name, _, numbers = (task / "stat").read_bytes().rpartition(b")")
            if b"(ts_" in name:
                fields = numbers.split()
                seconds_by_id[int(task.name)] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return seconds_by_id


def read_by_dd(files: list[Path]) -> None:
    """Read files by `dd`, one after another."""
    for file in files:
        command = ["dd", f"if={file}", "of=/dev/null", "bs=4M"]
        subprocess.run(command, check=True, capture_output=True)


def write_plainly(path: Path, byte_count: int) -> None:
    """Write a file of zeros by `write` and `fsync`: the least that a save to a file system costs."""
    block = bytes(WRITE_BLOCK)
    with path.open("wb", buffering=0) as file:
        for start in range(0, byte_count, WRITE_BLOCK):
            file.write(block[: byte_count - start])
        os.fsync(file.fileno())


def read_plainly(files: list[Path]) -> None:
    """Read files into new memory, one after another: the least that a restore costs."""
    memory = memoryview(bytearray(sum(file.stat().st_size for file in files)))
    for file in files:
        with file.open("rb", buffering=0) as reader:
            while count := reader.readinto(memory):
                memory = memory[count:]


def main() -> None:
    """Print the table; exit with 1 if a bar does not hold at full size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a tiny model: shows that it works, not the figures")
    parser.add_argument("--rounds", type=int, default=3, help="rounds; figures are medians of them (default: 3)")
    arguments = parser.parse_args()

    from jaxscale.training.backend import start_backend

    start_backend()
    import jax
    import numpy as np

    import jaxscale as jx

    sizes: dict[str, Any] = {"layers": 2, "embed": 64} if arguments.tiny else {"layers": 10, "embed": 768}
    model = jx.models.Decoder(vocab=8192, context=64, heads=4, tied=True, mlp_kind="gelu_tanh", **sizes)
    rng = np.random.default_rng(0)
    batch = {name: rng.integers(0, 8192, (2, 64), dtype=np.int32) for name in ("tokens", "targets")}
    experiment = jx.Experiment(name="saved", model=model, data=batch, steps=100, batch=2)
    step = jx.build(experiment)
    placed = step.place(batch)
    state, metrics = step(step.init(), placed)
    jax.block_until_ready((state, metrics))
    state_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in step.canonical_abstract().values())
    folder = Path(tempfile.mkdtemp())

    def run_step() -> None:
        """Run one step, and wait for it."""
        nonlocal state
        state, metrics = step(state, placed)
        jax.block_until_ready((state, metrics))

    def restored_state(reader: jx.Checkpoints) -> Any:
        """Return the state of the newest checkpoint."""
        restored = reader.restore(step)
        assert restored is not None
        return restored.state

    stalls, slowdowns, losses, writer_seconds, save_seconds, ratios, restore_seconds = ([] for _ in range(7))
    plain_slowdowns, plain_losses, plain_ratios = ([] for _ in range(3))
    measured_lists = (stalls, slowdowns, losses, writer_seconds, save_seconds, ratios, restore_seconds)
    measured_lists += (plain_slowdowns, plain_losses, plain_ratios)
    for turn in range(1 + (1 if arguments.tiny else arguments.rounds)):
        if turn == 1:  # the first round imports and compiles
            for measured in measured_lists:
                measured.clear()
        checkpoints = jx.Checkpoints(folder / str(turn), keep=1)
        alone = statistics.median(seconds(run_step) for _ in range(8))
        processor_start = processor_seconds()
        start = time.perf_counter()
        checkpoints.save(step, state)
        stalls.append(time.perf_counter() - start)
        beside = []
        while checkpoints.poll() is None:
            beside.append(seconds(run_step))
        save_seconds.append(time.perf_counter() - start)
        slowdowns.append(sum(beside) / len(beside) / alone)
        losses.append(sum(beside) - len(beside) * alone)
        processor_end = processor_seconds()
        writer_seconds.append(
            sum(total - processor_start.get(thread_id, 0.0) for thread_id, total in processor_end.items())
        )
        files = sorted(file for file in (folder / str(turn)).rglob("*") if file.is_file())
        drop_from_cache(files)
        dd_seconds = seconds(lambda files=files: read_by_dd(files))
        drop_from_cache(files)
        reader = jx.Checkpoints(folder / str(turn), write=False)
        restore_seconds.append(seconds(lambda reader=reader: jax.block_until_ready(restored_state(reader))))
        drop_from_cache(files)
        dd_seconds = min(dd_seconds, seconds(lambda files=files: read_by_dd(files)))
        ratios.append(dd_seconds / restore_seconds[-1])
        drop_from_cache(files)
        plain_ratios.append(dd_seconds / seconds(lambda files=files: read_plainly(files)))
        writer = threading.Thread(target=write_plainly, args=(folder / "plain", state_bytes))
        writer.start()
        beside_plain = []
        while writer.is_alive():
            beside_plain.append(seconds(run_step))
        plain_slowdowns.append(sum(beside_plain) / len(beside_plain) / alone)
        plain_losses.append(sum(beside_plain) - len(beside_plain) * alone)
        print(
            f"round {turn}: step {alone:.3f} s, {len(beside)} steps beside the save {slowdowns[-1]:.3f}x; it took "
            f"{save_seconds[-1]:.2f} s, of which the next step waited {stalls[-1]:.2f} s; dd {dd_seconds:.2f} s, "
            f"restore {restore_seconds[-1]:.2f} s; {len(beside_plain)} steps beside a plain write "
            f"{plain_slowdowns[-1]:.3f}x",
            flush=True,
        )
        shutil.rmtree(folder / str(turn))
    shutil.rmtree(folder)
    figures = [
        Figure("state", state_bytes / 1e9, "GB"),
        Figure("save: the next step waits", statistics.median(stalls), "s"),
        Figure("save: until it is committed", statistics.median(save_seconds), "s"),
        Figure("save: threads that write", statistics.median(writer_seconds), "s"),
        Figure("save: steps beside it lose", statistics.median(losses), "s"),
        Figure("steps beside a save / steps alone", statistics.median(slowdowns), "x", 1.05),
        Figure("restore", statistics.median(restore_seconds), "s"),
        Figure("dd / restore", statistics.median(ratios), "x", 0.8, ">="),
        Figure("steps beside a plain write / steps alone", statistics.median(plain_slowdowns), "x"),
        Figure("plain write: steps beside it lose", statistics.median(plain_losses), "s"),
        Figure("dd / plain read into new memory", statistics.median(plain_ratios), "x"),
    ]
    print(f"{os.cpu_count()} cores, {jax.default_backend()}, JAX {jax.__version__}")
    if not show(figures, "A checkpoint of a gigabyte") and not arguments.tiny:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
