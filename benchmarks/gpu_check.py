"""Correctness and speed on this GPU: `python -m benchmarks.gpu_check --out FILE` until nothing is left.

A call takes under ten minutes. FILE is one JSON object, written after every row. A later call with the same
FILE goes on where the one before it stopped: rows that were made on the same device from the same sources are
not made again. Phases:

- correctness: every implementation of every op, and every public function, against float64 on memory that is
  poisoned with NaN.
- functions: public functions in turn with their rivals, in CUDA graphs and as called.
- kernels: ops alone in CUDA graphs, after a comparison with the reference at the shape that is timed.
- recipes: recipes of configs/ that one GPU trains, for 60 steps each.
- sanitizer: compute-sanitizer's memcheck, racecheck and initcheck over a small pass, only if it is named.

What is checked or timed is compiled before by processes on all cores. Each family runs in a process of its
own, so that a kernel that faults costs one row. What is wrong is not timed.

It needs torch, numpy, triton and fastmp.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import itertools
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks import correct, gpu_recipes, gpu_rows, sanitizer
from benchmarks.cases import families
from benchmarks.gpu_rows import Item, Job
from benchmarks.measure import Ceilings, environment, write_json
from benchmarks.report import size

ROOT = Path(__file__).resolve().parents[1]
BUDGET = 540.0  # seconds of a call
COMMAND = (sys.executable, "-m", "benchmarks.gpu_rows")
CHECK = (sys.executable, "-m", "benchmarks.correct")
PRECOMPILE = (sys.executable, "-m", "benchmarks.precompile")
PHASES = ("correctness", *gpu_rows.PHASES, "recipes")
_SAME = ("device", "versions", "sources")  # what rows must share to stand in one file
_STUCK = 120.0  # seconds after which an item that the end of the budget interrupts is not tried again
_COMPILING = 0.4  # the share of what time is left that compiling may take
_CHECKING = 0.6  # the share of what time is left then that the checks may take
_GIB_EACH = 10  # of the GPU's memory, for each process that compiles


Rows = list[dict[str, Any]]


class Budget:
    """The seconds of a call."""

    def __init__(self, seconds: float) -> None:
        self.until = time.monotonic() + seconds

    def left(self) -> float:
        return max(0.0, self.until - time.monotonic())


def sources() -> str:
    """Return a digest of the product's and the benchmarks' sources: a copy of a tree may have no commit."""
    digest = hashlib.sha256()
    for folder, pattern in (("fastmp", "**/*.py"), ("csrc", "**/*.*"), ("benchmarks", "*.py")):
        for path in sorted((ROOT / folder).glob(pattern)):
            digest.update(str(path.relative_to(ROOT)).encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def begin(out: Path | None, described: dict[str, Any]) -> dict[str, Any]:
    """Return the result to go on with: that in the file, or an empty one, and the file is put aside."""
    fresh = {"environment": described, "ok": True, "correctness": [], "sanitizer": [], "ceilings": {}}
    fresh |= {"functions": [], "kernels": [], "recipes": [], "done": [], "left": []}
    if out is None or not out.exists():
        return fresh
    try:
        found = json.loads(out.read_text())
        known = [found["environment"][name] for name in _SAME]
    except (ValueError, KeyError, TypeError):
        known = []
    if known == [described[name] for name in _SAME] and fresh.keys() <= found.keys():
        return found
    aside = out.replace(out.with_name(f"{out.name}.before"))
    print(f"gpu_check: {out} is of another device or other sources: it is now {aside.name}", file=sys.stderr)
    return fresh


def write(result: dict[str, Any], out: Path | None) -> None:
    if out is not None:
        write_json(out, result)


def compile_checks(families: Sequence[str], seconds: float, folder: Path) -> None:
    """Compile the families' kernels on all cores; the checks compile what is not done in time."""
    log = folder / "precompile.log"
    with log.open("w") as file:
        process = subprocess.Popen(
            [*PRECOMPILE, "--phase", "correctness", "--families", *families],
            cwd=ROOT, start_new_session=True, stdout=file, stderr=subprocess.STDOUT,
        )  # fmt: skip
    try:
        status = process.wait(seconds)
    except subprocess.TimeoutExpired:
        sanitizer.stop(process)
        status = f"stopped after {seconds:.0f} s"
    if status:
        reason = f"{status}: {_last_line(log)}"
        print(f"gpu_check: not all kernels were compiled beforehand: {reason}", file=sys.stderr)


def correctness(
    device: str, families: Sequence[str], seconds: float, folder: Path
) -> Iterator[tuple[str, Rows, bool]]:
    """Yield (family, its rows, whether it ended) as the families end; all are checked at once.

    A process that dies is a row too. A family that takes too long has the rows that it made in time.
    """
    until = time.monotonic() + seconds
    running = {}
    for family in families:
        out, log = folder / f"{family}.jsonl", folder / f"{family}.log"
        command = [*CHECK, family, "--device", device, "--out", str(out)]
        with log.open("w") as file:
            streams = {"stdout": file, "stderr": subprocess.STDOUT}
            process = subprocess.Popen(command, cwd=ROOT, start_new_session=True, **streams)
        running[family] = process, out, log
    while running:
        time.sleep(0.1)
        out_of_time = time.monotonic() > until
        for family, (process, out, log) in [*running.items()]:
            if process.poll() is None and not out_of_time:
                continue
            del running[family]
            in_time = process.poll() is not None
            sanitizer.stop(process)
            rows, complete = _rows_of(family, out)
            if in_time and not complete:
                why = f"status {process.returncode}: {_last_line(log)}"
                rows.append({"family": family, "ok": False, "raised": why})
            yield family, rows, in_time


def _rows_of(family: str, out: Path) -> tuple[Rows, bool]:
    """Return the rows that `benchmarks.correct` has written, and whether they are all."""
    written = out.read_text().split("\n")[:-1] if out.exists() else []  # a line without its end is left out
    lines = [json.loads(line) for line in written]
    complete = bool(lines) and "end" in lines[-1]
    return [{"family": family, **line} for line in lines if "end" not in line], complete


def _last_line(log: Path) -> str:
    return (log.read_text(errors="replace").strip().splitlines() or [""])[-1]


class Timing:
    """Processes that do jobs of `gpu_rows`, whose rows go into the result as they come."""

    def __init__(
        self, result: dict[str, Any], budget: Budget, folder: Path, save: Callable[[], None]
    ) -> None:
        self.result, self.budget, self.folder, self.save = result, budget, folder, save
        self.logs = itertools.count()
        self.next: tuple[subprocess.Popen, Path] | None = None

    def spawn(self) -> tuple[subprocess.Popen, Path]:
        """Start a process that waits for a job, and return it with its log."""
        log = self.folder / f"rows{next(self.logs)}.log"
        environment = {**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "1"}  # they run on all cores already
        with log.open("w") as errors:
            process = subprocess.Popen(
                COMMAND,
                cwd=ROOT, env=environment, start_new_session=True, text=True,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors,
            )  # fmt: skip
        return process, log

    def start(self, job: Job, seconds: float) -> tuple[subprocess.Popen, threading.Timer, Path]:
        """Start a process that does the job and is stopped after so many seconds."""
        (process, log), self.next = self.next or self.spawn(), None
        assert process.stdin is not None
        process.stdin.write(job.encode())
        process.stdin.close()
        timer = threading.Timer(seconds, sanitizer.stop, (process,))
        timer.start()
        return process, timer, log

    def close(self) -> None:
        """End the process that waits for a job that has not come."""
        if self.next is not None:
            sanitizer.stop(self.next[0])

    def compile(self, job: Job, processes: int) -> None:
        """Compile what the job's items need, the shapes of one op or function in one process."""
        units: dict[tuple[str, str], list[Item]] = {}
        for item in job.items:
            units.setdefault((item.phase, item.name), []).append(item)
        shares = [[*itertools.chain(*[*units.values()][i::processes])] for i in range(processes)]
        shares = [sorted(share, key=job.items.index) for share in shares if share]  # what is timed first
        seconds = _COMPILING * self.budget.left()
        running = [
            self.start(replace(job, items=tuple(share), compile_only=True), seconds) for share in shares
        ]
        for process, timer, _ in running:
            assert process.stdout is not None
            process.stdout.read()
            process.wait()
            timer.cancel()

    def run(self, job: Job) -> None:
        """Do a job; a new process goes on after the item that ended the one before it."""
        pending = {item.key: item for item in job.items}
        while self.budget.left() > 0:
            process, timer, log = self.start(replace(job, items=tuple(pending.values())), self.budget.left())
            self.next = self.spawn()  # importing takes seconds, while this one works
            current, since, before = None, time.monotonic(), len(pending)
            assert process.stdout is not None
            for line in process.stdout:
                message = json.loads(line)
                if "begin" in message:
                    current, since = pending[message["begin"]], time.monotonic()
                    self.forget(current)
                elif "row" in message and current is not None:
                    self.add(current, message["row"])
                elif "end" in message:
                    current = self.finish(pending.pop(message["end"]))
                else:
                    self.result["ceilings"] = message["ceilings"]
            status, took = process.wait(), time.monotonic() - since
            timer.cancel()
            out_of_time = self.budget.left() <= 0
            if not pending or (out_of_time and (current is None or took < _STUCK)):
                return
            if current is not None or len(pending) == before:  # else it ended between two items
                lost = current or next(iter(pending.values()))
                why = f"not done after {took:.0f} s" if out_of_time else f"status {status}: {_last_line(log)}"
                self.add(lost, {**lost.what, "raised": why})
                self.finish(pending.pop(lost.key))

    def forget(self, item: Item) -> None:
        """Drop rows of an item that a former call could not finish."""
        rows = self.result[item.phase]
        rows[:] = [row for row in rows if row["item"] != item.key]

    def add(self, item: Item, row: dict[str, Any]) -> None:
        self.result[item.phase].append({"item": item.key, **row})
        self.result["ok"] &= "raised" not in row or ("rival" in row and not row["rival"].startswith("fastmp"))
        self.save()

    def finish(self, item: Item) -> None:
        self.result["done"].append(item.key)
        self.result["left"].remove(item.key)
        self.save()


def check(
    device: str,
    result: dict[str, Any],
    *,
    phases: Sequence[str] = PHASES,
    only: Sequence[str] = (),
    seconds: float = BUDGET,
    tiny: bool = False,
    save: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Do what `result` does not hold yet, and return it; `save` is called after each row.

    "ok" says that nothing is wrong so far, "left" what there was no time for.
    """
    budget = Budget(seconds)
    timed = gpu_rows.items([p for p in phases if p in gpu_rows.PHASES], only, tiny=tiny)
    timed = [item for item in timed if item.key not in result["done"]]
    checked = [
        f for f in correct.families() if f"correctness {f}" not in result["done"] and (not only or f in only)
    ]
    checked = checked if "correctness" in phases else []
    recipes = gpu_recipes.RECIPES[: 1 if tiny else None] if "recipes" in phases else ()
    trained = [name for name in recipes if f"recipe {name}" not in result["done"]]
    result["left"] = [
        *(f"correctness {family}" for family in checked),
        *(item.key for item in timed),
        *(f"recipe {name}" for name in trained),
    ]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if checked and torch.device(device).type == "cuda":
            compile_checks(checked, _COMPILING * budget.left(), folder)
        for family, rows, ended in correctness(device, checked, _CHECKING * budget.left(), folder):
            others = [row for row in result["correctness"] if row["family"] != family]
            result["correctness"] = others + rows
            result["ok"] &= all(row["ok"] for row in rows)
            if ended:
                result["done"].append(f"correctness {family}")
                result["left"].remove(f"correctness {family}")
            save()
        if "sanitizer" in phases:
            result["sanitizer"] = sanitizer.run(
                ROOT, folder, budget.left(), [*filter(correct.families().__contains__, only)]
            )
            result["ok"] &= bool(result["sanitizer"]) and all(row["ok"] for row in result["sanitizer"])
            save()
        with contextlib.closing(Timing(result, budget, folder, save)) as timing:
            if timed:
                _time(device, timed, timing, tiny)
        for name in trained:
            if budget.left() > 0:
                _train(result, name, folder, budget.left(), tiny)
                save()
    return result


def _train(result: dict[str, Any], name: str, folder: Path, seconds: float, tiny: bool) -> None:
    """Train a recipe and put its row into the result."""
    row = gpu_recipes.train(name, folder, seconds, tiny=tiny)
    result["recipes"] = [*(each for each in result["recipes"] if each["recipe"] != name), row]
    result["ok"] &= "raised" not in row
    result["done"].append(f"recipe {name}")
    result["left"].remove(f"recipe {name}")


def _time(device: str, timed: Sequence[Item], timing: Timing, tiny: bool) -> None:
    """Compile and time the items, a family's in one process."""
    result = timing.result
    wrong = {(r["op"], r["backend"]) for r in result["correctness"] if "backend" in r and not r["ok"]}
    job = Job(device, wrong=tuple(sorted(wrong)), tiny=tiny)
    if not result["ceilings"]:
        timing.run(job)
    if not result["ceilings"]:
        print("gpu_check: the ceilings could not be measured, so nothing is timed", file=sys.stderr)
        return
    rates = {name: result["ceilings"][name] for name in Ceilings.__dataclass_fields__}
    job = replace(job, ceilings=Ceilings(**rates))
    if job.on_gpu:
        memory = torch.cuda.get_device_properties(device).total_memory >> 30
        timing.compile(
            replace(job, items=tuple(timed)), min(os.cpu_count() or 1, max(1, memory // _GIB_EACH))
        )
    for _, some in itertools.groupby(timed, key=lambda item: item.family):
        if timing.budget.left() > 0:
            timing.run(replace(job, items=tuple(some)))


def report(result: dict[str, Any]) -> list[str]:
    """Return the result as lines to read."""
    described, checked = result["environment"], result.get("correctness", [])
    lines = [f"{described['device']}, torch {described['versions']['torch']}, commit {described['commit']}"]
    for row in (r for r in checked if not r["ok"]):
        what = row.get("op") or row.get("function") or row["family"]
        name = " ".join([what, *(row[key] for key in ("backend", "dtype") if key in row)])
        why = row.get("raised") or f"error {row['error']:.1e}, bound {row['bound']:.1e}"
        if row.get("wrong_draws"):
            why += f", wrong draws {row['wrong_draws']}"
        lines.append(f"{'RAISED' if 'raised' in row else 'WRONG'} {name}: {why}")
    lines.append(f"{sum(r['ok'] for r in checked)} of {len(checked)} checks are right")
    for row in result.get("sanitizer", ()):
        found = row.get("raised") or f"{row['errors']} errors " + " | ".join(row.get("first", ()))
        lines.append(f"compute-sanitizer {row['tool']}: {found}".rstrip())
    for name, value in result.get("ceilings", {}).items():
        values = value.items() if isinstance(value, dict) else [("", value)]
        lines += [f"{name} {kind} {figure:.4g}".replace("  ", " ") for kind, figure in values]
    for row in result.get("kernels", ()):
        name = f"{row['op']} {list(row['shape'])} {row.get('backend', '')}".rstrip()
        if "raised" in row:
            lines.append(f"RAISED {name}: {row['raised']}")
            continue
        times = f"{row['ms'] * 1e3:10.1f} us {row['gbs']:8.0f} GB/s {_shares(row)}"
        lines.append(f"{name:<60} {times} {size(row['extra_bytes'])} extra{_changed(row)}")
    for row in result.get("functions", ()):
        name = " ".join(row[key] for key in ("case", "direction", "rival") if key in row)
        if "raised" in row:
            lines.append(f"RAISED {name}: {row['raised']}")
            continue
        peer = "" if row["over_peer"] is None else f" {row['over_peer']:6.2f}x best peer"
        times = f"{row['ms']:10.3f} ms {_shares(row)}{peer}"
        lines.append(f"{name:<60} {times} {size(row['extra_bytes'])} extra [{row['timing']}]{_changed(row)}")
    for row in result.get("recipes", ()):
        figures = row.get("raised") or f"{row['tokens_per_second']:,.0f} tokens/s, loss {row['loss']:.4f}"
        lines.append(f"recipe {row['recipe']:<53} {figures}")
    if left := result.get("left"):
        lines.append(f"{len(left)} left, the first is {left[0]}: the same command again goes on with it")
    return lines


def _shares(row: dict[str, Any]) -> str:
    sustained = "" if "of_sustained" not in row else f", {row['of_sustained']:.1%} of sustained"
    return f"{row['of_floor']:6.1%} of best{sustained}"


def _changed(row: dict[str, Any]) -> str:
    return "".join(f" CHANGED: {change}" for change in row.get("changed", ()))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_check",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    every = sorted({*correct.families(), *families()})
    named = (*PHASES, "sanitizer")
    parser.add_argument("--out", type=Path, help="the file to go on with and to write, as JSON")
    parser.add_argument(
        "--phase", nargs="+", choices=named, default=PHASES, help="default: all but sanitizer"
    )
    parser.add_argument("--families", nargs="+", choices=every, default=(), help="default: all")
    parser.add_argument("--seconds", type=float, default=BUDGET, help=f"of this call (default {BUDGET:.0f})")
    parser.add_argument("--device", default="cuda", help="cpu, with --tiny, tries the program itself")
    parser.add_argument("--tiny", action="store_true", help="one small shape of each, briefly")
    options = parser.parse_args(arguments)
    if torch.device(options.device).type == "cuda" and not torch.cuda.is_available():
        print("gpu_check: no GPU: torch.cuda.is_available() is False", file=sys.stderr)
        return 2
    result = begin(options.out, {**environment(options.device), "sources": sources()})
    chosen = {"phases": options.phase, "only": options.families, "tiny": options.tiny}
    check(options.device, result, **chosen, seconds=options.seconds, save=partial(write, result, options.out))
    write(result, options.out)
    print("\n".join(report(result)))
    return 0 if result["ok"] and not result["left"] else 1


if __name__ == "__main__":
    sys.exit(main())
