"""Which kernels a plan asks for, and which its step takes."""

import functools
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxscale.errors import UserError
from jaxscale.layers.loss import cross_entropy
from jaxscale.models.decoder import Decoder
from jaxscale.planning.estimate import estimate
from jaxscale.planning.explain import explain
from jaxscale.planning.fit import fit
from jaxscale.planning.program import described_step, lowered_step
from jaxscale.platforms.platform import Platform
from jaxscale.recipe.experiment import Experiment
from jaxscale.recipe.kernels import KernelChoice, Kernels, fields_of, lines_of
from jaxscale.recipe.plan import Plan
from jaxscale.state.batches import batch_shapes
from jaxscale.step.build import build
from jaxscale.step.resolve import resolve_mesh
from jaxscale.step.traced_checks import KernelTrace, check_kernel_choices
from jaxscale.values import override, to_json
from pallas_kernels.dispatch import CannotRun, noting
from tests.kernels.aot import compiled, tpu_compiler
from tests.plans import grouped


@pytest.mark.parametrize(
    "text", ["auto", "reference", "attention=chunked", "attention=gpu", "cross_entropy=tpu,quantize=reference"]
)
def test_the_text_form_and_json_are_the_value(text):
    kernels = Kernels.parse(text)
    assert str(kernels) == text
    plan = override(Plan(), {"kernels": text})
    assert plan.kernels == kernels
    assert to_json(plan)["kernels"] == text


@pytest.mark.parametrize(
    ("text", "told"),
    [("auto", "auto"), ("reference", "plain"), ("attention=reference", "plain"), ("attention=tpu", "tpu")],
)
def test_layers_are_told_of_attention(text, told):
    assert Kernels.parse(text).attends == told


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("refrence", "did you mean 'reference'"),
        ("atention=tpu", "unknown kernel 'atention'.*did you mean 'attention'"),
        ("attention=chnked", "unknown implementation of attention 'chnked'.*did you mean 'chunked'"),
        ("attention=tpu,attention=gpu", "a kernel twice"),
        ("", "expected auto, reference, or"),
        ("cross_entropy=gpu", "unknown implementation of cross_entropy 'gpu': expected one of chunked, reference, tpu"),
        ("topk=tpu", "unknown kernel 'topk'.*did you mean 'top_k'"),
    ],
)
def test_mistakes_are_told_before_anything_is_traced(text, said):
    with pytest.raises(UserError, match=said):
        Kernels.parse(text)


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("attention=tpu", "TPU"),
        ("attention=gpu", "GPU"),
        ("attention=cudnn", "GPU"),
        ("cross_entropy=tpu", "TPU"),
        ("attention=chunked,quantize=tpu", "TPU"),
    ],
)
def test_a_kernel_of_another_platform_is_refused(text, where):
    with pytest.raises(UserError, match=f"a {where} kernel, but the step runs on cpu; take .*reference"):
        resolve_mesh(
            Plan(kernels=Kernels.parse(text)), Experiment("tiny", Decoder(64, 16, 1, 16, 2), None), jax.devices()
        )


def test_a_chunk_of_the_loss_goes_with_kernels_that_take_one():
    message = (
        "kernels cross_entropy=tpu,loss_chunk=64: the tpu implementation of cross_entropy does not support loss_chunk"
    )
    with pytest.raises(UserError, match=message):
        Kernels.parse("cross_entropy=tpu,loss_chunk=64")
    with pytest.raises(UserError, match="kernels loss_chunk: got 0, expected a whole number >= 1"):
        Kernels.parse("loss_chunk=0")
    kernels = Kernels.parse("cross_entropy=chunked,loss_chunk=64")
    assert (kernels.scores, kernels.loss_chunk) == ("chunked", 64)
    assert Kernels.parse(str(kernels)) == kernels


class Tokens:
    """Batches of which only the shapes are asked for."""

    def __init__(self, context=128):
        self.context = context

    def shapes(self, rows):
        return dict.fromkeys(("tokens", "targets"), ((rows, self.context), "int32"))


def experiment(vocab=1024):
    model = Decoder(vocab=vocab, context=128, layers=2, embed=256, heads=2)
    return Experiment("named", model, Tokens(), batch=8)


def took(platform, **changes):
    """What a step takes by its tracing, for a platform that need not be here."""
    plan = override(Plan(precision="bfloat16"), grouped(changes))
    step = described_step(experiment(), Platform.parse(platform), plan)
    step.step_fn.trace(step.layout.abstract, step.abstract_batch(batch_shapes(experiment())))
    check_kernel_choices(step.plan, step.kernels)
    return {one.kernel: (one.implementation, one.why) for one in step.kernels}


def test_a_step_tells_what_it_took_and_why_no_kernel():
    none = "kernels are for TPU and GPU"
    assert took("cpu x 2", state="int8", loss_chunk="64") == {
        "attention": ("plain", none),
        "cross_entropy": ("chunked", None),
        "adam8": ("reference", none),
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("platform", "kernel", "why"),
    [
        ("tpu v5e:2x2", "tpu", None),
        ("gpu h200 x 4", "gpu", None),
        ("cpu x 4", None, "kernels are for TPU and GPU"),
        ("gpu a100 x 4", None, "it needs compute capability 9.0 (H100, H200), and the target is a100-sxm4-80gb"),
    ],
)
def test_choices_are_those_of_the_platform_traced_for(platform, kernel, why):
    found = took(platform, state="int8", mesh="replica:2,fsdp:2", reduce="int8")
    assert found["attention"] == (kernel or "plain", why)
    assert found["adam8"] == found["quantize"] == (kernel or "reference", why)
    assert found["cross_entropy"] == ("reference", "no chunk: all logits at once")
    plain = took(platform, state="int8", mesh="replica:2,fsdp:2", reduce="int8", kernels="reference")
    assert {kernel: chosen for kernel, (chosen, _) in plain.items()} == {
        "attention": "plain",
        "cross_entropy": "reference",
        "quantize": "reference",
        "adam8": "reference",
    }
    assert took(platform, kernels="cross_entropy=chunked")["cross_entropy"] == ("chunked", None)
    largest = took(platform, mesh="replica:2,fsdp:2", reduce="topk:0.05,block=none")["top_k"]
    assert largest == ("reference", "a kernel selects in blocks, not in a whole leaf")
    largest = took(platform, mesh="replica:2,fsdp:2", reduce="topk:0.05")["top_k"]
    assert largest == (kernel or "reference", why), "in every fraction of its warm-up"
    fp8 = took(platform, state="fp8")["adam8"]
    knows = "the kernel supports states int8 and dynamic8, not fp8"
    assert fp8 == ("reference", why if platform.startswith("cpu") else knows)


@pytest.mark.slow
def test_a_named_kernel_that_cannot_run_is_refused_before_anything_is_compiled():
    with pytest.raises(
        UserError, match=r"top_k=gpu.*cannot run: it needs blocks that are a multiple.*Leave the name out"
    ):
        took("gpu h200 x 4", kernels="top_k=gpu", mesh="replica:2,fsdp:2", reduce="topk:0.05,block=1000")


@pytest.mark.slow
def test_estimates_and_meetings_tell_it_too():
    said = str(fit(experiment(), "tpu v5e:2x2", Plan(precision="bfloat16", kernels=Kernels(loss_chunk=64))))
    assert "kernels on tpu v5e: attention tpu, cross_entropy chunked\n" in said
    plan = override(
        Plan(), {"mesh": "replica:2,fsdp:2", "diloco": "every=10", "reduce": "int8", "state.moments": "int8"}
    )
    step: Any = described_step(experiment(), Platform.parse("tpu v5e:2x2"), plan)
    step.step_fn.trace(step.layout.abstract, step.abstract_batch(batch_shapes(experiment())))
    assert "quantize" not in {one.kernel for one in step.kernels}
    step.check_kernels()
    found = {one.kernel: (one.implementation, one.why) for one in step.kernels}
    assert found["quantize"] == ("tpu", None)
    assert found["adam8"] == ("reference", "replicas under diloco are updated together by XLA's program")


@pytest.mark.parametrize("name", ["chunked", "reference"])
def test_a_loss_by_any_name_is_the_loss(name):
    x, head = jnp.sin(jnp.arange(192.0)).reshape(2, 12, 8), jnp.cos(jnp.arange(80.0)).reshape(10, 8)
    targets, notes = jnp.arange(24).reshape(2, 12) % 10, []

    def trained(**settings):
        run = functools.partial(cross_entropy, targets=targets, vocab=10, **settings)
        return jax.jit(jax.value_and_grad(lambda *given: run(*given).total, (0, 1)))(x, head)

    with noting(notes):
        # chunks of 5, 5 and 2
        got = trained(implementation=name, chunk=5 if name == "chunked" else None)
    assert {found.chosen for found, _ in notes} == {name}
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), got, trained())


def test_what_is_named_must_be_taken():
    plan = Plan(kernels=Kernels.parse("attention=chunked,cross_entropy=chunked"))
    check_kernel_choices(plan, (KernelChoice("cross_entropy", "cpu", "chunked"),))
    with pytest.raises(UserError, match="cross_entropy=chunked: no part of this step uses cross_entropy; leave it"):
        check_kernel_choices(plan, ())
    with pytest.raises(UserError, match=r"uses cross_entropy reference; pass context.loss and context.loss_chunk"):
        check_kernel_choices(plan, (KernelChoice("cross_entropy", "cpu", "reference", "no chunk"),))
    largest = Plan(kernels=Kernels.parse("top_k=gpu"))
    with pytest.raises(
        UserError, match=r"top_k=gpu: this step uses top_k reference \(kernels are of blocks\); leave it"
    ):
        check_kernel_choices(largest, (KernelChoice("top_k", "gpu", "reference", "kernels are of blocks"),))


def small(**changes):
    return override(Plan(), grouped(changes)), Experiment("small", Decoder(64, 16, 1, 16, 2), Tokens(16), batch=8)


def test_estimates_and_meetings_refuse_before_anything_is_compiled():
    plan, made = small(kernels="quantize=reference")
    said = "quantize=reference: no part of this step uses quantize; leave it out"
    with pytest.raises(UserError, match=said):
        fit(made, "cpu x 2", plan)
    with pytest.raises(UserError, match=said):
        lowered_step(jax.devices()[:1], lambda: made, plan)
    plan, made = small(kernels="top_k=reference", mesh="replica:2", diloco="every=10", reduce="int8")
    step, said = build(made, plan), "top_k=reference: no part of this step uses top_k; leave it out"
    with pytest.raises(UserError, match=said):
        step.compile(batch_shapes(made))
    assert step.program is None
    assert "quantize" in {one.kernel for one in step.kernels}
    with pytest.raises(UserError, match=said):
        explain(made, "cpu x 2", plan)
    with pytest.raises(UserError, match=said):
        lowered_step(jax.devices()[:2], lambda: made, plan)


def test_estimates_tell_what_a_meeting_takes():
    plan, made = small(mesh="replica:2", diloco="every=10", reduce="int8")
    (said,) = lines_of(estimate(made, "cpu x 2", plan).kernels)
    assert said.endswith(", quantize reference (kernels are for TPU and GPU)")
    (said,) = lines_of(estimate(made, "cpu x 2", override(plan, {"reduce": "none"})).kernels)
    assert "quantize" not in said


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kernels", "codec", "why"),
    [
        ("quantize=gpu", "qsgd:8", "but this codec rounds at random"),
        ("top_k=gpu", "topk:0.05,block=none", "a kernel selects in blocks, not in a whole leaf"),
    ],
)
def test_a_codec_that_no_kernel_knows_says_why(kernels, codec, why):
    kernel = kernels.partition("=")[0]
    with pytest.raises(UserError, match=rf"{kernels}: this step uses {kernel} reference \(.*{why}\); leave it out"):
        took("gpu h200 x 4", kernels=kernels, mesh="replica:2,fsdp:2", reduce=codec)


def test_a_state_on_the_host_is_why_no_kernel_steps_it():
    plan = override(Plan(), {"state.moments": "int8", "offload.optimizer_state": "streamed", "zero": "1"})
    step = described_step(experiment(), Platform.parse("tpu v5e:2x2"), plan)
    assert step.update.unfused_reason == "the kernel needs weights and state on the device"


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (
            "twice: no. Pass implementation=None to take one that can.",
            "kernels auto: twice: no. Leave the name out for one .*",
        ),
        ("twice: cannot map it. Pass implementation='reference'", "twice: cannot map it. Pass implementation='.*'"),
    ],
)
def test_what_cannot_run_is_told_in_its_own_words(said, told):
    def cannot():
        raise CannotRun(said)

    with pytest.raises(UserError, match=f"^{told}$"):
        KernelTrace(Plan(), None, None).with_recording(cannot)()


def test_a_kernel_taken_in_two_ways_is_told_in_one_line():
    found = (KernelChoice("adam8", "tpu v5e", "tpu"), KernelChoice("adam8", "tpu v5e", "reference", "it needs more"))
    assert fields_of(found) == {"platform": "tpu v5e", "adam8": "tpu; reference", "why": {"adam8": "it needs more"}}
    assert lines_of(found) == ["kernels on tpu v5e: adam8 tpu; reference (it needs more)"]
    assert lines_of(()) == []


@pytest.mark.slow
@tpu_compiler
def test_the_named_loss_reaches_the_step_and_holds_no_logits():
    base = Plan(precision="bfloat16")
    names = {"tpu": "cross_entropy=tpu", "reference": "cross_entropy=reference"}
    steps = {
        name: functools.partial(
            lowered_step, make=functools.partial(experiment, 1000), plan=override(base, {"kernels": text})
        )
        for name, text in names.items()
    }
    found = compiled("tpu v5e:2x2", steps)
    assert [one.error for one in found.values()] == [None, None]
    assert found["tpu"].kernels == found["reference"].kernels + 3  # one forward, two backward

    def logits(hlo):
        shapes = {tuple(map(int, dims.split(","))) for dims in re.findall(r"(?:f32|bf16)\[([\d,]+)\]", hlo)}
        # a device's part of the batch: 2 rows of 128 positions
        return {dims for dims in shapes if 1000 in dims and math.prod(dims) == 256 * 1000 and dims != (1000, 256)}

    assert logits(found["reference"].hlo)
    assert not logits(found["tpu"].hlo)
