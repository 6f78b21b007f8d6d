"""Orders of two microbatches at once: right, never longer than one after the other, close to the best."""

from __future__ import annotations

from functools import cache
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastmp.schedule.schedule import BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, Schedule
from fastmp.schedule.stream_schedule import (
    Launch,
    SegmentCost,
    SegmentFacts,
    StreamOp,
    backward_ops,
    compute_ops,
    forward_ops,
    graph_order,
    interleave,
    partition_segments,
    predecessor,
    sequential,
    simulate_streams,
)

TIMES = st.sampled_from([0.25, 0.5, 1.0, 2.0, 3.0])


def layers(number: int, exchange: float = 1.0, waits: bool = True) -> list[SegmentCost]:
    """Layers with experts, whose attention and experts take 1 forward."""
    return [
        SegmentCost("attention", False, False, 1.0, 1.5, 0.5),
        SegmentCost("router", False, False, 0.2, 0.2, 0.0),
        SegmentCost("dispatch", True, waits, exchange, exchange, 0.0),
        SegmentCost("experts"),
        SegmentCost("combine", True, False, exchange, exchange, 0.0),
    ] * number


@st.composite
def sections(draw: st.DrawFn, most: int = 8) -> list[SegmentCost]:
    drawn = st.builds(SegmentCost, st.just("any"), st.booleans(), st.booleans(), TIMES, TIMES, TIMES)
    return draw(st.lists(drawn, max_size=most))


@st.composite
def two_chains(draw: st.DrawFn, most: int = 8) -> tuple[tuple[StreamOp, ...], tuple[StreamOp, ...]]:
    """A forward beside a forward or a backward, perhaps of another chunk."""
    own, other = draw(sections(most)), draw(sections(most))
    defer, backward = draw(st.booleans()), draw(st.booleans())
    return forward_ops(own), backward_ops(other, defer=defer) if backward else forward_ops(other)


def lower_bound(sequences: tuple[tuple[StreamOp, ...], ...]) -> float:
    """What no order can undercut: each stream's work, and the length of each sequence."""
    ops = [op for sequence in sequences for op in sequence]
    streams = [sum(p.time for p in ops if p.exchange == exchange) for exchange in (False, True)]
    return max(*streams, *(sum(p.time for p in sequence if not p.deferred) for sequence in sequences))


def best(sequences: tuple[tuple[StreamOp, ...], ...]) -> float:
    """The shortest of all orders in which hosts can start two sequences without deferred ops."""
    first, second = sequences

    @cache
    def rest(i: int, j: int, ready: tuple[float, float], free: tuple[float, float], host: float) -> float:
        if i == len(first) and j == len(second):
            return max(*ready, *free)
        found = []
        for sequence, at, number in ((first, i, 0), (second, j, 1)):
            if at < len(sequence):
                op, own = sequence[at], ready[number]
                issued = max(host, own) if op.waits and at else host
                end = max(issued, own, free[op.exchange]) + op.time
                then = (end, free[True]) if not op.exchange else (free[False], end)
                now = (end, ready[1]) if number == 0 else (ready[0], end)
                found.append(rest(i + (number == 0), j + (number == 1), now, then, issued))
        return min(found)

    return rest(0, 0, (0.0, 0.0), (0.0, 0.0), 0.0)


def test_a_layer_of_each():
    forward, backward = forward_ops(layers(1)), backward_ops(layers(1))
    assert [op[:3] for op in forward] == [(0, 1, False), (2, 2, True), (3, 3, False), (4, 4, True)]
    assert [op[:3] for op in backward] == [(4, 4, True), (3, 3, False), (2, 2, True), (0, 1, False)]
    assert [op.time for op in forward] == [1.2, 1.0, 1.0, 1.0]
    assert [op.time for op in backward] == [1.0, 2.0, 1.0, 2.2]
    order = interleave(forward, backward)
    # Attention beside the gradients of combine, dispatch beside those of experts, experts beside those of
    # dispatch, combine beside those of attention.
    assert order == ((1, 0), (0, 0), (1, 1), (0, 1), (1, 2), (0, 2), (0, 3), (1, 3))
    timeline = simulate_streams([order], [[forward, backward]])
    assert timeline.makespan == pytest.approx(6.4) and timeline.exposed(0) == pytest.approx(0.0)
    assert simulate_streams([sequential(forward, backward)], [[forward, backward]]).makespan == pytest.approx(
        4.2 + 6.2
    )


def test_gradients_of_weights_fill_the_exchanges_of_their_own_microbatch():
    whole, split = (backward_ops(layers(4), defer=defer) for defer in (False, True))
    assert [op.deferred for op in split] == [False, False, True, False, False, True] * 4
    assert [predecessor(split, i) for i in range(7)] == [None, 0, 1, 1, 3, 4, 4]
    took = [simulate_streams([interleave(sequence)], [[sequence]]).makespan for sequence in (whole, split)]
    assert took == pytest.approx([24.8, 19.3])


@pytest.mark.full
@settings(max_examples=100)
@given(sequences=two_chains())
def test_every_order_is_right_and_hides_what_it_can(sequences):
    order = interleave(*sequences)
    timeline = simulate_streams([order], [sequences])
    assert sorted(order) == sorted(sequential(*sequences))
    times = dict(zip(order, timeline.times[0], strict=True))
    for launch in order:
        before = predecessor(sequences[launch.sequence], launch.op)
        assert before is None or times[Launch(launch.sequence, before)][1] <= times[launch][0]
    for exchange in (False, True):
        own = [
            times[launch] for launch in order if sequences[launch.sequence][launch.op].exchange == exchange
        ]
        assert all(end <= start for (_, end), (start, _) in pairwise(own))
    after = simulate_streams([sequential(*sequences)], [sequences]).makespan
    assert lower_bound(sequences) - 1e-9 <= timeline.makespan <= after + 1e-9


@pytest.mark.full
@settings(max_examples=100)
@given(own=sections(5), other=sections(5))
def test_it_is_close_to_the_best_order(own, other):
    sequences = forward_ops(own), backward_ops(other)
    assert simulate_streams([interleave(*sequences)], [sequences]).makespan <= 1.5 * best(sequences) + 1e-9


@pytest.mark.parametrize("exchange", [0.25, 0.5, 1.0, 2.0])
@pytest.mark.parametrize("waits", [False, True])
def test_layers_come_within_five_percent_of_the_bound(exchange, waits):
    for number in (1, 2, 8):
        sequences = forward_ops(layers(number, exchange, waits)), backward_ops(layers(number, exchange))
        assert simulate_streams([interleave(*sequences)], [sequences]).makespan <= 1.05 * lower_bound(
            sequences
        )


@settings(max_examples=50)
@given(
    drawn=st.lists(st.lists(st.tuples(st.booleans(), st.booleans()), max_size=7), min_size=1, max_size=3),
    microbatches=st.integers(1, 5),
    on_a_v=st.booleans(),
)
def test_graphs_are_replayed_in_the_order_of_parts(drawn, microbatches, on_a_v):
    """Each op that computes has a forward and a backward in two steps; none comes before what it needs."""
    chunks = [
        [section for _, section in partition_segments([SegmentFacts("any", *each) for each in own])]
        for own in drawn
    ]
    schedule = Schedule(1, microbatches, len(chunks), overlap=True)
    if on_a_v and len(chunks) == 2:  # some backwards are split, others overlap
        schedule = Schedule(3, microbatches, 2, name="dualpipe_v", overlap=True)
    order = graph_order(schedule.together(0), chunks)
    ops, seen = compute_ops(chunks), set()
    for step in order:
        before = {BACKWARD_INPUT: FORWARD, BACKWARD_WEIGHT: BACKWARD_INPUT}.get(step.kind)
        assert step not in seen and (before is None or step._replace(kind=before) in seen)
        chunk, section = ops[step.chunk]
        behind = [n for n, (c, s) in enumerate(ops) if c == chunk and s > section]
        ahead = [n for n, (c, s) in enumerate(ops) if c == chunk and s < section]
        for number in {FORWARD: ahead, BACKWARD_INPUT: behind, BACKWARD_WEIGHT: []}[step.kind]:
            assert step._replace(chunk=number) in seen
        seen.add(step)
    assert len(order) == 3 * len(ops) * microbatches


def test_the_graphs_of_a_layer_with_experts():
    names = [("attention", False, True), ("router", False, True), ("dispatch", True, False)]
    names += [("experts", False, False), ("combine", True, False)]
    cut = partition_segments([SegmentFacts(*each) for each in names * 2])
    assert [len(own) for own, _ in cut] == [2, 1, 1, 1] * 2
    assert [section.waits for _, section in cut] == [False, True, False, False] * 2
    sections = [section for _, section in cut]
    order = graph_order(Schedule(1, 2, overlap=True).together(0), [sections])
    kinds = {FORWARD: "F", BACKWARD_INPUT: "B", BACKWARD_WEIGHT: "W"}
    text = " ".join(f"{kinds[step.kind]}{step.microbatch}.{step.chunk}" for step in order)
    assert text == (
        "F0.0 F0.1 F0.2 F0.3 "
        "F1.0 B0.3 F1.1 B0.2 F1.2 B0.1 W0.3 F1.3 B0.0 W0.2 W0.1 W0.0 "
        "B1.3 W1.3 B1.2 W1.2 B1.1 W1.1 B1.0 W1.0"
    )


@pytest.mark.full
@settings(max_examples=100)
@given(sequences=two_chains(), factor=st.sampled_from([0.5, 1.0, 3.0]))
def test_ranks_with_one_order_never_wait_for_ever(sequences, factor):
    """However long each takes; the order comes from the times of the first rank."""
    slower = tuple(tuple(p._replace(time=p.time * factor) for p in sequence) for sequence in sequences)
    order = interleave(*sequences)
    timeline = simulate_streams([order, order], [sequences, slower])
    assert (
        timeline.makespan
        >= max(simulate_streams([order], [own]).makespan for own in (sequences, slower)) - 1e-9
    )


@pytest.mark.parametrize(
    ("orders", "message"),
    [
        ([[(0, 0), (0, 1), (1, 0)]], "rank 0, op 1 of sequence 1 is missing"),
        ([[(0, 0), (0, 0), (1, 0), (1, 1)]], "rank 0, op 0 of sequence 0 is there twice"),
        ([[(0, 1), (0, 0), (1, 0), (1, 1)]], "rank 0, op 1 of sequence 0 comes before op 0 of sequence 0"),
        ([[(2, 0)]], "rank 0, op 0 of sequence 2 does not exist"),
        ([], "0 orders for the sequences of 1 ranks"),
        (
            [[(0, 0), (1, 0), (0, 1), (1, 1)], [(1, 0), (0, 0), (1, 1), (0, 1)]],
            "ranks wait for each other in a cycle: rank 0 op 1 of sequence 0, rank 1 op 1 of sequence 1",
        ),
    ],
)
def test_wrong_orders_raise(orders, message):
    sequence = (StreamOp(0, 0, False, 1.0), StreamOp(1, 1, True, 1.0))
    with pytest.raises(ValueError, match=message):
        simulate_streams(orders, [[sequence, sequence]] * max(len(orders), 1))


def test_ranks_have_the_same_parts():
    sequence = (StreamOp(0, 0, False, 1.0),)
    with pytest.raises(ValueError, match="ranks 0 and 1 have sequences of other ops"):
        simulate_streams([[Launch(0, 0)], [Launch(0, 0)]], [[sequence], [(StreamOp(0, 0, True, 1.0),)]])
