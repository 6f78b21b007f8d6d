"""Marks for some of the cases of a parametrized test."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch


def full(cases: Iterable[Any]) -> list[Any]:
    """The cases, in the full set only; a tuple has the values of several arguments."""
    return _marked(cases, pytest.mark.full)


def exhaustive(cases: Iterable[Any]) -> list[Any]:
    """The cases, in the exhaustive set only, which continuous integration leaves out; as for `full`."""
    return _marked(cases, pytest.mark.exhaustive)


def _marked(cases: Iterable[Any], mark: Any) -> list[Any]:
    each = (case if isinstance(case, tuple) else (case,) for case in cases)
    return [pytest.param(*values, marks=mark) for values in each]


# of ranks: new processes on GPUs, which they share where there are fewer
ON_GPUS = pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.alone])
# of kernels that are interpreted, where a dtype differs in its rounding only
DTYPES = [torch.float32, *full([torch.float64, torch.bfloat16, torch.float16])]
