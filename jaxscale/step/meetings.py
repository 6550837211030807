"""Meetings: the programs in which DiLoCo's replicas synchronise their weights, after steps that they train alone.

The inner step is one compiled program, checked to send nothing over the replica axis but single numbers: sums of the
loss and its weight, norms, agreement on a bad step. A meeting is a program of its own for each fragment of the weights
(a part of them that synchronises at once, `replicas.py`). The host decides after which steps one is due. The last step
of a run ends with a meeting of all fragments.
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
"""From the train state to the state after a fragment of the weights is synchronised, and metrics of the meeting."""


class Meetings:
    """The programs of the meetings, one for each fragment of the weights.

    Args:
        replicas: the replicas that meet.
        layout: layout of the train state.
        steps: number of steps of the run.
        noted: wraps a function so that its trace notes which kernels it takes.
    """

    def __init__(self, replicas: Replicas, layout: Layout, steps: int, noted: Callable[[Meeting], Meeting]) -> None:
        self.replicas, self._layout, self._steps = replicas, layout, steps
        self.programs = [
            jax.jit(
                noted(functools.partial(replicas.meet, fragment)),
                donate_argnums=0,
                in_shardings=(layout.state,),
                out_shardings=(layout.state, None),
            )
            for fragment in range(len(replicas.fragments))
        ]
        self._executables: list[jax.stages.Compiled] = []
        # (step counter of the newest state, its number), so that the number need not be read from the device
        self._counted: tuple[Array | None, int] = (None, 0)

    def trace(self) -> list[jax.stages.Traced]:
        """Trace the program of each fragment of the weights, and return what was traced."""
        return [program.trace(self._layout.abstract) for program in self.programs]

    def compile(self) -> None:
        """Compile a program for each fragment of the weights, and check what each sends."""
        executables = [traced.lower().compile() for traced in self.trace()]
        for fragment, executable in enumerate(executables):
            program = CompiledProgram(self._layout.mesh, executable.as_text)
            replicas = self.replicas
            check_meeting(replicas.diloco, replicas.stages[fragment], replicas.wire_bytes(fragment), program)
        self._executables = executables

    def number(self, state: TrainState) -> int:
        """The number of the step that starts from a state; the first step is 1."""
        counter, number = self._counted
        return 1 + (number if state.step is counter else int(state.step))

    def hold(self, number: int, state: TrainState, metrics: Metrics, *, by_jit: bool) -> tuple[TrainState, Metrics]:
        """Run the meetings that are due, and return the state after them, and metrics with the bytes sent.

        Args:
            number: number of the step that has just run.
            state: the state after that step.
            metrics: metrics of that step.
            by_jit: whether to call `jit`'s own programs instead of the compiled executables.
        """
        fragments = range(len(self.programs))
        sent_bytes = 0
        for fragment in fragments if number == self._steps else self.replicas.diloco.due(number):
            meet = self._executables[fragment] if self._executables and not by_jit else self.programs[fragment]
            state, meeting_metrics = meet(state)
            metrics, sent_bytes = {**metrics, **meeting_metrics}, sent_bytes + self.replicas.wire_bytes(fragment)
        self._counted = (state.step, number)
        return state, {**metrics, "wire_bytes": np.float32(sent_bytes)}
