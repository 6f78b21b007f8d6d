"""Microbatches share the graphs of a lane: eager bits on poisoned memory, and plans that are wrong."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import pytest
import torch
from marks import full
from small_tools import Parts, assert_same_as_eager, eager
from torch import nn

from fastmp.cuda_graphs import replay_program
from fastmp.cuda_graphs.backends.recording import Pool, RecordingBackend
from fastmp.cuda_graphs.errors import GraphError
from fastmp.cuda_graphs.manager import GraphManager, check_plan
from fastmp.cuda_graphs.position import Position
from fastmp.nn import LayerChain
from fastmp.ops.wgrad import WgradQueue, defer_wgrad, linear
from fastmp.schedule.buffer_plan import (
    BufferPlan,
    SpanSpec,
    TensorSpec,
    plan_buffers,
    plan_errors,
)
from fastmp.schedule.lanes import assign_lanes
from fastmp.schedule.schedule import BACKWARD_WEIGHT, FORWARD, Schedule, Step, with_loss
from fastmp.schedule.stream_schedule import SegmentFacts, compute_ops, graph_order, partition_segments

HIDDEN = TensorSpec((4, 2, 8), "bfloat16")
SPAN = SpanSpec("layers", (HIDDEN,), (HIDDEN,))


class OwnPool(Pool):
    """A pool that knows its blocks."""

    def __init__(self, blocks):
        super().__init__(blocks)
        self.own = {}

    def _take(self, nbytes):
        storage = super()._take(nbytes)
        self.own[storage.data_ptr()] = self._blocks[storage.data_ptr()]
        return storage


class PoisonedBackend(RecordingBackend):
    """Fills memory with NaN as soon as the plan says that nobody needs it."""

    def reset(self):
        blocks = {}
        self.pools = defaultdict(lambda: OwnPool(blocks))

    def poison(self, graph_set, number):
        """Before a replay of a step: the pool of a flight or backward that begins, and free buffers."""
        slot, before = graph_set.slots[number], graph_set.slots[max(number - 1, 0)]
        begins = number == 0 or slot.step != before.step
        if not any(slot.flight == each.flight for each in graph_set.slots[:number]) or (
            slot.pool != slot.lane and begins
        ):
            for block in self.pools[slot.pool].own.values():
                block.memory.fill_(255)
        held = {lease.buffer for lease in graph_set.plan.leases if lease.first <= number <= lease.last + 1}
        for buffer, tensor in enumerate(graph_set.buffers):
            if buffer not in held:
                tensor.view(torch.uint8).fill_(255)


@pytest.fixture
def poisoned(monkeypatch):
    """Replays in Python, on a backend that poisons memory before each of them."""
    monkeypatch.setattr(replay_program, "REPLAY", None)
    expect, backend = Position.expect, PoisonedBackend()

    def poison_first(self, *step):
        self.peek()
        if len(self._graph_set.done) == self._graph_set.plan.num_graphs:
            backend.poison(self._graph_set, self._next)
        return expect(self, *step)

    monkeypatch.setattr(Position, "expect", poison_first)
    return backend


def layer():
    def begin(own, x):
        return nn.functional.dropout(torch.tanh(linear(x, own.first.weight)), 0.3), x

    def end(own, y, x):
        return (x + torch.sin(linear(y, own.last.weight)) * y,)

    between = ("between", False, lambda own, y, x: (y * torch.cos(y), x))
    modules = {name: nn.Linear(4, 4, bias=False, dtype=torch.float64) for name in ("first", "last")}
    return Parts(("begin", True, begin), between, ("end", True, end), **modules)


def train_rank(order, graphs, vpp=1, steps=5, own=True, **options):
    """Return what a pipeline rank sends, and its gradients; what it receives is drawn.

    own: each lane has a pool.
    """
    chains, seen = [LayerChain([layer(), eager(), layer()]) for _ in range(vpp)], []
    manager = GraphManager(chains, order, warmup=1, **options) if graphs else None
    numbers = torch.Generator().manual_seed(5)
    params = [param for chain in chains for param in chain.parameters()]
    for _ in range(steps):
        if manager is not None:
            manager.begin_step()
        for param in params:
            param.grad = None
        splits = any(step.kind == BACKWARD_WEIGHT for step in order)
        in_flight, queues = {}, defaultdict(WgradQueue)
        for step in order:
            key, x = step[1:], torch.randn(3, 4, generator=numbers, dtype=torch.float64)
            if step.kind == BACKWARD_WEIGHT:
                WgradQueue.run(queues.pop(key).take())
                continue
            with defer_wgrad(queues[key] if splits else None):
                if step.kind == FORWARD:
                    x.requires_grad_()
                    (y,) = chains[step.chunk](x)
                    in_flight[key] = x, y
                    seen.append(y.detach())
                else:
                    start, y = in_flight.pop(key)
                    y.backward(x)
                    seen.append(start.grad)
        seen += [param.grad.clone() for param in params]
    if manager is not None:
        plan = manager.plan
        assert manager.num_graphs == plan.num_graphs < len(plan.replays)
        pools = len({slot.pool for slot in manager._graph_set.slots})
        assert (pools == plan.num_lanes + (not splits)) == own
    return seen


ORDERS = {
    "1f1b": (Schedule(4, 7).order(0), 1),
    "1f1b, vpp": (Schedule(2, 6, 2).order(0), 2),
    "zero bubble": (Schedule(3, 6, name="zero_bubble").order(1), 1),
    **{"1f1b, vpp, second rank": (Schedule(2, 6, 2).order(1), 2)},
    **{"zero bubble, vpp": (Schedule(2, 6, 2, name="zero_bubble").order(1), 2)},
}
IN_ALL = [
    pytest.param(*case, id=name, marks=() if i < 3 else pytest.mark.full)
    for i, (name, case) in enumerate(ORDERS.items())
]


@pytest.mark.parametrize(("order", "vpp"), IN_ALL)
def test_nothing_is_read_once_a_microbatch_has_left_its_lane(order, vpp, poisoned):
    assert_same_as_eager(lambda graphs: train_rank(order, graphs, vpp, backend=poisoned))


@pytest.mark.parametrize("verify_every", (0, *full([2])))
@pytest.mark.parametrize(("order", "vpp"), IN_ALL)
def test_the_bits_are_eager_ones(order, vpp, verify_every):
    backend = RecordingBackend()
    assert_same_as_eager(
        lambda graphs: train_rank(order, graphs, vpp, backend=backend, verify_every=verify_every)
    )


@pytest.mark.parametrize("shared", ("all", "split"))
def test_lanes_that_share_a_pool_change_results(shared, monkeypatch):
    """Also where backwards that are split share one: their weight gradients read it later."""
    order, _ = ORDERS["1f1b" if shared == "all" else "zero bubble"]

    def pool_of(plan, replay):
        return 0 if shared == "all" or replay.step.kind != FORWARD else 1 + plan.flights[replay.flight].lane

    monkeypatch.setattr(BufferPlan, "pool_of", pool_of)
    with pytest.raises(AssertionError, match=r"number \d+ of \d+, shape"):
        assert_same_as_eager(lambda graphs: train_rank(order, graphs, own=False, backend=RecordingBackend()))


def test_a_lane_without_all_of_its_graphs_is_captured_with_the_next_microbatch():
    """One of another shape runs eagerly."""
    order = Schedule(3, 6).order(0)

    def run(graphs):
        chain, seen = LayerChain([layer(), layer()]), []
        manager = GraphManager([chain], order, backend=RecordingBackend(), warmup=1) if graphs else None
        numbers = torch.Generator().manual_seed(5)
        for odd in (None, 1, None, 4, None):
            if manager is not None:
                manager.begin_step()
            in_flight = {}
            for step in order:
                if step.kind == FORWARD:
                    rows = 5 if step.microbatch == odd else 3
                    x = torch.randn(rows, 4, generator=numbers, dtype=torch.float64)
                    in_flight[step.microbatch] = chain(x)[0].square().sum()
                else:
                    loss = in_flight.pop(step.microbatch)
                    loss.backward()
                    seen.append(loss.detach())
            if manager is not None and odd == 1:
                assert manager.num_graphs == manager.plan.num_graphs == 2 * 3 * 3
        return [*seen, *(param.grad for param in chain.parameters())]

    assert_same_as_eager(run)


def test_lanes_follow_what_is_in_flight():
    flights, numbers = assign_lanes(Schedule(3, 7).order(0))
    assert [flight.lane for flight in flights] == [flight.bundle for flight in flights] == [0, 1, 2] * 2 + [0]
    assert len(numbers) == 14 and numbers[:6] == [0, 1, 2, 0, 3, 1]
    for rank in range(4):
        for schedule in (Schedule(4, 12, 3), Schedule(4, 12, name="zero_bubble"), Schedule(4, 3)):
            flights, _ = assign_lanes(schedule.order(rank))
            assert 1 + max(flight.lane for flight in flights) == schedule.peak_in_flight(rank)


def test_a_loss_is_on_the_lane_of_its_chunk():
    order = list(with_loss(Schedule(2, 4, name="zero_bubble").order(1), 0))
    flights, numbers = assign_lanes(order)
    assert len(flights) == 4 and len(numbers) == 4 * 5
    own = [order[i] for i, number in enumerate(numbers) if number == 0]
    assert own[:2] == [Step(FORWARD, 0, 0), Step(FORWARD, 0, 1)] and own[-1].kind == BACKWARD_WEIGHT


def test_parts_of_a_chunk_are_on_one_lane_and_have_graphs_for_each_order_of_weight_gradients():
    names = ("attention", "dispatch", "experts", "combine")
    layer = [SegmentFacts(name, name in ("dispatch", "combine"), name == "attention") for name in names]
    schedule, segments = Schedule(2, 8, overlap=True), [[cost for _, cost in partition_segments(layer * 2)]]
    order = graph_order(schedule.together(0), segments)
    plan = plan_buffers(order, [[SPAN]] * len(compute_ops(segments)))
    check_plan(plan)
    assert plan.num_lanes == schedule.peak_in_flight(0) == 4 and len(plan.flights) == 8
    forms = {}
    for number, flight in enumerate(plan.flights):
        steps = [(r.step.kind, r.step.chunk) for r in plan.replays if r.flight == number]
        assert forms.setdefault(flight.bundle, steps) == steps
    assert len({tuple(steps) for steps in forms.values()}) == 2 < len(forms) < 2 * plan.num_lanes


def wrong(plan, i, **changes):
    replays = list(plan.replays)
    replays[i] = replays[i]._replace(**changes)
    return replace(plan, replays=tuple(replays))


def test_plans_that_are_wrong():
    right = plan_buffers(Schedule(2, 6).order(0), [[SPAN, SPAN]])
    check_plan(right)
    one_lane = replace(right, flights=tuple(flight._replace(lane=0) for flight in right.flights))
    with pytest.raises(GraphError, match="lane 0 still holds the backward of microbatch 0 chunk 0, span"):
        check_plan(one_lane)
    free = next(lease for lease in right.leases if lease.last > lease.first)
    early = [free._replace(last=free.last - 1) if each == free else each for each in right.leases]
    with pytest.raises(GraphError, match=r"plan is wrong: buffer \d is not held from the forward of"):
        check_plan(replace(right, leases=tuple(early)))
    last = len(right.replays) - 1
    for broken, message in (
        (wrong(right, last, graph=right.replays[last - 1].graph), "in another order"),
        (wrong(right, last, graph=0), "graph 0 serves both the forward of microbatch 0 chunk 0, span"),
        (wrong(right, last, buffers=right.replays[0].buffers), "serves both the backward of microbatch"),
    ):
        assert any(message in error for error in plan_errors(broken))
