r"""Stale weights: the asynchronous rules as their papers state them, a loop over updates on one device.

With $w_s^{(t)}$ the weights of stage s after t updates, $d_s$ a rule's delays, and batch t (from 0):

    PipeDream  forward and backward of stage s at w_s^(t - d_s), d_s = p - 1 - s
    2BW        the same with d_s = 1 for every stage: weights of one group of microbatches before
    PipeMare   forward at w_s^(t - d_s), d_s = p - 1 - s; backward at the newest, w_s^(t), or what corrects it, of the
               values that the forward kept
    all        w_s^(t + 1) from w_s^(t) by the optimizer, clipped and watched by the norm of this stage's gradients

It knows no table, no slot and no tick: what an executor of these rules must compute, and much faster on few cores than
as many virtual devices that wait for each other. Of the executor it shares `FromResiduals`, which says what a backward
with other weights than its forward's means. A batch that 2BW cuts into microbatches is computed in one piece here: the
same mean, rounded otherwise. Left out: models with dropout, a data axis, stages of more than one layer.

References: those of `jaxscale/pipeline/run/asynchronous.py`.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxscale import TrainState, TrainStep, blocks
from jaxscale.offload import update_on_device
from jaxscale.pipeline import Remedies
from jaxscale.pipeline.run.passes import At, FromResiduals, StageContext
from jaxscale.state.train_state import Watch
from jaxscale.trees import path_name
from jaxscale.typing import Array, Batch, Float, Params

BEHIND = ("norm", "head")
"""Parameters that the last stage reads; what else is not of a layer, the first does."""


@dataclasses.dataclass(frozen=True)
class Rule:
    """Which weights a stage computes with.

    Args:
        delays: by stage, how many updates ago those of a forward were the newest.
        newest: a backward linearises at the newest ones, else at those of its forward.
        remedies: PipeMare's.

    Example:
        >>> Rule.of("pipedream", 4).delays, Rule.of("2bw", 4).delays, Rule.of("pipemare", 4).newest
        ((3, 2, 1, 0), (1, 1, 1, 1), True)
    """

    delays: tuple[int, ...]
    newest: bool = False
    remedies: Remedies = dataclasses.field(default_factory=Remedies)

    @classmethod
    def of(cls, name: str, stages: int, remedies: Remedies | None = None) -> "Rule":
        """A rule by the name of its paper."""
        delays = (1,) * stages if name == "2bw" else tuple(reversed(range(stages)))
        return cls(delays, name == "pipemare", Remedies() if remedies is None else remedies)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Stage:
    """What a stage carries on.

    Args:
        versions: the parameters of the model, newest first, its own alone: one row of a stacked one; zeros for what
            another stage reads.
        optimizer: the state of its optimizer.
        watch: over its own gradients.
        change: the moving average of what updates change.
    """

    versions: tuple[Params, ...]
    optimizer: Any
    watch: Watch
    change: Params


class StaleWeights:
    """A rule, ready to run.

    Args:
        plain: the train step of the same experiment on one device, of a model with a layer per stage.
        rule: which weights are read.
    """

    def __init__(self, plain: TrainStep, rule: Rule) -> None:
        self.plain, self.rule, self.count = plain, rule, len(rule.delays)
        self._advance = update_on_device(plain.optimizer)
        self.update = jax.jit(self._update)

    def begin(self, state: TrainState) -> tuple[Stage, ...]:
        """The stages of a model that has been trained, or not yet, by synchronous steps."""
        names = jax.tree_util.tree_map_with_path(lambda path, _: path_name(path), state.params)
        # each stage's share of the norm, were they alike
        watch = dataclasses.replace(state.watch, norm=state.watch.norm / self.count**0.5)

        def stage(s: int) -> Stage:
            params = jax.tree.map(lambda leaf, name: self._own(s, leaf, name), state.params, names)
            optimizer = optax.tree.map_params(
                self.plain.optimizer, lambda leaf, name: self._own(s, leaf, name), state.optimizer, names
            )
            zeros = jax.tree.map(jnp.zeros_like, params)
            return Stage((params,) * (1 + self.rule.delays[s]), optimizer, watch, zeros)

        return tuple(stage(s) for s in range(self.count))

    def whole(self, stages: tuple[Stage, ...]) -> Params:
        """The newest parameters of the model."""

        def join(path: Any, *leaves: Array) -> Array:
            if self.plain.pure_model.is_stacked(path_name(path)):
                return jnp.concatenate(leaves)
            return leaves[self._home(path_name(path))]

        return jax.tree_util.tree_map_with_path(join, *(stage.versions[0] for stage in stages))

    def _home(self, name: str) -> int:
        """The stage that reads a parameter which is not of a layer."""
        return self.count - 1 if name.split("/")[0] in BEHIND else 0

    def _own(self, s: int, leaf: Array, name: str) -> Array:
        if self.plain.pure_model.is_stacked(name):
            return leaf[s : s + 1]
        return leaf if self._home(name) == s else jnp.zeros_like(leaf)

    def _passes(self, s: int, batch: Batch, params: Params, x: Any) -> FromResiduals:
        """Forward and backward of a stage; the last one's sums are the mean loss, and it sends nothing."""
        plain = self.plain
        context = plain.objective.planned.context(None)

        def stage(weights: Params, shared: Any, x: Any, batch: Batch, at: At, key: Any) -> tuple[Any, Any, Any]:
            del shared, at, key

            def between(run: Any, entering: Any) -> Any:
                y = run(x if s else entering)
                if s == self.count - 1:
                    return y
                raise _Reached(y)

            cut = blocks.StageView(jnp.array([s]), tuple(range(self.count)), has_padding=False, run_stage=between)
            try:
                with blocks.viewing_stage(cut):
                    loss = plain.experiment.model.loss(plain.pure_model.module(weights, {}), batch, context)
            except _Reached as reached:
                return reached.found, jnp.zeros(()), jnp.zeros(())
            return (), (loss.total + loss.penalty) / loss.weight, loss.total / loss.weight

        return FromResiduals(stage, lambda tree: tree, self._context(params, batch), x, is_split=False)

    @staticmethod
    def _context(params: Params, batch: Batch) -> StageContext:
        return StageContext(params, (), batch, At((), ()), ())

    def _update(
        self, stages: tuple[Stage, ...], number: Array, batch: Batch
    ) -> tuple[tuple[Stage, ...], Float[Array, ""]]:
        """The stages after update `number` from 0, each by the gradients of its own weights, and the batch's loss."""
        x: Any = ()
        forwards, loss = [], jnp.zeros(())
        with self.plain.objective.planned.tracing(is_forward_only=True), blocks.treating(blocks.Treatment()):
            for s, stage in enumerate(stages):
                passes = self._passes(s, batch, stage.versions[-1], x)
                y, sums, kept = passes.forward(self._context(stage.versions[-1], batch), x)
                forwards.append((passes, x, kept))
                x, loss = y, loss + sums
            g, after = x, []
            for s in reversed(range(self.count)):
                (passes, x, kept), stage = forwards[s], stages[s]
                found, _, g = passes.backward(self._context(self._linear(stage, s), batch), x, kept, g)
                after.append(self._updated(stage, s, found, number))
        return tuple(reversed(after)), loss

    def _linear(self, stage: Stage, s: int) -> Params:
        """The weights that a backward linearises at."""
        if not self.rule.newest:
            return stage.versions[-1]
        if self.rule.remedies.correction is None:
            return stage.versions[0]
        return self.rule.remedies.corrected(stage.versions[0], stage.change, self.rule.delays[s])

    def _updated(self, stage: Stage, s: int, gradients: Params, number: Array) -> Stage:
        old, delay, remedies = stage.versions[0], self.rule.delays[s], self.rule.remedies
        norm = optax.tree.norm(gradients)
        good = stage.watch.judge(norm, norm, self.plain.experiment.guard)
        new, optimizer = self._advance(gradients, stage.optimizer, old, norm, good)
        new = remedies.rescheduled(old, new, delay, number)
        change = stage.change if remedies.correction is None else remedies.followed(stage.change, old, new, delay)
        return Stage((new, *stage.versions[:-1]), optimizer, stage.watch.after(norm, good), change)


class _Reached(Exception):
    """What the model was traced for has been found."""

    def __init__(self, found: Any) -> None:
        super().__init__("a traced value, on its way out of the model")
        self.found = found
