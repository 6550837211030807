"""Meetings: the programs in which DiLoCo's replicas meet, after the steps that they train alone.

The inner step is one compiled program, checked to send nothing over the replica axis but single numbers: sums of the
loss and its weight, norms, agreement on a bad step. A meeting is another program for each part of the weights
(`replicas.py`), and after which steps one is due is known on the host. The last step of a run ends with a meeting of
all parts.
"""

import functools
from collections.abc import Callable
from typing import TypeAlias

import jax
import numpy as np

from jaxscale.state.extra import CompiledProgram
from jaxscale.state.layout import Layout
from jaxscale.state.train_state import Metrics, TrainState
from jaxscale.step.compiled_checks import check_meeting
from jaxscale.step.replicas import Replicas
from jaxscale.typing import Array

Meeting: TypeAlias = Callable[[TrainState], tuple[TrainState, Metrics]]
"""From the train state to that after a part of the weights has met, and metrics of the meeting."""


class Meetings:
    """The programs that run after some steps.

    Args:
        replicas: that meet.
        layout: of the train state.
        steps: of the run.
        noted: notes the kernels that a traced function takes.
    """

    def __init__(self, replicas: Replicas, layout: Layout, steps: int, noted: Callable[[Meeting], Meeting]) -> None:
        self.replicas, self._layout, self._steps = replicas, layout, steps
        self.programs = [
            jax.jit(
                noted(functools.partial(replicas.meet, part)),
                donate_argnums=0,
                in_shardings=(layout.state,),
                out_shardings=(layout.state, None),
            )
            for part in range(len(replicas.fragments))
        ]
        self._executables: list[jax.stages.Compiled] = []
        self._counted: tuple[Array | None, int] = (None, 0)

    def trace(self) -> list[jax.stages.Traced]:
        """A traced program for each part of the weights."""
        return [program.trace(self._layout.abstract) for program in self.programs]

    def compile(self) -> None:
        """Compile a program for each part of the weights, and check what each sends."""
        executables = [traced.lower().compile() for traced in self.trace()]
        for part, executable in enumerate(executables):
            program = CompiledProgram(self._layout.mesh, executable.as_text)
            replicas = self.replicas
            check_meeting(replicas.diloco, replicas.stages[part], replicas.wire_bytes(part), program)
        self._executables = executables

    def number(self, state: TrainState) -> int:
        """The number of the step that a state is about to make, from 1."""
        counter, number = self._counted
        return 1 + (number if state.step is counter else int(state.step))

    def hold(self, number: int, state: TrainState, metrics: Metrics, *, by_jit: bool) -> tuple[TrainState, Metrics]:
        """The state after the meetings that are due, and the metrics with what they sent.

        Args:
            number: of the step that was made.
            state: after it.
            metrics: of it.
            by_jit: leave the executables to `jit`.
        """
        parts = range(len(self.programs))
        sent = 0
        for part in parts if number == self._steps else self.replicas.diloco.due(number):
            meet = self._executables[part] if self._executables and not by_jit else self.programs[part]
            state, more = meet(state)
            metrics, sent = {**metrics, **more}, sent + self.replicas.wire_bytes(part)
        self._counted = (state.step, number)
        return state, {**metrics, "wire_bytes": np.float32(sent)}
