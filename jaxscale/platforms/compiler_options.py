"""CompilerOptions: options of XLA that a plan sets, as a value with a text form, and the sets of options by chip.

The step passes the options to the compiler itself, so that `fit --verify`, a launch and a run compile one program; the
environment variables XLA_FLAGS and LIBTPU_INIT_ARGS stay the user's. This module does not import JAX.
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
    """An option that a vendor recommends.

    Args:
        option: name of the option.
        value: recommended value.
        source: where it is recommended.
        effect: its effect on the program that `experiments/benchmarks/compiler_options.py` compiles. An option without
            an effect is in no set.
    """

    option: str
    value: OptionValue
    source: str
    effect: str


_NVIDIA = "NVIDIA JAX-Toolbox, Tips for High-Performance LLMs with JAX and XLA"
_MAXTEXT = "MaxText, benchmarks/xla_flags_library.py"
_TOGETHER = "v5e:4x4: +34.0 MB of temporaries together with the other one, none alone"

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
        ),
    },
    "vmem": {
        "v6e": (Recommended("xla_tpu_scoped_vmem_limit_kib", 98304, _MAXTEXT, "v6e:4x4: +53.8 MB of temporaries"),),
    },
}
"""The options of each set, by the name of the set and of the chip, or "gpu" for every GPU.

Left out, because they change nothing in that program: on GPUs pipelined reduce-scatters, the latency-hiding scheduler,
and the thresholds for combining reduce-scatters and all-reduces; on TPUs asynchronous all-gather fusion (the default of
v5e; other chips refuse it), layouts of all-reduces, data-parallel all-reduces, pipelining of the all-gathers of the
backward pass, the overlap limit of host transfers, and a rerun of the scheduler.
"""


@dataclasses.dataclass(frozen=True)
class CompilerOptions:
    """Options of XLA for the train step.

    The text form is "default", or the name of a set and single options: "overlap,xla_gpu_enable_triton_gemm=false".

    Args:
        set_name: name of a set in `SETS`; "" for none.
        named: (option, value) for each single option; these precede the set's.

    Example:
        >>> from jaxscale.platforms.platform import Platform
        >>> CompilerOptions.parse("xla_tpu_scoped_vmem_limit_kib=98304").of(Platform.parse("tpu v6e:2x2").chip)
        {'xla_tpu_scoped_vmem_limit_kib': 98304}
        >>> CompilerOptions.parse("overlop")
        Traceback (most recent call last):
        jaxscale.errors.UserError: compiler 'overlop': expected default, the name of a set (overlap, vmem), or \
OPTION=VALUE such as xla_gpu_enable_triton_gemm=false; did you mean 'overlap'?
    """

    set_name: str = ""
    named: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        check_types(self)
        if self.set_name and self.set_name not in SETS:
            raise UserError(
                f"compiler {self.set_name!r}: expected default, the name of a set ({', '.join(SETS)}), or OPTION=VALUE "
                f"such as xla_gpu_enable_triton_gemm=false{near_miss(self.set_name, ('default', *SETS))}"
            )
        for name, _ in self.named:
            if not re.fullmatch(r"xla_\w+", name):
                raise UserError(
                    f"compiler {name!r}: expected an option of XLA without its hyphens, such as xla_gpu_..."
                )
        if len(dict(self.named)) < len(self.named):
            raise UserError(f"compiler {self}: got an option twice, expected each option once")

    @classmethod
    def parse(cls, text: str) -> "CompilerOptions":
        """Return the options of a text form; an entry without "=" goes on with the value before it.

        Raises:
            UserError: the text names an unknown set, or something that is no option.
        """
        entries = [entry.strip() for entry in text.split(",")]
        set_name = "" if "=" in entries[0] else entries.pop(0)
        pairs: list[tuple[str, str]] = []
        for entry in entries:
            name, equals, value = entry.partition("=")
            if equals:
                pairs.append((name.strip().removeprefix("--"), value.strip()))
            elif pairs:
                pairs[-1] = (pairs[-1][0], f"{pairs[-1][1]},{entry}")
            else:
                raise UserError(f"compiler {text!r}: got {entry!r}, expected OPTION=VALUE")
        return cls("" if set_name == "default" else set_name, tuple(pairs))

    def __str__(self) -> str:
        entries = [self.set_name] * bool(self.set_name) + [f"{name}={value}" for name, value in self.named]
        return ",".join(entries) or "default"

    def of(self, chip: Chip) -> dict[str, OptionValue]:
        """Return the value of each option for a chip.

        A CPU, which rehearses a run on other devices, takes none of their options.

        Args:
            chip: the chip.

        Raises:
            UserError: no option of the set has an effect on the chip.
        """
        foreign_prefixes = tuple(f"xla_{kind}_" for kind in ("tpu", "gpu") if chip.kind == "cpu")
        options = {name: _value(text) for name, text in self.named if not name.startswith(foreign_prefixes)}
        if not self.set_name or chip.kind == "cpu":
            return options
        chip_sets = SETS[self.set_name]
        recommended = chip_sets.get(chip.name) or chip_sets.get(chip.kind)
        if recommended is None:
            raise UserError(
                f"plan.compiler {self.set_name}: no option of this set has an effect on {chip.name}, only on "
                f"{', '.join(chip_sets)}; leave it out"
            )
        return {row.option: row.value for row in recommended} | options


DEFAULT = CompilerOptions()


def _value(text: str) -> OptionValue:
    """Return the value of an option that a text spells: a truth value, a whole number, or the text itself."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    return int(text) if re.fullmatch(r"-?\d+", text) else text
