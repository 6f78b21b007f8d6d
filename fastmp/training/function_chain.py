"""A function of a microbatch as a layer chain of one segment, for graphs of scope "full".

Graphs take and return tensors. A loss function or a stage also takes and returns pytrees of tensors:
dictionaries, `ExpertStats`, None. Their structure must be the same for every microbatch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from fastmp.nn.segment import LayerChain, Segment, SegmentedLayer, Tensors

__all__ = ["FunctionChain"]


class FunctionChain:
    """Wrap `function` so that, in training, it runs as the only segment of `chain`.

    Args:
        name: the segment's name.
        module: has the parameters and the training mode of everything `function` runs.

    Raises:
        ValueError: by a call whose arguments or results hold anything but tensors and None, or have another
            pytree structure than in the first call.
    """

    def __init__(self, name: str, function: Callable[..., Any], module: nn.Module) -> None:
        self._layer = _Layer(name, function, module)
        self.chain = LayerChain([self._layer])

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        layer = self._layer
        if not (torch.is_grad_enabled() and layer.module.training):
            return layer.function(*args, **keywords)
        return layer.results.unflatten(self.chain(*layer.arguments.flatten((args, keywords))))


class _Layer(SegmentedLayer):
    def __init__(self, name: str, function: Callable[..., Any], module: nn.Module) -> None:
        super().__init__()
        self.name, self.function, self.module = name, function, module
        self.arguments, self.results = _Form(f"arguments of the {name}"), _Form(f"results of the {name}")

    def segments(self) -> tuple[Segment, ...]:
        return (Segment(self.name, self._run),)

    def _run(self, *tensors: Tensor) -> Tensors:
        args, keywords = self.arguments.unflatten(tensors)
        return self.results.flatten(self.function(*args, **keywords))


class _Form:
    """The pytree structure of a value, taken from the first one."""

    def __init__(self, what: str) -> None:
        self.what = what
        self._known: tuple[TreeSpec, tuple[bool, ...]] | None = None  # with which leaves are tensors

    def flatten(self, value: Any) -> Tensors:
        leaves, spec = tree_flatten(value)
        form = spec, tuple(isinstance(leaf, Tensor) for leaf in leaves)
        others = [leaf for leaf in leaves if leaf is not None and not isinstance(leaf, Tensor)]
        if others:
            raise ValueError(f"graphs: under scope 'full' the {self.what} must be tensors, got {others[0]!r}")
        if self._known not in (None, form):
            raise ValueError(
                f"graphs: under scope 'full' the {self.what} must have one form in all microbatches; "
                f"it is {spec} and was {self._known[0]}"
            )
        self._known = form
        return tuple(leaf for leaf in leaves if isinstance(leaf, Tensor))

    def unflatten(self, tensors: Tensors) -> Any:
        assert self._known is not None
        spec, are_tensors = self._known
        rest = iter(tensors)
        return tree_unflatten([next(rest) if each else None for each in are_tensors], spec)
