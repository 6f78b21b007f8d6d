"""The goals on a CPU, each met or not: `python -m benchmarks.cpu_goals [--out FILE] [--rounds N]`.

A goal is a speed-up over plain torch in the same process. Rivals are called in turn, and the least CPU time
of each over the rounds counts. New outputs cost mostly page faults, so their goals depend on whether the
system grants huge pages. fastmp may not be slower than torch.compile either. Where a goal is about memory,
fastmp may not hold more than the share that the goal names.
"""

from __future__ import annotations

import argparse
import importlib
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from benchmarks.cases import COMPILE, Case, CpuGoal, Workload
from benchmarks.compare import Row, compare
from benchmarks.measure import Ceilings, environment, measure_ceilings, write_json


@dataclass(frozen=True)
class Outcome:
    """A goal and its measurement; `compile` is None without torch.compile among the baselines."""

    goal: CpuGoal
    case: str
    wanted: float
    ours: Row
    other: Row
    compile: Row | None

    @property
    def factor(self) -> float:
        return self.other.ms / self.ours.ms

    @property
    def over_compile(self) -> float | None:
        return None if self.compile is None else self.compile.ms / self.ours.ms

    @property
    def ok(self) -> bool:
        fast = self.factor >= self.wanted and (self.over_compile or math.inf) >= self.goal.over_compile
        most = math.inf if self.goal.extra_bytes is None else self.goal.extra_bytes * self.other.extra_bytes
        return fast and self.ours.extra_bytes <= most

    def line(self) -> str:
        goal = self.goal
        line = (
            f"{'ok  ' if self.ok else 'FAIL'} {self.case:<40} {goal.direction:<8} {goal.rival:<16}"
            f" {self.ours.ms:8.1f} ms  {goal.over} {self.other.ms:8.1f} ms"
            f"  {self.factor:5.2f}x (goal {self.wanted}x)"
        )
        if self.over_compile is not None:
            line += f"  {self.over_compile:5.2f}x torch.compile"
        if goal.extra_bytes is not None:
            share = self.ours.extra_bytes / max(self.other.extra_bytes, 1)
            line += f"  {share:.3f} of its extra bytes (goal {goal.extra_bytes})"
        return line + f"  floor {self.ours.floor_ms:.1f} ms"

    def record(self) -> dict[str, Any]:
        """Return the outcome as an entry of the result file."""
        return {
            "goal": asdict(self.goal),
            "case": self.case,
            "wanted": self.wanted,
            "factor": round(self.factor, 3),
            "over_compile": None if self.over_compile is None else round(self.over_compile, 3),
            "ok": self.ok,
            "ours": self.ours.columns(),
            "other": self.other.columns(),
            "compile": None if self.compile is None else self.compile.columns(),
        }


def measure(
    case: Case, goals: Sequence[CpuGoal], huge_pages: bool, rounds: int, ceilings: Ceilings
) -> list[Outcome]:
    """Measure all goals of one case, with plain torch and torch.compile in the same rounds.

    The floor is the time of a copy into memory that is already mapped.
    """
    outcomes = []
    for direction in dict.fromkeys(goal.direction for goal in goals):
        wanted = [goal for goal in goals if goal.direction == direction]
        names = dict.fromkeys([g.rival for g in wanted] + [g.over for g in wanted])
        if COMPILE in case.rivals:
            names[COMPILE] = None
        compared = compare(case, direction, ceilings, "cpu", names=list(names), rounds=rounds)
        if compared.failed:
            raise RuntimeError(f"{case.name} {direction}: {compared.failed}")
        rows = compared.rows
        outcomes += [
            Outcome(
                goal,
                case.name,
                goal.factor if huge_pages else goal.without_huge_pages,
                rows[goal.rival],
                rows[goal.over],
                rows.get(COMPILE),
            )
            for goal in wanted
        ]
    return outcomes


def families() -> list[ModuleType]:
    """Return the modules bench_<family>.py that have goals."""
    names = sorted(path.stem for path in Path(__file__).parent.glob("bench_*.py"))
    modules = [importlib.import_module(f"benchmarks.{name}") for name in names]
    return [module for module in modules if getattr(module, "GOALS", ())]


def goals_by_case() -> Iterator[tuple[Workload, tuple, str, list[CpuGoal]]]:
    """Yield (workload, shape, dtype, its goals), in the order of the files."""
    for module in families():
        works = {work.name: work for work in module.WORKLOADS}
        cases: dict[tuple, list[CpuGoal]] = {}
        for goal in module.GOALS:
            cases.setdefault((goal.workload, goal.shape, goal.dtype), []).append(goal)
        for (name, shape, dtype), goals in cases.items():
            yield works[name], works[name].cpu[shape], dtype, goals


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cpu_goals", description=__doc__)
    parser.add_argument("--out", type=Path, help="write the results there, as JSON")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", default="", metavar="NAME", help="workloads with NAME in theirs")
    options = parser.parse_args(arguments)
    described = environment("cpu")
    print(f"{described['device']}, {described['threads']} threads, huge pages: {described['huge_pages']}")
    outcomes = []
    ceilings = measure_ceilings("cpu")
    for work, shape, dtype, goals in goals_by_case():
        if not any(options.only in goal.workload for goal in goals):
            continue
        case = work.case(shape, getattr(torch, dtype), "cpu")
        for outcome in measure(case, goals, described["huge_pages"], options.rounds, ceilings):
            print(outcome.line(), flush=True)
            outcomes.append(outcome)
        if options.out:  # whole after each case
            goals = [outcome.record() for outcome in outcomes]
            result = {**described, "rounds": options.rounds, "ceilings": asdict(ceilings), "goals": goals}
            write_json(options.out, result)
    return 0 if all(outcome.ok for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
