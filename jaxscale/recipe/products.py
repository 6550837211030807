"""What a plan's `matmul` asks of the products of layers: who can, what the traced step must show, who emulates.

The recipes are in `lowbit/products.py`. A product of a layer tells its role by the dims it sums over: the last of
the first operand with the first of a matrix (forward) or its last (onward), or all but the last of both (inward).
"""

from collections.abc import Sequence
from typing import Any

from jaxscale.errors import UserError
from jaxscale.lowbit.products import RECIPES, ROLES
from jaxscale.platforms.detect import chip_of
from jaxscale.recipe.plan import Plan


def check_products(plan: Plan, model: Any) -> None:
    """Refuse a recipe for a model whose layers are not ours, before anything is traced."""
    if plan.matmul in RECIPES and getattr(model, "foreign", False):
        raise UserError(
            f"matmul {plan.matmul}: this model brings its own layers, and ours alone multiply by it; build it of "
            "jaxscale.layers, or leave matmul out"
        )


def check_traced_products(plan: Plan, equations: Sequence[tuple[Any, int]]) -> None:
    """Compare the operands of a traced step's products with its plan's recipe.

    Args:
        plan: what was asked for.
        equations: of the step, and of the jaxprs inside it.

    Raises:
        UserError: no layer multiplies by it, or one of the three products of a layer is in another type.
    """
    recipe = RECIPES.get(plan.matmul)
    if recipe is None:
        return
    counts = dict.fromkeys(ROLES, 0)
    for eqn, times in equations:
        role = role_of(eqn)
        if role is not None and {v.aval.dtype.name for v in eqn.invars} == recipe.types(role):
            counts[role] += times
    lacking = [ROLES[role] for role, count in counts.items() if not count]
    if len(lacking) == len(ROLES):
        raise UserError(
            f"matmul {plan.matmul}: no layer of this model multiplies by it; give jaxscale.layers their context, as "
            "MLP and Attention do, or leave matmul out"
        )
    if lacking:
        raise UserError(
            f"matmul {plan.matmul}: {' and '.join(lacking)} are computed in another type; a backward pass of the "
            "model's own is in the way: leave matmul out"
        )


def role_of(eqn: Any) -> str | None:
    """The role of a layer's product among its three; `None` for other operations."""
    if eqn.primitive.name != "dot_general":
        return None
    (first, second), (batch, _) = eqn.params["dimension_numbers"]
    left, right = (v.aval.ndim for v in eqn.invars)
    if batch:
        return None
    if tuple(first) == tuple(second) == tuple(range(left - 1)) and left == right:
        return "inward"
    if right == 2 and tuple(first) == (left - 1,):
        return "forward" if tuple(second) == (0,) else "onward"
    return None


def describe_products(plan: Plan, devices: Sequence[Any]) -> list[str]:
    """What a user should know of a plan's recipe on these devices; nothing where the chip has its products."""
    recipe = RECIPES.get(plan.matmul)
    if recipe is None:
        return []
    chip = chip_of(devices[0].device_kind, devices[0].platform)
    if recipe.emulated:
        return [f"matmul {plan.matmul}: emulated, no chip has all its products; XLA computes them in wider types"]
    if chip.peak(recipe.operands.dtype) is None:
        return [f"matmul {plan.matmul}: emulated, {chip.name} has no such products; XLA computes them in wider types"]
    return []
