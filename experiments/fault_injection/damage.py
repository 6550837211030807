"""Damage to every file of a run directory, one file at a time, and what commands make of the run afterwards.

A case copies a finished run, or one whose last checkpoint is gone, and damages a file or a folder of the run or of the
cache of tokens. Then, in three of five cases, a command reads the run (`generate`, `evaluate`, `report`, `export` or
`status`), and `train` continues it. Sound is what an undamaged run gives, with a message if an older checkpoint was
taken, or one error with exit code 2. After the last step the arrays, as Orbax alone reads them, must be the undisturbed
run's. Never sound are a traceback, a hang, 2 GB of memory, a change of another file, or other content without a
message.

The commands run in one process, which builds and compiles each step once and is started again after a hang or a crash.
"""

import contextlib
import dataclasses
import hashlib
import os
import random
import re
import shutil
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fault_injection.forks import STEPS, Ended, Worker, drop_root_reading, run_command, warm_up, write_experiment
from fault_injection.kills import described

from jaxscale.records.attempts import Attempt, write_attempt

VARIANTS = ("plain", "int8", "diloco")
COMMANDS = ("generate", "evaluate", "report", "export", "status")
"""Commands that read a run, in turn."""
LIMIT_SECONDS = 60.0
"""Longest time of a command on a busy machine; a longer one counts as hung."""
LIMIT_BYTES = 2_000_000_000
HUGE_BYTES = 8 << 30
REWRITTEN = re.compile(
    r"(experiment|plan|layout|memory|tokenizer|sums)\.json|source/.*|report\.html|lock|processes/rank-.*|memory_copies"
)
"""Files of a run that `train` writes again."""
GROWING = ("metrics.jsonl", "samples.txt")
"""Files of a run to which `train` appends, after it has removed a torn last line."""


def delete(path: Path, chance: random.Random, run: Path) -> None:
    """Remove a file or folder."""
    shutil.rmtree(path) if path.is_dir() else path.unlink()


def _write(path: Path, content: bytes) -> None:
    """Write a file in the place of a file or folder."""
    if path.is_dir():
        shutil.rmtree(path)
    path.write_bytes(content)


def _content(path: Path) -> bytes:
    return path.read_bytes() if path.is_file() else b""


def empty(path: Path, chance: random.Random, run: Path) -> None:
    """Leave no byte of a file, or of a folder no file."""
    if path.is_dir():
        shutil.rmtree(path)
        path.mkdir()
    else:
        path.write_bytes(b"")


def cut(path: Path, chance: random.Random, run: Path) -> None:
    """Cut a file at a random byte."""
    content = _content(path)
    _write(path, content[: chance.randrange(max(1, len(content)))])


def flip_bit(path: Path, chance: random.Random, run: Path) -> None:
    """Flip one bit."""
    content = bytearray(_content(path) or b"\0")
    content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    _write(path, bytes(content))


def change_byte(path: Path, chance: random.Random, run: Path) -> None:
    """Set one byte to a printable character."""
    content = bytearray(_content(path) or b"\0")
    content[chance.randrange(len(content))] = chance.choice(b'0123456789abz"{}[],.-\n ')
    _write(path, bytes(content))


def noise(path: Path, chance: random.Random, run: Path) -> None:
    """Replace a file by random bytes."""
    _write(path, chance.randbytes(chance.randint(1, 2000)))


def not_utf8(path: Path, chance: random.Random, run: Path) -> None:
    """Put bytes that are not UTF-8 into a file."""
    content = _content(path)
    position = chance.randrange(len(content) + 1)
    _write(path, content[:position] + b"\xff\xfe\x80" + content[position:])


def folder(path: Path, chance: random.Random, run: Path) -> None:
    """Put a folder into the place of a file, and a file into the place of a folder."""
    is_dir = path.is_dir()
    delete(path, chance, run)
    path.write_text("a file") if is_dir else path.mkdir()


def other_file(path: Path, chance: random.Random, run: Path) -> None:
    """Replace a file by another one of the run."""
    _write(path, _content(_other(path, chance, run)))


def _other(path: Path, chance: random.Random, run: Path) -> Path:
    """Return another file of the run; for one of a checkpoint perhaps the same file of another step."""
    files = [other for other in sorted(run.rglob("*")) if other.is_file() and other != path]
    if "checkpoints" in path.parts and chance.random() < 0.5:
        files = [other for other in files if other.name == path.name and "checkpoints" in other.parts] or files
    return chance.choice(files)


def _link(path: Path, target: Any) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    path.symlink_to(target)


def dangling(path: Path, chance: random.Random, run: Path) -> None:
    """Link to what does not exist."""
    _link(path, "no-such-file")


def to_zero(path: Path, chance: random.Random, run: Path) -> None:
    """Link to a device that never ends."""
    _link(path, "/dev/zero")


def to_itself(path: Path, chance: random.Random, run: Path) -> None:
    """Link to itself."""
    _link(path, path.name)


def to_other(path: Path, chance: random.Random, run: Path) -> None:
    """Link to another file of the run; a checkpoint or its folder links to another step's."""
    steps = [step for step in sorted((run / "checkpoints").iterdir()) if step != path]
    _link(path, chance.choice(steps) if path.is_dir() else _other(path, chance, run))


def pipe(path: Path, chance: random.Random, run: Path) -> None:
    """Put a pipe, which nobody writes to, into the place of a file."""
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    os.mkfifo(path)


def huge(path: Path, chance: random.Random, run: Path) -> None:
    """Let a file grow to 8 GiB of zeros that take no room."""
    if path.is_file():
        os.truncate(path, HUGE_BYTES)
    else:
        cut(path, chance, run)


def unreadable(path: Path, chance: random.Random, run: Path) -> None:
    """Forbid to read and to write a file or folder."""
    path.chmod(0)


def renamed(path: Path, chance: random.Random, run: Path) -> None:
    """Rename a checkpoint to another step, or swap two of them; rename another file."""
    steps = sorted((run / "checkpoints").iterdir())
    if path not in steps:
        path.rename(path.with_name(path.name + ".old"))
        return
    other = chance.choice([step for step in steps if step != path])
    name = chance.choice([other.name, "00000099", "99999999999999999999", "²", "00000010 "])
    target = path.with_name(name)
    if target == other:
        path.rename(path.with_name("swap"))
        other.rename(path)
        path.with_name("swap").rename(other)
    else:
        path.rename(target)


KINDS: tuple[Callable[[Path, random.Random, Path], None], ...] = (
    delete, empty, cut, flip_bit, change_byte, noise, not_utf8, folder, other_file, dangling, to_zero, to_itself,
    to_other, pipe, huge, unreadable, renamed,
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Base:
    """A finished run of a variant, and what commands give for it.

    Args:
        variant: name of the variant.
        run: the run directory.
        cache: the folder of its cache.
        arrays: SHA-256 of each array of the last checkpoint, as Orbax alone reads it.
        texts: what each command gives, for each newest checkpoint that is left.
        words: of `snapshot`, about each file.
    """

    variant: str
    run: Path
    cache: Path
    arrays: dict[str, str]
    texts: dict[tuple[str, int], str]
    words: dict[str, str]


def array_sums(run: Path, step: int) -> dict[str, str]:
    """Return the SHA-256 of each array of a checkpoint, read by Orbax alone, onto one device."""
    import jax
    import numpy as np
    from orbax.checkpoint import v1 as ocp

    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    facts = described(run, step)["arrays"]
    leaves = {name: jax.ShapeDtypeStruct(fact[0], fact[1], sharding=sharding) for name, fact in facts.items()}
    arrays: Any = ocp.load(str(run / "checkpoints" / f"{step:08d}"), leaves)
    return {name: hashlib.sha256(np.asarray(array).tobytes()).hexdigest() for name, array in arrays.items()}


def words_of(command: str, run: Path, variant: str) -> list[str]:
    """Return the command line of a command."""
    further = {
        "generate": ["--prompt", "line", "--tokens", "12"],
        "export": [str(run.parent / "exported")],
        "train": [],
    }.get(command, [])
    if command == "train":
        flags = ["--checkpoint.memory_every", "3"] if variant == "diloco" else []
        return ["train", str(run.parent / "tiny.py"), variant, "--out", str(run), *flags]
    return [command, str(run), *further]


def result_of(command: str, run: Path, text: str) -> str:
    """Return what must be equal of a command's result: the text or numbers, or the bytes of the exported weights."""
    if command == "export":
        path = run.parent / "exported" / "model.safetensors"
        return hashlib.sha256(path.read_bytes()).hexdigest() if path.exists() else "no weights"
    if command == "evaluate":
        return " ".join(re.findall(r"^(?:step|loss|targets) .*$", text, re.MULTILINE))
    if command == "generate":
        return re.sub(r"^jaxscale: .*\n", "", text, flags=re.MULTILINE)
    return ""


def act(words: list[str]) -> tuple[int, Any]:
    """Serve a request in a worker: run a command, and read the last checkpoint after `train`.

    Args:
        words: the folder of the cache, and the words of the command.
    """
    cache, *words = words
    os.environ["JAXSCALE_CACHE"] = cache
    drop_root_reading()
    code = run_command(words)
    if words[0] != "train" or code != 0:
        return code, None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return code, array_sums(Path(words[words.index("--out") + 1]), STEPS)


def make_base(variant: str, home: Path, work: Worker) -> Base:
    """Train a variant to its end, and return it with what commands give for each of its checkpoints."""
    home.mkdir()
    write_experiment(home)
    run, cache = home / "run", home / "cache"
    ended = work([str(cache), *words_of("train", run, variant)], 300)
    assert ended.code == 0, ended.text
    attempts = (
        Attempt(1, "first", 1, 3, 1.0, 2.0, "rank 0 failed", {"stepping": 0.5}),
        Attempt(2, "first", 0, STEPS, 3.0, 9.0),
    )
    for attempt in attempts:
        write_attempt(run / "processes", attempt)
    texts, copied = {}, home / "copied"
    copy_run(run, copied)
    for step in (STEPS, STEPS - 2, STEPS - 4):
        for path in (copied / "checkpoints").iterdir():
            if int(path.name) > step:
                shutil.rmtree(path)
        for command in ("generate", "evaluate", "export"):
            reading = work([str(cache), *words_of(command, copied, variant)], 300)
            assert reading.code == 0, reading.text
            texts[command, step] = result_of(command, copied, reading.text)
            shutil.rmtree(home / "exported", ignore_errors=True)
    shutil.rmtree(copied)
    return Base(variant, run, cache, ended.result, texts, snapshot(home))


def copy_run(run: Path, copied: Path) -> None:
    """Copy a run directory; hard links would let a case damage the original."""
    shutil.copytree(run, copied, symlinks=True)


@dataclasses.dataclass(frozen=True)
class Case:
    """One damage.

    Args:
        number: number of the case.
        variant: variant of the run.
        kind: name of the kind of damage.
        target: path of the damaged file or folder, relative to the case's folder.
        command: command that reads the run first; "" for none.
        is_complete: whether the run has its last checkpoint.
    """

    number: int
    variant: str
    kind: str
    target: str
    command: str
    is_complete: bool

    def __str__(self) -> str:
        end = "" if self.is_complete else ", last checkpoint gone"
        return f"case {self.number}: {self.kind} {self.target} of {self.variant}{end}, {self.command or 'train alone'}"


def snapshot(folder: Path) -> dict[str, str]:
    """Return a word about each file and link below a folder, which changes with its content."""
    words = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_symlink():
            words[name] = f"link to {os.readlink(path)}"
        elif path.is_file() and path.stat().st_size < 1 << 28:
            words[name] = hashlib.sha256(path.read_bytes()).hexdigest()
    return words


def harmed(before: dict[str, str], after: dict[str, str], target: str, base: Base, run: Path) -> list[str]:
    """Return the files besides the damaged one that were lost or changed, though no command may write them."""
    wrong = []
    for name, word in before.items():
        inside = name.removeprefix("run/")
        if name == target or name.startswith((f"{target}/", "cache/", "exported/")) or after.get(name) == word:
            continue
        if base.words.get(name) != word:  # it moved with the damage, as a checkpoint that was renamed
            continue
        if inside in GROWING and name in after:
            old, new = (base.run / inside).read_bytes(), (run / inside).read_bytes()
            if new.startswith(old.rpartition(b"\n")[0]):
                continue
        elif REWRITTEN.fullmatch(inside) and name in after:
            continue
        checkpoint = re.match(r"run/checkpoints/([^/]+)", name)
        if checkpoint and target.startswith(checkpoint[0]):
            continue  # the damaged checkpoint may move as a whole
        if checkpoint and after.get(name.replace(checkpoint[1], f"{checkpoint[1]}.damaged")) == word:
            wrong.append(f"{name} was set aside")
            continue
        wrong.append(f"{name} {'changed' if name in after else 'is gone'}")
    return wrong


def judge(ended: Ended, codes: Sequence[int] = (0, 2)) -> list[str]:
    """Return what is wrong with the end of a command, whatever it had to do."""
    faults = []
    if ended.code is None:
        faults.append(f"hung for {ended.seconds:.0f} s")
    elif ended.code not in codes:
        faults.append(f"exit code {ended.code}")
    if "Traceback" in ended.text:
        faults.append("traceback")
    if ended.peak_bytes > LIMIT_BYTES:
        faults.append(f"{ended.peak_bytes / 1e9:.1f} GB of memory")
    if ended.code == 2 and not re.search(r"^jaxscale: \S.*$", ended.text, re.MULTILINE):
        faults.append("no message")
    return faults


def try_case(case: Case, base: Base, home: Path, chance: random.Random, work: Worker) -> tuple[list[str], str, str]:
    """Damage a copy of a run, let a command read it and `train` continue it; return faults, outcome and output."""
    run, cache = home / "run", home / "cache"
    copy_run(base.run, run)
    shutil.copytree(base.cache, cache)
    write_experiment(home)
    if not case.is_complete:
        shutil.rmtree(run / "checkpoints" / f"{STEPS:08d}")
    kind = next(kind for kind in KINDS if kind.__name__ == case.kind)
    kind(home / case.target, chance, run)
    newest = STEPS if case.is_complete else STEPS - 2
    faults, codes, output = [], [], ""
    for command in ([case.command] if case.command else []) + ["train"]:
        before = snapshot(home)
        ended = work([str(cache), *words_of(command, run, case.variant)], LIMIT_SECONDS)
        wrong = judge(ended)
        if ended.code == 0 and command in ("generate", "evaluate", "export"):
            wrong += _wrong_result(case, base, run, ended, newest)
        if ended.code == 0 and command == "train" and ended.result != base.arrays:
            wrong.append("other arrays")
        changed = harmed(before, snapshot(home), case.target, base, run)
        wrong += changed if command in ("train", "report") else [text for text in changed if "report.html" not in text]
        faults += [f"{command}: {text}" for text in wrong]
        codes.append(f"{command} {'hung' if ended.code is None else ended.code}")
        output += f"--- {command}: code {ended.code}, {ended.seconds:.1f} s\n{shortened(ended.text)}\n"
    return faults, ", ".join(codes), output


def shortened(text: str) -> str:
    """Return the start and the end of a long text."""
    return text if len(text) < 6000 else f"{text[:3000]}\n[...]\n{text[-3000:]}"


def _wrong_result(case: Case, base: Base, run: Path, ended: Ended, newest: int) -> list[str]:
    """Return what is wrong with the result of a command that ended with 0."""
    result = result_of(case.command, run, ended.text)
    if result == base.texts[case.command, newest]:
        return []
    if "damaged and skipped" not in ended.text and os.path.lexists(run / "checkpoints" / f"{newest:08d}"):
        return ["other content in silence"]  # without the folder, an older checkpoint is the newest one
    older = base.texts.get((case.command, newest - 2))
    return [] if older in (None, result) else ["other content than the older checkpoint's"]


def draw_case(number: int, seed: int, bases: dict[str, Base]) -> tuple[Case, random.Random]:
    """Return a case by its number, and its source of random numbers."""
    chance = random.Random(f"{seed}/{number}")
    variant = VARIANTS[number % 4 % len(VARIANTS)]  # plain twice as often
    is_complete = chance.random() < 0.8
    run = bases[variant].run
    names = [f"run/{path.relative_to(run)}" for path in sorted(run.rglob("*"))]
    if not is_complete:
        names = [name for name in names if f"checkpoints/{STEPS:08d}" not in name]
    newest = f"checkpoints/{STEPS if is_complete else STEPS - 2:08d}"
    caches = [f"cache/{path.relative_to(bases[variant].cache)}" for path in sorted(bases[variant].cache.rglob("*"))]
    groups = [
        [name for name in names if newest in name],
        [name for name in names if "/checkpoints" not in name],
        [name for name in names if "/checkpoints" in name and newest not in name],
        [name for name in caches if "compile" not in name],
    ]
    group = groups[chance.choices(range(4), (32, 45, 8, 15))[0]]
    kind = KINDS[number % len(KINDS)]
    if kind is renamed and chance.random() < 0.7:
        group = [f"run/{newest}"]
    target = chance.choice(group)
    command = COMMANDS[number // len(KINDS) % len(COMMANDS)] if chance.random() < 0.6 else ""
    return Case(number, variant, kind.__name__, target, command, is_complete), chance


def run_damage(count: int, seed: int, only: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Damage files of runs, and return a row for each kind of damage, and one for each case with a fault.

    Args:
        count: number of cases.
        seed: of the cases.
        only: numbers of cases; empty for all.
    """
    rows: list[dict[str, Any]] = []
    outcomes: dict[str, Counter[str]] = {}
    with tempfile.TemporaryDirectory(prefix="damage-") as name:
        root = Path(name)
        warm_up(root)
        home = root / "case"
        work = Worker(act, root)
        bases = {variant: make_base(variant, root / variant, work) for variant in VARIANTS}
        for number in [int(text) for text in only] or range(count):
            case, chance = draw_case(number, seed, bases)
            home.mkdir()
            start_time = time.monotonic()
            faults, outcome, output = try_case(case, bases[case.variant], home, chance, work)
            outcomes.setdefault(case.kind, Counter())[outcome] += 1
            _remove(home)
            if faults or only:
                seconds = time.monotonic() - start_time
                print(
                    f"{'FAIL' if faults else '    '} {case}: {'; '.join(faults)} ({seconds:.1f} s)\n{output}",
                    flush=True,
                )
            if faults:
                row = {"name": str(case), "tried": 0, "outcome": "; ".join(faults), "detail": "", "is_sound": False}
                rows.append({**row, "replay": f"--part files --only {number} --seed {seed}"})
        work.close()
    for kind, counts in outcomes.items():
        texts = [f"{text} ({number})" for text, number in counts.most_common()]
        rows.append(
            {"name": kind, "tried": sum(counts.values()), "outcome": "; ".join(texts), "detail": "", "is_sound": True}
        )
    return rows


def _remove(home: Path) -> None:
    """Remove the folder of a case; a folder that may not be read is given its modes back."""
    for path in [home, *home.rglob("*")]:
        with contextlib.suppress(OSError):
            if not path.is_symlink() and path.is_dir():
                path.chmod(0o700)
    shutil.rmtree(home)
