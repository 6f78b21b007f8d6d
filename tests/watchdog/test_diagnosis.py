"""The report on a job that stands still, from records alone: by a table, and on random programs."""

from __future__ import annotations

import json
import time
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastmp.watchdog.diagnosis import diagnose, stragglers
from fastmp.watchdog.records import Call, RankRecord, calls_kept

WORLD, TP = "world 0", ("tp 1", "tp 2")
GROUPS = {WORLD: (0, 1, 2, 3), TP[0]: (0, 1), TP[1]: (2, 3)}


def call(op="all_reduce", group=WORLD, number=5, size=4, began=0.0):
    return Call(op, group, number, ((size,),), ("Float",), began)


def job(**changes):
    """Four ranks, all but rank 2 in the fifth all-reduce of the world; `changes` of a rank by its number."""
    records = []
    for rank in range(4):
        own = call(began=1.0 + rank)
        record = RankRecord(
            rank, "host", 100 + rank, 7, "reduce", "grads.py:9 in reduce", own, (own,), {WORLD: 5}, GROUPS
        )
        if rank == 2:
            earlier = call(number=4)
            record = replace(
                record, inside=None, calls=(earlier,), started={WORLD: 4}, phase="data", where="x.py:1 in f"
            )
        records.append(replace(record, stalled=9.0, **changes.get(f"r{rank}", {})))
    return records


GONE, FAILED = {"state": "gone", "left_at": 5.0}, {"state": "failed", "left_at": 4.0, "reason": "KeyError: 7"}


@pytest.mark.parametrize(
    ("changes", "kind", "ranks", "said"),
    [
        ({}, "hung", (2,), "is alive, but for 9 s it has been in step 7, data, at x.py:1 in f."),
        ({"r2": GONE}, "gone", (2,), "is gone: killed or crashed, last seen in step 7, data"),
        ({"r2": {"state": "stopped"}}, "stopped", (2,), "or a debugger, last seen in step 7, data"),
        ({"r2": {"state": "silent", "silent": 8.0}}, "silent", (2,), "for 8 s, cut off or in code that"),
        ({"r2": {"state": "silent", "silent": 8.0}}, "silent", (2,), "the interpreter, last seen in step 7,"),
        ({"r2": {"state": "finished"}}, "finished", (2,), "it has made fewer calls than others"),
        ({"r2": FAILED}, "failed", (2,), "failed in step 7, data, at x.py:1 in f: KeyError: 7"),
        # A second one, which may be a victim of the first: of its launcher, say.
        ({"r2": GONE, "r3": {"state": "gone", "left_at": 6.0}}, "gone", (2, 3), "is gone (rank 3 too)"),
        ({"r2": FAILED, "r1": {"state": "gone", "left_at": 6.0}}, "failed", (2,), "Ranks 0 and 3 waited"),
        ({"r1": {"calls": (call(size=6, began=2.0),)}}, "mismatch", (1,), "[6] Float, where the others"),
        ({"r1": {"calls": (call("broadcast", began=2.0),)}}, "mismatch", (1,), "began broadcast number 5"),
    ],
)
def test_a_table_of_causes(changes, kind, ranks, said):
    report = diagnose(job(**changes), 4)
    assert (report.kind, report.ranks, report.step) == (kind, ranks, 7)
    assert said in report.text and str(job()[ranks[0]]) in report.text.replace("Rank", "rank")
    assert report.call is not None and report.call.group == WORLD and report.call.number == 5
    if kind not in ("mismatch", "failed") and len(ranks) == 1:
        assert report.waiting == (0, 1, 3) and "Ranks 0, 1 and 3 waited in all_reduce number 5" in report.text


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ("unseen", "Rank 2 has never shown a sign of life: it did not start, ended before its"),
        ("unreadable", "Rank 2 cannot be seen: the store of the job does not answer."),
    ],
)
def test_a_rank_of_which_nothing_is_known_is_named_without_place_or_process(state, said):
    others = [record for record in job() if record.rank != 2]
    report = diagnose([*others, RankRecord(2, state=state)], 4)
    assert (report.kind, report.ranks, report.waiting) == (state, (2,), (0, 1, 3))
    assert report.text.startswith(said) and "It did not join all_reduce number" in report.text
    assert not any(word in report.text for word in ("alive", "step 0", "host ?", "process 0"))
    if state == "unseen":  # as is a rank without any record
        assert diagnose(others, 4) == report


def test_a_rank_that_cannot_be_read_does_not_hide_a_cause_among_the_others():
    unreadable = RankRecord(3, state="unreadable")

    def found(records):
        report = diagnose([*(record for record in records if record.rank != 3), unreadable], 4)
        return report.kind, report.ranks

    # 1. Rank 2 is in no call; then it waits with the others, for rank 3 alone.
    assert found(job()) == ("hung", (2,))
    late = {"inside": call(began=3.0), "calls": (call(began=3.0),), "started": {WORLD: 5}}
    assert found(job(r2=late)) == ("unreadable", (3,))
    left = {"state": "finished", "calls": (), "started": {WORLD: 4}}
    assert found(job(r2=left)) == ("finished", (2,))
    # 2. Ranks 0 and 1 wait for each other, rank 2 for rank 3.
    here, there, far = call(), call(group=TP[0]), call(group=TP[1])
    waiting = {
        "r0": (here, {WORLD: 5, TP[0]: 4}),
        "r1": (there, {WORLD: 4, TP[0]: 5}),
        "r2": (far, {WORLD: 5, TP[1]: 5}),
    }
    changes = {
        rank: {"inside": own, "calls": (own,), "started": begun} for rank, (own, begun) in waiting.items()
    }
    assert found(job(**changes)) == ("order", (0, 1))
    # 3. Hosts that wait for their devices are in no call.
    devices = {f"r{rank}": {"inside": None, "started": {WORLD: 5 - (rank == 1)}} for rank in range(3)}
    assert found(job(**devices)) == ("unreadable", (3,))


@pytest.mark.parametrize("state", ["gone", "stopped", "silent", "running"])
@pytest.mark.parametrize("inside", [True, False])
def test_the_call_that_a_rank_missed_is_certain_only_if_others_wait_in_it(state, inside):
    """Otherwise its last heartbeat may be older than the call: others were seen in a later one."""
    records = job(r2={"state": state})
    if not inside:
        ahead = (call(number=5), call(number=6))
        records = [r if r.rank == 2 else replace(r, inside=None, calls=ahead) for r in records]
    report = diagnose(records, 4)
    assert report.ranks == (2,) and report.call.number == 5
    certain = inside or state == "running"
    assert ("It did not join all_reduce number 5" in report.text) == certain
    assert ("It was not seen to join all_reduce number 5" in report.text) == (not certain)


def test_exchanges_may_have_other_sizes_on_every_rank():
    exchange = call("all_to_all", size=9, began=2.0)
    records = [replace(r, calls=(replace(exchange, sizes=((r.rank,),)),)) for r in job()]
    assert diagnose(records, 4).kind == "hung"


def test_two_ranks_that_differ_are_both_named_unless_other_groups_show_who_is_right():
    def pair(group, size):
        return replace(call(group=group, size=size), began=1.0)

    sizes = {0: 4, 1: 4, 2: 4, 3: 6}
    records = [
        replace(record, calls=(pair(TP[record.rank // 2], sizes[record.rank]),), inside=None)
        for record in job()
    ]
    assert diagnose(records, 4).ranks == (3,)
    assert diagnose(records[2:], 2).ranks == (2, 3)


def test_records_survive_json():
    records = job(r1={"inside": Call("recv", TP[0], peer=0)})
    assert [RankRecord.from_json(json.loads(json.dumps(r.as_json()))) for r in records] == records


@st.composite
def programs(draw):
    """Groups over some ranks, an order of collectives, and who goes astray at which of its own."""
    world_size = draw(st.integers(2, 6))
    ranks = st.lists(st.integers(0, world_size - 1), min_size=2, max_size=world_size, unique=True)
    groups = {f"g{i} {i}": tuple(sorted(draw(ranks))) for i in range(draw(st.integers(1, 4)))}
    program = draw(st.lists(st.sampled_from(sorted(groups)), min_size=1, max_size=12))
    return groups, program, world_size, draw(st.integers(0, world_size - 1)), draw(st.integers(0, 11))


@settings(max_examples=150, deadline=None)
@given(programs())
def test_the_rank_that_stays_away_is_found_in_any_program(drawn):
    """All ranks make the calls of one order, each blocks; one never makes its `stays`-th."""
    groups, program, world_size, culprit, stays = drawn
    own = {rank: [g for g in program if rank in groups[g]] for rank in range(world_size)}
    begun = {rank: dict.fromkeys(groups, 0) for rank in own}
    made = dict.fromkeys(own, 0)  # calls that are over
    calls: dict[int, list[Call]] = {rank: [] for rank in own}
    clock, moved = 0.0, True
    while moved:
        moved = False
        for rank, order in own.items():
            if made[rank] == len(order) or (rank == culprit and made[rank] >= stays):
                continue
            group = order[made[rank]]
            if len(calls[rank]) == made[rank]:
                clock, moved = clock + 1.0, True
                begun[rank][group] += 1
                calls[rank].append(Call("all_reduce", group, begun[rank][group], began=clock))
            if all(begun[other][group] >= begun[rank][group] for other in groups[group]):
                made[rank], moved = made[rank] + 1, True
    inside = {rank: calls[rank][-1] if len(calls[rank]) > made[rank] else None for rank in own}
    records = [
        RankRecord(
            rank, inside=inside[rank], calls=tuple(calls[rank]), started=begun[rank], groups=groups,
            state="finished" if made[rank] == len(own[rank]) else "running",
        )
        for rank in own
    ]  # fmt: skip
    report = diagnose(records, world_size)
    if any(inside.values()):
        assert (report.kind, report.ranks) == ("hung", (culprit,))
        call = report.call
        assert culprit in groups[call.group] and call.number == begun[culprit][call.group] + 1
        if any(culprit in groups[c.group] and set(groups[c.group]) == set(own) for c in inside.values() if c):
            assert call.group == own[culprit][stays]  # whoever is in all groups shows their order
    else:
        assert report.kind == "unknown"


def test_a_latecomer_is_named_with_its_delay():
    def record(rank, late):
        calls = tuple(call(number=n, began=n * 1.0 + (late if n % 2 else 0.0)) for n in range(1, 9))
        return RankRecord(rank, calls=calls, groups=GROUPS)

    records = [record(rank, 0.9 if rank == 3 else 0.01 * rank) for rank in range(4)]
    (late,) = stragglers(records)
    assert late.rank == 3 and late.share == pytest.approx(4 * 0.88 / 7.0, rel=0.02)
    assert stragglers([record(rank, 0.01 * rank) for rank in range(4)]) == []
    burst = [replace(r, calls=r.calls[:1]) for r in records]  # such as those of a save
    assert stragglers(burst) == []


def test_reductions_that_wait_for_one_rank_together_count_once():
    """Eight asynchronous reductions begin together at the end of each step of 1 s."""

    def record(rank, late):
        began = [(step, i, step + late + 0.001 * i) for step in range(5) for i in range(8)]
        calls = tuple(call(number=8 * step + i, began=at) for step, i, at in began)
        return RankRecord(rank, calls=calls, groups={WORLD: (0, 1)})

    (late,) = stragglers([record(0, 0.0), record(1, 0.3)])
    assert late.rank == 1 and late.seconds == pytest.approx(0.3)
    assert late.share == pytest.approx(5 * 0.307 / 4.307)
    assert stragglers([record(0, 0.0), record(1, 0.04)]) == []  # 4 % of a step


arrivals = st.lists(
    st.lists(st.floats(0, 3, width=32), min_size=3, max_size=3), min_size=1, max_size=12
)  # of three ranks at some collectives


@settings(max_examples=100, deadline=None)
@given(st.lists(arrivals, min_size=1, max_size=2))
def test_nobody_waits_for_longer_than_the_time_compared(drawn):
    """The share of a rank is at most 1, and no greater than the sum of its delays in some group."""
    groups = {f"g {i}": (0, 1, 2) for i in range(len(drawn))}
    records = [
        RankRecord(
            rank,
            calls=tuple(
                call(group=group, number=number, began=at[rank])
                for group, times in zip(groups, drawn)
                for number, at in enumerate(times)
            ),
            groups=groups,
        )
        for rank in range(3)
    ]
    for late in stragglers(records):
        sums = []
        for times in drawn:
            span = max(map(max, times)) - min(map(min, times))
            delays = [max(at) - sorted(at)[1] for at in times if at[late.rank] == max(at)]
            sums.append(sum(delays) / span if span >= 1 else 0.0)
        assert 0.25 < late.share <= min(1.0, max(sums) + 1e-9)


def test_without_a_flight_record_the_calls_that_ranks_are_in_have_to_do():
    bare = {"calls": (), "started": {}}
    report = diagnose([replace(record, **bare) for record in job()], 4)
    assert (report.kind, report.ranks, report.waiting) == ("hung", (2,), (0, 1, 3))


@pytest.mark.parametrize(
    ("ops", "kind", "ranks"),
    [
        (("recv", "recv"), "message", (0, 1)),
        (("send", "send"), "message", (0, 1)),
        (("send", "recv"), "unknown", (0,)),  # which will meet
    ],
)
def test_two_ranks_with_the_same_end_of_a_message_wait_for_each_other(ops, kind, ranks):
    records = [RankRecord(rank, inside=Call(op, TP[0], peer=1 - rank)) for rank, op in enumerate(ops)]
    report = diagnose(records, 2)
    assert (report.kind, report.ranks) == (kind, ranks)
    assert ("nobody has the other end of a message" in report.text) == (kind == "message")


def test_hosts_that_wait_for_their_device_are_in_no_call_and_go_by_what_they_have_begun():
    """As over NCCL: ranks ran ahead until they read a number; one never came to its fifth collective."""
    behind = {"started": {WORLD: 4, TP[0]: 7, TP[1]: 7}}
    calls = (call(began=1.0), call(number=6, began=2.0))
    ahead = {"inside": None, "calls": calls, "started": {WORLD: 6, TP[0]: 7, TP[1]: 7}}
    records = [replace(record, **(behind if record.rank == 2 else ahead)) for record in job()]
    report = diagnose(records, 4)
    assert (report.kind, report.ranks) == ("hung", (2,))
    assert report.call.number == 5 and "It did not join all_reduce number 5 of group world 0" in report.text


@pytest.mark.parametrize("number", [7, -(2**31), 0])
def test_numbers_of_exchanges_wrap(number):
    """They are int32: the last rank is one exchange behind, whatever the next one is called."""
    group, last = "exchange:ep 5", (number - 1 + 2**31) % 2**32 - 2**31

    def record(rank, begun, inside=None):
        return RankRecord(rank, inside=inside, started={group: begun}, groups={group: (0, 1)})

    for inside in (Call("exchange", group, number), None):
        report = diagnose([record(0, number, inside), record(1, last)], 2)
        assert (report.kind, report.ranks) == ("hung", (1,))


def large_record(rank, world_size, shared, tp=8, pp=16):
    """A rank of a job over NCCL in which all wait for one in an all-reduce; `shared` holds its groups."""
    dp, stage = world_size // (tp * pp), rank * pp // world_size
    own = {
        "default_pg 0": (0, world_size, 1),
        f"tp {rank // tp}": (rank - rank % tp, rank - rank % tp + tp, 1),
        f"dp {stage * tp + rank % tp}": (stage * tp * dp + rank % tp, (stage + 1) * tp * dp, tp),
        f"dp-tp {stage}": (stage * tp * dp, (stage + 1) * tp * dp, 1),
        f"pp {rank % (tp * dp)}": (rank % (tp * dp), world_size, tp * dp),
    }
    groups = {
        f"{name}{backend}": shared.setdefault(ends, tuple(range(*ends)))
        for name, ends in own.items()
        for backend in ("", "/nccl")
    }
    late = rank == world_size // 2
    calls = tuple(
        Call("all_reduce", group, 97 + i - late, ((4096, 8),), ("BFloat16",), 1.7e9 + i)
        for i in range(calls_kept(world_size))
        for group in groups
    )
    begun = {call.group: call.number for call in calls}
    inside = None if late else next(call for call in calls[::-1] if call.group == "default_pg 0/nccl")
    return RankRecord(
        rank, "host", rank, 9, "reduce", "x.py:1 in f", inside, calls, begun, groups, stalled=400.0
    )


@pytest.mark.parametrize(
    ("world_size", "seconds"), [(4096, 20.0), pytest.param(16_384, 60.0, marks=pytest.mark.exhaustive)]
)
def test_thousands_of_ranks_are_diagnosed_in_seconds(world_size, seconds):
    """Limits are over ten times what it takes. To compare all pairs of ranks took 4 minutes at 4,096."""
    shared: dict[tuple[int, ...], tuple[int, ...]] = {}
    records = [large_record(rank, world_size, shared) for rank in range(world_size)]
    begin = time.perf_counter()
    report = diagnose(records, world_size)
    assert time.perf_counter() - begin < seconds
    assert (report.kind, report.ranks) == ("hung", (world_size // 2,))
    assert len(report.text) < 2000


def test_a_record_does_not_grow_with_the_world():
    small, large = (len(json.dumps(large_record(9, world, {}).as_json())) for world in (512, 16_384))
    assert large <= small
