"""The benchmarks are not installed: these tests import them from the source tree."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))


@pytest.fixture
def tiny_case():
    """bias_gelu on (16, 256), in float32, without torch.compile, which takes seconds."""
    import torch

    from benchmarks import bench_activation

    case = bench_activation.bias_gelu_case(16, 256, "tanh", torch.float32, "cpu")
    del case.rivals["torch.compile"]
    return case
