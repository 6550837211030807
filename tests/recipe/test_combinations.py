"""Every row of the rules refuses an example of its own, with a way round; without devices."""

import re

import pytest
from flax import nnx

from jaxscale.models import ForeignModel, LoRA, classification
from jaxscale.models.decoder import Decoder
from jaxscale.optim.optimizer import Optimizer
from jaxscale.recipe.combinations import RULES, Incompatible, check
from jaxscale.recipe.experiment import Experiment
from jaxscale.recipe.plan import Plan
from jaxscale.recipe.requests import Facts
from jaxscale.values import override
from tests.plans import grouped


def facts(changes: str, **known) -> Facts:
    """A plan by its changes, such as "zero=3 mesh=data:2", and what else is known."""
    plan = override(Plan(), grouped(dict(change.split("=", 1) for change in changes.split())))
    return Facts(plan, **known)


def experiment(name: str = "adamw", model: object = Decoder(vocab=8, context=8, layers=2, embed=8, heads=2)):
    return Experiment("rules", model, None, Optimizer(name=name), steps=10, batch=8)


ONE_BIT, FOREIGN = (
    experiment("one_bit_adam"),
    experiment(model=ForeignModel(lambda rngs: nnx.Linear(2, 3, rngs=rngs), classification())),
)
CONTRASTIVE = experiment(model=ForeignModel(lambda rngs: nnx.Linear(2, 3, rngs=rngs), classification(), over="batch"))
ADAPTED = experiment(model=LoRA(Decoder(vocab=8, context=8, layers=2, embed=8, heads=2), rank=2))
FEW_BITS = experiment(model=LoRA(Decoder(vocab=8, context=8, layers=2, embed=8, heads=2), rank=2, base="nf4"))
AVERAGED = Experiment("rules", Decoder(vocab=8, context=8, layers=2, embed=8, heads=2), None, Optimizer(ema=0.9))
REPLICAS = "mesh=replica:2 "
UNLIKE = {"has_unlike_blocks": True}
SEPARATE = UNLIKE | {"separate_blocks": ("layers/0", "layers/1", "layers/2")}
EXAMPLES = (
    ("zero=1 mesh=1", {}, "leave mesh out"),
    ("zero=3 mesh=data:2", {}, "add fsdp:N"),
    ("sequence_parallel=True mesh=data:2", {}, "add tensor:N"),
    ("reduce=int8 mesh=data:2", {}, "name the slow axis"),
    ("diloco=every=2 mesh=data:2", {}, "name the slow axis"),
    ("mesh=data:2", {"experiment": ONE_BIT}, "or take adamw"),
    ("mesh=pipe:2", {}, "add a pipeline"),
    ("reduce=bfloat16", {}, "add precision bfloat16"),
    ("master=split", {}, "but precision is float32"),
    ("master=split precision=bfloat16 reduce=float32", {}, "leave reduce out"),
    ("matmul=int8", {"experiment": FEW_BITS}, "take a base in the precision of the plan"),
    ("gradients=host", {}, "add offload.weights host"),
    ("gradients=host weights=host microbatches=2", {}, "microbatches 1"),
    ("gradients=host weights=host pipeline=1f1b:2x4", {}, "leave the pipeline out"),
    ("master=split precision=bfloat16 weights=host", {}, "leave out one of the two"),
    ("master=split precision=bfloat16 optimizer_state=host", {}, "leave out one of the two"),
    ("memory=jax:everything_saveable weights=host", {}, "take memory none"),
    ("memory=sqrt weights=host", {}, "take save:BYTES"),
    ("weights=host mesh=data:2", {"experiment": FOREIGN, "has_blocks": False}, "streamed or host"),
    ("unroll=2 mesh=data:2", {"experiment": FOREIGN, "has_blocks": False}, "leave unroll out"),
    ("optimizer_state=streamed", {"mixing": "reduce_sum"}, r"mixes elements of a tensor \(reduce_sum\)"),
    (REPLICAS + "reduce=int8 weights=host gradients=host", {}, "take offload.gradients device"),
    (REPLICAS + "reduce=int8", {"state": ("bn/mean",)}, r"bn/mean.* leave reduce out"),
    (REPLICAS + "reduce=onebit,start=2", {"experiment": ONE_BIT, "state": ("bn/mean",)}, "one_bit_adam .* take adamw,"),
    ("mesh=replica:2,tensor:2 reduce=int8", {"experiment": FOREIGN}, "without tensor"),
    (REPLICAS + "reduce=int8", {"experiment": ONE_BIT}, "send momenta in one bit"),
    (REPLICAS + "weights=host", {"experiment": ONE_BIT}, "keep weights and state on the device"),
    (REPLICAS + "optimizer_state=streamed", {"experiment": ONE_BIT}, "keep weights and state on the device"),
    (REPLICAS + "diloco=every=2", {"experiment": ONE_BIT}, "take optimizer adamw"),
    (REPLICAS + "diloco=every=100", {"experiment": experiment()}, "the run has 10 steps"),
    (REPLICAS + "diloco=every=2 weights=host", {}, "leave diloco out"),
    (REPLICAS + "diloco=every=2 optimizer_state=host", {}, "take offload.optimizer_state streamed"),
    (REPLICAS + "diloco=every=2 precision=bfloat16 master=split", {}, "take state.master float32"),
    (REPLICAS + "diloco=every=2", {"state": ("bn/mean",)}, "leave diloco out"),
    ("mesh=replica:2,tensor:2 diloco=every=2", {"experiment": FOREIGN}, "without tensor"),
    ("pipeline=1f1b:2x4", {"experiment": ADAPTED}, "take a mesh of fsdp devices with zero 3"),
    ("weights=host", {"experiment": ADAPTED}, "parameters that are not trained stay on the device"),
    ("pipeline=2bw:2x4", {"experiment": AVERAGED}, "no one set of weights to average"),
    (REPLICAS + "diloco=every=2", {"experiment": AVERAGED}, "leave ema or diloco out"),
    ("weights=host", {"experiment": AVERAGED}, "keep weights and state on the device, or leave ema out"),
    ("optimizer_state=host", {"experiment": AVERAGED}, "keep weights and state on the device, or leave ema out"),
    ("microbatches=2", {"experiment": CONTRASTIVE}, "the loss of parts of a batch is another loss"),
    (REPLICAS + "diloco=every=2", {"experiment": CONTRASTIVE}, "take memory full or zero 3 if memory is short"),
    ("pipeline=1f1b:2x4 microbatches=2", {}, "leave microbatches out"),
    ("pipeline=auto:2 microbatches=2", {}, "leave microbatches out"),
    ("pipeline=1f1b:2x4 anneal=3", {}, "take pipemare:P"),
    ("pipeline=1f1b:2x4 correction=0.1", {}, "take pipemare:P"),
    ("pipeline=1f1b:2x4 synchronous_steps=3", {}, "take pipemare:P"),
    ("pipeline=2bw:2x4 correction=0.1", {}, "read the same weights as its forward passes"),
    ("pipeline=2bw:2x4 lowering=phased", {}, "the pipeline's ticks mix forward and backward passes"),
    ("pipeline=chimera:2x4 weights=host", {"has_copies": True}, "take another pipeline"),
    ("pipeline=2bw:2x4 precision=bfloat16 master=split", {}, "take state.master float32"),
    ("pipeline=2bw:2x4 weights=host", {}, "take offload.weights device"),
    ("pipeline=2bw:2x4 optimizer_state=host", {}, "nothing comes from the host"),
    ("pipeline=2bw:2x4 zero=1 mesh=fsdp:2", {}, "take zero 0"),
    ("pipeline=2bw:2x4 reduce=int8 mesh=replica:2,tensor:2", {}, "without tensor"),
    ("pipeline=2bw:2x4 mesh=replica:2", {"experiment": ONE_BIT}, "a synchronous pipeline, or adamw"),
    ("pipeline=2bw:2x4 diloco=every=2 mesh=replica:2", {}, "replicas meet between steps"),
    ("pipeline=2bw:2x4 memory=offload:pofo:1MiB", {}, "add the option stash=input"),
    ("pipeline=2bw:2x4", {"mixing": "reduce_sum"}, "may belong to several layers"),
    ("pipeline=2bw:2x4", {"has_reshaped_state": True}, "other shapes than its parameters"),
    ("pipeline=2bw:2x4", UNLIKE, "cannot update their weights at different times; take a synchronous pipeline"),
    ("pipeline=1f1b:2x4", UNLIKE, "of unlike blocks: .* add the option stash=input [(]"),
    (
        "pipeline=1f1b:2x4",
        SEPARATE,
        r"1f1b:2x4 of separate submodules \(layers/0, layers/1, ...\): .*, or stack the parameters of the blocks",
    ),
    ("pipeline=1f1b:2x4 stash=input mesh=tensor:2", UNLIKE, "nothing splits over tensor"),
    ("pipeline=1f1b:2x4 stash=input mesh=sequence:2", UNLIKE, "nothing splits over sequence"),
    ("pipeline=1f1b:2x4 stash=input mesh=fsdp:2 zero=3", UNLIKE, "take zero 2"),
    ("pipeline=1f1b:2x4 stash=input weights=host", UNLIKE, "take offload.weights device"),
    ("pipeline=1f1b:2x4 stash=input mesh=replica:2 reduce=int8", UNLIKE, "support only stages of alike blocks"),
    ("pipeline=1f1b:2x4 stash=input memory=sqrt", UNLIKE, "take none, dots or full"),
)


def refusal(changes: str, known: dict) -> Incompatible:
    with pytest.raises(Incompatible) as refused:
        check(facts(changes, **known))
    return refused.value


@pytest.mark.parametrize(("changes", "known", "message"), EXAMPLES, ids=[example[0] for example in EXAMPLES])
def test_a_rule_refuses_and_gives_a_way_round(changes, known, message):
    error = refusal(changes, known)
    assert re.search(message, str(error)), str(error)
    assert ": " in str(error)
    assert "; " in str(error)


def test_every_rule_has_an_example():
    met = {id(refusal(changes, known).rule) for changes, known, _ in EXAMPLES}
    assert [rule for rule in RULES if id(rule) not in met] == []


@pytest.mark.parametrize(
    "changes",
    [
        "",
        "mesh=replica:2,fsdp:2 zero=3 reduce=powersgd:2 weights=host optimizer_state=host",
        "mesh=fsdp:2,tensor:2 sequence_parallel=True pipeline=1f1b:2x4 zero=3 weights=host memory=full",
        "mesh=data:2 pipeline=2bw:2x4 state=int8 memory=full precision=bfloat16",
        "mesh=replica:2 diloco=every=2 reduce=int8 optimizer_state=streamed pipeline=zb-h1:2x4",
    ],
)
def test_what_goes_together_passes(changes):
    check(facts(changes, experiment=experiment()))
