"""What is compared of a combination: its figures beside those of its twins, and how far apart they may be.

Four comparisons hold it. The first step's loss equals the plain twin's, and its norm too where no technique changes
it. All figures equal those of the lossy twin on the same devices. These equal the lossy twin's on replicas alone, as
nearly as codes whose blocks end elsewhere allow. And where the lossy twin has several techniques, they change together
what they change alone, each: at most three times as much, and not nothing.
"""

import dataclasses
import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from composing.draws import Draw, with_options
from composing.twins import Trained, lossy, on_replicas, plain_twin, recomputes_newer, stale, steps_of, train

from jaxscale.recipe.kernels import Kernels
from jaxscale.sharding.mesh import MeshSpec

EXACT = 2e-5
"""Relative difference that the order of float32 sums may make."""
ROUNDING = {
    "precision=bfloat16": (1.4e-3, 1.0e-2),
    "matmul=fp8": (3.9e-2, 1.8e-1),
    "matmul=int8": (5.8e-3, 3.2e-2),
    "matmul=int4": (5.1e-2, 5.7e-1),
}
"""Largest relative difference of the first loss and norm that each type shows alone beside float32: 12 batches of 1 and
3 rows. A combination may differ from its plain twin by twice as much."""
LAYOUT: dict[str, dict[str, list[float]]] = json.loads(Path(__file__).with_name("tolerances.json").read_text())
"""Largest relative difference of loss and norm, of the first step and the last, that a technique shows alone from
layout to layout, by the optimizer's rule; AdamW's stand for rules that have none. Blocks of codes end where a shard
does, and sums of few bits are rounded in another order (`composition.py --tolerances`)."""
LAYOUT_TIMES = 2
"""A combination may exceed a row of `LAYOUT` by this factor."""
IN_BFLOAT16 = " in bfloat16"
"""Of rows of products in few bits: activations that are rounded twice go to another code more often."""
STALE_STEPS = 3
"""So many times as much where an asynchronous pipeline makes more steps before those that are compared."""
CONDITIONING = {1: 10.0, 6: 4.0}
"""By how many starts of the lossy twin from a state that is off by an ulp: what rounding changes in these it may change
so many times over in another program. There are six where a figure is beyond its tolerance after one: a number at the
edge of two codes goes to the other one in few of them."""
REMADE = 1.0
"""What a budget has recomputed from newer weights may change so many times what recomputing everything does."""
SHARE = 1 / 3
"""Of what a technique changes, the share that a layout may change where the table has no row for it."""
TOGETHER = 3.0
"""Techniques may change so many times together what they change alone, added up."""
NORM_CHANGED = ("reduce", "diloco")
"""Techniques that change the first gradient norm: it is of what replicas have received, or of each replica."""
NEEDS_ROW = ("precision", "matmul", "reduce", "state.moments", "state.master", "optimizer")
"""Techniques whose numbers depend on the layout; what DiLoCo adds up is exact."""
CODED = ("reduce", "state.moments", "state.master", "optimizer", "matmul", "precision")
"""Those whose twin is trained on the combination's devices too: they round to codes, by blocks that end where a shard
does, or numbers that another order of sums takes to another code."""
PLACES = ("mesh", "zero", "pipeline", "microbatches", "sequence_parallel")
"""Fields that decide where shards end, and how many rows are added up at once; a chunk of the loss does too."""
ORDERS = ("kernels", "memory")
"""Those that decide, too, in which order a layer adds up, or how much of long rows it keeps."""
COMPUTED = ("precision", "matmul", "state.master")
"""Those that round what a layer computes, so that attention in chunks, too, is rounded otherwise."""


@dataclasses.dataclass(frozen=True)
class Comparison:
    """One figure of a combination beside a twin's.

    Args:
        what: the figure, and whose it is compared with.
        value: the combination's.
        twin: the twin's.
        tolerance: largest relative difference allowed.
        unlike: they must differ, too.
    """

    what: str
    value: float
    twin: float
    tolerance: float
    unlike: bool = False

    @property
    def difference(self) -> float:
        """Relative."""
        return relative(self.value, self.twin)

    @property
    def holds(self) -> bool:
        """Whether the difference is within the tolerance; not a number never is."""
        return self.difference <= self.tolerance and not (self.unlike and self.value == self.twin)

    def __str__(self) -> str:
        return (
            f"{self.what}: {self.value:.7g} and {self.twin:.7g}, off by {self.difference:.1e} of {self.tolerance:.1e}"
        )


def relative(value: float, twin: float) -> float:
    """Difference relative to the twin."""
    return abs(value - twin) / max(abs(twin), 1e-30)


def row_name(choice: tuple[str, str]) -> str:
    """The row of the tables for a field's value, such as "reduce=qsgd:4bit": without what follows a comma."""
    field, text = choice
    return f"{field}={text.partition(',')[0]}"


def recoded(one: Draw) -> bool:
    """Whether blocks of codes end elsewhere than in the lossy twin, or numbers are added up in another order."""
    mesh = MeshSpec.parse(one.plan["mesh"])
    return mesh.devices > mesh.replica or bool({"pipeline", "microbatches"} & set(one.plan))


def layout_of(one: Draw, *, orders: bool) -> dict[str, str]:
    """The fields of `PLACES` in a combination, and, if asked, those of `ORDERS`."""
    fields = (*PLACES, *ORDERS) if orders else PLACES
    layout = {name: text for name, text in one.plan.items() if name in fields or name.startswith("rules.")}
    if "pipeline" in layout and not stale(one):
        layout["pipeline"] = with_options(layout["pipeline"], stash="residuals", lowering="switch")
    chunk = Kernels.parse(one.plan.get("kernels", "auto")).loss_chunk
    return layout if orders or chunk is None else {**layout, "kernels": f"loss_chunk={chunk}"}


class Twins:
    """The twins of a combination, each trained when it is asked for.

    Args:
        one: the combination.
        nudges: how often the lossy twin starts from weights that are off by about an ulp.
    """

    def __init__(self, one: Draw, nudges: int) -> None:
        self.one, self.techniques, self.nudges = one, lossy(one), nudges
        self.bare = plain_twin(one)

    @functools.cached_property
    def plain(self) -> Trained:
        """With no technique at all."""
        return self._train(self.bare, {"mesh": "1"})

    @functools.cached_property
    def changes(self) -> dict[str, str]:
        """Of the plan of the lossy twin."""
        changes = {name: text for technique in self.techniques.values() for name, text in technique.items()}
        return on_replicas(self.one, {**stale(self.one), **changes}, sends="optimizer" in self.techniques)

    @functools.cached_property
    def lossy(self) -> Trained:
        """With the techniques that change the numbers, and no other."""
        return self._train(self.one, self.changes) if self.techniques or stale(self.one) else self.plain

    @functools.cached_property
    def spread_changes(self) -> dict[str, str]:
        """Of the plan of the lossy twin whose codes are those of the combination's devices, block by block."""
        if not set(CODED) & set(self.techniques):
            return self.changes
        return {**self.changes, **layout_of(self.one, orders=bool(set(COMPUTED) & set(self.techniques)))}

    @functools.cached_property
    def spread(self) -> Trained:
        """The lossy twin on the combination's own devices, if it codes numbers in blocks; else the lossy twin."""
        return self.lossy if self.spread_changes == self.changes else self._train(self.one, self.spread_changes)

    @functools.cached_property
    def nudged(self) -> Sequence[Trained]:
        """The same from a state that is off by about an ulp."""
        return [self._train(self.one, self.spread_changes, nudge=seed) for seed in range(self.nudges)]

    @functools.cached_property
    def remade(self) -> Trained:
        """The same that recomputes everything, where a budget decides what is recomputed from newer weights."""
        if not recomputes_newer(self.one) or "memory" in self.changes:
            return self.spread
        return self._train(
            self.one, {**self.spread_changes, "pipeline": with_options(self.one.plan["pipeline"], stash="input")}
        )

    @functools.cached_property
    def base(self) -> Trained:
        """What the lossy techniques change: the plain twin, or the asynchronous pipeline without them."""
        changes = stale(self.one)
        return self._train(self.bare, {**changes, "mesh": "1"}) if changes else self.plain

    @functools.cached_property
    def alone(self) -> Mapping[str, Trained]:
        """By a technique's name: with it, in a synchronous step."""
        return {
            name: self._train(
                self.one if name == "optimizer" else self.bare,
                on_replicas(self.one, changes, sends=name == "optimizer"),
            )
            for name, changes in self.techniques.items()
        }

    def _train(self, one: Draw, changes: Mapping[str, str], *, nudge: int | None = None) -> Trained:
        return train(one, changes, steps=steps_of(self.one), nudge=nudge)

    def effect(self, name: str, kind: str) -> float:
        """What a technique changes alone: the largest relative difference of the losses or norms of a step."""
        return furthest(self.alone[name], self.plain, kind)


def furthest(trained: Trained, other: Trained, kind: str) -> float:
    """The largest relative difference between two trainings' losses or norms."""
    return max(relative(a, b) for a, b in zip(getattr(trained, kind), getattr(other, kind), strict=True))


def compare(one: Draw, trained: Trained) -> list[Comparison]:
    """Figures of a combination beside those of its twins."""
    figures: list[Comparison] = []
    for nudges in CONDITIONING:
        figures = list(_compared(Twins(one, nudges), trained))
        if all(figure.holds for figure in figures):
            break
    return figures


def _compared(twins: Twins, trained: Trained) -> Iterator[Comparison]:
    yield from _beside_plain(twins, trained)
    yield from _beside_lossy(twins, trained)
    if len(twins.techniques) + bool(stale(twins.one)) > 1:
        yield from _together(twins)


def _beside_plain(twins: Twins, trained: Trained) -> Iterator[Comparison]:
    """The first step; that of an asynchronous pipeline is of weights that are old already."""
    if stale(twins.one):
        return
    rounding = [ROUNDING.get(row_name(choice), (0.0, 0.0)) for choice in twins.one.plan.items()]
    of_loss, of_norm = (EXACT + 2 * sum(figures) for figures in zip((0.0, 0.0), *rounding, strict=True))
    yield Comparison("first loss, plain twin", trained.losses[0], twins.plain.losses[0], of_loss)
    if not set(NORM_CHANGED) & set(twins.techniques):
        yield Comparison("first norm, plain twin", trained.norms[0], twins.plain.norms[0], of_norm)


def _beside_lossy(twins: Twins, trained: Trained) -> Iterator[Comparison]:
    """The first step and the last: beside the lossy twin on the same devices, and that beside it on replicas alone."""
    slack = tolerances(twins)
    for number, at in enumerate((0, -1)):
        for what, kind in enumerate(("losses", "norms")):
            value, of_spread, of_twin = (getattr(each, kind)[at] for each in (trained, twins.spread, twins.lossy))
            rounding = CONDITIONING[twins.nudges] * max(
                relative(getattr(each, kind)[at], of_spread) for each in twins.nudged
            )
            recomputation = REMADE * relative(getattr(twins.remade, kind)[at], of_spread)
            name = f"{('first', 'last')[number]} {('loss', 'norm')[what]}, lossy twin"
            yield Comparison(name, value, of_spread, EXACT + rounding + recomputation)
            if twins.spread is not twins.lossy:
                yield Comparison(f"{name} on its devices", of_spread, of_twin, slack[2 * number + what] + rounding)


def tolerances(twins: Twins) -> list[float]:
    """What a layout may change of the first loss and norm, and the last."""
    one = twins.one
    rule = one.optimizer.get("name", "adamw")
    allowed = [EXACT] * 4
    times = STALE_STEPS if stale(one) else 1  # more steps come before those that are compared
    for name, changes in twins.techniques.items():
        for row in row_names(one, name, changes) if recoded(one) or name in COMPUTED else ():
            by_rule = LAYOUT.get(row, {})
            figures = by_rule.get(rule, by_rule.get("adamw"))
            if figures is not None:  # no rule has a part in the first step
                figures = [*map(max, figures[:2], *by_rule.values()), *figures[2:]]
            if figures is None and name in NEEDS_ROW:
                effects = [twins.effect(name, kind) for kind in ("losses", "norms")]
                figures = [SHARE / LAYOUT_TIMES * effect for effect in (*effects, *effects)]
            figures = figures or (0.0,) * 4
            if stale(one):  # a full pipe's first step is one after many
                figures = (*figures[2:], *figures[2:])
            allowed = [a + LAYOUT_TIMES * times * b for a, b in zip(allowed, figures, strict=True)]
    return allowed


def row_names(one: Draw, name: str, changes: Mapping[str, str]) -> list[str]:
    """The rows of the table for a technique."""
    if name == "optimizer":
        return [row_name((name, one.optimizer["name"]))]
    if name == "matmul" and one.plan.get("precision") == "bfloat16":
        return [row_name((name, changes[name])) + IN_BFLOAT16]
    return [row_name(choice) for choice in changes.items()]


def _together(twins: Twins) -> Iterator[Comparison]:
    """The lossy twin beside what its techniques change alone: no more, and something."""
    slack = tolerances(twins)
    for what, kind in enumerate(("losses", "norms")):
        effects = sum(twins.effect(name, kind) for name in twins.techniques)
        rounding = max(furthest(each, twins.spread, kind) for each in twins.nudged)
        tolerance = TOGETHER * effects + slack[2 + what] + CONDITIONING[twins.nudges] * rounding
        name = f"last {('loss', 'norm')[what]}, techniques together and without them"
        yield Comparison(name, getattr(twins.lossy, kind)[-1], getattr(twins.base, kind)[-1], tolerance)
    others = {"the pipeline": twins.base} if stale(twins.one) else twins.alone
    for name, alone in others.items():
        if (
            name == "state.master"
            and set(twins.techniques) == {name, "reduce"}
            and twins.one.plan["reduce"] == "bfloat16"
        ):
            continue  # gradients of bfloat16 weights are reduced in bfloat16 anyway
        if (twins.lossy.losses, twins.lossy.norms[:-1]) == (alone.losses, alone.norms[:-1]):
            figures = twins.lossy.norms[-1], alone.norms[-1]
            yield Comparison(f"last norm, together and {name} alone", *figures, float("inf"), unlike=True)
