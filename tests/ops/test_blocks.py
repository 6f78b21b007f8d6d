"""block_rows: blocks that move to other places, and what is refused."""

from __future__ import annotations

import pytest
import torch

from fastmp.ops import block_rows
from fastmp.ops.blocks import launch, reference
from fastmp.testing.ops import poisoned_memory, samples


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


def test_blocks_move():
    starts, places = int32(0, 2, 2, 5, 6), int32(4, 6, 0, -1, 3)
    expected = [4, 5, 0, 1, 2, -1, 3]
    assert block_rows(starts, places, 7).flatten().tolist() == expected
    assert block_rows(starts[:1], places[:1], 0).shape == (0, 1)


def test_blocks_move_that_threads_divide():
    sizes = torch.arange(600)
    starts, places = (sizes.cumsum(0) - sizes).int(), (sizes.flip(0).cumsum(0) - sizes.flip(0)).int().flip(0)
    places[::7] = -1
    arguments = starts, places, int(sizes.sum())
    assert torch.equal(block_rows(*arguments), reference(*arguments))
    apart = torch.stack((starts, places), 1)
    assert torch.equal(block_rows(apart[:, 0], apart[:, 1], arguments[2]), reference(*arguments))


@pytest.mark.interpret
def test_the_kernel_is_the_reference():
    for arguments in samples("block_rows", device="cpu", dtype=torch.float32):
        with poisoned_memory():
            found = launch(*arguments)
        assert torch.equal(found, reference(*arguments))


@pytest.mark.parametrize(
    ("starts", "places", "rows", "message"),
    [
        (torch.zeros(2), int32(0, 0), 3, r"starts must be an int32 vector, got torch.float32 \(2,\)"),
        (int32(0, 1), int32(0, 1)[None], 3, r"places must be an int32 vector, got torch.int32 \(1, 2\)"),
        (int32(0, 1), int32(0), 3, r"expected places of .* for starts of shape \(2,\), got \(1,\)"),
        (int32(0, 1), int32(0, 1), -1, "num_rows must be from 0 to 2147483647, got -1"),
        (int32(0, 1), int32(0, 1), 1 << 31, "num_rows must be from 0 to 2147483647, got 2147483648"),
        (int32(), int32(), 2, "there are 2 rows, but no block"),
    ],
)
def test_what_is_refused(starts, places, rows, message):
    with pytest.raises(ValueError, match=f"block_rows: {message}"):
        block_rows(starts, places, rows)
