"""A quicker start of functions in Triton's interpreter."""

from __future__ import annotations

import functools
import inspect
from typing import Any


@functools.cache
def _builtins_of(owner: Any) -> list[str]:
    from triton.language.core import is_builtin

    return [name for name, member in inspect.getmembers(owner) if is_builtin(member)]


def _patch_builtins(owner: Any, *how: Any) -> None:
    """Replace the members of `owner` that the interpreter defines, as Triton does."""
    from triton.language.core import is_builtin
    from triton.runtime import interpreter

    for name in _builtins_of(owner):
        if is_builtin(member := getattr(owner, name)):
            interpreter._patch_attr(owner, name, member, *how)


def cache_lookups() -> None:
    """Let the interpreter look up the members of its language once, and the NumPy dtype of each type.

    Triton sorts all members at each call of a device function, and builds a table of dtypes for each tensor:
    together a quarter of the time of a small kernel. Another release of Triton may have other functions.
    """
    from triton.runtime import interpreter

    if not all(hasattr(interpreter, name) for name in ("_patch_attr", "_patch_builtin", "_get_np_dtype")):
        return
    look_up, known = interpreter._get_np_dtype, {}

    def numpy_dtype(of: Any) -> Any:
        if of.name not in known:  # types of blocks cannot be hashed
            known[of.name] = look_up(of)
        return known[of.name]

    interpreter._patch_builtin, interpreter._get_np_dtype = _patch_builtins, numpy_dtype
