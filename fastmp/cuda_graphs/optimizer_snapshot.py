"""Detect changes of the optimizers that a captured function steps: a graph holds their numbers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fastmp.cuda_graphs.snapshot import constants, same_constants
from fastmp.optim import optimizer as own

__all__ = ["OptimizerSnapshot", "stepped_optimizers"]


class OptimizerSnapshot:
    """The numbers of an optimizer, such as its learning rate, and the identity of its state.

    Those of torch's optimizers are the options of `param_groups`; a tensor among them counts by its address.
    Those of fastmp's are attributes.
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizer, self._state, self._options = optimizer, _state(optimizer), _options(optimizer)

    def changed(self) -> bool:
        """Return True if an option has changed or the state was replaced, as `load_state_dict` does."""
        now = _options(self._optimizer)
        same = len(now) == len(self._options) and all(map(same_constants, now, self._options))
        return not same or _state(self._optimizer) is not self._state


def _state(optimizer: Any) -> Any:
    return None if isinstance(optimizer, own.Optimizer) else optimizer.state


def _options(optimizer: Any) -> list[dict[str, Any]]:
    if isinstance(optimizer, own.Optimizer):
        return [constants(vars(optimizer))]
    return [
        {
            **constants(group),
            **{key: each.data_ptr() for key, each in group.items() if isinstance(each, Tensor)},
            "params": tuple(map(id, group["params"])),
        }
        for group in optimizer.param_groups
    ]


@contextmanager
def stepped_optimizers() -> Iterator[list[Any]]:
    """Collect the optimizers that are stepped inside, each once."""
    found: list[Any] = []

    def note(optimizer: Any, *_: Any) -> None:
        if not any(optimizer is each for each in found):
            found.append(optimizer)

    handle = register_optimizer_step_pre_hook(note)
    own.step_observers.append(note)
    try:
        yield found
    finally:
        own.step_observers.remove(note)
        handle.remove()
