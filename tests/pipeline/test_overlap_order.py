"""Orders of two microbatches at once: right, never longer than one after the other, close to the best."""

from __future__ import annotations

from functools import cache
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastmp.pipeline.schedule import BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, Schedule
from fastmp.pipeline.stream_schedule import (
    Part,
    Section,
    Turn,
    backward_parts,
    computing,
    cut_segments,
    forward_parts,
    graph_order,
    in_sequence,
    interleave,
    needed,
    play,
)

TIMES = st.sampled_from([0.25, 0.5, 1.0, 2.0, 3.0])


def layers(number: int, exchange: float = 1.0, waits: bool = True) -> list[Section]:
    """Layers with experts, whose attention and experts take 1 forward."""
    return [
        Section("attention", False, False, 1.0, 1.5, 0.5),
        Section("router", False, False, 0.2, 0.2, 0.0),
        Section("dispatch", True, waits, exchange, exchange, 0.0),
        Section("experts"),
        Section("combine", True, False, exchange, exchange, 0.0),
    ] * number


@st.composite
def sections(draw: st.DrawFn, most: int = 8) -> list[Section]:
    drawn = st.builds(Section, st.just("any"), st.booleans(), st.booleans(), TIMES, TIMES, TIMES)
    return draw(st.lists(drawn, max_size=most))


@st.composite
def two_chains(draw: st.DrawFn, most: int = 8) -> tuple[tuple[Part, ...], tuple[Part, ...]]:
    """A forward beside a forward or a backward, perhaps of another chunk."""
    own, other = draw(sections(most)), draw(sections(most))
    defer, backward = draw(st.booleans()), draw(st.booleans())
    return forward_parts(own), backward_parts(other, defer=defer) if backward else forward_parts(other)


def lower_bound(chains: tuple[tuple[Part, ...], ...]) -> float:
    """What no order can undercut: each stream's work, and the length of each chain."""
    parts = [part for chain in chains for part in chain]
    streams = [sum(p.time for p in parts if p.exchange == exchange) for exchange in (False, True)]
    return max(*streams, *(sum(p.time for p in chain if not p.deferred) for chain in chains))


def best(chains: tuple[tuple[Part, ...], ...]) -> float:
    """The shortest of all orders in which hosts can start two chains without deferred parts."""
    first, second = chains

    @cache
    def rest(i: int, j: int, ready: tuple[float, float], free: tuple[float, float], host: float) -> float:
        if i == len(first) and j == len(second):
            return max(*ready, *free)
        found = []
        for chain, at, number in ((first, i, 0), (second, j, 1)):
            if at < len(chain):
                part, own = chain[at], ready[number]
                issued = max(host, own) if part.waits and at else host
                end = max(issued, own, free[part.exchange]) + part.time
                then = (end, free[True]) if not part.exchange else (free[False], end)
                now = (end, ready[1]) if number == 0 else (ready[0], end)
                found.append(rest(i + (number == 0), j + (number == 1), now, then, issued))
        return min(found)

    return rest(0, 0, (0.0, 0.0), (0.0, 0.0), 0.0)


def test_a_layer_of_each():
    forward, backward = forward_parts(layers(1)), backward_parts(layers(1))
    assert [part[:3] for part in forward] == [(0, 1, False), (2, 2, True), (3, 3, False), (4, 4, True)]
    assert [part[:3] for part in backward] == [(4, 4, True), (3, 3, False), (2, 2, True), (0, 1, False)]
    assert [part.time for part in forward] == [1.2, 1.0, 1.0, 1.0]
    assert [part.time for part in backward] == [1.0, 2.0, 1.0, 2.2]
    order = interleave(forward, backward)
    # Attention beside the gradients of combine, dispatch beside those of experts, experts beside those of
    # dispatch, combine beside those of attention.
    assert order == ((1, 0), (0, 0), (1, 1), (0, 1), (1, 2), (0, 2), (0, 3), (1, 3))
    played = play([order], [[forward, backward]])
    assert played.makespan == pytest.approx(6.4) and played.exposed(0) == pytest.approx(0.0)
    assert play([in_sequence(forward, backward)], [[forward, backward]]).makespan == pytest.approx(4.2 + 6.2)


def test_gradients_of_weights_fill_the_exchanges_of_their_own_microbatch():
    whole, split = (backward_parts(layers(4), defer=defer) for defer in (False, True))
    assert [part.deferred for part in split] == [False, False, True, False, False, True] * 4
    assert [needed(split, i) for i in range(7)] == [None, 0, 1, 1, 3, 4, 4]
    took = [play([interleave(chain)], [[chain]]).makespan for chain in (whole, split)]
    assert took == pytest.approx([24.8, 19.3])


@pytest.mark.full
@settings(max_examples=100)
@given(chains=two_chains())
def test_every_order_is_right_and_hides_what_it_can(chains):
    order = interleave(*chains)
    played = play([order], [chains])
    assert sorted(order) == sorted(in_sequence(*chains))
    times = dict(zip(order, played.turns[0], strict=True))
    for turn in order:
        before = needed(chains[turn.chain], turn.part)
        assert before is None or times[Turn(turn.chain, before)][1] <= times[turn][0]
    for exchange in (False, True):
        own = [times[turn] for turn in order if chains[turn.chain][turn.part].exchange == exchange]
        assert all(end <= start for (_, end), (start, _) in pairwise(own))
    after = play([in_sequence(*chains)], [chains]).makespan
    assert lower_bound(chains) - 1e-9 <= played.makespan <= after + 1e-9


@pytest.mark.full
@settings(max_examples=100)
@given(own=sections(5), other=sections(5))
def test_it_is_close_to_the_best_order(own, other):
    chains = forward_parts(own), backward_parts(other)
    assert play([interleave(*chains)], [chains]).makespan <= 1.5 * best(chains) + 1e-9


@pytest.mark.parametrize("exchange", [0.25, 0.5, 1.0, 2.0])
@pytest.mark.parametrize("waits", [False, True])
def test_layers_come_within_five_percent_of_the_bound(exchange, waits):
    for number in (1, 2, 8):
        chains = forward_parts(layers(number, exchange, waits)), backward_parts(layers(number, exchange))
        assert play([interleave(*chains)], [chains]).makespan <= 1.05 * lower_bound(chains)


@settings(max_examples=50)
@given(
    drawn=st.lists(st.lists(st.tuples(st.booleans(), st.booleans()), max_size=7), min_size=1, max_size=3),
    microbatches=st.integers(1, 5),
)
def test_graphs_are_replayed_in_the_order_of_parts(drawn, microbatches):
    """Each part that computes has a forward and a backward in two steps; none comes before what it needs."""
    chunks = [[section for _, section in cut_segments([("any", *each) for each in own])] for own in drawn]
    schedule = Schedule(1, microbatches, len(chunks), overlap=True)
    order = graph_order(schedule.together(0), chunks)
    parts, seen = computing(chunks), set()
    for step in order:
        before = {BACKWARD_INPUT: FORWARD, BACKWARD_WEIGHT: BACKWARD_INPUT}.get(step.kind)
        assert step not in seen and (before is None or step._replace(kind=before) in seen)
        chunk, section = parts[step.chunk]
        behind = [n for n, (c, s) in enumerate(parts) if c == chunk and s > section]
        ahead = [n for n, (c, s) in enumerate(parts) if c == chunk and s < section]
        for number in {FORWARD: ahead, BACKWARD_INPUT: behind, BACKWARD_WEIGHT: []}[step.kind]:
            assert step._replace(chunk=number) in seen
        seen.add(step)
    assert len(order) == 3 * len(parts) * microbatches


def test_the_graphs_of_a_layer_with_experts():
    names = [("attention", False, True), ("router", False, True), ("dispatch", True, False)]
    names += [("experts", False, False), ("combine", True, False)]
    cut = cut_segments(names * 2)
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
@given(chains=two_chains(), factor=st.sampled_from([0.5, 1.0, 3.0]))
def test_ranks_with_one_order_never_wait_for_ever(chains, factor):
    """However long each takes; the order comes from the times of the first rank."""
    slower = tuple(tuple(p._replace(time=p.time * factor) for p in chain) for chain in chains)
    order = interleave(*chains)
    played = play([order, order], [chains, slower])
    assert played.makespan >= max(play([order], [own]).makespan for own in (chains, slower)) - 1e-9


@pytest.mark.parametrize(
    ("orders", "message"),
    [
        ([[(0, 0), (0, 1), (1, 0)]], "rank 0, part 1 of chain 1 is missing"),
        ([[(0, 0), (0, 0), (1, 0), (1, 1)]], "rank 0, part 0 of chain 0 is there twice"),
        ([[(0, 1), (0, 0), (1, 0), (1, 1)]], "rank 0, part 1 of chain 0 comes before part 0 of chain 0"),
        ([[(2, 0)]], "rank 0, part 0 of chain 2 does not exist"),
        ([], "0 orders for the chains of 1 ranks"),
        (
            [[(0, 0), (1, 0), (0, 1), (1, 1)], [(1, 0), (0, 0), (1, 1), (0, 1)]],
            "ranks wait for each other for ever: rank 0 part 1 of chain 0, rank 1 part 1 of chain 1",
        ),
    ],
)
def test_wrong_orders_are_refused(orders, message):
    chain = (Part(0, 0, False, 1.0), Part(1, 1, True, 1.0))
    with pytest.raises(ValueError, match=message):
        play(orders, [[chain, chain]] * max(len(orders), 1))


def test_ranks_have_the_same_parts():
    chain = (Part(0, 0, False, 1.0),)
    with pytest.raises(ValueError, match="ranks 0 and 1 have chains of other parts"):
        play([[Turn(0, 0)], [Turn(0, 0)]], [[chain], [(Part(0, 0, True, 1.0),)]])
