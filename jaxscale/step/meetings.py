"""Meetings: the programs in which DiLoCo's replicas synchronize their weights, after steps in which they train alone.

The inner step is one compiled program. A check ensures that this program sends only scalars over the replica axis: sums
of the loss and weights, norms, and whether the step is good. The weights are divided into fragments (`replicas.py`),
and the meeting of each fragment is a program of its own. The host decides after which steps a meeting is due. After the
last step of a run, all fragments meet.
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
"""A function from the train state to the state after the meeting of a fragment, and the metrics of the meeting."""


class Meetings:
    """The programs of the meetings, one for each fragment of the weights.

    Args:
        replicas: the replicas that meet.
        layout: layout of the train state.
        step_count: number of steps of the run.
        with_recording: function that wraps a meeting, so that a trace of the meeting records the kernels that it uses.

    Attributes:
        programs: the jitted meeting of each fragment.
    """

    def __init__(
        self, replicas: Replicas, layout: Layout, step_count: int, with_recording: Callable[[Meeting], Meeting]
    ) -> None:
        self.replicas, self._layout, self._step_count = replicas, layout, step_count
        self.programs = [
            jax.jit(
                with_recording(functools.partial(replicas.meet, fragment_index)),
                donate_argnums=0,
                in_shardings=(layout.state_shardings,),
                out_shardings=(layout.state_shardings, None),
            )
            for fragment_index in range(len(replicas.names_of_fragments))
        ]
        self._executables: list[jax.stages.Compiled] = []  # one for each fragment; empty before `compile`
        # the newest state's step counter on the device, and its value, so that no step reads it from the device
        self._newest_counter: Array | None = None
        self._newest_step = 0

    def trace(self) -> list[jax.stages.Traced]:
        """Trace the program of each fragment, and return the traced programs."""
        return [program.trace(self._layout.abstract) for program in self.programs]

    def compile(self) -> None:
        """Compile the program of each fragment, and check the number of bytes that it sends."""
        executables, replicas = [traced.lower().compile() for traced in self.trace()], self.replicas
        for fragment_index, executable in enumerate(executables):
            program = CompiledProgram(self._layout.mesh, executable.as_text)
            exchange, wire_bytes = replicas.fragment_exchanges[fragment_index], replicas.wire_bytes(fragment_index)
            check_meeting(replicas.diloco, exchange, wire_bytes, program)
        self._executables = executables

    def next_step_number(self, state: TrainState) -> int:
        """Return the number of the step that starts from a state, counted from 1."""
        return 1 + (self._newest_step if state.step is self._newest_counter else int(state.step))

    def run_due(
        self, step_number: int, state: TrainState, metrics: Metrics, *, is_run_by_jit: bool
    ) -> tuple[TrainState, Metrics]:
        """Run the meetings that are due; return the state after them, and the metrics, which include the bytes sent.

        Args:
            step_number: number of the step that has just run, counted from 1.
            state: the state after this step.
            metrics: metrics of this step.
            is_run_by_jit: whether to call the jitted programs instead of the compiled executables.
        """
        programs = self._executables if self._executables and not is_run_by_jit else self.programs
        fragment_indices = (
            range(len(self.programs)) if step_number == self._step_count else self.replicas.diloco.due(step_number)
        )
        sent_bytes = 0
        for fragment_index in fragment_indices:
            state, meeting_metrics = programs[fragment_index](state)
            metrics = {**metrics, **meeting_metrics}
            sent_bytes += self.replicas.wire_bytes(fragment_index)
        self._newest_counter, self._newest_step = state.step, step_number
        return state, {**metrics, "wire_bytes": np.float32(sent_bytes)}
