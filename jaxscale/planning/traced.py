"""A train step as estimates see it: its flat program, where every value lies, and what the compiler will make of it."""

import dataclasses
from typing import Any, Literal

from jaxscale.costs.trace import jaxpr_flop
from jaxscale.planning import accuracy
from jaxscale.planning.flat import Program, flatten
from jaxscale.planning.placements import Placements, dims_of, place
from jaxscale.planning.timeline import Compiler
from jaxscale.platforms.platform import Platform
from jaxscale.step.plan import Plan
from jaxscale.step.train_step import TrainStep
from jaxscale.trees import path_name


@dataclasses.dataclass(frozen=True, eq=False)
class TracedStep:
    """A traced train step.

    Args:
        program: of the state's leaves and the batch's, in this order.
        placements: where its values lie.
        compiler: how the platform's treats it.
        leaves: path and abstract value of each input.
        flop: of its products, all devices together.
    """

    program: Program
    placements: Placements
    compiler: Compiler
    leaves: tuple[tuple[str, Any], ...]
    flop: int


def traced_step(step: TrainStep, batch: Any, platform: Platform) -> TracedStep:
    """Trace a step that is built; nothing is compiled.

    Args:
        step: on the platform's devices, or their description.
        batch: arrays or shapes of a global batch.
        platform: where.

    Raises:
        UserError: the plan names a kernel that the step does not take.
    """
    import jax

    shapes = step.abstract_batch(batch)
    state = step.layout.abstract
    jaxpr = jax.make_jaxpr(step.step_fn)(state, shapes)
    step.check_kernels()
    program = flatten(jaxpr)
    found = [leaf for part in (state, shapes) for leaf in jax.tree_util.tree_flatten_with_path(part)[0]]
    leaves = tuple((path_name(path), leaf) for path, leaf in found)
    for value, (path, _) in zip(program.inputs, leaves, strict=False):
        program.names[value] = path.removeprefix("params/")
    given = [dims_of(leaf.sharding, len(leaf.shape)) for _, leaf in leaves]
    placements = place(program, given, step.mesh.shape, tiled=platform.chip.kind == "tpu")
    return TracedStep(program, placements, _compiler(platform, step.plan), leaves, jaxpr_flop(jaxpr).total)


def _compiler(platform: Platform, plan: Plan) -> Compiler:
    """What the platform's compiler fuses into products, as its compiled programs show."""
    fuses: Literal["no", "all", "local"] = "no"
    if platform.chip.kind == "tpu":
        fuses = "local" if platform.topology is not None and len(platform.topology) == 2 else "all"
    return Compiler(fuses, plan.zero > 1, accuracy.factors(platform.chip.kind).gather)
