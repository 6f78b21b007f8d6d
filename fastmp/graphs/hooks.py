"""Hooks of modules and parameters that a replay would skip: where there are any, a layer is called instead.

A replay calls no module, and segments that run one by one call no layer. Only hooks before a forward that are
marked, `hook.by_hand = True`, run all the same, as hook(module, ()): those that need the module alone, as to
gather its parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import groupby
from operator import attrgetter
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.modules import module as of_all

from fastmp.nn.segment import Link, Segment, SegmentedLayer, Tensors

__all__ = ["HookWatch", "Skipped", "called_whole"]

_Hooks = Mapping[int, Callable]


class Skipped(NamedTuple):
    """A hook that a replay would skip. owner: whose it is, in words."""

    owner: str
    hook: Callable


def called_whole(links: Iterable[Link]) -> tuple[list[Link], dict[nn.Module, Skipped]]:
    """The links of a chain, where a layer with a hook that a replay would skip is one, which calls it; and
    these layers, with the hook."""
    every: list[Link] = []
    called: dict[nn.Module, Skipped] = {}
    for _, own in groupby(links, attrgetter("name")):
        own = list(own)
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
    def call(*tensors: torch.Tensor) -> Tensors:
        made = layer(*tensors)
        return (made,) if isinstance(made, torch.Tensor) else tuple(made)

    return call


def _skipped(layer: nn.Module) -> Skipped | None:
    for module in layer.modules():
        for hook in (*_unmarked([module._forward_pre_hooks]), *_all(_others(module))):
            return Skipped(type(module).__name__, hook)
    for name, param in layer.named_parameters():
        for hook in _all([param._backward_hooks or {}]):
            return Skipped(f"parameter {name!r}", hook)
    return next((Skipped("all modules", hook) for hook in _all(_GLOBAL)), None)


class HookWatch:
    """Notices that hooks which are not run by hand have come or gone. Asked before every step, so it is kept
    flat."""

    def __init__(self, chains: Iterable[nn.Module]) -> None:
        modules = [module for chain in chains for layer in chain for module in layer.modules()]
        self._before = [module._forward_pre_hooks for module in modules]
        self._others = [*(hooks for module in modules for hooks in _others(module)), *_GLOBAL]
        self._parameters = [p for module in modules for p in module._parameters.values() if p is not None]
        self._first = self._now()

    def _now(self) -> list[Callable]:
        of_gradients = filter(None, map(attrgetter("_backward_hooks"), self._parameters))
        return [
            *_unmarked(filter(None, self._before)),
            *_all(filter(None, self._others)),
            *_all(of_gradients),
        ]

    def changed(self) -> bool:
        return self._now() != self._first


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


def _unmarked(several: Iterable[_Hooks]) -> Iterator[Callable]:
    return (hook for hook in _all(several) if not getattr(hook, "by_hand", False))
