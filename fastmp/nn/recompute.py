"""Activation recomputation: keep a layer's input, and run its forward again in backward.

Random streams are rewound, so dropout masks and gradients are bit for bit the same. Without sequence
parallelism every TP rank holds the same input. With `shard_over` each rank keeps 1/TP of it, and
recomputation all-gathers it: TP times less memory for one all-gather a layer (Korthikanti et al. 2022,
section 5).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, TypeVar

import torch
from torch.distributed import ProcessGroup
from torch.utils.checkpoint import checkpoint

from fastmp.distributed.collectives import all_gather, group_rank, group_size
from fastmp.distributed.rng import RngTracker, Seeds
from fastmp.nn.segment import Tensors

__all__ = ["is_recomputed", "once", "recompute", "remade"]

T = TypeVar("T")
_forward = threading.local()  # `call`: how `once` calls a function in the forward that runs in this thread


def recompute(
    function: Callable[..., torch.Tensor | Tensors],
    hidden: torch.Tensor,
    *others: torch.Tensor,
    rng: RngTracker | None,
    shard_over: ProcessGroup | None = None,
) -> torch.Tensor | Tensors:
    """Call `function(hidden, *others)` and keep only its arguments for backward.

    Args:
        function: a layer, or anything that computes the same when called twice.
        hidden: first argument, usually (S, B, H).
        rng: the random streams of `function`; None: torch's default generators only.
        shard_over: keep 1/P of `hidden`, which must be the same on all P ranks of this group, and all of
            `others`.

    Raises:
        ValueError: P does not divide the number of elements of `hidden`.
    """
    size = group_size(shard_over)
    if hidden.numel() % size:
        raise ValueError(
            f"recompute: an input of {hidden.numel()} elements cannot be divided over {size} ranks"
        )
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": rng is None}
    if rng is not None or not torch.compiler.is_compiling():
        options["context_fn"] = lambda: _contexts(rng)
    if shard_over is None or size == 1 or not torch.is_grad_enabled():
        return checkpoint(function, hidden, *others, **options)
    shard = hidden.detach().reshape(size, -1)[group_rank(shard_over)].clone()
    return checkpoint(_Gathering(function, hidden, shard_over), shard, *others, **options)


@contextmanager
def remade(make: Callable[[], Tensors], tensors: Tensors) -> Iterator[None]:
    """Let autograd keep no memory of `tensors` inside the context, but call `make()` for them in backward.

    Views of the tensors are made again as views. All nodes that have saved one share the call, which runs
    without gradients.

    Args:
        make: returns tensors with the values and strides of `tensors`.
    """
    places = {tensor.untyped_storage().data_ptr(): i for i, tensor in enumerate(tensors)}
    own = _Remade(make)

    def pack(saved: torch.Tensor) -> Any:
        place = places.get(saved.untyped_storage().data_ptr())
        if place is None:
            return saved
        own.left += 1
        return place, saved.size(), saved.stride(), saved.storage_offset()

    with torch.autograd.graph.saved_tensors_hooks(pack, own.unpack):
        yield


class _Remade:
    """Tensors that are made again when the first is asked for, and dropped after the last."""

    def __init__(self, make: Callable[[], Tensors]) -> None:
        self.make, self.left, self.asked = make, 0, 0
        self.tensors: Tensors = ()

    def unpack(self, saved: Any) -> torch.Tensor:
        if isinstance(saved, torch.Tensor):
            return saved
        if not self.tensors:
            with torch.no_grad():
                self.tensors = self.make()
        place, size, stride, offset = saved
        found = self.tensors[place].as_strided(size, stride, offset)
        self.asked += 1
        if self.asked % self.left == 0:  # a retained graph asks again
            self.tensors = ()
        return found


class _Gathering:
    """Calls `function` with the tensor itself first, then with the tensor all-gathered from shards."""

    def __init__(
        self, function: Callable[..., torch.Tensor | Tensors], hidden: torch.Tensor, group: ProcessGroup
    ) -> None:
        self.function, self.group = function, group
        self.shape, self.requires_grad = hidden.shape, hidden.requires_grad
        self.first: torch.Tensor | None = hidden

    def __call__(self, shard: torch.Tensor, *others: torch.Tensor) -> torch.Tensor | Tensors:
        hidden, self.first = self.first, None
        if hidden is None:
            hidden = all_gather(shard.detach(), self.group)[0].view(self.shape)
            hidden.requires_grad_(self.requires_grad)
        return self.function(hidden, *others)


def once(make: Callable[[], T]) -> T:
    """Return `make()`, and the same result when this forward is recomputed.

    It saves small collectives from running twice.
    """
    if torch.compiler.is_compiling():
        return make()
    call = getattr(_forward, "call", None)
    return make() if call is None else call(make)


def is_recomputed() -> bool:
    """Return True inside a function that is recomputed, in its first forward and in the second."""
    return getattr(_forward, "call", None) is not None


def _contexts(rng: RngTracker | None) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Return the contexts of the forward, which starts now, and of its recomputation."""
    made: list[Any] = []
    seeds = None if rng is None else Seeds(rng.states())
    return _first(rng, seeds, made), _Replay(rng, seeds, made)


@contextmanager
def _first(rng: RngTracker | None, seeds: Seeds | None, made: list[Any]) -> Iterator[None]:
    def call(make: Callable[[], Any]) -> Any:
        made.append(make())
        return made[-1]

    with _calling(call), nullcontext() if rng is None or seeds is None else rng.noting(seeds):
        yield


@contextmanager
def _calling(call: Callable[[Callable[[], Any]], Any]) -> Iterator[None]:
    before, _forward.call = getattr(_forward, "call", None), call
    try:
        yield
    finally:
        _forward.call = before


class _Replay:
    """Rewinds random streams and the results of `once`.

    It may be entered twice, because a retained autograd graph can run backward again.
    """

    def __init__(self, rng: RngTracker | None, seeds: Seeds | None, made: list[Any]) -> None:
        self.rng, self.seeds, self.made = rng, seeds, made

    def __enter__(self) -> None:
        made = iter(self.made)
        self.context = ExitStack()
        self.context.enter_context(_calling(lambda make: next(made)))
        if self.rng is not None and self.seeds is not None:
            self.context.enter_context(self.rng.again(self.seeds))

    def __exit__(self, *error: Any) -> None:
        self.context.__exit__(*error)
