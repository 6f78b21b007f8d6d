"""Lazy packages (PEP 562): a name is imported from its module when it is first used."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any


def exports(
    package: str, names: dict[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Make `__getattr__`, `__dir__` and `__all__` of `package`.

    `names` maps each submodule to the names it gives to the package, separated by spaces; the submodules
    themselves can be reached as well. No name may be that of a submodule, whose import would replace it.
    """
    homes = {name: module for module, exported in names.items() for name in exported.split()}

    def get(name: str) -> Any:
        if name in homes:
            return getattr(import_module(f"{package}.{homes[name]}"), name)
        if name in names:
            return import_module(f"{package}.{name}")
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return get, lambda: sorted({*homes, *(name for name in names if "." not in name)}), sorted(homes)


def moved(package: str, modules: str, to: str) -> None:
    """Let modules that have moved to `to` be imported by their former names, until the next release."""
    for name in modules.split():
        sys.modules[f"{package}.{name}"] = import_module(f"{to}.{name}")
