"""Tools for tests of fastmp and of models built on it: forked ranks, sample inputs, accuracy checks."""

from __future__ import annotations

import importlib
from typing import Any

_EXPORTS = {
    "RankError": "ranks",
    "run_ranks": "ranks",
    "count_collectives": "parallel",
    "full_gradient": "parallel",
    "full_tensor": "parallel",
    "check_op": "ops",
}
_MODULES = ("ops", "parallel", "ranks")

__all__ = [*_EXPORTS, *_MODULES]


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        return getattr(importlib.import_module(f"{__name__}.{_EXPORTS[name]}"), name)
    if name in _MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
