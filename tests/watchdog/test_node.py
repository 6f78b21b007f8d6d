"""Heartbeats by machine: what leaders send, who takes over from a leader, and how little is sent."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import uuid
from contextlib import ExitStack
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from fastmp.watchdog import node
from fastmp.watchdog.channel import REPORTER, Channel
from fastmp.watchdog.collector import Collector
from fastmp.watchdog.heartbeat import essence, heartbeat, node_message
from fastmp.watchdog.inspector import ProcessInspector, _stat, host_id, process_state
from fastmp.watchdog.node import Leader, Node, job_directory
from fastmp.watchdog.rank_files import RankFiles
from fastmp.watchdog.records import RankRecord, pack_ranks, unpack_ranks
from fastmp.watchdog.watchdog import Watchdog

SILENCE, INTERVAL = 2.0, 1.0


class Process:
    """A rank of a job that does nothing: a process of its own, whose heartbeats the test leaves."""

    def __init__(self, rank, machine, token, store, world_size=4):
        self.child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
        self.start, self.rank, self.number = _stat(self.child.pid)[1], rank, 0
        self.node = Node(rank, (machine, self.start), SILENCE)
        self.node.join(token)
        self.channel = Channel(INTERVAL, rank, world_size)
        self.channel._store = store
        self.leader = Leader(self.node, self.channel, world_size, INTERVAL)

    def beat(self, now, looks=True, away=False, **changes):
        """Leave a heartbeat; as the leader of the machine, send its message too. Return True if it led."""
        self.number += 1
        record = RankRecord(self.rank, "host", self.child.pid, step=7, started={"world": 5}, **changes)
        said, groups = {"investigating": looks, "away": away}, {"world": [[0, 1, 4]]}
        self.node.beat(heartbeat(record, groups, self.number, self.node.host_id, **said), now)
        leads = self.node.leads(now)
        if leads:
            self.leader.send(self.number, now, last=False)
            self.round()
        return leads

    def round(self):
        out, self.channel._out = self.channel._out, {}
        leader, self.channel._leader = self.channel._leader, None
        self.channel._exchange(out, leader)
        self.channel.rounds += 1


@pytest.fixture
def job():
    """Four ranks on two machines."""
    store, token = dist.HashStore(), uuid.uuid4().hex
    with ExitStack() as stack:
        ranks = []
        for rank in range(4):
            ranks.append(Process(rank, f"machine {rank // 2}", token, store))
            stack.callback(ranks[-1].child.kill)
        yield ranks
        for process in ranks:
            process.child.kill()
            process.child.wait()
        for process in ranks:
            process.node.leave(1e9)
        assert not any(process.node.directory.exists() for process in ranks)


def test_the_first_rank_of_a_machine_that_lives_leads_it(job):
    assert [rank.beat(0.0) for rank in job] == [True, False, True, False]
    job[2].child.kill()
    job[2].child.wait()
    assert [rank.beat(1.0) for rank in (job[0], job[1], job[3])] == [True, False, True]
    # A leader that lives, but whose heartbeat does not change: it is cut off, or holds the interpreter.
    assert [job[1].beat(1.0 + time) for time in (0.0, SILENCE, 2 * SILENCE)] == [False, False, True]


@pytest.mark.parametrize("away", (False, True))
def test_the_leader_kills_a_rank_that_cannot_leave_but_none_that_has_left(job, tmp_path, away):
    """One that is stopped after it has left the watch may be saving, or is a debugger's."""
    leader, other = job[0], job[1]
    watch = Watchdog(tmp_path, 0, 4, 300.0)
    watch._node = watch._collector.node = leader.node
    watch._leads, watch._own.lost_at = True, 0.0  # else it would end this process
    other.beat(0.0, away=away)
    os.kill(other.child.pid, signal.SIGSTOP)
    while process_state(other.child.pid, other.start) == "running":
        pass
    with open(tmp_path / "stacks", "w") as watch._files._stacks:
        watch._end_job("Rank 3 is gone")
    if away:
        assert process_state(other.child.pid, other.start) == "stopped"
    else:
        assert other.child.wait(10) == -signal.SIGKILL


def test_the_records_of_all_ranks_survive_the_loss_of_a_leader(job, tmp_path):
    for rank in job:
        rank.beat(0.0, where=f"line {rank.rank}")
    job[2].child.kill()
    job[2].child.wait()
    assert job[3].beat(1.0, where="line 3")
    collector = Collector(tmp_path, 4, job[0].node, job[0].channel, INTERVAL, SILENCE)
    assert collector.is_reporter(1.0, 0.0)
    assert job[0].beat(1.0, where="line 0")
    job[1].beat(1.0, where="line 1")
    own = RankRecord(0)
    records = {record.rank: record for record in collector.everyone(1.5, own, lost=False)}
    assert sorted(records) == [0, 1, 2, 3]
    assert (records[2].state, records[2].where, records[3].state) == ("gone", "line 2", "running")
    assert records[3].groups == {"world": (0, 1, 2, 3)} and records[1].state == "running"
    # The other machine is cut off as a whole: nobody there says that a rank is gone.
    late = {record.rank: record for record in collector.everyone(1.5 + 3 * SILENCE, own, lost=False)}
    assert late[3].state == "silent" and late[2].state == "gone"


def test_ranks_count_as_silent_after_their_limit(job, tmp_path):
    """The limit of other machines is two heartbeats longer: messages travel through the store."""
    for rank in (job[1], job[3], job[0], job[2]):  # leaders last: they send what the others have left
        rank.beat(0.0)
    collector = Collector(tmp_path, 4, job[0].node, job[0].channel, INTERVAL, SILENCE)
    assert collector.is_reporter(0.0, 0.0)
    job[0].round()

    def states(now):
        records = collector.everyone(now, RankRecord(0), lost=False)
        return [record.state for record in sorted(records, key=lambda record: record.rank)][1:]

    far = SILENCE + 2 * INTERVAL
    assert states(0.0) == states(SILENCE) == ["running", "running", "running"]
    assert states(SILENCE + 0.1) == states(far) == ["silent", "running", "running"]
    assert states(far + 0.1) == ["silent", "silent", "silent"]


@pytest.mark.parametrize(("answers", "state"), [(True, "unseen"), (False, "unreadable")])
def test_a_rank_without_a_heartbeat_is_not_taken_for_a_live_one(job, tmp_path, answers, state):
    """It ended before its first one, unless the store is lost, in which it may be."""
    for rank in job[:3]:
        rank.beat(0.0)
    collector = Collector(tmp_path, 4, job[0].node, job[0].channel, INTERVAL, SILENCE)
    assert collector.is_reporter(0.0, 0.0)
    job[0].round()
    collector.everyone(0.0, RankRecord(0), lost=False)
    job[0].channel._open = answers
    records = {record.rank: record for record in collector.everyone(0.0, RankRecord(0), lost=True)}
    assert records[3] == RankRecord(3, state=state)
    assert records[1].state == "running"
    assert f"{records[3]}" == "rank 3"


def test_the_lowest_live_leader_writes_the_report(job, tmp_path):
    for rank in job:
        rank.beat(0.0)
    first, second = (Collector(tmp_path, 4, job[r].node, job[r].channel, INTERVAL, SILENCE) for r in (0, 2))
    for now in (0.0, 1.0, 2.0, 3.0):
        assert first.is_reporter(now, 0.0) and not second.is_reporter(now, 0.0)
        for rank in (job[0], job[2]):
            rank.round()
    store = job[0].channel._store
    assert store.get(REPORTER).split()[0] == b"0"
    taken = [second.is_reporter(now, 0.0) for now in (3.5, 4.5, 5.5, 6.5, 7.5, 8.5, 9.5)]  # rank 0 is gone
    assert taken == sorted(taken) and not taken[0] and taken[-1]


def test_one_directory_is_left_by_nobody_and_swept_where_all_were_killed(job):
    for rank in job:
        rank.beat(0.0)
    place, other = job[0].node.directory, job[2].node.directory
    assert place != other and place.stat().st_mode & 0o777 == 0o700
    for rank in job:
        rank.child.kill()
        rank.child.wait()
    # 1. Machine 1 may be a container with the same memory: its process numbers say nothing here.
    new = Node(9, ("machine 0", host_id()[1]), SILENCE)
    new.join(uuid.uuid4().hex)
    new.leave(0.0)
    assert not place.exists() and other.exists()
    # 2. It sweeps its own directory.
    new = Node(9, ("machine 1", host_id()[1]), SILENCE)
    new.join(uuid.uuid4().hex)
    new.leave(0.0)
    assert not other.exists()
    job[0].node.join("again"), job[1].node.join("again")


def left_by(process, place, name="rank-00000.json"):
    """Write the record that `process` leaves in the directory of a start."""
    content = heartbeat(RankRecord(0, "host", process.pid), {}, 1, ("machine", _stat(process.pid)[1]))
    (place / name).write_text(json.dumps(content))


def test_starts_that_were_killed_are_swept_and_reports_kept_for_a_day(tmp_path, monkeypatch):
    def there():
        return sorted(path.name.split("-")[3] for path in tmp_path.iterdir())

    children = {name: subprocess.Popen(["sleep", "60"]) for name in ("killed", "reported", "alive")}
    for name, child in children.items():
        place = job_directory(tmp_path, "start", name, "machine")
        left_by(child, place)
        (place / "rank-00000.stacks").write_text("Thread")
        (place / "rank-00000.flight.json").write_text("[")
        if name == "reported":
            (place / "report.json").write_text("{}")
    assert there() == ["alive", "killed", "reported"]
    for name in ("killed", "reported"):
        children[name].kill()
        children[name].wait()
    job_directory(tmp_path, "start", "new", "machine").rmdir()
    assert there() == ["alive", "reported"]
    monkeypatch.setattr(node, "KEPT_SECONDS", -1.0)
    job_directory(tmp_path, "start", "new", "machine")
    assert there() == ["alive", "new"]
    children["alive"].kill()
    children["alive"].wait()


@pytest.mark.parametrize("content", ["[]", '{"record": 7}'])
def test_a_damaged_record_of_an_earlier_start_is_left_alone(tmp_path, content):
    damaged = job_directory(tmp_path, "start", "damaged", "machine")
    (damaged / "rank-00000.json").write_text(content)
    assert job_directory(tmp_path, "start", "new", "machine").exists() and damaged.exists()


def test_a_directory_that_others_can_enter_is_not_used(tmp_path, monkeypatch):
    def own():
        return job_directory(tmp_path, "start", "token", "machine")

    path = own()
    assert path.stat().st_mode & 0o777 == 0o700 and own() == path
    path.chmod(0o755)  # as one that was made for others to write to, or to read
    with pytest.raises(OSError, match=f"{path} is of mode 755, where"):
        own()
    path.rmdir()
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="is a link, where"):
        own()
    path.unlink()
    path.touch()
    with pytest.raises(OSError, match="is no directory, where"):
        own()
    path.unlink()
    path.mkdir(mode=0o700)
    user = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: user + 1)
    path.rename(str(path).replace(f"-start-{user}-", f"-start-{user + 1}-"))
    with pytest.raises(OSError, match=f"is owned by user {user}, where"):
        own()


def test_the_files_of_a_rank_follow_no_link(tmp_path):
    target = tmp_path / "target"
    target.write_text("kept")
    files = RankFiles(tmp_path / "hang", 0)
    files.directory.mkdir()
    for name in ("rank-00000.stacks", "rank-00000.json", f".rank-00000.json.{os.getpid()}"):
        (files.directory / name).symlink_to(target)
    files.begin({"a": 1})
    files.arm(100.0)
    files.disarm()
    files.close()
    assert target.read_text() == "kept" and (files.directory / "rank-00000.json").read_text() == '{"a": 1}'


def test_groups_are_read_while_the_main_thread_makes_one(monkeypatch):
    """torch names a group in one table before it has ranks in the other, and either grows at any time."""
    groups = [SimpleNamespace(group_desc=f"fastmp:{name}", group_name="0") for name in ("tp", "dp", "pp")]

    class Filling(dict):
        def get(self, key, default=None):
            names.setdefault(id(groups[2]), groups[2])
            return super().get(id(key), default)

    class Names(dict):
        def __iter__(self):
            return iter(self.values())

    names = Names({id(group): group for group in groups[:2]})
    ranks = Filling({id(groups[0]): {0: 0, 1: 1}})
    monkeypatch.setattr(
        dist.distributed_c10d, "_world", SimpleNamespace(pg_names=names, pg_group_ranks=ranks)
    )
    inspector = ProcessInspector()
    inspector.update()
    assert set(inspector.groups) == {"fastmp:tp 0", "fastmp:tp 0/nccl"}
    ranks[id(groups[1])] = {0: 0, 2: 1}
    inspector.update()
    assert unpack_ranks(inspector.groups["fastmp:dp 0"]) == (0, 2)


@pytest.mark.parametrize(
    "ranks",
    [
        range(0, 16_384),
        range(3, 16_384, 8),
        [r for r in range(4096) if r % 8 < 2],
        [a + b + c for a in (0, 512, 1024) for b in (0, 32) for c in (1, 3, 5)],
        [0, 1, 3, 9],
        [5],
        [],
        [0, 16_000],
    ],
)
def test_groups_are_packed_as_progressions(ranks):
    packed = pack_ranks(ranks)
    assert unpack_ranks(json.loads(json.dumps(packed))) == tuple(ranks)
    assert len(packed) <= 2


def test_packed_groups_of_absurd_size_are_refused():
    with pytest.raises(ValueError, match="a process group of more than"):
        unpack_ranks([[0, 1, 10**12]])


def test_ranks_that_stand_still_send_no_new_message():
    def part(state="running", **record):
        content = heartbeat(RankRecord(3, **record), {"world": [[0, 1, 4]]}, 1, ("host", 1))
        return essence(node_message({3: (content, state, 0.0)}))

    assert part(stalled=1.0) == part(stalled=2.0)
    assert len({part(), part(step=1), part(where="x.py:1"), part("stopped")}) == 4


def test_a_heartbeat_is_sent_after_the_message_that_it_announces():
    """Who reads a new version number between the two takes the old message for the new one."""
    channel = Channel(INTERVAL, 0, 2)
    channel.send("beat-0", "1 0 0 0.0")
    channel.send("message-0", b"new")
    channel.send("beat-0", "2 1 0 0.0")
    assert list(channel._out.items()) == [("message-0", b"new"), ("beat-0", b"2 1 0 0.0")]
