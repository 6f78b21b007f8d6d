"""Segments: a layer is an ordered list of steps, so that it can be stopped between any two of them.

A segment takes and returns a tuple of tensors, which holds everything that crosses to the next segment. A
`capturable` segment has no host synchronisation, no data-dependent shape and no side effect on the host: a
CUDA graph can record it once and replay it. `forward` runs the segments in order. A graph manager or an
overlapping schedule runs them from outside, as `runner` of the chain. A layer with experts has the segments

    attention, router, preprocess | dispatch, experts, combine

of which the last three are not capturable if the host must know how many tokens other ranks send.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import groupby
from operator import attrgetter
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import nn

from fastmp.distributed.deferred import finish_all, finishing
from fastmp.profiling import region
from fastmp.schedule.stream_schedule import SegmentFacts

__all__ = [
    "BoundSegment", "LayerChain", "Runner", "Segment", "SegmentedLayer", "SingleSegment", "StageOutput",
    "is_rerun", "may_be_void", "rerunning", "run_segments",
]  # fmt: skip

Tensors = tuple[torch.Tensor, ...]
Call = Callable[..., torch.Tensor | Tensors]
Runner = Callable[["LayerChain", Tensors, Mapping[str, Any]], Tensors]
_is_rerun = False


class StageOutput(NamedTuple):
    """Result of a chunk of a pipeline that returns more than the tensors for the next stage.

    Attributes:
        tensors: for the next stage, or for the loss function.
        loss: 0-dim, a loss of this stage (the auxiliary losses of experts); its gradient is 1.
        stats: anything, returned to the caller; it must not hold the autograd graph.
    """

    tensors: torch.Tensor | Sequence[torch.Tensor]
    loss: torch.Tensor | None = None
    stats: Any = None


@contextmanager
def rerunning() -> Iterator[None]:
    """Mark forwards inside as a rerun of others, whose activations autograd keeps, not a stash."""
    global _is_rerun
    before, _is_rerun = _is_rerun, True
    try:
        yield
    finally:
        _is_rerun = before


def is_rerun() -> bool:
    """Return True inside `rerunning`."""
    return _is_rerun


def may_be_void(layers: Iterable[nn.Module]) -> bool:
    """Return True if the device may find that a step of `layers` does not count: a stash may overflow."""
    return any(getattr(module, "stash", None) is not None for each in layers for module in each.modules())


class Segment(NamedTuple):
    """A step of a layer.

    Attributes:
        run: takes the tensors that the previous segment returned.
        capturable: True if a CUDA graph can hold it.
        reason: a phrase for messages if it is not capturable.
        exchanges: True if it communicates with other ranks and can overlap another microbatch's compute.
        accepts_out: True if `run` takes `out=`, None or a tensor without a gradient, and writes its first
            result there if shape, dtype and device agree.
    """

    name: str
    run: Callable[..., Tensors]
    capturable: bool = True
    reason: str = ""
    exchanges: bool = False
    accepts_out: bool = False


class SegmentedLayer(nn.Module):
    """A layer made of `segments()`; forward runs them in order, each in a profiler range.

    forward takes the tensors of the first segment as positional arguments and returns those of the last
    segment, a single tensor without its tuple. Keywords go to the first segment.

    Example:
        >>> class Twice(SegmentedLayer):
        ...     def segments(self):
        ...         return Segment("double", lambda x: (2 * x,)), Segment("add", lambda x: (x + 1,))
        >>> Twice()(torch.ones(2))
        tensor([3., 3.])
    """

    def segments(self) -> tuple[Segment, ...]:
        raise NotImplementedError(f"{type(self).__name__} does not define its segments")

    def forward(self, *tensors: torch.Tensor, **shared: Any) -> torch.Tensor | Tensors:
        with finishing():
            for segment in self.segments():
                with region(f"fastmp.segment.{type(self).__name__}.{segment.name}"):
                    tensors = segment.run(*tensors, **shared)
                shared = {}
        return tensors[0] if len(tensors) == 1 else tensors


class SingleSegment(SegmentedLayer):
    """A layer of one segment around any module that maps tensors to a tensor or several.

    The segment has the name of the module's class.

    reason: a phrase that says why no graph can hold the module; empty: a graph can, which
        `fastmp.cuda_graphs.explain` checks.
    """

    def __init__(self, module: nn.Module, *, reason: str = "") -> None:
        super().__init__()
        self.module, self.reason = module, reason

    def segments(self) -> tuple[Segment, ...]:
        name = type(self.module).__name__
        return (Segment(name, lambda *x: _tuple(self.module(*x)), not self.reason, self.reason),)


class LayerChain(nn.ModuleList):
    """Layers in sequence: each takes the first tensor that the previous layer returned.

    forward(*tensors) passes its tensors to the first layer and returns (x, *others): the first tensor of the
    last layer, and all further tensors of the layers, in order. Keywords go to every layer.

    Args:
        modules: the layers; a module that is not a `SegmentedLayer` becomes a `SingleSegment`.
        call: called as `call(layer, x)` in place of layer(x), for example to recompute activations. A graph
            manager, which runs a chain by segments, calls `call(function, *tensors)` for consecutive segments
            of a layer.

    Attributes:
        runner: who runs the layers in place of `run`, called as `runner(chain, tensors, keywords)`: a graph
            manager, or overlapped microbatches; None for `run`. A copy of a chain has none.

    Example:
        >>> chain = LayerChain([nn.Linear(4, 4), nn.GELU()])
        >>> chain(torch.randn(2, 4))[0].shape
        torch.Size([2, 4])
    """

    def __init__(self, modules: Iterable[nn.Module] = (), call: Call | None = None) -> None:
        super().__init__(m if isinstance(m, SegmentedLayer) else SingleSegment(m) for m in modules)
        self.call = call

    @property
    def runner(self) -> Runner | None:
        return vars(self).get("_runner")

    @runner.setter
    def runner(self, runner: Runner | None) -> None:
        vars(self).pop("_runner", None)  # nothing is left of it, also for those who compare attributes
        if runner is not None:
            vars(self)["_runner"] = runner

    def forward(self, *tensors: torch.Tensor, **shared: Any) -> Tensors:
        return self.run(tensors, shared) if self.runner is None else self.runner(self, tensors, shared)

    def run(self, tensors: Tensors, shared: Mapping[str, Any]) -> Tensors:
        """Call the layers one after the other, with the tensors and keywords of `forward`."""
        others: Tensors = ()
        for layer in self:
            run = partial(layer, **shared) if shared else layer
            made = _tuple(run(*tensors) if self.call is None else self.call(run, *tensors))
            tensors, others = made[:1], others + made[1:]
        return *tensors, *others

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_runner"}

    def bound_segments(self) -> list[BoundSegment]:
        """Return the segments of all layers in order, for a graph manager, whose spans may cross layers."""
        links = []
        for name, layer in self._modules.items():  # a layer may be there twice
            assert isinstance(layer, SegmentedLayer)
            segments = layer.segments()
            first, last = segments[0], segments[-1]
            for each in segments:
                title = f"fastmp.segment.{type(layer).__name__}.{each.name}"
                links.append(BoundSegment(name, layer, each, each is first, each is last, title))
        return links


class BoundSegment(NamedTuple):
    """A segment with its layer and place in a chain.

    Attributes:
        name: the layer's name in the chain.
        first, last: True for a layer's first segment, which takes the keywords shared by all layers, and for
            its last, whose first tensor goes to the next layer.
        region: the name of its profiler range.
    """

    name: str
    layer: SegmentedLayer
    segment: Segment
    first: bool
    last: bool
    region: str

    @property
    def full_name(self) -> str:
        return f"{self.name}.{self.segment.name}"

    @property
    def facts(self) -> SegmentFacts:
        return SegmentFacts(self.full_name, self.segment.exchanges, self.segment.capturable)


def run_segments(
    links: Sequence[BoundSegment],
    tensors: Tensors,
    call: Call | None = None,
    *,
    shared: Mapping[str, Any] = MappingProxyType({}),
    out: torch.Tensor | None = None,
    begun: list[BoundSegment] | None = None,
) -> tuple[Tensors, Tensors]:
    """Run segments; return the tensors of the last one, and further tensors of the layers that ended.

    Args:
        call: the `call` of the chain.
        shared: the keywords that the chain was called with.
        out: where the last segment may write its first tensor, see `Segment.accepts_out`.
        begun: every segment is appended before it runs.
    """
    writer = links[-1] if out is not None and links[-1].segment.accepts_out else None
    if call is None:
        return _run_segments(links, tensors, shared, writer, out, begun)
    others: Tensors = ()
    for _, own in groupby(links, attrgetter("name")):
        part = _Part(list(own), shared, writer, out, begun)
        tensors = _tuple(call(part, *tensors))
        if part.links[-1].last:
            tensors, others = tensors[:1], others + tensors[1:]
    return tensors, others


def _run_segments(
    links: Sequence[BoundSegment],
    tensors: Tensors,
    shared: Mapping[str, Any],
    writer: BoundSegment | None = None,
    out: torch.Tensor | None = None,
    begun: list[BoundSegment] | None = None,
) -> tuple[Tensors, Tensors]:
    others: Tensors = ()
    with finishing():
        for link in links:
            if begun is not None:
                begun.append(link)
            with region(link.region):
                options = {"out": out} if link is writer else {}
                tensors = link.segment.run(*tensors, **options, **(shared if link.first else {}))
            if link.last:
                finish_all()
                tensors, others = tensors[:1], others + tuple(tensors[1:])
    return tensors, others


class _Part:
    """Segments of a layer as a function, which recomputation may call again: then `out` is not used."""

    def __init__(self, links: list[BoundSegment], shared: Mapping[str, Any], *options: Any) -> None:
        self.links, self.shared, self.options = links, shared, options

    def __call__(self, *tensors: torch.Tensor) -> Tensors:
        options, self.options = self.options, ()
        tensors, others = _run_segments(self.links, tensors, self.shared, *options)
        return *tensors, *others


def _tuple(output: torch.Tensor | Tensors) -> Tensors:
    return (output,) if isinstance(output, torch.Tensor) else tuple(output)
