"""DilocoStep: a train step whose replicas train alone, and meet every so many steps in a program of their own.

The inner step is one compiled program, checked to send nothing over the replica axis but single numbers: sums of the
loss and its weight, norms, agreement on a bad step. What it computes for a replica is what any step computes, mapped
over replicas. A meeting is another program for each part of the weights (`step/outer.py`), and after which steps one is
due is known on the host. The last step of a run ends with a meeting of all parts.
"""

import dataclasses
import functools
import time
from collections.abc import Container, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec

from jaxscale.step.choices import noted
from jaxscale.step.compiled import Compiled
from jaxscale.step.experiment import Experiment
from jaxscale.step.functional import Functional
from jaxscale.step.layout import REPLICA_AXIS, Layout
from jaxscale.step.objective import positive
from jaxscale.step.outer import WEIGHTS, Outer
from jaxscale.step.plan import Plan
from jaxscale.step.state import TrainState
from jaxscale.step.train_step import Metrics, TrainStep
from jaxscale.typing import Array, Batch, Params


class DilocoStep(TrainStep):
    """A train step under DiLoCo. Make one with `build`.

    Args:
        outer: what it adds to a state, and how replicas meet.
        experiment, plan, functional, layout, given: as `TrainStep` takes them; the layout without what is added.
    """

    outer: Outer

    def __init__(
        self, outer: Outer, experiment: Experiment, plan: Plan, functional: Functional, layout: Layout, *given: Any
    ) -> None:
        assert outer.plain is layout
        self.outer = outer
        super().__init__(experiment, plan, functional, outer.layout(), *given)
        state = self.layout.state
        self.meet_fns = [
            jax.jit(
                noted(self, functools.partial(outer.meet, part)),
                donate_argnums=0,
                in_shardings=(state,),
                out_shardings=(state, None),
            )
            for part in range(len(outer.parts))
        ]
        self._meetings: list[Any] = []
        self._counted: tuple[Any, int] = (None, 0)

    def describe(self) -> list[str]:
        """What a user should know before the first step, one line each."""
        own = [line for line in super().describe() if not line.startswith("reduce ")]
        return own + self.outer.describe()

    def describe_restored(self, names: Container[str]) -> str:
        """What a user should know of a checkpoint with arrays of these names, behind a semicolon; mostly nothing."""
        return self.outer.said_of_restored(names, self.canonical_abstract()) + super().describe_restored(names)

    def _optimizer_and_more(self, params: Params) -> tuple[Any, dict[str, Any]]:
        state = self.layout.state
        optimizer, outer = jax.jit(self.outer.start, out_shardings=(state.optimizer, state.outer))(params)
        return optimizer, {"outer": outer}

    def compile(self, batch: Batch) -> Compiled:
        """Compile the inner step and the meetings, and check what each sends."""
        from jaxscale.step.check import check_meeting

        found, start = super().compile(batch), time.perf_counter()
        meetings = [one.lower().compile() for one in self._traced_meetings()]
        for part, executable in enumerate(meetings):
            check_meeting(self.outer, part, executable)
        self._meetings = meetings
        return dataclasses.replace(found, seconds=found.seconds + time.perf_counter() - start)

    def check_kernels(self) -> None:
        """As `TrainStep` has it; meetings take the codec's, and are traced for it here.

        Raises:
            UserError: as it says.
        """
        if self.stage is not None:
            self._traced_meetings()
        super().check_kernels()

    def _traced_meetings(self) -> list[Any]:
        """A traced program for each part of the weights."""
        return [fn.trace(self.layout.abstract) for fn in self.meet_fns]

    def run(self, state: TrainState, batch: Mapping[str, Array]) -> tuple[TrainState, Metrics]:
        """One step, and a meeting where one is due. The state given is donated: use the one that comes back.

        Args:
            state: the train state.
            batch: device arrays, from `place`.

        Returns:
            As `TrainStep.run`. `grad_norm` is the root of the mean square of the replicas' own, and `wire_bytes` is 0
            between meetings.
        """
        before, counted = self._counted
        count = 1 + (counted if state.step is before else int(state.step))
        state, metrics = super().run(state, batch)
        last = count == self.experiment.steps
        due = range(len(self.outer.parts)) if last else self.outer.diloco.due(count)
        sent = 0
        for part in due:
            meet = self._meetings[part] if self._meetings and not self._by_jit else self.meet_fns[part]
            state, found = meet(state)
            metrics, sent = {**metrics, **found}, sent + self.outer.wire_bytes(part)
        self._counted = (state.step, count)
        wire: Any = np.float32(sent)
        return state, {**metrics, "wire_bytes": wire}

    def _advance_apart(self, gradients: Any, optimizer: Any, weights: Any, norms: Any, good: Any) -> tuple[Params, Any]:
        """Each replica's own update, in a region that is manual over replicas: no tensor of another's is reached."""
        own, whole = PartitionSpec(REPLICA_AXIS), PartitionSpec()

        def body(gradients: Any, optimizer: Any, weights: Any, norms: Any, good: Any) -> Any:
            mine = jax.tree.map(lambda x: x[0], (gradients, optimizer, weights, norms))
            return jax.tree.map(lambda x: x[None], self.advance(mine[0], mine[1], mine[2], mine[3], good))

        return jax.shard_map(
            body,
            mesh=self.layout.mesh,
            in_specs=(own, own, own, own, whole),
            out_specs=own,
            axis_names={REPLICA_AXIS},
            check_vma=False,
        )(gradients, optimizer, weights, norms, good)

    def _step(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        weights = state.outer[WEIGHTS]
        loss, gradients, rest = self.objective.gradients_apart(state, batch, weights)
        norms = jax.vmap(optax.tree.norm)(gradients)
        mean, norm = loss.total / positive(loss.weight), jnp.sqrt(jnp.mean(jnp.square(norms)))
        # a step that is bad for one replica is none for all
        good, watch = state.watch.judge(mean, norm, self.experiment.guard)
        weights, optimizer = self._advance_apart(gradients, state.optimizer, weights, norms, good)
        metrics = {"loss": mean, "grad_norm": norm, "weight": loss.weight, **self._progress(state.watch, watch)}
        outer = {**state.outer, WEIGHTS: weights}
        after = dataclasses.replace(
            state, step=state.step + 1, optimizer=optimizer, rest=rest, watch=watch, outer=outer
        )
        return after, metrics
