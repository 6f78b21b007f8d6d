"""The Triton kernel of grouped_lora in Triton's interpreter, against the reference."""

from __future__ import annotations

import sys

import pytest
import torch
from kernel_tools import set_programs
from marks import full

from fastmp.ops.core import launcher
from fastmp.ops.core.registry import OPS
from fastmp.testing.ops import poisoned_memory

pytestmark = [
    pytest.mark.interpret,
    pytest.mark.filterwarnings("ignore:overflow", "ignore:invalid value"),
]
TOLERANCE = {
    torch.float64: {"rtol": 1e-12, "atol": 1e-12},
    torch.float32: {"rtol": 1e-5, "atol": 1e-4},
    torch.float16: {"rtol": 3e-3, "atol": 4e-3},
}


def calls(sizes, spare, n, k, r, dtype):
    """Arguments of forward and of the dgrad, for both layouts of the weight."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64).mul(0.3).to(dtype)

    offsets = torch.tensor(sizes, dtype=torch.int32).cumsum(0, dtype=torch.int32)
    rows, experts = sum(sizes) + spare, len(sizes)
    w, a, b = random(experts, n, k), random(experts, r, k), random(experts, n, r)
    x, grad, low = random(rows, k), random(rows, n), random(rows, r)
    yield x, w, None, low, b, offsets, False, False
    yield x, w, random(experts, n), low, b, offsets, False, False
    yield grad, w, None, low, a, offsets, True, True
    yield x, w.mT.contiguous(), random(experts, n), low, b, offsets, True, False
    yield grad, w.mT.contiguous(), None, low, a, offsets, False, True


def check(arguments):
    with poisoned_memory():
        found = OPS["grouped_mm_lora"].implementations["triton"](*arguments)
    want = OPS["grouped_mm_lora"].implementations["reference"](*arguments)
    torch.testing.assert_close(found, want, **TOLERANCE[found.dtype])


@pytest.mark.parametrize(
    ("sizes", "spare", "r", "dtype"),
    [
        ([3, 0, 70, 0, 34], 5, 5, torch.float32),
        ([0, 0], 3, 8, torch.float32),
        *full(
            [
                ([0, 130, 0], 0, 16, torch.float64),
                ([3, 0, 70, 0, 34], 5, 70, torch.float32),  # several steps of LoRA
                ([1] * 15, 1, 32, torch.float16),
                ([0, 0, 0], 0, 8, torch.float32),
            ]
        ),
    ],
    ids=str,
)
def test_equals_reference(sizes, spare, r, dtype):
    for arguments in calls(sizes, spare, 34, 65, r, dtype):
        check(arguments)


@pytest.mark.parametrize("n_k_r", [(0, 5, 2), (4, 0, 2), (2, 1, 1), (4, 5, 0)], ids=str)
def test_shapes(n_k_r):
    for arguments in calls([5, 0, 18], 2, *n_k_r, torch.float32):
        check(arguments)


@pytest.mark.parametrize("r", [12, *full([40])])
def test_by_descriptors(r, monkeypatch):
    """As on a GPU that has a TMA unit: x and w come through descriptors, the terms of LoRA do not.

    Three programs walk over all tiles, in one loop for a rank of at most 32.
    """
    module = sys.modules["fastmp.ops.grouped_lora"]  # the package's name is the function's
    seen, describe = [], module.descriptor

    def described(tensor, *arguments):
        seen.append(tuple(tensor.shape))
        return describe(tensor, *arguments)

    monkeypatch.setattr(launcher, "architecture_elsewhere", 90)
    monkeypatch.setattr(module, "descriptor", described)
    set_programs(monkeypatch, 3)
    for arguments in calls([3, 0, 40, 21, 33], 5, 48, 32, r, torch.float16):
        check(arguments)
        x, w = arguments[:2]
        assert seen == [tuple(x.shape), tuple(w.shape)]
        seen.clear()
