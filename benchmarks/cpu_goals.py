"""The CPU goals, pass or fail: `python -m benchmarks.cpu_goals [--out FILE] [--rounds N]`.

Speed-ups over plain torch in the same process, called in turn, by the least CPU time of each over the rounds.
Fresh outputs are mostly page faults, so their goals depend on whether the system grants huge pages. fastmp
may not be slower than torch.compile.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType

import torch

from benchmarks.cases import COMPILE, EAGER, Case, Goal, Workload
from benchmarks.measure import copy_bandwidth, cpu_ms, environment, in_turn


@dataclass(frozen=True)
class Outcome:
    goal: Goal
    case: str
    wanted: float
    ours_ms: float
    eager_ms: float
    compile_ms: float
    floor_ms: float

    @property
    def factor(self) -> float:
        return self.eager_ms / self.ours_ms

    @property
    def ok(self) -> bool:
        return self.factor >= self.wanted and self.compile_ms / self.ours_ms >= self.goal.over_compile

    def line(self) -> str:
        return (
            f"{'ok  ' if self.ok else 'FAIL'} {self.case:<40} {self.goal.direction:<8} {self.goal.rival:<16}"
            f" {self.ours_ms:8.1f} ms  eager {self.eager_ms:8.1f} ms"
            f"  {self.factor:5.2f}x (goal {self.wanted}x)"
            f"  {self.compile_ms / self.ours_ms:5.2f}x torch.compile  floor {self.floor_ms:.1f} ms"
        )


def measure(
    case: Case, goals: Sequence[Goal], huge_pages: bool, rounds: int, bandwidth: float
) -> list[Outcome]:
    """All goals of one case, with plain torch and torch.compile in the same rounds.

    The floor is the bytes to move over `bandwidth`, that of a copy into memory that is already there.
    """
    outcomes = []
    for direction in dict.fromkeys(goal.direction for goal in goals):
        wanted = [goal for goal in goals if goal.direction == direction]
        calls = {
            name: getattr(case, direction)(name) for name in (*(g.rival for g in wanted), EAGER, COMPILE)
        }
        for call in calls.values():
            call()
        times = in_turn({name: lambda call=call: cpu_ms(call) for name, call in calls.items()}, rounds)
        best = {name: min(values) for name, values in times.items()}
        num_bytes = case.forward_bytes + (case.backward_bytes if direction == "both" else 0)
        floor = num_bytes / bandwidth * 1e3
        for goal in wanted:
            factor = goal.factor if huge_pages else goal.without_huge_pages
            rivals = best[goal.rival], best[EAGER], best[COMPILE]
            outcomes.append(Outcome(goal, case.name, factor, *rivals, floor))
    return outcomes


def families() -> list[ModuleType]:
    """The bench_<family>.py that have goals."""
    names = sorted(path.stem for path in Path(__file__).parent.glob("bench_*.py"))
    modules = [importlib.import_module(f"benchmarks.{name}") for name in names]
    return [module for module in modules if getattr(module, "GOALS", ())]


def goals_by_case() -> Iterator[tuple[Workload, str, list[Goal]]]:
    """(workload, dtype, its goals), in the order of the files."""
    for module in families():
        works = {work.name: work for work in module.WORKLOADS}
        for name, dtype in dict.fromkeys((goal.workload, goal.dtype) for goal in module.GOALS):
            yield works[name], dtype, [g for g in module.GOALS if (g.workload, g.dtype) == (name, dtype)]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cpu_goals", description=__doc__)
    parser.add_argument("--out", type=Path, help="write the results there, as JSON")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", default="", metavar="NAME", help="workloads with NAME in theirs")
    options = parser.parse_args(arguments)
    described = environment("cpu")
    print(f"{described['device']}, {described['threads']} threads, huge pages: {described['huge_pages']}")
    outcomes = []
    bandwidth = copy_bandwidth("cpu", 1 << 28)
    for work, dtype, goals in goals_by_case():
        if not any(options.only in goal.workload for goal in goals):
            continue
        case = work.make(*work.cpu[0], getattr(torch, dtype), "cpu")
        for outcome in measure(case, goals, described["huge_pages"], options.rounds, bandwidth):
            print(outcome.line(), flush=True)
            outcomes.append(outcome)
    if options.out:
        rows = [{**asdict(o), "factor": round(o.factor, 3), "ok": o.ok} for o in outcomes]
        described["copy_gbs"] = bandwidth / 1e9
        options.out.write_text(
            json.dumps({**described, "rounds": options.rounds, "goals": rows}, indent=2) + "\n"
        )
    return 0 if all(outcome.ok for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
