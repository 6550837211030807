"""How far `jaxscale fit` is off on train steps that were drawn so that every pair of settings occurs together.

    python experiments/benchmarks/fit_cases.py             # judge the estimates of what was recorded
    python experiments/benchmarks/fit_cases.py --write     # and write the errors on held-out cases, which fit prints
    python experiments/benchmarks/fit_cases.py --fit       # fit the packing factor of a chip to its recorded steps
    python experiments/benchmarks/fit_cases.py --record    # compile what is not in fit_cases.jsonl yet
    python experiments/benchmarks/fit_cases.py --tiny      # judge one case of each design

A case is one value of each factor: a model, a platform, a mesh, a ZeRO stage, a number of microbatches, a memory rule
and a number format. The cases are chosen greedily: each is the valid one, out of `CANDIDATES` drawn at random, that
covers the most pairs of values that no earlier case has. These are the designs:

small: models of 2 to 6 layers, most of whose steps need less than 1 GiB.
sized: models from ResNet-50 to 3 billion parameters. A candidate counts if its estimate is between `LEAST_BYTES` and
    the chip's memory, where an error decides whether a step fits.
later: the same with another seed, compiled after rules had been read off the other two.
latest: the same with a third seed, compiled after rules had been read off "later" as well.
newest: 24 more steps, compiled after rules had been read off two steps of "latest": 15 further ones of the seed of
    "later", and 9 of a fourth seed.
unseen: 24 steps of a fifth seed, compiled after rules had been read off "newest".
pipelined: pipelined steps, by nine schedules.
later pipelined: the same with another seed, compiled after a rule had been read off "pipelined".
unseen pipelined: the same with a third seed, compiled after two more rules.
unseen usual: steps on v5e, v5p and v6e in bfloat16 with another seed, for the margin that `fit` states for them.
unseen 7x: the same on 7x, compiled after the packing factor of that chip had been fitted.
newest pipelined: pipelined steps on TPU with a fourth seed, compiled after a rule had been read off a step of "unseen
    pipelined".
unseen pipelined TPU: the same with a fifth seed, compiled after a rule had been read off a step of "newest pipelined".
float32 pipelined: pipelined steps in float32 on TPU, with a sixth seed.
other models: models and machines that are in no design above.
other models pipelined: pipelined steps of these models.
asynchronous: asynchronous pipelines, compiled after rules had been read off a step of the design above, and off three
    other steps.
more other models: the same as "other models" with another seed, compiled after a rule had been read off one of these.
newest other models: the same with a third seed, compiled after cycles of unlike blocks had stopped keeping copies of
    their weights.
fresh other models: the same with a fourth seed, compiled after estimates had stopped to count donated arrays twice.
fresh GPU: steps on GPUs with another seed, of the models of the designs "sized" and "other models", compiled after a
    rule for stacks of gradients there.
fresh TPU: the same on TPUs, compiled after a rule for probabilities on v4 and v5p.
outside, outside pipelined: models, machines and meshes that are in no design above, together.
further outside: the same as "outside" with another seed, compiled after the rules that were read off it.
float32 GPU: steps in float32 under ZeRO 1 and 2 on GPUs from Hopper on, compiled after a rule for gathered weights.
    One step of each of these two is beyond its margin and has no rule yet (docs/choosing/fit.md), so neither design
    is among `UNSEEN`.

Steps on which XLA:GPU fails with its own matrix products were compiled with a library's, which pad their operands.
Their errors are printed apart, and count neither for a design nor for a margin.

If a rule is read off a case of a held-out design after all, its row holds the error of before (`error_before`), and
that error counts, and so does today's for the margins that `fit` states. `fit` prints the figures of `UNSEEN`.

Recording needs libtpu and the CUDA plugin (extras aot-tpu and aot-gpu), and about 45 s of one core per case.

References:
    Cohen, Dalal, Fredman, Patton: The AETG system, 1997 (greedy covers of pairs).
"""

import argparse
import collections
import dataclasses
import itertools
import json
import random
import statistics
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from figures import Figure, show

from jaxscale.compiler.compile import compile_report
from jaxscale.compiler.usable import usable_bytes
from jaxscale.errors import UserError
from jaxscale.pipeline.plan import PipelinePlan
from jaxscale.planning import accuracy
from jaxscale.planning.estimate import Estimate, of_step
from jaxscale.planning.program import described_step, lowered_step
from jaxscale.platforms.platform import Platform
from jaxscale.records.source import load_file
from jaxscale.state.batches import batch_shapes

MODELS = Path(__file__).with_name("fit_models.py")
RECORDING = Path(__file__).with_name("fit_cases.jsonl")
CANDIDATES = 40
LEAST_BYTES = 2 << 30

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
"""The values of each factor of the design "small"."""

SIZED_FACTORS = FACTORS | {
    "model": ("gpt2_medium", "llama_1b", "llama_3b", "vit_large", "resnet50", "plain_large", "experts_large"),
    "platform": (
        "tpu v5e:2x4", "tpu v5e:4x4", "tpu v5p:2x2x1", "tpu v6e:2x2", "tpu v6e:2x4", "tpu 7x:2x2x1", "gpu h100 x 8",
        "gpu h200 x 8", "gpu b200 x 8",
    ),
    "memory": ("none", "full", "dots", "save:2GiB"),
    "batch": ("1", "2", "4"),
}  # fmt: skip
"""The values of each factor of the design "sized"; the batch is a multiple of the model's."""

USUAL_FACTORS = SIZED_FACTORS | {
    "model": ("gpt2_medium", "llama_1b", "llama_3b", "vit_large", "experts_large"),
    "platform": ("tpu v5e:2x4", "tpu v5e:4x4", "tpu v5p:2x2x1", "tpu v6e:2x2", "tpu v6e:2x4"),
    "format": tuple(text for text in FACTORS["format"] if "float32" not in text),
}
"""The values of each factor of the design "unseen usual": steps for which `fit` states its narrowest margin."""

USUAL_7X_FACTORS = USUAL_FACTORS | {"platform": ("tpu 7x:2x2x1", "tpu 7x:2x2x2")}
"""The values of each factor of the design "unseen 7x"."""

PIPELINED_FACTORS = {
    "model": ("gpt2_medium", "llama_1b", "llama_3b", "vit_large", "experts_large"),
    "platform": (
        "tpu v5e:2x2", "tpu v5e:2x4", "tpu v5p:2x2x1", "tpu v6e:2x4", "tpu 7x:2x2x1", "gpu h100 x 4", "gpu h100 x 8",
        "gpu b200 x 8",
    ),
    "pipeline": (
        "1f1b:2x4", "1f1b:4x8", "gpipe:2x8", "lockstep:4x8", "interleaved:2x4,v=2", "zb-h1:2x4", "zb-v:2x4",
        "dualpipe-v:2x4", "chimera:2x4", "2bw:2x4",
    ),
    "stash": ("residuals", "input"),
    "mesh": ("fsdp", "data", "fsdp,tensor:2"),
    "zero": ("0", "1", "3"),
    "memory": ("none", "full", "dots"),
    "format": FACTORS["format"],
    "batch": ("1", "2"),
}  # fmt: skip
"""The values of each factor of the pipelined designs; the rest of the mesh is of one stage."""

TPU_PIPELINED_FACTORS = PIPELINED_FACTORS | {
    "platform": tuple(text for text in PIPELINED_FACTORS["platform"] if text.startswith("tpu"))
}
"""The values of each factor of the designs "newest pipelined" and "unseen pipelined TPU"."""

FLOAT32_PIPELINED_FACTORS = TPU_PIPELINED_FACTORS | {"format": ("precision=float32",)}
"""The values of each factor of the design "float32 pipelined"."""

OTHER_FACTORS = SIZED_FACTORS | {
    "model": ("gemma_2b", "qwen_7b", "gpt2_xl", "vit_huge", "resnet152", "plain_wide", "experts_many"),
    "platform": (
        "tpu v4:2x2x2", "tpu v5e:4x8", "tpu v5p:2x2x2", "tpu v5p:2x2x4", "tpu v6e:4x4", "tpu v6e:4x8", "tpu 7x:2x2x4",
        "gpu a100-80 x 8", "gpu h100 x 16", "gpu h200 x 4", "gpu b200 x 4",
    ),
}  # fmt: skip
"""The values of each factor of the design "other models": no model or machine is one of the designs' above."""

FRESH_GPU_FACTORS = SIZED_FACTORS | {
    "model": (*SIZED_FACTORS["model"], *OTHER_FACTORS["model"]),
    "platform": (
        "gpu a100-80 x 8", "gpu h100 x 8", "gpu h100 x 16", "gpu h200 x 4", "gpu h200 x 8", "gpu b200 x 4",
        "gpu b200 x 8",
    ),
}  # fmt: skip
"""The values of each factor of the design "fresh GPU"."""

FRESH_TPU_FACTORS = FRESH_GPU_FACTORS | {
    "platform": (
        "tpu v4:2x2x2", "tpu v5e:4x4", "tpu v5e:4x8", "tpu v5p:2x2x2", "tpu v5p:2x2x4", "tpu v6e:4x4", "tpu v6e:2x4",
        "tpu 7x:2x2x2",
    ),
}  # fmt: skip
"""The values of each factor of the design "fresh TPU"."""

OTHER_PIPELINED_FACTORS = PIPELINED_FACTORS | {
    "model": ("gemma_2b", "qwen_7b", "gpt2_xl", "vit_huge", "experts_many"),
    "platform": (
        "tpu v4:2x2x2", "tpu v5e:4x4", "tpu v5p:2x2x2", "tpu v6e:4x4", "tpu 7x:2x2x2", "tpu v5p:2x2x4", "tpu v6e:2x2",
        "gpu a100-80 x 8", "gpu h200 x 8",
    ),
}  # fmt: skip
"""The values of each factor of the design "other models pipelined"."""

ASYNCHRONOUS_FACTORS = PIPELINED_FACTORS | {
    "model": ("vit_large", "vit_huge", "qwen_7b"),
    "platform": (
        "tpu v4:2x2x2", "tpu v5e:2x4", "tpu v5e:4x4", "tpu v5p:2x2x2", "tpu v6e:2x4", "tpu v6e:4x4", "tpu 7x:2x2x2",
        "gpu h100 x 8",
    ),
    "pipeline": ("2bw:2x4", "2bw:4x8", "pipedream:2", "pipemare:2"),
    "mesh": ("data", "data,tensor:2", "fsdp", "fsdp,tensor:2"),
    "zero": ("0", "1"),
}  # fmt: skip
"""The values of each factor of the design "asynchronous"; these models have no weight that several stages read."""

OUTSIDE_FACTORS = SIZED_FACTORS | {
    "model": (
        "llama_8b", "phi_3b", "qwen_4b", "smol_360m", "windows_1b", "vit_base_384", "resnet101", "plain_deep",
        "experts_few",
    ),
    "platform": (
        "tpu v4:2x2x4", "tpu v5e:8x8", "tpu v5p:4x4x4", "tpu v6e:8x8", "tpu 7x:2x4x4", "gpu a100-40 x 16",
        "gpu h100 x 32", "gpu h200 x 16", "gpu b200 x 16",
    ),
    "mesh": (
        "fsdp", "data:2,fsdp", "fsdp,tensor:4", "fsdp,sequence:4", "data:2,fsdp,tensor:2", "fsdp,sequence:2,tensor:2",
    ),
    "microbatches": ("1", "4"),
    "memory": ("none", "full", "dots", "save:4GiB"),
}  # fmt: skip
"""The values of each factor of the design "outside": new models, machines, and meshes with tensor or sequence axes."""

OUTSIDE_PIPELINED_FACTORS = PIPELINED_FACTORS | {
    "model": ("llama_8b", "phi_3b", "qwen_4b", "smol_360m", "vit_base_384", "experts_few"),
    "platform": OUTSIDE_FACTORS["platform"],
    "pipeline": (
        "1f1b:4x16", "gpipe:4x8", "interleaved:4x8,v=2", "zb-h1:4x8", "zb-v:4x8", "dualpipe-v:2x8", "chimera:2x4",
    ),
    "mesh": ("fsdp", "data", "fsdp,tensor:4"),
}  # fmt: skip
"""The values of each factor of the design "outside pipelined"."""

FLOAT32_GPU_FACTORS = OUTSIDE_FACTORS | {
    "model": (*FRESH_GPU_FACTORS["model"], *OUTSIDE_FACTORS["model"]),
    "platform": ("gpu h100 x 8", "gpu h100 x 16", "gpu h200 x 8", "gpu h200 x 16", "gpu b200 x 8", "gpu b200 x 16"),
    "zero": ("1", "2"),
    "format": ("precision=float32",),
}
"""The values of each factor of the design "float32 GPU"."""


@dataclasses.dataclass(frozen=True)
class Case:
    """A train step to compile.

    Args:
        model: name of a variant of `fit_models.py`.
        platform: text of the platform.
        mesh: text of the mesh.
        fields: other fields of the plan, such as "zero=1 microbatches=2".
        batch: rows of the global batch; `None` for the model's.
    """

    model: str
    platform: str
    mesh: str
    fields: str
    batch: int | None = None

    @property
    def overrides(self) -> dict[str, str]:
        """Texts of the experiment's fields, by name."""
        text_by_name = dict(word.split("=", 1) for word in self.fields.split())
        batch_override = {} if self.batch is None else {"batch": str(self.batch)}
        return batch_override | {"plan.mesh": self.mesh} | {f"plan.{name}": text for name, text in text_by_name.items()}

    @property
    def name(self) -> str:
        """The case in one line."""
        batch_text = "" if self.batch is None else f" batch={self.batch}"
        return f"{self.model} {self.platform} {self.mesh} {self.fields}{batch_text}"


def case_of(values: dict[str, str]) -> Case:
    """Return the case with these values of the factors; the axis without a size takes the remaining devices."""
    axes = [entry.partition(":") for entry in values["mesh"].split(",")]
    fixed_count = 1
    for _, _, size_text in axes:
        fixed_count *= int(size_text or 1)
    fields = [f"{name}={values[name]}" for name in ("zero", "microbatches", "memory") if name in values]
    if "pipeline" in values:
        pipeline = PipelinePlan.parse(f"{values['pipeline']},stash={values['stash']}")
        fixed_count *= pipeline.shape()[0]
        fields.append(f"pipeline={pipeline}")
    remaining_count = Platform.parse(values["platform"]).devices // fixed_count
    mesh = ",".join(f"{axis}:{size_text or remaining_count}" for axis, _, size_text in axes)
    batch = None
    if "batch" in values:
        batch = int(values["batch"]) * load_file(MODELS, values["model"], {})[0].batch
    return Case(values["model"], values["platform"], mesh, " ".join((*fields, values["format"])), batch)


def is_valid(case: Case) -> bool:
    """Return whether the case's step can be built, and whether its estimate is of the size that its design asks for."""
    platform = Platform.parse(case.platform)
    try:
        experiment, _ = load_file(MODELS, case.model, case.overrides)
        step = described_step(experiment, platform)
    except UserError:
        return False
    if case.batch is None:
        return True
    estimated_bytes = of_step(step, batch_shapes(experiment), platform).device_bytes
    return LEAST_BYTES <= estimated_bytes <= (usable_bytes(platform) or 0)


@dataclasses.dataclass(frozen=True)
class Design:
    """Cases to draw.

    Args:
        factors: the values of each factor.
        seed: seed of the draws.
        count: number of cases.
    """

    factors: dict[str, tuple[str, ...]]
    seed: int
    count: int


DESIGNS = {
    "small": Design(FACTORS, 23, 54),
    "sized": Design(SIZED_FACTORS, 2026, 24),
    "later": Design(SIZED_FACTORS, 2027, 21),
    "latest": Design(SIZED_FACTORS, 2028, 24),
    "newest": Design(SIZED_FACTORS, 2029, 24),
    "unseen": Design(SIZED_FACTORS, 2030, 24),
    "pipelined": Design(PIPELINED_FACTORS, 2031, 24),
    "later pipelined": Design(PIPELINED_FACTORS, 2032, 24),
    "unseen pipelined": Design(PIPELINED_FACTORS, 2034, 12),
    "unseen usual": Design(USUAL_FACTORS, 2033, 16),
    "unseen 7x": Design(USUAL_7X_FACTORS, 2035, 10),
    "newest pipelined": Design(TPU_PIPELINED_FACTORS, 2036, 10),
    "unseen pipelined TPU": Design(TPU_PIPELINED_FACTORS, 2037, 10),
    "float32 pipelined": Design(FLOAT32_PIPELINED_FACTORS, 2038, 10),
    "other models": Design(OTHER_FACTORS, 2040, 24),
    "other models pipelined": Design(OTHER_PIPELINED_FACTORS, 2041, 16),
    "asynchronous": Design(ASYNCHRONOUS_FACTORS, 2042, 12),
    "more other models": Design(OTHER_FACTORS, 2043, 18),
    "newest other models": Design(OTHER_FACTORS, 2044, 18),
    "fresh other models": Design(OTHER_FACTORS, 2045, 18),
    "fresh GPU": Design(FRESH_GPU_FACTORS, 2046, 16),
    "fresh TPU": Design(FRESH_TPU_FACTORS, 2047, 12),
    "outside": Design(OUTSIDE_FACTORS, 2048, 24),
    "outside pipelined": Design(OUTSIDE_PIPELINED_FACTORS, 2049, 12),
    "further outside": Design(OUTSIDE_FACTORS, 2050, 18),
    "float32 GPU": Design(FLOAT32_GPU_FACTORS, 2051, 10),
}
UNSEEN = (
    "unseen", "unseen usual", "unseen 7x", "unseen pipelined", "unseen pipelined TPU", "float32 pipelined",
    "other models", "other models pipelined", "asynchronous", "more other models",
    "newest other models", "fresh other models", "fresh GPU", "fresh TPU", "outside", "outside pipelined",
)  # fmt: skip
"""The designs on whose cases nothing had been fitted when they were compiled. `fit` prints their errors by the kind of
step (`accuracy.StepKind`) and of platform."""
PACKED_CHIPS = ("7x",)
"""Chips with a packing factor of their own, which is fitted to the recorded steps of `PACKED_DESIGNS`."""
PACKED_DESIGNS = ("sized", "later", "latest", "newest")


def designed_cases(design: Design) -> Iterator[Case]:
    """Draw the cases of a design, in the order in which they are chosen."""
    generator = random.Random(design.seed)
    covered_pairs: set[frozenset[tuple[str, str]]] = set()
    cases: list[Case] = []
    while len(cases) < design.count:
        candidates = [
            {name: generator.choice(values) for name, values in design.factors.items()} for _ in range(CANDIDATES)
        ]
        pairs_of_candidates = [
            {frozenset(pair) for pair in itertools.combinations(candidate.items(), 2)} for candidate in candidates
        ]
        order = sorted(range(CANDIDATES), key=lambda index: -len(pairs_of_candidates[index] - covered_pairs))
        for index in order:
            case = case_of(candidates[index])
            if case not in cases and is_valid(case):
                cases.append(case)
                covered_pairs |= pairs_of_candidates[index]
                yield case
                break


def recorded_rows() -> dict[Case, dict[str, Any]]:
    """Return what the compilers reported, by case; a case that a compiler refused has only the key `refused`."""
    rows = (json.loads(line) for line in RECORDING.read_text().splitlines()) if RECORDING.exists() else ()
    return {Case(**row["case"]): row for row in rows}


def record() -> None:
    """Compile the cases that are not recorded yet, and append each one as soon as it is compiled."""
    known_cases = recorded_rows()
    recorded_counts = collections.Counter(row["design"] for row in known_cases.values())
    # a design whose cases are all recorded is not drawn again: which candidates are valid may have changed
    open_designs = {name: design for name, design in DESIGNS.items() if recorded_counts[name] < design.count}
    pairs = ((name, case) for name, design in open_designs.items() for case in designed_cases(design))
    for design_name, case in pairs:
        if case in known_cases:
            continue
        _, source = load_file(MODELS, case.model, case.overrides)
        report = compile_report(partial(lowered_step, make=source.remake), case.platform)
        row: dict[str, Any] = {"design": design_name, "case": dataclasses.asdict(case)}
        if report.device_bytes is None:
            row["refused"] = str(report.crashed or report.oom)[:200]
        else:
            row |= {"arguments": report.argument_bytes, "temporaries": report.temp_bytes}
            row |= {"device": report.device_bytes, "versions": dict(report.versions)}
        if report.added_options:
            row["added_options"] = dict(report.added_options)
        with RECORDING.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(case.name, report.device_bytes, flush=True)


def estimate_of(case: Case) -> Estimate:
    """Return the estimate of a case."""
    experiment, _ = load_file(MODELS, case.model, case.overrides)
    platform = Platform.parse(case.platform)
    return of_step(described_step(experiment, platform), batch_shapes(experiment), platform)


def relative_error(estimate: Estimate, device_bytes: int) -> float:
    """Return by how much an estimate is too high, as a share of the bytes that the compiler reports."""
    return estimate.device_bytes / device_bytes - 1


def figures_of(errors: Sequence[float], which: str) -> list[Figure]:
    """Return the figures of the errors of some cases."""
    return [
        Figure(f"programs, {which}", len(errors), "programs"),
        Figure(f"median off, {which}", statistics.median(map(abs, errors)), "", 0.05),
        Figure(f"worst off, {which}", max(map(abs, errors)), "", 0.25),
        Figure(f"worst under-estimate, {which}", -min([*errors, 0.0]), ""),
        Figure(f"beyond 15 %, {which}", sum(abs(error) > 0.15 for error in errors), "programs", 1),
    ]


def packing(case: Case, device_bytes: int) -> float:
    """Return the compiler's bytes of temporaries, divided by the estimated live bytes at the peak."""
    step_estimate = estimate_of(case)
    unpacked_bytes = step_estimate.device_bytes - step_estimate.device_bytes_by_kind.get("packing", 0)
    return 1 + (device_bytes - unpacked_bytes) / step_estimate.timeline.peak_bytes


def fit_packing(rows: dict[Case, dict[str, Any]]) -> None:
    """Write the median of the packing of each chip that has a factor of its own."""
    sections = json.loads(accuracy.FILE.read_text())
    for chip_name in PACKED_CHIPS:
        packings = [
            packing(case, row["device"])
            for case, row in rows.items()
            if row["design"] in PACKED_DESIGNS and Platform.parse(case.platform).chip.name == chip_name
        ]
        sections["factors"][chip_name] = {"packing": round(statistics.median(packings), 3)}
        print(f"packing on {chip_name}: {sections['factors'][chip_name]['packing']}, {len(packings)} programs")
    accuracy.FILE.write_text(json.dumps(sections, indent=2) + "\n")


def main() -> None:
    """Record, or judge."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", action="store_true", help="compile what was not recorded yet")
    parser.add_argument("--fit", action="store_true", help="write the packing factors of chips; judge them afterwards")
    parser.add_argument("--write", action="store_true", help="write what fit prints")
    parser.add_argument("--tiny", action="store_true", help="one case of each design")
    args = parser.parse_args()
    if args.record:
        record()
        return
    rows = {case: row for case, row in recorded_rows().items() if "device" in row}
    if args.fit:
        fit_packing(rows)
        return
    cases_by_design = {name: [case for case, row in rows.items() if row["design"] == name] for name in DESIGNS}
    figures = []
    # by kind of step and of platform, the error that counts and the error of today
    errors_by_kinds: dict[tuple[accuracy.StepKind, str], list[tuple[float, float]]] = collections.defaultdict(list)
    replaced_errors = []  # of steps on which the compiler fails without an option
    for which, cases in cases_by_design.items():
        errors = []
        for case in cases[: 1 if args.tiny else None]:
            estimate = estimate_of(case)
            error = relative_error(estimate, rows[case]["device"])
            if "added_options" in rows[case]:
                replaced_errors.append(error)
                print(f"{error:+8.1%}  {which:16}  {case.name}  (with a library's products)", flush=True)
                continue
            errors.append(rows[case].get("error_before", error))
            before = f"  ({errors[-1]:+.1%} before its rule)" if "error_before" in rows[case] else ""
            print(f"{error:+8.1%}  {which:16}  {case.name}{before}", flush=True)
            if which in UNSEEN:
                errors_by_kinds[estimate.step_kind, estimate.chip_kind].append((errors[-1], error))
        figures += figures_of(errors, which) if errors else []
    figures += figures_of(replaced_errors, "with a library's products") if replaced_errors else []
    sections = json.loads(accuracy.FILE.read_text())
    sections = {name: section for name, section in sections.items() if not name.startswith("held out")}
    for (step_kind, kind), pairs in sorted(errors_by_kinds.items()):
        errors, errors_today = zip(*pairs, strict=True)
        section = "held out" if step_kind == "any" else f"held out, {step_kind}"
        figures += figures_of(errors, f"{section}, {kind}")
        margin = accuracy.margin(kind, step_kind)
        beyond_count = sum(abs(error) > margin for error in errors_today)
        figures.append(Figure(f"beyond the margin today, {section}, {kind}", beyond_count, "programs", 0))
        worst, worst_today = (max(map(abs, values)) for values in (errors, errors_today))
        sections.setdefault(section, {})[kind] = {
            "programs": len(errors),
            "median": statistics.median(map(abs, errors)),
            "worst": worst,
            "worst_today": None if worst_today >= worst else worst_today,
        }
    show(figures, "Estimates of drawn train steps against their compilers")
    if args.write and not args.tiny:
        accuracy.FILE.write_text(json.dumps(sections, indent=2) + "\n")


if __name__ == "__main__":
    main()
