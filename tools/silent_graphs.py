"""Graphs with empty replays: a step is then its CPU launch overhead."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from torch import Tensor


class SilentGraph:
    """Graph that runs its work at capture and only records the time at replay."""

    launched = 0  # ns, of the last replay of any

    @contextmanager
    def capture(self) -> Iterator[None]:
        yield

    def replay(self) -> None:
        SilentGraph.launched = time.perf_counter_ns()

    @property
    def launch(self) -> Callable[[], None]:
        return self.replay


class SilentBackend:
    """A backend of such graphs for a `GraphManager`. Results of replays are those of the capture."""

    runs_at_capture, rng, nbytes = True, None, 0
    owner: weakref.ref[Any] | None = None

    def trace_draws(self) -> AbstractContextManager[None]:
        return nullcontext()

    def prepare(self) -> None:
        """Do nothing."""

    def graph(
        self, forward: Any = None, draws: Any = None, has_backward: bool = False, pool: int = 0
    ) -> SilentGraph:
        return SilentGraph()

    def weak(self, tensor: Tensor) -> Callable[[], Tensor]:
        return tensor.detach().detach

    def reset(self) -> None:
        """Do nothing."""
