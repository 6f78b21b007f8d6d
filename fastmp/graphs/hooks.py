"""Decides what becomes of the hooks of modules and parameters where graphs are replayed.

A replay calls no module, and segments that run one by one call no layer, so most hooks would be skipped: a
layer with such a hook runs eagerly as a whole. Two kinds of hooks are replayed, which means that they are
called beside each replay: hooks before a forward with the mark `hook.replayed = True`, called as
hook(module, ()), and hooks behind accumulated gradients, unless they are in the graph (`hook.in_graph`).
The graph of a whole function or step, beside which nothing is called, takes hooks with the mark
`hook.in_step = True` alone: what they do with tensors is in it, and the rest need not be done again.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.autograd import Variable
from torch.nn.modules import module as of_all

from fastmp.nn.segment import LayerChain, Link, Segment, SegmentedLayer, Tensors
from fastmp.parallel.schedule import BACKWARD_WEIGHT

if TYPE_CHECKING:
    from fastmp.graphs.graph_set import Gradients, Slot
    from fastmp.graphs.runs import Observed, Part

__all__ = [
    "GradHook", "HookWatch", "Skipped", "call_grad_hooks", "call_pre_hooks", "called_whole",
    "ReplayedHooks", "replayed_hooks", "skipped_by_step", "suspended_hooks",
]  # fmt: skip

GradHook = tuple[Callable[[nn.Parameter], None], nn.Parameter]
_Hooks = Mapping[int, Callable]
_of_gradient = attrgetter("_backward_hooks")
_behind_gradient = attrgetter("_post_accumulate_grad_hooks")


class Skipped(NamedTuple):
    """A hook that a replay would skip. owner: the module or parameter that has it, in words."""

    owner: str
    hook: Callable


def called_whole(links: Iterable[Link]) -> tuple[list[Link], dict[nn.Module, Skipped]]:
    """Join the links of each layer that has a hook which a replay would skip into one link that calls it.

    Returns the links, and these layers with the hook.
    """
    every: list[Link] = []
    called: dict[nn.Module, Skipped] = {}
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


def _skipped(layer: nn.Module) -> Skipped | None:
    for module in layer.modules():
        for hook in (*_not_replayed([module._forward_pre_hooks]), *_all(_others(module))):
            return Skipped(type(module).__name__, hook)
    for name, param in layer.named_parameters():
        for hook in _all([param._backward_hooks or {}]):
            return Skipped(f"parameter {name!r}", hook)
    return next((Skipped("all modules", hook) for hook in _all(_GLOBAL)), None)


def skipped_by_step(modules: Iterable[nn.Module], *, trains: bool) -> Skipped | None:
    """A hook that the graph of a whole function would skip; `trains`: whether there are backwards in it."""
    for root in modules:
        for module in root.modules():
            of_forward = (module._forward_pre_hooks, module._forward_hooks)
            of_backward = (module._backward_pre_hooks, module._backward_hooks) if trains else ()
            for hook in _not_in_step((*of_forward, *of_backward)):
                return Skipped(type(module).__name__, hook)
        for name, param in root.named_parameters() if trains else ():
            for hook in _not_in_step((param._backward_hooks or {}, param._post_accumulate_grad_hooks or {})):
                return Skipped(f"parameter {name!r}", hook)
    return next((Skipped("all modules", hook) for hook in _all(_GLOBAL)), None)


def _not_in_step(several: Iterable[_Hooks]) -> Iterator[Callable]:
    return (hook for hook in _all(several) if not getattr(hook, "in_step", False))


class HookWatch:
    """Notices that hooks have been added or removed since it was made.

    every: all of them; else those that are not replayed. It is asked before every step, so its lists are
    flat.
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
        """What holds the hooks."""
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
    return (hook for hook in _all(several) if not getattr(hook, "replayed", False))


def call_pre_hooks(modules: Iterable[nn.Module]) -> None:
    """Call the marked hooks before the forward of `modules`, as hook(module, ())."""
    for module in modules:
        for hook in module._forward_pre_hooks.values():
            hook(module, ())


def replayed_hooks(params: Iterable[nn.Parameter]) -> list[GradHook]:
    """The hooks behind accumulated gradients that are not in a graph, with their parameters."""
    every = [(hook, p) for p in params for hook in (p._post_accumulate_grad_hooks or {}).values()]
    return [(hook, param) for hook, param in every if not getattr(hook, "in_graph", False)]


def call_grad_hooks(hooked: Iterable[GradHook]) -> None:
    for hook, param in hooked:
        hook(param)


@contextmanager
def suspended_hooks(part: Part) -> Iterator[list[nn.Parameter]]:
    """Suspend the replayed hooks of a part while it is captured or compared.

    Yields a list that collects the parameters whose gradients are accumulated meanwhile, in order.
    """
    inside = (module for layer in part.layers for module in layer.modules())
    modules = [(module, module._forward_pre_hooks) for module in inside if module._forward_pre_hooks]
    params = [(param, param._post_accumulate_grad_hooks) for param in part.parameters]
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


class ReplayedHooks:
    """Calls the hooks of training steps that are replayed.

    A hook behind an accumulated gradient is called once in a backward, and once where the gradients that it
    has deferred are made: right after the replay, or, where another run may add to the gradient too, at the
    end (a deferred hook). Which hooks a graph has is looked up once, until hooks are added or removed.

    observed: the modules that each run calls, by (chunk, run).
    """

    def __init__(self, observed: Mapping[tuple[int, int], Observed], runs: Sequence[Sequence[Part]]) -> None:
        # The runs that may add to the gradient of each parameter.
        self._runs_of = Counter(param for chunk in runs for run in chunk for param in run.parameters)
        self._called = {place: each.calls for place, each in observed.items()}
        self._every = list(dict.fromkeys(module for calls in self._called.values() for module in calls))
        self._deferred: dict[GradHook, None] = {}
        self._found: list[tuple[Callable, ...]] | None = None
        self.begin_step()

    def begin_step(self) -> None:
        """Forget what a failed step has deferred, and all lists where a hook has been added or removed."""
        self._deferred.clear()
        found = [
            *[tuple(module._forward_pre_hooks.values()) for module in self._every],
            *[tuple(hooks.values()) if hooks else () for hooks in map(_behind_gradient, self._runs_of)],
        ]
        if found != self._found:
            self._found = found
            self._modules: dict[tuple[int, int], list[nn.Module]] = {}  # by chunk and run
            # By graph: its gradients, the hooks that are called at once, and those that are deferred.
            self._of_gradients: dict[int, tuple[Gradients, list[GradHook], list[GradHook]]] = {}

    def before_forward(self, chunk: int, number: int) -> None:
        """Call the marked hooks of the modules that a run calls."""
        call_pre_hooks(self.modules(chunk, number))

    def modules(self, chunk: int, number: int) -> list[nn.Module]:
        """The modules that a run calls and that have hooks before their forward."""
        modules = self._modules.get((chunk, number))
        if modules is None:
            modules = [module for module in self._called[chunk, number] if module._forward_pre_hooks]
            self._modules[chunk, number] = modules
        return modules

    def after_gradients(self, slot: Slot, gradients: Gradients) -> None:
        """Call the hooks behind the gradients that a graph has accumulated, or defer them."""
        now, deferred = self.of_gradients(slot, gradients)
        call_grad_hooks(now)
        if deferred:
            if not self._deferred and slot.kind != BACKWARD_WEIGHT:  # which is not in a backward
                Variable._execution_engine.queue_callback(self.call_deferred)
            self._deferred.update(dict.fromkeys(deferred))

    def of_gradients(self, slot: Slot, gradients: Gradients) -> tuple[list[GradHook], list[GradHook]]:
        """The hooks behind the gradients of a graph: those that are called at once, and those deferred."""
        known = self._of_gradients.get(slot.graph)
        if known is None or known[0] is not gradients:  # the graph was captured again
            hooked = replayed_hooks(gradients.reached)
            deferred = [each for each in hooked if self._runs_of[each[1]] > 1]
            now = [each for each in hooked if self._runs_of[each[1]] < 2]
            known = self._of_gradients[slot.graph] = gradients, now, deferred
        return known[1:]

    def call_deferred(self) -> None:
        """Call the hooks that wait for the end."""
        deferred = list(self._deferred)
        self._deferred.clear()
        call_grad_hooks(deferred)
