"""Replays captured graphs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fastmp.cuda_graphs.graph_set import Captured, Gradients, ReplaySlot
from fastmp.nn.segment import Tensors

__all__ = ["Replay", "add_gradients"]


class Replay:
    """Replays the graphs of a run, whose static buffers hold what they read."""

    def forward(self, slot: ReplaySlot, captured: Captured, static: Sequence[Tensor]) -> Tensors:
        """The outputs of a run that it makes itself."""
        captured.forward.replay()
        return tuple([each() for each in captured.outputs if not isinstance(each, int)])

    def backward(self, slot: ReplaySlot, captured: Captured, grads: Sequence[Tensor]) -> list[Tensor | None]:
        """The gradients of a run's inputs; those of its parameters are added to `grad`."""
        assert captured.backward is not None
        return self._replay(captured.backward)

    def weights(self, slot: ReplaySlot, captured: Captured) -> None:
        """Add the deferred gradients of a run's parameters."""
        assert captured.weight is not None
        self._replay(captured.weight)

    def _replay(self, gradients: Gradients) -> list[Tensor | None]:
        gradients.graph.replay()
        self.accumulate(gradients)
        return [each and each() for each in gradients.inputs]

    @staticmethod
    def accumulate(gradients: Gradients) -> None:
        """Add the gradients of parameters that a replay has left in memory of the graph."""
        if gradients.parameters:
            add_gradients(gradients)


@torch.no_grad()
def add_gradients(gradients: Gradients) -> None:
    """Add the gradients of parameters to `grad`, as copies: the next replay overwrites them."""
    sums: tuple[list[Tensor], list[Tensor]] = [], []
    for param, grad in gradients.parameters:
        if param.grad is None:
            param.grad = grad().clone()
        else:
            sums[0].append(param.grad)
            sums[1].append(grad())
    if sums[0]:
        torch._foreach_add_(*sums)
