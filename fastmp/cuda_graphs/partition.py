"""Partition a layer chain into captured spans and the eager spans between them.

A captured span holds as many consecutive capturable segments as possible, across layer boundaries, up to a
number of parameters if there is one. The helpers that trace a warm-up step describe the inputs and outputs of
each span.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils._pytree import TreeSpec, tree_flatten, tree_structure, tree_unflatten

from fastmp.cuda_graphs.skipped_hooks import merge_hooked_layers
from fastmp.nn.segment import BoundSegment, Call, LayerChain, Tensors, run_segments
from fastmp.schedule.buffer_plan import TensorSpec
from fastmp.schedule.scope import layer_groups, span_kinds
from fastmp.schedule.stream_schedule import SegmentFacts

__all__ = [
    "CapturedSpan", "EagerSpan", "Shared", "Span", "SpanTrace", "called_modules", "made_by",
    "may_alias_grads", "nodes_behind", "partition", "partition_sections", "segment_facts", "spec_of",
]  # fmt: skip


@dataclass(frozen=True, eq=False)
class Span:
    """Consecutive segments of a chain: a `CapturedSpan` or an `EagerSpan`.

    name: "first segment to last segment".
    begins: layers whose first segment is here, and whose own forward is not called: their marked forward
        pre-hooks are replayed.
    call: the function by which the chain calls the segments of one layer (see `LayerChain`).
    """

    name: str
    links: list[BoundSegment]
    begins: list[nn.Module]
    call: Call | None

    @cached_property
    def reads_shared(self) -> bool:
        """True if a layer begins here: its first segment reads the shared keywords of the chain."""
        return any(link.first for link in self.links)

    @property
    def layers(self) -> list[nn.Module]:
        """The layers with segments here, each once."""
        return list(dict.fromkeys(link.layer for link in self.links))

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters of these layers that require a gradient at present."""
        return list(dict.fromkeys(p for layer in self.layers for p in layer.parameters() if p.requires_grad))


class CapturedSpan(Span):
    """Segments in one graph. If a layer begins in it, its inputs end with the tensors of shared keywords."""

    def through(
        self, inputs: Tensors, shared: TreeSpec, begun: list[BoundSegment] | None = None
    ) -> tuple[Tensors, Tensors]:
        """Run the segments and return (hidden tensors, auxiliary outputs), as `run_segments`.

        shared: the structure of the shared keywords; their tensors are the last of `inputs`.
        """
        first = len(inputs) - (shared.num_leaves if self.reads_shared else 0)
        keywords = tree_unflatten(inputs[first:], shared) if first < len(inputs) else {}
        return run_segments(self.links, inputs[:first], self.call, shared=keywords, begun=begun)


class EagerSpan(Span):
    """Segments that run eagerly in every step."""


class Shared(NamedTuple):
    """The keywords that a chain passes to all layers: their tensors, and their structure."""

    keywords: Mapping[str, Any]
    tensors: Tensors
    form: TreeSpec

    @classmethod
    def of(cls, keywords: Mapping[str, Any]) -> Shared:
        """Flatten `keywords`. ValueError if they hold anything but tensors."""
        if not keywords:
            return _NOTHING
        leaves, form = tree_flatten(keywords)
        for leaf in leaves:
            if not isinstance(leaf, Tensor):
                raise ValueError(
                    f"graphs: keywords shared by all layers must consist of tensors, got {leaf!r}"
                )
        return cls(keywords, tuple(leaves), form)

    def append_to(self, tensors: Tensors, span: Span) -> Tensors:
        """Append the shared tensors to the inputs of `span` if a layer begins in it."""
        return (*tensors, *self.tensors) if self.tensors and span.reads_shared else tensors


_NOTHING = Shared({}, (), tree_structure({}))


class SpanTrace(NamedTuple):
    """A captured span as an eager warm-up step has run it.

    inputs: (spec, requires_grad) of each. outputs: the specs of the differentiable ones.
    calls: the modules that the span calls, in order.
    draws: the random draws, from `Backend.trace_draws`.
    may_alias_grads: code before the span may keep the gradients of its inputs without copying them.
    """

    inputs: list[tuple[TensorSpec, bool]]
    outputs: list[TensorSpec]
    calls: list[nn.Module]
    draws: Any
    may_alias_grads: bool


def partition(chain: LayerChain, scope: Sequence[str] | None, span_size: int | None = None) -> list[Span]:
    """Partition `chain` into captured spans of segments in `scope`, and the eager spans between them.

    span_size: parameters of whole layers after which a span ends, see `layer_groups`; None: it goes on.

    A layer with a hook that a replay would skip is eager as a whole. ValueError as `captured_segments`.
    """
    links = chain.bound_segments()
    kind_of = _kinds(links, scope, span_size)
    links, called = merge_hooked_layers(links)
    return _spans(links, kind_of, [*called], chain.call)


def partition_sections(
    chain: LayerChain,
    sections: Sequence[Sequence[BoundSegment]],
    scope: Sequence[str] | None,
    span_size: int | None = None,
) -> list[list[Span]]:
    """Partition each section, the segments of `chain` between two exchanges of tokens, as `partition` does.

    A layer with a hook that a replay would skip is eager, but not as a whole: nobody calls it.
    """
    links = chain.bound_segments()
    kind_of = _kinds(links, scope, span_size, overlap=True)
    _, called = merge_hooked_layers(links)
    begins = {link.layer for own in sections for link in own if link.first}
    begun: list[nn.Module] = [link.layer for link in links if link.layer not in begins]
    return [
        _spans(own, lambda link: (False, -1) if link.layer in called else kind_of(link), begun, chain.call)
        for own in sections
    ]


def segment_facts(links: Sequence[BoundSegment], span_size: int | None = None) -> list[SegmentFacts]:
    """Return the facts of the segments of a chain; span_size as in `partition`."""
    layers_of = {link.name: link.layer for link in links}
    sizes = [sum(p.numel() for p in layer.parameters() if p.requires_grad) for layer in layers_of.values()]
    group_of = dict(zip(layers_of, layer_groups(sizes, span_size), strict=True))
    return [link.facts._replace(group=group_of[link.name]) for link in links]


def _kinds(
    links: Sequence[BoundSegment], scope: Sequence[str] | None, span_size: int | None, overlap: bool = False
) -> Callable[[BoundSegment], tuple[bool, int]]:
    """Return a function that maps a segment to (captured, number of its layer group)."""
    kinds = span_kinds(segment_facts(links, span_size), scope, overlap=overlap)
    of_name = dict(zip((link.full_name for link in links), kinds, strict=True))
    return lambda link: of_name[link.full_name] if link.segment.capturable else (False, -1)


def _spans(
    links: Sequence[BoundSegment],
    kind_of: Callable[[BoundSegment], tuple[bool, int]],
    begun: list[nn.Module],
    call: Call | None,
) -> list[Span]:
    """Group `links` into captured and eager spans; add the layers that begin here to `begun`."""
    spans: list[Span] = []
    for (captured, _), own in groupby(links, kind_of):
        group = list(own)
        first, last = (link.full_name for link in (group[0], group[-1]))
        layers: list[nn.Module] = list(dict.fromkeys(link.layer for link in group))
        kind = CapturedSpan if captured else EagerSpan
        name = first if first == last else f"{first} to {last}"
        spans.append(kind(name, group, [layer for layer in layers if layer not in begun], call))
        begun += layers
    return spans


def spec_of(tensor: Tensor) -> TensorSpec:
    """Return the spec of `tensor`, with strides if it is dense in another order of dimensions.

    A GEMM reads such a tensor in another order, and the last bits of its result differ.
    """
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
def called_modules() -> Iterator[list[nn.Module]]:
    """Collect the modules that are called inside, in order."""
    called: list[nn.Module] = []
    handle = register_module_forward_pre_hook(lambda module, args: called.append(module))
    try:
        yield called
    finally:
        handle.remove()


def may_alias_grads(span: Span, inputs: Iterable[Tensor], outputs: Iterable[Tensor]) -> bool:
    """Return True if a leaf of `span` may keep its gradient without a copy: a leaf without a `main_grad`.

    Parameters of the span count even if this step did not use them, other leaves if they are in the autograd
    graph between `inputs` and `outputs`.
    """
    leaves = [node.variable for node in nodes_behind(outputs, inputs) if hasattr(node, "variable")]
    return not all(hasattr(leaf, "main_grad") for leaf in (*span.parameters, *leaves))


def made_by(outputs: Iterable[Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
    """Return the outputs of a span except inputs that it passes on."""
    return [output for output in outputs if not any(output is given for given in inputs)]


def nodes_behind(outputs: Iterable[Tensor], inputs: Iterable[Tensor] = ()) -> list[Node]:
    """Return the autograd nodes from `outputs` back to those that produced `inputs`, exclusive."""
    left_out = {tensor.grad_fn for tensor in inputs}
    found: dict[Node, None] = {}
    nodes = [tensor.grad_fn for tensor in outputs]
    while nodes:
        node = nodes.pop()
        if node is not None and node not in left_out and node not in found:
            found[node] = None
            nodes += [before for before, _ in node.next_functions]
    return list(found)
