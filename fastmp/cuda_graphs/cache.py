"""Cache captured graphs by input signature; drop them when the model that they were captured from changes."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Generic, TypeVar

from torch import nn

from fastmp.cuda_graphs.backends.interface import Backend
from fastmp.cuda_graphs.errors import GraphError
from fastmp.cuda_graphs.snapshot import ModelSnapshot
from fastmp.nn.segment import LayerChain

__all__ = ["MAX_SIGNATURES", "GraphCache"]

MAX_SIGNATURES = 4  # that have graphs; each has static buffers of its own
_OFTEN = 4  # changes of a number after which a warning says that it costs captures
_TENSOR = "write a number that changes often to a tensor that forward reads"

Captured = TypeVar("Captured")


class GraphCache(dict[Hashable, Captured], Generic[Captured]):
    """The graphs of a model: {input signature: captured graphs}, for up to `MAX_SIGNATURES` signatures.

    Args:
        chains: the layers whose parameters, buffers, modes and hooks the graphs rely on.
        backend: holds the memory pools of the graphs, and is reset with them.
        every_hook: also track replayed hooks, see `ModelSnapshot`.
    """

    def __init__(self, chains: Sequence[LayerChain], backend: Backend, *, every_hook: bool = False) -> None:
        super().__init__()
        self._chains, self._backend, self._every_hook = chains, backend, every_hook
        self._snapshot: ModelSnapshot | None = None
        self._changes = Counter[str]()  # of numbers, by name

    @property
    def full(self) -> bool:
        return len(self) >= MAX_SIGNATURES

    def snapshot(self, captured: Iterable[nn.Module] | None = None) -> ModelSnapshot:
        """Return the state of the model at the first call since the cache was empty.

        captured: the layers that are captured; None: all.
        """
        if self._snapshot is None:
            self._snapshot = ModelSnapshot(self._chains, self._every_hook, captured)
        return self._snapshot

    def running(self) -> AbstractContextManager[None]:
        """Return a context in which the model runs eagerly: numbers that it changes are not compared."""
        return nullcontext() if self._snapshot is None else self._snapshot.running()

    def check(self) -> bool:
        """Return True if the model is as at `snapshot`; otherwise drop all graphs and return False.

        Raises:
            GraphError: a parameter, buffer or main gradient is not where the graphs read or write it.
        """
        if self._snapshot is None:
            return False
        changed, moved = self._snapshot.changed()
        if moved and self:
            raise GraphError(
                f"graphs: {moved} or its main gradient has moved since graphs were captured, which "
                "read it by address; change its values in place, or create the graphs after the change"
            )
        if changed:
            self.count_change(self._snapshot.changed_number(), _TENSOR)
            self.drop()
        return not changed

    def count_change(self, number: str | None, advice: str) -> None:
        """Count a change of a number, which drops graphs; warn of one that changes often."""
        if number is None:
            return
        self._changes[number] += 1
        if self._changes[number] == _OFTEN:
            warnings.warn(
                f"graphs: {number} has changed {_OFTEN} times, and graphs are captured again after each "
                f"change; {advice}",
                stacklevel=2,
            )

    def drop(self) -> None:
        """Release all graphs, their memory pools and the snapshot; nothing may be in flight."""
        self._snapshot = None
        if self:
            self.clear()
            self._backend.reset()
