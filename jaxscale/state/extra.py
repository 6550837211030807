"""StateExtra: the arrays that a technique adds to a train state, their placement, and their form in a checkpoint.

`TrainState.extra` holds the value of each extra under the extra's name, which is also the prefix of its arrays in a
checkpoint. There are four extras: the residuals of a codec (`step/exchange.py`), the weights of replicas that train
alone (`step/replicas.py`), the microbatches in flight of an asynchronous pipeline (`step/pipelined/asynchronous.py`),
and the average of weights (`state/ema.py`). A plan without a technique ignores the technique's extra in a checkpoint.
An extra that is missing from a checkpoint starts from its initial value.
"""

import dataclasses
import functools
from collections.abc import Callable, Container, Iterable, Sequence
from typing import Protocol, runtime_checkable

import jax
from jax.sharding import AbstractMesh, Mesh

from jaxscale.compiler.collectives import Collective, collectives
from jaxscale.platforms.megascale import slices_of
from jaxscale.state.layout import Layout
from jaxscale.state.naming import Naming, Part
from jaxscale.state.train_state import TrainState
from jaxscale.typing import PyTree

EXTRAS = ("in_flight", "reduce", "outer", "ema")
"""Names of all extras."""


class Unreadable(Exception):
    """The text of a compiled program uses a notation that this version of jaxscale cannot read."""


@dataclasses.dataclass(frozen=True)
class CompiledProgram:
    """A compiled program, parsed for checks.

    Args:
        mesh: mesh of the devices that the program runs on.
        as_text: function that returns the text of the program, or `None` if the backend provides no text.
    """

    mesh: Mesh | AbstractMesh
    as_text: Callable[[], str | None]

    @functools.cached_property
    def collectives(self) -> Sequence[Collective]:
        """The collectives of the program.

        Raises:
            Unreadable: the text uses an unknown notation.
        """
        try:
            return collectives(self._text, self.mesh)
        except (AssertionError, LookupError, ValueError) as error:
            raise Unreadable(repr(error)) from error

    @functools.cached_property
    def slice_count(self) -> int:
        """Number of TPU slices between which the program sends; 1 if the program runs on a single slice."""
        return slices_of(self._text)

    @functools.cached_property
    def _text(self) -> str:
        """Text of the program; empty if the backend provides no text."""
        return self.as_text() or ""


@runtime_checkable
class StateExtra(Protocol):
    """The arrays that a technique adds to a train state."""

    @property
    def name(self) -> str:
        """Key of the extra in `TrainState.extra`, and prefix of its arrays' names in a checkpoint: one of `EXTRAS`."""
        ...

    @property
    def label(self) -> str:
        """Name of the extra in tables of memory."""
        ...

    def add_to_layout(self, layout: Layout) -> Layout:
        """Return the layout of a train state with this extra, given the layout without it."""
        ...

    def init(self, state: TrainState) -> PyTree:
        """Return the initial value of the extra, given a state without it. Callers jit this with `out_shardings`."""
        ...

    def to_saved(self, state: TrainState) -> TrainState:
        """Return a train state whose extra is in the form that a checkpoint holds."""
        ...

    def to_saved_abstract(self, abstract: TrainState) -> TrainState:
        """Return what `to_saved` returns, but with shapes, dtypes and placements instead of arrays."""
        ...

    def from_saved(self, state: TrainState) -> TrainState:
        """Return the train state of a step, given its saved form, in which missing leaves are `None`."""
        ...

    def checkpoint_parts(self, naming: Naming, abstract: TrainState) -> PyTree[Part]:
        """Return a tree like the saved extra, with the `Part` of each leaf, which describes the leaf's arrays.

        Args:
            naming: gives the names of the arrays that come from leaves shaped like parameters.
            abstract: shapes of the train state in its saved form.
        """
        ...

    def note_on_missing(self, saved_names: Container[str], step_names: Iterable[str]) -> str:
        """Return a note for the user on missing arrays of the extra; empty if none are missing.

        The note starts with "; ", because it continues a message.

        Args:
            saved_names: names of the arrays in the checkpoint.
            step_names: names of the arrays that the step restores.
        """
        ...

    def describe(self) -> list[str]:
        """Return lines for the user that describe the technique, to print before the first step."""
        ...

    def check(self, program: CompiledProgram) -> None:
        """Check that the technique takes effect in the compiled step.

        Raises:
            NoEffect: the technique takes no effect.
            Unreadable: the text of the program uses an unknown notation.
        """
        ...


def lacks(tree: PyTree) -> bool:
    """Return whether any leaf of a tree is `None`, which marks an array that the checkpoint lacks."""
    return any(leaf is None for leaf in jax.tree.leaves(tree, is_leaf=lambda leaf: leaf is None))
