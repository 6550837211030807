"""Every technique of the README's table, as the words that ask for it: a new technique is a line here.

`test_whole_runs.py` takes each through a whole run, alone, on one device where that means anything and on four, and
40 mixtures of them. That no row of the table is left out, and no codec, optimizer, schedule or selector, is tested.
"""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Technique:
    """A technique, as the command line asks for it.

    Args:
        row: how its row of the README's table begins.
        flags: that ask for it.
        four: flags of its layout on four devices; empty: it means nothing there.
        one: whether it means anything on one device.
        variant: of `tiny.py`; empty: the decoder.
        onto: flags of another layout that a run of it on four devices is continued on; empty: none.
        default: whether default tests take it through a whole run.
        each_change: whether it is its family's, which CI takes through a whole run with each change.
        mixes: whether mixtures draw it.
    """

    row: str
    flags: str = ""
    four: str = "--plan.mesh fsdp:4 --plan.zero 2"
    one: bool = True
    variant: str = ""
    onto: str = ""
    default: bool = False
    each_change: bool = False
    mixes: bool = True

    @property
    def name(self) -> str:
        """The words without what they share: "zero 3", "memory full"."""
        words = f"{self.variant} {self.flags or self.four}".replace("--plan.", "").replace("--", "").split()
        return " ".join(word for word in words if word != "mesh")


def _alike(row: str, *flags: str, **fields: object) -> tuple[Technique, ...]:
    return tuple(Technique(row, each, **fields) for each in flags)  # pyright: ignore[reportArgumentType]


def _layouts(row: str, *flags: str, **fields: object) -> tuple[Technique, ...]:
    return tuple(Technique(row, four=each, one=False, mixes=False, **fields) for each in flags)  # pyright: ignore[reportArgumentType]


_PIPE = "--plan.mesh data:2"
_REPLICAS = "--plan.mesh replica:2,fsdp:2 --plan.zero 2"
HELD = "96KiB"
"""Bytes of kept activations that make rules choose: the decoder keeps more than twice as many on one device."""

TECHNIQUES: tuple[Technique, ...] = (
    *_layouts("data parallel", "--plan.mesh data:4", "--plan.mesh replica:2,data:2", onto="--plan.mesh fsdp:2"),
    *_layouts("data parallel", "--plan.mesh replica:2,fsdp:2", onto="--plan.mesh 1"),
    *_layouts("ZeRO", *(f"--plan.mesh fsdp:4 --plan.zero {stage}" for stage in (1, 2)), onto="--plan.mesh 1"),
    *_layouts("ZeRO", "--plan.mesh fsdp:4 --plan.zero 3", onto="--plan.mesh data:2,tensor:2", each_change=True),
    *_layouts("tensor parallel", "--plan.mesh tensor:4", "--plan.mesh fsdp:2,tensor:2 --plan.sequence-parallel True"),
    *_layouts("tensor parallel", "--plan.mesh tensor:4 --plan.sequence-parallel True", onto="--plan.mesh 1"),
    *_layouts("context parallel", "--plan.mesh sequence:4", "--plan.mesh data:2,sequence:2", onto="--plan.mesh data:4"),
    *_alike("microbatches", "--plan.microbatches 4"),
    *_alike("mixed precision", "--plan.precision bfloat16", onto="--plan.mesh 1"),
    *_alike("mixed precision", *(f"--plan.precision bfloat16 --plan.reduce {to}" for to in ("float32", "bfloat16"))),
    *_alike("products of layers", *(f"--plan.matmul {kind}" for kind in ("fp8", "int8", "int4"))),
    *_alike("rematerialization", "--plan.memory full", "--plan.memory dots"),
    *_alike("rematerialization", "--plan.memory jax:dots_with_no_batch_dims_saveable"),
    *_alike("rematerialization: every K-th block", "--plan.memory sqrt", "--plan.memory periodic:2"),
    *_alike("rematerialization: Revolve", "--plan.memory revolve:1"),
    *_alike("rematerialization: Rotor", f"--plan.memory chain:{HELD}", each_change=True),
    *_alike("the optimal save set", f"--plan.memory save:{HELD}", f"--plan.memory save:{HELD}:flop"),
    *_alike("heuristics", f"--plan.memory greedy:{HELD}", f"--plan.memory dtr_static:{HELD}"),
    *_alike(
        "activations on the host",
        *(
            f"--plan.memory offload:{name}:{HELD}"
            for name in ("pofo", "capuchin", "vdnn", "tflms", "autoswap", "swapadvisor")
        ),
    ),
    *_alike("a memory rule chosen before the run", "--plan.memory file:DECISION", mixes=False, four=""),
    *_alike("optimizer state on the host", "--plan.offload.optimizer-state streamed", onto="--plan.mesh 1"),
    *_alike("ZeRO-Offload", "--plan.offload.optimizer-state host", onto="--plan.mesh data:2", each_change=True),
    *_alike("ZeRO-Offload", "--plan.offload.optimizer-state host --plan.state.moments int8"),
    *_alike("optimizer state in 8 bits", *(f"--plan.state.moments {kind}" for kind in ("dynamic8", "fp8"))),
    *_alike("optimizer state in 8 bits", "--plan.state.moments int8", onto="--plan.mesh 1"),
    *_alike("optimizer state in 4 bits", "--plan.state.moments int4"),
    *_alike(
        "master weights as bfloat16", "--plan.precision bfloat16 --plan.state.master split", onto="--plan.mesh data:2"
    ),
    *_alike(
        "L2L",
        "--plan.offload.weights host --plan.offload.gradients host --plan.offload.optimizer-state host",
        "--plan.offload.weights host --plan.offload.optimizer-state streamed",
        onto="--plan.mesh data:2",
    ),
    *_alike("L2L", "--plan.offload.weights host", "--plan.offload.weights host --plan.offload.gradients host"),
    *_alike("L2L", "--plan.offload.weights host --plan.pipeline 1f1b:2x4", four=_PIPE, one=False),
    *_alike(
        "gradients compressed",
        *(f"--plan.reduce {codec}" for codec in ("int4", "onebit", "qsgd:4bit", "topk:0.1", "dgc:0.1")),
        *(f"--plan.reduce {codec}" for codec in ("int8", "gradzip:2")),
        four=_REPLICAS,
        one=False,
    ),
    *_alike("gradients compressed", "--plan.reduce powersgd:2", four=_REPLICAS, one=False, each_change=True),
    *_alike(
        "optimizers by name",
        *(
            f"--optimizer {name}"
            for name in (
                *("nadamw", "adan", "ademamix", "adopt", "lion", "adafactor", "schedule_free", "soap"),
                *("sgd --optimizer.momentum 0.9", "galore --optimizer.rank 4 --optimizer.every 2", "adamw"),
            )
        ),
    ),
    *_alike("optimizers by name", "--optimizer.ema 0.9", onto="--plan.mesh 1"),
    *_alike("optimizers by name", "--optimizer muon", onto="--plan.mesh 1"),
    *_alike(
        "1-bit Adam",
        *(f"--optimizer {name} --optimizer.freeze 0.5" for name in ("one_bit_adam", "one_bit_lamb")),
        four="--plan.mesh replica:4",
        one=False,
    ),
    *_alike(
        "DiLoCo",
        "--plan.diloco every=2,fragments=2",
        "--plan.diloco every=3 --plan.reduce int4",
        four=_REPLICAS,
        one=False,
    ),
    *_layouts(
        "several techniques",
        "--plan.mesh replica:2,fsdp:2 --plan.pipeline 1f1b:2x2 --plan.zero 3 --plan.state.moments int8 "
        "--plan.reduce int8 --plan.precision bfloat16 --plan.state.master split --plan.memory full",
    ),
    *_alike("large batches", "--optimizer lars", "--optimizer lamb"),
    *_alike(
        "pipelines",
        *(f"--plan.pipeline {name}:2x4" for name in ("gpipe", "lockstep", "chimera", "zb-h1", "zb-h2", "search")),
        *(f"--plan.pipeline {name}:2x4 --model.layers 4" for name in ("interleaved", "zb-v", "dualpipe-v")),
        *("--plan.pipeline lockstep:2x4,v=2 --model.layers 4", "--plan.pipeline lockstep:2x4,lowering=phased"),
        *("--plan.pipeline auto:2", "--plan.pipeline 1f1b:2x4,stash=input"),
        four=_PIPE,
        one=False,
    ),
    *_alike("pipelines", "--plan.pipeline 1f1b:2x4", four=_PIPE, one=False, onto="--plan.mesh fsdp:2", default=True),
    *_alike(
        "asynchronous pipelines",
        *(f"--plan.pipeline {form}" for form in ("pipedream:2", "2bw:2x4", "pipemare:2")),
        "--plan.pipeline 2bw:2x4 --plan.state.moments int8",
        four=_PIPE,
        one=False,
    ),
    *_alike(
        "asynchronous pipelines", "--plan.pipeline 2bw:2x4 --plan.reduce int8", four="--plan.mesh replica:2", one=False
    ),
    *_alike("loss in chunks", "--plan.kernels loss_chunk=4"),
    *_alike("attention in chunks", "--plan.kernels attention=chunked"),
    *_alike("kernels", "--plan.kernels reference", "--plan.kernels attention=chunked"),
    *_alike(
        "optimizers by name",
        """--optimizer.groups '{"embed|head":{"name":"lion","learning_rate":1e-3}}'""",
        onto="--plan.mesh 1",
        mixes=False,
    ),
    *_alike("LoRA", "--optimizer.train attention", onto="--plan.mesh 1"),
    *(Technique("any Flax model", variant=name, mixes=False) for name in ("foreign", "linen_net")),
    Technique(
        "any Flax model",
        "--plan.pipeline 1f1b:2x4,stash=input",
        four="--plan.mesh data:2",
        one=False,
        variant="foreign_blocks",
        onto="--plan.mesh fsdp:2 --plan.zero 2",
        mixes=False,
    ),
    Technique("any Flax model", "--plan.memory sqrt", variant="foreign_blocks", mixes=False),
    *(Technique("Llama", variant=name, mixes=False) for name in ("llama", "gpt2", "qwen3", "gemma2")),
    Technique("Llama", variant="pretrained_vit", mixes=False, each_change=True),
    *(Technique("", variant=name, mixes=False) for name in ("vit", "resnet")),
    Technique("checkpoints", "", four="--plan.mesh data:4", mixes=False),
)
"""Those without a row are the models of the house that the table does not name."""
