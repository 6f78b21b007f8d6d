"""Detect changes of the optimizers that a captured function steps: a graph holds their numbers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain, repeat
from operator import is_, itemgetter
from typing import Any, NamedTuple

from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fastmp.cuda_graphs.snapshot import constants, same_constants
from fastmp.optim import optimizer as own

__all__ = ["OptimizerSnapshot", "OptimizerStep", "same_steps", "stepped_optimizers"]

_params = itemgetter("params")
_MISSING = object()


class OptimizerStep(NamedTuple):
    """A step of an optimizer. lr: the learning rate that the caller has passed to the step, or None."""

    optimizer: Any
    lr: float | Tensor | None


class OptimizerSnapshot:
    """The numbers of an optimizer, such as its learning rate, and the identity of its state.

    Those of torch's optimizers are the options of `param_groups`, those of fastmp's are attributes. A tensor
    among them counts by its address. The snapshot is compared in every call, so its lists are flat.

    given: the learning rate is an argument of the step, which does not read the last one.
    """

    def __init__(self, optimizer: Any, given: bool = False) -> None:
        self._optimizer, self._given, self._state = optimizer, given, _state(optimizer)
        self._options, self._parameters = self._now(), self._ids()
        self._flatten()

    def _flatten(self) -> None:
        """Note the objects that are found as long as nothing is written."""
        self._holders = list(_holders(self._optimizer))
        pairs = [(own, key) for own, options in zip(self._holders, self._options) for key in options]
        self._owners, self._keys = [own for own, _ in pairs], [key for _, key in pairs]
        self._values = [own[key] for own, key in pairs]
        self._lengths = list(map(len, self._holders))
        self._members = list(chain.from_iterable(_groups(self._optimizer)))
        self._sizes = list(map(len, _groups(self._optimizer)))

    def changed(self) -> bool:
        """Return True if an option has changed or the state was replaced, as `load_state_dict` does."""
        if self._untouched():
            return False
        if _state(self._optimizer) is not self._state or self._ids() != self._parameters:
            return True
        if self.changed_option() is not None:
            return True
        self._flatten()  # with the objects that replaced equal ones
        return False

    def changed_option(self) -> str | None:
        """Return the name of the first option that has changed, or None."""
        kind = type(self._optimizer).__name__
        for number, (now, before) in enumerate(zip(self._now(), self._options)):
            if not same_constants(now, before):
                keys = [*before, *(key for key in now if key not in before)]
                name = next(key for key in keys if not same_constants(_only(now, key), _only(before, key)))
                is_own = isinstance(self._optimizer, own.Optimizer)
                return f"{name!r} of {kind}" if is_own else f"{name!r} of group {number} of {kind}"
        return None

    def _untouched(self) -> bool:
        """Return True if each object is the one that was found before."""
        optimizer, groups = self._optimizer, _groups(self._optimizer)
        return (
            _state(optimizer) is self._state
            and all(map(is_, map(dict.get, self._owners, self._keys, repeat(_MISSING)), self._values))
            and list(map(len, self._holders)) == self._lengths
            and list(map(len, groups)) == self._sizes
            and all(map(is_, _holders(optimizer), self._holders))
            and all(map(is_, chain.from_iterable(groups), self._members))
        )

    def _now(self) -> list[dict[str, Any]]:
        leave_out = ("lr",) if self._given else ()
        return [
            {
                **constants(holder, leave_out),
                **{
                    key: each.data_ptr()
                    for key, each in holder.items()
                    if isinstance(each, Tensor) and key not in leave_out
                },
            }
            for holder in _holders(self._optimizer)
        ]

    def _ids(self) -> list[tuple[int, ...]]:
        return [tuple(map(id, group)) for group in _groups(self._optimizer)]


def _holders(optimizer: Any) -> list[dict[str, Any]]:
    """Return the dicts that hold the options."""
    return [vars(optimizer)] if isinstance(optimizer, own.Optimizer) else optimizer.param_groups


def _groups(optimizer: Any) -> list[list[Tensor]]:
    """Return the parameters of each group."""
    return [] if isinstance(optimizer, own.Optimizer) else list(map(_params, optimizer.param_groups))


def _state(optimizer: Any) -> Any:
    return None if isinstance(optimizer, own.Optimizer) else optimizer.state


def _only(options: dict[str, Any], key: str) -> dict[str, Any]:
    return {key: options[key]} if key in options else {}


def same_steps(now: list[OptimizerStep], before: list[OptimizerStep]) -> bool:
    """Return True if both are steps with the same numbers; what tensors hold is not compared."""
    return len(now) == len(before) and all(
        new.optimizer is old.optimizer
        and isinstance(new.lr, Tensor) == isinstance(old.lr, Tensor)
        and same_constants(constants({"lr": new.lr}), constants({"lr": old.lr}))
        for new, old in zip(now, before)
    )


@contextmanager
def stepped_optimizers() -> Iterator[list[OptimizerStep]]:
    """Collect the steps of optimizers that are made inside."""
    found: list[OptimizerStep] = []

    def note(optimizer: Any, *_: Any) -> None:
        found.append(OptimizerStep(optimizer, None))

    def note_own(optimizer: own.Optimizer, lr: float | Tensor | None) -> None:
        found.append(OptimizerStep(optimizer, lr))

    handle = register_optimizer_step_pre_hook(note)
    own.step_observers.append(note_own)
    try:
        yield found
    finally:
        own.step_observers.remove(note_own)
        handle.remove()
