"""Groups of parameters, each with an update rule of its own, as one optax transformation.

A parameter belongs to the first group whose pattern is found in its name, or is the name of its type of variable; all
others belong to the optimizer itself. Each rule gets the tree of the parameters with those of other groups masked, as
in `optax.partition`, whose state this state is: no group has state for a parameter of another.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import optax

from jaxscale.errors import UserError, near_miss
from jaxscale.optim.leaves import ParamInfo

if TYPE_CHECKING:
    from jaxscale.optim.optimizer import Optimizer

REST = "rest"
"""Name of the group of all parameters that no pattern matches, in the state."""


def group_name(index: int) -> str:
    """Return the name of a group in the state, from its index among the patterns; -1 is the rest.

    Example:
        >>> group_name(0), group_name(-1)
        ('group0', 'rest')
    """
    return REST if index < 0 else f"group{index}"


def group_indices(patterns: Sequence[str], leaves: Any) -> Any:
    """Return a tree with the index of each parameter's group among the patterns; -1 for the rest.

    Args:
        patterns: pattern of each group; the first one that matches a parameter wins.
        leaves: tree of `ParamInfo` like the parameters.

    Raises:
        UserError: a group has no parameter, or the groups have all of them.

    Example:
        >>> from jaxscale.optim.leaves import leaf_of
        >>> leaves = {name: leaf_of(name, None, (2, 2)) for name in ("embed", "mlp", "head")}
        >>> group_indices(["embed|head"], leaves)
        {'embed': 0, 'head': 0, 'mlp': -1}
        >>> group_indices(["haed"], leaves)
        Traceback (most recent call last):
        jaxscale.errors.UserError: optimizer.groups: 'haed' is found in no name of a trained parameter, and is the \
type of none; the parameters are embed, head, mlp; did you mean 'head'?
    """
    param_infos, treedef = jax.tree.flatten(leaves)
    all_matches = [[info.has(pattern) for pattern in patterns] for info in param_infos]
    indices = [matches.index(True) if True in matches else -1 for matches in all_matches]
    for index, pattern in enumerate(patterns):
        if index not in indices:
            matching = [info for info, matches in zip(param_infos, all_matches, strict=True) if matches[index]]
            _refuse_pattern(pattern, matching, param_infos)
    if -1 not in indices:
        raise UserError(
            "optimizer.groups: the groups have all parameters, so that nothing would be trained by the optimizer "
            f"itself; leave out the group {patterns[-1]!r}, and give its settings to the optimizer"
        )
    return treedef.unflatten(indices)


def _refuse_pattern(pattern: str, matching: Sequence[ParamInfo], param_infos: Sequence[ParamInfo]) -> None:
    """Raise the error for the pattern of a group that has no parameter; `matching` are in groups before it."""
    if matching:
        raise UserError(
            f"optimizer.groups: every parameter that {pattern!r} matches, such as {matching[0].name}, belongs to a "
            "group before it, and the first group that matches has the parameter; put this group first, or leave it out"
        )
    names = sorted(info.name for info in param_infos)
    parts = sorted({part for name in names for part in name.split("/")} | {info.variable for info in param_infos})
    raise UserError(
        f"optimizer.groups: {pattern!r} is found in no name of a trained parameter, and is the type of none; the "
        f"parameters are {', '.join(names[:6])}{', ...' if len(names) > 6 else ''}"
        f"{near_miss(pattern, [*names, *filter(None, parts)])}"
    )


def grouped(optimizer: "Optimizer", steps: int, leaves: Any) -> optax.GradientTransformationExtraArgs:
    """Return the rule of an optimizer with groups, without clipping.

    Args:
        optimizer: the optimizer, with groups.
        steps: number of updates in the run, for the schedules.
        leaves: tree of `ParamInfo` like the parameters.

    Raises:
        UserError: a group has no parameter, or the groups have all of them.
    """
    indices = group_indices(list(optimizer.groups), leaves)
    rules: Mapping[Any, Any] = {
        group_name(index): member.rule(steps, masked(leaves, indices, index))
        for index, member in optimizer.members().items()
    }
    return optax.partition(rules, jax.tree.map(group_name, indices))


def masked(tree: Any, indices: Any, index: int) -> Any:
    """Return a tree like the parameters with a masked node in place of each parameter of another group.

    Args:
        tree: tree like the parameters.
        indices: tree of the index of each parameter's group.
        index: the group whose parameters stay.
    """
    return jax.tree.map(lambda own, node: node if own == index else optax.MaskedNode(), indices, tree)


def describe_groups(optimizer: "Optimizer", leaves: Any) -> list[str]:
    """Return a line for the user on the parameters and the rule of each group; none without groups.

    Args:
        optimizer: the optimizer.
        leaves: tree of `ParamInfo` like the parameters.
    """
    if not optimizer.groups:
        return []
    param_infos, indices = jax.tree.leaves(leaves), jax.tree.leaves(group_indices(list(optimizer.groups), leaves))
    lines = []
    for index, member in optimizer.members().items():
        names = [info.name for info, own in zip(param_infos, indices, strict=True) if own == index]
        more_text = f" and {len(names) - 4} more" if len(names) > 4 else ""
        title = "the others" if index < 0 else f"group {list(optimizer.groups)[index]}"
        lines.append(f"{title}: {member.describe_rule()} for {', '.join(names[:4])}{more_text}")
    return lines
