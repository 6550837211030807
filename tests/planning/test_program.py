"""The step as the compiler of a described device is given it."""

import functools

import pytest

from jaxscale.compiler.compile import compile_report
from jaxscale.models.decoder import Decoder
from jaxscale.planning.program import described_step, lowered_step
from jaxscale.platforms.platform import Platform
from jaxscale.recipe.experiment import Experiment
from jaxscale.recipe.plan import OffloadPlan, Plan
from jaxscale.state.layout import local_bytes

ON_HOST = {
    "state streamed": Plan(zero=3, offload=OffloadPlan(optimizer_state="streamed")),
    "state updated there": Plan(zero=3, offload=OffloadPlan(optimizer_state="host")),
    "weights too": Plan(zero=3, offload=OffloadPlan("host", "host", "streamed")),
}


class Tokens:
    def shapes(self, batch):
        return dict.fromkeys(("tokens", "targets"), ((batch, 16), "int32"))


def tiny() -> Experiment:
    return Experiment("tiny", Decoder(vocab=64, context=16, heads=2, layers=2, embed=64), Tokens(), batch=4, steps=3)


@pytest.mark.slow
@pytest.mark.parametrize("name", ON_HOST)
def test_what_lies_on_the_host_of_a_described_gpu_is_there(name, monkeypatch, tmp_path):
    """JAX lists no memories of such a GPU; its compiler has them."""
    pytest.importorskip("jax_plugins.xla_cuda13")
    monkeypatch.setenv("JAXSCALE_CACHE", str(tmp_path))
    monkeypatch.delenv("XLA_FLAGS")  # this process's compiler works at its lowest level
    platform, plan = Platform.parse("gpu h100 x 2"), ON_HOST[name]
    report = compile_report(functools.partial(lowered_step, make=tiny, plan=plan), platform)
    assert report.crashed is None
    state = described_step(tiny(), platform, plan).layout.abstract
    assert report.host_argument_bytes == local_bytes(state, is_on_host=True) > 0
