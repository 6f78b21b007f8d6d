"""Notices changes of a model that its graphs do not know of."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import attrgetter
from typing import Any

from torch import Tensor

from fastmp.cuda_graphs import replay_program as flat
from fastmp.cuda_graphs.skipped_hooks import HookWatch
from fastmp.nn.segment import LayerChain

__all__ = ["ModelSnapshot"]

_training = attrgetter("training")


class ModelSnapshot:
    """What graphs rely on in a model: where its tensors lie, what is trained, modes, hooks.

    every_hook: also hooks that are replayed. It is asked in every step: its lists are flat, and a watch in
    C++ says first whether anything was touched.
    """

    def __init__(self, chains: Sequence[LayerChain], every_hook: bool = False) -> None:
        self._chains, self.hooks = chains, HookWatch(chains, every_hook)
        self._modules = [module for chain in chains for module in chain.modules()]
        self._parameters = [param for chain in chains for param in chain.parameters()]
        # (what holds it, its key there, itself or its address, address of its main gradient)
        self._held: list[tuple[dict[str, Any], str, Any, int]] = []
        for module in self._modules:
            self._held += [(module._modules, key, child, 0) for key, child in module._modules.items()]
            for own in (module._parameters, module._buffers):
                self._held += [(own, key, *_place(tensor)) for key, tensor in own.items()]
        self._holders = [own for m in self._modules for own in (m._modules, m._parameters, m._buffers)]
        self._sizes = list(map(len, self._holders))
        self._training, self._trained = self._now()
        self._watch_it()

    def _watch_it(self) -> None:
        """Have C++ watch the model as it is, if it can."""
        self._watch = None
        if flat.REPLAY is None or any("training" not in vars(module) for module in self._modules):
            return
        tensors = {id(t): t for own in self._holders for t in own.values() if isinstance(t, Tensor)}.values()
        mains = [getattr(tensor, "main_grad", None) for tensor in tensors]
        if any(main is not vars(tensor).get("main_grad") for tensor, main in zip(tensors, mains)):
            return
        self._watched = (  # which the watch refers to, and does not own
            [(own, dict(own)) for own in (*self._holders, *self.hooks.dicts())],
            [(vars(module), module.training) for module in self._modules],
            [(tensor, vars(tensor), main) for tensor, main in zip(tensors, mains)],
        )
        self._watch = flat.REPLAY.Watch(*self._watched)

    def _now(self) -> tuple[list[bool], list[bool]]:
        return list(map(_training, self._modules)), [param.requires_grad for param in self._parameters]

    def modes_changed(self) -> bool:
        """Whether a module has another mode than at first, or another parameter is trained."""
        same = self._watch is not None and self._watch.same_modes()
        return not same and self._now() != (self._training, self._trained)

    def changed(self) -> tuple[bool, str | None]:
        """Whether graphs may be wrong now, and the name of a tensor or module that has moved, if one has."""
        if self._watch is not None and self._watch.same():
            return False, None
        moved = self._moved()
        changed = moved is not None or self.modes_changed() or self.hooks.changed()
        if not changed:
            self._watch_it()  # with what has come in place of its like
        return changed, moved

    def _moved(self) -> str | None:
        """The name of a tensor or module that was moved, replaced or added; None: there is none."""
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
