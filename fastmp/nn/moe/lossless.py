"""Forwards in evaluation mode that stay in CUDA graphs under a limited receive capacity, and drop nothing.

1. Inside `limited` layers keep their own dispatcher, which a graph can hold, and count what it drops.
2. The host reads the count of all ranks where it reads results anyway.
3. A forward that has dropped a token is void. The caller repeats it outside, where layers in evaluation mode
   dispatch by all-to-all, eagerly. Otherwise its bits are those of an all-to-all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn

from fastmp.distributed.collectives import gather_objects, sum_over_
from fastmp.distributed.groups import ParallelGroups
from fastmp.nn.moe.layer import MoELayer

__all__ = ["LosslessForwards"]

P = ParamSpec("P")
T = TypeVar("T")
G = TypeVar("G", bound=Callable[..., Any])


class LosslessForwards:
    """Run forwards of a model whose experts have a limited receive capacity, without dropping a token.

    All ranks construct it together, and call its methods and the functions that it returns together.

    Args:
        modules: the model in evaluation mode, or this rank's pipeline stages.
        groups: its process groups.

    Attributes:
        needed: True if a layer of any rank may drop tokens; otherwise forwards run as they are.

    Example (needs a model and a graph backend):
        >>> texts = {"name": "the scoring", "advice": "run it eagerly"}
        >>> make = partial(FunctionGraph, modules=[model], backend=backend, **texts)
        >>> graphs, scores = LosslessForwards([model], groups).graphed(scores, make)
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

    def graphed(
        self, function: Callable[P, T], make: Callable[[Callable[P, Any]], G]
    ) -> tuple[G, Callable[P, T]]:
        """Return the graphs `make(function)`, and a function that calls them and drops nothing.

        make: called inside `limited`, with `function` or, if layers may drop tokens, with one that also
            returns how many were dropped.
        """
        if not self.needed:
            graphs = make(function)
            return graphs, graphs

        def counted(*args: P.args, **kwargs: P.kwargs) -> tuple[T, Tensor]:
            with self.limited():
                before = self.count()
                result = function(*args, **kwargs)
                return result, self.dropped_since(before)

        with self.limited():
            graphs = make(counted)

        def checked(*args: P.args, **kwargs: P.kwargs) -> T:
            result, number = graphs(*args, **kwargs)
            return function(*args, **kwargs) if int(number) else result

        return graphs, checked

    def count(self) -> Tensor:
        """Return the counters of this rank's layers (layers,)."""
        if self._counters:
            return torch.stack(self._counters)
        return torch.zeros(0, dtype=torch.int64, device=self._device)

    def dropped_since(self, before: Tensor) -> Tensor:
        """Return the number (1,) of assignments that all ranks dropped since `before`; forget them."""
        number = (self.count() - before).sum().view(1)
        for counter, value in zip(self._counters, before.unbind(), strict=True):
            counter.copy_(value)  # what training drops is counted on from here
        return sum_over_(number, self.groups.tp_cp_dp, self.groups.pp)
