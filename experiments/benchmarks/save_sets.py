"""The optimal save set of a block against JAX's own policies, and against the compiler.

    python experiments/benchmarks/save_sets.py [--tiny]

For a block of a Llama (D 2048, F 5632, 16 and 8 heads, 2 x 2048 tokens, bfloat16, plain attention), of a ViT-B (batch
32, 197 tokens), for the kinds of blocks of a ResNet-50 (batch 32), and for a mixture of 8 experts with dense dispatch:
at the bytes that each of JAX's policies keeps, the FLOP (and modelled seconds, on a v5p) of the set solved for them, as
a share of the policy's; at its FLOP, the bytes. Then the time of a whole curve, how many sets of it lie between JAX's
policies, and what the CPU's compiler makes of two of them in a stack of 8 layers.

Measured on 2 cores, Python 3.11, JAX 0.10.2, 2026-11-28: never more FLOP, seconds or bytes than JAX's policies (shares
of at most 1 for all four); on the Llama 16 sets between theirs, such as 34 GFLOP recomputed a layer at 152 MiB where
dots_with_no_batch_dims_saveable has 69 at 136 MiB. Nothing is recomputed from 486 MiB on, where everything is kept;
dots_saveable keeps 664 MiB, the scores among them, and recomputes for 619 modelled microseconds. Compiled FLOP are off
by 0.06 %, the difference in temporary bytes by 16 % (what a block takes at once shrinks as more of it is kept).
"""

import argparse
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from figures import Figure, show
from flax import nnx

from jaxscale import blocks
from jaxscale.blocks import Context, Treatment
from jaxscale.memory.decision import SaveSet
from jaxscale.memory.graph import menu, smallest_save_set, solve
from jaxscale.memory.keep_named import keeping
from jaxscale.memory.save_set import policy_set
from jaxscale.models.decoder import Decoder
from jaxscale.models.resnet import ResNet
from jaxscale.models.vit import ViT
from jaxscale.platforms.platform import Platform
from jaxscale.programs.block import BlockGraph, block_graph
from jaxscale.programs.collect import collect

CHIP = Platform.parse("tpu v5p:2x2x1").chip
POLICIES = ("nothing_saveable", "dots_with_no_batch_dims_saveable", "dots_saveable", "everything_saveable")
BUDGETS = 23


def split(make: Callable[[], Any], dtype: Any = jnp.bfloat16) -> tuple[Any, Any]:
    """Structure and abstract state of a module; parameters in the type to compute in, statistics as they are."""
    graphdef, params, rest = nnx.split(nnx.eval_shape(make), nnx.Param, ...)
    narrow = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, dtype), nnx.to_pure_dict(params))
    return graphdef, (narrow, nnx.to_pure_dict(rest))


def graphs_of(make: Callable[[], Any], call: Callable[[Any, Any], Any], x: Any) -> list[BlockGraph]:
    """One graph for each kind of block that a module calls."""
    graphdef, params = split(make, x.dtype)
    calls = collect(lambda params, x: call(nnx.merge(graphdef, *params, copy=True), x), params, x, chip=CHIP)
    return list({found.fingerprint: found.graph for found in calls}.values())


def llama(tiny: bool) -> list[BlockGraph]:
    """The block of a Llama of 1B parameters."""
    embed, mlp, length = (128, 384, 128) if tiny else (2048, 5632, 2048)
    config = Decoder(vocab=32, context=length, layers=2, embed=embed, heads=16, kv_heads=8, mlp=mlp)
    x = jax.ShapeDtypeStruct((2, length, embed), jnp.bfloat16)
    context = Context(attention="plain")
    return graphs_of(lambda: config.build(nnx.Rngs(0)).blocks, lambda stack, x: stack(x, context=context), x)


def vit(tiny: bool) -> list[BlockGraph]:
    """The block of a ViT-B/16."""
    embed, heads, batch = (96, 4, 2) if tiny else (768, 12, 32)
    config = ViT(classes=10, image=64 if tiny else 224, patch=16, layers=2, embed=embed, heads=heads)
    x = jax.ShapeDtypeStruct((batch, config.patches + 1, embed), jnp.bfloat16)
    context = Context(attention="plain")
    return graphs_of(lambda: config.build(nnx.Rngs(0)).blocks, lambda stack, x: stack(x, context=context), x)


def resnet(tiny: bool) -> list[BlockGraph]:
    """The kinds of blocks of a ResNet-50, in training."""
    config = ResNet(classes=10, stages=(2, 2) if tiny else (3, 4, 6, 3), width=16 if tiny else 64, bottleneck=True)
    x = jax.ShapeDtypeStruct((2 if tiny else 32, *(2 * (8 if tiny else 56,)), config.width), jnp.bfloat16)

    def call(chain: Any, x: Any) -> Any:
        return chain(x, context=Context(key=jax.random.key(0)))

    return graphs_of(lambda: config.build(nnx.Rngs(0)).blocks, call, x)


def mixture(tiny: bool) -> list[BlockGraph]:
    """Experts that tokens reach by one-hot matrices (GShard, arXiv:2006.16668): top 2 of 8, capacity 2.5 times even."""
    embed, mlp, length, experts = (64, 128, 64, 4) if tiny else (2048, 4096, 2048, 8)
    capacity = length * 5 // (2 * experts)
    shapes = {"router": (embed, experts), "gate": (experts, embed, mlp), "up": (experts, embed, mlp)}
    shapes |= {"down": (experts, mlp, embed)}
    params = {name: jax.ShapeDtypeStruct(shape, jnp.bfloat16) for name, shape in shapes.items()}
    x = jax.ShapeDtypeStruct((2, length, embed), jnp.bfloat16)

    def block(params: Any, x: Any) -> Any:
        chances = jax.nn.softmax((x @ params["router"]).astype(jnp.float32))
        weights, chosen = jax.lax.top_k(chances, 2)
        picked = jax.nn.one_hot(chosen, experts)
        place = jnp.cumsum(picked.sum(2), axis=1)[:, :, None, :] * picked - 1
        slot = jax.nn.one_hot(place.astype(jnp.int32), capacity) * picked[..., None]
        combine = jnp.einsum("btk,btkec->btec", weights, slot).astype(x.dtype)
        dispatch = (combine > 0).astype(x.dtype)
        inside = jnp.einsum("btd,btec->becd", x, dispatch)
        gate = jax.nn.silu(jnp.einsum("becd,edf->becf", inside, params["gate"]))
        hidden = gate * jnp.einsum("becd,edf->becf", inside, params["up"])
        outside = jnp.einsum("becf,efd->becd", hidden, params["down"])
        return x + jnp.einsum("becd,btec->btd", outside, combine)

    return [block_graph(block, params, x, chip=CHIP)]


MODELS: dict[str, Callable[[bool], list[BlockGraph]]] = {"llama": llama, "vit": vit, "resnet": resnet, "moe": mixture}


def share(ours: float, theirs: float) -> float:
    """Ours as a share of theirs; 1 where both are nothing."""
    return ours / theirs if theirs else 1.0 if ours == 0 else float("inf")


def against_policies(graphs: Sequence[BlockGraph]) -> tuple[float, float, float]:
    """The worst share of FLOP, seconds and bytes over kinds of blocks and policies."""
    flop, seconds, size = 0.0, 0.0, 0.0
    for graph in graphs:
        for policy in POLICIES:
            theirs = policy_set(graph, policy)
            flop = max(flop, share(solve(graph, theirs.bytes).flop, theirs.flop))
            seconds = max(seconds, share(solve(graph, theirs.bytes, objective="seconds").seconds, theirs.seconds))
            size = max(size, share(smallest_save_set(graph, theirs.flop).bytes, theirs.bytes))
    return flop, seconds, size


def table(graph: BlockGraph, curve: Sequence[SaveSet]) -> None:
    """Ours and JAX's, by rising bytes."""
    rows = [(save, "") for save in curve] + [(policy_set(graph, policy), policy) for policy in POLICIES]
    print(f"{'MiB a layer':>12} {'recomputed GFLOP':>17} {'modelled us':>12}")
    for save, name in sorted(rows, key=lambda row: (row[0].bytes, row[1])):
        print(f"{save.bytes / 2**20:12.1f} {save.flop / 1e9:17.2f} {save.seconds * 1e6:12.0f} {name}")


def compiled(tiny: bool) -> tuple[float, float]:
    """Relative errors of predicted FLOP and of the difference in temporary bytes, on this machine's compiler."""
    layers, embed, length = 8, 64 if tiny else 256, 64 if tiny else 256
    config = Decoder(vocab=32, context=length, layers=layers, embed=embed, heads=4, kv_heads=2, mlp=3 * embed)
    graphdef, params = split(lambda: config.build(nnx.Rngs(0)).blocks, jnp.float32)
    x = jax.ShapeDtypeStruct((8, length, embed), jnp.float32)

    def loss(params: Any, x: Any) -> Any:
        made = nnx.merge(graphdef, *params, copy=True)(x, context=Context(attention="plain"))
        return jnp.sum(jnp.square(made))

    [call] = collect(loss, params, x)
    sets = [solve(call.graph, 0), solve(call.graph, call.graph.needed_bytes // 2)]
    flop, temp = [], []
    for save in sets:
        with blocks.treating(Treatment(keeping([save]))):
            # a function of its own: JAX would give the trace under the other set again
            found = jax.jit(jax.grad(lambda *given: loss(*given))).lower(params, x).compile()
        cost: Any = found.cost_analysis()
        flop.append(cost["flops"])  # the body of a loop counts once
        memory: Any = found.memory_analysis()
        temp.append(memory.temp_size_in_bytes)
    predicted = sets[0].flop - sets[1].flop
    bytes_apart = layers * (sets[1].bytes - sets[0].bytes)
    return abs(flop[0] - flop[1] - predicted) / flop[0], abs(temp[1] - temp[0] - bytes_apart) / bytes_apart


def main() -> None:
    """Measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="small blocks")
    tiny = parser.parse_args().tiny
    figures = []
    for name, make in MODELS.items():
        graphs = make(tiny)
        flop, seconds, size = against_policies(graphs)
        figures.append(Figure(f"{name}_flop_at_their_bytes", flop, "x", 1.0))
        figures.append(Figure(f"{name}_seconds_at_their_bytes", seconds, "x", 1.0))
        figures.append(Figure(f"{name}_bytes_at_their_flop", size, "x", 1.0))
        if name == "llama":
            [graph] = graphs
            solve(graph, 0)  # imports scipy
            start = time.perf_counter()
            curve = menu(graph, BUDGETS)
            taken = time.perf_counter() - start
            table(graph, curve)
            theirs = sorted(policy_set(graph, policy).bytes for policy in POLICIES[:3])
            between = [save for save in curve if theirs[0] < save.bytes < theirs[-1] and save.bytes not in theirs]
            figures.append(Figure("llama_further_points", len(between), "", 8, ">="))
            figures.append(Figure("llama_curve_of_23_budgets", taken, "s", 3.0))
    flop, temp = compiled(tiny)
    figures.append(Figure("compiled_flop_error", flop, "", None if tiny else 0.005))
    figures.append(Figure("compiled_temp_error", temp, "", None if tiny else 0.2))
    show(figures, "Save sets")


if __name__ == "__main__":
    main()
