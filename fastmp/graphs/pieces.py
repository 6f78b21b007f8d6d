"""Chains of layers, cut into runs that are captured and what lies between; hooks that a replay would skip."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from fastmp.graphs.hooks import called_whole
from fastmp.graphs.plan import TensorSpec, captured_segments
from fastmp.nn.segment import Call, LayerChain, Link

__all__ = ["Piece", "Shapes", "cut", "hooks_aside", "spec_of"]


@dataclass(frozen=True, eq=False)
class Piece:
    """Segments that follow each other.

    begins: layers that start here and that nobody calls: hooks before their forward run by hand.
    call: how its chain runs what belongs to one layer.
    """

    name: str
    links: list[Link]
    captured: bool
    begins: list[nn.Module]
    call: Call | None

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Of its layers, those that are trained now."""
        layers = dict.fromkeys(link.layer for link in self.links)
        return list(dict.fromkeys(p for layer in layers for p in layer.parameters() if p.requires_grad))


class Shapes(NamedTuple):
    """What an eager step has shown of a run.

    inputs: with whether each requires a gradient; outputs: those that have a gradient.
    calls: the modules that it calls, in order; watched: what the backend has seen.
    keeps: whether something before it may keep the gradients of its inputs as they are.
    """

    inputs: list[tuple[TensorSpec, bool]]
    outputs: list[TensorSpec]
    calls: list[nn.Module]
    watched: Any
    keeps: bool


def cut(chain: LayerChain, scope: Sequence[str] | None) -> list[Piece]:
    """Maximal runs of what can be captured and is in `scope`, and what lies between them, as a layer with
    hooks that a replay would skip.

    ValueError as `captured_segments`.
    """
    links = chain.links()
    eager = {link.segment.name for link in links if not link.segment.capturable}
    chosen = captured_segments(scope, {link.segment.name: link.segment.name not in eager for link in links})
    links, called = called_whole(links)
    begun: list[nn.Module] = [*called]
    pieces: list[Piece] = []
    for captured, own in groupby(links, lambda link: _captures(link, scope, chosen)):
        piece = list(own)
        first, last = (link.full_name for link in (piece[0], piece[-1]))
        layers: list[nn.Module] = list(dict.fromkeys(link.layer for link in piece))
        pieces.append(
            Piece(
                first if first == last else f"{first} to {last}",
                piece,
                captured,
                [layer for layer in layers if layer not in begun],
                chain.call,
            )
        )
        begun += layers
    return pieces


def _captures(link: Link, scope: Sequence[str] | None, chosen: set[str]) -> bool:
    """Without a scope also segments of a name that others cannot be captured under."""
    return link.segment.capturable and (scope is None or link.segment.name in chosen)


def spec_of(tensor: Tensor) -> TensorSpec:
    """With strides where the tensor is dense but in another order: products on such a one differ in bits."""
    return TensorSpec(
        tuple(tensor.shape),
        str(tensor.dtype).removeprefix("torch."),
        None if tensor.is_contiguous() or not _dense(tensor) else tensor.stride(),
    )


def _dense(tensor: Tensor) -> bool:
    expected = 1
    for size, stride in sorted(zip(tensor.shape, tensor.stride()), key=lambda pair: pair[1]):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


@contextmanager
def calls() -> Iterator[list[nn.Module]]:
    """The modules that are called inside, in order."""
    called: list[nn.Module] = []
    handle = register_module_forward_pre_hook(lambda module, args: called.append(module))
    try:
        yield called
    finally:
        handle.remove()


def call_pre_hooks(modules: Iterable[nn.Module]) -> None:
    """Hooks before forward that are marked, as (module, ()): a replay calls no module."""
    for module in modules:
        for hook in module._forward_pre_hooks.values():
            hook(module, ())


Hooked = tuple[Callable[[nn.Parameter], None], nn.Parameter]


def hooks_by_hand(params: Iterable[nn.Parameter]) -> list[Hooked]:
    """Hooks behind gradients that are no part of a graph, with their parameters."""
    every = [(hook, p) for p in params for hook in (p._post_accumulate_grad_hooks or {}).values()]
    return [(hook, param) for hook, param in every if not getattr(hook, "in_graph", False)]


def call_grad_hooks(hooked: Iterable[Hooked]) -> None:
    for hook, param in hooked:
        hook(param)


@contextmanager
def hooks_aside(piece: Piece) -> Iterator[list[nn.Parameter]]:
    """Takes away the hooks that run by hand; gives the parameters whose hooks it kept from running."""
    layers = dict.fromkeys(link.layer for link in piece.links)
    modules = [(m, m._forward_pre_hooks) for layer in layers for m in layer.modules() if m._forward_pre_hooks]
    params = [(param, param._post_accumulate_grad_hooks) for param in piece.parameters]
    reached: list[nn.Parameter] = []
    try:
        for module, _ in modules:
            module._forward_pre_hooks = OrderedDict()
        for param, hooks in params:
            kept = {key: hook for key, hook in (hooks or {}).items() if getattr(hook, "in_graph", False)}
            param._post_accumulate_grad_hooks = OrderedDict({**kept, -1: reached.append})
        yield reached
    finally:
        for module, hooks in modules:
            module._forward_pre_hooks = hooks
        for param, hooks in params:
            param._post_accumulate_grad_hooks = hooks


@torch.no_grad()
def renew_accumulators(params: Sequence[nn.Parameter]) -> None:
    """Nodes that accumulate run on the stream on which they were made, and last as long as any graph of
    autograd that they are in, say of the loss before: a captured backward needs nodes made in its forward.
    Data of another dtype, for a moment, makes autograd forget the old one.
    """
    for param in params:
        data = param.data
        other = torch.float32 if data.dtype != torch.float32 else torch.float64
        param.data = torch.empty(0, dtype=other, device=data.device)
        param.data = data


def keeps_gradients(piece: Piece, inputs: Iterable[Tensor], outputs: Iterable[Tensor]) -> bool:
    """Whether a leaf between the two may take a gradient that reaches it for its own: it has no `main_grad`.

    A parameter of the piece may be used in some steps only; a leaf from elsewhere is seen if it was used.
    """
    if not all(hasattr(param, "main_grad") for param in piece.parameters):
        return True
    seen = {tensor.grad_fn for tensor in inputs}
    nodes = [tensor.grad_fn for tensor in outputs]
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable") and not hasattr(node.variable, "main_grad"):
            return True
        nodes += [before for before, _ in node.next_functions]
    return False
