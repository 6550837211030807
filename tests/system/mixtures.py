"""Mixtures of techniques: which of them go together is asked of the house itself, which refuses or builds."""

import random
import shlex
from collections.abc import Iterator
from pathlib import Path

from jaxscale.cli import arguments
from jaxscale.cli.experiment_commands import Train, load_experiment
from jaxscale.errors import UserError
from jaxscale.step.build import build
from tests.system.techniques import TECHNIQUES, Technique

LAYOUTS = (
    "--plan.mesh 1",
    "--plan.mesh data:4",
    "--plan.mesh fsdp:4 --plan.zero 1",
    "--plan.mesh fsdp:4 --plan.zero 3",
    "--plan.mesh data:2,fsdp:2 --plan.zero 2",
    "--plan.mesh replica:2,fsdp:2 --plan.zero 3",
    "--plan.mesh fsdp:2,tensor:2 --plan.zero 3 --plan.sequence-parallel True",
    "--plan.mesh data:2,tensor:2",
    "--plan.mesh data:2,sequence:2",
)
"""Those that a mixture without a technique of a layout of its own takes one of."""


def mixture(number: int, file: Path) -> Iterator[tuple[str, str]]:
    """Flags of 3 to 6 techniques that are accepted together, and of their layout; then the same with one fewer.

    Args:
        number: of the mixture: the same one each time.
        file: the experiment file.
    """
    chance = random.Random(number)
    drawn = [technique for technique in TECHNIQUES if technique.mixes]
    chance.shuffle(drawn)
    wanted, layout = chance.randint(3, 6), chance.choice(LAYOUTS)
    taken: list[Technique] = []
    for technique in drawn:
        clash = _fields(technique.flags) & {field for other in taken for field in _fields(other.flags)}
        there = layout if technique.one else technique.four
        if clash or (there != layout and any(not other.one for other in taken)):
            continue
        flags = " ".join(other.flags for other in (*taken, technique))
        try:
            _build(file, f"{flags} {there}")
        except UserError:
            continue
        taken, layout = [*taken, technique], there
        if len(taken) == wanted:
            break
    while taken:
        yield " ".join(technique.flags for technique in taken), layout
        taken.pop()


def _fields(flags: str) -> set[str]:
    """What flags set."""
    return {word for word in flags.split() if word.startswith("--")}


def _build(file: Path, flags: str) -> None:
    given = arguments.read(["train", str(file), *shlex.split(flags)])
    experiment, _ = load_experiment(Train(**given.values), given.fields)
    build(experiment)
