"""Holds a run against its segments: both on the same inputs and random numbers, compared bit by bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from fastmp.graphs.errors import GraphError
from fastmp.graphs.pieces import Piece, hooks_aside
from fastmp.graphs.variant import Slot
from fastmp.nn.segment import Tensors, run_links
from fastmp.ops.wgrad import WgradQueue, defer_wgrad
from fastmp.parallel.schedule import BACKWARD

if TYPE_CHECKING:
    from fastmp.graphs.recording import RandomStreams

__all__ = ["Verifier"]


class _Eager(NamedTuple):
    """What is left of an eager forward until its backward."""

    inputs: list[Tensor]
    outputs: list[Tensor]  # those with a gradient
    queue: WgradQueue | None


class Verifier:
    """Compares the replays of one step with what their segments do eagerly.

    rng: the streams that segments draw from; None: torch's default generators.

    `wanted`: whether the forward that is under way is to be compared; its backward is if it was.

    GraphError naming the run, the microbatch and the first tensor that differs. Hooks that run by hand do so
    once, after the comparison.
    """

    def __init__(self, rng: RandomStreams | None) -> None:
        self.rng, self.wanted = rng, True
        self._eager: dict[tuple[int, int, int], _Eager] = {}

    def __contains__(self, key: tuple[int, int, int]) -> bool:
        """Whether the backward of this microbatch, chunk and run is to be compared."""
        return key in self._eager

    def forward(
        self,
        slot: Slot,
        piece: Piece,
        inputs: list[Tensor],
        work: Callable[[], Tensors],
        split: bool,
    ) -> Tensors:
        """What `work()`, the replay, made.

        inputs: copies of what it reads; split: the gradients of its weights are deferred.
        """
        streams, before = self._streams(), _State(piece)
        made = work()
        drawn, after = self._streams(), _State(piece)  # a fused loss has gradients in its forward
        self._restore(streams)
        before.put_back()
        queue = WgradQueue() if split else None
        with torch.enable_grad(), hooks_aside(piece), defer_wgrad(queue):
            tensors, others = run_links(piece.links, tuple(inputs), piece.call)
        expected = [t for t in (*tensors, *others) if not any(t is given for given in inputs)]
        for i, pair in enumerate(zip(made, expected, strict=True)):
            _compare(slot, f"output {i}", *pair)
        for name, state in self._streams().items():
            _compare(slot, f"random stream {name!r}", drawn[name], state)
        after.compare(slot)
        outputs = [output for output in expected if output.requires_grad]
        self._eager[slot.key] = _Eager(inputs, outputs, queue)
        return made

    def backward(
        self,
        slot: Slot,
        piece: Piece,
        grads: Sequence[Tensor | None],
        work: Callable[[], list[Tensor | None]],
    ) -> list[Tensor | None]:
        """What `work()`, the replay, made of `grads` for the inputs."""
        eager = self._eager[slot.key]

        def eagerly() -> None:
            roots = [(out, grad.clone()) for out, grad in zip(eager.outputs, grads) if grad is not None]
            torch.autograd.backward([out for out, _ in roots], [grad for _, grad in roots])
            if eager.queue is not None and slot.kind == BACKWARD:
                WgradQueue.run(eager.queue.take())

        own = self._both(slot, piece, work, eagerly)
        if slot.kind == BACKWARD or eager.queue is None:
            del self._eager[slot.key]
        for i, (given, grad) in enumerate(zip(eager.inputs, own, strict=True)):
            _compare(slot, f"the gradient of input {i}", grad, given.grad)
        return own

    def weights(self, slot: Slot, piece: Piece, work: Callable[[], list[Tensor | None]]) -> None:
        """The same for the weights whose gradients the backward has deferred."""
        eager = self._eager.pop(slot.key)
        self._both(slot, piece, work, lambda: WgradQueue.run(eager.queue.take()))

    def _both(
        self,
        slot: Slot,
        piece: Piece,
        work: Callable[[], list[Tensor | None]],
        eagerly: Callable[[], None],
    ) -> list[Tensor | None]:
        before = _State(piece)
        own = work()
        after = _State(piece)
        before.put_back()
        with torch.enable_grad(), hooks_aside(piece):
            eagerly()
        after.compare(slot)
        return own

    def _streams(self) -> dict[str, Tensor]:
        if self.rng is not None:
            return self.rng.states()
        cuda = {"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_initialized() else {}
        return {"cpu": torch.get_rng_state(), **cuda}

    def _restore(self, states: dict[str, Tensor]) -> None:
        if self.rng is not None:
            self.rng.restore(states)
            return
        torch.set_rng_state(states["cpu"])
        if "cuda" in states:
            torch.cuda.set_rng_state(states["cuda"])


class _State:
    """What a run may change of its layers: buffers, and for each parameter its `grad` and `main_grad`."""

    @torch.no_grad()
    def __init__(self, piece: Piece) -> None:
        self._piece = piece
        self._grads = [param.grad for param in piece.parameters]
        self._held = _held(piece)
        self._values = [None if each is None else each.clone() for _, each in self._held]

    @torch.no_grad()
    def put_back(self) -> None:
        """As it was, in the tensors that were there: they may be views of one that is reduced."""
        for param, grad in zip(self._piece.parameters, self._grads, strict=True):
            param.grad = grad
        for (_, tensor), value in zip(self._held, self._values, strict=True):
            if tensor is not None:
                tensor.data.copy_(value)  # autograd does not mind: other microbatches have saved it

    def compare(self, slot: Slot) -> None:
        """With what there is now, then put it back."""
        for (name, now), value in zip(_held(self._piece), self._values, strict=True):
            _compare(slot, name, value, now)
        self.put_back()


def _held(piece: Piece) -> list[tuple[str, Tensor | None]]:
    layers = {link.layer: link.name for link in piece.links}
    held = [
        (f"buffer '{at}.{name}'", buffer)
        for layer, at in layers.items()
        for name, buffer in layer.named_buffers()
    ]
    names = {p: f"{at}.{name}" for layer, at in layers.items() for name, p in layer.named_parameters()}
    for param in piece.parameters:
        for grad in (param.grad, getattr(param, "main_grad", None)):
            held.append((f"the gradient of parameter {names[param]!r}", grad))
    return held


def _compare(slot: Slot, what: str, graph: Tensor | None, eager: Tensor | None) -> None:
    if graph is None and eager is None:
        return
    if graph is None or eager is None:
        difference = (
            f"{'nothing' if graph is None else 'a tensor'}, eagerly {'nothing' if eager is None else 'one'}"
        )
    elif graph.shape != eager.shape or graph.dtype != eager.dtype:
        difference = f"{tuple(graph.shape)} {graph.dtype}, eagerly {tuple(eager.shape)} {eager.dtype}"
    elif torch.equal(_bits(graph), _bits(eager)):
        return
    else:
        far = (graph.detach().double() - eager.detach().double()).abs().max()
        difference = f"up to {float(far):.3g} from what its segments make eagerly"
    raise GraphError(f"graphs: the {slot.name}: {what} is {difference}")


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)
