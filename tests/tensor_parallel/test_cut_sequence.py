"""What a context-parallel rank has of a sequence, and how the whole comes back."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from fastmp.tensor_parallel.context import cut_sequence, join_sequence, local_positions, local_slices
from fastmp.testing.parallel import count_collectives
from fastmp.testing.ranks import run_ranks


def test_one_rank_has_the_whole():
    x = torch.arange(7).view(1, 7)  # also an odd length
    assert cut_sequence(x, None) is x and join_sequence(x, None) is x
    assert torch.equal(local_positions(7, None), x[0]) and local_slices(None) == (0, 1)


def cut_case(rank, world):
    group, size = dist.group.WORLD, 3
    length = 2 * world * size
    slices = local_slices(group)
    positions = torch.cat([torch.arange(i * size, (i + 1) * size) for i in slices])
    assert torch.equal(local_positions(length, group), positions)
    whole = torch.randn(2, length, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    for x, dim in ((whole, 1), (whole, -2), (whole.transpose(0, 1), 0), (whole[..., 0], 1), (whole.mT, 2)):
        with count_collectives() as seen:
            part = cut_sequence(x, group, dim)
        assert torch.equal(part, x.index_select(dim, positions)) and not seen.counts
        with count_collectives() as seen:
            assert torch.equal(join_sequence(part, group, dim), x)
        assert seen.counts == {"all_gather": 1}
    tokens = torch.arange(2 * length).view(2, length)
    assert torch.equal(join_sequence(cut_sequence(tokens, group), group), tokens)
    return slices


@pytest.mark.parametrize("world", (2, 3))
def test_the_slices_of_all_ranks_are_the_sequence(world):
    slices = run_ranks(cut_case, world)
    assert sorted(sum(slices, ())) == list(range(2 * world))
    assert {sum(own) for own in slices} == {2 * world - 1}


def gradient_case(rank, world):
    group = dist.group.WORLD
    whole = torch.randn(2, 8, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    weights = torch.randn(world, 2, 8, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    leaf = whole.clone().requires_grad_()
    part = cut_sequence(leaf, group)
    with count_collectives() as seen:
        (join_sequence(part, group) * weights[rank]).sum().backward()  # each rank uses the whole in its way
    assert seen.counts == {"all_gather": 1, "reduce_scatter": 1}
    expected = torch.zeros_like(whole)
    expected[:, local_positions(8, group)] = cut_sequence(weights.sum(0), group)
    torch.testing.assert_close(leaf.grad, expected, rtol=1e-14, atol=1e-14)


def test_gradients_of_all_ranks_are_added_and_cut():
    run_ranks(gradient_case, 2)


def wrong_case(rank, world):
    with pytest.raises(ValueError, match=r"a sequence of 18 tokens .* by 2 x the context-parallel size 4"):
        cut_sequence(torch.zeros(18, 3), dist.group.WORLD, dim=0)
    with pytest.raises(ValueError, match="join_sequence: the 3 tokens of this rank"):
        join_sequence(torch.zeros(2, 3), dist.group.WORLD)


def test_lengths_that_are_not_slices_are_refused():
    run_ranks(wrong_case, 4)
