"""Whole train steps on the accelerator of this machine: seconds, bytes, losses, plan by plan, and PyTorch beside them.

    python experiments/benchmarks/steps_on_device.py [--only PLAN ...] [--torch] [--tiny]

Two models. "gpt2": nanoGPT's GPT-2 of 124 million parameters, 16 rows of 1,024 tokens, computed in bfloat16; with
`--torch` the same recipe follows in PyTorch (`nanogpt_torch.py` has the model; autocast to bfloat16, fused AdamW,
eager and `torch.compile`). "llama": 1.07 billion parameters in 16 layers of width 2,048, 8 rows of 2,048 tokens, under
one plan after another; "llama lora" trains adapters of rank 16 alone. Each plan runs in a process of its own, its steps
while no other's run: 3, then the median of the next ones. Losses are compared with those of the plain plan, from the
same weights and batch: the first, that after one update and, unless the plan rounds gradients or updates, the last.
Bytes are those that the compiler reports, those that the allocator had in use at most (from the time that the state was
there), and `estimate`'s.

On an H200, JAX 0.11.2, PyTorch 2.11, 2026-11-26: GPT-2 takes 46.3 ms a step, and 37.5 ms with the loop over layers
unrolled; eager PyTorch takes 42.2 ms, compiled 33.3 ms. Llama takes 248 ms (478 TFLOP/s), unrolled 212 ms (561).
"""

import argparse
import contextlib
import fcntl
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the package need not be installed

from figures import Figure, show

MODELS = ("gpt2", "llama")
PLANS: dict[str, tuple[str, dict[str, str]]] = {
    "gpt2": ("gpt2", {}),
    "gpt2 unroll": ("gpt2", {"plan.unroll": "12"}),
    "gpt2 cudnn": ("gpt2", {"plan.kernels": "attention=cudnn"}),
    "gpt2 chunked": ("gpt2", {"plan.kernels": "attention=chunked"}),
    "llama": ("llama", {}),
    "llama cudnn": ("llama", {"plan.kernels": "attention=cudnn"}),
    "llama unroll": ("llama", {"plan.unroll": "16"}),
    "llama dots": ("llama", {"plan.memory": "dots"}),
    "llama full": ("llama", {"plan.memory": "full"}),
    "llama sqrt": ("llama", {"plan.memory": "sqrt"}),
    "llama save": ("llama", {"plan.memory": "save:6GiB"}),
    "llama chain": ("llama", {"plan.memory": "chain:6GiB"}),
    "llama pofo": ("llama", {"plan.memory": "offload:pofo:2GiB"}),
    "llama int8 state": ("llama", {"plan.state.moments": "int8"}),
    "llama dynamic8 state": ("llama", {"plan.state.moments": "dynamic8"}),
    "llama int4 state": ("llama", {"plan.state.moments": "int4"}),
    "llama split": ("llama", {"plan.state.master": "split"}),
    "llama streamed": ("llama", {"plan.offload.optimizer-state": "streamed"}),
    "llama host update": ("llama", {"plan.offload.optimizer-state": "host"}),
    "llama host weights": ("llama", {"plan.offload.weights": "host"}),
    "llama host all": (
        "llama",
        {"plan.offload.weights": "host", "plan.offload.gradients": "host", "plan.offload.optimizer-state": "streamed"},
    ),
    "llama fp8": ("llama", {"plan.matmul": "fp8"}),
    "llama int8": ("llama", {"plan.matmul": "int8"}),
    "llama loss chunks": ("llama", {"plan.kernels": "loss_chunk=256"}),
    "llama microbatches": ("llama", {"plan.microbatches": "4"}),
    "llama ema": ("llama", {"optimizer.ema": "0.999"}),
    "llama lora": ("llama lora", {}),
    "llama lora full": ("llama lora", {"plan.memory": "full"}),
    "llama attention only": ("llama", {"optimizer.train": "attention"}),
}
"""Model and fields of the plan that differ from the plain one, by name."""
LOSSY = ("llama fp8", "llama int8", "llama int4 state")
"""Plans whose gradients or updates are rounded, so that every later loss differs from the plain plan's."""
TRAINS_LESS = ("llama lora", "llama lora full", "llama attention only")
"""Plans that train a part of the parameters, so that losses differ from the plain plan's after the first step."""
WARM, TIMED = 3, 8
MOST_SECONDS = 20.0
"""A plan whose steps took so long makes no more of them."""


def experiment_of(name: str, tiny: bool, changes: Mapping[str, str]) -> Any:
    """The experiment of a plan's name."""
    import jaxscale as jx
    from jaxscale.values import override

    text = jx.data.Text(path=str(Path(__file__).resolve().parents[1] / "data" / "shakespeare.txt"), tokenizer="byte")
    if name == "gpt2":
        context, batch = (64, 2) if tiny else (1024, 16)
        width: dict[str, Any] = {"layers": 2, "heads": 2, "embed": 64, "vocab": 384} if tiny else GPT2
        model = jx.models.Decoder(
            **width, context=context, norm="layer_no_bias", mlp_kind="gelu", positions="learned", tied=True
        )
    else:
        context, batch = (64, 4) if tiny else (2048, 8)
        width = {"layers": 4, "heads": 2, "embed": 64, "vocab": 384, "mlp": 256} if tiny else LLAMA
        model = jx.models.Decoder(**width, context=context, tied=True)
        model = jx.models.LoRA(model, rank=4 if tiny else 16) if name.endswith("lora") else model
    plan = jx.Plan(precision="bfloat16")
    recipe = jx.Experiment(
        name=name,
        model=model,
        data=type(text)(path=text.path, tokenizer="byte", context=context),
        optimizer=jx.Optimizer(learning_rate=1e-5, warmup=0),
        steps=100,
        batch=batch,
        plan=plan,
    )
    return override(recipe, dict(changes)) if changes else recipe


GPT2: dict[str, Any] = {"layers": 12, "heads": 12, "embed": 768, "vocab": 50_304}
LLAMA: dict[str, Any] = {"layers": 16, "heads": 16, "kv_heads": 8, "embed": 2048, "mlp": 8192, "vocab": 32_000}


def run_plan(name: str, tiny: bool, compile_only: bool) -> dict[str, Any]:
    """Build, compile and run one plan's step on the first device."""
    import jax
    import numpy as np

    from jaxscale.planning.estimate import of_step
    from jaxscale.platforms.detect import detect
    from jaxscale.step.build import build

    model, changes = PLANS[name]
    experiment = experiment_of(model, tiny, {**changes, "plan.mesh": "1"})
    step = build(experiment, experiment.plan, devices=jax.devices()[:1])
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, experiment.model.vocab, (experiment.batch, experiment.model.context + 1), dtype=np.int32)
    batch = {"tokens": tokens[:, :-1], "targets": np.ascontiguousarray(tokens[:, 1:])}
    start = time.perf_counter()
    compiled = step.compile(batch)
    result: dict[str, Any] = {"plan": name, "compile_seconds": time.perf_counter() - start}
    result["kernels"] = [str(choice) for choice in step.kernels]
    result["compiled_bytes"] = (
        compiled.argument_bytes + compiled.temp_bytes + compiled.output_bytes - compiled.alias_bytes
    )
    result["model_flop"] = step.model_flop(batch)
    result["parameters"] = step.parameters
    try:
        estimated = of_step(step, batch, detect(jax.devices()[:1]))
        result["estimated_bytes"] = estimated.device_bytes
    except Exception as error:  # an estimate that fails is reported, and the step is timed
        result["estimate_error"] = f"{type(error).__name__}: {str(error)[:300]}"
    if compile_only:
        return result
    seconds, losses = [], []
    step.init()  # compiles before the others wait; freed at once
    with device_alone():
        state, placed = step.init(), step.place(batch)
        for _ in range(WARM + TIMED):
            start = time.perf_counter()
            state, metrics = step(state, placed)
            losses.append(float(metrics["loss"]))
            seconds.append(time.perf_counter() - start)
            if sum(seconds[1:]) > MOST_SECONDS and len(seconds) > 3:
                break
        del state, placed
    seconds = seconds[WARM:] or seconds[1:]
    stats = jax.devices()[0].memory_stats() or {}
    result |= {
        "seconds": statistics.median(seconds),
        "range": [min(seconds), max(seconds)],
        "tokens": experiment.batch * experiment.model.context,
        "losses": losses,
        "peak_bytes": stats.get("peak_bytes_in_use"),
        "device": jax.devices()[0].device_kind,
    }
    return result


@contextlib.contextmanager
def device_alone() -> Iterator[None]:
    """Wait until no other process of this benchmark runs steps; others may compile meanwhile."""
    with open(Path(tempfile.gettempdir()) / "steps_on_device.lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def run_torch(tiny: bool, compiled: bool) -> dict[str, Any]:
    """nanoGPT's GPT-2 in PyTorch, the same batch, bfloat16 by autocast."""
    # torch is no dependency: it is measured where it happens to be
    import nanogpt_torch as peer  # pyright: ignore[reportMissingImports]
    import torch  # pyright: ignore[reportMissingImports]

    context, batch = (64, 2) if tiny else (1024, 16)
    embed, layers, heads = (64, 2, 2) if tiny else (768, 12, 12)
    vocab = 384 if tiny else GPT2["vocab"]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_float32_matmul_precision("high")
    torch.manual_seed(0)
    model = peer.Model(vocab, context, layers, embed, heads).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=device == "cuda")
    function = torch.compile(model) if compiled else model
    tokens = torch.randint(0, vocab, (batch, context + 1), device=device)
    x, y = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    seconds, losses = [], []
    for _ in range(8 + 20):
        start = time.perf_counter()
        with torch.autocast(device, torch.bfloat16):
            loss = function(x, y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(float(loss))
        seconds.append(time.perf_counter() - start)
    peak = torch.cuda.max_memory_allocated() if device == "cuda" else None
    seconds = seconds[8:]
    return {
        "plan": "torch compiled" if compiled else "torch eager",
        "seconds": statistics.median(seconds),
        "range": [min(seconds), max(seconds)],
        "tokens": batch * context,
        "losses": losses,
        "peak_bytes": peak,
        "torch": torch.__version__,
    }


def in_process(words: list[str], timeout: float, **environment: str) -> dict[str, Any]:
    """The result of a child of this script, which may fail."""
    command = [sys.executable, __file__, "--child", *words]
    try:
        ended = subprocess.run(
            command, capture_output=True, text=True, timeout=timeout, env={**os.environ, **environment}
        )
    except subprocess.TimeoutExpired:
        return {"plan": words[0], "error": f"not done after {timeout:.0f} s"}
    lines = ended.stdout.strip().splitlines()
    if ended.returncode == 0 and lines:
        return json.loads(lines[-1])
    return {"plan": words[0], "error": (ended.stderr or ended.stdout)[-3000:]}


def figures_of(result: Mapping[str, Any], plain: Mapping[str, Any] | None) -> list[Figure]:
    """The figures of a plan that ran."""
    name = result["plan"]
    rate = result["tokens"] / result["seconds"]
    figures = [Figure(f"{name}: step", 1e3 * result["seconds"], "ms"), Figure(f"{name}: speed", rate, "tokens/s")]
    if "model_flop" in result:
        figures.append(Figure(f"{name}: model FLOP/s", result["model_flop"] / result["seconds"], "FLOP/s"))
    if result.get("peak_bytes"):
        figures.append(Figure(f"{name}: most bytes in use", result["peak_bytes"] / 2**30, "GiB"))
    if "compiled_bytes" in result:
        figures.append(Figure(f"{name}: bytes by the compiler", result["compiled_bytes"] / 2**30, "GiB"))
    if "estimated_bytes" in result:
        figures.append(Figure(f"{name}: bytes by estimate", result["estimated_bytes"] / 2**30, "GiB"))
    if plain is not None and plain is not result:
        figures.append(Figure(f"{name}: time of the plain plan's", result["seconds"] / plain["seconds"], "x"))
        last = min(len(result["losses"]), len(plain["losses"])) - 1
        bars = {0: 0.001, 1: 0.02} if name in LOSSY else {0: 0.001, 1: 0.004, last: 0.004}
        bars = {0: 0.001} if name in TRAINS_LESS else bars
        for step, bar in bars.items():
            off = abs(result["losses"][step] / plain["losses"][step] - 1)
            figures.append(Figure(f"{name}: loss after {step} updates off the plain plan's", off, "relative", bar))
    return figures


def main() -> None:
    """Run every plan, then print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=sorted(PLANS), help="plans to run; all by default")
    parser.add_argument("--torch", action="store_true", help="time PyTorch too")
    parser.add_argument("--tiny", action="store_true", help="small models: shows that it works, not the figures")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds after which a plan is given up")
    parser.add_argument("-o", "--out", type=Path, help="a file to which each result is appended, a JSON object a line")
    parser.add_argument("--processes", type=int, default=1, help="how many may compile while one runs")
    parser.add_argument(
        "--compile", type=int, metavar="N", help="only compile, in N processes at a time, into JAX's compile cache"
    )
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        name, *words = arguments.child
        if name.startswith("torch"):
            result = run_torch("tiny" in words, name == "torch compiled")
        else:
            result = run_plan(name, "tiny" in words, "compile" in words)
        print(json.dumps(result))
        return
    names = arguments.only or list(PLANS)
    words = ["tiny"] if arguments.tiny else []
    if arguments.compile:
        shared = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
        with ThreadPoolExecutor(arguments.compile) as pool:
            for one in pool.map(lambda one: in_process([one, "compile", *words], arguments.timeout, **shared), names):
                print(json.dumps(one), flush=True)
        return

    def measured(name: str) -> dict[str, Any]:
        """The result of one plan, written at once, since the table comes after the last one."""
        result = in_process([name, *words], arguments.timeout)
        if arguments.out:
            with arguments.out.open("a") as file:
                file.write(json.dumps(result) + "\n")
        return result

    with ThreadPoolExecutor(arguments.processes) as pool:
        results = list(pool.map(measured, names))
    if arguments.torch:
        results += list(map(measured, ("torch eager", "torch compiled")))
    figures = []
    by_name = {result["plan"]: result for result in results if "error" not in result}
    for result in results:
        if "error" in result:
            print(f"{result['plan']} failed: {result['error']}", file=sys.stderr)
            continue
        plain = by_name.get("gpt2" if result["plan"].startswith("torch") else result["plan"].split()[0])
        if result["plan"].startswith("torch"):
            figures += figures_of(result, None)
            if plain:
                ratio = result["seconds"] / plain["seconds"]
                figures.append(Figure(f"jaxscale's speed over {result['plan']}", ratio, "x"))
            continue
        figures += figures_of(result, plain)
    import jax  # now that no other process needs the device: the results file names it

    jax.devices()
    held = show(figures, "Steps on this device")
    if len(by_name) < len(results) or not (held or arguments.tiny):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
