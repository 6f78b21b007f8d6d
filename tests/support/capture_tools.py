"""Which Triton kernels captures of CUDA graphs load, on a GPU and without one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

import pytest


@contextmanager
def loads_in_captures(capturing: Callable[[], bool]) -> Iterator[list[str]]:
    """List the kernels that Triton loads while `capturing()` is True."""
    from triton.compiler import CompiledKernel

    initialise, found = CompiledKernel._init_handles, []

    def noted(kernel: CompiledKernel) -> None:
        if kernel.module is None and capturing():
            found.append(kernel.name)
        initialise(kernel)

    with mock.patch.object(CompiledKernel, "_init_handles", noted):
        yield found


def new_in_capture(first: Callable[[], object], captured: Callable[[], object]) -> list:
    """Return the kernels (`Code`) that `captured` launches and `first` does not, on tensors without data."""
    pytest.importorskip("triton", reason="Triton is not installed")
    from fastmp.ops import precompile

    with mock.patch.dict(precompile._TILE_CLASSES, clear=True):  # a launch loads its own tiles' kernel only
        with precompile.recording(90) as loaded:
            first()
        with precompile.recording(90) as needed:
            captured()
    assert needed, "nothing is captured"
    return [code for code in needed if code not in loaded]
