"""Forwards in evaluation mode that stay in CUDA graphs under a limited receive capacity, and drop nothing.

1. Inside `limited` layers keep their own dispatcher, which a graph can hold, and count what it drops.
2. The host reads the count of all ranks where it reads results anyway.
3. A forward that has dropped a token is void. The caller repeats it outside, where layers in evaluation mode
   dispatch by all-to-all, eagerly. Otherwise its bits are those of an all-to-all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor, nn

from fastmp.distributed.collectives import gather_objects, sum_over_
from fastmp.distributed.groups import ParallelGroups
from fastmp.nn.moe.layer import MoELayer

__all__ = ["LosslessForwards"]

P = ParamSpec("P")
T = TypeVar("T")


class LosslessForwards:
    """Run forwards of a model whose experts have a limited receive capacity, without dropping a token.

    All ranks construct it together, and call the functions that it returns together.

    Args:
        modules: the model in evaluation mode, or this rank's pipeline stages.
        groups: its process groups.

    Attributes:
        needed: True if a layer of any rank may drop tokens; otherwise forwards run as they are.

    Example (needs a model and a graph backend):
        >>> lossless = LosslessForwards([model], groups)
        >>> with lossless.limited():
        ...     graph = FunctionGraph(lossless.counted(scores), [model], backend=backend, name="", advice="")
        >>> values = lossless.checked(graph, scores)(batch)
    """

    def __init__(self, modules: Iterable[nn.Module], groups: ParallelGroups) -> None:
        every = [module for root in modules for module in root.modules()]
        self.groups = groups
        self.layers = [
            module for module in every if isinstance(module, MoELayer) and module.dropped_pairs is not None
        ]
        self._counters = [layer.dropped_pairs for layer in self.layers if layer.dropped_pairs is not None]
        self._device = next((param.device for module in every for param in module.parameters()), None)
        # A pipeline stage may have no layer with experts.
        self.needed = any(gather_objects(bool(self.layers), groups.pp))

    @contextmanager
    def limited(self) -> Iterator[None]:
        """Enter a context in which layers keep their limited capacity; nothing is counted yet."""
        with ExitStack() as stack:
            for layer in self.layers:
                stack.enter_context(layer.limited_capacity())
            yield

    def counted(self, function: Callable[P, T]) -> Callable[P, tuple[T, Tensor]]:
        """Return `function` under the limited capacity, for a graph.

        Its result is (result, the number () of assignments that any rank has dropped, on the device).
        """

        def run(*args: P.args, **kwargs: P.kwargs) -> tuple[T, Tensor]:
            with self.limited():
                before = self._count()
                result = function(*args, **kwargs)
                number = self._count() - before
            # The counters go on to count what training drops.
            for counter, value in zip(self._counters, before.unbind(), strict=True):
                counter.copy_(value)
            number = number.sum().view(1)
            return result, sum_over_(number, self.groups.tp_cp_dp, self.groups.pp)[0]

        return run

    def checked(
        self,
        counted: Callable[P, tuple[T, Tensor]],
        function: Callable[P, T],
        before_repeat: Callable[[], None] = lambda: None,
    ) -> Callable[P, T]:
        """Return a function that calls `counted`, and `function` eagerly if that has dropped a token.

        before_repeat: restores the state that a void call has changed.
        """

        def run(*args: P.args, **kwargs: P.kwargs) -> T:
            result, number = counted(*args, **kwargs)
            if not int(number):
                return result
            before_repeat()
            return function(*args, **kwargs)

        return run

    def _count(self) -> Tensor:
        if self._counters:
            return torch.stack(self._counters)
        return torch.zeros(0, dtype=torch.int64, device=self._device)
