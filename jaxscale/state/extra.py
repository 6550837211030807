"""StateExtra: what a technique adds to a train state, where it lies, and which part of it a checkpoint holds.

`TrainState.extra` has its value under its name, and a checkpoint under that prefix. Three exist: the residuals of a
codec (`step/exchange.py`), the weights of replicas that train alone (`step/replicas.py`), and what an asynchronous
pipeline has in flight (`step/pipelined/asynchronous.py`). Another plan leaves them behind; a checkpoint without them is
taken up.
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
    """The text of a compiled program has a spelling that is not known."""


@dataclasses.dataclass(frozen=True)
class CompiledProgram:
    """A compiled program, as checks read it.

    Args:
        mesh: its devices.
        as_text: gives its text.
    """

    mesh: Mesh | AbstractMesh
    as_text: Callable[[], str | None]

    @functools.cached_property
    def collectives(self) -> Sequence[Collective]:
        """What its devices send.

        Raises:
            Unreadable: a spelling that is not known.
        """
        try:
            return collectives(self._text, self.mesh)
        except (AssertionError, LookupError, ValueError) as error:
            raise Unreadable(repr(error)) from error

    @functools.cached_property
    def slices(self) -> int:
        """Slices that it sends between."""
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
        """Its name in tables of memory."""
        ...

    def placed(self, layout: Layout) -> Layout:
        """The layout of a train state that has it, from that of one without."""
        ...

    def init(self, state: TrainState) -> PyTree:
        """Its value in a state that lacks it: a function to jit with `out_shardings`."""
        ...

    def saved(self, state: TrainState) -> TrainState:
        """A state as a checkpoint holds it."""
        ...

    def saved_abstract(self, abstract: TrainState) -> TrainState:
        """Its shapes, dtypes and placements."""
        ...

    def loaded(self, state: TrainState) -> TrainState:
        """The inverse of `saved`, where leaves that a checkpoint lacks are `None`."""
        ...

    def parts(self, naming: Naming, abstract: TrainState) -> PyTree[Part]:
        """How the leaves of its value become arrays of a checkpoint: a tree of `Part` like its saved value.

        Args:
            naming: of leaves that are shaped as parameters.
            abstract: of the saved state.
        """
        ...

    def notes(self, names: Container[str], wanted: Iterable[str]) -> str:
        """A note for the user on what a checkpoint lacks, behind a semicolon; mostly empty.

        Args:
            names: of the checkpoint's arrays.
            wanted: names of the step's.
        """
        ...

    def describe(self) -> list[str]:
        """Lines for the user before the first step."""
        ...

    def check(self, program: CompiledProgram) -> None:
        """Compare the compiled step with what the technique promises.

        Raises:
            NoEffect: they differ.
            Unreadable: the text of the program has a spelling that is not known.
        """
        ...


def lacks(tree: PyTree) -> bool:
    """Whether a checkpoint had not all of a tree."""
    return any(leaf is None for leaf in jax.tree.leaves(tree, is_leaf=lambda leaf: leaf is None))
