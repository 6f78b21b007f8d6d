"""fastmp: kernels and model parallelism for training large transformers.

Importing the package is free: torch is loaded when a name that needs it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_EXPORTS = {"init": "fastmp.parallel.runtime"}
_SUBPACKAGES = frozenset({"config", "nn", "ops", "parallel", "train"})

__all__ = ["__version__", "config", "init", "nn", "ops", "parallel", "train"]


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        return getattr(import_module(_EXPORTS[name]), name)
    if name in _SUBPACKAGES:
        return import_module(f"fastmp.{name}")
    raise AttributeError(f"module 'fastmp' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
