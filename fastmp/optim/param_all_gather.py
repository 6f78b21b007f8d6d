"""All-gathers of updated parameters, bucket by bucket, and the hooks that wait for them.

After a step of a sharded optimizer each rank has its own shard of every bucket. The rest arrives while the
next forward runs: a pre-forward hook of each module makes the current stream wait for the buckets of that
module's own parameters. CUDA graphs, which call no module, call these hooks before a replay.

A module may be used without being called, as an output layer is by a fused loss. A module that is called
before it can name it in the tuple `prefetch_next`: then its hook waits for both. Otherwise the first step
finds it, and later steps wait for its buckets at once. Code that reads parameters before their module is
called, or outside a forward, calls `ParameterGather.wait` first; a module's state dict does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import Parameter

from fastmp.distributed.collectives import all_gather_
from fastmp.optim.grad_buffers import FlatBuffer

__all__ = ["ParameterGather"]

At = tuple[int, int]  # buffer, bucket


class ParameterGather:
    """All-gather buckets of parameters in the background.

    Without `attach`, the end of a step waits for all of them.

    Args:
        flats: the gradient buffers, whose layouts are those of the parameters.
    """

    def __init__(self, flats: list[FlatBuffer]) -> None:
        self._works: dict[At, tuple[dist.Work | None, Callable[[], None] | None]] = {}
        self._where: dict[int, At] = {}  # by the id of the parameter
        for i, flat in enumerate(flats):
            for j, bucket in enumerate(flat.layout.buckets if flat.layout.num_ranks > 1 else ()):
                self._where |= {id(flat.parameters[name]): (i, j) for name in bucket.names}
        self._attached = False
        self._uncalled: dict[nn.Module, set[At]] = {}  # modules that no forward has called yet
        self._compiled: set[At] = set()
        self._eager: set[At] | None = None  # awaited when a step ends; None: the first step is not over

    def attach(self, modules: Iterable[nn.Module]) -> None:
        """Make every module inside `modules` wait for its own parameters before its forward.

        It also waits for those of the modules in its attribute `prefetch_next`. Saving or loading a state
        dict waits for all. A module that `torch.compile` returned waits for all its parameters; those of a
        module compiled in place, whose hooks would be compiled too, are awaited at the end of a step. So
        compile before you call this. Nothing happens where every rank updates all parameters itself.
        """
        if not self._where:
            return
        self._attached = True
        prefetched: set[nn.Module] = set()
        for root in modules:
            for module in _outside_of_compiled(root):
                if _is_compiled_in_place(module):
                    self._compiled |= self._buckets(module.parameters())
                    continue
                more = getattr(module, "prefetch_next", ())
                prefetched.update(more)
                inside = _is_compiled(module)
                own = self._buckets(p for each in (module, *more) for p in each.parameters(recurse=inside))
                if own and module not in self._uncalled:
                    self._uncalled[module] = own
                    module.register_forward_pre_hook(_Wait(self, own), prepend=True)
            everything = _Wait(self, None)
            for module in root.modules():
                module.register_state_dict_pre_hook(everything)
                module.register_load_state_dict_pre_hook(everything)
        for module in prefetched:
            self._uncalled.pop(module, None)

    def _buckets(self, parameters: Iterable[Parameter]) -> set[At]:
        return {self._where[id(param)] for param in parameters if id(param) in self._where}

    def before(self, module: nn.Module, own: set[At]) -> None:
        """Wait for the buckets `own` of a module's parameters, before its forward."""
        if self._works:
            self._wait(own)
        if self._eager is None and torch.is_grad_enabled():  # evaluation may call other modules
            self._uncalled.pop(module, None)

    def start(
        self,
        at: At,
        bucket: Tensor,
        group: dist.ProcessGroup,
        arrived: Callable[[], None] | None = None,
    ) -> None:
        """Start the all-gather of a bucket over `group`; this rank has updated its shard.

        arrived: called when the bucket is there, on the stream that waits for it.
        """
        self._works[at] = all_gather_(bucket, group, overlap=True), arrived

    def end_step(self) -> None:
        """End a step: wait for the buckets that no hook waits for."""
        if not self._attached:
            self.wait()
            return
        if self._eager is None:
            self._eager = self._compiled.union(*self._uncalled.values())
            self._uncalled = {}
        self._wait(self._eager)

    def wait(self) -> None:
        """Wait for all buckets; call it before you read parameters outside a module's forward."""
        self._wait(list(self._works))

    def _wait(self, some: Iterable[At]) -> None:
        for at in some:
            started = self._works.get(at)
            if started is not None:
                work, arrived = started
                if work is not None:
                    work.wait()
                if arrived is not None:
                    arrived()
                self._works.pop(at, None)  # only now: another thread may be about to use the bucket, too


class _Wait:
    """Hook: wait for some buckets of parameters, or all. In a pickled model it does nothing."""

    # `HookTraits`: graphs call it next to replays, but the graph of a whole step has nothing to wait for.
    replayed = in_step = True

    def __init__(self, gather: ParameterGather | None, own: set[At] | None) -> None:
        self._gather, self._own = gather, own

    def __call__(self, module: nn.Module, *rest: Any) -> None:
        if self._gather is None:
            return
        if self._own is None:
            self._gather.wait()
        else:
            self._gather.before(module, self._own)

    def __reduce__(self) -> tuple[Any, ...]:
        return _Wait, (None, None)


def _outside_of_compiled(module: nn.Module) -> Iterator[nn.Module]:
    """Yield a module and its descendants, except those of compiled modules."""
    yield module
    if not _is_compiled(module):
        for child in module.children():
            yield from _outside_of_compiled(child)


def _is_compiled(module: nn.Module) -> bool:
    """Return True for a module from `torch.compile` or after `module.compile()`."""
    return _is_compiled_in_place(module) or type(module).__name__ == "OptimizedModule"


def _is_compiled_in_place(module: nn.Module) -> bool:
    return getattr(module, "_compiled_call_impl", None) is not None
