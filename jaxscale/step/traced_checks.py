"""Checks of a traced step: a setting of the plan that has no effect is an error, before anything is compiled.

The traced program shows which blocks are recomputed, the types of the matrix products, the kernels that are used, and
whether the model reads a setting at all.

A layer with weight W (a matrix) computes three matrix products, which differ in the dims that they sum over. The
forward product y = x W sums over the last dim of x and the first dim of W. The onward product, the gradient of x, sums
over the last dims of both operands. The inward product, the gradient of W, sums over all dims of both operands but the
last.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import ParamSpec, TypeVar

import jax
from jax.core import ShapedArray
from jax.extend.core import ClosedJaxpr, JaxprEqn
from jax.sharding import AbstractMesh, Mesh

from jaxscale import blocks
from jaxscale.blocks import Context
from jaxscale.errors import UserError
from jaxscale.lowbit.products import RECIPES, ROLES
from jaxscale.memory.apply import policy_of
from jaxscale.memory.chain import Save
from jaxscale.memory.decision import Decision
from jaxscale.memory.keep_named import KeepNamed, keep_everything
from jaxscale.memory.plan import MemoryPlan
from jaxscale.memory.save_set import EVERYTHING
from jaxscale.programs import walk
from jaxscale.programs.flop import FORMULAS
from jaxscale.recipe.kernels import KernelChoice
from jaxscale.recipe.plan import Plan
from jaxscale.state.layout import device_of
from jaxscale.step.planned_model import PlannedModel
from jaxscale.typing import Array, Batch, Params
from pallas_kernels import dispatch
from pallas_kernels.target import target

P = ParamSpec("P")
R = TypeVar("R")
_PASS_NONE = "Pass implementation=None to take one that can."
"""The advice at the end of a kernel's error, for callers of the kernel's function; a plan's user gets other advice."""


class KernelTrace:
    """The implementation of each kernel that `pallas_kernels.dispatch` and the layers chose while a step was traced.

    Args:
        plan: the plan, which may name implementations.
        mesh: mesh of the step's devices.
        unfused_reason: why no fused kernel updates a quantized optimizer state; `None` if a kernel does.
    """

    def __init__(self, plan: Plan, mesh: Mesh | AbstractMesh, unfused_reason: str | None) -> None:
        self._plan, self._mesh, self._unfused_reason = plan, mesh, unfused_reason
        self._notes: dispatch.Notes = []

    @property
    def choices(self) -> tuple[KernelChoice, ...]:
        """The chosen implementations; choices that differ only in the shapes of the arrays are listed once."""
        choices = (KernelChoice(note.kernel, str(note.target), note.chosen, note.why) for note, _ in self._notes)
        return tuple(dict.fromkeys(choices))

    def with_recording(self, function: Callable[P, R]) -> Callable[P, R]:
        """Return a function like `function`, whose traces choose kernels by the plan and record the choices here.

        Args:
            function: a function of the step, to be traced.
        """

        @functools.wraps(function)
        def recorded_function(*args: P.args, **kwargs: P.kwargs) -> R:
            with dispatch.naming(self._plan.kernels.of_codecs()), dispatch.noting(self._notes):
                try:
                    results = function(*args, **kwargs)
                except dispatch.CannotRun as error:
                    message = str(error)
                    if message.endswith(_PASS_NONE):
                        reason = message.removesuffix(_PASS_NONE)
                        message = f"kernels {self._plan.kernels}: {reason}Leave the name out for one that can"
                    raise UserError(message) from error
                self._record_unfused_update()
            return results

        return recorded_function

    def _record_unfused_update(self) -> None:
        """Record why no fused kernel updates a quantized state, unless the trace has recorded a choice."""
        if self._plan.state.moments == "float32" or any(note.kernel == "adam8" for note, _ in self._notes):
            return
        device = device_of(self._mesh)
        reason = self._unfused_reason or "no moment has a layout that the kernel supports"
        device_target = target(f"{device.platform} {device.device_kind}")
        dispatch.note(dispatch.Explanation("adam8", device_target, "reference", {}, reason))


def check_kernel_choices(plan: Plan, choices: Sequence[KernelChoice]) -> None:
    """Refuse a plan that names an implementation of a kernel, if the step does not use that implementation.

    Args:
        plan: the plan, which may name implementations.
        choices: the implementations that the traced step uses; there may be several of one kernel.

    Raises:
        UserError: the named implementation is not used; the error reports which one is.
    """
    for kernel, implementation in plan.kernels.named:
        kernel_choices = [choice for choice in choices if choice.kernel == kernel]
        if kernel == "attention":  # `check_traced` refuses a model that does not read this setting
            continue
        if not kernel_choices:
            raise UserError(f"kernels {kernel}={implementation}: no part of this step uses {kernel}; leave it out")
        if implementation not in [choice.implementation for choice in kernel_choices]:
            refusal = f"kernels {kernel}={implementation}: this step uses {kernel} {kernel_choices[0].implementation}"
            if kernel == "cross_entropy":
                advice = "pass context.loss and context.loss_chunk to the cross entropy of the model's own loss"
                raise UserError(f"{refusal}; {advice}, or leave it out")
            reason = kernel_choices[0].why
            raise UserError(f"{refusal}{'' if reason is None else f' ({reason})'}; leave it out")


def check_traced(
    planned: PlannedModel,
    decision: Decision | None,
    batch: Batch,
    jaxpr: ClosedJaxpr,
    trace_loss: Callable[[], jax.stages.Traced],
) -> None:
    """Compare a traced step with its plan.

    Args:
        planned: the model under its plan.
        decision: the values that the blocks keep; `None` if the memory rule does not depend on the blocks.
        batch: arrays or shapes of a batch, for further traces that show whether the model reads a setting.
        jaxpr: jaxpr of the whole step.
        trace_loss: function that traces the loss alone.

    Raises:
        UserError: a setting of the plan has no effect on the traced step.
    """
    plan = planned.plan
    equations_and_runs = list(walk.equations_with_runs(jaxpr))
    policies = [eqn.params.get("policy") for eqn, _ in equations_and_runs if eqn.params.get("differentiated", True)]
    is_recomputation_planned = plan.memory.rule != "none" and not _keeps_all(decision)
    if is_recomputation_planned and not any(_is_policy_of_plan(plan.memory, policy) for policy in policies):
        raise UserError(
            f"memory {plan.memory}: nothing is recomputed, because this model marks no blocks; build it from "
            "layers.Stack or layers.Chain, wrap it in a ForeignModel, or omit memory"
        )
    if plan.unroll > 1 and not any(
        eqn.primitive.name == "scan" and eqn.params["unroll"] > 1 for eqn, _ in equations_and_runs
    ):
        raise UserError(
            f"unroll {plan.unroll}: this model has no scan over layers that runs several layers per iteration; "
            "leave unroll out"
        )
    if plan.precision == "bfloat16":
        narrow_share = _narrow_share(equations_and_runs)
        # an optimizer that decomposes matrices, or a codec, may compute more products than the model: trace the loss
        if narrow_share < 0.5:
            narrow_share = _narrow_share(walk.equations_with_runs(trace_loss().jaxpr))
        if narrow_share < 0.5:
            raise UserError(
                f"precision bfloat16: {1 - narrow_share:.0%} of the FLOP of this model's matrix products are not in "
                "bfloat16, because the model converts activations or weights to float32; leave the conversion to the "
                "plan, or set precision float32"
            )
    _check_products(plan, equations_and_runs)
    if plan.kernels.loss_chunk is not None and not _reads_field(planned, batch, "loss_chunk", (1, None)):
        raise UserError(
            f"loss_chunk {plan.kernels.loss_chunk}: this model's loss has no chunks of positions; leave loss_chunk out"
        )
    if plan.kernels.names_attention and not _reads_field(planned, batch, "attention", ("plain", "chunked")):
        raise UserError(f"attention {plan.kernels.attends}: this model does not use jaxscale's attention; leave it out")


def _check_products(plan: Plan, equations_and_runs: Sequence[tuple[JaxprEqn, int]]) -> None:
    """Compare the operands of a traced step's matrix products with the plan's recipe.

    Args:
        plan: the plan, whose `matmul` may be a recipe of matrix products.
        equations_and_runs: (equation, number of times that it runs) for each equation of the step and of jaxprs inside
            it.

    Raises:
        UserError: no layer computes a product by the recipe, or one of a layer's three products is computed in another
            dtype.
    """
    recipe = RECIPES.get(plan.matmul)
    if recipe is None:
        return
    count_by_role = dict.fromkeys(ROLES, 0)
    for eqn, run_count in equations_and_runs:
        role = _role_of(eqn)
        if role is not None and {operand.dtype.name for operand in _abstract_operands(eqn)} == recipe.dtypes_of(role):
            count_by_role[role] += run_count
    missing_product_texts = [ROLES[role] for role, count in count_by_role.items() if not count]
    if len(missing_product_texts) == len(ROLES):
        raise UserError(
            f"matmul {plan.matmul}: no layer of this model multiplies by this recipe; pass the context to the layers "
            "of jaxscale.layers, as MLP and Attention do, or leave matmul out"
        )
    if missing_product_texts:
        raise UserError(
            f"matmul {plan.matmul}: {' and '.join(missing_product_texts)} are computed in another type, because the "
            "model defines a backward pass of its own; leave matmul out"
        )


def _role_of(eqn: JaxprEqn) -> str | None:
    """Return which product of a layer an equation computes: "forward", "onward", "inward" or, if none, `None`."""
    if eqn.primitive.name != "dot_general":
        return None
    (left_dims, right_dims), (batch_dims, _) = eqn.params["dimension_numbers"]
    left_rank, right_rank = (operand.ndim for operand in _abstract_operands(eqn))
    if batch_dims:
        return None
    if tuple(left_dims) == tuple(right_dims) == tuple(range(left_rank - 1)) and left_rank == right_rank:
        return "inward"
    if right_rank == 2 and tuple(left_dims) == (left_rank - 1,):
        return "forward" if tuple(right_dims) == (0,) else "onward"
    return None


def _abstract_operands(eqn: JaxprEqn) -> list[ShapedArray]:
    """Return the shapes and dtypes of those operands of an equation that are arrays."""
    return [variable.aval for variable in eqn.invars if isinstance(variable.aval, ShapedArray)]


def _keeps_all(decision: Decision | None) -> bool:
    """Return whether, under a decision, every block keeps all its values on the device."""
    if decision is None or decision.stack is not None:
        return False
    chain = decision.chain
    if chain is None:
        return bool(decision.saves) and all(save.keep == (EVERYTHING,) for save in decision.saves)
    return all(
        isinstance(node, Save) and chain.options[node.stage][node.option].keep == (EVERYTHING,) for node in chain.nodes
    )


def _is_policy_of_plan(memory_plan: MemoryPlan, policy: Callable[..., bool] | None) -> bool:
    """Return whether a checkpoint policy is one that a memory plan applies to blocks, rather than the user's own."""
    plan_policy = policy_of(memory_plan)
    if plan_policy is not None:
        return policy == plan_policy
    return isinstance(policy, KeepNamed) or policy is keep_everything or policy is blocks.keep_nothing


def _narrow_share(equations_and_runs: Iterable[tuple[JaxprEqn, int]]) -> float:
    """Return the share of matrix-product and convolution FLOP whose operands are all narrower than float32.

    Args:
        equations_and_runs: (equation, number of times that it runs) for each equation.
    """
    narrow_flop, total_flop = 0, 0
    for eqn, run_count in equations_and_runs:
        formula = FORMULAS.get(eqn.primitive.name)
        if formula is not None:
            flop = run_count * formula(eqn)
            total_flop += flop
            narrow_flop += flop if all(operand.dtype.itemsize < 4 for operand in _abstract_operands(eqn)[:2]) else 0
    return narrow_flop / total_flop if total_flop else 1.0


def _reads_field(
    planned: PlannedModel, batch: Batch, field_name: str, field_values: tuple[str | int | None, ...]
) -> bool:
    """Return whether the traced loss depends on a field of its context.

    Args:
        planned: the model under its plan.
        batch: arrays or shapes of a batch.
        field_name: name of the field of `Context`.
        field_values: values of the field, for which the traced programs are compared.
    """
    abstract_batch = {name: jax.ShapeDtypeStruct(array.shape, array.dtype) for name, array in batch.items()}
    pure_model = planned.pure_model

    def program_text(field_value: str | int | None) -> str:
        """Return the text of the loss's program with one value of the field."""
        context = dataclasses.replace(Context(), **{field_name: field_value})

        def loss_sums(params: Params, model_state: Params, batch: Batch) -> tuple[Array | float, ...]:
            return tuple(planned.loss(pure_model.module(params, model_state), batch, context))

        return str(
            jax.make_jaxpr(loss_sums)(
                pure_model.abstract_module_params, pure_model.abstract_model_state, abstract_batch
            )
        )

    return len(set(map(program_text, field_values))) > 1
