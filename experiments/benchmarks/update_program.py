"""The update of an optimizer alone, over the weights of a Llama-like stack, compiled for machines that are not here.

What `state_bytes.py` and `optimizer_step.py` ask the compilers about: gradients, parameters and state are arguments,
parameters and state are donated. The recipe also keeps the compiled program's text, for what no report tells.
"""

import dataclasses
import math
import pathlib
import re
import tempfile
from collections.abc import Sequence
from functools import partial
from typing import Any

from jaxscale.compiler.compile import compile_report
from jaxscale.compiler.report import CompileReport

FSDP = 16


@dataclasses.dataclass(frozen=True)
class Stack:
    """The weights of a decoder, as matrices (in, out), stacked over layers; `fsdp` of 16 divides the dim `in`.

    Args:
        layers: of the stack.
        embed: width of the residual stream.
        kv: width of keys, and of values.
        mlp: hidden width.
        vocab: rows of embedding and head; 0 leaves them and the norms out.
        stacked: one leaf for all layers, not one each.
    """

    layers: int = 32
    embed: int = 4096
    kv: int = 1024
    mlp: int = 14336
    vocab: int = 0
    stacked: bool = True

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of each leaf by name."""
        d, kv, mlp = self.embed, self.kv, self.mlp
        one = {"q": (d, d), "k": (d, kv), "v": (d, kv), "out": (d, d), "gate": (d, mlp), "up": (d, mlp)}
        one["down"] = (mlp, d)
        if self.stacked:
            found = {f"layers/{name}": (self.layers, *shape) for name, shape in one.items()}
        else:
            found = {f"{i}/{name}": shape for i in range(self.layers) for name, shape in one.items()}
        if self.vocab:
            found |= {"embedding": (self.vocab, d), "head": (self.vocab, d), "norm": (self.layers, d)}
        return found


LLAMA_8B = Stack()
"""The layers of Llama 3 8B."""
TINY = Stack(layers=2, embed=512, kv=512, mlp=1024)


@dataclasses.dataclass(frozen=True)
class Update:
    """One update to compile.

    Args:
        rule: of optax, by name.
        states: of `quantize_state`; "float32" is optax's own.
        weights: "float32", or "split" in bfloat16 and a correction.
        stack: what is updated. Gradients are bfloat16.
    """

    rule: str = "adamw"
    states: str = "int8"
    weights: str = "float32"
    stack: Stack = LLAMA_8B


@dataclasses.dataclass(frozen=True)
class Found:
    """What a compiler says of an update.

    Args:
        report: its bytes and collectives.
        text: the compiled program.
        parameters: on one device.
        quantized: bytes of the quantized arrays on one device, and the numbers they hold.
        state: bytes of the whole state on one device.
    """

    report: CompileReport
    text: str
    parameters: int
    quantized: tuple[int, int]
    state: int

    @property
    def cycles(self) -> int:
        """The TPU compiler's estimate for the whole program, which must have no loop."""
        entry = self.text[self.text.index("\nENTRY") :]
        assert " while(" not in entry, "cycles of a loop are those of one pass"
        return sum(int(number) for number in re.findall(r'"estimated_cycles":"(\d+)"', entry))

    @property
    def gathers(self) -> int:
        """Gather operations: a table lookup each."""
        return len(re.findall(r" gather\(", self.text))


def compiled(update: Update, platform: str) -> Found:
    """Ask the compiler of a platform of 16 chips."""
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder) / "program"
        report = compile_report(partial(program, update=update, file=str(file)), platform, cache=False)
        if report.crashed or report.argument_bytes is None:
            raise SystemExit(f"{update} on {platform}: {report}")
        return Found(report, file.read_text(), *described(update))


def described(update: Update) -> tuple[int, tuple[int, int], int]:
    """Parameters, bytes and numbers of quantized arrays, and bytes of the whole state, on one of 16 devices."""
    import jax

    from jaxscale.lowbit.quantized import is_quantized
    from jaxscale.trees import tree_bytes

    _, params, state = _shapes(update, None)

    def local(tree: Any) -> int:
        """Bytes on one device: what has no rows (counts, scalars) is whole on each."""
        return sum(tree_bytes(x) // (FSDP if x.ndim > 1 else 1) for x in jax.tree.leaves(tree))

    found = [leaf for leaf in jax.tree.leaves(state, is_leaf=is_quantized) if is_quantized(leaf)]
    numbers = sum(leaf.size for leaf in found) // FSDP
    return sum(math.prod(x.shape) for x in params.values()) // FSDP, (local(found), numbers), local(state)


class Kept:
    """A lowered program that leaves its compiled text in a file."""

    def __init__(self, lowered: Any, file: str) -> None:
        self.lowered, self.file = lowered, file

    def __getattr__(self, name: str) -> Any:
        return getattr(self.lowered, name)

    def compile(self, *args: Any, **options: Any) -> Any:
        """As `jax.stages.Lowered` has it."""
        compiled = self.lowered.compile(*args, **options)
        pathlib.Path(self.file).write_text(compiled.as_text())
        return compiled


def program(devices: Sequence[Any], update: Update, file: str) -> Any:
    """The recipe."""
    import jax
    import optax
    from jax.sharding import AbstractMesh

    from jaxscale.compiler.described import abstract_device, lower_for

    mesh = AbstractMesh((FSDP,), ("fsdp",), abstract_device=abstract_device(devices[0]))
    rule, params, state = _shapes(update, mesh)
    gradients = {name: jax.ShapeDtypeStruct(p.shape, "bfloat16", sharding=p.sharding) for name, p in params.items()}

    def step(params: Any, gradients: Any, state: Any) -> Any:
        updates, state = rule.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    out = jax.tree.map(lambda x: x.sharding, (params, state))
    traced = jax.jit(step, donate_argnums=(0, 2), out_shardings=out).trace(params, gradients, state)
    return Kept(lower_for(devices, traced), file)


def _shapes(update: Update, mesh: Any) -> tuple[Any, dict[str, Any], Any]:
    """The rule, its parameters and its state, with shardings over a mesh where there is one."""
    import jax
    import optax
    from jax.sharding import NamedSharding, PartitionSpec

    from jaxscale.lowbit.quantized import is_quantized, quantize_state, quantized_shardings
    from jaxscale.lowbit.split_weights import split_weights

    def spec(shape: tuple[int, ...]) -> PartitionSpec:
        return PartitionSpec(*(None,) * (len(shape) - 2), "fsdp") if len(shape) > 1 else PartitionSpec()

    dtype = "bfloat16" if update.weights == "split" else "float32"
    shapes = update.stack.shapes()
    local = {name: (*shape[:-2], shape[-2] // FSDP, shape[-1]) for name, shape in shapes.items()}
    rule = quantize_state(getattr(optax, update.rule)(1e-3), update.states, local=local)  # pyright: ignore[reportArgumentType]
    rule = split_weights(rule) if update.weights == "split" else rule
    params = {name: jax.ShapeDtypeStruct(shape, dtype) for name, shape in shapes.items()}
    state = jax.eval_shape(rule.init, params)
    if mesh is None:
        return rule, params, state
    places = {name: NamedSharding(mesh, spec(shape)) for name, shape in shapes.items()}
    spread = optax.tree.map_params(
        rule,
        lambda _, place: place,
        state,
        places,
        transform_non_params=lambda _: NamedSharding(mesh, PartitionSpec()),
        is_leaf=is_quantized,
    )

    def on(x: Any, place: Any) -> Any:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place)

    return rule, jax.tree.map(on, params, places), jax.tree.map(on, state, quantized_shardings(state, spread))
