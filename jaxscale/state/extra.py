"""StateExtra: what a technique adds to a train state, where it lies, and which part of it a checkpoint holds.

`TrainState.extra` holds the value of an extra under its name, and a checkpoint holds arrays with that prefix. There are
three extras: the residuals of a codec (`step/exchange.py`), the weights of replicas that train alone
(`step/replicas.py`), and what an asynchronous pipeline has in flight (`step/pipelined/asynchronous.py`). A plan without
a technique ignores its extra in a checkpoint. An extra that a checkpoint lacks starts from its initial value.
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

EXTRAS = ("in_flight", "reduce", "outer")
"""Names of all extras."""


class Unreadable(Exception):
    """The text of a compiled program has a notation that is unknown to this version."""


@dataclasses.dataclass(frozen=True)
class CompiledProgram:
    """A compiled program, parsed for checks.

    Args:
        mesh: mesh of its devices.
        as_text: function that returns its text; `None` if the backend has none.
    """

    mesh: Mesh | AbstractMesh
    as_text: Callable[[], str | None]

    @functools.cached_property
    def collectives(self) -> Sequence[Collective]:
        """The collectives of the program.

        Raises:
            Unreadable: the text has an unknown notation.
        """
        try:
            return collectives(self._text, self.mesh)
        except (AssertionError, LookupError, ValueError) as error:
            raise Unreadable(repr(error)) from error

    @functools.cached_property
    def slices(self) -> int:
        """Number of TPU slices that the program sends between; 1 for a single slice."""
        return slices_of(self._text)

    @functools.cached_property
    def _text(self) -> str:
        return self.as_text() or ""


@runtime_checkable
class StateExtra(Protocol):
    """What a technique adds to a train state."""

    @property
    def name(self) -> str:
        """Key in `TrainState.extra`, and prefix of the names of its arrays in a checkpoint: one of `EXTRAS`."""
        ...

    @property
    def label(self) -> str:
        """Name of the extra in tables of memory."""
        ...

    def placed(self, layout: Layout) -> Layout:
        """The layout of a train state with this extra, from the layout without it."""
        ...

    def init(self, state: TrainState) -> PyTree:
        """The initial value of the extra, from a state that lacks it: a function to jit with `out_shardings`."""
        ...

    def saved(self, state: TrainState) -> TrainState:
        """A train state with the extra in the form that a checkpoint holds."""
        ...

    def saved_abstract(self, abstract: TrainState) -> TrainState:
        """`saved` for shapes, dtypes and placements instead of arrays."""
        ...

    def loaded(self, state: TrainState) -> TrainState:
        """The inverse of `saved`, from a state in which leaves that the checkpoint lacks are `None`."""
        ...

    def parts(self, naming: Naming, abstract: TrainState) -> PyTree[Part]:
        """A tree like the saved extra with a `Part` for each leaf: the arrays of a checkpoint that the leaf becomes.

        Args:
            naming: names of the arrays of leaves that are shaped like parameters.
            abstract: shapes of the saved state.
        """
        ...

    def notes(self, names: Container[str], wanted: Iterable[str]) -> str:
        """A note for the user on missing arrays of the extra, starting with a semicolon; empty if none are missing.

        Args:
            names: names of the arrays in the checkpoint.
            wanted: names of the arrays that the step restores.
        """
        ...

    def describe(self) -> list[str]:
        """Lines for the user before the first step."""
        ...

    def check(self, program: CompiledProgram) -> None:
        """Check that the compiled step does what the technique is for.

        Raises:
            NoEffect: it does not.
            Unreadable: the text of the program has an unknown notation.
        """
        ...


def lacks(tree: PyTree) -> bool:
    """Whether any leaf of a tree is `None`, because the checkpoint lacks it."""
    return any(leaf is None for leaf in jax.tree.leaves(tree, is_leaf=lambda leaf: leaf is None))
