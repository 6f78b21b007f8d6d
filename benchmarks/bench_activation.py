"""bias_gelu of fastmp, torch eager and torch.compile."""

from __future__ import annotations

from functools import lru_cache

import pytest
import torch

from benchmarks.conftest import CLOCK, DEVICE
from benchmarks.peers import COMPILE, EAGER, bias_gelu_case

SHAPES = {"cpu": [(4096, 8192)], "cuda": [(8192, 16384), (2048, 6144), (4096, 49152)]}[DEVICE]

pytestmark = pytest.mark.benchmark(timer=CLOCK)


@lru_cache(maxsize=1)
def _case(shape, dtype, approximate):
    return bias_gelu_case(*shape, dtype, DEVICE, approximate)


@pytest.mark.parametrize("rival", ("fastmp", EAGER, COMPILE))
@pytest.mark.parametrize("direction", ("forward", "both"))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
@pytest.mark.parametrize("approximate", ("tanh", "none"))
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bias_gelu(compare, shape, approximate, dtype, direction, rival):
    compare(_case(shape, dtype, approximate), rival, direction)
