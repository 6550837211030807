"""Groups of parameters, each with an update rule of its own, as one optax transformation.

A parameter belongs to the first group whose pattern is found in its name, or is the name of its type of variable. All
other parameters belong to the optimizer itself. Each rule gets the tree of all parameters, with those of other groups
masked. The state is that of `optax.partition`: a group has no state for the parameters of another group.
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
"""Name that the state uses for the group of the parameters that no pattern matches."""


def group_name(index: int) -> str:
    """Return the name of a group in the state, from its index among the patterns; -1 if no pattern matches.

    Example:
        >>> group_name(0), group_name(-1)
        ('group0', 'rest')
    """
    return REST if index < 0 else f"group{index}"


def group_indices(patterns: Sequence[str], param_info_tree: Any) -> Any:
    """Return a tree with the index of each parameter's group among the patterns; -1 if no pattern matches.

    Args:
        patterns: pattern of each group; the first one that matches a parameter wins.
        param_info_tree: tree of `ParamInfo` like the parameters.

    Raises:
        UserError: a group has no parameter, or the groups have all parameters.

    Example:
        >>> from jaxscale.optim.leaves import leaf_of
        >>> param_info_tree = {name: leaf_of(name, None, (2, 2)) for name in ("embed", "mlp", "head")}
        >>> group_indices(["embed|head"], param_info_tree)
        {'embed': 0, 'head': 0, 'mlp': -1}
        >>> group_indices(["haed"], param_info_tree)
        Traceback (most recent call last):
        jaxscale.errors.UserError: optimizer.groups: 'haed' is found in no name of a trained parameter, and is the \
type of none; the parameters are embed, head, mlp; did you mean 'head'?
    """
    param_infos, treedef = jax.tree.flatten(param_info_tree)
    match_flags_of_params = [[info.has(pattern) for pattern in patterns] for info in param_infos]
    own_indices = [match_flags.index(True) if True in match_flags else -1 for match_flags in match_flags_of_params]
    for index, pattern in enumerate(patterns):
        if index not in own_indices:
            matching_infos = [
                info for info, match_flags in zip(param_infos, match_flags_of_params, strict=True) if match_flags[index]
            ]
            _refuse_pattern(pattern, matching_infos, param_infos)
    if -1 not in own_indices:
        raise UserError(
            "optimizer.groups: the groups have all parameters, so that nothing would be trained by the optimizer "
            f"itself; leave out the group {patterns[-1]!r}, and give its settings to the optimizer"
        )
    return treedef.unflatten(own_indices)


def _refuse_pattern(pattern: str, matching_infos: Sequence[ParamInfo], param_infos: Sequence[ParamInfo]) -> None:
    """Raise the error for the pattern of a group that has no parameter.

    `matching_infos` are the parameters that the pattern matches, all of which belong to earlier groups.
    """
    if matching_infos:
        raise UserError(
            f"optimizer.groups: every parameter that {pattern!r} matches, such as {matching_infos[0].name}, belongs to "
            "a group before it, and the first group that matches has the parameter; put this group first, or leave it "
            "out"
        )
    param_names = sorted(info.name for info in param_infos)
    path_words_and_types = sorted(
        {path_word for param_name in param_names for path_word in param_name.split("/")}
        | {info.variable for info in param_infos}
    )
    raise UserError(
        f"optimizer.groups: {pattern!r} is found in no name of a trained parameter, and is the type of none; the "
        f"parameters are {', '.join(param_names[:6])}{', ...' if len(param_names) > 6 else ''}"
        f"{near_miss(pattern, [*param_names, *filter(None, path_words_and_types)])}"
    )


def rule_of_groups(optimizer: "Optimizer", steps: int, param_info_tree: Any) -> optax.GradientTransformationExtraArgs:
    """Return the rule of an optimizer with groups, without clipping.

    Args:
        optimizer: the optimizer, with groups.
        steps: number of updates in the run, for the schedules.
        param_info_tree: tree of `ParamInfo` like the parameters.

    Raises:
        UserError: a group has no parameter, or the groups have all parameters.
    """
    index_tree = group_indices(list(optimizer.groups), param_info_tree)
    rule_by_group: Mapping[Any, Any] = {
        group_name(index): member.rule(steps, mask_other_groups(param_info_tree, index_tree, index))
        for index, member in optimizer.members().items()
    }
    return optax.partition(rule_by_group, jax.tree.map(group_name, index_tree))


def mask_other_groups(tree: Any, index_tree: Any, kept_index: int) -> Any:
    """Return a tree like the parameters with a masked node in place of each parameter of another group.

    Args:
        tree: tree like the parameters.
        index_tree: tree like the parameters, with the index of each parameter's group.
        kept_index: index of the group whose parameters are not masked.
    """
    return jax.tree.map(
        lambda own_index, node: node if own_index == kept_index else optax.MaskedNode(), index_tree, tree
    )


def describe_groups(optimizer: "Optimizer", param_info_tree: Any) -> list[str]:
    """Return a line of text for each group, with the group's rule and its parameters; `[]` if there are no groups.

    Args:
        optimizer: the optimizer.
        param_info_tree: tree of `ParamInfo` like the parameters.
    """
    if not optimizer.groups:
        return []
    param_infos, own_indices = (
        jax.tree.leaves(param_info_tree),
        jax.tree.leaves(group_indices(list(optimizer.groups), param_info_tree)),
    )
    group_lines = []
    for index, member in optimizer.members().items():
        param_names = [
            info.name for info, own_index in zip(param_infos, own_indices, strict=True) if own_index == index
        ]
        more_text = f" and {len(param_names) - 4} more" if len(param_names) > 4 else ""
        title = "the others" if index < 0 else f"group {list(optimizer.groups)[index]}"
        group_lines.append(f"{title}: {member.describe_rule()} for {', '.join(param_names[:4])}{more_text}")
    return group_lines
