"""Find hooks of modules and parameters that a graph replay would skip, and detect changes of hooks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import groupby
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules import module as of_all

from fastmp.nn.segment import BoundSegment, LayerChain, Segment, SegmentedLayer, Tensors
from fastmp.tensor_parallel.attributes import hook_traits

__all__ = ["HookSnapshot", "SkippedHook", "merge_hooked_layers", "find_skipped_hook"]


_Hooks = Mapping[int, Callable]


_of_gradient = attrgetter("_backward_hooks")


_behind_gradient = attrgetter("_post_accumulate_grad_hooks")


class SkippedHook(NamedTuple):
    """A hook that a replay would skip. owner: a description of its module or parameter."""

    owner: str
    hook: Callable


def merge_hooked_layers(
    links: Iterable[BoundSegment],
) -> tuple[list[BoundSegment], dict[nn.Module, SkippedHook]]:
    """Merge the segments of each layer with a skipped hook into one segment: a call of the layer.

    Returns the links, and {such a layer: its hook}.
    """
    every: list[BoundSegment] = []
    called: dict[nn.Module, SkippedHook] = {}
    for _, group in groupby(links, attrgetter("name")):
        own = list(group)
        layer = own[0].layer
        skipped = called.get(layer) or _skipped(layer)
        if skipped is not None:
            called[layer] = skipped
            name = own[0].segment.name if len(own) == 1 else "layer"
            segment = Segment(name, _call(layer), False, f"a hook of {skipped.owner}")
            title = f"fastmp.layer.{type(layer).__name__}"
            own = [own[0]._replace(segment=segment, last=True, region=title)]
        every += own
    return every, called


def _call(layer: SegmentedLayer) -> Callable[..., Tensors]:
    def call(*tensors: torch.Tensor, **shared: Any) -> Tensors:
        made = layer(*tensors, **shared)
        return (made,) if isinstance(made, torch.Tensor) else tuple(made)

    return call


def _skipped(layer: nn.Module) -> SkippedHook | None:
    for module in layer.modules():
        for hook in (*_not_replayed([module._forward_pre_hooks]), *_all(_others(module))):
            return SkippedHook(type(module).__name__, hook)
    for name, param in layer.named_parameters():
        for hook in _all([param._backward_hooks or {}]):
            return SkippedHook(f"parameter {name!r}", hook)
    return next((SkippedHook("all modules", hook) for hook in _all(_GLOBAL)), None)


def find_skipped_hook(modules: Iterable[nn.Module], *, trains: bool) -> SkippedHook | None:
    """Return a hook that a function graph would skip, or None. trains: the function runs backwards."""
    for root in modules:
        for module in root.modules():
            of_forward = (module._forward_pre_hooks, module._forward_hooks)
            of_backward = (module._backward_pre_hooks, module._backward_hooks) if trains else ()
            for hook in _not_in_step((*of_forward, *of_backward)):
                return SkippedHook(type(module).__name__, hook)
        for name, param in root.named_parameters() if trains else ():
            for hook in _not_in_step((param._backward_hooks or {}, param._post_accumulate_grad_hooks or {})):
                return SkippedHook(f"parameter {name!r}", hook)
    return next((SkippedHook("all modules", hook) for hook in _all(_GLOBAL)), None)


def _not_in_step(several: Iterable[_Hooks]) -> Iterator[Callable]:
    return (hook for hook in _all(several) if not hook_traits(hook).in_step)


class HookSnapshot:
    """Detects hooks that were added or removed since the snapshot.

    every: track all hooks, otherwise those that are not replayed. It is compared before every step, so its
        lists are flat.
    """

    def __init__(self, chains: Iterable[LayerChain], every: bool = False) -> None:
        modules = [module for chain in chains for layer in chain for module in layer.modules()]
        self._before = [module._forward_pre_hooks for module in modules]
        self._others = [*(hooks for module in modules for hooks in _others(module)), *_GLOBAL]
        self._parameters = [p for module in modules for p in module._parameters.values() if p is not None]
        self._every = every
        self._first = self._now()

    def _now(self) -> list[Callable]:
        before = filter(None, self._before)
        return [
            *(_all(before) if self._every else _not_replayed(before)),
            *_all(filter(None, self._others)),
            *_all(self._of_gradients()),
        ]

    def _of_gradients(self) -> Iterator[_Hooks]:
        for attribute in (_of_gradient, _behind_gradient) if self._every else (_of_gradient,):
            yield from (hooks for hooks in map(attribute, self._parameters) if hooks is not None)

    def changed(self) -> bool:
        return self._now() != self._first

    def dicts(self) -> list[_Hooks]:
        """Return the dicts that hold the hooks."""
        return [*self._before, *self._others, *self._of_gradients()]


def _others(module: nn.Module) -> tuple[_Hooks, ...]:
    return module._forward_hooks, module._backward_pre_hooks, module._backward_hooks


_GLOBAL: tuple[_Hooks, ...] = (
    of_all._global_forward_pre_hooks,
    of_all._global_forward_hooks,
    of_all._global_backward_pre_hooks,
    of_all._global_backward_hooks,
)


def _all(several: Iterable[_Hooks]) -> Iterator[Callable]:
    return (hook for hooks in several for hook in hooks.values())


def _not_replayed(several: Iterable[_Hooks]) -> Iterator[Callable]:
    # `HookTraits.replayed`, read directly: this runs for every hook before every step.
    return (hook for hook in _all(several) if not getattr(hook, "replayed", False))
