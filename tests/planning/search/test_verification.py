"""The compilation of a search's best plans: which are compiled, with which options, and which one is chosen."""

import dataclasses

import pytest

import jaxscale as jx
from jaxscale.compiler.report import CompileReport
from jaxscale.compiler.schedule import ProgramEvent, ProgramSchedule
from jaxscale.data import Text
from jaxscale.errors import UserError
from jaxscale.models import Decoder
from jaxscale.planning.search import verification
from jaxscale.planning.search.choice import choose_plan, flags_of, plan_summary
from jaxscale.recipe.plan import Plan

GiB = 2**30


def experiment():
    model = Decoder(vocab=512, context=128, layers=2, embed=128, heads=4)
    return jx.Experiment("small", model, Text("text.txt", context=128), batch=16)


def test_plans_are_compiled_until_one_fits(monkeypatch):
    compiled = []

    def compile_report(recipe, platform):
        """Report that the first two plans take more than estimated."""
        compiled.append(recipe.keywords["plan"])
        nbytes = GiB if len(compiled) <= 2 else 2**20
        return CompileReport(str(platform), argument_bytes=nbytes, output_bytes=0, alias_bytes=0, temp_bytes=0)

    monkeypatch.setattr(verification, "compile_report", compile_report)
    forbidden = ("pipeline", "offload", "tensor", "microbatches", "compiler")
    choice = choose_plan(experiment(), "tpu v5e:2x2", limit="200MiB", forbidden=forbidden, verify=1)
    assert len(compiled) == 3
    assert choice.plan == compiled[2]
    assert "fits: 1.00 MiB of 200 MiB per device, according to the compiler" in str(choice)
    assert str(choice).count("takes 824 MiB too much") == 2


def test_a_plan_gets_the_options_without_which_the_compiler_fails(monkeypatch):
    def compile_report(recipe, platform):
        fields = {"argument_bytes": 2**20, "output_bytes": 0, "alias_bytes": 0, "temp_bytes": 0}
        return CompileReport(str(platform), added_options={"xla_gpu_enable_triton_gemm": False}, **fields)

    monkeypatch.setattr(verification, "compile_report", compile_report)
    choice = choose_plan(experiment(), "gpu h100 x 4", forbidden=("pipeline", "offload", "tensor"), verify=1)
    assert str(choice.plan.compiler) == "xla_gpu_enable_triton_gemm=false"
    assert "--plan.compiler xla_gpu_enable_triton_gemm=false" in flags_of(choice.plan)


def test_compiled_plans_are_ordered_by_the_compiler_s_clock(monkeypatch):
    """Of plans that are modeled as near each other, the fastest by its program wins."""
    compiled = []

    def compile_report(recipe, platform):
        """Report fewer cycles for each further plan."""
        compiled.append(recipe.keywords["plan"])
        events = (ProgramEvent("compute", cycles=int(1.5e6) * (4 - len(compiled))), ProgramEvent("kernel", flop=10**9))
        schedule = ProgramSchedule("main", {"main": events}) if platform.chip.kind == "tpu" else None
        fields = {"argument_bytes": 2**20, "output_bytes": 0, "alias_bytes": 0, "temp_bytes": 0}
        return CompileReport(str(platform), schedule=schedule, **fields)

    monkeypatch.setattr(verification, "compile_report", compile_report)
    forbidden = ("pipeline", "offload", "tensor", "microbatches", "compiler")
    far = choose_plan(experiment(), "tpu v5e:2x2", forbidden=forbidden, verify=3)
    assert far.plan == compiled[0]  # the others are modeled as more than `NEAR_SHARE` slower
    del compiled[:]
    monkeypatch.setattr(verification, "NEAR_SHARE", 10.0)
    choice = choose_plan(experiment(), "tpu v5e:2x2", forbidden=forbidden, verify=3)
    assert len(compiled) == 3
    assert choice.plan == compiled[2]
    assert "by the compiler's clock: 1.01 ms a step: products and fusions 99%, kernels 1%" in str(choice)
    assert "1.99x  1.00 ms more for products and fusions" in str(choice)
    assert "2.99x  2.00 ms more for products and fusions" in str(choice)
    assert "Seconds of a step, by the compiler<" in choice.html()
    by_bytes = choose_plan(experiment(), "tpu v5e:2x2", forbidden=forbidden, verify=3, objective="memory")
    assert by_bytes.best.report is not None
    del compiled[:]
    on_gpu = choose_plan(experiment(), "gpu h100 x 4", forbidden=forbidden, verify=1)
    assert on_gpu.plan == compiled[0]
    assert "by the compiler's clock: no seconds; only the compiler of TPUs estimates cycles" in str(on_gpu)


class Compiler:
    """A stand-in for libtpu: 1 ms and 2 GiB a step, half of one of them with its best options.

    Args:
        best: text of the options that halve seconds or bytes.
        halved: "seconds" or "bytes".
        refused: text of options that end in a UserError.
    """

    def __init__(self, best="overlap", halved="seconds", refused=None):
        self.best, self.halved, self.refused = best, halved, refused
        self.plans = []

    def __call__(self, recipe, platform):
        """Return the report of a plan."""
        plan = recipe.keywords["plan"]
        if str(plan.compiler) == self.refused:
            raise UserError("unknown option")
        self.plans.append(plan)
        is_best = str(plan.compiler) == self.best
        cycles = int(1.5e6) // (2 if is_best and self.halved == "seconds" else 1)
        device_bytes = 2**31 // (2 if is_best and self.halved == "bytes" else 1)
        schedule = ProgramSchedule("main", {"main": (ProgramEvent("compute", cycles=cycles),)})
        fields = {"argument_bytes": device_bytes, "output_bytes": 0, "alias_bytes": 0, "temp_bytes": 0}
        return CompileReport(str(platform), schedule=schedule, **fields)


@pytest.fixture
def zero_3(monkeypatch):
    """Return a function that chooses a plan with ZeRO 3 by a stand-in for the compiler."""
    monkeypatch.setattr(verification, "NEAR_SHARE", 10.0)

    def choose(compiler, platform="tpu v5e:2x4", plan=Plan(zero=3), forbidden=(), **options):
        monkeypatch.setattr(verification, "compile_report", compiler)
        unused = ("offload", "pipeline", "tensor", "sequence", "microbatches")
        fields = {"fixed": ("zero",), "forbidden": (*unused, *forbidden)}
        return choose_plan(experiment(), platform, plan, **fields, **{"verify": 3, **options})

    return choose


@pytest.mark.parametrize("best", ["overlap", "default"])
def test_zero_3_on_a_tpu_is_compiled_with_and_without_products_around_a_ring(zero_3, best):
    """The faster options of the best plan are those of the choice and of the next plans."""
    compiler = Compiler(best)
    choice = zero_3(compiler)
    of_first, of_others = compiler.plans[:2], compiler.plans[2:]
    assert [str(plan.compiler) for plan in of_first] == ["default", "overlap"]
    assert [plan.mesh.fsdp for plan in compiler.plans] == [8, 8, 2, 4]
    assert [str(plan.compiler) for plan in of_others] == ["default", best]  # two devices make no ring
    assert dataclasses.replace(compiler.plans[1], compiler=compiler.plans[0].compiler) == compiler.plans[0]
    assert str(choice.plan.compiler) == best
    assert choice.best.estimate.plan == choice.plan
    assert ("--plan.compiler overlap" in flags_of(choice.plan)) is (best == "overlap")
    assert ("compiler overlap" in plan_summary(choice.plan)) is (best == "overlap")
    other = next(plan for plan in choice.outcome.plans if plan.plan == compiler.plans[best == "default"])
    assert other.compiler_seconds.total == 2 * choice.best.compiler_seconds.total  # listed, with what it costs


def test_options_that_fit_are_kept_and_those_that_take_the_fewest_bytes(zero_3):
    """One plan is enough to find that it fits with the other options; the objective decides between the two."""
    fitting = zero_3(Compiler(halved="bytes"), verify=1, limit="1.5GiB")
    assert (str(fitting.plan.compiler), fitting.fits) == ("overlap", True)
    smaller = zero_3(Compiler(halved="bytes"), verify=1, objective="memory")
    assert str(smaller.plan.compiler) == "overlap"


def test_options_of_the_compiler_may_be_forbidden_set_refused_or_without_effect(zero_3):
    compiler = Compiler()
    with_own_options = Plan(zero=3, compiler="overlap")
    assert str(zero_3(compiler, forbidden=("compiler",)).plan.compiler) == "default"
    assert str(zero_3(compiler, plan=with_own_options, forbidden=("compiler",)).plan.compiler) == "default"
    assert {str(plan.compiler) for plan in compiler.plans} == {"default"}
    assert str(zero_3(Compiler("default"), plan=with_own_options).plan.compiler) == "overlap"  # the user's own
    refusing = Compiler(refused="overlap")
    assert str(zero_3(refusing).plan.compiler) == "default"
    on_v5p = Compiler()
    assert str(zero_3(on_v5p, "tpu v5p:2x2x2").plan.compiler) == "default"  # XLA makes no rings there
    assert {str(plan.compiler) for plan in (*refusing.plans, *on_v5p.plans)} == {"default"}
