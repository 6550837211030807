"""What offload saves, in bytes that the TPU's compiler allots, and what the rules that choose it cost.

    python experiments/benchmarks/offload.py [--tiny] [--only RULES,STATE,ACTIVATIONS]

Three parts. RULES: every rule of `memory/selectors` on one Llama-8B block (batch 1, 4096 tokens, bfloat16) on a v5p,
by the one model of seconds that they share; no compiler. STATE: 16 layers with 512 MiB of float32 weights and Adam on
one v5e, compiled ahead of time (`aot-tpu`): the state on the device, on the host and moved there and back whole (the
trap: it saves nothing), streamed in slices, updated on the host, and with weights and gradients on the host too.
ACTIVATIONS: gate and up projections of 16 Llama layers on the host, compiled for a v5p.

RULES, time that a budget costs a block's forward and backward pass (1012 MiB without a plan, 16.1 ms by roofline):

| budget, MiB | recompute alone | POFO | Capuchin | vDNN, TFLMS, AutoSwap, SwapAdvisor |
|---|---|---|---|---|
| 0 | +25.1 % | +18.7 %, 76 MiB on the host | +24.5 % | +683 %, 900 MiB on the host |
| 127 | +15.9 % | +10.0 %, 76 | +20.8 % | +575 to +585 %, 776 to 788 |
| 253 | +7.2 % | +1.8 %, 76 | +12.7 % | +470 to +488 %, 656 to 676 |
| 405 | +1.5 % | +1.3 %, 76 | +1.8 % | +331 to +390 %, 496 to 564 |

The rules that only swap are far behind on this chip: its link hides 76 MiB of the 900 that they move.

STATE, MiB of device memory and of the host's, libtpu 0.0.51 under JAX 0.12.0.1:

| place of state (and weights) | device | ratio | host |
|---|---|---|---|
| device | 2440 | 1 | 0 |
| host, moved whole | 3208 | 1.31 | 1024 |
| host, streamed in slices | 1417 | 0.58 | 1024 |
| host, updated there | 1040 | 0.43 | 1536 |
| weights, gradients and state on the host, streamed | 185 | 0.076 | 2048 |

ACTIVATIONS (batch 2, 2048 tokens, width 2048, attention that holds T x T), same compilers: 1408 MiB on the host, which
is the plan's number to the byte; temporary device memory 1643.5 MiB, and 1629.6 keeping nothing: 1.009 times. It is not
so for every block: where little else is alive, the copies on their way show (16 MLP blocks of width 1024: 1.81 times;
this block without its rotary embedding: 1.19, for XLA orders the attention's buffers in another way).
"""

import argparse
import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from figures import Figure, show
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxscale.compiler.compile import compile_report
from jaxscale.compiler.report import CompileReport
from jaxscale.layers.rotary import Rotary
from jaxscale.memory.decision import SaveSet
from jaxscale.memory.graph import solve
from jaxscale.memory.keep_named import keeping
from jaxscale.memory.save_set import Host, save_set
from jaxscale.memory.selectors import SELECTORS
from jaxscale.offload.updates import Advance, global_norm, update_in_slices, update_on_device, update_on_host
from jaxscale.offload.weights import Streamed
from jaxscale.platforms.platform import Platform
from jaxscale.programs.block import block_graph
from jaxscale.sharding.memory_space import HOST_KIND, to_device

MiB = 2**20
RULE = optax.adamw(1e-3, weight_decay=0.1)
PLACES = ("device", "whole", "streamed", "host", "all on the host")


@dataclasses.dataclass(frozen=True)
class Sizes:
    """A stack of MLP blocks."""

    layers: int = 16
    width: int = 1024
    hidden: int = 4096
    tokens: int = 4096


def placed(devices: Sequence[Any], kind: str = "device") -> NamedSharding:
    """On the first of the devices, or on its host."""
    mesh = Mesh(np.array(devices[:1]), ("data",), axis_types=(AxisType.Auto,))
    return NamedSharding(mesh, PartitionSpec(), memory_kind=kind)


def shapes(tree: Any, sharding: Any) -> Any:
    """Abstract arrays of a tree of arrays or shapes, all placed alike."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), tree)


def mlp(x: Any, w: Any) -> Any:
    """A residual block in the type of `x`."""
    return x + jax.nn.gelu(x @ w["up"].astype(x.dtype)) @ w["down"].astype(x.dtype)


def state_step(devices: Sequence[Any], sizes: Sizes, place: str) -> Any:
    """A train step with its optimizer's state in a place: what the compiler is asked about."""
    device, host = placed(devices), placed(devices, HOST_KIND)
    weights_place = host if place in ("host", "all on the host") else device
    state_place = device if place == "device" else host
    dims = {"up": (sizes.layers, sizes.width, sizes.hidden), "down": (sizes.layers, sizes.hidden, sizes.width)}
    params = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in dims.items()}
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), RULE)
    state = jax.eval_shape(optimizer.init, params)
    # counts stay on the device
    states = jax.tree.map(lambda leaf: state_place if leaf.ndim else device, state)

    def loss(params: Any, x: Any) -> Any:
        def body(x: Any, w: Any) -> Any:
            w = {name: leaf.fetch() if isinstance(leaf, Streamed) else leaf for name, leaf in w.items()}
            return mlp(x, w), None

        given = {n: Streamed(w) for n, w in params.items()} if place == "all on the host" else params
        again = jax.checkpoint(body, policy=jax.checkpoint_policies.nothing_saveable, prevent_cse=False)
        return jnp.sum(jax.lax.scan(again, x, given)[0].astype(jnp.float32) ** 2)

    advance: Advance = update_on_device(optimizer)
    if place in ("streamed", "all on the host"):
        advance = update_in_slices(RULE, shapes(params, device), clip=1.0)
    elif place == "host":
        advance = update_on_host(RULE, clip=1.0)

    def step(params: Any, state: Any, x: Any) -> Any:
        gradients = jax.grad(loss)(to_device(params) if place == "host" else params, x)
        norm = global_norm(gradients)
        return advance(gradients, to_device(state) if place == "whole" else state, params, norm, jnp.isfinite(norm))

    x = jax.ShapeDtypeStruct((sizes.tokens, sizes.width), jnp.bfloat16, sharding=device)
    abstract = jax.tree.map(lambda leaf, s: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=s), state, states)
    weights = dict.fromkeys(params, weights_place)
    compiled = jax.jit(step, donate_argnums=(0, 1), out_shardings=(weights, states))
    return compiled.lower(shapes(params, weights_place), abstract, x)


def activation_step(devices: Sequence[Any], layers: int, shape: "Llama", save: SaveSet) -> Any:
    """Gradients of a scan over Llama blocks under a save set."""
    p, x = shape.arguments()
    stacked = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((layers, *leaf.shape), leaf.dtype), p)
    block = keeping([save])(attending, True)

    def loss(stacked: Any, x: Any) -> Any:
        return jnp.sum(jax.lax.scan(lambda x, p: (block(p, x), None), x, stacked)[0].astype(jnp.float32) ** 2)

    device = placed(devices)
    return jax.jit(jax.grad(loss)).lower(shapes(stacked, device), shapes(x, device))


def judged(recipe: Callable[..., Any], platform: str) -> tuple[CompileReport, int]:
    """The compiler's report, and the bytes of device memory that the program takes."""
    report = compile_report(recipe, platform)
    parts = (report.temp_bytes, report.argument_bytes, report.output_bytes, report.alias_bytes)
    if None in parts:
        raise RuntimeError(f"{platform}: {report.oom or report.crashed}")
    temp, argument, output, alias = (part or 0 for part in parts)
    return report, temp + argument + output - alias


def state_figures(sizes: Sizes, platform: str) -> list[Figure]:
    """Bytes of a step by where the optimizer's state is."""
    bars: dict[str, float | None] = {"streamed": 0.72, "host": 0.5, "all on the host": 0.1}
    figures, base = [], 0
    for place in PLACES:
        report, size = judged(functools.partial(state_step, sizes=sizes, place=place), platform)
        there = (report.host_argument_bytes or 0) + (report.host_temp_bytes or 0)
        name = place.replace(" ", "_")
        figures.append(Figure(f"state_{name}_device", size / MiB, "MiB"))
        figures.append(Figure(f"state_{name}_host", there / MiB, "MiB"))
        base = base or size
        if place != "device":
            trap = place == "whole"
            bar = 1.0 if trap else bars[place]
            figures.append(Figure(f"state_{name}_ratio", size / base, "x", bar, ">=" if trap else "<="))
    return figures


def activation_figures(layers: int, shape: "Llama", platform: str) -> list[Figure]:
    """Bytes of a gate and an up projection on the host, against the plan's, and what stays on the device."""
    # traced as it will be compiled, on a mesh: the program's fingerprint tells
    arguments = shapes(shape.arguments(), placed(jax.devices()))
    graph = block_graph(attending, *arguments, chip=Platform.parse(platform).chip)
    hidden = (shape.rows, shape.tokens, shape.hidden)
    names = [v.name for v in graph.values if v.name.startswith("dot_general") and v.mark and v.shape == hidden]
    nothing, moved = save_set(graph, ()), save_set(graph, (), names, Host(2**60, 15e9))
    plain, _ = judged(functools.partial(activation_step, layers=layers, shape=shape, save=nothing), platform)
    report, _ = judged(functools.partial(activation_step, layers=layers, shape=shape, save=moved), platform)
    planned, there = layers * moved.host_bytes, report.host_temp_bytes or 0
    return [
        Figure("activations_planned_host", planned / MiB, "MiB"),
        Figure("activations_host", there / MiB, "MiB"),
        Figure("activations_host_beside_plan", abs(there - planned), "B", 0.0),
        Figure("activations_device_temp_keeping_nothing", (plain.temp_bytes or 0) / MiB, "MiB"),
        Figure("activations_device_temp", (report.temp_bytes or 0) / MiB, "MiB"),
        Figure("activations_device_temp_ratio", (report.temp_bytes or 0) / (plain.temp_bytes or 1), "x", 1.02),
    ]


@dataclasses.dataclass(frozen=True)
class Llama:
    """Sizes of a Llama block, and of what enters it."""

    rows: int
    tokens: int
    width: int
    hidden: int
    heads: int
    kv_heads: int

    def arguments(self) -> tuple[dict[str, Any], Any]:
        """Shapes of a block's weights, and of what enters it, in bfloat16."""
        head = self.width // self.heads
        dims = {"norm1": (self.width,), "norm2": (self.width,), "q": (self.width, self.heads, head)}
        dims |= {"k": (self.width, self.kv_heads, head), "v": (self.width, self.kv_heads, head)}
        dims |= {"o": (self.heads, head, self.width), "gate": (self.width, self.hidden)}
        dims |= {"up": (self.width, self.hidden), "down": (self.hidden, self.width)}
        p = {name: jax.ShapeDtypeStruct(shape, jnp.bfloat16) for name, shape in dims.items()}
        return p, jax.ShapeDtypeStruct((self.rows, self.tokens, self.width), jnp.bfloat16)


def llama_block(p: Any, x: Any, attend: Callable[..., Any]) -> Any:
    """A Llama block."""

    def norm(x: Any, gain: Any) -> Any:
        wide = x.astype(jnp.float32)
        return (wide * jax.lax.rsqrt((wide * wide).mean(-1, keepdims=True) + 1e-6)).astype(x.dtype) * gain

    h = norm(x, p["norm1"])
    q, k, v = (jnp.einsum("btd,dhk->bthk", h, p[name]) for name in "qkv")
    turn = functools.partial(Rotary(q.shape[-1]).apply, positions=jnp.arange(x.shape[1])[None])
    x = x + jnp.einsum("bthk,hkd->btd", attend(turn(q), turn(k), v), p["o"])
    h = norm(x, p["norm2"])
    return x + (jax.nn.silu(h @ p["gate"]) * (h @ p["up"])) @ p["down"]


def attention(q: Any, k: Any, v: Any) -> Any:
    """Causal attention that holds T x T, with as many heads for keys as divide those for queries."""
    rows, tokens, heads, head = q.shape
    q = q.reshape(rows, tokens, k.shape[2], -1, head)
    scores = jnp.einsum("btkgh,bskh->bkgts", q, k, preferred_element_type=jnp.float32) * head**-0.5
    scores = jnp.where(jnp.tril(jnp.ones((tokens, tokens), bool)), scores, -1e30)
    weights = jax.nn.softmax(scores, -1).astype(v.dtype)
    return jnp.einsum("bkgts,bskh->btkgh", weights, v).reshape(rows, tokens, heads, head)


def attending(p: Any, x: Any) -> Any:
    """A Llama block with that attention."""
    return llama_block(p, x, attention)


def priced(p: Any, x: Any) -> Any:
    """A Llama block whose attention keeps what a flash kernel keeps: its result, and nothing of T x T."""
    return llama_block(p, x, flash)


@jax.custom_vjp
def flash(q: Any, k: Any, v: Any) -> Any:
    """Stands for a kernel in the price list: shapes and residuals are its own, values are not."""
    return q


flash.defvjp(
    lambda q, k, v: (checkpoint_name(q * 1, "attention"), (q, k, v)), lambda kept, gradient: (gradient, *kept[1:])
)


def rule_figures(shape: Llama) -> list[Figure]:
    """Seconds over those of an unconstrained block, of every rule at five budgets, printed; POFO's against others'."""
    chip = Platform.parse("tpu v5p:2x2x1").chip
    graph = block_graph(priced, *shape.arguments(), chip=chip)
    link = next(link for link in chip.links if link.name == "pcie")
    host = Host(2**50, link.bandwidth)
    rules: dict[str, Callable[..., SaveSet]] = {
        "recompute alone": lambda graph, budget, host: solve(graph, budget, objective="seconds"),
        **SELECTORS,
    }
    print(f"\none block, v5p: {graph.needed_bytes / MiB:.0f} MiB needed by the backward pass, forward and backward")
    print(f"{3e3 * graph.seconds:.2f} ms by roofline, link {link.bandwidth / 1e9:.0f} GB/s each way\n")
    print(f"{'budget MiB':>10}  {'rule':16} {'device MiB':>10} {'host MiB':>9} {'time':>8}")
    behind, ahead = math.inf, 0.0
    for share in (0, 1 / 16, 1 / 8, 1 / 4, 2 / 5):
        budget = int(share * graph.needed_bytes)
        seconds = {}
        for name, rule in rules.items():
            save = rule(graph, budget, host)
            seconds[name] = save.seconds
            told = f"{save.bytes / MiB:10.0f} {save.host_bytes / MiB:9.0f} {save.seconds / graph.seconds / 3:+8.1%}"
            print(f"{budget / MiB:10.0f}  {name:16} {told}")
        others = [seconds[name] for name in rules if name != "pofo"]
        ahead = max(ahead, seconds["pofo"] / min(others))
        swapping = [seconds[name] for name in ("vdnn", "tflms", "autoswap", "swapadvisor")]
        behind = min(behind, min(swapping) / seconds["pofo"])
    return [
        Figure("pofo_over_the_best_of_the_others", ahead, "x", 1.0 + 1e-6),
        Figure("swapping_alone_over_pofo", behind, "x", 10.0, ">="),
    ]


def main() -> None:
    """Run the parts asked for and show the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a block of a few MiB, no compiler: checks that it runs")
    parser.add_argument("--only", default="RULES,STATE,ACTIVATIONS", help="parts, by their names")
    arguments = parser.parse_args()
    # this process traces; its children compile
    jax.config.update("jax_platforms", "cpu")
    parts = set(arguments.only.split(","))
    figures: list[Figure] = []
    if arguments.tiny:
        figures += rule_figures(Llama(1, 512, 1024, 2048, 8, 4))
    else:
        figures += rule_figures(Llama(1, 4096, 4096, 14336, 32, 8)) if "RULES" in parts else []
        figures += state_figures(Sizes(), "tpu v5e:2x2") if "STATE" in parts else []
        figures += (
            activation_figures(16, Llama(2, 2048, 2048, 5632, 16, 8), "tpu v5p:2x2x1") if "ACTIVATIONS" in parts else []
        )
    raise SystemExit(0 if show(figures, "Offload") else 1)


if __name__ == "__main__":
    main()
