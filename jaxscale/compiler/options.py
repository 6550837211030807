"""Compiler options that a plan sets: their values for a device, and a check that its compiler accepts them."""

import os
from typing import Any

from jaxscale.errors import UserError, near_miss
from jaxscale.platforms.compiler_options import IN_PLACE_BRANCHES, SETS, CompilerOptions, OptionValue
from jaxscale.platforms.detect import chip_of
from jaxscale.platforms.platform import Chip


def options_for(options: CompilerOptions, device: Any, *, is_pipelined: bool = False) -> dict[str, OptionValue]:
    """Return the value of each compiler option for a device, by the option's name.

    Args:
        options: the options of a plan.
        device: one of the step's devices; it may be described instead of attached.
        is_pipelined: whether the step is pipelined. If so, its branches write in place (`IN_PLACE_BRANCHES`), unless
            the plan or XLA_FLAGS sets that option.

    Example:
        >>> import jax
        >>> options_for(CompilerOptions(), jax.devices("cpu")[0], is_pipelined=True)
        {'xla_cpu_copy_insertion_use_region_analysis': True}
    """
    chip = chip_of(device.device_kind, device.platform)
    in_place_option = IN_PLACE_BRANCHES.get(chip.kind) if is_pipelined else None
    is_set_by_user = in_place_option is not None and in_place_option in os.environ.get("XLA_FLAGS", "")
    step_values: dict[str, OptionValue] = {}
    if in_place_option is not None and not is_set_by_user:
        step_values[in_place_option] = True
    return step_values | options.of(chip)


def check_options(options: CompilerOptions, device: Any, chip: Chip | None = None) -> None:
    """Raise an error for an option that a device's compiler rejects, before the step is traced.

    For each option, a small program is compiled.

    Args:
        options: the options of a plan.
        device: one of the step's devices.
        chip: the chip whose options are checked; by default the device's chip. A CPU's compiler knows the names of
            GPUs' options.

    Raises:
        UserError: the compiler has no such option, or rejects its value.

    Example:
        >>> import jax
        >>> check_options(CompilerOptions.parse("xla_cpu_fast=true"), jax.devices()[0])
        Traceback (most recent call last):
        jaxscale.errors.UserError: plan.compiler xla_cpu_fast=True: the compiler of cpu has no such option; leave it out
    """
    import jax
    from jax.sharding import AbstractDevice, SingleDeviceSharding

    if isinstance(device, AbstractDevice):  # nothing can be compiled for it alone
        return
    chip = chip or chip_of(device.device_kind, device.platform)
    for name, value in options.of(chip).items():
        program = jax.jit(lambda: 0.0, out_shardings=SingleDeviceSharding(device), compiler_options={name: value})
        try:
            program.lower().compile()
        except jax.errors.JaxRuntimeError as error:
            message = str(error)
            known_names = {row.option for chip_sets in SETS.values() for rows in chip_sets.values() for row in rows}
            reason = "has no such option" if "No such compile option" in message else f"rejects it ({message})"
            hint = near_miss(name, sorted(known_names))
            raise UserError(
                f"plan.compiler {name}={value}: the compiler of {chip.name} {reason}; leave it out{hint}"
            ) from None
