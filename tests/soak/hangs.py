"""Ways in which a job of several ranks hangs or loses a rank, as data, and what runs them.

Ranks are forked, walk through steps of collectives under a `Watchdog` with a short limit, and one of them
goes wrong in its sixth step.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import soak
import torch
import torch.distributed as dist

from fastmp.config import set_default_variables
from fastmp.distributed.collectives import all_gather, all_reduce_
from fastmp.distributed.runtime import main_guard
from fastmp.distributed.symmetric_memory import SymmetricExchange
from fastmp.ops.exchange import exchange_barrier
from fastmp.status import process_status
from fastmp.watchdog import watchdog as watch
from fastmp.watchdog.inspector import host_id
from fastmp.watchdog.watchdog import Watchdog

LIMIT = 2.0  # seconds without progress
BAD_STEP, STEPS = 6, 12
# Through memory, in which nobody hears of the others.
EXCHANGE, RAISES, SLEEPS = (
    f"{fault} while others wait in an exchange" for fault in ("killed", "raises", "sleeps")
)
MACHINE = "all of its machine are killed"
UNHEARD = "finishes, and its last letter is lost"
UNSEEN = "ends before its first heartbeat"


@dataclass(frozen=True)
class Scenario:
    """A rank's fault in its sixth step, and the expected report.

    kinds, ranks: of the report. op: of the call that it names. store: whose process serves the store, a
    "launcher" or "rank 0". limit: seconds without progress after which the job is ended. machines: that the
    ranks believe to run on.
    """

    fault: str
    world_size: int
    rank: int
    kinds: tuple[str, ...]
    op: str
    ranks: tuple[int, ...] | None = None
    store: str = "launcher"
    limit: float = LIMIT
    machines: int = 1

    @property
    def name(self) -> str:
        at = ", which serves the store" if self.store == "rank 0" else ""
        over = f" on {self.machines} machines" if self.machines > 1 else ""
        return f"{self.fault}: rank {self.rank} of {self.world_size}{over}{at}"

    @property
    def expected(self) -> tuple[int, ...]:
        return (self.rank,) if self.ranks is None else self.ranks


BOTH = {"ranks": (0, 1)}  # of two that differ, neither is known to be the one that is wrong
SCENARIOS = [
    Scenario("killed", 2, 1, ("gone",), "all_reduce"),
    Scenario("killed", 4, 3, ("gone",), "all_reduce"),
    Scenario("killed", 2, 0, ("gone",), "all_reduce", store="rank 0"),
    Scenario(EXCHANGE, 2, 1, ("gone",), "exchange", limit=60.0),
    Scenario(EXCHANGE, 4, 2, ("gone",), "exchange", limit=60.0),
    Scenario(EXCHANGE, 4, 0, ("gone",), "exchange", store="rank 0", limit=60.0),
    Scenario(RAISES, 2, 1, ("failed",), "exchange", limit=60.0),
    Scenario(SLEEPS, 2, 1, ("hung",), "exchange"),
    Scenario(SLEEPS, 4, 2, ("hung",), "exchange"),
    Scenario("stopped", 2, 1, ("stopped",), "all_reduce"),
    Scenario("stopped", 4, 2, ("stopped",), "all_reduce"),
    Scenario("stopped", 4, 0, ("stopped",), "all_reduce", store="rank 0"),
    Scenario("sleeps", 2, 1, ("hung",), "all_reduce"),
    Scenario("sleeps", 4, 0, ("hung",), "all_reduce", store="rank 0"),
    Scenario("holds the interpreter", 2, 1, ("silent",), "all_reduce"),
    Scenario("other order", 2, 1, ("order",), "all_reduce", **BOTH),
    Scenario("other order", 4, 1, ("order",), "all_reduce"),
    Scenario("other op", 2, 1, ("mismatch",), "broadcast", **BOTH),
    Scenario("other op", 4, 2, ("mismatch",), "broadcast"),
    Scenario("other shape", 2, 1, ("mismatch",), "all_reduce", **BOTH),
    Scenario("other shape", 4, 3, ("mismatch",), "all_reduce"),
    Scenario("skips a collective", 2, 1, ("mismatch", "order"), "all_reduce", **BOTH),
    Scenario("skips a collective", 4, 2, ("mismatch", "order"), "all_reduce"),
    Scenario("fewer steps", 2, 1, ("finished",), "all_reduce"),
    Scenario("fewer steps", 4, 3, ("finished",), "all_reduce"),
    Scenario("raises", 4, 1, ("failed",), "all_reduce"),
    Scenario("raises", 2, 0, ("failed",), "all_reduce", store="rank 0"),
    Scenario("sends what nobody receives", 2, 0, ("message",), "send", **BOTH),
    Scenario("receives what nobody sends", 4, 2, ("message",), "recv", ranks=(2, 3)),
    Scenario("slow", 4, 2, ("slow",), "all_reduce"),
    Scenario("all are suspended and resumed", 2, 0, ("no report",), ""),
    Scenario(UNHEARD, 2, 1, ("no report",), "", limit=60.0),
    Scenario(UNSEEN, 2, 1, ("unseen",), "all_reduce"),
    # Rank 0 leads the first machine, and writes reports; rank 2 leads the second one.
    Scenario("sleeps", 4, 3, ("hung",), "all_reduce", machines=2),
    Scenario("stopped", 4, 0, ("stopped",), "all_reduce", machines=2),
    Scenario("stopped", 4, 2, ("stopped",), "all_reduce", machines=2),
    Scenario("holds the interpreter", 4, 2, ("silent",), "all_reduce", machines=2),
    Scenario("killed", 4, 2, ("gone",), "all_reduce", machines=2),
    Scenario("killed", 4, 0, ("gone",), "all_reduce", machines=2, store="rank 0"),
    Scenario(MACHINE, 4, 2, ("gone", "silent"), "all_reduce", ranks=(2, 3), machines=2),
    Scenario(MACHINE, 4, 0, ("gone", "silent"), "all_reduce", ranks=(0, 1), machines=2),
    Scenario("other shape", 4, 3, ("mismatch",), "all_reduce", machines=2),
    Scenario("other order", 4, 1, ("order",), "all_reduce", machines=2),
    Scenario("raises", 4, 3, ("failed",), "all_reduce", machines=2),
    Scenario("fewer steps", 4, 2, ("finished",), "all_reduce", machines=2),
    Scenario("slow", 4, 2, ("slow",), "all_reduce", machines=2),
]


@dataclass(frozen=True)
class Outcome:
    """report: the content of its file; None if there is none. statuses: how the ranks ended. seconds: from
    the fault until the last rank had ended. orphans: ranks that had to be killed. said: by rank."""

    report: dict | None
    statuses: list[int]
    seconds: float
    orphans: list[int]
    said: list[str]

    def problems(self, scenario: Scenario) -> list[str]:
        """Return the differences from the scenario's expectation."""
        found = [f"ranks {self.orphans} had to be killed"] if self.orphans else []
        if scenario.kinds in (("slow",), ("no report",)):
            warned = f"rank {scenario.rank} (" in self.said[0] and "is slow" in self.said[0]
            warned = warned or scenario.kinds == ("no report",)
            found += [] if warned else ["no warning"]
            return found + ([] if not any(self.statuses) and self.report is None else ["it ended"])
        if self.report is None:
            return [*found, "no report"]
        report, call = self.report, self.report["call"] or {"op": ""}
        if report["kind"] not in scenario.kinds or tuple(report["ranks"]) != scenario.expected:
            found.append(f"{report['kind']} by ranks {report['ranks']}: {report['text']}")
        if call["op"] != scenario.op and not (scenario.ranks and scenario.op in report["text"]):
            found.append(f"the call is {call['op']!r}: {report['text']}")
        if sum("stacks are in" in said for said in self.said) != 1:
            found.append("the report was not printed once")
        for rank, status in enumerate(self.statuses):
            if status == 0 and not (scenario.fault == "fewer steps" and rank == scenario.rank):
                found.append(f"rank {rank} ended with status 0")
        if self.seconds > LIMIT + 3 + 2 * (scenario.machines > 1):
            found.append(f"it took {self.seconds:.1f} s")
        return found


def run_scenario(scenario: Scenario, directory: Path) -> Outcome:
    """Fork the ranks of a scenario, wait until they have ended, and collect what they left in `directory`."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    world_size, store = scenario.world_size, None
    pids = []
    for rank in range(world_size):
        pid = os.fork()
        if pid == 0:
            try:
                _live(scenario, rank, port, directory)
            finally:
                os._exit(99)
        pids.append(pid)
    if scenario.store == "launcher":  # after the forks, which its threads would not survive
        store = dist.TCPStore("localhost", port, is_master=True, wait_for_workers=False)
    statuses: dict[int, int] = {}
    deadline = time.monotonic() + 30
    while len(statuses) < world_size and time.monotonic() < deadline:
        for rank, pid in enumerate(pids):
            if rank not in statuses:
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    statuses[rank] = os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    ended, orphans = time.time(), [rank for rank in range(world_size) if rank not in statuses]
    for rank in orphans:
        os.kill(pids[rank], signal.SIGKILL)
        os.waitpid(pids[rank], 0)
    del store
    report = None
    with suppress(FileNotFoundError):
        report = json.loads((directory / "hang" / "report.json").read_text())
    said = [(directory / f"said-{rank}").read_text() for rank in range(world_size)]
    began = float((directory / "fault").read_text()) if (directory / "fault").exists() else ended
    return Outcome(
        report, [statuses.get(rank, -9) for rank in range(world_size)], ended - began, orphans, said
    )


def _live(scenario: Scenario, rank: int, port: int, directory: Path) -> None:
    """The life of a rank, to its last status."""
    torch.set_num_threads(1)
    with open(directory / f"said-{rank}", "w") as said:
        os.dup2(said.fileno(), 1)
        os.dup2(said.fileno(), 2)
    sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)
    sys.__stderr__ = sys.stderr
    if scenario.machines > 1:
        _, start = host_id()
        of = f"machine {rank * scenario.machines // scenario.world_size} of {port}"
        watch.host_id = lambda: (of, start)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(scenario.world_size), "GLOO_SOCKET_IFNAME": "lo"}
    set_default_variables(TORCH_FR_BUFFER_SIZE="256")
    os._exit(main_guard(lambda: _train(scenario, rank, port, directory)))


def _train(scenario: Scenario, rank: int, port: int, directory: Path) -> None:
    serves = rank == 0 and scenario.store == "rank 0"
    store = dist.TCPStore("localhost", port, is_master=serves, wait_for_workers=False)
    world_size = scenario.world_size
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=60)
    )
    halves = [list(range(first, first + 2)) for first in range(0, world_size, 2)]
    tp = [dist.new_group(ranks, group_desc="tp") for ranks in halves][rank // 2]
    process_status.step, process_status.phase = 1, "start"
    slow, views = scenario.fault == "slow", None
    if scenario.fault in (EXCHANGE, RAISES, SLEEPS):
        exchange = SymmetricExchange(
            dist.group.WORLD, etp=1, ep=world_size, etp_varies_first=True, timeout=60.0
        )
        views = exchange.reserve(torch.ones(1, 4), top_k=1, experts=world_size)
    if scenario.fault == UNSEEN and rank == scenario.rank:
        (directory / "fault").write_text(str(time.time()))
        os._exit(1)
    with Watchdog(directory / "hang", rank, world_size, scenario.limit, interval=0.2) as watching:
        for step in range(1, (30 if slow else STEPS) + 1):
            bad = rank == scenario.rank and step == BAD_STEP and scenario.fault != UNHEARD
            if bad:
                (directory / "fault").write_text(str(time.time()))
            if bad and scenario.fault == "fewer steps":
                return
            process_status.step, process_status.phase = step, "data"
            time.sleep(0.5 if slow and rank == scenario.rank else 0.1)  # which a loaded machine cannot blur
            process_status.phase = "forward"
            if bad and not slow:
                _fault(scenario, rank, tp, directory / "hang")
            else:
                if views is not None:
                    exchange_barrier(views.epochs, views.peer_offsets, views.rank, views.timeout)
                _collectives(tp)
            process_status.phase = "optimizer"
        if scenario.fault == UNHEARD and rank == scenario.rank:
            watching._publish = lambda: None
        elif scenario.fault == UNHEARD:
            time.sleep(3)
    dist.destroy_process_group()


def _collectives(tp: dist.ProcessGroup) -> None:
    all_reduce_(torch.ones(4), tp)
    all_reduce_(torch.ones(8), dist.group.WORLD)
    all_gather(torch.ones(2), tp)


def _fault(scenario: Scenario, rank: int, tp: dist.ProcessGroup, hang: Path) -> None:
    """Go wrong, in place of this step's collectives."""
    fault, world, other = scenario.fault, dist.group.WORLD, rank ^ 1
    if fault == MACHINE:
        for record in _records(hang):
            if record["rank"] ^ 1 == rank:
                os.kill(record["pid"], signal.SIGKILL)
    if fault in ("killed", EXCHANGE, MACHINE):
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif fault == "all are suspended and resumed":  # as by scontrol suspend
        pids = sorted((record["pid"] for record in _records(hang)), key=lambda pid: pid == os.getpid())
        subprocess.Popen(["sh", "-c", f"sleep {2 * LIMIT}; kill -CONT {' '.join(map(str, pids))}"])
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        _collectives(tp)
    elif fault in ("sleeps", SLEEPS):
        process_status.phase = "data"
        time.sleep(60)
    elif fault == "holds the interpreter":
        ctypes.PyDLL(None).sleep(60)
    elif fault in ("raises", RAISES):
        raise KeyError("the reader has no shard 7")
    elif fault == "sends what nobody receives":
        dist.send(torch.ones(4_000_000), other)
    elif fault == "receives what nobody sends":
        dist.recv(torch.ones(4), other)
    elif fault == "other order":
        all_reduce_(torch.ones(8), world)
        all_reduce_(torch.ones(4), tp)
    elif fault == "other op":
        dist.broadcast(torch.ones(4), scenario.rank, group=tp)
    elif fault == "other shape":
        all_reduce_(torch.ones(6), tp)
    elif fault == "skips a collective":
        all_reduce_(torch.ones(8), world)
        all_gather(torch.ones(2), tp)


def _records(hang: Path) -> list[dict]:
    """Return the states that the ranks have written."""
    return [json.loads(path.read_text())["record"] for path in hang.glob("rank-?????.json")]


def run(quick: bool) -> soak.Outcome:
    """Run the scenarios, or the first of each fault on two ranks."""
    outcome = soak.Outcome()
    torch.set_num_threads(1)
    chosen = [s for s in SCENARIOS if not quick or (s.world_size == 2 and s.fault in ("killed", "sleeps"))]
    progress = soak.Progress("scenarios", len(chosen))
    for number, scenario in enumerate(chosen):
        with tempfile.TemporaryDirectory() as home:
            seen = run_scenario(scenario, Path(home))
        problems = seen.problems(scenario)
        report = seen.report or {"kind": "a warning" if scenario.fault == "slow" else "none", "ranks": []}
        outcome.rows.append(
            {
                "scenario": scenario.name,
                "report": report["kind"],
                "ranks": report["ranks"],
                "right": not problems,
                "seconds to the end": round(seen.seconds, 1),
                "statuses": seen.statuses,
                "orphans": len(seen.orphans),
            }
        )
        outcome.failures += [f"{scenario.name}: {problem}" for problem in problems]
        progress.at(number)
    return outcome


if __name__ == "__main__":
    sys.exit(soak.main("hangs", run))
