"""Which implementation runs, where, and what is said of the others."""

import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

import pallas_kernels
from pallas_kernels import attention, dispatch, tiles
from pallas_kernels.cross_entropy.api import cross_entropy
from pallas_kernels.dispatch import Choice, Implementation, by_platform, choose
from pallas_kernels.overview import overview
from pallas_kernels.target import Target, target


def even(_, size):
    return None if size % 2 == 0 else f"it needs an even size, not {size}"


WAYS = (
    Implementation("tpu", "tpu", why_unsupported=even),
    Implementation("gpu", "gpu", needs_hopper=True),
    Implementation("slow", needs_name=True),
    Implementation("reference"),
)


@pytest.mark.parametrize(
    ("where", "size", "choice"),
    [
        (Target(), 2, ("tpu", "reference", "reference")),  # a GPU that nobody named may be one without wgmma
        (Target(None, "h200"), 2, ("tpu", "gpu", "reference")),
        (Target("tpu", "v5e"), 2, ("tpu",) * 3),
        (Target("tpu", "v5e"), 3, ("reference",) * 3),
        (Target("tpu"), 2, ("tpu",) * 3),  # of which nobody said the chip
        (Target("tpu", "8i"), 2, ("reference",) * 3),
        (Target(None, "v3"), 2, ("reference",) * 3),
        (Target(None, "tpu v9 lite"), 2, ("reference",) * 3),
        (Target("gpu", "h100"), 3, ("gpu",) * 3),
        (Target("gpu", "a100"), 3, ("reference",) * 3),
        (Target("gpu", "b200"), 3, ("reference",) * 3),
        (Target("cpu"), 2, ("reference",) * 3),
    ],
)
def test_none_always_works(where, size, choice):
    assert choose("twice", WAYS, size, where) == Choice(*choice)


@pytest.mark.parametrize(
    ("name", "where", "size", "said"),
    [
        ("tpu", Target("cpu"), 2, "it is for TPUs, and the target is cpu"),
        ("tpu", Target("tpu", "v5e"), 3, "it needs an even size, not 3"),
        ("gpu", Target("gpu", "a100"), 2, "compute capability 9.0 .H100, H200., and the target is a100"),
        ("gpu", Target("gpu"), 2, "the chip is not known: pass platform="),
        ("tpu", Target("tpu", "v4"), 2, "it was compiled for TPU v5e, v5p, v6e and 7x alone, and the target is v4"),
        ("tpu", Target(None, "v3"), 2, "and the target is v3"),
    ],
)
def test_a_named_one_runs_or_says_why_not(name, where, size, said):
    with pytest.raises(NotImplementedError, match=rf"twice: implementation '{name}'.*{said}.*implementation=None"):
        choose("twice", WAYS, size, where, implementation=name)


def test_names():
    assert choose("twice", WAYS, 2, Target("cpu"), implementation="slow").default == "slow"
    assert choose("twice", WAYS, 2, Target("cpu"), implementation="tpu", interpret=True).default == "tpu"
    with pytest.raises(NotImplementedError, match="even size"):
        choose("twice", WAYS, 3, Target("cpu"), implementation="tpu", interpret=True)
    with pytest.raises(ValueError, match=r"unknown implementation 'refrence': expected None or.*mean 'reference'"):
        choose("twice", WAYS, 2, Target("cpu"), implementation="refrence")
    with pytest.raises(ValueError, match="interpret needs a named implementation"):
        choose("twice", WAYS, 2, Target("cpu"), interpret=True)


def test_every_kernel_has_one_name():
    """That of its public function, wherever it is named or told."""
    apis = {name: importlib.import_module(f"pallas_kernels.{pallas_kernels._MODULES[name]}") for name in dispatch.NAMES}
    ways = {kernel: [getattr(one, "name", one) for one in api.IMPLEMENTATIONS] for kernel, api in apis.items()}
    assert {kernel: sorted(names) for kernel, names in ways.items()} == {
        kernel: sorted(names) for kernel, names in dispatch.NAMES.items()
    }
    assert (
        {one.kernel for one in overview("tpu v5e")}
        == dispatch.NAMES.keys()
        == set(pallas_kernels._MODULES) - {"dequantize"}
    )


@pytest.mark.parametrize(
    ("names", "says"),
    [
        ({"atention": "tpu"}, "unknown kernel 'atention': expected one of .* did you mean 'attention'"),
        ({"norm": "reference"}, "unknown kernel 'norm': expected one of .*'rms_norm'"),
        ({"attention": "chunks"}, "attention: unknown implementation 'chunks': .* did you mean 'chunked'"),
    ],
)
def test_unknown_names_are_refused_where_they_are_named(names, says):
    with pytest.raises(ValueError, match=says), dispatch.naming(names):
        pass


def test_cudnn_may_be_named_from_outside(monkeypatch):
    monkeypatch.setattr(importlib.import_module("pallas_kernels.attention.cudnn"), "attention", lambda q, *_: q + 2)
    q = jnp.zeros((1, 16, 2, 64), jnp.bfloat16)
    with dispatch.naming({"attention": "cudnn"}):
        out = attention(q, q, q, platform="gpu h200")
    np.testing.assert_array_equal(out.astype(jnp.float32), 2)


def test_explain():
    said = dispatch.explain("twice", WAYS, 2, Target("gpu", "h200"))
    assert str(said).splitlines() == [
        "twice on gpu h200: gpu",
        "  not tpu: it is for TPUs, and the target is gpu",
        "  not slow: it runs only where it is named",
        "  not reference: gpu comes before it",
    ]
    with pytest.raises(ValueError, match="explain needs a platform"):
        dispatch.explain("twice", WAYS, 2, Target())


def test_choices_are_noted_once_and_where_they_are_made():
    notes = []
    with dispatch.noting(notes):
        for where in (Target("gpu", "a100"), Target("gpu", "a100"), Target("tpu", "v5e")):
            choose("twice", WAYS, 2, where)
        dispatch.explain("twice", WAYS, 3, Target("tpu", "v5e"))  # who asks goes by the answer
        with pytest.raises(NotImplementedError):
            dispatch.explain("twice", WAYS, 3, Target("tpu", "v5e"), "tpu")  # nothing is chosen
        with dispatch.naming({"top_k": "reference"}):
            choose("top_k", WAYS, 2, Target("tpu", "v5e"))
            choose("top_k", WAYS, 2, Target("tpu", "v5e"), implementation="slow")
        choose("twice", WAYS, 2, Target())
        choose("twice", WAYS[2:], 2, Target("cpu"))
    choose("twice", WAYS, 4, Target("cpu"))  # nobody listens
    assert [(found.chosen, found.why, case) for found, case in notes] == [
        ("reference", "it needs compute capability 9.0 (H100, H200), and the target is a100", 2),
        ("tpu", None, 2),
        ("reference", "it needs an even size, not 3", 3),
        ("reference", "reference is named", 2),
        ("slow", "slow is named", 2),
        ("tpu on TPU, reference on GPU, else reference", None, 2),
        ("reference", None, 2),
    ]


def test_targets():
    assert target("gpu NVIDIA H100 80GB HBM3") == Target("gpu", "h100")
    assert target("tpu TPU v5 lite") == Target("tpu", "v5e")
    assert target("tpu TPU v5") == target("TPU v5p") == Target("tpu", "v5p")
    assert target("TPU7x") == target("tpu TPU7x") == target("tpu 7x") == Target("tpu", "7x")
    assert target("tpu TPU v6 lite") == target("tpu v6 lite") == Target("tpu", "v6e")
    assert str(target("tpu TPU v9 lite")) == "tpu v9 lite"  # a device may be newer than this
    assert [target(f"gpu {one}").chip for one in ("a100-80", "NVIDIA L4", "Tesla T4", "rtx 4090", "h100-pcie")] == [
        "a100-80", "l4", "t4", "rtx", "h100-pcie"
    ]  # fmt: skip
    assert target("tpu") == Target("tpu")
    assert target("cpu") == Target("cpu")
    with pytest.raises(ValueError, match="platform 'rocm': expected 'tpu', 'gpu' or 'cpu'"):
        target("rocm mi300")
    assert target() == Target(None, None)  # no mesh: lowering decides
    here = (jnp.ones(2), None), {"x": np.ones(2)}
    assert target(None, *here) == target(None, *here[1:]) == Target("cpu")  # nothing is traced
    seen = []
    jax.jit(lambda x: seen.append(target(None, x)) or seen.append(target(None, *here)))(1.0)
    jax.vmap(lambda x: seen.append(target(None, x)))(jnp.ones(2))
    assert seen == [Target()] * 3
    described = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
    mesh = AbstractMesh((2,), ("x",), axis_types=(AxisType.Auto,), abstract_device=described)
    with jax.sharding.use_abstract_mesh(mesh):
        assert target() == Target("gpu", "h200")
    seen = []
    here = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,))
    spec = jax.P("x")
    jax.shard_map(lambda x: seen.append(target()) or x, mesh=here, in_specs=spec, out_specs=spec)(jnp.ones(2))
    assert seen == [Target("cpu")]


@pytest.mark.parametrize(
    ("platform", "says"),
    [
        ("tpu v9z", "unknown chip 'v9z', expected one of v2, .*v5e, .* or 'tpu' alone$"),
        ("tpu v5x", "did you mean 'tpu v5.'"),
        ("tpu v5e:2x2", "did you mean 'tpu v5e'"),
        ("gpu h2000", "did you mean 'gpu h200'"),
        ("gpu v5e", "unknown chip 'v5e', expected one of h100, "),
        ("TPU v9z", "platform 'TPU'"),
    ],
)
def test_unknown_chips_are_refused(platform, says):
    with pytest.raises(ValueError, match=says):
        target(platform)


def test_kernels_run_on_tpus_for_which_they_were_compiled():
    chips = ("v3", "v4", "v5p", "7x", "8i")
    chosen = {chip: {one.kernel: one.chosen for one in overview(f"tpu {chip}")} for chip in chips}
    assert chosen["v4"] == chosen["v5p"]
    assert {name for name, one in chosen["v4"].items() if one == "tpu"} == {
        "attention", "adam8", "quantize", "top_k", "rms_norm", "layer_norm"
    }  # fmt: skip
    assert "tpu" not in (*chosen["v3"].values(), *chosen["8i"].values())
    newer = {one.kernel: one.why for one in overview("tpu TPU v9 lite")}
    assert newer["rms_norm"] == "it was compiled for TPU v4, v5e, v5p, v6e and 7x alone, and the target is tpu v9 lite"
    with pytest.raises(dispatch.CannotRun, match="compiled for TPU v5e, v5p, v6e and 7x alone, and the target is v4"):
        cross_entropy(jnp.ones((128, 128)), jnp.ones((128, 128)), jnp.ones(128, int), platform="tpu v4",
                      implementation="tpu")  # fmt: skip


def test_lowering_decides_where_the_target_is_not_known():
    branches = {"tpu": lax.sin, "gpu": lax.cos, "reference": lax.tan}
    double = jax.jit(lambda x: by_platform(Choice("tpu", "gpu", "reference"), branches, x))
    np.testing.assert_allclose(double(jnp.ones(())), np.tan(1.0), rtol=1e-6)
    for platform, name in {"tpu": "sine", "cuda": "cosine", "cpu": "tan"}.items():
        text = double.trace(jnp.ones(())).lower(lowering_platforms=(platform,)).as_text()
        assert {f"stablehlo.{one}" for one in ("sine", "cosine", "tan") if f".{one} " in text} == {f"stablehlo.{name}"}
    one = jax.make_jaxpr(lambda x: by_platform(Choice(*("reference",) * 3), branches, x))(1.0)
    assert [eqn.primitive.name for eqn in one.eqns] == ["tan"]


def test_tiles_come_from_the_nearest_within_a_factor_of_two_then_the_rule(monkeypatch):
    rows = [
        {"kernel": "twice", "case": {"T": 4096, "mask": "causal"}, "tiles": {"q": [512, 256]}},
        {"kernel": "twice", "case": {"T": 1536, "mask": "causal"}, "tiles": {"q": [128, 128]}},
        {"kernel": "thrice", "case": {"T": 1024, "mask": "full"}, "tiles": {"q": [1, 1]}},
    ]
    monkeypatch.setattr(tiles, "entries", lambda chip: rows if chip == "v5e" else ())

    def found(T, mask="causal", chip="v5e", fits=lambda one: True):
        return tiles.tiles("twice", chip, {"T": T, "mask": mask}, dict, lambda: {"q": "rule"}, fits)["q"]

    assert {found(T) for T in (4000, 8192, 2600)} == {(512, 256)}
    assert {found(T) for T in (2400, 2048, 768)} == {(128, 128)}
    assert {found(T) for T in (8193, 767, 1)} == {"rule"}
    small = {"fits": lambda one: one["q"][0] < 512}
    assert [found(T, **small) for T in (3072, 4096)] == [(128, 128), "rule"]
    assert {found(4096, "full"), found(4096, chip="v6e"), found(4096, chip=None)} == {"rule"}


def test_the_files_of_tiles_say_how_each_was_found():
    for file in tiles.FOLDER.glob("*.json"):
        for entry in tiles.entries(file.stem):
            assert {"kernel", "case", "tiles", "measured", "date", "jax", "command"} <= entry.keys(), file
