"""Cuts a chain of layers into runs, which are captured, and the eager parts between them.

A run is as many segments in a row as can be captured, across the borders of layers, up to a number of
parameters if there is one. While an eager step is watched, this module also notes what each run takes and
returns.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils._pytree import TreeSpec, tree_flatten, tree_structure, tree_unflatten

from fastmp.cuda_graphs.buffer_plan import TensorSpec
from fastmp.cuda_graphs.scope import captured_segments, layer_groups
from fastmp.cuda_graphs.skipped_hooks import called_whole
from fastmp.nn.segment import Call, LayerChain, Link, Tensors, run_links

__all__ = [
    "EagerPart", "Observed", "Part", "Run", "Shared", "called_modules", "cut", "cut_apart",
    "keeps_gradients", "made_by", "nodes_behind", "spec_of",
]  # fmt: skip


@dataclass(frozen=True, eq=False)
class Part:
    """Segments of a chain that follow each other; either a `Run` or an `EagerPart`.

    name: that of the first segment, and of the last one.
    begins: layers whose first segment is here, and whose own forward nobody calls: the marked hooks before
        their forward are replayed.
    call: how the chain calls the segments of one layer (see `LayerChain`).
    """

    name: str
    links: list[Link]
    begins: list[nn.Module]
    call: Call | None

    @cached_property
    def takes_shared(self) -> bool:
        """Whether a layer begins here: it takes what all layers of the chain share."""
        return any(link.first for link in self.links)

    @property
    def layers(self) -> list[nn.Module]:
        """The layers that have segments here, each once."""
        return list(dict.fromkeys(link.layer for link in self.links))

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters of these layers that require a gradient now."""
        return list(dict.fromkeys(p for layer in self.layers for p in layer.parameters() if p.requires_grad))


class Run(Part):
    """Segments that one graph holds.

    Where layers begin in it, its inputs end with the tensors of what all layers of the chain share.
    """

    def through(
        self, inputs: Tensors, shared: TreeSpec, begun: list[Link] | None = None
    ) -> tuple[Tensors, Tensors]:
        """Run the segments, as `run_links` does.

        shared: what layers share, without its tensors, which are the last of `inputs`.
        """
        first = len(inputs) - (shared.num_leaves if self.takes_shared else 0)
        keywords = tree_unflatten(inputs[first:], shared) if first < len(inputs) else {}
        return run_links(self.links, inputs[:first], self.call, shared=keywords, begun=begun)


class EagerPart(Part):
    """Segments that run eagerly in every step."""


class Shared(NamedTuple):
    """What a chain gets as `keywords` for all layers: its tensors, and its form without them."""

    keywords: Mapping[str, Any]
    tensors: Tensors
    form: TreeSpec

    @classmethod
    def of(cls, keywords: Mapping[str, Any]) -> Shared:
        """Take it apart. ValueError where it holds something else than tensors."""
        if not keywords:
            return _NOTHING
        leaves, form = tree_flatten(keywords)
        for leaf in leaves:
            if not isinstance(leaf, Tensor):
                raise ValueError(f"graphs: what all layers share must consist of tensors, got {leaf!r}")
        return cls(keywords, tuple(leaves), form)

    def beside(self, tensors: Tensors, part: Part) -> Tensors:
        """The inputs of `part`: `tensors`, and these if a layer begins there."""
        return (*tensors, *self.tensors) if self.tensors and part.takes_shared else tensors


_NOTHING = Shared({}, (), tree_structure({}))


class Observed(NamedTuple):
    """What an eager step has shown of a run.

    inputs: their specs, and whether each requires a gradient. outputs: the specs of those that do.
    calls: the modules that the run calls, in order.
    watched: what `Backend.watch` has noted.
    keeps: whether code before the run may keep the gradients of its inputs without copying them.
    """

    inputs: list[tuple[TensorSpec, bool]]
    outputs: list[TensorSpec]
    calls: list[nn.Module]
    watched: Any
    keeps: bool


def cut(chain: LayerChain, scope: Sequence[str] | None, run_size: int | None = None) -> list[Part]:
    """Cut `chain` into runs of segments that are in `scope` and can be captured, and the parts between them.

    run_size: parameters of whole layers after which a run ends, see `layer_groups`; None: it goes on.

    A layer with a hook that a replay would skip is eager as a whole. ValueError as `captured_segments`.
    """
    links = chain.links()
    kind_of = _kinds(links, scope, run_size)
    links, called = called_whole(links)
    return _parts(links, kind_of, [*called], chain.call)


def cut_apart(
    chain: LayerChain,
    pieces: Sequence[Sequence[Link]],
    scope: Sequence[str] | None,
    run_size: int | None = None,
) -> list[list[Part]]:
    """Cut each of `pieces`, segments of `chain` between which rows are exchanged, as `cut` does.

    A layer with a hook that a replay would skip is eager, but not as a whole: nobody calls it.
    """
    links = chain.links()
    kind_of = _kinds(links, scope, run_size, {link.segment.name for link in links if link.segment.exchanges})
    _, called = called_whole(links)
    begins = {link.layer for own in pieces for link in own if link.first}
    begun: list[nn.Module] = [link.layer for link in links if link.layer not in begins]
    return [
        _parts(own, lambda link: (False, -1) if link.layer in called else kind_of(link), begun, chain.call)
        for own in pieces
    ]


def _kinds(
    links: Sequence[Link], scope: Sequence[str] | None, run_size: int | None, beside: Collection[str] = ()
) -> Callable[[Link], tuple[bool, int]]:
    """A function of a segment that says whether it is captured, and in which group of layers."""
    eager = {link.segment.name for link in links if not link.segment.capturable}
    able = {link.segment.name: link.segment.name not in eager for link in links}
    chosen = captured_segments(scope, able, beside)
    layers_of = {link.name: link.layer for link in links}
    sizes = [sum(p.numel() for p in layer.parameters() if p.requires_grad) for layer in layers_of.values()]
    group_of = dict(zip(layers_of, layer_groups(sizes, run_size), strict=True))

    def kind_of(link: Link) -> tuple[bool, int]:
        captured = _captures(link, scope, chosen)
        return captured, group_of[link.name] if captured else -1

    return kind_of


def _parts(
    links: Sequence[Link],
    kind_of: Callable[[Link], tuple[bool, int]],
    begun: list[nn.Module],
    call: Call | None,
) -> list[Part]:
    """The runs among `links`, and the parts between them; `begun` gets the layers that begin here."""
    parts: list[Part] = []
    for (captured, _), own in groupby(links, kind_of):
        group = list(own)
        first, last = (link.full_name for link in (group[0], group[-1]))
        layers: list[nn.Module] = list(dict.fromkeys(link.layer for link in group))
        kind = Run if captured else EagerPart
        name = first if first == last else f"{first} to {last}"
        parts.append(kind(name, group, [layer for layer in layers if layer not in begun], call))
        begun += layers
    return parts


def _captures(link: Link, scope: Sequence[str] | None, chosen: set[str]) -> bool:
    """Without a scope, a segment whose namesakes in other layers are eager is captured all the same."""
    name = link.segment.name
    return link.segment.capturable and (name in chosen or (scope is None and name != "shared_experts"))


def spec_of(tensor: Tensor) -> TensorSpec:
    """Describe `tensor`, with strides where it is dense in another order of dimensions.

    A product reads such a tensor in another order, and its last bits differ.
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


def keeps_gradients(part: Part, inputs: Iterable[Tensor], outputs: Iterable[Tensor]) -> bool:
    """Whether a leaf of `part` may keep a gradient that reaches it: a leaf without a `main_grad`.

    A parameter of the part counts even if this step did not use it. A leaf from elsewhere counts if it is
    in the autograd graph between `inputs` and `outputs`.
    """
    leaves = [node.variable for node in nodes_behind(outputs, inputs) if hasattr(node, "variable")]
    return not all(hasattr(leaf, "main_grad") for leaf in (*part.parameters, *leaves))


def made_by(outputs: Iterable[Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
    """The outputs of a part that are not inputs which it hands on."""
    return [output for output in outputs if not any(output is given for given in inputs)]


def nodes_behind(outputs: Iterable[Tensor], inputs: Iterable[Tensor] = ()) -> list[Node]:
    """The nodes of the autograd graph from `outputs` back to those that made `inputs`, which are left out."""
    left_out = {tensor.grad_fn for tensor in inputs}
    found: dict[Node, None] = {}
    nodes = [tensor.grad_fn for tensor in outputs]
    while nodes:
        node = nodes.pop()
        if node is not None and node not in left_out and node not in found:
            found[node] = None
            nodes += [before for before, _ in node.next_functions]
    return list(found)
