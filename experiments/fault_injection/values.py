"""Wild values in experiments and plans: each is constructed and passes its checks, or ends in one clear error.

A draw has mostly valid fields and up to three wild ones. It reaches the experiment by constructors, by texts as on the
command line (`override`), or by JSON as in experiment.json, and then all checks run that need no trace of the step; for
every third draw, the data are opened and the step is built, too.
"""

import ast
import importlib
import json
import os
import pkgutil
import random
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fault_injection.draws import Outcome, run_draws
from fault_injection.wild_values import (
    FLOATS,
    NUMBERS,
    STRINGS,
    TEXT_FORMS,
    changed,
    draw_alone,
    draw_experiment,
    mutated,
    namespace,
    write_data,
)

import jaxscale

DRAW_SECONDS = 10.0
"""Longest time of a draw."""
MAX_READ_ROWS = 4096
"""Largest batch that is read."""
STEP_SECONDS = 180.0
"""Longest time of a draw that compiles and trains a step, on a busy machine."""
MAX_MESSAGE = 4000
"""Most characters of a message."""


class BadMessage(Exception):
    """A message that does not help."""


def checked_message(error: Exception) -> str:
    """Return the message of a user's error, which must be there and fit a terminal."""
    message = str(error)
    if not message or len(message) > MAX_MESSAGE or "Traceback" in message:
        raise BadMessage(f"a message of {len(message)} characters: {message[:200]!r}") from error
    return message


def evaluate(source: str, folder: Path) -> Any:
    """Return the value of a draw's source."""
    return eval(source, namespace(folder))


def by_constructor(chance: random.Random, folder: Path) -> tuple[str, Callable[[], Any]]:
    """Draw an experiment with wild fields, and return its source and the function that constructs it."""
    source = ast.unparse(draw_experiment(chance, chance.choice((0, 1, 1, 1, 2, 2, 3))))
    return source, lambda: evaluate(source, folder)


def alone(chance: random.Random, folder: Path) -> tuple[str, Callable[[], Any]]:
    """Draw a value outside an experiment, and return its source and the function that constructs it."""
    source = ast.unparse(draw_alone(chance, chance.choice((1, 1, 2))))
    return source, lambda: evaluate(source, folder)


def by_texts(chance: random.Random, folder: Path) -> tuple[str, Callable[[], Any]]:
    """Draw wild texts for fields of a valid experiment, and return them and the function that sets them."""
    from jaxscale.values.as_text import override, paths, spell

    source = ast.unparse(draw_experiment(chance, 0))
    forms = [text for texts in TEXT_FORMS.values() for text in texts]
    choices = [chance.random() for _ in range(chance.choice((1, 1, 2, 3)))]

    def make() -> Any:
        experiment = evaluate(source, folder)
        all_paths, changes = list(paths(experiment)), {}
        for choice in choices:
            picks = random.Random(choice)
            path = picks.choice(all_paths)
            value = experiment
            for name in path.split("."):
                value = getattr(value, name)
            pools = ((*NUMBERS, *FLOATS), [ast.literal_eval(text) for text in STRINGS if "*" not in text], forms)
            form = picks.choice(TEXT_FORMS.get(type(value), (spell(value),)))
            text = picks.choice((form, form, mutated(form, picks), picks.choice(pools[picks.randrange(3)])))
            changes[path if picks.random() < 0.97 else mutated(path, picks)] = text
        print(changes)
        return override(experiment, changes)

    return f"{source} with texts {choices}", make


def by_json(chance: random.Random, folder: Path) -> tuple[str, Callable[[], Any]]:
    """Draw wild JSON for a valid experiment, and return it and the function that reads it."""
    from jaxscale.recipe.experiment import Experiment
    from jaxscale.values.as_json import from_json, to_json

    source = ast.unparse(draw_experiment(chance, 0))
    choices = [chance.random() for _ in range(chance.choice((1, 1, 2, 3)))]

    def make() -> Any:
        data = json.loads(json.dumps(to_json(evaluate(source, folder))))
        for choice in choices:
            change_json(data, random.Random(choice))
        print(json.dumps(data)[:3000])
        return from_json(Experiment, data, "experiment.json")

    return f"{source} with JSON {choices}", make


def change_json(data: Any, picks: random.Random) -> None:
    """Change one place of JSON: another value, another key, or none."""
    holder = data
    key: Any = None
    while True:
        keys = list(holder) if isinstance(holder, dict) else list(range(len(holder)))
        if not keys:
            break
        key = picks.choice(keys)
        if not isinstance(holder[key], dict | list) or picks.random() < 0.2:
            break
        holder = holder[key]
    if not keys:
        return
    numbers: list[Any] = [0, -1, 2**31, 2**63, 10**18, 10**400, 0.5, -0.5, 1e308, float("nan"), float("inf"), 3, 7]
    texts = list(map(ast.literal_eval, (text for text in STRINGS if "*" not in text)))
    others: list[Any] = [None, True, False, [], {}, [[]], [1, 2], {"type": "models.Decoder"}, {"a": 1}, {"type": 3}]
    others += [{"type": "os:path"}, {"callable": "a:b"}, [None] * 70000, {"type": "data.Text", "path": "/dev/zero"}]
    change = picks.randrange(6)
    if change == 0 and isinstance(holder, dict):
        holder[mutated(str(key), picks)] = holder.pop(key)
    elif change == 1 and isinstance(holder, dict):
        del holder[key]
    elif change == 2 and isinstance(holder[key], str):
        holder[key] = mutated(holder[key], picks)
    else:
        holder[key] = picks.choice(picks.choice((numbers, texts, others)))


WAYS = {"constructors": by_constructor, "texts": by_texts, "JSON": by_json, "values alone": alone}


def draw(number: int, seed: int, folder: Path) -> tuple[str, str, Callable[[], Any]]:
    """Return way, source and maker of the draw of a number."""
    chance = random.Random(f"{seed}/{number}")
    way = chance.choices(list(WAYS), (5, 2, 2, 2))[0]
    return (way, *WAYS[way](chance, folder))


def check_all(value: Any, is_deep: bool) -> str:
    """Run the checks that need no trace of a step, and return the outcome.

    Args:
        value: an experiment, or another value.
        is_deep: whether the data are opened, too, and the step is built.
    """
    from jaxscale.recipe.experiment import Experiment
    from jaxscale.values.as_json import from_json, has_code, to_json

    data = json.loads(json.dumps(to_json(value)))
    str(value)
    repr(value)
    if not isinstance(value, Experiment):
        return "constructed"
    if not has_code(data):
        from_json(Experiment, data, "experiment.json")
    import jax

    from jaxscale.step.resolve import resolve

    resolve(value, value.plan, jax.devices())
    if not is_deep:
        return "resolved"
    from jaxscale.step.build import build
    from jaxscale.training.check_data import check_data, open_data

    opened = open_data(value, 0, 1)
    check_data(value, opened)
    if value.batch <= MAX_READ_ROWS:
        next(iter(opened.train()))
    build(value)
    return "built"


def run_one(number: int, seed: int, folder: Path, is_deep: bool) -> tuple[str, str]:
    """Run the draw of a number, and return its outcome and way; `check_all` describes `is_deep`."""
    from jaxscale.errors import UserError

    way, _, make = draw(number, seed, folder)
    try:
        return check_all(make(), is_deep), way
    except UserError as error:
        checked_message(error)
        return "refused", way


FLAGS = (
    "--xla_force_host_platform_device_count=8 --xla_cpu_multi_thread_eigen=false --xla_backend_optimization_level=0 "
    "--xla_disable_hlo_passes=all-reduce-promotion"
)


def prepare() -> None:
    """Choose 8 virtual CPU devices, and import every module of jaxscale, so that no child has to."""
    os.environ |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": FLAGS}
    for module in pkgutil.walk_packages(jaxscale.__path__, "jaxscale."):
        if "__main__" not in module.name:
            importlib.import_module(module.name)


def run_values(count: int, seed: int, only: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Draw values `count` times, and return a row for each way and each fault.

    Args:
        count: number of draws.
        seed: seed of the draws.
        only: numbers of draws; empty for all.
    """
    prepare()
    numbers = list(map(int, only)) or list(range(count))
    with tempfile.TemporaryDirectory(prefix="values-") as name:
        folder = Path(name)
        write_data(folder)
        outcomes = list(
            run_draws(lambda number: run_one(number, seed, folder, number % 3 == 0), numbers, DRAW_SECONDS, 250)
        )
        return rows_of(outcomes, "values", seed, lambda number: draw(number, seed, folder)[:2])


def draw_step(number: int, seed: int) -> tuple[str, str]:
    """Return kind and source of an experiment with a tiny valid model and an unusual plan, mostly a valid one."""
    chance = random.Random(f"step/{seed}/{number}")
    tree = draw_experiment(chance, 0)
    wild_count = chance.choice((0, 0, 0, 1))
    changed(tree, chance, chance.choice((0, 1, 1, 2)), wild_count, ("Plan", "Optimizer", "StatePlan", "OffloadPlan"))
    return ("a wild plan" if wild_count else "an unusual plan"), ast.unparse(tree)


def train_one_step(number: int, seed: int, folder: Path) -> tuple[str, str]:
    """Train the experiment of a number for one step, and return the outcome."""
    from jaxscale.errors import UserError
    from jaxscale.step.build import build
    from jaxscale.training.check_data import open_data

    _, source = draw_step(number, seed)
    try:
        experiment = evaluate(source, folder)
        batch = next(iter(open_data(experiment, 0, 1).train()))
        step = build(experiment)
        state, placed = step.init(), step.place(batch)
        state, metrics = step(state, placed)
        loss, count = float(metrics["loss"]), int(state.step)
    except UserError as error:
        checked_message(error)
        return "refused", ""
    if count != 1 or not loss > 0:
        return "fault", f"step {count}, loss {loss}"
    return ("trained" if loss < 1e3 else "trained, with a large loss"), ""


def run_steps(count: int, seed: int, only: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Train `count` draws for one step each, and return a row for each kind and each fault.

    Args:
        count: number of draws.
        seed: seed of the draws.
        only: numbers of draws; empty for all.
    """
    prepare()
    numbers = list(map(int, only)) or list(range(count))
    with tempfile.TemporaryDirectory(prefix="steps-") as name:
        folder = Path(name)
        write_data(folder)
        outcomes = list(run_draws(lambda number: train_one_step(number, seed, folder), numbers, STEP_SECONDS, 25))
        return rows_of(outcomes, "steps", seed, lambda number: draw_step(number, seed))


def rows_of(
    outcomes: Sequence[Outcome], part: str, seed: int, describe: Callable[[int], tuple[str, str]]
) -> list[dict[str, Any]]:
    """Return a row for each kind of draw, and for each fault.

    Args:
        outcomes: the outcomes of draws.
        part: name of the part.
        seed: seed of the draws.
        describe: returns kind and source of a draw.
    """
    counts: dict[str, dict[str, int]] = {}
    seconds: dict[str, list[float]] = {}
    rows = []
    for outcome in outcomes:
        kind, source = describe(outcome.number)
        if outcome.outcome == "fault":
            detail = f"{outcome.detail}\n     {source[:2000]}"
            replay = f"--part {part} --seed {seed} --only {outcome.number}"
            rows.append(_row(f"{kind} {outcome.number}", "fault", detail, False, 0) | {"replay": replay})
        seconds.setdefault(kind, []).append(outcome.seconds)
        kind_counts = counts.setdefault(kind, {})
        kind_counts[outcome.outcome] = kind_counts.get(outcome.outcome, 0) + 1
    for kind, kind_counts in sorted(counts.items()):
        text = ", ".join(f"{name} {number:,}" for name, number in sorted(kind_counts.items()))
        text += f"; {sum(seconds[kind]):.0f} s, the longest {max(seconds[kind]):.1f} s"
        rows.append(_row(kind, "", text, True, sum(kind_counts.values())))
    return rows


def _row(name: str, outcome: str, detail: str, is_sound: bool, tried: int) -> dict[str, Any]:
    """Return a row of the harness."""
    return {"name": name, "outcome": outcome, "detail": detail, "is_sound": is_sound, "tried": tried}
