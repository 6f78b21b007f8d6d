"""All-gathers of updated parameters, bucket by bucket, and the hooks that wait for them.

After a step of a sharded optimizer each rank has its own part of every bucket. The rest comes while the next
forward runs: a hook before each module waits for the buckets of that module's own parameters, so that none is
used before it is there, whatever the order of use. In graphs, which call no module, the graph manager calls
these hooks before a replay. A module may be used though nobody calls it, as an output layer is by a fused
loss. Where another module that is called before it names it in a tuple `used_behind`, the hook of that one
waits for both. Else this is found in the first step, and its buckets are waited for at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from fastmp.parallel.collectives import all_gather_
from fastmp.parallel.grads import FlatBuffer

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
        self._at_once: set[At] | None = None  # None: the first step is not over

    def attach(self, modules: Iterable[nn.Module]) -> None:
        """Let every module inside `modules` wait for its own parameters before its forward.

        It also waits for those of the modules in its attribute `used_behind`. The state dict of one of
        `modules` waits for all.
        """
        self._attached = True
        behind: set[nn.Module] = set()
        for root in modules:
            for module in root.modules():
                more = getattr(module, "used_behind", ())
                behind.update(more)
                own = {at for each in (module, *more) for at in self._buckets(each)}
                if own and module not in self._uncalled:
                    self._uncalled[module] = own
                    module.register_forward_pre_hook(self._before(own))
            root.register_state_dict_pre_hook(lambda *_: self.wait())
        for module in behind:
            self._uncalled.pop(module, None)

    def _buckets(self, module: nn.Module) -> set[At]:
        """The buckets of a module's own parameters."""
        return {self._where[id(p)] for p in module.parameters(recurse=False) if id(p) in self._where}

    def _before(self, own: set[At]) -> Callable[[nn.Module, Any], None]:
        def before(module: nn.Module, args: Any) -> None:
            if self._at_once is None:
                self._uncalled.pop(module, None)
            elif self._works:
                self._wait(own)

        before.replayed = True  # type: ignore[attr-defined]  # graphs call it too
        return before

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
            self._at_once = {at for own in self._uncalled.values() for at in own}
            self._uncalled = {}
        self._wait(self._at_once)

    def wait(self) -> None:
        """Wait for all buckets: before parameters are read by other means than a module's forward."""
        self._wait(list(self._works))

    def _wait(self, some: Iterable[At]) -> None:
        for at in some:
            work = self._works.pop(at, None)
            if work is not None:
                work.wait()
