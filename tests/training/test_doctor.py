import dataclasses
import io
import os
import subprocess
import sys

import pytest
from rich.console import Console

from jaxscale.platforms.detect import detect
from jaxscale.platforms.platform import Platform
from jaxscale.training.doctor import Finding, Machine, diagnose, doctor, has_pci_tpu

VERSIONS = {
    "jaxscale": "0.1.0",
    "jax": "0.12.0.1",
    "jaxlib": "0.12.0.1",
    "flax": "0.12.12",
    "optax": "0.2.8",
    "orbax-checkpoint": "0.12.8",
    "grain": "0.2.18",
    "numpy": "2.4.6",
}
HEALTHY = Machine(
    python="3.12.0",
    versions=VERSIONS,
    platform=Platform.parse("cpu x 8"),
    core_count=8,
    host_memory=2**35,
    free_bytes={("working directory", "/run"): 10**12},
    cache_folder="/cache",
    optional_packages=frozenset(["ipykernel", "matplotlib", "nbclient", "fsspec", "gcsfs", "s3fs"]),
)
CUDA = VERSIONS | {"jax-cuda13-plugin": "0.12.0.1"}
TPU = VERSIONS | {"libtpu": "0.0.51"}


def machine(**facts) -> Machine:
    return dataclasses.replace(HEALTHY, **facts)


def rows(seen: Machine, state: str) -> dict[str, Finding]:
    return {row.name: row for section in diagnose(seen).sections for row in section.rows if row.state == state}


@pytest.mark.parametrize(
    "seen",
    [
        HEALTHY,
        machine(platform=Platform.parse("tpu v5e:2x4"), has_tpu=True, versions=TPU),
        machine(platform=Platform.parse("tpu 7x:2x2x1"), has_tpu=True, versions=TPU, process_count=2),
    ],
    ids=["cpu", "v5e", "7x"],
)
def test_a_healthy_machine_has_nothing_to_do(seen):
    report = diagnose(seen)
    assert report.status == 0
    assert all(row.state == "ok" and not row.to_do for section in report.sections for row in section.rows)


def test_a_gpu_works_and_is_told_about_its_memory():
    seen = machine(platform=Platform.parse("gpu h100 x 8"), has_nvidia=True, versions=CUDA)
    assert diagnose(seen).status == 0
    assert set(rows(seen, "note")) == {"device"}
    assert "989 TFLOP/s bfloat16" in str(diagnose(seen))


@pytest.mark.parametrize(
    ("facts", "what", "to_do"),
    [
        ({"has_nvidia": True}, "gpu support", "pip install 'jaxscale[cuda]'"),
        ({"has_tpu": True}, "tpu support", "pip install 'jaxscale[tpu]'"),
        ({"has_nvidia": True, "versions": CUDA, "jax_platforms": "cpu"}, "gpu support", "unset JAX_PLATFORMS"),
        ({"has_nvidia": True, "versions": CUDA}, "gpu support", "driver"),
        ({"has_tpu": True, "versions": TPU, "jax_platforms": "cpu"}, "tpu support", "unset JAX_PLATFORMS"),
        ({"platform": None, "failure": "Unable to initialize backend"}, "devices", "JAX_PLATFORMS"),
        ({"versions": CUDA | {"jax-cuda13-plugin": "0.11.2"}}, "jax-cuda13-plugin", "jax-cuda13-plugin==0.12.0.1"),
        (
            {"versions": {name: text for name, text in VERSIONS.items() if name != "grain"}},
            "grain",
            "pip install grain",
        ),
    ],
)
def test_what_stops_a_run_or_leaves_the_accelerator_idle(facts, what, to_do):
    seen = machine(**facts)
    found = rows(seen, "missing")
    assert set(found) == {what}
    assert to_do in found[what].to_do
    assert diagnose(seen).status == 1


@pytest.mark.parametrize(
    ("facts", "what", "says"),
    [
        ({"versions": TPU}, "tpu support", "this machine has no TPU"),
        ({"versions": CUDA}, "gpu support", "compiling ahead of time"),
        ({"optional_packages": frozenset()}, "remote", "jaxscale[remote]"),
        ({"optional_packages": frozenset()}, "notebook", "jaxscale[notebook]"),
        ({"cache_folder": None}, "compile cache", "JAXSCALE_CACHE"),
        ({"free_bytes": {("working directory", "/run"): 10**9}}, "working directory", "free some"),
        ({"core_count": 16}, "cores", "one device per core"),
        ({"versions": VERSIONS | {"jaxlib": "0.12.1"}}, "jax and jaxlib", "differ"),
    ],
)
def test_what_is_good_to_know(facts, what, says):
    found = rows(machine(**facts), "note")
    assert says in found[what].text + found[what].to_do
    assert diagnose(machine(**facts)).status == 0


def test_an_unknown_gpu_trains_without_mfu():
    unknown = dataclasses.replace(Platform.parse("gpu t4"), chip=detect().chip)
    chip = dataclasses.replace(unknown.chip, name="NVIDIA X", kind="gpu", device_kinds=("NVIDIA X",))
    seen = machine(platform=Platform(chip, 2), has_nvidia=True, versions=CUDA)
    assert "no mfu" in rows(seen, "note")["peak"].text
    assert diagnose(seen).status == 0


def test_a_chip_without_bfloat16():
    seen = machine(platform=Platform.parse("gpu t4"), has_nvidia=True, versions=CUDA)
    assert "float32" in rows(seen, "note")["bfloat16"].to_do
    assert "65.0 TFLOP/s float16" in str(diagnose(seen))


def test_this_machine():
    report = doctor()
    assert [section.title for section in report.sections] == [
        "versions",
        "devices",
        "kernels",
        "memory",
        "disk",
        "optional",
    ]
    assert report.status == 0
    text = str(report)
    assert "8 x cpu (cpu x 8)" in text
    assert "GiB" in text
    assert all(line == line.rstrip() for line in text.splitlines())


def test_rich_prints_it_in_a_narrow_window():
    console = Console(file=io.StringIO(), width=50, force_terminal=True)
    console.print(diagnose(machine(has_nvidia=True)))
    shown = console.file.getvalue()
    assert "\x1b[" in shown
    assert "jaxscale[cuda]" in shown.replace("\n", "")


def test_backend_that_cannot_start():
    program = (
        "from jaxscale.training.doctor import doctor; report = doctor(); print(report); raise SystemExit(report.status)"
    )
    environment = os.environ | {"JAX_PLATFORMS": "nowhere"}
    run = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 1
    assert "nowhere" in run.stdout
    assert "Traceback" not in run.stderr


def test_tpus_on_the_bus(tmp_path):
    def plug(name: str, vendor: str, device: str) -> None:
        (tmp_path / name).mkdir()
        (tmp_path / name / "vendor").write_text(f"{vendor}\n")
        (tmp_path / name / "device").write_text(f"{device}\n")

    plug("00:01.0", "0x8086", "0x0063")
    plug("00:02.0", "0x1ae0", "0x0042")  # Google's network card
    assert not has_pci_tpu(tmp_path)
    plug("00:03.0", "0x1ae0", "0x0063")
    assert has_pci_tpu(tmp_path)


OWN = "(for your own layers; jaxscale's layers do not use it)"


@pytest.mark.parametrize(
    ("platform", "expected"),
    [
        ("tpu v5e:2x4", {"attention": "tpu", "adam8": "tpu", "top_k": "tpu"}),
        ("gpu h200 x 2", {"attention": "gpu", "top_k": "gpu", "grouped_matmul": f"gpu {OWN}"}),
        (
            "gpu a100-40 x 2",
            {
                "quantize": "reference; not gpu: it needs compute capability 9.0 (H100, H200), and the target is "
                "a100-sxm4-40gb"
            },
        ),
        ("cpu x 8", {"all": "plain JAX: kernels are for TPUs and for H100 and H200"}),
    ],
)
def test_it_tells_which_kernels_run(platform, expected):
    (kernels,) = (
        part for part in diagnose(machine(platform=Platform.parse(platform))).sections if part.title == "kernels"
    )
    told = {row.name: row.text for row in kernels.rows}
    assert told | expected == told
