"""The loss scaler: equal to torch's at hysteresis 1, to its rule always, and in a graph."""

from __future__ import annotations

import random

import pytest
import torch

from fastmp.cuda_graphs.backends.recording import Pool, RecordedGraph
from fastmp.optim.loss_scaler import LossScale, LossScaler, next_loss_scale


def states_of(scaler):
    return LossScale(*(tensor.item() for tensor in scaler.state_dict().values()))


def sequences(number, longest):
    """Seeded sequences of overflows from none to all, so that the scale goes up, down and to its ends."""
    draw = random.Random(number)
    often = draw.choice((0.0, 0.02, 0.2, 0.5, 0.9, 1.0))
    return [draw.random() < often for _ in range(draw.randint(1, longest))], draw


@pytest.mark.full
def test_it_is_torchs_scaler_at_hysteresis_1_over_a_thousand_sequences():
    parameter = torch.zeros(1, requires_grad=True)
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    ends = set()
    for number in range(1000):
        overflows, draw = sequences(number, 40)
        init, interval = 2.0 ** draw.randint(-60, 127), draw.randint(1, 6)
        mine = LossScaler(init_scale=init, min_scale=2.0**-126, growth_interval=interval)
        other = torch.amp.GradScaler("cpu", init_scale=init, growth_interval=interval)
        for step, overflow in enumerate(overflows):
            parameter.grad = torch.full((1,), float("inf" if overflow else 0.0))
            other.scale(torch.zeros(()))  # makes its tensors
            other.step(optimizer)
            other.update()
            mine.update(torch.tensor(overflow))
            theirs = other.get_scale(), other._get_growth_tracker()
            assert states_of(mine)[:2] == theirs, (number, step)
            assert mine.inv_scale.item() == 1 / theirs[0]
        ends.add(mine.scale.item() == 2.0**127)
    assert ends == {True, False}  # where it cannot double, neither becomes infinite


def test_it_follows_its_rule_at_any_hysteresis():
    for number in range(200):
        overflows, draw = sequences(number, 60)
        options = {
            "growth_interval": draw.randint(1, 5),
            "hysteresis": draw.randint(1, 4),
            "min_scale": 2.0 ** draw.randint(-3, 3),
        }
        scaler = LossScaler(init_scale=2.0**4, **options)
        state = LossScale(2.0**4, 0, options["hysteresis"])
        for overflow in overflows:
            state = next_loss_scale(state, overflow, **options)
            scaler.update(torch.tensor(overflow))
            assert states_of(scaler) == state


@pytest.mark.parametrize(
    ("overflows", "expected"),
    [
        ("....", (64.0, 0, 2)),  # two intervals of two
        ("x", (16.0, 0, 1)),  # one overflow is let through
        ("x.x", (8.0, 0, 0)),  # a step without one gives nothing back
        ("x.x.x", (4.0, 0, 0)),  # so the next one halves at once
        ("xx..", (16.0, 0, 2)),  # a doubling gives all back
        ("xx..x", (16.0, 0, 1)),
        ("xxxxxxxx", (2.0, 0, 0)),  # the lowest
        (".x", (16.0, 0, 1)),
    ],
)
def test_states_worked_out_by_hand(overflows, expected):
    state = LossScale(16.0, 0, 2)
    for each in overflows:
        state = next_loss_scale(state, each == "x", growth_interval=2, hysteresis=2, min_scale=2.0)
    assert state == expected


def test_a_captured_update_goes_on_at_every_replay():
    scaler, eager = (LossScaler(init_scale=4.0, growth_interval=2, hysteresis=2) for _ in range(2))
    found = torch.tensor(False)
    before = states_of(scaler)
    graph = RecordedGraph(Pool())  # refuses what the host would read
    with graph.capture():
        scaler.update(found)
    scaler.load_state_dict(before._asdict())
    for overflow in (False, False, True, True, False, True, False, False):
        found.fill_(overflow)
        graph.replay()
        eager.update(torch.tensor(overflow))
        assert states_of(scaler) == states_of(eager)


def test_a_loaded_state_goes_on_bitwise():
    first, second = (LossScaler(growth_interval=3, hysteresis=2) for _ in range(2))
    for overflow in (True, False, True, False):
        first.update(torch.tensor(overflow))
    second.load_state_dict(states_of(first)._asdict())
    assert second.inv_scale == first.inv_scale
    for overflow in (False, False, True):
        for scaler in (first, second):
            scaler.update(torch.tensor(overflow))
        assert states_of(first) == states_of(second)
    with pytest.raises(ValueError, match=r"need \['growth_tracker', .*\], got \['scale'\]"):
        second.load_state_dict({"scale": 1.0})


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"init_scale": 1000.0}, "init_scale must be a power of two in float32, got 1000.0"),
        ({"init_scale": 2.0**128}, "init_scale must be a power of two"),
        ({"min_scale": 0.0}, "min_scale must be a power of two in float32, got 0.0"),
        ({"init_scale": 1.0, "min_scale": 2.0}, "min_scale 2.0 is above init_scale 1.0"),
        ({"growth_interval": 0}, "must be positive, got 0 and 1"),
        ({"hysteresis": 0}, "must be positive, got 2000 and 0"),
    ],
)
def test_wrong_options_are_named(options, said):
    with pytest.raises(ValueError, match=said):
        LossScaler(**options)


@pytest.mark.parametrize("wrong", [torch.tensor(3.0), torch.tensor([True])])
def test_a_norm_is_no_overflow(wrong):
    with pytest.raises(ValueError, match=r"found_inf must be a 0-dim bool tensor on cpu, got .*isfinite"):
        LossScaler().update(wrong)
