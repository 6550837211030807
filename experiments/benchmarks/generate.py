"""Greedy decoding beside transformers' `generate`, of the same random weights, and the wait for the first tokens.

    python experiments/benchmarks/generate.py [--tiny] [--rounds 3] [--torch PYTHON]

An interpreter with torch and transformers (`--torch`; this one by default) saves a model of each size, and continues a
prompt with it. jaxscale loads the folder (`Pretrained`), and continues the same prompt. Both run in processes of their
own, in turns: wall seconds with all cores, and processor seconds of both sides with one core and one thread. A ratio is
that of the smallest seconds of a round, and its median over the rounds is compared with the bar; the smallest and the
largest ratio are printed. The ids must be the same. The first call is timed in a process with an empty cache of
compiled programs, and in the next one, which reads them. Without an interpreter that has transformers, a folder of the
weights is missing and only the small size is drawn, with random weights of its own. A first call includes the tokens
that it draws.

On 2026-11-28, on 2 cores of an Intel Xeon, and torch 2.13: wall 1.24x to 1.67x and processor 1.34x to 1.85x (27M, 40 +
30); 1.30x to 1.61x and 1.54x to 1.88x (27M, 100 + 100); 0.72x to 0.78x and 0.90x to 0.99x (SmolLM2's size). On
2026-12-01, on 2 quiet cores of an AMD EPYC (Zen 4): 2.01x to 2.34x and 1.56x to 1.64x; 1.76x to 2.14x and 1.65x to
1.80x; 1.10x to 1.32x and 1.14x to 1.18x. docs/choosing/speed.md has another machine's.
"""

import argparse
import importlib.util
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from figures import Figure, figures_of_command, show

HERE = Path(__file__).resolve().parent
CASES = {
    "27M, 40 + 30": ("27M", 40, 30, 1.5, 1.05),
    "27M, 100 + 100": ("27M", 100, 100, 1.5, 1.05),
    "SmolLM2, 130 + 4": ("SmolLM2", 130, 4, 1.0, 0.9),
}
"""Size, length of the prompt, number of tokens, and the bars of the ratios in wall and processor seconds."""
TINY_CASES = {"tiny, 20 + 10": ("tiny", 20, 10, None, None)}
FIRST_CALL_SECONDS, CACHED_CALL_SECONDS = 5.0, 1.0


def draw(folder: str, prompt_length: int, tokens: int, repeats: int, threads: int) -> dict[str, Any]:
    """Continue a prompt `repeats` times with jaxscale, after one call that is counted apart."""
    if threads == 1:
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    from jaxscale.training.backend import start_backend

    start_backend()
    import jax.numpy as jnp
    import numpy as np
    from flax import nnx

    from jaxscale.generation.generator import Generator
    from jaxscale.generation.sampling import Sampling
    from jaxscale.models.decoder import Decoder
    from jaxscale.models.huggingface import Pretrained
    from jaxscale.training.generate import decode

    if folder:
        model: Any = Pretrained(folder)
        module = model.build(nnx.Rngs(0))
        parameters = nnx.state(module, nnx.Param)
        loaded = model.initial_params()
        nnx.update(module, nnx.map_state(lambda path, _: jnp.asarray(_at(loaded, path)[:]), parameters))
    else:
        model = Decoder(vocab=256, context=256, layers=2, embed=32, heads=2)
        module = model.build(nnx.Rngs(0))
    generator = Generator(module, model)
    prompt = np.arange(prompt_length, dtype=np.int32) * 7 % model.vocab
    sampling = Sampling(tokens, temperature=0.0)
    wall_seconds, processor_seconds, ids = [], [], []
    for _ in range(repeats + 1):
        start = time.perf_counter(), time.process_time()
        ids = decode(generator, [prompt], sampling)[0].tolist()
        wall_seconds.append(time.perf_counter() - start[0])
        processor_seconds.append(time.process_time() - start[1])
    return {"first": wall_seconds[0], "wall": wall_seconds[1:], "processor": processor_seconds[1:], "ids": ids}


def _at(tree: Any, path: tuple[str, ...]) -> Any:
    """Return the leaf of nested dicts at a path."""
    for name in path:
        tree = tree[name]
    return tree


def run(words: list[str], cache: str | None = None) -> dict[str, Any]:
    """Return what a command prints as its last line; `cache`: its folder of compiled programs."""
    environment = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    return figures_of_command(words, **environment, **({} if cache is None else {"JAXSCALE_CACHE": cache}))


def measure(name: str, peer: str | None, rounds: int, folder: Path) -> list[Figure]:
    """Return the figures of a case.

    Args:
        name: name of the case.
        peer: interpreter with transformers; `None` to leave the peer out.
        rounds: number of turns.
        folder: folder for the weights and the caches.
    """
    size, prompt_length, tokens, *bars = {**CASES, **TINY_CASES}[name]
    weights = folder / size
    peer_words = [peer or "", str(HERE / "transformers_peer.py")]
    if peer is not None and not weights.exists():
        run([*peer_words, "make", str(weights), size])
    case_words = [str(weights) if peer else "", str(prompt_length), str(tokens), "3"]
    own_words, cache = [sys.executable, __file__, "--draw"], str(folder / f"cache of {name}")
    core_count = len(os.sched_getaffinity(0))
    first_seconds = [run([*own_words, *case_words, str(core_count)], cache)["first"] for _ in range(2)]
    print(f"{name}: first call {first_seconds[0]:.2f} s, from the cache {first_seconds[1]:.2f} s", flush=True)
    figures = [
        Figure(f"{name}: first call, cold", first_seconds[0], "s", FIRST_CALL_SECONDS if bars[0] else None),
        Figure(f"{name}: first call, from the cache", first_seconds[1], "s", CACHED_CALL_SECONDS if bars[0] else None),
    ]
    for kind, thread_count, bar in (("wall", core_count, bars[0]), ("processor", 1, bars[1])):
        own_seconds, ratios = [], []
        for turn in range(rounds):
            own_result = run([*own_words, *case_words, str(thread_count)], cache)
            own_seconds.append(min(own_result[kind]))
            line = f"{name}, {kind}, round {turn + 1}: {own_seconds[-1]:.3f} s"
            if peer is not None:
                peer_result = run([*peer_words, "draw", *case_words, str(thread_count)])
                ratios.append(min(peer_result[kind]) / own_seconds[-1])
                equal_count = sum(a == b for a, b in zip(own_result["ids"], peer_result["ids"], strict=True))
                line += f", transformers {min(peer_result[kind]):.3f} s, {ratios[-1]:.2f}x; "
                line += f"{equal_count} of {tokens} ids equal"
            print(line, flush=True)
        token_ms = 1000 * statistics.median(own_seconds) / tokens
        figures.append(Figure(f"{name}: {kind} time of a token, prompt included", token_ms, "ms"))
        if ratios:
            print(f"{name}, {kind}: {min(ratios):.2f}x to {max(ratios):.2f}x", flush=True)
            figures.append(
                Figure(f"{name}: {kind}, transformers / jaxscale", statistics.median(ratios), "x", bar, ">=")
            )
    return figures


def main() -> None:
    """Print the table; exit with 1 if a bar does not hold at full size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a tiny model: shows that it works, not the figures")
    parser.add_argument("--rounds", type=int, default=3, help="turns of both sides (default: 3)")
    parser.add_argument("--torch", default=None, metavar="PYTHON", help="an interpreter that has transformers")
    parser.add_argument("--case", action="append", choices=CASES, help="one case; may be repeated (default: all)")
    parser.add_argument("--draw", nargs=5, metavar=("FOLDER", "PROMPT", "TOKENS", "REPEATS", "THREADS"))
    arguments = parser.parse_args()
    if arguments.draw is not None:
        print(json.dumps(draw(arguments.draw[0], *map(int, arguments.draw[1:]))))
        return
    peer = arguments.torch or (sys.executable if importlib.util.find_spec("transformers") else None)
    is_small = arguments.tiny or peer is None
    print(f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores, load {os.getloadavg()[0]:.1f}", flush=True)
    with tempfile.TemporaryDirectory() as name:
        cases = TINY_CASES if is_small else (arguments.case or CASES)
        rounds = 1 if is_small else arguments.rounds
        figures = [figure for case in cases for figure in measure(case, peer, rounds, Path(name))]
    if not show(figures, "Greedy decoding and its peer") and not is_small:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
