"""What is missing if no plan fits: bytes, the setting that frees the most, and the smallest machine that would do."""

import dataclasses

from jaxscale.errors import UserError
from jaxscale.planning.estimate import estimate
from jaxscale.planning.search.machines import MAX_GROWTH, smallest_machine
from jaxscale.planning.search.ranked import JudgedPlan
from jaxscale.planning.search.search import Search
from jaxscale.recipe.plan import Plan
from jaxscale.values.units import size


def advice_for(search: Search, smallest: JudgedPlan) -> str:
    """Return sentences on what is missing, which setting would free the most, and which machine would do.

    Args:
        search: a search in which nothing fits.
        smallest: the plan of the search that needs the least memory.
    """
    if search.limit is None:
        return ""
    lines: list[str] = []
    missing_bytes = smallest.device_bytes - search.limit
    kinds = smallest.estimate.device_bytes_by_kind
    largest_kind = max(kinds, key=lambda kind: kinds[kind])
    if missing_bytes > 0:
        lines.append(
            f"the smallest plan needs {size(missing_bytes)} too much; {largest_kind} takes the most, "
            f"{size(kinds[largest_kind])}"
        )
    else:
        lines.append("the smallest plan needs more host memory than there is; use more hosts, or no offload")
        return "\n".join(lines)
    savings = _savings(search, smallest)
    if savings:
        saved_bytes, flags = max(savings)
        lines.append(f"{flags} would free the most, {size(saved_bytes)}, but changes results slightly")
    for name in sorted(search.choices.forbidden | search.choices.fixed):
        lines.append(f"{name} was not searched, as you asked")
    machine = smallest_machine(search)
    if machine is not None:
        platform, judged = machine
        lines.append(
            f"the smallest {platform.chip.kind} {platform.chip.name} that would do is {platform}, by estimate "
            f"({size(judged.device_bytes)} of {size(search.limit)})"
        )
    elif search.platform.chip.kind != "cpu":
        lines.append(
            f"no {search.platform.chip.name} up to {MAX_GROWTH} times as large would do with a batch of "
            f"{search.experiment.batch}"
        )
    return "\n".join(lines)


def _savings(search: Search, smallest: JudgedPlan) -> list[tuple[int, str]]:
    """Return the bytes that number formats would free, each with the flag that sets the format."""
    changes: dict[str, Plan] = {}
    plan = smallest.plan
    try:
        if plan.precision == "float32":
            changes["--plan.precision bfloat16"] = dataclasses.replace(plan, precision="bfloat16")
        if plan.state.moments == "float32" and plan.offload.optimizer_state == "device":
            int8 = dataclasses.replace(plan.state, moments="int8")
            changes["--plan.state.moments int8"] = dataclasses.replace(plan, state=int8)
    except UserError:  # a rule refuses the combination
        pass
    savings: list[tuple[int, str]] = []
    for flags, changed_plan in changes.items():
        try:
            changed_bytes = estimate(search.experiment, search.platform, changed_plan).device_bytes
        except UserError:
            continue
        if changed_bytes < smallest.device_bytes:
            savings.append((smallest.device_bytes - changed_bytes, flags))
    return savings
