"""Verdicts, limits, what would help, the compiler's word."""

import dataclasses
import xml.etree.ElementTree as ElementTree
from functools import partial

import pytest

from jaxscale.compiler.report import CompileReport, OutOfMemory
from jaxscale.errors import UserError
from jaxscale.memory.plan import MemoryPlan
from jaxscale.models import LoRA
from jaxscale.planning.fit import fit
from jaxscale.planning.memory_search import cheapest_fit
from jaxscale.platforms.platform import Platform
from jaxscale.records.source import load_file
from tests.traced_once import estimate

V5E = "tpu v5e:2x2"


def needs(experiment) -> int:
    return estimate(experiment, V5E).device_bytes


def test_the_default_limit_is_what_programs_may_use(planned):
    assert fit(planned(), V5E).limit == int(15.75 * 2**30)
    assert fit(planned(), "gpu h100 x 4").limit < 80 * 10**9


@pytest.mark.parametrize(
    ("share", "fits", "close"),
    [
        (2.0, True, False),
        pytest.param(1.05, True, True, marks=pytest.mark.slow),
        pytest.param(0.95, False, True, marks=pytest.mark.slow),
        pytest.param(0.5, False, False, marks=pytest.mark.slow),
    ],
)
def test_verdicts(planned, share, fits, close):
    experiment = planned(precision="bfloat16")
    found = fit(experiment, V5E, limit=int(share * needs(experiment)))
    assert (found.fits, found.close, found.verified) == (fits, close, False)
    assert found.verdict.startswith("fits" if fits else "does not fit")
    assert ("narrowly" in found.verdict) == close
    assert "by estimate" in found.verdict
    assert "verified" not in str(found)


def test_a_host_with_less_memory_than_the_plan_puts_there(planned):
    found = fit(planned(zero=3, optimizer_state="streamed"), V5E, host_limit=1000)
    assert not found.fits
    assert "host memory" in found.verdict
    assert found.changes == ()  # less device memory would bring nothing


@pytest.mark.slow
def test_what_would_help_the_device_need_not_fit_the_host(planned):
    experiment = planned(precision="bfloat16")
    found = fit(experiment, V5E, limit=needs(experiment) // 2, host_limit=1000)
    assert found.changes
    assert not any(one.fits for one in found.changes)


def test_an_option_without_which_the_compiler_fails_is_part_of_the_verdict(planned):
    report = CompileReport(
        V5E, argument_bytes=8, output_bytes=8, alias_bytes=8, temp_bytes=8, added_options={"xla_gpu_x": False}
    )
    found = dataclasses.replace(fit(planned(), V5E), report=report)
    assert found.verdict.endswith(
        "according to the compiler with --plan.compiler xla_gpu_x=false, without which it fails"
    )


def test_a_kernel_that_the_compiler_refuses_is_no_matter_of_the_limit(planned):
    found = fit(planned(), V5E)
    refused = CompileReport(V5E, oom=OutOfMemory(20 * 2**20, 16 * 2**20, "on-chip", "vmem"))
    found = dataclasses.replace(found, report=refused)
    assert not found.fits
    assert "on-chip memory" in found.verdict
    assert "by estimate" not in found.verdict


@pytest.fixture(scope="module")
def halved(planned):
    """What is said where half of what is needed is there."""
    experiment = planned(precision="bfloat16")
    return fit(experiment, V5E, limit=needs(experiment) // 2)


def test_what_would_help_names_flags_and_is_true(planned, halved):
    experiment, found = planned(precision="bfloat16"), halved
    best = found.changes[0]
    assert [one.saved_bytes for one in found.changes[:-1]] == sorted(
        (one.saved_bytes for one in found.changes[:-1]), reverse=True
    )
    assert best.flags in str(found)
    if best.flags == "--plan.memory full":
        plan = dataclasses.replace(experiment.plan, memory=MemoryPlan("full"))
        assert best.saved_bytes == needs(experiment) - estimate(experiment, V5E, plan).device_bytes


@pytest.mark.slow
def test_several_changes_together_where_one_is_not_enough(planned):
    experiment = planned(precision="bfloat16")
    singles = fit(experiment, V5E, limit=needs(experiment) // 2).changes
    most = max(one.saved_bytes for one in singles)
    found = fit(experiment, V5E, limit=needs(experiment) - most - 1000)
    assert found.changes[-1].flags.count("--") > 1
    assert found.changes[-1].saved_bytes >= most


def test_one_that_fits_well_asks_for_nothing(planned):
    assert fit(planned(), V5E).changes == ()


def test_how_it_would_fit_is_told_in_one_sentence(planned, halved):
    experiment, found = planned(precision="bfloat16"), halved
    first = next(one for one in found.changes if one.fits)
    assert found.remedy.startswith(f"it fits with {first.flags}")
    assert first.needed_bytes == needs(experiment) - first.saved_bytes
    assert found.verdict.startswith("does not fit")
    assert found.remedy in str(found).splitlines()
    assert fit(experiment, V5E).remedy == ""


def test_it_draws_itself(planned, tmp_path):
    found = fit(planned(precision="bfloat16"), V5E)
    assert ElementTree.fromstring(found.svg()).tag.endswith("svg")
    assert found.verdict in found.html()
    assert "srcdoc" in found._repr_html_()
    found.write(tmp_path / "fit.svg")
    assert (tmp_path / "fit.svg").read_text() == found.svg()
    with pytest.raises(UserError, match="cannot be written"):
        found.write(tmp_path / "none" / "fit.html")


@pytest.mark.parametrize("name", ["limit", "host_limit"])
def test_limits_are_positive(planned, name):
    with pytest.raises(UserError, match=f"{name}: got 0 bytes"):
        fit(planned(), V5E, **{name: 0})


@pytest.mark.slow
def test_the_cheapest_plan_that_fits(planned):
    experiment = planned(precision="bfloat16", attention="plain")
    platform = Platform.parse(V5E)
    taken = {}
    for rule in ("none", "dots", "full"):
        taken[rule] = needs(planned(precision="bfloat16", attention="plain", memory=MemoryPlan(rule)))
    assert taken["none"] > taken["dots"] > taken["full"]
    for rule in taken:
        plan = cheapest_fit(experiment, platform, taken[rule], menu=tuple(taken))
        assert plan.memory.rule == rule
        assert dataclasses.replace(plan, memory=experiment.plan.memory) == experiment.plan
    with pytest.raises(UserError, match=r"takes at least .* under each of the memory plans none, dots, full"):
        cheapest_fit(experiment, platform, taken["full"] - 1, menu=tuple(taken))


@pytest.mark.slow
def test_memory_fit_is_settled_by_fit(planned):
    experiment = planned(precision="bfloat16", attention="plain")
    limit = needs(experiment) - 1000
    wanted = planned(precision="bfloat16", attention="plain", memory=MemoryPlan("fit"))
    found = fit(wanted, V5E, limit=limit)
    assert found.estimate.plan.memory.rule not in ("none", "fit")
    assert found.fits


def test_what_was_measured_decides(planned):
    experiment = planned(precision="bfloat16", attention="plain")
    asked = []

    def measure(_, plan):
        asked.append(plan.memory.rule)
        return {"none": 300, "dots": 200, "full": 100}[plan.memory.rule] * 2**20

    plan = cheapest_fit(experiment, Platform.parse(V5E), 150 * 2**20, menu=("none", "dots", "full"), measure=measure)
    assert asked == ["none", "dots", "full"]
    assert plan.memory.rule == "full"


def test_the_compiler_s_word_beside_the_estimate(file):
    experiment, source = load_file(file, overrides={"plan.mesh": "data:2", "plan.memory": "full"})
    found = fit(experiment, "cpu x 2", limit=2**30, verify=True, make=source.remake)
    assert found.verified
    assert found.report is not None
    assert found.device_bytes == found.report.device_bytes
    assert "according to the compiler" in found.verdict
    assert "the estimate is off by" in str(found)


@pytest.mark.slow
def test_an_experiment_that_pickles_needs_no_maker(planned):
    found = fit(planned("data:2"), "cpu x 2", limit=2**30, verify=True)
    assert found.verified


def test_a_maker_pickles(file):
    import pickle

    _, source = load_file(file, overrides={"plan.zero": "3"})
    again = pickle.loads(pickle.dumps(partial(source.remake)))()
    assert again.plan.zero == 3


@pytest.mark.slow
def test_memory_fit_that_nothing_fits_is_a_verdict_of_the_least(planned):
    experiment = planned()
    asked = dataclasses.replace(experiment, plan=dataclasses.replace(experiment.plan, memory=MemoryPlan("fit")))
    found = fit(asked, "tpu v5e:2x2", limit=300)
    assert not found.fits
    assert found.estimate.plan.memory.rule != "fit"


def test_steps_with_parameters_that_are_not_trained_have_a_margin_of_their_own(planned):
    experiment = planned("data:4")
    adapters = dataclasses.replace(experiment, model=LoRA(experiment.model, rank=2, base="int8"))
    whole, part = fit(experiment, V5E), fit(adapters, V5E)
    assert (whole.margin, part.margin) == (0.2, 0.3)
    assert "no errors are recorded for estimates of steps that train only some parameters" in str(part)
    assert "trained in part" not in str(whole)
