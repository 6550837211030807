"""A traced train step: its flat program, the placements of its values, and the compiler's treatment of it."""

import dataclasses
from typing import Any, Literal

from jaxscale.planning import accuracy
from jaxscale.planning.fusion import Compiler
from jaxscale.platforms.platform import Platform
from jaxscale.programs.flat import FlatProgram, flatten
from jaxscale.programs.flop import jaxpr_flop
from jaxscale.programs.placements import Placements, dims_of, place
from jaxscale.recipe.plan import Plan
from jaxscale.step.train_step import TrainStep
from jaxscale.trees import path_name


@dataclasses.dataclass(frozen=True, eq=False)
class TracedStep:
    """A traced train step.

    Args:
        program: its inputs are the leaves of the state, then of the batch.
        placements: of its values.
        compiler: how the platform's compiler treats it.
        leaves: path and abstract value of each input.
        flop: FLOP of its products, all devices together.
    """

    program: FlatProgram
    placements: Placements
    compiler: Compiler
    leaves: tuple[tuple[str, Any], ...]
    flop: int


def traced_step(step: TrainStep, batch: Any, platform: Platform) -> TracedStep:
    """Trace a train step; nothing is compiled.

    Args:
        step: on the platform's devices, or their description.
        batch: arrays or shapes of a global batch.
        platform: where it would run.

    Raises:
        UserError: the plan names a kernel that the step does not use.
    """
    import jax

    shapes = step.abstract_batch(batch)
    state = step.layout.abstract
    jaxpr = jax.make_jaxpr(step.step_fn)(state, shapes)
    step.check_kernels()
    program = flatten(jaxpr)
    paths_and_leaves = [leaf for tree in (state, shapes) for leaf in jax.tree_util.tree_flatten_with_path(tree)[0]]
    leaves = tuple((path_name(path), leaf) for path, leaf in paths_and_leaves)
    for value, (path, _) in zip(program.inputs, leaves, strict=False):
        program.names[value] = path.removeprefix("params/")
    input_dims = [dims_of(leaf.sharding, len(leaf.shape)) for _, leaf in leaves]
    placements = place(program, input_dims, step.mesh.shape, tiled=platform.chip.kind == "tpu")
    return TracedStep(program, placements, _compiler(platform, step.plan), leaves, jaxpr_flop(jaxpr).total)


def _compiler(platform: Platform, plan: Plan) -> Compiler:
    """The fusion of the platform's compiler, as observed in compiled programs."""
    fuses: Literal["no", "all", "local"] = "no"
    if platform.chip.kind == "tpu":
        fuses = "local" if platform.topology is not None and len(platform.topology) == 2 else "all"
    return Compiler(fuses, plan.zero > 1, accuracy.factors(platform.chip.kind).gather)
