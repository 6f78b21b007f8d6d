"""Interface of backends, which capture work for a `GraphManager` and replay it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor

__all__ = ["Backend", "Graph", "RandomStreams", "Weak"]

Weak = Callable[[], Tensor]


class RandomStreams(Protocol):
    """Random streams that swap with the default generator, as those of an `RngTracker`."""

    @property
    def current(self) -> str: ...
    def fork(self, name: str) -> AbstractContextManager[None]: ...
    def states(self) -> Mapping[str, Any]: ...
    def restore(self, states: Mapping[str, Any]) -> None: ...
    def generators(self) -> dict[str, torch.Generator]: ...
    def kept_by(
        self,
        keeper: Callable[[], Mapping[str, torch.Generator] | None],
        ended: Callable[[Any], None] | None = None,
        again: Callable[[], Mapping[str, torch.Generator] | None] | None = None,
    ) -> Any: ...


class Graph(Protocol):
    """`with graph.capture(): ...` records the work inside; `replay()` repeats it on the same memory.

    `launch` of a captured graph is `replay` with as little Python as possible. Inside `eager_backward()` the
    backward of the work can run eagerly, after a replay or a successful capture.
    """

    def capture(self) -> AbstractContextManager[None]: ...
    def replay(self) -> None: ...
    @property
    def launch(self) -> Callable[[], None]: ...
    def eager_backward(self) -> AbstractContextManager[None]: ...


class Backend(Protocol):
    """Captures and replays graphs that share memory, in a pool for each lane (see `lanes`).

    runs_at_capture: a capture also does the work, instead of only recording it.
    owner: the manager that uses the backend; set by the manager.
    """

    runs_at_capture: bool
    owner: weakref.ref[Any] | None

    @property
    def rng(self) -> Any:
        """The `RandomStreams` that the work draws from; None: torch's default generator only."""

    @property
    def nbytes(self) -> int:
        """The bytes of all memory pools."""

    def trace_draws(self) -> AbstractContextManager[Any]:
        """Trace the random draws of eager work that will be captured later; yields `draws` for `graph`."""

    def prepare(self) -> None:
        """Prepare for captures: called once in each step that captures, before its first capture."""

    def graph(self, forward: Any = None, draws: Any = None, has_backward: bool = False, pool: int = 0) -> Any:
        """Make a new `Graph`.

        forward: the graph of the forward whose backward this one will hold. draws: from `trace_draws`.
        has_backward: the work runs forwards and their backwards, and so did the traced work.
        pool: the number of the memory pool. A graph may overwrite what one of its pool has left, unless it is
            held at the capture; graphs of two pools may be replayed in any order.
        """

    def weak(self, tensor: Tensor) -> Weak:
        """Return a function that returns an alias of `tensor`, without keeping its memory allocated."""

    def reset(self) -> None:
        """Release all graphs; later ones get new pools."""
