"""Gradients that are not finite: a step that has one is skipped on every rank, and nothing else changes.

Each case puts NaN, an infinity or an overflow of float16 into one element of one parameter's gradient, on one
rank in one microbatch. Parameters, optimizer state, buffers and the optimizer's count of steps must be the
same bits on all ranks. All ranks must decide alike, and name that parameter and, where it can be told, the
rank. The step after it must be a step like any other.
"""

from __future__ import annotations

import math
import random
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tiny
import torch
from soak import Outcome, Progress, main

from fastmp.distributed.collectives import group_size
from fastmp.tensor_parallel.attributes import parallel_attributes
from fastmp.testing.ranks import run_ranks
from fastmp.training.trainer import Trainer

CASES = {  # layout: ranks, options
    "1 rank": tiny.LAYOUTS["1 rank"],
    "1 rank, float16": (1, {"train.dtype": "float16"}),
    "dp2, ZeRO shards": tiny.LAYOUTS["dp2"],
    "dp2, whole states": (2, {"optimizer.no-shard": None}),
    "dp2, float16": (2, {"train.dtype": "float16"}),
    "dp2, muon": (2, {"optimizer.name": "muon"}),
    "tp2": tiny.LAYOUTS["tp2"],
    "tp2, sequence parallel": (2, {"tp": 2, "parallel.sequence-parallel": None}),
    **{layout: tiny.LAYOUTS[layout] for layout in ("pp2", "ep2", "tp2 x dp2", "pp2 x ep2")},
}
VALUES = {"nan": math.nan, "+inf": math.inf, "-inf": -math.inf, "overflow": 2.0}  # times the largest number


@dataclass(frozen=True)
class Injection:
    """A non-finite value: its parameter and element are drawn as fractions of those of `rank`."""

    rank: int
    parameter: float
    element: float
    microbatch: int
    value: str


def draw_injections(layout: str, cases: int) -> list[Injection]:
    draw, (ranks, options) = random.Random(layout), CASES[layout]
    values = list(VALUES)[: 4 if options.get("train.dtype") == "float16" else 3]
    batch = tiny.MODEL["train.global-batch-size"] // tiny.MODEL["data.micro-batch-size"]
    return [
        Injection(
            draw.randrange(ranks), draw.random(), draw.random(), draw.randrange(batch), draw.choice(values)
        )
        for _ in range(cases)
    ]


class Injector:
    """Puts a value into a gradient of this rank, once, when it is armed.

    Autograd brings the gradient of a parameter to a hook, in its own dtype, or None where a kernel has added
    it to `main_grad` itself: then the value is put there.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.trainer, self.parameters = trainer, trainer.grads.parameters
        self.seen: dict[str, int] = {}  # calls of hooks in this step
        self.brought: set[str] = set()  # parameters whose gradients come to hooks
        self.pending: tuple[str, int, int, str] | None = None
        for name, param in self.parameters.items():
            param.register_hook(lambda grad, name=name: self._hook(name, grad))
        self._train = trainer.runner.train
        trainer.runner.train = self._run

    def begin(self, injection: Injection) -> tuple[str, int]:
        """Arm it on the rank of `injection`; returns the parameter and how many ranks share its gradient."""
        groups, names = self.trainer.groups, list(self.parameters)
        if injection.value == "overflow":
            names = [name for name in names if name in self.brought]  # an overflow needs 16 bits
        name = names[int(injection.parameter * len(names))]
        param = self.parameters[name]
        at = injection.microbatch % self.seen[name]
        self.pending = (name, int(injection.element * param.numel()), at, injection.value)
        own = parallel_attributes(param)
        shared = group_size(groups.tp) if not own.tensor_model_parallel else 1
        return name, max(shared, group_size(groups.pp) if name == "word_embedding.weight" else 1)

    def _run(self, *arguments: Any) -> Any:
        self.seen = {}
        return self._train(*arguments)

    def _hook(self, name: str, grad: torch.Tensor | None) -> torch.Tensor | None:
        self.seen[name] = self.seen.get(name, 0) + 1
        if grad is not None:
            self.brought.add(name)
        if self.pending is None or self.pending[0] != name or self.seen[name] - 1 != self.pending[2]:
            return grad
        _, element, _, value = self.pending
        self.pending = None
        if grad is None:
            self.parameters[name].main_grad.view(-1)[element] = VALUES[value]
            return None
        grad = grad.clone(memory_format=torch.contiguous_format)
        flat = grad.view(-1)
        flat[element] = VALUES[value] if value != "overflow" else torch.finfo(grad.dtype).max
        if value == "overflow":
            flat[element] *= VALUES[value]
        return grad


def changed(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> list[str]:
    return [
        name
        for name in before.keys() | after.keys()
        if name not in before or name not in after or not torch.equal(before[name], after[name])
    ]


def rank_main(rank: int, world_size: int, tokens: Path, home: Path, layout: str, cases: int) -> list[tuple]:
    """Return this rank's view of each case: finite, the log's line, unexpected changes, `begin`."""
    recipe = tiny.make_recipe(tokens, home, **CASES[layout][1])
    trainer, found = tiny.make_trainer(recipe, tiny.make_runtime(rank, world_size)), []
    injector = Injector(trainer)
    for _ in range(3):
        trainer.train_step()
    trainer._skipped.read(all_steps=True)
    for injection in draw_injections(layout, cases):
        name, sharers = injector.begin(injection) if rank == injection.rank else ("", 0)
        before, counts = tiny.state_of(trainer), trainer.optimizer.state_dict()
        counts = int(counts["step"]), int(counts["skipped_steps"])
        result = trainer.train_step()
        lines = trainer._skipped.read(all_steps=True)
        wrong = changed(before, tiny.state_of(trainer))
        now = trainer.optimizer.state_dict()
        if (int(now["step"]), int(now["skipped_steps"])) != (counts[0], counts[1] + 1):
            wrong.append("the counts of steps")
        if injector.pending is not None:
            wrong.append(f"{injector.pending} was not put in")
        clean = trainer.train_step()
        if not torch.isfinite(clean.grad_norm) or trainer._skipped.read(all_steps=True):
            wrong.append("the step after it")
        if not changed(before, tiny.state_of(trainer)):
            wrong.append("nothing in the step after it")
        found.append((bool(torch.isfinite(result.grad_norm)), "; ".join(lines), wrong, name, sharers))
    return found


def judge(layout: str, injection: Injection, seen: list[tuple]) -> str:
    """Return the error of a case from the views of all ranks, or an empty text."""
    finite, lines, wrong, _, _ = zip(*seen)
    name, sharers = seen[injection.rank][3:]
    where = f"on rank {injection.rank} "
    summed = "optimizer.no-shard" in CASES[layout][1]
    if any(finite) or any(wrong):
        return f"finite {finite}, changed {wrong}"
    if len(set(lines)) > 1:
        return f"ranks say different things: {lines}"
    end = ", summed over ranks," if summed else " "
    if f"the gradient of {name}{end}" not in lines[0] or not (summed or sharers > 1 or where in lines[0]):
        return f"{name} {where}was hit, the log says {lines[0]!r}"
    return ""


def run(quick: bool) -> Outcome:
    outcome = Outcome()
    with tiny.workshop() as home:
        tokens, cases = home / "tokens", 2 if quick else 28
        layouts = ["1 rank, float16", "dp2, ZeRO shards"] if quick else list(CASES)
        progress = Progress("injections", cases * len(layouts))
        for layout in layouts:
            ranks = CASES[layout][0]
            seen = run_ranks(rank_main, ranks, tokens, home, layout, cases, timeout=300)
            wrong = [
                f"{layout} {number} {injection}: {problem}"
                for number, (injection, *each) in enumerate(zip(draw_injections(layout, cases), *seen))
                if (problem := judge(layout, injection, each))
            ]
            outcome.rows.append({"layout": layout, "injections": cases, "leaks": len(wrong)})
            outcome.failures += wrong
            progress.at(sum(row["injections"] for row in outcome.rows))
    return outcome


if __name__ == "__main__":
    sys.exit(main("nonfinite", run))
