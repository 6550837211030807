"""The folder in which each wild command line runs: an experiment, a cluster's file, a plan, and misleading files."""

from pathlib import Path

from fault_injection.wild_values import write_data

EXPERIMENT = '''
"""A tiny experiment."""
import dataclasses
from pathlib import Path

from jaxscale import Experiment, Plan
from jaxscale.data import Text
from jaxscale.models import Decoder
from jaxscale.recipe.experiment import Checkpointing, Evaluation, Samples


def experiment():
    """Two layers."""
    return Experiment(
        name="tiny",
        model=Decoder(vocab=256, context=8, layers=2, embed=8, heads=2),
        data=Text(Path(__file__).parent / "text.txt", context=8),
        steps=2,
        batch=8,
        plan=Plan(mesh="data:2"),
        evaluation=Evaluation(every=0, batches=1),
        samples=Samples(prompts=()),
        checkpoint=Checkpointing(every=2, minutes=None),
    )


def piped():
    """Two stages."""
    return dataclasses.replace(experiment(), plan=Plan(pipeline="1f1b:2x2"))


VARIANTS = {"piped": piped}
'''
FILES: dict[str, str] = {
    "exp.py": EXPERIMENT,
    "syntax.py": "def experiment(:\n",
    "raises.py": "def experiment():\n    return 1 / 0\n",
    "none.py": "x = 1\n",
    "number.py": "def experiment():\n    return 3\n",
    "plan.json": '{"version": 2, "mesh": "data:2", "zero": 0}',
    "odd.json": '{"version": 2, "mesh": {"data": "²"}, "memory": 3}',
    "list.json": "[[[]]]",
    "cluster.py": "from jaxscale.launch import Cluster, Slurm\ncluster = Cluster('gpu h100 x 16', Slurm())\n",
    "local.py": "from jaxscale.launch import Cluster, Local\ncluster = Cluster('cpu x 2', Local(2))\n",
    "schedule.csv": "0F0,0F1,0B0,0B1\n1F0,1F1,1B0,1B1\n",
    "odd.csv": "0F0,²F1,0B99999999999\n",
}
"""Files of the folder in which each line runs."""


def write_template(folder: Path) -> None:
    """Write the folder in which each line runs."""
    write_data(folder)
    for name, text in FILES.items():
        (folder / name).write_text(text)
    for name in ("folder", "empty_run", "holds_json", "folder.py", "folder.html", "home"):
        (folder / name).mkdir()
    (folder / "holds_json" / "experiment.json").write_text('{"name": "²", "model": {"type": 3}}')
    (folder / "loop").symlink_to("loop")
