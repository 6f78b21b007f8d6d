"""Detect changes of a model that would make its captured graphs wrong."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import attrgetter
from typing import Any

from torch import Tensor

from fastmp.cuda_graphs import replay_program
from fastmp.cuda_graphs.skipped_hooks import HookSnapshot
from fastmp.nn.segment import LayerChain

__all__ = ["ModelSnapshot"]

_training = attrgetter("training")


class ModelSnapshot:
    """The state of a model that graphs rely on: addresses, `requires_grad`, training modes and hooks.

    every_hook: also track replayed hooks. The snapshot is compared in every step, so its lists are flat, and
    a C++ guard is asked first.
    """

    def __init__(self, chains: Sequence[LayerChain], every_hook: bool = False) -> None:
        self._chains, self.hooks = chains, HookSnapshot(chains, every_hook)
        self._modules = [module for chain in chains for module in chain.modules()]
        self._parameters = [param for chain in chains for param in chain.parameters()]
        # (the dict that holds it, its key, the module or its address, the address of its main gradient)
        self._held: list[tuple[dict[str, Any], str, Any, int]] = []
        for module in self._modules:
            self._held += [(module._modules, key, child, 0) for key, child in module._modules.items()]
            for own in (module._parameters, module._buffers):
                self._held += [(own, key, *_place(tensor)) for key, tensor in own.items()]
        self._holders = [own for m in self._modules for own in (m._modules, m._parameters, m._buffers)]
        self._sizes = list(map(len, self._holders))
        self._training, self._trained = self._now()
        self._set_guard()

    def _set_guard(self) -> None:
        """Guard the present state of the model in C++, where that is built."""
        self._guard = None
        if replay_program.REPLAY is None or any("training" not in vars(module) for module in self._modules):
            return
        tensors = {id(t): t for own in self._holders for t in own.values() if isinstance(t, Tensor)}.values()
        mains = [getattr(tensor, "main_grad", None) for tensor in tensors]
        if any(main is not vars(tensor).get("main_grad") for tensor, main in zip(tensors, mains)):
            return
        self._guarded = (  # the guard owns no references
            [(own, dict(own)) for own in (*self._holders, *self.hooks.dicts())],
            [(vars(module), module.training) for module in self._modules],
            [(tensor, vars(tensor), main) for tensor, main in zip(tensors, mains)],
        )
        self._guard = replay_program.REPLAY.ModelGuard(*self._guarded)

    def _now(self) -> tuple[list[bool], list[bool]]:
        return list(map(_training, self._modules)), [param.requires_grad for param in self._parameters]

    def modes_changed(self) -> bool:
        """Return True if the mode of a module or `requires_grad` of a parameter has changed."""
        same = self._guard is not None and self._guard.same_modes()
        return not same and self._now() != (self._training, self._trained)

    def changed(self) -> tuple[bool, str | None]:
        """Return (True if graphs may be wrong now, the name of the first moved tensor or module or None)."""
        if self._guard is not None and self._guard.same():
            return False, None
        moved = self._moved()
        changed = moved is not None or self.modes_changed() or self.hooks.changed()
        if not changed:
            self._set_guard()  # with the objects that replaced equal ones
        return changed, moved

    def _moved(self) -> str | None:
        """Return the name of the first tensor or module that was moved, replaced or added, or None."""
        for holder, key, place, main in self._held:
            now = holder.get(key)
            if now is not place and not (
                isinstance(now, Tensor) and now.data_ptr() == place and _main(now) == main
            ):
                return next(self._names(holder, key), key)
        for holder, size in zip(self._holders, self._sizes):
            if len(holder) > size:
                return next(self._names(holder, list(holder)[size]))
        return None

    def _names(self, holder: dict[str, Any], key: str) -> Iterator[str]:
        for chunk, chain in enumerate(self._chains):
            for name, module in chain.named_modules():
                if any(holder is own for own in (module._modules, module._parameters, module._buffers)):
                    yield f"{f'{name}.{key}'.lstrip('.')!r} of chunk {chunk}"


def _place(tensor: Tensor | None) -> tuple[int | None, int]:
    return (None, 0) if tensor is None else (tensor.data_ptr(), _main(tensor))


def _main(tensor: Tensor) -> int:
    main = getattr(tensor, "main_grad", None)
    return 0 if main is None else main.data_ptr()
