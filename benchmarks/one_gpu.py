"""Train small models on parallel layouts, eager and in CUDA graphs, and compare them with one rank.

`python -m benchmarks.one_gpu` runs on GPUs, which ranks share where there are fewer: one GPU shows what NCCL,
streams, captured collectives and symmetric memory do between ranks. Where there is no GPU, ranks are gloo's.
Everything is in float64, so that only the order of sums differs. It prints a line a case, and `--out` writes
the results; the status is 1 if a case fails. There is no baseline, and times mean nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.measure import environment
from fastmp.config import GPTConfig, GraphConfig, MoEConfig, OptimizerConfig, ParallelConfig, TrainConfig
from fastmp.distributed.collectives import all_gather_, group_rank, group_size
from fastmp.distributed.grid import RankGrid
from fastmp.distributed.groups import ParallelGroups
from fastmp.distributed.rng import RngTracker
from fastmp.distributed.runtime import init, nccl_version
from fastmp.optim.named_params import named_parameters
from fastmp.testing.parallel import full_tensor
from fastmp.testing.ranks import RankError, lacks_gpus, run_ranks
from fastmp.training.language import gpt_and_loss
from fastmp.training.trainer import Trainer

CLOSE = 1e-10  # of `difference`
STEPS, SEQUENCES, MICRO_BATCH = 8, 16, 4  # of a step and of a microbatch, over all data-parallel ranks
TIMEOUT = 200.0  # seconds of a case
AXES = ("tp", "cp", "pp", "ep", "etp")
DENSE = GPTConfig(
    **{"num_layers": 4, "hidden_size": 32, "num_heads": 4, "vocab_size": 131, "max_seq_len": 16},
    **{"activation": "swiglu", "linear_bias": False, "init_std": 0.1},
)  # tied embeddings, and a vocabulary that is padded
MOE = MoEConfig(
    **{"num_experts": 8, "top_k": 2, "expert_ffn_hidden_size": 16, "shared_expert_ffn_hidden_size": 16},
    **{"aux_loss": 0.02, "z_loss": 0.001, "expert_bias": True, "score": "sigmoid", "normalize_topk": True},
)
OPTIMIZER = OptimizerConfig(lr=3e-3, warmup_steps=2, bucket_size=2000)  # some buckets for each layer
GRAPHS = {
    "eager": None,
    "graphs": GraphConfig(enabled=True),
    "full_step": GraphConfig(enabled=True, scope=("full_step",)),
}


@dataclass(frozen=True)
class Case:
    """A parallel layout of a model without experts, or with experts behind `dispatcher`."""

    name: str
    ranks: int
    layout: ParallelConfig
    dispatcher: str = ""

    @property
    def config(self) -> GPTConfig:
        return replace(DENSE, moe=replace(MOE, dispatcher=self.dispatcher)) if self.dispatcher else DENSE

    @property
    def modes(self) -> Sequence[str]:
        """Return the names of GRAPHS in which it runs: an all-to-all stays outside of graphs."""
        return list(GRAPHS)[: 2 if self.dispatcher == "alltoall" else 3]


def _cases() -> Iterator[Case]:
    zero_bubble, v = {"schedule": "zero_bubble"}, {"vpp": 2, "schedule": "dualpipe_v"}
    overlap: dict[str, Any] = {"overlap_experts": True}
    for ranks, name, sizes, options in (
        (2, "dp", {}, {}),
        (2, "tp sp", {"tp": 2}, {"sequence_parallel": True}),
        (2, "cp", {"cp": 2}, {}),
        (2, "pp", {"pp": 2}, {}),
        (2, "pp zero_bubble", {"pp": 2}, zero_bubble),
        (2, "pp dualpipe_v", {"pp": 2}, v),
        (4, "tp pp", {"tp": 2, "pp": 2}, {}),
    ):
        yield Case(name, ranks, ParallelConfig(**sizes, **options))
    for dispatcher in ("alltoall", "symmetric"):
        for ranks, name, sizes, options in (
            (2, "ep", {"ep": 2}, {}),
            (2, "ep overlap", {"ep": 2}, overlap),
            (4, "tp ep etp1", {"tp": 2, "ep": 2, "etp": 1}, {}),
            (4, "pp ep overlap", {"pp": 2, "ep": 2}, {"vpp": 2, **overlap}),
        ):
            yield Case(f"{name} {dispatcher}", ranks, ParallelConfig(**sizes, **options), dispatcher)


CASES = sorted(_cases(), key=lambda case: case.ranks)


class Result(NamedTuple):
    """Losses of all steps and the whole gradients of the last one, as far as a rank has them."""

    losses: Tensor
    gradients: dict[str, Tensor]
    num_graphs: int
    failure: str | None  # the reason why there are no graphs


class Samples:
    """Sequences that count modulo 17, each a function of its number; some targets are ignored."""

    def __init__(self, micro_batch_size: int) -> None:
        self.micro_batch_size = micro_batch_size

    def batch(
        self, step: int, microbatch: int, num_microbatches: int, dp_rank: int, dp_size: int
    ) -> dict[str, Tensor]:
        first = ((step * num_microbatches + microbatch) * dp_size + dp_rank) * self.micro_batch_size
        numbers = torch.arange(first, first + self.micro_batch_size)[:, None]
        ids = (7 * numbers + (1 + numbers % 3) * torch.arange(17)) % 17
        targets = ids[:, 1:].where(torch.arange(16) < 16 - numbers % 4 * 3, -100)
        return {"tokens": ids[:, :-1], "targets": targets}


def train(rank: int, world_size: int, config: GPTConfig, layout: ParallelConfig, mode: str) -> Result:
    """Train some steps on this rank; for `run_ranks`."""
    device, groups = init().device, ParallelGroups.alone()
    if world_size > 1:
        sizes = {axis: getattr(layout, axis) for axis in AXES}
        groups = ParallelGroups.create(RankGrid(world_size=world_size, **sizes))
    rng = RngTracker(5, tp_rank=group_rank(groups.tp), device=device)
    model, loss = gpt_and_loss(config, groups, layout, rng=rng, dtype=torch.float64, device=device)
    trainer = Trainer(
        model,
        Samples(MICRO_BATCH // group_size(groups.dp)),
        loss,
        TrainConfig(steps=40, global_batch_size=SEQUENCES, eval_interval=0),
        optimizer=OPTIMIZER,
        groups=groups,
        rng=rng,
        graphs=GRAPHS[mode],
        overlap_experts=layout.overlap_experts,
    )
    losses = torch.tensor([trainer.train_step().loss for _ in range(STEPS)], dtype=torch.float64)
    gradients = dict(_gradients(trainer, config.vocab_size))
    graphs = trainer.graphs
    made = (0, None) if graphs is None else (graphs.num_graphs, getattr(graphs, "failure", None))
    trainer.close()
    return Result(losses, gradients, *made)


def _gradients(trainer: Trainer, vocab_size: int) -> Iterator[tuple[str, Tensor]]:
    """Yield the whole gradients of this rank's parameters, without the padding of the vocabulary."""
    groups = trainer.groups
    for flat in trainer.grads.flats:  # with ZeRO-1 each rank has the sums of its shard only
        for number in range(len(flat.layout.buckets) if flat.layout.num_ranks > 1 else 0):
            all_gather_(flat.bucket(number), flat.group)
    for name, param in named_parameters(trainer.runner.chunks):
        name = name.removeprefix("chunk1.")
        whole = full_tensor(param.main_grad, param, groups.tp, etp_group=groups.etp, ep_group=groups.ep)
        yield name, whole[:vocab_size].cpu() if name == "word_embedding.weight" else whole.cpu()


def difference(results: Sequence[Result], whole: Result) -> float:
    """Return the largest |found - expected| / (1 + |expected|) of all ranks; inf if a gradient is missing."""
    pairs = [(result.losses, whole.losses) for result in results]
    for result in results:
        pairs += [(grad, whole.gradients[name]) for name, grad in result.gradients.items()]
    complete = whole.gradients.keys() == {name for result in results for name in result.gradients}
    if not complete or any(found.shape != expected.shape for found, expected in pairs):
        return torch.inf
    far = [((found - expected).abs() / (1 + expected.abs())).max().item() for found, expected in pairs]
    return max(torch.inf if number != number else number for number in far)


def run(case: Case, mode: str, whole: Result, device: str) -> dict[str, Any]:
    """Run a case in processes of its own and return its row."""
    row = {"case": case.name, "ranks": case.ranks, "mode": mode}
    start = time.monotonic()
    try:
        arguments = case.config, case.layout, mode
        results = run_ranks(train, case.ranks, *arguments, timeout=TIMEOUT, device=device)
    except RankError as error:
        return {**row, "ok": False, "seconds": round(time.monotonic() - start, 1), "said": str(error)}
    error, graphs = difference(results, whole), min(result.num_graphs for result in results)
    reasons = [result.failure for result in results if result.failure]
    ok = error <= CLOSE and not reasons and (mode == "eager" or graphs > 0)
    numbers = {"error": error, "graphs": graphs, "seconds": round(time.monotonic() - start, 1)}
    return {**row, "ok": ok, **numbers, "said": "".join(reasons[:1])}


def line(row: dict[str, Any]) -> str:
    """Format a row for people."""
    found = f"error {row['error']:.0e}, {row['graphs']:2} graphs" if "error" in row else "failed"
    start = f"{'ok' if row['ok'] else 'FAIL':4} {row['ranks']} ranks  {row['case']:24}{row['mode']:10}"
    return f"{start}{found}, {row['seconds']:.1f} s  {row['said'].partition(chr(10))[0]}".rstrip()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.one_gpu", description=__doc__.split("\n\n")[0]
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=(2, 4), help="numbers of ranks (2 4)")
    parser.add_argument("--only", default="", metavar="NAME", help="cases whose name contains NAME")
    parser.add_argument("--mode", nargs="+", default=list(GRAPHS), choices=GRAPHS, help="modes (all)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the results here as JSON")
    options = parser.parse_args(argv)
    chosen = [case for case in CASES if case.ranks in options.ranks and options.only in case.name]
    if not chosen:
        parser.error(f"no case contains {options.only!r}; the cases: {', '.join(c.name for c in CASES)}")
    reason = lacks_gpus(max(case.ranks for case in chosen))
    device = "cpu" if reason else "cuda"
    print(f"on CPU ranks: {reason}" if reason else f"on {torch.cuda.device_count()} GPU(s)", flush=True)
    references: dict[str, Result] = {}
    rows = []
    for case in chosen:
        kind = "experts" if case.dispatcher else "dense"
        if kind not in references:
            config = replace(case.config, moe=MOE) if case.dispatcher else case.config
            arguments = config, ParallelConfig(), "eager"
            (references[kind],) = run_ranks(train, 1, *arguments, timeout=TIMEOUT, device=device)
        for mode in case.modes:
            if mode in options.mode:
                rows.append(run(case, mode, references[kind], device))
                print(line(rows[-1]), flush=True)
                if "error" not in rows[-1]:  # the traceback, or the stacks
                    print(rows[-1]["said"], file=sys.stderr, flush=True)
    failed = sum(not row["ok"] for row in rows)
    print(f"{len(rows) - failed} of {len(rows)} cases are as one rank")
    if options.out:
        nccl = "" if reason else "{}.{}".format(*nccl_version())
        content = {**environment(device), "nccl": nccl, "bound": CLOSE, "cases": rows}
        options.out.write_text(json.dumps(content, indent=1) + "\n")
    return int(failed > 0)


if __name__ == "__main__":
    # New processes import `train` from this module, which `__main__` is not.
    from benchmarks import one_gpu

    sys.exit(one_gpu.main())
