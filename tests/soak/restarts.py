"""Killed and started again, a run ends with the bits of one that nobody disturbed.

Most cases fork the ranks of a layout from this process, kill one of them at a random time, and start all
again with `--resume auto`, one to three times. In five cases `fastmp launch --max-restarts` starts the ranks
anew by itself, where one has been killed at a chosen point. Parameters, optimizer state, counts and random
states of every rank, and all losses of metrics.jsonl, must be those of an undisturbed run; and no start may
go back behind a step that was said to be saved.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tiny
from soak import Outcome, Progress, main

import fastmp.apps.train_main as train_main
from fastmp.apps.train import main as train_command
from fastmp.config import Recipe
from fastmp.optim.adamw import AdamW
from fastmp.testing.ranks import RankError, run_ranks
from fastmp.training.data import tokenwriter
from fastmp.training.metrics import read_metrics
from fastmp.training.trainer import Trainer

ROOT = Path(__file__).parents[2]
STEPS, INTERVAL = 14, 3
LAYOUTS = ("dp2", "tp2", "pp2", "ep2", "tp2 x dp2", "pp2 x ep2")
POINTS = ("first rank", "last rank", "saving", "optimizer", "building data")


def options_of(layout: str, name: str) -> dict[str, Any]:
    steps = {"train.steps": STEPS, "checkpoint.interval": INTERVAL, "train.log-interval": 1}
    return {**tiny.LAYOUTS[layout][1], **steps, "train.name": name}


def recipe_of(layout: str, home: Path, name: str) -> Recipe:
    options = options_of(layout, name)
    return tiny.make_recipe(home / "tokens", home / layout, resume="auto", **options)


@contextlib.contextmanager
def trainer_of_the_run() -> Iterator[list[Trainer]]:
    """The trainer that `fastmp train` makes inside; no picture is drawn, and hardly any sample is written."""
    made: list[Trainer] = []

    class Kept(Trainer):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            made.append(self)

    before = train_main.Trainer, train_main.SAMPLE_TOKENS, train_main._report
    train_main.Trainer, train_main.SAMPLE_TOKENS, train_main._report = Kept, 1, lambda *_: None
    try:
        yield made
    finally:
        train_main.Trainer, train_main.SAMPLE_TOKENS, train_main._report = before


def train(rank: int, world_size: int, recipe: Recipe, said: Path, victim: int, delay: float) -> str:
    """Train to the end, unless this is the `victim`, which has `delay` seconds; returns `tiny.digest`."""
    if rank == victim:
        tiny.kill_after(delay)
    with open(said, "a") as file, contextlib.redirect_stdout(file), trainer_of_the_run() as made:
        train_main.train(recipe, tiny.make_runtime(rank, world_size))
    return tiny.digest(made[0])


def curve(run: Path) -> list[tuple]:
    """Return the rows of metrics.jsonl by step, without times."""
    records = [record for record in read_metrics(run / "metrics.jsonl") if record["kind"] == "train"]
    return [tuple(record[key] for key in ("step", "loss", "grad_norm", "lr")) for record in records]


def lost(said: str) -> str:
    """Say where a start went back behind a step that had been saved; an empty text where none did."""
    saved = 0
    for kind, step in re.findall(r"(saved|resumed after step|starting at step)(?: .*step-0*|\D*)(\d+)", said):
        if kind == "saved":
            saved = int(step)
        elif int(step) < saved:
            return f"went back to step {step}, though {saved} was saved"
    return ""


def forked_case(home: Path, layout: str, number: int, expected: tuple, seconds: float) -> tuple[int, str]:
    """Kill a run once or several times; how often that was, and what is wrong with its end."""
    draw, kills = random.Random(f"{layout} {number}"), 0
    while not kills:  # once more, sooner, where the run was over before
        kills, problem = start_again(home, layout, f"run-{number}", draw, expected, seconds)
        seconds /= 2
        number += 1000
    return kills, problem


def start_again(
    home: Path, layout: str, name: str, draw: random.Random, expected: tuple, seconds: float
) -> tuple[int, str]:
    ranks, kills, planned = tiny.LAYOUTS[layout][0], 0, draw.choice((1, 1, 2, 3))
    recipe, said = recipe_of(layout, home, name), home / f"{layout}-{name}.txt"
    for attempt in range(planned + 1):
        victim = draw.randrange(ranks) if attempt < planned else -1
        try:
            bits = run_ranks(train, ranks, recipe, said, victim, draw.uniform(0.05, 1) * seconds, timeout=120)
            break
        except RankError as error:
            if "SIGKILL" not in str(error):
                return 1, str(error)
            kills += 1
    ends = (bits, curve(home / layout / name))
    problem = lost(said.read_text())
    if not problem and ends != expected:
        problem = "ends with other bits" if ends[0] != expected[0] else "has other losses"
    return kills, problem


def run_forked(home: Path, cases: int, outcome: Outcome) -> None:
    progress, done = Progress("forked cases", cases), 0
    for index, layout in enumerate(LAYOUTS):
        numbers = range(index, cases, len(LAYOUTS))
        if not numbers:
            continue
        ranks, kills, began, wrong = tiny.LAYOUTS[layout][0], 0, time.monotonic(), 0
        recipe, said = recipe_of(layout, home, "undisturbed"), home / "undisturbed.txt"
        bits = run_ranks(train, ranks, recipe, said, -1, 0.0, timeout=120)
        expected, seconds = (bits, curve(home / layout / "undisturbed")), time.monotonic() - began
        for number in numbers:
            found, problem = forked_case(home, layout, number, expected, seconds)
            kills, wrong, done = kills + found, wrong + bool(problem), done + 1
            outcome.failures += [f"{layout} {number}: {problem}"] if problem else []
            progress.at(done)
        row = {"restarted by": "a fork", "case": layout, "cases": len(numbers), "kills": kills}
        outcome.rows.append(row | {"failures": wrong, "seconds": round(time.monotonic() - began)})
        print(outcome.rows[-1], flush=True)


def dies_at(point: str, home: Path) -> None:
    """Arrange that this rank kills itself at `point`, in the first start of a job."""
    rank, last = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]) - 1
    calls = 0

    def dying(function: Any, after: int) -> Any:
        def counted(*arguments: Any, **options: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls > after:
                (home / "killed").touch()
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*arguments, **options)

        return counted

    if os.environ["TORCHELASTIC_RESTART_COUNT"] != "0" or rank != (last if point == "last rank" else 0):
        return
    if point.endswith("rank"):
        Trainer._run_step = dying(Trainer._run_step, 7)
    elif point == "saving":
        os.fsync = dying(os.fsync, 9)  # data and index of the first checkpoint are synced by then
    elif point == "optimizer":
        AdamW.update = dying(AdamW.update, 8)
    elif point == "building data":
        tokenwriter.SplitWriter.finish = dying(tokenwriter.SplitWriter.finish, 1)


def rank_of_a_launcher(point: str, home: Path, arguments: list[str]) -> int:
    """Run a rank of a job of `fastmp launch`: `fastmp train`, with its digest in a file."""
    dies_at(point, home)
    with trainer_of_the_run() as made:
        status = train_command(arguments)
        if made:
            (home / f"digest-{os.environ['RANK']}").write_text(tiny.digest(made[0]))
    return status


def launched_case(home: Path, point: str) -> str:
    """Return the error at the end of a job whose rank was killed at `point`."""
    layout = "dp2" if point in ("first rank", "optimizer") else "tp2"
    seen = {}
    for name in ("undisturbed", point):
        folder = home / name.replace(" ", "-")
        folder.mkdir(exist_ok=True)
        options = {**tiny.MODEL, **options_of(layout, "run"), "train.run-dir": folder}
        options |= {} if point == "building data" else {"data.path": home / "tokens"}
        launcher = [sys.executable, "-m", "fastmp", "launch", "--nproc-per-node", "2", "--max-restarts", "2"]
        own = [__file__, "--rank", name, str(folder), *tiny.arguments_of(options)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            [*launcher, *own], env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        if done.returncode:
            return f"{name}: status {done.returncode}: {done.stdout[-2000:]}"
        if (folder / "killed").exists() != (name == point):
            return f"{name}: killed: {(folder / 'killed').exists()}"
        if problem := lost(done.stdout):
            return problem
        seen[name] = [(folder / f"digest-{rank}").read_text() for rank in range(2)], curve(folder / "run")
        if name == point and curve(folder / "run") != seen["undisturbed"][1]:
            return "has other losses"
    return "" if seen[point] == seen["undisturbed"] else "ends with other bits"


def run_launched(home: Path, points: tuple[str, ...], outcome: Outcome) -> None:
    for point in points:
        folder, began = home / "launched" / point.replace(" ", "-"), time.monotonic()
        folder.mkdir(parents=True)
        (folder / "tokens").symlink_to(home / "tokens")
        problem = launched_case(folder, point)
        outcome.failures += [f"{point}: {problem}"] if problem else []
        row = {"restarted by": "fastmp launch", "case": point, "cases": 1, "kills": 1}
        outcome.rows.append(
            row | {"failures": int(bool(problem)), "seconds": round(time.monotonic() - began)}
        )
        print(outcome.rows[-1], flush=True)


def run(quick: bool) -> Outcome:
    outcome = Outcome()
    with tiny.workshop() as home:
        run_forked(home, 2 if quick else 40, outcome)
        run_launched(home, POINTS[2:3] if quick else POINTS, outcome)
    return outcome


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        sys.exit(rank_of_a_launcher(sys.argv[2].replace("-", " "), Path(sys.argv[3]), sys.argv[4:]))
    sys.exit(main("restarts", run))
