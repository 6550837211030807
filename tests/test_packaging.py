"""The wheel, built and unpacked far from the repository: both packages, whole, that run without the source tree."""

import subprocess
import sys
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

import jaxscale
from jaxscale.records.examples import example_names

ROOT = Path(__file__).parent.parent
PACKAGES = ("jaxscale", "pallas_kernels")
# the interpreter's path without the repository (an editable install adds it), the unpacked wheel first
ALONE = """
import importlib.metadata, pathlib, sys
repository, site = map(pathlib.Path, sys.argv[1:])
sys.path[:] = [str(site), *(p for p in sys.path if p and pathlib.Path(p).resolve() != repository)]
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the unpacked wheel, as an installer would leave it."""
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True, timeout=120)
    (wheel,) = folder.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(folder / "site")
    return folder / "site"


def alone(site: Path, code: str) -> str:
    """What `code` prints in a process that sees the unpacked wheel and not the repository."""
    command = [sys.executable, "-c", ALONE + code, str(ROOT), str(site)]
    ended = subprocess.run(command, cwd=site.parent, check=False, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_the_wheel_holds_every_file_of_both_packages_and_no_other(site: Path) -> None:
    def files(root: Path) -> set[str]:
        found = (path for package in PACKAGES for path in (root / package).rglob("*") if path.is_file())
        return {str(path.relative_to(root)) for path in found if "__pycache__" not in path.parts}

    pages = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")}
    examples = {f"{name}.py" for name in example_names()}
    data = {"data/README.md", "data/digits.npz", "data/shakespeare.txt", "data/tokenizer_8k.json"}
    assert files(site) == files(ROOT) | {
        *(f"jaxscale/_pages/{page}" for page in pages if not page.startswith(("api/", "build/"))),
        *(f"jaxscale/_experiments/{file}" for file in examples | data),
    }
    assert {"jaxscale/report/report.css", "jaxscale/report/report.js"} <= files(site), "what the report reads"
    assert {path.name for path in site.iterdir()} == {*PACKAGES, f"jaxscale-{jaxscale.__version__}.dist-info"}


def test_the_wheel_alone_gives_every_public_name_and_loads_jax_only_then(site: Path) -> None:
    output = alone(
        site,
        """
import jaxscale, pallas_kernels
for package in (jaxscale, pallas_kernels):
    assert site in pathlib.Path(package.__file__).parents, package.__file__
print(sorted({"jax", "jaxlib", "flax", "optax", "numpy"} & set(sys.modules)))
for name in jaxscale.__all__:
    getattr(jaxscale, name)
loaded = [m.__file__ for n, m in sys.modules.items() if n.split(".")[0] == "jaxscale"]
assert len(loaded) > 20 and all(site in pathlib.Path(file).parents for file in loaded)
""",
    )
    assert output == "[]\n"


def test_the_wheel_has_the_examples_with_their_data_by_name(site: Path) -> None:
    output = alone(
        site,
        """
import jaxscale
for name in ("shakespeare", "experiments/digits_vit.py"):
    experiment, source = jaxscale.load_file(name)
    opened = experiment.data.open(4, seed=0)
    print(experiment.name, sorted(next(opened.train())), site in pathlib.Path(source.path).parents)
""",
    )
    assert output == "shakespeare ['targets', 'tokens'] True\ndigits_vit ['images', 'labels'] True\n"


def test_the_wheel_brings_the_command(site: Path) -> None:
    output = alone(
        site,
        """
(distribution,) = importlib.metadata.distributions(name="jaxscale", path=[str(site)])
(entry,) = distribution.entry_points.select(group="console_scripts", name="jaxscale")
sys.argv = ["jaxscale", "--help"]
sys.exit(entry.load()())
""",
    )
    for word in ("train", "generate", "evaluate", "export", "report", "doctor"):
        assert word in output


def test_the_wheel_tells_its_version_and_needs(site: Path) -> None:
    (metadata,) = site.glob("*.dist-info/METADATA")
    told = Parser().parsestr(metadata.read_text())
    assert told["Version"] == jaxscale.__version__
    assert told["Requires-Python"] == ">=3.11"
    needed = {need.split(">")[0] for need in told.get_all("Requires-Dist") or [] if "extra ==" not in need}
    assert {"jax", "flax", "optax", "orbax-checkpoint", "grain", "tyro"} <= needed
