"""SIGKILL at random points of saving: no acknowledged step is lost, and nothing is unreadable.

A run saves after every step, in half of the cases asynchronously. One of its ranks is killed at a random
time, also while it loads. The next run must go on from the last step that was said to be saved, or from a
later one, with the bits of a run that nobody killed. It must not have passed over a damaged checkpoint.
"""

from __future__ import annotations

import contextlib
import io
import os
import random
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tiny
from soak import Outcome, Progress, main

from fastmp.testing.ranks import RankError, run_ranks

STEPS = 60  # of a run, after which the next one starts anew
SAVES = 10  # within which a kill falls
CASES = {"1 rank": 500, "dp2": 10, "tp2": 10, "pp2": 10, "ep2": 10, "tp2 x dp2": 10}


class Notes:
    """The log of a run: says in a file which steps are saved."""

    def __init__(self, file: Path | None) -> None:
        self._file = file

    def note(self, text: str) -> None:
        if self._file is not None and ": saved " in text:
            append(self._file, text.split()[1].rstrip(":"))

    def progress(self, step: int) -> None: ...

    def due(self, step: int) -> bool:
        return False

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        yield


def append(path: Path, line: str) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(descriptor, f"{line}\n".encode())  # at once: the next moment may be the last one
    os.close(descriptor)


def lines_of(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def recipe_of(home: Path, layout: str, number: int) -> Any:
    options = {**tiny.LAYOUTS[layout][1], "train.steps": STEPS, "checkpoint.interval": 1}
    options |= {} if number % 2 else {"checkpoint.no-asynchronous": None}
    return tiny.make_recipe(home / "tokens", home / layout, **options)


def undisturbed(rank: int, world_size: int, home: Path, layout: str) -> tuple[list[str], float]:
    """Hashes of this rank's state after 0, 1, ... steps; and the seconds that a step with a save takes."""
    recipe, found = recipe_of(home, layout, 0), []
    trainer, began = tiny.make_trainer(recipe, tiny.make_runtime(rank, world_size)), time.monotonic()
    trainer.train(Notes(None), before_step=lambda step: found.append(tiny.digest(trainer)))
    return found, (time.monotonic() - began) / STEPS


def rank_main(rank: int, world_size: int, home: Path, layout: str, number: int, delay: float | None) -> str:
    """Resume, say with what, and go on until a rank is killed after `delay` seconds; None: only resume."""
    draw = random.Random(f"{layout} {number}")
    victim, early = draw.randrange(world_size), draw.random() < 0.1
    if early and rank == victim and delay is not None:
        tiny.kill_after(delay)
    trainer = tiny.make_trainer(recipe_of(home, layout, number), tiny.make_runtime(rank, world_size))
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        trainer.resume()
    append(home / f"resumed-{rank}", f"{trainer.step} {tiny.digest(trainer)} {said.getvalue().strip()}")
    if delay is not None:
        if rank == victim and not early:
            tiny.kill_after(delay)
        trainer.train(Notes(home / "saved" if rank == 0 else None))
    return ""


def judge(home: Path, ranks: int, expected: list[list[str]], saved: int) -> tuple[int | None, str]:
    """The step from which a run went on, and what is wrong with it, when step `saved` had been acknowledged.

    None where it was killed before all ranks had loaded.
    """
    found = []
    for rank in range(ranks):
        for line in lines_of(home / f"resumed-{rank}"):
            step, bits, said = line.split(" ", 2)
            found.append(int(step))
            if said:
                return None, f"rank {rank} said {said}"
            if int(step) < saved:
                return None, f"rank {rank} resumed from step {step}, though {saved} was saved"
            if bits != expected[rank][int(step)]:
                return None, f"rank {rank} has other bits after step {step}"
    if len(set(found)) > 1:
        return None, f"ranks resumed from steps {found}"
    return (found[0], "") if len(found) == ranks else (None, "")


def run_layout(home: Path, layout: str, kills: int) -> tuple[dict[str, Any], list[str]]:
    """Kill a run again and again; each time the next run looks at what is there, the last one only looks."""
    ranks = tiny.LAYOUTS[layout][0]
    reference = run_ranks(undisturbed, ranks, home, layout, timeout=120)
    expected, seconds = [each[0] for each in reference], max(each[1] for each in reference)
    progress, failures, began = Progress(layout, kills), [], time.monotonic()
    killed = resumed = number = 0
    over = anew = True  # the run has come to its end, or it is the last one; nothing is to be gone on with
    while killed < kills or not over:
        if anew:
            shutil.rmtree(home / layout, ignore_errors=True)
            (home / "saved").unlink(missing_ok=True)
        for rank in range(ranks):
            (home / f"resumed-{rank}").unlink(missing_ok=True)
        saved = max(map(int, lines_of(home / "saved")), default=0)
        over = killed == kills
        delay = None if over else random.Random(f"{layout} {number}").uniform(0, SAVES * seconds)
        try:
            run_ranks(rank_main, ranks, home, layout, number, delay, timeout=120)
        except RankError as error:
            killed += "SIGKILL" in str(error)
            if "SIGKILL" not in str(error):
                failures.append(f"{layout} {number}: {error}")
        step, problem = judge(home, ranks, expected, saved)
        failures += [f"{layout} {number}: {problem}"] if problem else []
        resumed += step is not None
        anew = bool(problem) or (step or 0) > STEPS - 2 * SAVES
        number += 1
        progress.at(killed)
    row = {"layout": layout, "kills": killed, "resumed": resumed, "failures": len(failures)}
    return {**row, "seconds": round(time.monotonic() - began)}, failures


def run(quick: bool) -> Outcome:
    outcome = Outcome()
    with tiny.workshop() as home:
        for layout, kills in ({"1 rank": 12, "dp2": 3} if quick else CASES).items():
            row, failures = run_layout(home, layout, kills)
            outcome.rows.append(row)
            outcome.failures += failures
            print(row, flush=True)
    return outcome


if __name__ == "__main__":
    sys.exit(main("kills", run))
