"""CPU launch overhead of a call, next to torch's own: `python -m benchmarks.host_time [--out FILE]`.

Every workload runs at its smallest shape on one thread, where all of its time is that of the host: Python,
checks, the dispatcher, autograd. Ours and torch eager's same function are called in turn; the least CPU time
of each counts. Where torch needs several ops, they count together, as does a mean that both take of losses.
Functions with a counterpart in torch are also called as a program that replaces torch's calls them: with
their first arguments only ("plain"), with and without a gradient.
A layer's time is an eighth of the difference between models of nine layers and of one. Layers and training
steps stand next to the same of plain torch. Before a launch of a Triton kernel lies all that its op does
below torch's dispatcher until it has the launch's plan: for each of its launches.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F

from benchmarks.bench_train import OPTIMIZER, OneBatch
from benchmarks.cases import EAGER, OURS, TORCH, Workload
from benchmarks.measure import environment, in_turn, write_json
from benchmarks.plain import PlainGPT, plain_step
from fastmp import ops
from fastmp.config import GPTConfig, MoEConfig, TrainConfig
from fastmp.nn.gpt import GPT
from fastmp.ops import OPS
from fastmp.ops.core import launcher
from fastmp.testing.ops import samples
from fastmp.training.language import token_loss
from fastmp.training.trainer import Trainer

MOST = {"forward": 2.0, "both": 1.3}  # times torch eager's own
PLAIN = 2.0  # times torch's own, of a function called with its first arguments only
LAYERS = {"dense": 1.3, "moe": 1.5}  # times a layer and a training step of plain torch
LAUNCH = 10.0  # us before one
FAMILIES = (
    "activation", "adamw", "clamped_swiglu", "cross_entropy", "dropout", "finite", "gated", "grouped_mm",
    "latent", "linear_cross_entropy", "linear_log_probs", "norm", "permute", "quantize", "rope", "router",
    "softmax",
)  # fmt: skip


@dataclass(frozen=True)
class HostTime:
    """CPU time of one call of ours and of theirs, in microseconds, and what is wanted.

    `most` bounds ours over theirs; where there are no others, as for a launch, it bounds ours.
    """

    name: str
    direction: str
    ours_us: float
    theirs_us: float | None
    most: float

    @property
    def value(self) -> float:
        return self.ours_us / (self.theirs_us or 1.0)

    @property
    def ok(self) -> bool:
        return self.value <= self.most

    def line(self) -> str:
        start = f"{'ok  ' if self.ok else 'FAIL'} {self.name:<44} {self.direction:<8}{self.ours_us:9.1f} us"
        if self.theirs_us is None:
            return f"{start} (goal {self.most:.0f} us)"
        return f"{start}  torch {self.theirs_us:9.1f} us  {self.value:5.2f}x (goal {self.most}x)"


def least_us(calls: dict[str, Callable[[], Any]], number: int, rounds: int) -> dict[str, float]:
    """The least CPU time of one call of each, in microseconds; `number` calls are timed together."""

    def timed(call: Callable[[], Any]) -> Callable[[], float]:
        def once() -> float:
            start = time.process_time_ns()
            for _ in range(number):
                call()
            return (time.process_time_ns() - start) / number / 1e3

        return once

    for call in calls.values():
        for _ in range(5):
            call()
    times = in_turn({name: timed(call) for name, call in calls.items()}, rounds)
    return {name: min(each) for name, each in times.items()}


def of_workload(work: Workload, number: int, rounds: int) -> Iterator[HostTime]:
    """Times of a workload's directions, of each form of ours."""
    assert work.tiny is not None
    case = work.case(work.tiny, torch.float32, "cpu")
    usual = EAGER if EAGER in case.rivals else TORCH
    case.rivals |= {f"torch for {name}": call for name, call in case.counterparts.items()}
    for direction in work.directions:
        ours = [name for name in case.rivals if name.startswith(OURS)]
        theirs = {name: f"torch for {name}" if name in case.counterparts else usual for name in ours}
        calls = {name: getattr(case, direction)(name) for name in [*ours, *theirs.values()]}
        found = least_us(calls, number, rounds)
        for name in ours:
            label = case.name + name.removeprefix(OURS)
            yield HostTime(
                label, direction, found[name], found[theirs[name]], MOST.get(direction, MOST["both"])
            )


def plain_calls() -> dict[str, tuple[list[torch.Tensor], Callable[..., Any], Callable[..., Any]]]:
    """Functions by name: floating-point inputs, ours of them, and torch's."""
    x, weight, bias = torch.randn(4, 64), torch.ones(64), torch.zeros(64)
    table, target, ids = torch.randn(7, 64), torch.randint(64, (4,)), torch.randint(7, (4,))
    scores = torch.randn(1, 2, 4, 8)
    smoothed: dict[str, Any] = {"label_smoothing": 0.1}

    def linear_loss(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(F.linear(x, table), ids)

    def gated(x: torch.Tensor) -> torch.Tensor:
        gate, up = x.chunk(2, -1)
        return F.silu(gate) * up

    return {
        "layer_norm": ([x, weight, bias], ops.layer_norm, lambda x, w, b: F.layer_norm(x, (64,), w, b)),
        "rms_norm": ([x, weight], ops.rms_norm, lambda x, w: F.rms_norm(x, (64,), w, 1e-6)),
        "cross_entropy": ([x], lambda x: ops.cross_entropy(x, target), lambda x: F.cross_entropy(x, target)),
        "cross_entropy none": (
            [x],
            lambda x: ops.cross_entropy(x, target, reduction="none"),
            lambda x: F.cross_entropy(x, target, reduction="none"),
        ),
        "cross_entropy smoothed": (
            [x],
            lambda x: ops.cross_entropy(x, target, **smoothed),
            lambda x: F.cross_entropy(x, target, **smoothed),
        ),
        "linear_cross_entropy": (
            [x, table], lambda x, table: ops.linear_cross_entropy(x, table, ids), linear_loss
        ),
        "bias_gelu": ([x], ops.bias_gelu, lambda x: F.gelu(x, approximate="tanh")),
        "swiglu": ([x], ops.swiglu, gated),
        "scaled_masked_softmax": ([scores], ops.scaled_masked_softmax, lambda x: F.softmax(x, -1)),
    }  # fmt: skip


def of_plain(name: str, number: int, rounds: int) -> Iterator[HostTime]:
    """Times of a function called with its first arguments only, without and with a gradient."""
    inputs, *both = plain_calls()[name]
    needing = [each.clone().requires_grad_() for each in inputs]
    grad = torch.ones_like(both[0](*inputs))

    def trained(function: Callable[..., Any]) -> Callable[[], Any]:
        return lambda: torch.autograd.grad(function(*needing), needing, grad)

    directions = {"forward": lambda function: partial(function, *inputs), "both": trained}
    for direction, call_of in directions.items():
        found = least_us({kind: call_of(f) for kind, f in zip((OURS, TORCH), both)}, number, rounds)
        label = f"plain {name} {list(inputs[0].shape)} float32"
        yield HostTime(label, direction, found[OURS], found[TORCH], PLAIN)


def models(kind: str, num_layers: int) -> tuple[GPT, PlainGPT]:
    """Return a small GPT of ours, and the same in plain torch."""
    moe = None
    if kind == "moe":
        moe = MoEConfig(num_experts=4, top_k=2, expert_ffn_hidden_size=32, normalize_topk=True)
    sizes: dict[str, int] = {"hidden_size": 32, "num_heads": 4, "vocab_size": 128, "max_seq_len": 8}
    torch.manual_seed(0)
    activation = "gelu_tanh" if moe is None else "swiglu"
    config = GPTConfig(num_layers=num_layers, activation=activation, moe=moe, **sizes)
    ours = GPT(config)
    return ours, PlainGPT(config).copy_from(ours)


def of_layer(kind: str, number: int, rounds: int) -> HostTime:
    """Forward and backward of one layer of a small GPT."""
    tokens = torch.randint(128, (1, 8))
    calls: dict[str, Callable[[], Any]] = {}
    for num_layers in (1, 9):
        ours, plain = models(kind, num_layers)

        def call(ours: GPT = ours) -> None:
            out = ours.loss(tokens, tokens)
            (out.sum() if kind == "dense" else out.tokens.sum() + out.aux).backward()

        calls[f"{OURS} {num_layers}"] = call
        calls[f"{TORCH} {num_layers}"] = lambda plain=plain: plain(tokens, tokens).backward()
    found = least_us(calls, max(1, number // 40), 4 * rounds)  # short, to fall between other processes' work
    us, theirs = ((found[f"{name} 9"] - found[f"{name} 1"]) / 8 for name in (OURS, TORCH))
    return HostTime(f"{kind} layer", "both", us, theirs, LAYERS[kind])


def of_step(kind: str, number: int, rounds: int) -> HostTime:
    """A training step of two layers: forward, backward, clipping and AdamW."""
    ours, plain = models(kind, 2)
    data, config = OneBatch(1, 8, 128, 0), TrainConfig(steps=1 << 30, global_batch_size=1, eval_interval=0)
    trainer = Trainer(ours, data, token_loss, config, optimizer=OPTIMIZER)
    calls = {
        OURS: lambda: trainer.train_step().loss,
        TORCH: plain_step(plain, plain, data.batch, OPTIMIZER, torch.float32),
    }
    found = least_us(calls, max(1, number // 10), rounds)
    return HostTime(f"{kind} step", "step", found[OURS], found[TORCH], LAYERS[kind])


class _Ready:
    """A planned launch of a kernel that takes no time."""

    device = 0

    def current_device(self) -> int:
        return 0

    def launch(self, programs: int, arguments: tuple) -> None:
        """Do nothing."""


def of_launch(name: str, number: int, rounds: int) -> HostTime:
    """Host work before the launch of an op's Triton kernel, for Hopper's tile sizes.

    On its largest sample of those that nothing is copied of: a copy would be a launch, too.
    """

    def elements(sample: tuple) -> int:
        tensors = [a for a in sample if isinstance(a, torch.Tensor)]
        return sum(t.numel() for t in tensors) if all(t.is_contiguous() for t in tensors) else 0

    arguments = max(samples(name, device="cpu", dtype=torch.float32), key=elements)
    call, plans = partial(OPS[name].implementations["triton"], *arguments), {}

    def plan(key: Any, kernel: Any, programs: int, arguments: tuple, constants: dict[str, Any]) -> None:
        plans[key] = _Ready()

    with (
        launcher.intercept_launches(plan, 90),
        mock.patch.object(launcher, "_plans", plans),
        mock.patch.object(launcher, "_plan", plan),
    ):
        with mock.patch.object(launcher, "launch") as launch:
            call()
        us = least_us({name: call}, number, rounds)[name]
    return HostTime(name, "launch", us / launch.call_count, None, LAUNCH)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.host_time", description=__doc__)
    parser.add_argument("--out", type=Path, help="write the results there, as JSON")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--number", type=int, default=200, help="calls that are timed together")
    parser.add_argument("--only", default="", metavar="NAME", help="workloads and layers with NAME in theirs")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    found, described = [], environment("cpu")

    def add(each: HostTime) -> None:
        """Print a time, and write all so far."""
        print(each.line(), flush=True)
        found.append(each)
        if options.out:
            entries = [{**asdict(one), "value": round(one.value, 3), "ok": one.ok} for one in found]
            result = {**described, "number": options.number, "rounds": options.rounds, "calls": entries}
            write_json(options.out, result)

    for family in FAMILIES:
        for work in importlib.import_module(f"benchmarks.bench_{family}").WORKLOADS:
            if options.only in work.name:
                for each in of_workload(work, options.number, options.rounds):
                    add(each)
    for name in plain_calls():
        if options.only in f"plain {name}":
            for each in of_plain(name, options.number, options.rounds):
                add(each)
    for kind in LAYERS:
        if options.only in f"{kind} layer":
            add(of_layer(kind, options.number, options.rounds))
        if options.only in f"{kind} step":
            add(of_step(kind, options.number, options.rounds))
    for name, op in OPS.items():
        if options.only in name and "triton" in op.implementations:
            add(of_launch(name, options.number, options.rounds))
    return 0 if all(each.ok for each in found) else 1


if __name__ == "__main__":
    sys.exit(main())
