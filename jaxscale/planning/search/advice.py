"""Advice if no plan fits: the missing bytes, the setting that frees the most, and the smallest sufficient machine."""

import dataclasses

from jaxscale.errors import UserError
from jaxscale.planning.estimate import estimate
from jaxscale.planning.search.machines import MAX_GROWTH, smallest_machine
from jaxscale.planning.search.ranked import JudgedPlan
from jaxscale.planning.search.search import Search
from jaxscale.recipe.plan import Plan
from jaxscale.values.units import size


def advice_for(search: Search, smallest_plan: JudgedPlan) -> str:
    """Return sentences on the missing bytes, the setting that frees the most, and the smallest sufficient machine.

    If the limit of device memory is unknown, return "".

    Args:
        search: a search in which no plan fits.
        smallest_plan: the plan of the search that needs the least memory.
    """
    if search.limit is None:
        return ""
    lines: list[str] = []
    missing_bytes = smallest_plan.device_bytes - search.limit
    bytes_by_kind = smallest_plan.estimate.device_bytes_by_kind
    largest_kind = max(bytes_by_kind, key=lambda kind: bytes_by_kind[kind])
    if missing_bytes > 0:
        lines.append(
            f"the smallest plan needs {size(missing_bytes)} too much; {largest_kind} takes the most, "
            f"{size(bytes_by_kind[largest_kind])}"
        )
    else:
        lines.append("the smallest plan needs more host memory than there is; use more hosts, or no offload")
        return "\n".join(lines)
    bytes_and_flags = _saved_bytes_and_flags(search, smallest_plan)
    if bytes_and_flags:
        saved_bytes, flags = max(bytes_and_flags)
        lines.append(f"{flags} would free the most, {size(saved_bytes)}, but changes results slightly")
    for name in sorted(search.choices.forbidden | search.choices.fixed):
        lines.append(f"{name} was not searched, as you asked")
    platform_and_plan = smallest_machine(search)
    if platform_and_plan is not None:
        platform, plan_there = platform_and_plan
        lines.append(
            f"the smallest {platform.chip.kind} {platform.chip.name} that would do is {platform}, by estimate "
            f"({size(plan_there.device_bytes)} of {size(search.limit)})"
        )
    elif search.platform.chip.kind != "cpu":
        lines.append(
            f"no {search.platform.chip.name} up to {MAX_GROWTH} times as large would do with a batch of "
            f"{search.experiment.batch}"
        )
    return "\n".join(lines)


def _saved_bytes_and_flags(search: Search, smallest_plan: JudgedPlan) -> list[tuple[int, str]]:
    """Return, for each number format that would free memory, the saved bytes and the flag that sets the format."""
    plan_by_flags: dict[str, Plan] = {}
    plan = smallest_plan.plan
    try:
        if plan.precision == "float32":
            plan_by_flags["--plan.precision bfloat16"] = dataclasses.replace(plan, precision="bfloat16")
        if plan.state.moments == "float32" and plan.offload.optimizer_state == "device":
            int8_state = dataclasses.replace(plan.state, moments="int8")
            plan_by_flags["--plan.state.moments int8"] = dataclasses.replace(plan, state=int8_state)
    except UserError:  # a rule refuses the combination
        pass
    bytes_and_flags: list[tuple[int, str]] = []
    for flags, changed_plan in plan_by_flags.items():
        try:
            changed_bytes = estimate(search.experiment, search.platform, changed_plan).device_bytes
        except UserError:
            continue
        if changed_bytes < smallest_plan.device_bytes:
            bytes_and_flags.append((smallest_plan.device_bytes - changed_bytes, flags))
    return bytes_and_flags
