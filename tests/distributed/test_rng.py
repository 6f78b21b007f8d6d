"""Streams of random numbers: what is equal across ranks, what differs, and that nothing is drawn twice."""

from __future__ import annotations

import io

import pytest
import torch
import torch.nn.functional as F

from fastmp.distributed.rng import RngTracker
from fastmp.testing.ranks import run_ranks


@pytest.fixture(autouse=True)
def _leave_the_default_generator_alone():
    state = torch.get_rng_state()
    yield
    torch.set_rng_state(state)


def draws(rank, world_size, seed):
    """Two dropout masks outside, with one inside between them and one after."""
    rng = RngTracker(seed, tp_rank=rank)
    ones = torch.ones(1000)
    outside = [F.dropout(ones, 0.5)]
    with rng.fork("tensor-parallel"):
        inside = [F.dropout(ones, 0.5)]
    outside.append(F.dropout(ones, 0.5))
    with rng.fork("tensor-parallel"):
        inside.append(F.dropout(ones, 0.5))
    return [m.tolist() for m in outside], [m.tolist() for m in inside]


def test_dropout_is_equal_outside_and_different_inside():
    results = run_ranks(draws, 4, 1234)
    outside = [result[0] for result in results]
    inside = [mask for result in results for mask in result[1]]
    assert all(masks == outside[0] for masks in outside)
    assert outside[0][0] != outside[0][1]
    assert len({tuple(mask) for mask in inside}) == len(inside) == 8
    assert all(mask not in outside[0] for mask in inside)


def test_seeds_of_the_streams():
    def numbers(seed):
        return torch.rand(8, generator=torch.Generator().manual_seed(seed))

    rng = RngTracker(7, tp_rank=3, pp_rank=2)
    assert torch.equal(torch.rand(8), numbers(7 + 200))
    with rng.fork("tensor-parallel"):
        assert torch.equal(torch.rand(8), numbers(7 + 2718 + 3 + 200))

    rng = RngTracker(7, tp_rank=3, cp_rank=1, pp_rank=2)
    twins = {"context-parallel": 2_000_000, "tensor-context-parallel": 2_000_000 + 2718 + 3}
    for name, offset in {"tensor-parallel": 2718 + 3, **twins}.items():
        with rng.fork(name):
            assert torch.equal(torch.rand(8), numbers(7 + offset + 200))


def test_a_stream_goes_on_where_it_ended_and_leaves_the_other_alone():
    rng = RngTracker(5)
    default, own = torch.Generator().manual_seed(5), torch.Generator().manual_seed(5 + 2718)
    for _ in range(4):
        with rng.fork("tensor-parallel"):
            assert torch.equal(torch.rand(3), torch.rand(3, generator=own))
        assert torch.equal(torch.rand(5), torch.rand(5, generator=default))


def test_an_exception_ends_the_block_and_a_block_in_a_block_changes_nothing():
    rng = RngTracker(1)
    own = torch.Generator().manual_seed(1 + 2718)
    with pytest.raises(KeyError), rng.fork("tensor-parallel"):
        torch.rand(2)
        raise KeyError
    default = torch.Generator().manual_seed(1)
    assert torch.equal(torch.rand(3), torch.rand(3, generator=default))
    torch.rand(2, generator=own)
    with rng.fork("tensor-parallel"):
        with rng.fork("tensor-parallel"):
            assert torch.equal(torch.rand(3), torch.rand(3, generator=own))
        assert torch.equal(torch.rand(3), torch.rand(3, generator=own))
    assert torch.equal(torch.rand(3), torch.rand(3, generator=default))


def sample(rng):
    outside = torch.rand(5)
    with rng.fork("tensor-parallel"):
        inside = torch.rand(5)
    return torch.cat([outside, inside, torch.randn(5)])


def test_checkpoint_continues_bitwise():
    rng = RngTracker(3, tp_rank=1)
    sample(rng)
    state = rng.states()
    assert all(s.dtype == torch.uint8 and s.device.type == "cpu" for s in state.values())
    file = io.BytesIO()
    torch.save(state, file)
    expected = sample(rng)

    other = RngTracker(99)
    file.seek(0)
    other.restore(torch.load(file, weights_only=True))
    assert torch.equal(sample(other), expected)


@pytest.mark.parametrize("inside", [False, True], ids=["outside", "inside a block"])
def test_recomputation_repeats_and_then_nothing_has_moved(inside):
    rng = RngTracker(3)

    def recompute():
        before = rng.states()
        first = sample(rng)
        after = rng.states()
        rng.restore(before)
        again = sample(rng)
        moved = rng.states()
        assert torch.equal(first, again)
        assert all(torch.equal(after[name], moved[name]) for name in after)

    if inside:
        with rng.fork("tensor-parallel"):
            states = rng.states()
            recompute()
            assert not torch.equal(rng.states()["tensor-parallel"], states["tensor-parallel"])
            assert torch.equal(rng.states()["default"], states["default"])
        assert torch.equal(torch.rand(4), torch.rand(4, generator=torch.Generator().manual_seed(3)))
    else:
        recompute()


def test_errors_name_both_values():
    rng = RngTracker(3)
    with pytest.raises(ValueError, match="no stream 'expert'; there is tensor-parallel"), rng.fork("expert"):
        pass
    with (
        pytest.raises(ValueError, match="draws on cpu, not on cuda:0"),
        rng.fork("tensor-parallel", device=torch.device("cuda", 0)),
    ):
        pass
    with pytest.raises(ValueError, match=r"got streams \['default'\], expected \['default', 'tensor-"):
        rng.restore({"default": torch.get_rng_state()})
    with pytest.raises(ValueError, match=r"generators: the streams of cpu have states only; use states\(\)"):
        rng.generators()
    with pytest.raises(
        ValueError, match=r"restore: the streams of cpu take states, got a generator for 'def"
    ):
        rng.restore({name: torch.Generator() for name in rng.states()})
    with pytest.raises(ValueError, match="no generator for device meta"):
        RngTracker(3, device="meta")


@pytest.mark.gpu
def test_streams_of_a_gpu():
    rng = RngTracker(7, tp_rank=1, device="cuda")
    expected = torch.rand(8, generator=torch.Generator("cuda").manual_seed(7), device="cuda")
    inside = torch.rand(8, generator=torch.Generator("cuda").manual_seed(7 + 2718 + 1), device="cuda")
    start = rng.states()
    for _ in range(2):
        with rng.fork("tensor-parallel"):
            assert torch.equal(torch.rand(4, device="cuda"), inside[:4])
        assert torch.equal(torch.rand(4, device="cuda"), expected[:4])
        middle = rng.states()
        with rng.fork("tensor-parallel"):
            second = torch.rand(4, device="cuda")
        rng.restore(middle)
        with rng.fork("tensor-parallel"):
            assert torch.equal(torch.rand(4, device="cuda"), second)
        rng.restore(start)


def test_streams_that_start_anew_are_functions_of_seed_step_and_place():
    def numbers(step, **places):
        tracker = RngTracker(5, **places)
        torch.rand(3)
        tracker.restart(step)
        drawn = [torch.rand(2)]
        with tracker.fork():
            drawn.append(torch.rand(2))
        return drawn

    first, again = numbers(7, tp_rank=1), numbers(7, tp_rank=1)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    other_rank, other_step, other_stage = numbers(7), numbers(8, tp_rank=1), numbers(7, tp_rank=1, pp_rank=1)
    assert torch.equal(first[0], other_rank[0]) and not torch.equal(first[1], other_rank[1])
    for other in (other_step, other_stage):
        assert not any(torch.equal(a, b) for a, b in zip(first, other, strict=True))


def test_a_tracker_that_follows_another_starts_anew_as_it_would():
    stage = RngTracker(5, pp_rank=1)
    stage.restart(3)
    expected = torch.rand(4)
    whole = RngTracker(5)
    whole.follow(RngTracker(5, pp_rank=1))
    whole.restart(3)
    assert torch.equal(torch.rand(4), expected)
