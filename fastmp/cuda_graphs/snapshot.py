"""Detect changes of a model that would make its captured graphs wrong."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import repeat
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor, nn

from fastmp.cuda_graphs import replay_program
from fastmp.cuda_graphs.skipped_hooks import HookSnapshot
from fastmp.nn.segment import LayerChain

__all__ = ["ModelSnapshot", "constants", "same_constants"]

_training = attrgetter("training")
_CONSTANTS = (bool, int, float, complex, str, type(None), torch.dtype)
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))  # modes, and what else is compared by other means
_MISSING = object()


def constants(attributes: dict[str, Any], leave_out: Iterable[str] = ()) -> dict[str, Any]:
    """Return the attributes that a capture reads as constants: numbers, flags, strings, tuples of them."""
    return {key: each for key, each in attributes.items() if _is_constant(each) and key not in leave_out}


def _is_constant(value: Any) -> bool:
    return isinstance(value, _CONSTANTS) or (isinstance(value, tuple) and all(map(_is_constant, value)))


def same_constants(now: dict[str, Any], before: dict[str, Any]) -> bool:
    """Return True if both have equal `constants`, of equal types."""
    return now.keys() == before.keys() and all(_equal(now[key], before[key]) for key in now)


def _equal(now: Any, before: Any) -> bool:
    # By their text, which tells -0.0 from 0.0, and NaN from nothing.
    return now is before or (type(now) is type(before) and _is_constant(now) and repr(now) == repr(before))


class ModelSnapshot:
    """The state of a model that graphs rely on: addresses, `requires_grad`, modes, numbers and hooks.

    Numbers are the constants among the attributes of modules, such as `dropout.p`, except those that a
    forward changes by itself, see `running`: a count of calls, say, which a replay does not continue.

    every_hook: also track replayed hooks. captured: the layers whose numbers a capture reads; None: all.

    The snapshot is compared in every step, so its lists are flat, and a C++ guard is asked first.
    """

    def __init__(
        self,
        chains: Sequence[LayerChain],
        every_hook: bool = False,
        captured: Iterable[nn.Module] | None = None,
    ) -> None:
        self._chains, self.hooks = chains, HookSnapshot(chains, every_hook)
        self._modules = [module for chain in chains for module in chain.modules()]
        self._parameters = [param for chain in chains for param in chain.parameters()]
        # (the dict that holds it, its key, the module or its address, the address of its main gradient)
        self._held: list[tuple[dict[str, Any], str, Any, int]] = []
        for module in self._modules:
            self._held += [(module._modules, key, child, 0) for key, child in module._modules.items()]
            for own in _holders(module)[1:]:
                self._held += [(own, key, *_place(tensor)) for key, tensor in own.items()]
        self._holders = [own for module in self._modules for own in _holders(module)]
        self._sizes = list(map(len, self._holders))
        self._training, self._trained = self._now()
        layers = self._modules if captured is None else captured
        inside = dict.fromkeys(module for layer in layers for module in layer.modules())
        self._numbers = [(own, constants(own, _OF_EVERY_MODULE)) for own in map(vars, inside)]
        self._left_out: list[set[str]] = [set(_OF_EVERY_MODULE) for _ in inside]
        self._flatten_numbers()
        self._set_guard()

    def _flatten_numbers(self) -> None:
        self._owners = [own for own, numbers in self._numbers for _ in numbers]
        self._keys = [key for _, numbers in self._numbers for key in numbers]
        self._values = [each for _, numbers in self._numbers for each in numbers.values()]
        self._lengths = [len(own) for own, _ in self._numbers]

    def _set_guard(self) -> None:
        """Guard the present state of the model in C++, where that is built."""
        self._guard = None
        if replay_program.REPLAY is None or any("training" not in vars(module) for module in self._modules):
            return
        tensors = {id(t): t for own in self._holders for t in own.values() if isinstance(t, Tensor)}.values()
        mains = [getattr(tensor, "main_grad", None) for tensor in tensors]
        if any(main is not vars(tensor).get("main_grad") for tensor, main in zip(tensors, mains)):
            return
        numbers = {id(own): each for own, each in self._numbers}
        dicts: list[Any] = [*self._holders, *self.hooks.dicts()]
        self._guarded = (  # the guard owns no references
            [(own, dict(own)) for own in dicts],
            [(own, own["training"], numbers.get(id(own), {})) for own in map(vars, self._modules)],
            [(tensor, vars(tensor), main) for tensor, main in zip(tensors, mains)],
        )
        self._guard = replay_program.REPLAY.ModelGuard(*self._guarded)

    def _now(self) -> tuple[list[bool], list[bool]]:
        return list(map(_training, self._modules)), [param.requires_grad for param in self._parameters]

    @contextmanager
    def running(self) -> Iterator[None]:
        """Run the model inside; numbers that it changes are its own state, and left out from then on."""
        if self._guard is not None and self._guard.same_numbers():
            before: list[dict[str, Any]] | None = None  # as in the snapshot
        else:
            before = [constants(own, left_out) for (own, _), left_out in zip(self._numbers, self._left_out)]
        try:
            yield
        finally:
            if before is not None or self._guard is None or not self._guard.same_numbers():
                self._leave_out_changes([dict(old) for _, old in self._numbers] if before is None else before)

    def _leave_out_changes(self, before: list[dict[str, Any]]) -> None:
        """Stop comparing the numbers that have changed from `before`, those of each module."""
        found = False
        for (own, numbers), left_out, old in zip(self._numbers, self._left_out, before):
            now = constants(own, left_out)
            for key in now.keys() | old.keys():
                if not _equal(now.get(key, _MISSING), old.get(key, _MISSING)):
                    found = True
                    left_out.add(key)
                    numbers.pop(key, None)
        if found:
            self._flatten_numbers()
            self._set_guard()

    def modes_changed(self) -> bool:
        """Return True if the mode or a number of a module, or `requires_grad` of a parameter has changed."""
        if self._guard is not None and self._guard.same_modes():
            return False
        return self._now() != (self._training, self._trained) or self.changed_number() is not None

    def changed_number(self) -> str | None:
        """Return the name of the first number that has changed, or None."""
        now, lengths = map(dict.get, self._owners, self._keys, repeat(_MISSING)), self._lengths
        if all(map(is_, now, self._values)) and [len(own) for own, _ in self._numbers] == lengths:
            return None
        for (own, numbers), left_out in zip(self._numbers, self._left_out):
            for key, before in numbers.items():
                if not _equal(own.get(key, _MISSING), before):
                    return next(self._names(own, key), key)
                own[key] = before  # an equal one: next time the same object is found
            for key, now in own.items():
                if key not in numbers and key not in left_out and _is_constant(now):
                    return next(self._names(own, key), key)
        self._lengths = [len(own) for own, _ in self._numbers]  # with objects that are new
        return None

    def changed(self) -> tuple[bool, str | None]:
        """Return (True if graphs may be wrong now, the name of the first moved tensor or module or None)."""
        if self._guard is not None and self._guard.same():
            return False, None
        moved = self._moved()
        changed = moved is not None or self.modes_changed() or self.hooks.changed()
        if not changed and (self._guard is None or not self._guard.same()):
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
                if any(holder is own for own in (*_holders(module), vars(module))):
                    yield f"{f'{name}.{key}'.lstrip('.')!r} of chunk {chunk}"


def _holders(module: nn.Module) -> tuple[dict[str, Any], ...]:
    return module._modules, module._parameters, module._buffers


def _place(tensor: Tensor | None) -> tuple[int | None, int]:
    return (None, 0) if tensor is None else (tensor.data_ptr(), _main(tensor))


def _main(tensor: Tensor) -> int:
    main = getattr(tensor, "main_grad", None)
    return 0 if main is None else main.data_ptr()
