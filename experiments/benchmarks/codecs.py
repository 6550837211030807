"""What a codec's arithmetic takes on a CPU, beside plain passes over the same numbers.

    python experiments/benchmarks/codecs.py [--tiny]

50 million floats as (12,208, 4096). int8's encode and decode is one program, timed in turns with a jitted x + 1; the
medians' ratio is told. Of the largest 1 % are timed in turns: those of each block of 1024, those of the whole leaf
(`jax.lax.top_k`), and a full sort. The other codecs' encode and decode are told without a bar.

Measured on 2 CPU cores, JAX 0.12.0.1, 2026-11-22, as multiples of x + 1 (0.10 s): int8 1.08 (bar 2), int4 1.12, onebit
1.87, qsgd:8bit 5.95, topk:0.01 3.39. Of blocks the largest 1 % take 0.29 s, a sort 72 times that (bar 20), the whole
leaf's 9.4 times (bar 2).
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from figures import Figure, show

from jaxscale.replicas import Codec
from jaxscale.replicas.codec import compute_once
from jaxscale.replicas.one_phase import OnePhase
from jaxscale.replicas.two_phase import TwoPhase

SHAPE, TINY = (12_208, 4096), (64, 1024)
REPLICAS = 2


def in_turns(programs: dict[str, Callable[[Any, Any], Any]], x: Any, rounds: int) -> dict[str, float]:
    """Median seconds of each program, run one after another so many times."""
    taken: dict[str, list[float]] = {name: [] for name in programs}
    key = jax.random.key(0)  # an argument: XLA would draw a constant's numbers while it compiles
    compiled = {name: jax.jit(program).lower(x, key).compile() for name, program in programs.items()}
    for number in range(rounds + 1):
        for name, program in compiled.items():
            start = time.perf_counter()
            jax.block_until_ready(program(x, key))
            if number:  # the first touches memory
                taken[name].append(time.perf_counter() - start)
    return {name: statistics.median(seconds) for name, seconds in taken.items()}


def there_and_back(codec: Codec) -> Callable[[Any, Any], Any]:
    """A leaf as its message, and what that stands for: both are results, as both are needed."""

    def run(x: Any, key: Any) -> Any:
        if isinstance(codec, TwoPhase):
            length = codec.chunk_length(x.size, REPLICAS)
            chunks = jnp.pad(x.reshape(-1), (0, REPLICAS * length - x.size)).reshape(REPLICAS, length)
            message = compute_once(codec.encode(chunks, jnp.full(REPLICAS, length), key))
            return message, codec.decode(message, length)
        assert isinstance(codec, OnePhase)
        message = compute_once(codec.encode(x.reshape(-1), key))
        return message, codec.decode(message, x.size)

    return run


def largest(text: str) -> Callable[[Any, Any], Any]:
    """The message of a top-k codec."""
    codec = Codec.parse(text)
    assert isinstance(codec, OnePhase)
    return lambda x, key: codec.encode(x.reshape(-1), None)


def main() -> None:
    """Measure, and show the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="64 thousand floats, two rounds: shows that it runs")
    tiny = parser.parse_args().tiny
    x = jax.random.normal(jax.random.key(0), TINY if tiny else SHAPE)
    others = ("int4", "onebit", "qsgd:8bit", "topk:0.01")
    programs: dict[str, Callable[[Any, Any], Any]] = {
        "plus_one": lambda x, key: x + 1,
        "int8": there_and_back(Codec.parse("int8")),
    }
    programs |= {text: there_and_back(Codec.parse(text)) for text in others}
    passes = in_turns(programs, x, 2 if tiny else 9)
    sorting = {"block": largest("topk:0.01"), "whole": largest("topk:0.01,block=none")}
    sorts = in_turns({**sorting, "sort": lambda x, key: jnp.sort(x.reshape(-1))}, x, 2 if tiny else 3)
    figures = [
        Figure("plus_one_seconds", passes["plus_one"], "s"),
        Figure("int8_beside_plus_one", passes["int8"] / passes["plus_one"], "x", 2.0),
        *(Figure(f"{text}_beside_plus_one", passes[text] / passes["plus_one"], "x") for text in others),
        Figure("block_topk_seconds", sorts["block"], "s"),
        Figure("sort_beside_block_topk", sorts["sort"] / sorts["block"], "x", 20.0, ">="),
        Figure("whole_topk_beside_block_topk", sorts["whole"] / sorts["block"], "x", 2.0, ">="),
    ]
    show(figures, f"{x.size:,} floats on {jax.devices()[0].device_kind}")


if __name__ == "__main__":
    main()
