"""CompilerOptions: options of XLA that a plan sets, as a value with a text form, and the option sets for each chip.

The step itself passes the options to the compiler, so that `fit --verify`, a launch and a run compile the same program.
The environment variables XLA_FLAGS and LIBTPU_INIT_ARGS remain free for the user. This module does not import JAX.
"""

import dataclasses
import re
from collections.abc import Mapping

from jaxscale.errors import UserError, near_miss
from jaxscale.platforms.platform import Chip
from jaxscale.values import check_types

OptionValue = bool | int | str


@dataclasses.dataclass(frozen=True)
class Recommended:
    """A recommended option.

    Args:
        option: name of the option.
        value: recommended value.
        source: document or measurement that recommends the option.
        effect: effect of the option on the program that `experiments/benchmarks/compiler_options.py` compiles. Option
            sets contain only options that have an effect.
    """

    option: str
    value: OptionValue
    source: str
    effect: str


_NVIDIA = "NVIDIA JAX-Toolbox, Tips for High-Performance LLMs with JAX and XLA"
_MAXTEXT = "MaxText, benchmarks/xla_flags_library.py"
_CLOCK = "libtpu's own estimates of cycles, experiments/benchmarks/compiler_options.py"
_TOGETHER = "v5e:4x4: +34.0 MB of temporaries together with the other one, none alone"

WINDOWED_EINSUM_THRESHOLD = "xla_jf_spmd_threshold_for_windowed_einsum_mib"
"""Option of libtpu: MiB of a product's operand from which on the product is computed around a ring of devices."""
NO_RINGS = 1_000_000
"""A threshold that no operand reaches."""
IN_PLACE_BRANCHES = {
    "cpu": "xla_cpu_copy_insertion_use_region_analysis",
    "gpu": "xla_gpu_copy_insertion_use_region_analysis",
}
"""By kind of chip, the option with which the branches of a loop write into the loop's arrays, such as the residuals
that wait in a pipeline. Without it, XLA for CPUs, and up to JAX 0.10 XLA for GPUs, copies such arrays in each
iteration. XLA for TPUs does not copy them."""

SETS: Mapping[str, Mapping[str, tuple[Recommended, ...]]] = {
    "overlap": {
        "gpu": (
            Recommended("xla_gpu_enable_pipelined_all_gather", True, _NVIDIA, "8 h100: +86.2 MB, 8 b200: +121.1 MB"),
            Recommended("xla_gpu_enable_pipelined_all_reduce", True, _NVIDIA, "8 h100: +112.2 MB, 8 b200: +134.6 MB"),
            Recommended(
                "xla_gpu_enable_while_loop_double_buffering",
                True,
                _NVIDIA,
                "another program; 8 h100: 0, 8 b200: +8.4 MB",
            ),
        ),
        "v5e": (
            Recommended("xla_enable_async_all_reduce", True, _MAXTEXT, _TOGETHER),
            Recommended("xla_tpu_enable_async_collective_fusion_fuse_all_reduce", True, _MAXTEXT, _TOGETHER),
            Recommended(WINDOWED_EINSUM_THRESHOLD, NO_RINGS, _CLOCK, "v5e:4x4: -26.7 MB, 0.45x the seconds"),
        ),
        "v5p": (
            Recommended(
                "xla_tpu_enable_sparse_core_collective_offload_all_gather", True, _MAXTEXT, "v5p:2x2x4: +7.4 MB"
            ),
        ),
        "v6e": (
            Recommended(
                "xla_tpu_enable_sparse_core_collective_offload_all_gather", True, _MAXTEXT, "v6e:4x4: +33.6 MB"
            ),
            Recommended(WINDOWED_EINSUM_THRESHOLD, NO_RINGS, _CLOCK, "v6e:4x4: -6.8 MB, 0.36x the seconds"),
        ),
    },
    "vmem": {
        "v6e": (Recommended("xla_tpu_scoped_vmem_limit_kib", 98304, _MAXTEXT, "v6e:4x4: +53.8 MB of temporaries"),),
    },
}
"""The options of each option set, by the name of the set and then by the name of the chip, or "gpu" for every GPU.

Some recommended options are left out, because they do not change the benchmark's program. On GPUs, these are pipelined
reduce-scatters, the latency-hiding scheduler, and the thresholds for combining reduce-scatters and all-reduces. On
TPUs, these are asynchronous all-gather fusion (the default of v5e; other chips refuse it), layouts of all-reduces,
data-parallel all-reduces, pipelining of the backward pass's all-gathers, the overlap limit of host transfers, and a
rerun of the scheduler.
"""


@dataclasses.dataclass(frozen=True)
class CompilerOptions:
    """Options of XLA for the train step.

    The text form is "default", or names of option sets and single options: "overlap,xla_gpu_enable_triton_gemm=false".

    Args:
        sets: names of option sets in `SETS`.
        named: (option, value) for each single option. These values take precedence over those of the option sets.

    Example:
        >>> from jaxscale.platforms.platform import Platform
        >>> CompilerOptions.parse("xla_tpu_scoped_vmem_limit_kib=98304").of(Platform.parse("tpu v6e:2x2").chip)
        {'xla_tpu_scoped_vmem_limit_kib': 98304}
        >>> CompilerOptions.parse("overlop")
        Traceback (most recent call last):
        jaxscale.errors.UserError: compiler 'overlop': expected default, the name of a set (overlap, vmem), or \
OPTION=VALUE such as xla_gpu_enable_triton_gemm=false; did you mean 'overlap'?
    """

    sets: tuple[str, ...] = ()
    named: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        check_types(self)
        for name in self.sets:
            if name not in SETS:
                raise UserError(
                    f"compiler {name!r}: expected default, the name of a set ({', '.join(SETS)}), or OPTION=VALUE such "
                    f"as xla_gpu_enable_triton_gemm=false{near_miss(name, ('default', *SETS))}"
                )
        for name, _ in self.named:
            if not re.fullmatch(r"xla_\w+", name):
                raise UserError(
                    f"compiler {name!r}: expected an option of XLA without its hyphens, such as xla_gpu_..."
                )
        if len({*self.sets, *dict(self.named)}) < len(self.sets) + len(self.named):
            raise UserError(f"compiler {self}: got a set or an option twice, expected each once")

    @classmethod
    def parse(cls, text: str) -> "CompilerOptions":
        """Return the options that a text form specifies. An entry without "=" continues the preceding option's value.

        Raises:
            UserError: the text names an unknown option set, or contains something that is not an option.
        """
        entries = [entry.strip() for entry in text.split(",")]
        set_names: list[str] = []
        options_and_values: list[tuple[str, str]] = []
        for entry in entries:
            name, equals_sign, value = entry.partition("=")
            if equals_sign:
                options_and_values.append((name.strip().removeprefix("--"), value.strip()))
            elif options_and_values:
                options_and_values[-1] = (options_and_values[-1][0], f"{options_and_values[-1][1]},{entry}")
            else:
                set_names.append(entry)
        return cls(() if set_names == ["default"] else tuple(set_names), tuple(options_and_values))

    def __str__(self) -> str:
        return ",".join([*self.sets, *(f"{name}={value}" for name, value in self.named)]) or "default"

    def with_single(self, options: Mapping[str, OptionValue]) -> "CompilerOptions":
        """Return these options and single ones, by name.

        Example:
            >>> str(CompilerOptions.parse("overlap").with_single({"xla_gpu_enable_triton_gemm": False}))
            'overlap,xla_gpu_enable_triton_gemm=false'
        """
        texts = {name: str(value).lower() if isinstance(value, bool) else str(value) for name, value in options.items()}
        return dataclasses.replace(self, named=tuple({**dict(self.named), **texts}.items()))

    def of(self, chip: Chip) -> dict[str, OptionValue]:
        """Return the value of each option for a chip, by option name.

        A CPU is used to rehearse runs on other devices, and takes none of the options for these devices.

        Args:
            chip: the chip.

        Raises:
            UserError: no option of an option set has an effect on the chip.
        """
        foreign_prefixes = tuple(f"xla_{kind}_" for kind in ("tpu", "gpu") if chip.kind == "cpu")
        named_values = {name: _option_value(text) for name, text in self.named if not name.startswith(foreign_prefixes)}
        recommended_values: dict[str, OptionValue] = {}
        for name in self.sets if chip.kind != "cpu" else ():
            recommendations = SETS[name].get(chip.name) or SETS[name].get(chip.kind)
            if recommendations is None:
                raise UserError(
                    f"plan.compiler {name}: no option of this set has an effect on {chip.name}, only on "
                    f"{', '.join(SETS[name])}; leave it out"
                )
            recommended_values |= {recommendation.option: recommendation.value for recommendation in recommendations}
        return recommended_values | named_values


DEFAULT = CompilerOptions()


def _option_value(text: str) -> OptionValue:
    """Return the value of an option from its text: a boolean, a whole number, or the text itself."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    return int(text) if re.fullmatch(r"-?\d+", text) else text
