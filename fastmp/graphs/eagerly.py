"""Runs a run eagerly beside its graphs, or in their place, and puts back what that changes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fastmp.graphs.backend import RandomStreams
from fastmp.graphs.runs import Part

__all__ = ["PartState", "random_states", "restore_random_states"]


class PartState:
    """What running a part changes besides its outputs: buffers, and gradients of its parameters."""

    def __init__(self, part: Part) -> None:
        self._part = part
        self._grads = [param.grad for param in part.parameters]
        self._held = _held(part)
        self.values = {name: None if each is None else each.clone() for name, each in self._held}

    @torch.no_grad()
    def put_back(self) -> None:
        """Restore the values, in the tensors that were there: these may be views of one that is reduced."""
        for param, grad in zip(self._part.parameters, self._grads, strict=True):
            param.grad = grad
        for name, tensor in self._held:
            value = self.values[name]
            if tensor is not None and value is not None:
                tensor.data.copy_(value)  # autograd does not mind: other microbatches have saved it

    def now(self) -> dict[str, Tensor | None]:
        """The present values, not copied."""
        return dict(_held(self._part))


def _held(part: Part) -> list[tuple[str, Tensor | None]]:
    layers = {link.layer: link.name for link in part.links}
    held: list[tuple[str, Tensor | None]] = [
        (f"buffer '{at}.{name}'", buffer)
        for layer, at in layers.items()
        for name, buffer in layer.named_buffers()
    ]
    names = {p: f"{at}.{name}" for layer, at in layers.items() for name, p in layer.named_parameters()}
    for param in part.parameters:
        held.append((f"the gradient of parameter {names[param]!r}", param.grad))
        held.append((f"the main gradient of parameter {names[param]!r}", getattr(param, "main_grad", None)))
    return held


def random_states(rng: RandomStreams | None) -> Mapping[str, Tensor]:
    """The states of all random streams, or of torch's default generators."""
    if rng is not None:
        return rng.states()
    cuda: dict[str, Any] = {"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_initialized() else {}
    return {"cpu": torch.get_rng_state(), **cuda}


def restore_random_states(rng: RandomStreams | None, states: Mapping[str, Tensor]) -> None:
    if rng is not None:
        rng.restore(dict(states))
        return
    torch.set_rng_state(states["cpu"])
    if "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"])
