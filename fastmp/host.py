"""The compiled module `_host`, which does not link torch, as `HOST`; None if it is not built."""

from __future__ import annotations

from types import ModuleType

__all__ = ["HOST"]


def _host() -> ModuleType | None:
    try:
        from fastmp import _host as module
    except ImportError:
        return None
    return module


HOST = _host()
