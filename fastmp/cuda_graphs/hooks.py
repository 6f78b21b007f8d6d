"""Call the hooks of modules and parameters for graph replays.

A replay calls no module, so most hooks would be skipped: a layer with such a hook runs eagerly as a whole.
Two kinds of hooks are called by the host next to each replay:

- forward pre-hooks with the mark `hook.replayed = True`, as hook(module, ());
- hooks after accumulated gradients, unless they are in the graph (`hook.in_graph`).

A function graph or full-iteration graph has no host code next to it. It accepts hooks with the mark
`hook.in_step = True` alone: their work on tensors is captured, and the rest need not be repeated.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import attrgetter

from torch import nn
from torch.autograd import Variable

from fastmp.cuda_graphs.partition import Span, SpanTrace
from fastmp.schedule.schedule import BACKWARD_WEIGHT
from fastmp.tensor_parallel.attributes import hook_traits

__all__ = [
    "GradHook", "call_grad_hooks", "call_pre_hooks",
    "ReplayedHooks", "replayed_hooks", "suspended_hooks",
]  # fmt: skip

_post_accumulate_hooks = attrgetter("_post_accumulate_grad_hooks")
GradHook = tuple[Callable[[nn.Parameter], None], nn.Parameter]


def call_pre_hooks(modules: Iterable[nn.Module]) -> None:
    """Call the forward pre-hooks of `modules` as hook(module, ())."""
    for module in modules:
        for hook in module._forward_pre_hooks.values():
            hook(module, ())


def replayed_hooks(params: Iterable[nn.Parameter]) -> list[GradHook]:
    """Return the hooks after accumulated gradients that are not in a graph, with their parameters."""
    every = [(hook, p) for p in params for hook in (p._post_accumulate_grad_hooks or {}).values()]
    return [(hook, param) for hook, param in every if not hook_traits(hook).in_graph]


def call_grad_hooks(hooked: Iterable[GradHook]) -> None:
    for hook, param in hooked:
        hook(param)


@contextmanager
def suspended_hooks(span: Span) -> Iterator[list[nn.Parameter]]:
    """Suspend the replayed hooks of a span while it is captured or verified.

    Yields a list that collects the parameters whose gradients are accumulated inside, in order.
    """
    inside = (module for layer in span.layers for module in layer.modules())
    modules = [(module, module._forward_pre_hooks) for module in inside if module._forward_pre_hooks]
    params = [(param, param._post_accumulate_grad_hooks) for param in span.parameters]
    visited: list[nn.Parameter] = []
    watching: list[OrderedDict] = []
    try:
        for module, _ in modules:
            module._forward_pre_hooks = OrderedDict()
        for param, hooks in params:
            kept = {key: hook for key, hook in (hooks or {}).items() if hook_traits(hook).in_graph}
            watching.append(OrderedDict({**kept, -1: visited.append}))
            param._post_accumulate_grad_hooks = watching[-1]
        yield visited
    finally:
        for module, hooks in modules:
            module._forward_pre_hooks = hooks
        for param, hooks in params:
            param._post_accumulate_grad_hooks = hooks
        for hooks in watching:  # C++ keeps these where a parameter had none, and with them the parameters
            hooks.clear()


class ReplayedHooks:
    """Calls the hooks of replayed training steps.

    A hook after an accumulated gradient is called once in a backward, and once after its deferred weight
    gradients: right after the replay, or, if another span may add to the gradient too, at the end of the
    backward (a deferred hook). The hooks of each graph are looked up once, until hooks are added or removed.

    traces: the modules that each span calls, by (chunk, span).
    """

    def __init__(self, traces: Mapping[tuple[int, int], SpanTrace], spans: Sequence[Sequence[Span]]) -> None:
        # The spans that may add to the gradient of each parameter.
        self._num_spans = Counter(param for chunk in spans for span in chunk for param in span.parameters)
        self._called = {place: each.calls for place, each in traces.items()}
        self._every = list(dict.fromkeys(module for calls in self._called.values() for module in calls))
        self._deferred: dict[GradHook, None] = {}
        self._found: list[tuple[Callable, ...]] | None = None
        self.begin_step()

    def begin_step(self) -> None:
        """Drop the deferred hooks of a failed step, and all lists if a hook was added or removed."""
        self._deferred.clear()
        found = [
            *[tuple(module._forward_pre_hooks.values()) for module in self._every],
            *[
                tuple(hooks.values()) if hooks else ()
                for hooks in map(_post_accumulate_hooks, self._num_spans)
            ],
        ]
        if found != self._found:
            self._found = found
            self._modules: dict[tuple[int, int], list[nn.Module]] = {}  # by chunk and span
            # By graph: its gradients, the hooks that are called at once, and those that are deferred.
            self._of_gradients: dict[int, tuple[list[nn.Parameter], list[GradHook], list[GradHook]]] = {}

    def before_forward(self, chunk: int, number: int) -> None:
        """Call the forward pre-hooks of the modules that a span calls."""
        call_pre_hooks(self.modules(chunk, number))

    def modules(self, chunk: int, number: int) -> list[nn.Module]:
        """Return the modules with forward pre-hooks among those that a span calls."""
        modules = self._modules.get((chunk, number))
        if modules is None:
            modules = [module for module in self._called[chunk, number] if module._forward_pre_hooks]
            self._modules[chunk, number] = modules
        return modules

    def after_gradients(self, graph: int, kind: str, visited: list[nn.Parameter]) -> None:
        """Call the hooks after the gradients that a graph has accumulated, or defer them."""
        now, deferred = self.of_gradients(graph, visited)
        call_grad_hooks(now)
        if deferred:
            if not self._deferred and kind != BACKWARD_WEIGHT:  # which is not in a backward
                Variable._execution_engine.queue_callback(self.call_deferred)
            self._deferred.update(dict.fromkeys(deferred))

    def of_gradients(self, graph: int, visited: list[nn.Parameter]) -> tuple[list[GradHook], list[GradHook]]:
        """Return the hooks after the gradients of a graph: (called right away, deferred)."""
        known = self._of_gradients.get(graph)
        if known is None or known[0] is not visited:  # the graph was captured again
            hooked = replayed_hooks(visited)
            deferred = [each for each in hooked if self._num_spans[each[1]] > 1]
            now = [each for each in hooked if self._num_spans[each[1]] < 2]
            known = self._of_gradients[graph] = visited, now, deferred
        return known[1:]

    def call_deferred(self) -> None:
        """Call the deferred hooks at the end of a backward."""
        deferred = list(self._deferred)
        self._deferred.clear()
        call_grad_hooks(deferred)
