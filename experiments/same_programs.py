"""Whether two checkouts build the same programs, train the same losses and take the same decisions.

    python experiments/same_programs.py BEFORE AFTER                        records both, then compares
    python experiments/same_programs.py --record BEFORE -o before           one of them: 40 plans, 42 decisions
    python experiments/same_programs.py --compare before after              two records
    python experiments/same_programs.py --cover 40 --seed 18                chooses the plans of same_programs.json

Both run under this Python, JAX and machine, with the same flags. A plan is *identical* if the optimized HLO of all its
programs is, without metadata, headers and the names of instructions. Otherwise it is *alike* if FLOP and collectives
(kind, groups, type) are equal and bytes differ by at most 1 %; in either case the losses and norms of three steps
differ by at most 1e-6. What is neither is a fault, and the exit code is then 1. With libtpu, ten of the plans are
compiled for a TPU v5e too. Programs whose HLO differs lie in the records' folders, as text, to be compared by eye.
"""

import argparse
import collections
import dataclasses
import gzip
import hashlib
import importlib
import importlib.util
import itertools
import json
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

PLANS = Path(__file__).with_suffix(".json")
"""The plans: text by dotted path, rows and length, as `composing.draws.Draw` has them."""
BESIDE = ("stages=", "stash=", "lowering=", "anneal=", "correction=", "synchronous_steps=", "attention=", "loss_chunk=")
"""Options of pipelines and kernels that version 1 has beside them."""
SPELLED = {
    "--plan.optimizer-state": "--plan.offload.optimizer-state",
    "--plan.loss-chunk ": "--plan.kernels loss_chunk=",
    "add stash input": "add the option stash=input",
    "what would help most (of fit and train alike)": "changes that save the most (flags of fit and train)",
    "the one that needs least needs": "the smallest needs",
    "what would lower it": "ways to lower it",
    "stages fits; the smallest needs": "stages fits. The smallest needs",
    "no candidate fits; the nearest is": "no candidate fits. The nearest is",
    "); ways to lower it": "). Ways to lower it",
}
"""Words of decisions that earlier versions spell otherwise."""
FLAGS = (
    "--xla_force_host_platform_device_count=8 --xla_disable_hlo_passes=all-reduce-promotion "
    "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1"
    + " --xla_cpu_use_fusion_emitters=false"
    * (version("jaxlib") < "0.11")
)
STEPS = 3
ON_TPU = 10
TPU = "tpu v5e:2x4"
BYTES, LOSSES = 0.01, 1e-6
"""Relative differences allowed."""
COLLECTIVE = re.compile(
    r"= (\(?[^=]*?\)?) (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute|ragged-all-to-all)"
    r"(?:-start)?\(.*?(?:replica_groups|source_target_pairs)=(\S+?),? "
)
EXPERIMENTS = ("shakespeare", "digits_vit", "digits_resnet", "llama_1b", "llama_8b", "llama_70b", "unet_chain")
PLATFORMS = ("tpu v5e:4x4", "gpu h100 x 8")
QUESTIONS = ({}, {"memory": "fit"}, {"pipeline": "auto:4"})


def main() -> int:
    """Record or compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkouts", nargs="*", type=Path, help="before and after")
    parser.add_argument("--record", type=Path, metavar="CHECKOUT", help="record one checkout")
    parser.add_argument("--compare", nargs=2, type=Path, metavar="FOLDER", help="two records")
    parser.add_argument("--cover", type=int, metavar="N", help="choose N plans that cover most pairs of techniques")
    parser.add_argument("--seed", type=int, default=18, help="of the draws among which plans are chosen")
    parser.add_argument("--only", nargs="+", help="names of plans")
    parser.add_argument("-o", "--out", type=Path, default=Path("record"), help="folder of a record")
    parser.add_argument("--child", choices=("programs", "tpu", "decisions"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.cover:
        return cover(arguments.cover, arguments.seed)
    if arguments.child:
        sys.path[:0] = [str(arguments.record), str(arguments.record / "experiments")]
        return {"programs": programs, "tpu": programs_of_tpu, "decisions": decisions}[arguments.child](arguments)
    if arguments.record:
        return record(arguments.record, arguments.out, arguments.only)
    if arguments.compare:
        return compare(*arguments.compare)
    if len(arguments.checkouts) != 2:
        parser.error("expected two checkouts, or one of --record, --compare and --cover")
    folders = [arguments.out / name for name in ("before", "after")]
    failed = [record(*pair, arguments.only) for pair in zip(arguments.checkouts, folders, strict=True)]
    return max(*failed, compare(*folders))


def record(checkout: Path, out: Path, only: Sequence[str] | None) -> int:
    """Record a checkout, each kind of record by a process whose first import is the checkout's."""
    out.mkdir(parents=True, exist_ok=True)
    environment = {name: text for name, text in os.environ.items() if name not in ("XLA_FLAGS", "PYTHONPATH")}
    environment |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": FLAGS, "PYTHONPATH": str(checkout.resolve())}
    kinds = ["programs", "decisions"] + ["tpu"] * (importlib.util.find_spec("libtpu") is not None)
    exits = []
    for kind in kinds:
        command = [sys.executable, __file__, "--child", kind, "--record", str(checkout.resolve()), "-o", str(out)]
        exits.append(subprocess.run([*command, *(["--only", *only] if only else [])], env=environment).returncode)
    return max(exits)


def draws(only: Sequence[str] | None) -> dict[str, Any]:
    """The plans as draws of this checkout's harness, by name."""
    from composing.draws import Draw

    rows: list[dict[str, Any]] = json.loads(PLANS.read_text())
    named: dict[str, Any] = {}
    for number, row in enumerate(rows):
        texts: dict[str, str] = row.pop("techniques")
        if only is None or str(number) in only:
            named[str(number)] = Draw(tuple(sorted(of_checkout(texts).items())), **row)
    return named


def _either(*paths: str) -> Any:
    """The module at the first path that this checkout has."""
    path = next(
        path for path in paths if importlib.util.find_spec(path.rpartition(".")[0]) and importlib.util.find_spec(path)
    )
    return importlib.import_module(path)


def of_checkout(texts: dict[str, str]) -> dict[str, str]:
    """The techniques as this checkout spells them: plans of version 1 have no groups."""
    Plan = _either("jaxscale.recipe.plan", "jaxscale.step.plan").Plan

    if "offload" in {field.name for field in dataclasses.fields(Plan)}:
        return texts
    spelled: dict[str, str] = {}
    for path, text in texts.items():
        if path == "plan.state.moments":
            spelled["plan.state"] = text
        elif path.startswith(("plan.offload.", "plan.state.")):
            spelled[f"plan.{path.rpartition('.')[2]}"] = text
        elif path in ("plan.pipeline", "plan.kernels"):
            beside = [word for word in text.split(",") if word.startswith(BESIDE) and word != "attention=reference"]
            options = dict(word.split("=") for word in beside)
            rest = [word for word in text.split(",") if word not in beside]
            spelled |= {f"plan.{name}": value.replace("+", ",") for name, value in options.items()}
            spelled |= {path: ",".join(rest)} if rest else {}
        else:
            spelled[path] = text
    return spelled


def write(out: Path, kind: str, rows: dict[str, Any]) -> None:
    """A record, a plan a line."""
    lines = (f" {json.dumps(name)}: {json.dumps(row, sort_keys=True)}" for name, row in rows.items())
    (out / f"{kind}.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")


def programs(arguments: argparse.Namespace) -> int:
    """Compile each plan for 8 virtual devices, and train it three steps."""
    import jax.stages
    from composing.twins import compiled, experiment_of, train

    executables: list[Any] = []
    original = jax.stages.Lowered.compile

    def kept(self: Any, *args: Any, **options: Any) -> Any:
        executables.append(original(self, *args, **options))
        return executables[-1]

    jax.stages.Lowered.compile = kept
    rows: dict[str, Any] = {}
    for name, one in draws(arguments.only).items():
        executables.clear()
        try:
            compiled(experiment_of(one), tuple(sorted(one.plan.items())))
            texts = [stripped(executable.as_text()) for executable in executables]
            figures = [measured(executable, text) for executable, text in zip(executables, texts, strict=True)]
            trained = train(one, one.plan, steps=(0, STEPS))
            losses = {kind: [value.hex() for value in getattr(trained, kind)] for kind in ("losses", "norms")}
            rows[name] = {"plan": str(one), "programs": figures, **losses}
            with gzip.open(arguments.out / f"{name}.hlo.gz", "wt") as file:
                file.write("\n\n".join(texts))
        except Exception as error:  # is the finding
            rows[name] = {"plan": str(one), "error": f"{type(error).__name__}: {error}"[:500]}
        print(f"{name:>4} {rows[name].get('error', 'recorded')[:100]}  {one}", flush=True)
        write(arguments.out, "programs", rows)
    return 0


def stripped(text: str) -> str:
    """Optimized HLO without header, tables of the source, metadata and names.

    Example:
        >>> print(stripped('HloModule m\\n\\nENTRY %e.1 (p.2: f32[]) -> f32[] {\\n'
        ...                '  ROOT %add.9 = f32[] add(%p.2, %p.2), metadata={op_name="a/b{c}"}\\n}'))
        ENTRY %0 (%1: f32[]) -> f32[] {
          ROOT %2 = f32[] add(%1, %1)
        }
    """
    start = re.search(r"^(?:ENTRY )?%?[\w.-]+ \(.*\{$", text, re.MULTILINE)
    text = text[start.start() :] if start else text
    text = re.sub(r',? ?metadata=\{(?:[^"{}]|"(?:[^"\\]|\\.)*")*\}', "", text)
    text = re.sub(r"(?<=[(, ])([\w.-]+)(?=: (?:\(|[a-z]+\d*\w*\[|token))", r"%\1", text)  # parameters in signatures
    numbers: dict[str, str] = {}
    return re.sub(r"%+[\w.-]+", lambda name: numbers.setdefault(name[0].lstrip("%"), f"%{len(numbers)}"), text)


def measured(executable: Any, text: str) -> dict[str, Any]:
    """FLOP, bytes and collectives of a program."""
    memory, cost = executable.memory_analysis(), executable.cost_analysis() or {}
    sent = collections.Counter(
        f"{kind} {groups} {re.sub(r'{[^}]*}', '', shape)}" for shape, kind, groups in COLLECTIVE.findall(text)
    )
    return {
        "hlo": hashlib.sha256(text.encode()).hexdigest(),
        "flop": cost.get("flops", 0.0),
        "temp": memory.temp_size_in_bytes,
        "arguments": memory.argument_size_in_bytes,
        "collectives": dict(sorted(sent.items())),
    }


def made(name: str) -> Any:
    """The experiment of a plan: a recipe that pickles by name."""
    from composing.twins import experiment_of

    return experiment_of(draws([name])[name])


def programs_of_tpu(arguments: argparse.Namespace) -> int:
    """What the TPU's compiler reports of the first plans that it takes."""
    import functools

    from composing.twins import plan_of

    compile_report = _either("jaxscale.compiler.compile", "jaxscale.platforms.compile").compile_report
    from jaxscale.planning.program import lowered_step
    from jaxscale.platforms.platform import Platform

    rows: dict[str, Any] = {}
    for name, one in draws(arguments.only).items():
        if len(rows) == ON_TPU:
            break
        recipe = functools.partial(lowered_step, make=functools.partial(made, name), plan=plan_of(one.plan))
        try:
            report = compile_report(recipe, Platform.parse(TPU), cache=False)
        except Exception as error:  # the plan is refused there
            print(f"{name:>4} {type(error).__name__}: {str(error)[:100]}", flush=True)
            continue
        sent = collections.Counter(f"{c.kind} {c.axes} {c.bytes} {c.count}" for c in report.collectives)
        figures = {"flop": report.flop, "temp": report.temp_bytes, "arguments": report.argument_bytes}
        rows[name] = {"plan": str(one), "programs": [{"hlo": "", **figures, "collectives": dict(sorted(sent.items()))}]}
        print(f"{name:>4} recorded for {TPU}  {one}", flush=True)
        write(arguments.out, "tpu", rows)
    return 0


def decisions(arguments: argparse.Namespace) -> int:
    """What `fit` answers, with the memory plans and pipelines that it chooses."""
    from jaxscale import fit
    from jaxscale.errors import UserError
    from jaxscale.values import override

    rows: dict[str, Any] = {}
    for name, platform, question in itertools.product(EXPERIMENTS, PLATFORMS, QUESTIONS):
        experiment = runpy.run_path(str(arguments.record / "experiments" / f"{name}.py"))["experiment"]()
        try:
            answer = str(fit(experiment, platform, override(experiment.plan, question)))
        except UserError as error:
            answer = f"refused: {error}"
        rows[f"{name} on {platform} {question}"] = answer
    write(arguments.out, "decisions", rows)
    print(f"     {len(rows)} decisions", flush=True)
    return 0


def compare(before: Path, after: Path) -> int:
    """Print what differs between two records, and what is a fault."""
    counts: collections.Counter[str] = collections.Counter()
    for kind in ("programs", "tpu"):
        if not all((folder / f"{kind}.json").exists() for folder in (before, after)):
            continue
        old, new = (json.loads((folder / f"{kind}.json").read_text()) for folder in (before, after))
        for name in {**old, **new}:
            verdict, reason = compared(old.get(name), new.get(name))
            counts[f"{kind} {verdict}"] += 1
            if verdict != "identical":
                print(f"{kind} {name}: {verdict}, {reason}\n     {old.get(name, {}).get('plan')}")
    old, new = (json.loads((folder / "decisions.json").read_text()) for folder in (before, after))
    for name in {**old, **new}:
        same = respelled(old.get(name)) == respelled(new.get(name))
        counts["decisions " + ("identical" if same else "other")] += 1
        if not same:
            print(f"{name}: before\n{old.get(name)}\nafter\n{new.get(name)}")
    print(json.dumps(counts))
    return int(any(word.endswith(("fault", "other")) for word in counts))


def respelled(text: str | None) -> str:
    """A decision with the flags of version 1 as they are today, and columns without their widths."""
    for flag, today in SPELLED.items():
        text = (text or "").replace(flag, today)
    return re.sub(" +", " ", text or "")


def compared(old: dict[str, Any] | None, new: dict[str, Any] | None) -> tuple[str, str]:
    """A verdict on a plan's two records, and its reason."""
    if old is None or new is None:
        return "fault", "one record lacks it"
    if "error" in old or "error" in new:
        same = old.get("error") == new.get("error")
        return ("identical" if same else "fault"), f"{old.get('error')}; {new.get('error')}"
    for kind in ("losses", "norms"):
        for a, b in zip(map(float.fromhex, old.get(kind, [])), map(float.fromhex, new.get(kind, [])), strict=True):
            if abs(a - b) > LOSSES * abs(a):
                return "fault", f"{kind}: {a!r} and {b!r}"
    if old["programs"] == new["programs"]:
        return "identical", ""
    if len(old["programs"]) != len(new["programs"]):
        return "fault", f"{len(old['programs'])} and {len(new['programs'])} programs"
    reasons = []
    for a, b in zip(old["programs"], new["programs"], strict=True):
        for figure in ("flop", "collectives"):
            if a[figure] != b[figure]:
                return "fault", f"{figure}: {a[figure]} and {b[figure]}"
        for figure in ("temp", "arguments"):
            if abs(a[figure] - b[figure]) > BYTES * a[figure]:
                return "fault", f"{figure}: {a[figure]} and {b[figure]} bytes"
            reasons += [f"{figure} {a[figure]} and {b[figure]} bytes"] * (a[figure] != b[figure])
    return "alike", "; ".join(["HLO differs", *reasons])


def cover(count: int, seed: int) -> int:
    """Choose plans by the pairs of techniques that none before has, among 1,200 draws that are not refused."""
    from composing.draws import draw
    from composing.twins import built

    from jaxscale.errors import UserError

    rows: list[tuple[Any, set[Any]]] = []
    for number in range(1200):
        one = dataclasses.replace(draw(seed, number), length=64, rows=1)
        techniques = sorted({*one.plan.items(), ("optimizer", one.optimizer["name"])} - {("mesh", one.plan["mesh"])})
        techniques += [("axis", axis.partition(":")[0]) for axis in one.plan["mesh"].split(",")]
        labels = {(name, text.partition(":")[0].partition(",")[0]) for name, text in techniques}
        rows.append((one, set(itertools.combinations(sorted(labels), 2)) | {(label,) for label in labels}))
    covered: set[Any] = set()
    chosen: list[Any] = []
    while len(chosen) < count and rows:
        rows.sort(key=lambda row: len(row[1] - covered) + 9 * len({p for p in row[1] - covered if len(p) == 1}))
        one, labels = rows.pop()
        try:
            built(one)
        except UserError:
            continue
        chosen.append(one)
        covered |= labels
    fields = [{**dataclasses.asdict(one), "techniques": dict(one.techniques)} for one in chosen]
    PLANS.write_text("[\n" + ",\n".join(f" {json.dumps(row)}" for row in fields) + "\n]\n")
    print(f"{len(covered)} techniques and pairs by {len(chosen)} plans")
    return 0


if __name__ == "__main__":
    sys.exit(main())
