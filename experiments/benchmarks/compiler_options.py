"""What options of XLA change: a decoder's step under ZeRO 3, compiled ahead of time with each set and option alone.

    python experiments/benchmarks/compiler_options.py                            # the sets of --plan.compiler
    python experiments/benchmarks/compiler_options.py --tiny                     # on this machine's CPU
    python experiments/benchmarks/compiler_options.py "gpu h100 x 8" xla_gpu_enable_triton_gemm=false ...

The compilers of TPUs and GPUs must be installed (jaxscale[aot-tpu], jaxscale[aot-gpu]); no device is needed, so that
the only seconds are those of libtpu's own clock, for TPUs. An option changes the program if the text of the program or
its bytes are others; where jaxlib cannot read the text of libtpu's program, only the bytes show it. An option that
changes nothing belongs in no set.
"""

import argparse
import functools

from figures import Figure, show

import jaxscale as jx
from jaxscale.compiler.compile import compile_report
from jaxscale.errors import UserError
from jaxscale.planning.program import lowered_step
from jaxscale.planning.search.compiler_seconds import compiler_seconds
from jaxscale.platforms.compiler_options import SETS
from jaxscale.platforms.platform import Platform

PLATFORMS = {
    "gpu": ("gpu h100 x 8", "gpu b200 x 8"),
    "v5e": ("tpu v5e:4x4",),
    "v5p": ("tpu v5p:2x2x4",),
    "v6e": ("tpu v6e:4x4",),
}
"""The platforms on which the sets of a chip are compiled."""
CONTEXT = 1024


class Tokens:
    """Batches of tokens, of which only the shapes are needed."""

    def shapes(self, batch: int) -> dict[str, tuple[tuple[int, int], str]]:
        """Return the shape and dtype of each array."""
        return dict.fromkeys(("tokens", "targets"), ((batch, CONTEXT), "int32"))


def experiment() -> jx.Experiment:
    """Eight layers of width 1024, and two rows for each device."""
    model = jx.models.Decoder(vocab=8192, context=CONTEXT, layers=8, embed=1024, heads=8, kv_heads=8, mlp=4096)
    return jx.Experiment("options", model, Tokens(), batch=32, steps=10)


def program(platform: str, compiler: str) -> tuple[str, int, float | None] | str:
    """Return the hash of the compiled program, the bytes of its temporaries and libtpu's seconds of a step.

    If it does not compile, return the reason.
    """
    mesh = jx.MeshSpec(fsdp=Platform.parse(platform).devices)
    plan = jx.Plan(mesh=mesh, zero=3, precision="bfloat16", compiler=compiler)
    try:
        report = compile_report(functools.partial(lowered_step, make=experiment, plan=plan), platform)
    except UserError as error:
        return str(error)
    if report.temp_bytes is None:
        return str(report.crashed or report.oom)
    seconds = compiler_seconds(report.schedule, plan, Platform.parse(platform))
    return report.program_hash, report.temp_bytes, None if seconds is None else seconds.total


def effect(platform: str, option: str) -> tuple[str, float]:
    """Return what an option changes in words, and the change of the temporaries in MB."""
    plain, changed = program(platform, "default"), program(platform, option)
    assert not isinstance(plain, str), plain
    if isinstance(changed, str):
        return f"refused: {changed.splitlines()[0][:160]}", 0.0
    difference = (changed[1] - plain[1]) / 1e6
    clock_text = f", {changed[2] / plain[2]:.3f}x the seconds by the clock" if plain[2] and changed[2] else ""
    return ("no change" if changed == plain else f"{difference:+.1f} MB of temporaries{clock_text}"), difference


def main() -> None:
    """Compile with each option, and print the effects."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("platform", nargs="?", help="a platform, such as tpu v5e:4x4; by default, those of the sets")
    parser.add_argument("options", nargs="*", help="OPTION=VALUE, or several ones with commas; by default, the sets'")
    parser.add_argument("--tiny", action="store_true", help="one option, on two devices of this machine's CPU")
    arguments = parser.parse_args()
    if arguments.tiny:
        arguments.platform, arguments.options = "cpu x 2", ["xla_disable_hlo_passes=fusion,cpu-instruction-fusion"]
    options = {arguments.platform: list(arguments.options)}
    if arguments.platform is None:
        options = {
            platform: [
                option
                for name, chip_sets in SETS.items()
                if chip in chip_sets
                for option in (name, *(f"{row.option}={row.value}" for row in chip_sets[chip]))
            ]
            for chip, platforms in PLATFORMS.items()
            for platform in platforms
        }
    figures = []
    for platform, platform_options in options.items():
        for option in platform_options:
            words, difference = effect(platform, option)
            print(f"{platform:16} {option:60} {words}", flush=True)
            figures.append(Figure(f"{platform} {option}", difference, unit="MB"))
    show(figures, "what options of the compiler change")


if __name__ == "__main__":
    main()
