"""Train steps on which estimates are judged, drawn so that every pair of settings occurs together.

    python experiments/benchmarks/fit_cases.py      # list the cases, and which of them nothing may be fitted on

A case is one value of each factor: a model, a platform, a mesh, a ZeRO stage, a number of microbatches, a memory rule
and a number format. The cases are chosen greedily: each is the valid one, out of `CANDIDATES` drawn at random, that
covers the most pairs of values that no earlier case has. A case is held out, so that nothing may be fitted on it, if
the SHA-256 of its name is divisible by 3.

References:
    Cohen, Dalal, Fredman, Patton: The AETG system, 1997 (greedy covers of pairs).
"""

import dataclasses
import hashlib
import itertools
import random
from pathlib import Path

from jaxscale.errors import UserError
from jaxscale.planning.program import described_step
from jaxscale.platforms.platform import Platform
from jaxscale.records.source import load_file

MODELS = Path(__file__).with_name("fit_models.py")
SEED = 23
COUNT = 54
CANDIDATES = 40

FACTORS: dict[str, tuple[str, ...]] = {
    "model": (
        "heads64", "heads80", "heads96", "heads128", "heads256", "grouped", "plain", "unrolled", "image",
        "convolutions", "experts",
    ),
    "platform": (
        "tpu v5e:2x2", "tpu v5e:2x4", "tpu v5p:2x2x1", "tpu v6e:2x2", "tpu v6e:2x4", "tpu 7x:2x2x1", "gpu h100 x 4",
        "gpu h100 x 8", "gpu h200 x 8", "gpu b200 x 8",
    ),
    "mesh": ("fsdp", "data", "fsdp,tensor:2", "fsdp,sequence:2", "data:2,fsdp"),
    "zero": ("0", "1", "2", "3"),
    "microbatches": ("1", "2", "8"),
    "memory": ("none", "full", "dots", "save:64MiB"),
    "format": (
        "precision=bfloat16", "precision=float32", "precision=bfloat16 state.moments=int8",
        "precision=bfloat16 state.master=split",
    ),
}  # fmt: skip
"""The values of each factor."""


@dataclasses.dataclass(frozen=True)
class Case:
    """A train step to compile.

    Args:
        model: name of a variant of `fit_models.py`.
        platform: text of the platform.
        mesh: text of the mesh.
        fields: other fields of the plan, such as "zero=1 microbatches=2".
    """

    model: str
    platform: str
    mesh: str
    fields: str

    @property
    def overrides(self) -> dict[str, str]:
        """Texts of the experiment's fields, by name."""
        text_by_name = dict(word.split("=", 1) for word in self.fields.split())
        return {"plan.mesh": self.mesh} | {f"plan.{name}": text for name, text in text_by_name.items()}

    @property
    def name(self) -> str:
        """The case in one line."""
        return f"{self.model} {self.platform} {self.mesh} {self.fields}"

    @property
    def is_held_out(self) -> bool:
        """Whether nothing may be fitted on this case."""
        return int(hashlib.sha256(self.name.encode()).hexdigest(), 16) % 3 == 0


def case_of(values: dict[str, str]) -> Case:
    """Return the case with these values of the factors; the axis without a size takes the remaining devices."""
    axes = [entry.partition(":") for entry in values["mesh"].split(",")]
    fixed_count = 1
    for _, _, size_text in axes:
        fixed_count *= int(size_text or 1)
    remaining_count = Platform.parse(values["platform"]).devices // fixed_count
    mesh = ",".join(f"{axis}:{size_text or remaining_count}" for axis, _, size_text in axes)
    fields = [f"{name}={values[name]}" for name in ("zero", "microbatches", "memory")]
    return Case(values["model"], values["platform"], mesh, " ".join((*fields, values["format"])))


def is_valid(case: Case) -> bool:
    """Return whether the case's step can be built."""
    try:
        experiment, _ = load_file(MODELS, case.model, case.overrides)
        described_step(experiment, Platform.parse(case.platform))
    except UserError:
        return False
    return True


def designed_cases(count: int = COUNT, seed: int = SEED) -> list[Case]:
    """Draw the cases of the design.

    Args:
        count: number of cases.
        seed: seed of the draws.

    Returns:
        The cases, in the order in which they were chosen.
    """
    generator = random.Random(seed)
    covered_pairs: set[frozenset[tuple[str, str]]] = set()
    cases: list[Case] = []
    while len(cases) < count:
        candidates = [{name: generator.choice(values) for name, values in FACTORS.items()} for _ in range(CANDIDATES)]
        pairs_of_candidates = [
            {frozenset(pair) for pair in itertools.combinations(candidate.items(), 2)} for candidate in candidates
        ]
        order = sorted(range(CANDIDATES), key=lambda index: -len(pairs_of_candidates[index] - covered_pairs))
        for index in order:
            case = case_of(candidates[index])
            if case not in cases and is_valid(case):
                cases.append(case)
                covered_pairs |= pairs_of_candidates[index]
                break
    return cases


if __name__ == "__main__":
    for designed_case in designed_cases():
        print("held out" if designed_case.is_held_out else "        ", designed_case.name)
