"""Time of one update of `optax.adamw` with its state in few bits, as a multiple of the same in float32.

    python experiments/benchmarks/optimizer_step.py [--tiny] [--no-aot]

Twice: cycles that the compiler of TPU v5e expects, over the layers of Llama 3 8B on fsdp 16, gradients in bfloat16; and
seconds on this CPU, 50 million parameters in stacked leaves, each update paired with one in float32 right before it
(median of the ratios). On CPU the update is bound by arithmetic, on TPU by memory: there eight bits move as many bytes
as float32, for XLA reads twice what a fused kernel reads once.

Cycles on v5e as a multiple of float32's (JAX 0.12.0.1, libtpu 0.0.51, 2026-11-22): int8 0.910 (bar 1.0), dynamic8 1.518
(1.6), fp8 0.909, int4 1.160 (1.25). These are of XLA's program; AdamW with int8 or dynamic8 has a kernel in a step.

Seconds on two cores of an AMD EPYC as a multiple of float32's (JAX 0.10.2, 2026-11-22): int8 5.73 (bar 6.0), dynamic8
6.49, fp8 6.58, int4 19.9. Maxima of blocks are a good part: right after one another, int8 was 7.8 with XLA's own, and
4.6 with a loop over rows; with JAX 0.12.0.1, 4.2 and 3.9.
"""

import argparse
import statistics
import time
from typing import Any

from figures import Figure, show
from update_program import LLAMA_8B, TINY, Stack, Update, compiled

CYCLES = {"int8": 1.0, "dynamic8": 1.6, "fp8": None, "int4": 1.25}
"""Bars of estimated cycles, against float32."""
SECONDS = {"int8": 6.0, "dynamic8": None, "fp8": None, "int4": None}
"""Bars of seconds on CPU, against float32."""
CPU = Stack(layers=16, embed=512, kv=256, mlp=1536)
"""50 million parameters."""


def estimated(stack: Stack) -> list[Figure]:
    """Cycles by the compiler of TPU v5e."""
    base = compiled(Update(states="float32", stack=stack), "tpu v5e:4x4")
    figures = [Figure("v5e adamw float32", base.cycles / base.parameters, "cycles/param")]
    for states, bar in CYCLES.items():
        found = compiled(Update(states=states, stack=stack), "tpu v5e:4x4")
        figures.append(Figure(f"v5e adamw {states} / float32", found.cycles / base.cycles, "x", bar))
        print(f"v5e {states}: {figures[-1].value:.3f}", flush=True)
    return figures


def measured(stack: Stack, rounds: int) -> list[Figure]:
    """Seconds on this CPU."""
    import jax
    import jax.numpy as jnp
    import optax

    from jaxscale.lowbit.quantized import quantize_state

    params = {name: jnp.full(shape, 0.02, jnp.float32) for name, shape in stack.shapes().items()}
    keys = dict(zip(params, jax.random.split(jax.random.key(0), len(params)), strict=True))
    gradients = {name: jax.random.normal(keys[name], p.shape, jnp.bfloat16) for name, p in params.items()}

    def start(states: Any) -> tuple[Any, Any]:
        rule = quantize_state(optax.adamw(1e-3), states)

        def update(params: Any, state: Any) -> Any:
            updates, state = rule.update(gradients, state, params)
            return optax.apply_updates(params, updates), state

        held = jax.tree.map(jnp.copy, params)
        step = jax.jit(update, donate_argnums=(0, 1)).lower(held, jax.eval_shape(rule.init, held)).compile()
        return step, jax.block_until_ready(step(held, jax.jit(rule.init)(held)))

    def once(step: Any, now: Any) -> tuple[float, Any]:
        before = time.perf_counter()
        now = jax.block_until_ready(step(*now))
        return time.perf_counter() - before, now

    plain, plain_now = start("float32")
    figures = []
    for states, bar in SECONDS.items():
        step, now = start(states)
        ratios = []
        for _ in range(rounds):
            base, plain_now = once(plain, plain_now)
            taken, now = once(step, now)
            ratios.append(taken / base)
        figures.append(Figure(f"cpu adamw {states} / float32", statistics.median(ratios), "x", bar))
    return figures


def main() -> None:
    """Print the table; exit with 1 if a bar does not hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="small leaves, three rounds, no estimate")
    parser.add_argument("--no-aot", action="store_true", help="only this CPU")
    args = parser.parse_args()
    figures = [] if args.tiny or args.no_aot else estimated(LLAMA_8B)
    figures += measured(TINY if args.tiny else CPU, 3 if args.tiny else 11)
    if not show(figures, "One update, against float32") and not args.tiny:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
