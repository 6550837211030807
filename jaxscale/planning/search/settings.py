"""Names of the settings of a plan that the search chooses and a user may fix or forbid. The module needs no JAX."""

from collections.abc import Collection

from jaxscale.errors import UserError, unknown

SETTINGS = (
    "mesh", "zero", "sequence_parallel", "microbatches", "pipeline", "memory", "offload", "loss_chunk", "tensor",
    "sequence", "replica", "compiler",
)  # fmt: skip
"""Names of the settings. "tensor", "sequence" and "replica" are mesh axes. "compiler" is chosen by `--verify` alone."""


def check_settings(fixed: Collection[str], forbidden: Collection[str]) -> None:
    """Refuse names of settings that are unknown, or both fixed and forbidden.

    Args:
        fixed: names of the settings that keep their values.
        forbidden: names of the settings that keep their defaults.

    Raises:
        UserError: a name is unknown, or both fixed and forbidden.

    Example:
        >>> check_settings(["zero"], ["pipelines"])
        Traceback (most recent call last):
        jaxscale.errors.UserError: unknown setting 'pipelines': expected one of compiler, loss_chunk, memory, \
mesh, microbatches, offload, pipeline, replica, sequence, sequence_parallel, tensor, zero; did you mean 'pipeline'?
    """
    for name in sorted({*fixed, *forbidden}):
        if name not in SETTINGS:
            raise unknown("setting", name, SETTINGS)
    if conflicting_names := sorted(set(fixed) & set(forbidden)):
        raise UserError(f"{conflicting_names[0]}: it is both fixed and forbidden; leave one of them out")
    if "mesh" in forbidden:
        raise UserError("mesh: it is forbidden, but every plan has one; forbid axes instead: tensor, sequence, replica")
    if "mesh" in fixed and (forbidden_axes := sorted({"tensor", "sequence", "replica"} & set(forbidden))):
        raise UserError(f"{forbidden_axes[0]}: it is forbidden, but the mesh is fixed; leave one of them out")
