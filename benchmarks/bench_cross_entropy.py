"""Cross-entropy of fastmp (fresh and in-place gradient), torch eager, torch.compile and Liger."""

from __future__ import annotations

from functools import lru_cache

import pytest
import torch

from benchmarks.conftest import CLOCK, DEVICE
from benchmarks.peers import COMPILE, EAGER, cross_entropy_case

SHAPES = {"cpu": [(2048, 50304)], "cuda": [(8192, 50304), (8192, 128256), (8192, 16032)]}[DEVICE]

pytestmark = pytest.mark.benchmark(timer=CLOCK)


@lru_cache(maxsize=1)
def _case(shape, dtype):
    return cross_entropy_case(*shape, dtype, DEVICE)


@pytest.mark.parametrize("rival", ("fastmp", "fastmp in place", EAGER, COMPILE, "Liger"))
@pytest.mark.parametrize("direction", ("forward", "both"))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_cross_entropy(compare, shape, dtype, direction, rival):
    compare(_case(shape, dtype), rival, direction)
