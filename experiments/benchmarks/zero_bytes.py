"""Bytes per device and parameter of the ZeRO stages, read off compiled programs, against theory.

    python experiments/benchmarks/zero_bytes.py [--tiny]

Mixed-precision Adam keeps float32 master weights and two float32 moments between steps: 12 bytes a parameter, 12/n once
they are sharded; in float32 the weights stay whole at stages 1 and 2: 4 + 8/n. Gradients, the output of the compiled
gradient function, are whole at stages 0 and 1 and 1/n at 2 and 3. What is temporary within a step (gradients, the
gathered copy, activations) falls from stage to stage, and is the only row that theory gives no number for here. In
float32 the fall from 2 to 3 is that of the update, where stage 2 gathers new weights; the backward pass needs alike
much, for stage 3 gathers a layer's weights where stage 2 takes a slice of them: where that is the peak they are equal.

Measured on XLA:CPU, 8 virtual devices, JAX 0.10.2 (of compiled programs, so the same on any machine): arguments and
gradients equal theory to 0.1 %. Temporary bytes at n = 2, 4, 8: bfloat16 zero 2 / zero 1 0.90, 0.83, 0.78 and zero 3 /
zero 2 0.81, 0.49, 0.32; float32 zero 2 / zero 1 0.75, 0.48, 0.48 and zero 3 / zero 2 0.95, 0.9999, 0.64. Arguments and
temporary together, float32 zero 3 / zero 2: 0.83, 0.66, 0.41.
"""

import argparse
import dataclasses
import math

import jax
import numpy as np
from figures import Figure, show

from jaxscale.blocks import Model
from jaxscale.models.decoder import Decoder
from jaxscale.optim.optimizer import Optimizer
from jaxscale.recipe.experiment import Experiment
from jaxscale.recipe.plan import Plan
from jaxscale.sharding.mesh import MeshSpec
from jaxscale.state.layout import local_bytes
from jaxscale.step.build import build

STAGES = (0, 1, 2, 3)
TOLERANCE = 0.02


@dataclasses.dataclass(frozen=True)
class Bytes:
    """Bytes per device and parameter of one compiled step."""

    arguments: float
    gradients: float
    temporary: float


def theory(precision: str, zero: int, n: int) -> tuple[float, float]:
    """Bytes per parameter of (arguments, gradients)."""
    arguments = 12.0 if zero == 0 else 12 / n if precision == "bfloat16" or zero == 3 else 4 + 8 / n
    return arguments, 4.0 if zero < 2 else 4 / n


def measure(model: Model, precision: str, zero: int, n: int, rows: int = 8) -> Bytes:
    """Compile the train step and the gradient function on n virtual devices."""
    mesh = MeshSpec(fsdp=n)
    experiment = Experiment("zero_bytes", model, None, optimizer=Optimizer(), batch=rows, steps=10)
    step = build(experiment, Plan(mesh=mesh, zero=zero, precision=precision))  # pyright: ignore[reportArgumentType]
    length = model.context  # pyright: ignore[reportAttributeAccessIssue]
    batch = {name: np.zeros((rows, length), np.int32) for name in ("tokens", "targets")}
    compiled = step.compile(batch)
    gradients = step.gradients_fn.lower(step.layout.abstract, step.abstract_batch(batch)).compile().memory_analysis()
    assert gradients is not None, "XLA:CPU tells it"
    fixed = local_bytes(step.abstract_batch(batch))
    return Bytes(
        arguments=(compiled.argument_bytes - fixed) / step.parameters,
        gradients=gradients.output_size_in_bytes / step.parameters,
        temporary=compiled.temp_bytes / step.parameters,
    )


def main() -> None:
    """Print the table; exit with 1 if a bar does not hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="one mesh, a small model")
    tiny = parser.parse_args().tiny
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    # many layers and few tokens: what a stage does with weights and gradients outweighs activations and a single layer
    layers, embed, mlp = (2, 64, 192) if tiny else (24, 256, 768)
    model = Decoder(vocab=256, context=16, heads=8, layers=layers, embed=embed, mlp=mlp)
    figures: list[Figure] = []
    for precision in ("bfloat16", "float32"):
        for n in (4,) if tiny else (2, 4, 8):
            compiled: list[Bytes] = []
            for zero in STAGES:
                found, (arguments, gradients) = measure(model, precision, zero, n), theory(precision, zero, n)
                name = f"{precision} zero {zero} n={n}"
                figures.append(_near(f"{name}: arguments", found.arguments, arguments))
                figures.append(_near(f"{name}: gradients", found.gradients, gradients))
                compiled.append(found)
            for before, after in ((1, 2), (2, 3)):
                name, now, then = f"zero {after} / zero {before}", compiled[after], compiled[before]
                ratio = now.temporary / then.temporary
                bar = 1.0 if (precision, after) == ("float32", 3) else 0.99
                figures.append(Figure(f"{precision} n={n}: temporary, {name}", ratio, "x", bar))
                ratio = (now.arguments + now.temporary) / (then.arguments + then.temporary)
                figures.append(Figure(f"{precision} n={n}: arguments + temporary, {name}", ratio, "x", 0.999))
    show(figures, "ZeRO: bytes per device and parameter")
    if not tiny and not all(math.isfinite(f.value) and f.holds for f in figures):
        raise SystemExit(1)


def _near(name: str, value: float, expected: float) -> Figure:
    """A figure that may exceed theory by the tolerance; less than theory by as much would show a missing tensor."""
    assert value > expected * (1 - TOLERANCE), f"{name}: {value} is less than theory's {expected}"
    return Figure(name, value, "bytes/parameter", expected * (1 + TOLERANCE), "<=")


if __name__ == "__main__":
    main()
