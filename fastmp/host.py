"""The compiled module `_host`, which does not link torch, as `HOST`; None if it is not built."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

__all__ = ["HOST"]


def _host() -> ModuleType | None:
    try:
        return import_module("fastmp._host")
    except ImportError:
        return None


HOST = _host()
