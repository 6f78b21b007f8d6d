"""The list of a step against the planners of its parts, of messages, graphs and buffers; and its check."""

from __future__ import annotations

import random
from collections import Counter
from itertools import groupby, pairwise

import pytest
import toy_schedule

from fastmp.config.specs import SCHEDULES
from fastmp.schedule.buffer_plan import SpanSpec, TensorSpec, plan_buffers
from fastmp.schedule.checks import check_program
from fastmp.schedule.messages import forward_orders, rank_programs
from fastmp.schedule.planner import make_program
from fastmp.schedule.program import buffer_plan, in_words, with_buffers
from fastmp.schedule.schedule import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, Schedule, with_loss
from fastmp.schedule.stream_schedule import SegmentFacts, graph_order, partition_segments

EXPERTS = ("attention", "router", "preprocess", "dispatch", "experts", "combine")
SCOPES = {"none": (), "attention": ("attn",), "all": None, "full": ("full",)}
KINDS = {"forward": FORWARD, "backward": BACKWARD, "dgrad": BACKWARD_INPUT, "wgrad": BACKWARD_WEIGHT}
MAKES = {
    FORWARD: "f",
    BACKWARD: "gw",
    BACKWARD_INPUT: "g",
    BACKWARD_WEIGHT: "w",
}  # gradients of inputs, weights
SIZES = [(1, 1, 1), (1, 3, 2), (2, 4, 1), (2, 4, 2), (3, 6, 2), (4, 5, 1), (3, 3, 3)]


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    monkeypatch.setattr(SCHEDULES, "_specs", dict(SCHEDULES._specs))
    toy_schedule.register()


def cases(scopes):
    """Yield (arguments of a small schedule, scope) for every kind, with and without overlap."""
    kinds = [*((each.name, each.vpp, each.overlaps) for each in SCHEDULES.values()), ("gpipe", 1, False)]
    for name, chunks, overlaps in kinds:
        for pp, number, vpp in SIZES:
            for overlap in (False, True)[: 1 + overlaps] if chunks in (None, vpp) else ():
                for words in scopes:  # exchanges overlap outside of graphs: the whole chunk is not one
                    if not (overlap and words == "full"):
                        sizes = (pp, number, vpp, None, name, overlap)
                        yield pytest.param(
                            sizes, SCOPES[words], id=f"{name}-{pp}-{number}-{vpp}-{overlap}-{words}"
                        )


def layers(number, first=0, capturable=EXPERTS[:3]):
    return [
        SegmentFacts(f"{layer}.{name}", name in ("dispatch", "combine"), name in capturable, layer % 2)
        for layer in range(first, first + number)
        for name in EXPERTS
    ]


def facts_of(schedule, scope):
    """Return the facts of each rank. Stages have one or two layers, or none; these are of two groups."""
    able = EXPERTS if {"full", "full_step"} & {*(scope or ())} else EXPERTS[:3]
    least = 1 if scope else 0
    stages = [[layers(least + stage % 2, 10 * stage, able)] for stage in range(len(schedule.stages))]
    return [schedule.stages.of_rank(stages, rank) for rank in range(schedule.pp)]


def programs_of(schedule, scope, **options):
    return [
        make_program(schedule, r, own, scope, **options) for r, own in enumerate(facts_of(schedule, scope))
    ]


def specs_of(program, seed):
    """Draw tensors of the captured spans; some of these have no gradient."""
    drawn, kinds, found = random.Random(seed), [TensorSpec((n,), "float32") for n in range(1, 4)], []
    for span in program.spans:
        inputs, grads = (tuple(drawn.choices(kinds, k=drawn.randint(1, 3))) for _ in range(2))
        found += [
            SpanSpec(span.name, inputs, None if span.segments and drawn.random() < 0.2 else grads)
        ] * span.captured
    return found


@pytest.mark.parametrize(("sizes", "scope"), [*cases(SCOPES)])
def test_steps_and_messages_are_those_of_the_pipeline(sizes, scope):
    schedule = Schedule(*sizes)
    programs = programs_of(schedule, scope)
    check_program(programs)
    planned = rank_programs(schedule.orders(), pairs=schedule.all_pairs(), placement=schedule.placement)
    for program, expected in zip(programs, planned, strict=True):
        every = program.instructions
        assert [now.op for now in every if now.op == "fetch"] == ["fetch"] * schedule.num_microbatches
        assert [every[0].op, *(now.op for now in every[-4:])] == ["zero", "reduce", "sum", "update", "gather"]
        rest, steps = iter([now for now in every[1:-4] if now.op != "fetch"]), 0
        for group in [*schedule.together(program.rank), ()]:
            for message in expected.posts[steps]:
                now, sent = next(rest), message.source == program.rank
                stage = schedule.stages.stage(program.rank, program.spans[now.span].chunk)
                assert now[1:2] + now[3:4] + now[5:6] == (
                    message.microbatch,
                    message.kind,
                    expected.tags[message],
                )
                assert (now.op, now.peer) == (("send", message.target) if sent else ("recv", message.source))
                assert stage == message.stage + (0 if sent else 1 if message.kind == FORWARD else -1)
            wanted = Counter(
                (what, step.microbatch, number)
                for step in group
                for number, span in enumerate(program.spans)
                for what in makes(step.kind, span)
                if span.chunk == step.chunk
            )
            made = Counter()
            while made.total() < wanted.total():
                now = next(rest)
                made.update((what, now.microbatch, now.span) for what in MAKES[KINDS[now.op]])
            assert made == wanted
            steps += len(group)
        assert next(rest, None) is None


def makes(kind, span):
    """Return what a step makes of a span; a loss and an exchange do not split their backward."""
    if span.name == "loss" or span.stream == "exchange":
        return {BACKWARD_INPUT: "gw", BACKWARD_WEIGHT: ""}.get(kind, MAKES[kind])
    return MAKES[kind]


def names_of(facts, places, scope):
    """Return the names of the captured spans among segments of a chunk."""
    found = []
    for (captured, _), run in groupby(
        (facts[i] for i in places),
        lambda each: (each.capturable and (scope is None or each.name.endswith("attention")), each.group),
    ):
        first, *_, last = [each.name for each in run] * 2
        found += [first if first == last else f"{first} to {last}"] * captured
    return found


def reference(schedule, rank, facts, scope):
    """Return the order of a rank's graphs and the names of the spans of each unit of it, from its parts."""
    chains, order = [own for (own,) in facts], schedule.order(rank)
    if scope == ("full",):
        first, last = (schedule.stages.rank(stage) == rank for stage in (0, schedule.stages.last))
        if len(schedule.stages) == 1:
            return order, [["chunk 0 and loss"]]
        names = [[f"chunk {chunk}"] * bool(own or (first and not chunk)) for chunk, own in enumerate(chains)]
        order, names = ([*with_loss(order, schedule.vpp - 1)], [*names, ["loss"]]) if last else (order, names)
        return [step for step in order if names[step.chunk]], names
    if not schedule.overlap:
        captured = [names_of(own, range(len(own)), scope) for own in chains]
        return [step for step in order if captured[step.chunk]], captured
    parts = [partition_segments(own) for own in chains]
    computes = [
        names_of(own, places, scope)
        for own, of_chunk in zip(chains, parts)
        for places, cost in of_chunk
        if not cost.exchange
    ]
    return graph_order(schedule.together(rank), [[cost for _, cost in own] for own in parts]), computes


@pytest.mark.parametrize(("sizes", "scope"), [*cases(("attention", "all", "full"))])
def test_graphs_and_buffers_are_those_of_their_planner(sizes, scope):
    schedule = Schedule(*sizes)
    plain, facts = programs_of(schedule, scope), facts_of(schedule, scope)
    specs = [specs_of(program, seed=len(sizes[4]) + rank) for rank, program in enumerate(plain)]
    programs = [with_buffers(program, own) for program, own in zip(plain, specs, strict=True)]
    check_program(programs)
    for rank, (program, own) in enumerate(zip(programs, specs, strict=True)):
        order, names = reference(schedule, rank, facts[rank], scope)
        assert [name for unit in names for name in unit] == [spec.name for spec in own]
        left = iter(own)
        plan, got = plan_buffers(order, [[next(left) for _ in unit] for unit in names]), buffer_plan(program)
        if not own:
            assert not (got.replays or got.flights or program.leases)
            continue
        words = [
            [
                (r.step.kind, r.step.microbatch, each.chunks[r.step.chunk][r.span].name, *r[2:])
                for r in each.replays
            ]
            for each in (plan, got)
        ]
        assert words[0] == words[1]
        assert (plan.buffers, plan.leases, plan.flights) == (got.buffers, got.leases, got.flights)
        assert (program.num_graphs, program.num_lanes) == (plan.num_graphs, plan.num_lanes)
        frozen = {number for number, span in enumerate(program.spans) if not span.trained}
        assert len(frozen) == sum(spec.gradients is None for spec in own)
        assert not any(
            now.span in frozen for now in program.instructions if now.op in ("backward", "dgrad", "wgrad")
        )


def test_random_sizes_and_segments():
    """Chains of any segments, of any groups, in any number of chunks; what nobody captures is not cut."""
    drawn, seen = random.Random(5), Counter()
    for _ in range(60):
        spec = drawn.choice([*SCHEDULES.values()])
        pp, vpp = drawn.randint(1, 3), spec.vpp or drawn.randint(1, 3)
        schedule = Schedule(
            pp, pp * drawn.randint(1, 3), vpp, None, spec.name, spec.overlaps and drawn.random() < 0.5
        )
        facts = [
            [
                [
                    SegmentFacts(
                        f"{i}.{drawn.choice('ab')}", drawn.random() < 0.3, drawn.random() < 0.6, i // 3
                    )
                    for i in range(start, start + drawn.randint(0, 5))
                ]
                for start in range(0, 10 * drawn.randint(1, 3), 10)
            ]
            for _ in range(pp * vpp)
        ]
        ranks = [schedule.stages.of_rank(facts, rank) for rank in range(pp)]
        programs = [make_program(schedule, rank, own, None) for rank, own in enumerate(ranks)]
        programs = [with_buffers(each, specs_of(each, seed=pp)) for each in programs]
        check_program(programs)
        assert programs == [
            with_buffers(each, specs_of(each, seed=pp))
            for each in (make_program(schedule, rank, own, None) for rank, own in enumerate(ranks))
        ]
        for program, own in zip(programs, ranks, strict=True):
            for chunk, chains in enumerate(own):
                flat = [each for chain in chains for each in chain]
                spans = [span for span in program.spans if span.chunk == chunk]
                ranges = [span.segments for span in spans if span.segments is not None]
                assert all(before.stop <= after.start for before, after in pairwise(ranges))
                held = {i for span in spans if span.captured for i in span.segments}
                apart = {i for i, each in enumerate(flat) if each.exchanges and schedule.overlap}
                cut = range(len(chains[0])) if schedule.overlap else range(len(flat))
                assert held == {i for i in cut if flat[i].capturable} - apart
                assert {i for span in spans if span.stream == "exchange" for i in span.segments} == apart & {
                    *cut
                }
                seen[bool(ranges)] += 1
    assert min(seen[False], seen[True]) > 20


def test_chains_beside_the_layers_have_spans_of_their_own():
    chains = [layers(1), layers(1, 1), layers(1, 2, capturable=())]
    own = make_program(Schedule(1, 2), 0, [chains], None)
    assert [span.name for span in own.spans] == [
        *("before the layers", "0.attention to 0.preprocess", "0.dispatch to 0.combine"),
        *("between the layers", "1.attention to 1.preprocess", "1.dispatch to 1.combine"),
        "behind the layers and loss",
    ]
    assert [span.segments for span in own.spans[4:6]] == [range(6, 9), range(9, 12)]
    overlapped = make_program(Schedule(1, 2, overlap=True), 0, [chains], None)
    assert max(span.segments.stop for span in overlapped.spans if span.segments) == 6


def test_code_around_overlapped_layers_runs_before_and_after_both_microbatches():
    program = make_program(Schedule(1, 2, overlap=True), 0, [[layers(1)]])
    words = [in_words(program, now) for now in program.instructions]
    behind = "behind the layers and loss"
    pair = words[words.index("fetch m1 batch") + 1 : words.index(f"forward m1 {behind}") + 1]
    assert pair[:2] == [f"backward m0 {behind}", "forward m1 before the layers"]
    assert pair[-2:] == ["backward m0 before the layers", f"forward m1 {behind}"]
    streams = {span.name: span.stream for span in program.spans}
    between = [streams[text.split(" ", 2)[2]] for text in pair[2:-2]]
    assert between.count("exchange") == 4 and between[:2] == ["exchange", "compute"]


def test_an_evaluation_has_forwards_and_messages_alone():
    schedule = Schedule(2, 3, 2, name="dualpipe_v", overlap=True)
    programs = programs_of(schedule, None, forward_only=True)
    check_program(programs)
    assert {now.op for program in programs for now in program.instructions} == {
        "fetch",
        "forward",
        "send",
        "recv",
    }
    orders = forward_orders(schedule.stages, 3)
    for program, expected in zip(
        programs, rank_programs(orders, forward_only=True, placement="v"), strict=True
    ):
        ran = [
            now
            for now in program.instructions
            if now.op == "forward" and program.spans[now.span].name != "loss"
        ]
        assert [(now.microbatch, program.spans[now.span].chunk) for now in ran] == [
            step[1:] for step in expected.steps
        ]


def test_a_whole_step_is_one_region_or_two():
    facts = [[[layers(1, stage, EXPERTS)]] for stage in range(2)]
    for tail in (("reduce", "sum", "update", "gather"), ("reduce", "sum", "decide", "update", "gather")):
        programs = [
            make_program(Schedule(2, 2), r, own, ("full_step",), tail=tail) for r, own in enumerate(facts)
        ]
        check_program(programs)
        for program in programs:
            assert [now.op for now in program.instructions[:3]] == ["fetch", "fetch", "zero"]
            outside = {*range(len(program.instructions))} - {i for own in program.regions for i in own}
            decides = ["decide"] * ("decide" in tail)
            assert [program.instructions[i].op for i in sorted(outside)] == ["fetch", "fetch", *decides]
            assert program.num_graphs == len(program.regions) == 1 + len(decides)


CHECKED = [
    *(((2, 3), None), ((2, 2, 1, None, "zero_bubble"), None), ((2, 3, 1, None, "1f1b", True), None)),
    *(((2, 2, 2, None, "dualpipe_v", True), ()), ((1, 2, 2, None, "1f1b"), ()), ((2, 2), ("full",))),
]


def depend(program, one, other):
    """Return whether neighbours must not change places; None where that is up to messages of other ranks."""
    spans = program.spans
    if one.kind and other.kind:
        return True if one.peer == other.peer else None
    if (
        "reduce" in (one.op, other.op)
        or one.op in ("sum", "update", "gather")
        or other.op in ("update", "gather")
    ):
        return True
    if one.op == "zero" or "fetch" in (one.op, other.op):
        first_of = {
            min(n for n, span in enumerate(spans) if span.chunk == c) for c in {s.chunk for s in spans}
        }
        starts = other.op == "forward" and other.span in first_of
        opens = one.op == "zero" and other.op in ("backward", "dgrad")
        return opens or (one.op == "fetch" and starts and one.microbatch == other.microbatch)
    if one.flight >= 0 and other.flight >= 0 and one.flight != other.flight:
        return program.flights[one.flight].lane == program.flights[other.flight].lane
    if one.microbatch != other.microbatch:
        return False
    if one.kind or other.kind:
        message, span = (one, other) if one.kind else (other, one)
        return message.span == span.span and (message.op == "recv") == bool(one.kind)
    # Spans of a microbatch in a row: through a chunk and on to the next chunk, and back.
    return (one.op == "wgrad") <= (other.op == "wgrad") and (
        one.span == other.span
        or (other.op != "wgrad" and one.op != "wgrad" and abs(one.span - other.span) == 1)
    )


@pytest.mark.parametrize(("sizes", "scope"), CHECKED, ids=str)
def test_neighbours_that_depend_on_each_other_keep_their_order(sizes, scope):
    programs = [with_buffers(program) for program in programs_of(Schedule(*sizes), scope)]
    refused = Counter()
    for rank, program in enumerate(programs):
        for i, (one, other) in enumerate(pairwise(program.instructions)):
            every = [*program.instructions[:i], other, one, *program.instructions[i + 2 :]]
            swapped = [*programs[:rank], program._replace(instructions=tuple(every)), *programs[rank + 1 :]]
            expected = depend(program, one, other)
            try:
                check_program(swapped)
                found = False
            except ValueError:
                found = True
            text = f"{in_words(program, one)} | {in_words(program, other)}"
            assert expected is None or found == expected, f"rank {rank}, {i}: {text}"
            refused[found] += 1
    assert refused[True] > 10


def broken_lists():
    """Yield (words of the error, programs) of two ranks, the second of which is changed in one place."""
    plain = programs_of(Schedule(2, 4, name="zero_bubble"), None)[1]
    second = with_buffers(plain)
    every, graphed = second.instructions, [now.graph >= 0 for now in second.instructions]
    ops, last = [now.op for now in every], max(i for i, now in enumerate(every) if now.kind)
    recv, dgrad, wgrad, fetch = (ops.index(op) for op in ("recv", "dgrad", "wgrad", "fetch"))
    send, leased, one = ops.index("send"), with_buffers(plain, specs_of(plain, seed=3)), graphed.index(True)
    _, whole = programs_of(Schedule(2, 4), ("full_step",))

    def cut(i, *between):
        return second._replace(instructions=(*every[:i], *between, *every[i + 1 :]))

    def other(i, **values):
        return cut(i, every[i]._replace(**values))

    def frozen(number):
        return second._replace(
            spans=[span._replace(trained=i != number) for i, span in enumerate(second.spans)]
        )

    yield "needs the message with activations of before the layers of microbatch 0", cut(recv)
    yield "waits for rank 1, which is at its end", cut(last)
    yield "waits for rank 1, which is at recv m0", cut(recv, every[recv]._replace(tag=99))
    yield "has run as instruction 3 before", cut(3, every[3], every[3])
    yield "needs the gradient of", cut(dgrad)
    yield "the wgrad of .* of microbatch 0 is missing", cut(wgrad)
    yield "needs the fetch of microbatch 0, which has not run", cut(fetch)
    yield "needs the zero, which has not run", cut(0)
    yield "instruction .*, update .*: comes after the end", cut(len(every) - 1, every[-1], every[-2])
    yield "lane 0 still holds", second._replace(flights=[each._replace(lane=0) for each in second.flights])
    yield "has its graphs in another order", cut(one, every[one]._replace(graph=every[one].graph + 1))
    yield "is still needed by", leased._replace(leases=(*leased.leases, leased.leases[0]))
    yield "buffer 0 is not held from the forward of", leased._replace(leases=())
    yield "fetch m0 batch: runs on the host, inside of a region", second._replace(regions=(range(3),))
    yield "has graph .*, inside of a region", second._replace(regions=(range(one, one + 1),))
    yield "is in two regions", whole._replace(regions=(range(5, 9), range(8, 12)))
    yield "the gather is missing", cut(len(every) - 1)
    yield "gradients to rank 0: .* has no neighbour there", other(send, span=every[send].span + 1)
    yield "activations from rank -1: .* has no neighbour there", other(recv, peer=-1)
    yield "gradients to rank 1: .* has no neighbour there", other(send, peer=1)
    yield "dgrad .*: is of a span that is not trained", frozen(every[dgrad].span)
    yield "has no graph, unlike its span", other(one, graph=-1, flight=-1)
    yield "has a graph, unlike its span", other(dgrad, graph=0, flight=0)
    yield "is in the flight of another microbatch, 1", other(one, flight=1)
    third = second.flights[2]._replace(lane=2)
    yield (
        "has a graph of another lane, 0",
        second._replace(flights=(*second.flights[:2], third, second.flights[3])),
    )
    yield (
        "a lease does not begin where",
        leased._replace(
            instructions=[now._replace(buffers=now.buffers[:1] * 2) for now in leased.instructions]
        ),
    )
    yield (
        "expected leases from replay to replay, got Lease",
        leased._replace(leases=[each._replace(last=each.first + 1) for each in leased.leases]),
    )
    yield "expected a known op, span and flight as instruction 2, got .*'log'", other(2, op="log")
    yield "as instruction 0, got .*span=1", other(0, span=1)
    yield "as instruction 4, got .*span=99", other(4, span=99)
    yield "as instruction 5, got .*flight=99", other(5, flight=99)
    yield r"regions of \d+ instructions, got range\(5, 999\)", second._replace(regions=(range(5, 999),))
    yield (
        r"the spans of each chunk in a row, got chunks \[0, 1\]",
        second._replace(spans=(*second.spans[:-1], second.spans[-1]._replace(chunk=1))),
    )


BROKEN = dict(broken_lists())


@pytest.mark.parametrize("words", BROKEN)
def test_a_broken_list_is_refused(words):
    scope = ("full_step",) if BROKEN[words].regions and "two" in words else None
    schedule = Schedule(2, 4, name="1f1b" if scope else "zero_bubble")
    with pytest.raises(ValueError, match=f"^program: rank [01].*{words}"):
        check_program([programs_of(schedule, scope)[0], BROKEN[words]])


def test_programs_of_other_ranks_are_refused():
    first, second = programs_of(Schedule(2, 2), None)
    other = second._replace(stages=Schedule(2, 2, 2).stages)
    for programs, words in (
        ([first], r"rank 0 of StageMap\(pp=2"),
        ([second, first], r"rank 1 of .*, rank 0 of"),
        ([first, other], r"rank 0 of .*vpp=1, .*, rank 1 of .*vpp=2"),
    ):
        with pytest.raises(ValueError, match=f"^program: expected those of all .*, got {words}"):
            check_program(programs)


@pytest.mark.parametrize("frozen", [(0,), (1,), (0, 1)])
@pytest.mark.parametrize("sizes", [(3, 3), (2, 2, 2, None, "dualpipe_v"), (1, 2, 2)], ids=str)
def test_chunks_without_gradients_pass_messages_on(sizes, frozen):
    """A frozen stage has no backward; those before it may still expect its message."""
    schedule, tensors, programs = Schedule(*sizes), (TensorSpec((2,), "float32"),), []
    for rank, program in enumerate(programs_of(schedule, ("full",))):
        held = {chunk for chunk, stage in enumerate(schedule.stages.stages(rank)) if stage in frozen}
        spans = [
            (span, span.chunk in held and span.name != "loss") for span in program.spans if span.captured
        ]
        specs = [SpanSpec(span.name, tensors, None if still else tensors) for span, still in spans]
        programs.append(with_buffers(program, specs))
    check_program(programs)
    ops = Counter(now.op for program in programs for now in program.instructions)
    assert ops["backward"] < ops["forward"]


def test_wrong_arguments_are_refused():
    with pytest.raises(ValueError, match="make_program: expected facts of 2 chunks, got 1"):
        make_program(Schedule(2, 2, 2), 0, [[layers(1)]])
    with pytest.raises(ValueError, match="names no segment"):
        make_program(Schedule(1, 2), 0, [[layers(1)]], ("mlp",))
    program = make_program(Schedule(1, 2), 0, [[layers(2)]], None)
    with pytest.raises(ValueError, match="with_buffers: expected specs of 2 captured spans, got 0"):
        with_buffers(program, [])
