"""Restore the state that running a span has changed, for verification and failed captures."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._functorch import config as functorch_config

from fastmp.cuda_graphs.backends.interface import RandomStreams
from fastmp.cuda_graphs.partition import Span, nodes_behind

__all__ = ["SpanSnapshot", "random_states", "repeatable_backward", "restore_random_states"]


class SpanSnapshot:
    """Copies of the buffers and gradients that running a span may change.

    parameters: those whose gradients the span accumulates, as others may be in communication. None: all of
        the span.
    """

    def __init__(self, span: Span, parameters: Sequence[nn.Parameter] | None = None) -> None:
        self._part = span
        self._parameters = span.parameters if parameters is None else list(dict.fromkeys(parameters))
        self._grads = [param.grad for param in self._parameters]
        self._held = _held(span, self._parameters)
        self.values = {name: None if each is None else each.clone() for name, each in self._held}

    @torch.no_grad()
    def restore(self) -> None:
        """Restore the values in place: the tensors may be views of a buffer that is being reduced."""
        for param, grad in zip(self._parameters, self._grads, strict=True):
            param.grad = grad
        for name, tensor in self._held:
            value = self.values[name]
            if tensor is not None and value is not None:
                tensor.data.copy_(value)  # no version bump: other microbatches have saved the tensor

    def now(self) -> dict[str, Tensor | None]:
        """Return the present values, not copied."""
        return dict(_held(self._part, self._parameters))


def _held(span: Span, parameters: Sequence[nn.Parameter]) -> list[tuple[str, Tensor | None]]:
    layers = {link.layer: link.name for link in span.links}
    held: list[tuple[str, Tensor | None]] = [
        (f"buffer '{at}.{name}'", buffer)
        for layer, at in layers.items()
        for name, buffer in layer.named_buffers()
    ]
    names = {p: f"{at}.{name}" for layer, at in layers.items() for name, p in layer.named_parameters()}
    for param in parameters:
        held.append((f"the gradient of parameter {names[param]!r}", param.grad))
        held.append((f"the main gradient of parameter {names[param]!r}", getattr(param, "main_grad", None)))
    return held


@contextmanager
def repeatable_backward(outputs: Sequence[Tensor], does_work: bool) -> Iterator[None]:
    """Keep a backward of `outputs` inside repeatable: if it raises, it can be run again.

    Three cases need care. Compiled code donates saved buffers to its backward, so donation is turned off. A
    fused loss, whose forward computes the gradient, allows one backward and may scale the gradient in place.
    Experts with an activation stash free and overwrite their part of the ring.

    does_work: the backward inside computes; otherwise it is only captured.
    """
    nodes: list[Any] = list(nodes_behind(outputs))
    losses = [node for node in nodes if hasattr(node, "spent")]
    saved = tuple(each for loss in losses for each in loss.saved_tensors if each is not None)
    rewinds = {id(each): each for node in nodes for each in getattr(node, "rewinds", ())}
    changed = (*saved, *rewinds.values()) if does_work else ()
    values = [tensor.clone() for tensor in changed]
    try:
        with (
            torch.autograd._unsafe_preserve_version_counter(saved),
            functorch_config.patch(donated_buffer=False),
        ):
            yield
    except BaseException:
        for loss in losses:
            loss.spent = False
        for tensor, value in zip(changed, values, strict=True):
            tensor.data.copy_(value)
        raise


def random_states(rng: RandomStreams | None) -> Mapping[str, Tensor]:
    """Return the states of all random streams of `rng`, or of torch's default generators."""
    if rng is not None:
        return rng.states()
    cuda: dict[str, Any] = {"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_initialized() else {}
    return {"cpu": torch.get_rng_state(), **cuda}


def restore_random_states(rng: RandomStreams | None, states: Mapping[str, Tensor]) -> None:
    """Restore states from `random_states`."""
    if rng is not None:
        rng.restore(dict(states))
        return
    torch.set_rng_state(states["cpu"])
    if "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"])
