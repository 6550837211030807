"""What a traced and a compiled step must show: a request that took no effect is an error, not a surprise.

The traced program shows what the model does with the plan (rematerialized blocks, the type of its matrix products,
whether it reads a setting at all), before anything is compiled. The compiled one shows what the compiler does with it
(where the state lies, what is sent between devices and in which type). It leaves out what no program shows: speed.
"""

import dataclasses
import math
import warnings
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import jax
from jax.sharding import NamedSharding
from optax import GradientTransformation

from jaxscale import blocks
from jaxscale.blocks import Context
from jaxscale.compiler.collectives import Collective
from jaxscale.errors import UserError
from jaxscale.lowbit.quantize import is_quantized
from jaxscale.memory.apply import policy_of
from jaxscale.memory.chain import Save
from jaxscale.memory.decision import Decision
from jaxscale.memory.keep_named import KeepNamed, keep_everything
from jaxscale.memory.plan import MemoryPlan
from jaxscale.memory.save_set import EVERYTHING
from jaxscale.programs import walk
from jaxscale.programs.flop import FORMULAS
from jaxscale.recipe.experiment import Experiment
from jaxscale.recipe.plan import Plan
from jaxscale.recipe.products import check_traced_products
from jaxscale.replicas import Codec
from jaxscale.sharding.memory_space import rehearses
from jaxscale.state.extra import CompiledProgram, StateExtra, Unreadable
from jaxscale.state.layout import BATCH_AXES, REPLICA_AXIS, Layout
from jaxscale.state.pure_model import PureModel
from jaxscale.step.wire_checks import NoEffect
from jaxscale.trees import leaf_bytes, named_leaves
from jaxscale.typing import Batch


@runtime_checkable
class CheckedStep(Protocol):
    """The parts of a train step that its checks read. `TrainStep` has them."""

    experiment: Experiment
    plan: Plan
    pure_model: PureModel
    layout: Layout
    extras: tuple[StateExtra, ...]
    decision: Decision | None
    optimizer: GradientTransformation

    @property
    def mesh(self) -> jax.sharding.Mesh:
        """The devices and their axes."""
        ...

    @property
    def evaluate_fn(self) -> jax.stages.Wrapped:
        """Sums of the loss over a batch."""
        ...

    def abstract_batch(self, batch: Batch) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes of a global batch, with their sharding."""
        ...


def check_traced(step: CheckedStep, jaxpr: Any, batch: Batch) -> None:
    """Compare the traced step with its plan.

    Args:
        step: with its plan and model.
        jaxpr: of the whole step.
        batch: arrays or shapes, to trace the loss once more where a setting may be one that the model does not read.

    Raises:
        UserError: the model does not take up what the plan asks for.
    """
    plan = step.plan
    equations = list(walk.equations(jaxpr))
    if (
        plan.memory.rule != "none"
        and not _keeps_all(step.decision)
        and not any(
            _is_of(plan.memory, eqn.params.get("policy")) and eqn.params.get("differentiated", True)
            for eqn, _ in equations
        )
    ):
        raise UserError(
            f"memory {plan.memory}: nothing is recomputed, for this model shows no blocks; build it of layers.Stack or "
            "layers.Chain, bring it as a ForeignModel, or leave memory out"
        )
    if plan.unroll > 1 and not any(eqn.primitive.name == "scan" and eqn.params["unroll"] > 1 for eqn, _ in equations):
        raise UserError(
            f"unroll {plan.unroll}: no scan over layers of this model runs more than one iteration's layers at a time; "
            "leave it out"
        )
    if plan.precision == "bfloat16":
        share = _narrow_share(equations)
        if share < 0.5:  # an optimizer that decomposes matrices, or a codec, may have more products than the model
            scored = step.evaluate_fn.trace(step.layout.abstract, step.abstract_batch(batch)).jaxpr
            share = _narrow_share(list(walk.equations(scored)))
        if share < 0.5:
            raise UserError(
                f"precision bfloat16: {1 - share:.0%} of the FLOP of this model's matrix products are not in bfloat16; "
                "it turns activations or weights into float32 by itself: leave that to the plan, or ask for float32"
            )
    check_traced_products(plan, equations)
    if plan.kernels.loss_chunk is not None and not _reads(step, batch, "loss_chunk", 1, None):
        raise UserError(
            f"loss_chunk {plan.kernels.loss_chunk}: this model's loss is not one over positions; leave it out"
        )
    if plan.kernels.names_attention and not _reads(step, batch, "attention", "plain", "chunked"):
        raise UserError(f"attention {plan.kernels.attends}: this model has no attention of ours; leave it out")


def _keeps_all(decision: Decision | None) -> bool:
    """Whether a decision recomputes nothing and moves nothing: its budget is enough, or a chain has one block alone."""
    if decision is None or decision.stack is not None:
        return False
    chain = decision.chain
    if chain is None:
        return bool(decision.saves) and all(save.keep == (EVERYTHING,) for save in decision.saves)
    return all(
        isinstance(node, Save) and chain.options[node.stage][node.option].keep == (EVERYTHING,) for node in chain.nodes
    )


def _is_of(plan: MemoryPlan, policy: Any) -> bool:
    """Whether a checkpoint is the one that a memory plan puts around blocks, and not another plan's or the user's."""
    asked = policy_of(plan)
    if asked is not None:
        return policy == asked
    return isinstance(policy, KeepNamed) or policy is keep_everything or policy is blocks.keep_nothing


def check_compiled(step: CheckedStep, executable: Any) -> None:
    """Compare the compiled step with its plan.

    Raises:
        NoEffect: ZeRO left state whole or gradients unscattered, moments are kept in more bits, or gradients are
            reduced in another type.
    """
    plan, mesh = step.plan, step.mesh
    check_state(step, executable.output_shardings[0])
    check_state_bits(plan, executable.out_info[0].optimizer)
    scatters = plan.zero > 1 and mesh.shape["fsdp"] > 1
    narrow = plan.precision == "bfloat16" and math.prod(mesh.shape[axis] for axis in BATCH_AXES) > 1
    program = CompiledProgram(mesh, executable.as_text)
    try:
        if scatters or narrow:
            check_wires(plan, mesh.devices.flat[0].platform, program.collectives, scatters)
        for extra in step.extras:
            extra.check(program)
    except Unreadable as error:  # a spelling that nobody has met must not stop a run
        warnings.warn(f"what the compiled step sends is not checked: its text could not be read: {error}", stacklevel=2)


def check_kept_on_host(step: CheckedStep, memory: Any) -> None:
    """Compare what a compiled step keeps on the host for its backward pass with the memory plan's decision.

    A backend without a memory of the host's own (a CPU) rehearses: there is nothing to see.

    Args:
        step: with its decision.
        memory: `memory_analysis()` of the compiled step.

    Raises:
        NoEffect: less is on the host than the decision puts there.
    """
    planned = 0 if step.decision is None else step.decision.host_bytes
    if not planned or rehearses(step.mesh.devices.flat):
        return
    if memory.host_temp_size_in_bytes < planned:
        raise NoEffect(
            f"memory {step.plan.memory}: {memory.host_temp_size_in_bytes} bytes of the compiled step are kept on the "
            f"host, and {planned} should"
        )


def check_state(step: CheckedStep, shardings: Any) -> None:
    """Compare where the compiled step leaves its state with the placement of each parameter.

    Args:
        step: with its layout.
        shardings: a `TrainState` of the compiled step's shardings.

    Raises:
        NoEffect: a tensor is in bigger parts than ZeRO's stage says.
    """
    layout = step.layout
    if not step.plan.zero or step.mesh.shape["fsdp"] == 1:
        return
    owners, state = layout.owners(step.optimizer), jax.tree.leaves(layout.abstract.optimizer)
    tensors = [
        (f"optimizer state of {name}", leaf.shape, layout.placements[name].state, sharding)
        for name, leaf, sharding in zip(owners, state, jax.tree.leaves(shardings.optimizer), strict=True)
        if name
    ]
    params = named_leaves(layout.abstract.params)
    tensors += [
        (f"parameter {name}", params[name].shape, layout.placements[name].master, sharding)
        for name, sharding in named_leaves(shardings.params).items()
    ]
    for what, shape, spec, sharding in tensors:
        expected = NamedSharding(step.mesh, spec).shard_shape(shape)
        part = sharding.shard_shape(shape)
        if part != expected:
            raise NoEffect(
                f"zero {step.plan.zero}: the compiled step keeps the {what} in parts of {part}, "
                f"and {expected} was asked for"
            )


def check_state_bits(plan: Plan, state: Any) -> None:
    """Compare the bytes that a compiled step keeps the optimizer's moments in with its plan.

    Args:
        plan: what was asked for.
        state: shapes and dtypes of the optimizer's state, as the compiled step gives it back.

    Raises:
        NoEffect: no array is quantized, or one takes more than its bits and a scale for each block.
    """
    if plan.state.moments == "float32":
        return
    bits = 4 if plan.state.moments == "int4" else 8
    moments = [leaf for leaf in jax.tree.leaves(state, is_leaf=is_quantized) if is_quantized(leaf)]
    if not moments:
        raise NoEffect(f"state {plan.state.moments}: the compiled step keeps no moment in {bits} bits")
    for array in moments:
        taken, asked = leaf_bytes(array.codes) + leaf_bytes(array.scale), bits / 8 + 4 / array.block
        if taken > 1.01 * asked * array.size:
            raise NoEffect(
                f"state {plan.state.moments}: the compiled step keeps a moment of shape {array.shape} in "
                f"{taken / array.size:.2f} bytes a number, and {asked:.2f} was asked for"
            )


def check_wires(plan: Plan, platform: str, sends: Sequence[Collective], scatters: bool) -> None:
    """Compare what a compiled step sends with its plan.

    Args:
        plan: what was asked for.
        platform: kind of its devices: "cpu", "gpu" or "tpu".
        sends: its collectives.
        scatters: ZeRO 2 or 3 over more than one device.

    Raises:
        NoEffect: no gradient is scattered over fsdp, or gradients are reduced in another type than asked for.
    """
    if scatters:
        kinds = {"reduce-scatter"}
        # a TPU computes the product of a sharded weight around a ring
        kinds |= {"collective-permute", "all-to-all"} if platform == "tpu" and plan.zero == 3 else set()
        if not any(c.kind in kinds and (c.axes is None or "fsdp" in c.axes) for c in sends):
            raise NoEffect(f"zero {plan.zero}: the compiled step scatters no gradient over fsdp")
    if plan.precision == "bfloat16" and platform != "cpu":  # XLA:CPU reduces nothing in less than float32
        sums = {"bf16": 0, "f32": 0}
        # what a codec sends over the replicas is `check_codec`'s to judge
        axes = {*BATCH_AXES} - ({REPLICA_AXIS} if isinstance(plan.reduce, Codec) else set())
        for c in sends:
            if c.kind in ("all-reduce", "reduce-scatter") and c.axes is not None and set(c.axes) & axes:
                sums[c.dtype] = sums.get(c.dtype, 0) + c.bytes * c.count
        wanted, other = ("f32", "bf16") if plan.reduce == "float32" else ("bf16", "f32")
        if sums[other] > sums[wanted]:
            raise NoEffect(
                f"reduce {plan.reduce or plan.precision}: of what the compiled step reduces over the data axes, "
                f"{sums[other]} bytes are {other} and {sums[wanted]} bytes {wanted}"
            )


def _narrow_share(equations: Sequence[tuple[Any, int]]) -> float:
    """Share of the FLOP of matrix products and convolutions whose operands are both narrower than float32."""
    narrow, total = 0, 0
    for eqn, times in equations:
        formula = FORMULAS.get(eqn.primitive.name)
        if formula is not None:
            flop = times * formula(eqn)
            total += flop
            narrow += flop if all(v.aval.dtype.itemsize < 4 for v in eqn.invars[:2]) else 0
    return narrow / total if total else 1.0


def _reads(step: CheckedStep, batch: Batch, field: str, one: Any, other: Any) -> bool:
    """Whether the loss, traced with two values of a field of its context, gives two programs."""
    abstract = {name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for name, leaf in batch.items()}
    pure_model = step.pure_model

    def program(value: Any) -> str:
        context = dataclasses.replace(Context(), **{field: value})

        def loss(params: Any, rest: Any, batch: Batch) -> Any:
            return tuple(step.experiment.model.loss(pure_model.module(params, rest), batch, context))

        return str(jax.make_jaxpr(loss)(pure_model.whole, pure_model.rest, abstract))

    return program(one) != program(other)
