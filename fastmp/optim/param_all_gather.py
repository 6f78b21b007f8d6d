"""All-gathers of updated parameters, bucket by bucket, and the hooks that wait for them.

After a step of a sharded optimizer each rank has its own part of every bucket. The rest comes while the next
forward runs: a hook before each module waits for the buckets of that module's own parameters, so that none
is used before it is there, whatever the order of modules. In graphs, which call no module, the manager calls
these hooks before a replay. A module may be used though nobody calls it, as an output layer is by a fused
loss. Where another module that is called before it names it in a tuple `prefetch_next`, the hook of that one
waits for both. Else this is found in the first step, and its buckets are waited for at once. What reads
parameters before their module is called, or outside of any forward, calls `ParameterGather.wait` first; a
module's state dict does.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
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
    """Gathers buckets of the parameters of `flats` in the background.

    Without `attach` every gather is awaited at the end of the step.
    """

    def __init__(self, flats: list[FlatBuffer]) -> None:
        self._works: dict[At, dist.Work] = {}
        self._where: dict[int, At] = {}  # by the id of the parameter
        for i, flat in enumerate(flats):
            for j, bucket in enumerate(flat.layout.buckets):
                self._where |= {id(flat.parameters[name]): (i, j) for name in bucket.names}
        self._attached = False
        self._uncalled: dict[nn.Module, set[At]] = {}  # modules that no forward has called yet
        self._compiled: set[At] = set()
        self._at_once: set[At] | None = None  # None: the first step is not over

    def attach(self, modules: Iterable[nn.Module]) -> None:
        """Let every module inside `modules` wait for its own parameters before its forward.

        It also waits for those of the modules in its attribute `prefetch_next`. A state dict of one of them
        waits for all, and so does loading one. What `torch.compile` returned waits for all its parameters;
        those of a module that was compiled in place, whose hooks would be compiled too, are awaited at the
        end of a step. So compile before.
        """
        self._attached = True
        behind: set[nn.Module] = set()
        for root in modules:
            for module in _outside_of_compiled(root):
                if _is_compiled_in_place(module):
                    self._compiled |= self._buckets(module.parameters())
                    continue
                more = getattr(module, "prefetch_next", ())
                behind.update(more)
                inside = _is_compiled(module)
                own = self._buckets(p for each in (module, *more) for p in each.parameters(recurse=inside))
                if own and module not in self._uncalled:
                    self._uncalled[module] = own
                    module.register_forward_pre_hook(_Wait(self, own), prepend=True)
            everything = _Wait(self, None)
            for module in root.modules():
                module.register_state_dict_pre_hook(everything)
                module.register_load_state_dict_pre_hook(everything)
        for module in behind:
            self._uncalled.pop(module, None)

    def _buckets(self, parameters: Iterable[Parameter]) -> set[At]:
        return {self._where[id(param)] for param in parameters if id(param) in self._where}

    def before(self, module: nn.Module, own: set[At]) -> None:
        """Wait before the forward of a module, whose parameters lie in the buckets `own`."""
        if self._works:
            self._wait(own)
        if self._at_once is None and torch.is_grad_enabled():  # evaluation may use it otherwise
            self._uncalled.pop(module, None)

    def start(self, at: At, bucket: Tensor, group: dist.ProcessGroup) -> None:
        """Start to gather a bucket, of which this rank has updated its part."""
        work = all_gather_(bucket, group, overlap=True)
        if work is not None:
            self._works[at] = work

    def end_step(self) -> None:
        """End a step, in which all buckets have been started: wait for those that no hook waits for."""
        if not self._attached:
            self.wait()
            return
        if self._at_once is None:
            self._at_once = self._compiled.union(*self._uncalled.values())
            self._uncalled = {}
        self._wait(self._at_once)

    def wait(self) -> None:
        """Wait for all buckets: before parameters are read by other means than a module's forward."""
        self._wait(list(self._works))

    def _wait(self, some: Iterable[At]) -> None:
        for at in some:
            work = self._works.get(at)
            if work is not None:
                work.wait()
                self._works.pop(at, None)  # only now: another thread may be about to use the bucket, too


class _Wait:
    """A hook that waits for buckets of parameters, or for all. In a pickled model it does nothing."""

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
    """Yield a module and those inside it, but none inside a compiled one."""
    yield module
    if not _is_compiled(module):
        for child in module.children():
            yield from _outside_of_compiled(child)


def _is_compiled(module: nn.Module) -> bool:
    """Whether `torch.compile` has returned the module, or its `compile` was called."""
    return _is_compiled_in_place(module) or type(module).__name__ == "OptimizedModule"


def _is_compiled_in_place(module: nn.Module) -> bool:
    return getattr(module, "_compiled_call_impl", None) is not None
