"""Shared by the tests of training: a tiny run of the command, data to learn, a watch on copies, a GPU run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fastmp.config import BertConfig, GPTConfig, MoEConfig, TrainConfig
from fastmp.distributed.collectives import all_gather_
from fastmp.distributed.rng import RngTracker
from fastmp.nn import Documents, Placement
from fastmp.nn.gpt import GPT
from fastmp.training.language import token_loss
from fastmp.training.metrics import read_metrics
from fastmp.training.trainer import Trainer

ROOT = Path(__file__).parents[2]


TINY = {
    "model.num-layers": 1,
    "model.hidden-size": 16,
    "model.num-heads": 2,
    "model.max-seq-len": 32,
    "data.seq-len": 32,
    "data.micro-batch-size": 4,
    "train.global-batch-size": 8,
    "train.steps": 6,
    "train.eval-interval": 3,
    "train.log-interval": 1,
    "optimizer.warmup-steps": 2,
}


def arguments(run_dir, tokens, name="tiny", **changes):
    options = {**TINY, "data.path": tokens, "train.run-dir": run_dir, "train.name": name}
    options |= {key.replace("__", ".").replace("_", "-"): value for key, value in changes.items()}
    return command_line(options)


def command_line(options):
    """Return `--KEY VALUE` for each entry of a table."""
    return [part for key, value in options.items() for part in (f"--{key}", str(value))]


def start(options, *launcher):
    """Start `fastmp train` in a session of its own; its output and errors are one pipe."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [sys.executable, "-u", *launcher, "-m", "fastmp", "train", *options],
        env=environment,
        cwd=ROOT,
        text=True,
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def read_until(process, sign):
    """Read the output of a process up to a line with `sign`."""
    lines = []
    for line in process.stdout:
        lines.append(line)
        if sign in line:
            return lines
    raise AssertionError("".join(lines))


def losses(run):
    return [(r["step"], r["loss"]) for r in read_metrics(run / "metrics.jsonl") if r["kind"] == "train"]


DENSE = GPTConfig(
    num_layers=4,
    hidden_size=32,
    num_heads=4,
    vocab_size=131,
    max_seq_len=16,
    init_std=0.1,
    activation="swiglu",
)  # tied: a table in the first stage and one in the last
EXPERTS = replace(
    DENSE,
    moe=MoEConfig(
        num_experts=8,
        top_k=2,
        expert_ffn_hidden_size=16,
        score="sigmoid",
        normalize_topk=True,
        expert_bias=True,
        bias_update_rate=0.05,
        aux_loss=0.02,
        z_loss=0.001,
    ),
)

SHARED_EXPERT = replace(
    EXPERTS, moe=replace(EXPERTS.moe, sequence_aux_loss=0.01, shared_expert_ffn_hidden_size=16)
)


PRE = GPTConfig(
    **{"num_layers": 4, "hidden_size": 32, "num_heads": 4, "vocab_size": 131, "max_seq_len": 16},
    init_std=0.1,
    activation="gelu",
    bert=BertConfig(),
)
MAX_MASKED = 5  # of a sample of `BertSamples`


def saved_tensors(trainer):
    """All that a checkpoint holds of this rank's model and optimizer."""
    trainer.optimizer.gather.wait()
    state, random = trainer.saving.state.to_load()
    found = dict(random)
    for name, tensor in state.items():
        if name not in random and not name.startswith("counts/"):
            for at, part in tensor.shards:
                found[name if len(tensor.shards) == 1 else f"{name} at {at}"] = part
    return found


def gather_main_grads(grads):
    """Give all ranks the sums that each has of its shards: then every `main_grad` is whole."""
    for flat in grads.flats:
        for number in range(len(flat.layout.buckets)):
            if flat.layout.num_ranks > 1:
                all_gather_(flat.bucket(number), flat.group)


class Samples:
    """Counting modulo 17 from somewhere, in steps of up to `strides`; each sample a function of its number.

    Of the targets, 0, 3, 6 or 9 of 16 are ignored, so that microbatches hold very different numbers of
    tokens.
    """

    def __init__(self, micro_batch_size, strides=1):
        self.micro_batch_size, self.strides = micro_batch_size, strides

    def sample(self, number):
        start = torch.randint(17, (1,), generator=torch.Generator().manual_seed(1000 + number))
        ids = (start + (1 + number % self.strides) * torch.arange(17)) % 17
        targets = ids[1:].clone()
        targets[16 - number % 4 * 3 :] = -100
        return ids[:-1], targets

    def samples(self, first):
        tokens, targets = zip(*(self.sample(first + i) for i in range(self.micro_batch_size)))
        return {"tokens": torch.stack(tokens), "targets": torch.stack(targets)}

    def batch(self, step, microbatch, num_microbatches, dp_rank, dp_size):
        slot = (step * num_microbatches + microbatch) * dp_size + dp_rank
        return self.samples(slot * self.micro_batch_size)

    def validation_batches(self, dp_rank, dp_size, *, max_batches=None):
        for number in range(2 if max_batches is None else min(2, max_batches)):
            yield self.samples(10**6 + (number * dp_size + dp_rank) * self.micro_batch_size)


class PackedSamples(Samples):
    """`Samples` in which each row is some documents; there is room for `max_documents` of a microbatch."""

    LENGTHS = ((16,), (5, 1, 10), (3, 13), (1, 1, 14))

    def __init__(self, micro_batch_size, strides=1, max_documents=None):
        super().__init__(micro_batch_size, strides)
        self.max_documents = max_documents

    def lengths(self, number):
        return self.LENGTHS[number * 7 // 4 % len(self.LENGTHS)]

    def samples(self, first):
        lengths = [self.lengths(first + i) for i in range(self.micro_batch_size)]
        positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])
        documents = Documents.from_position_ids(positions, max_documents=self.max_documents)
        return {**super().samples(first), "documents": documents}


class BertSamples(Samples):
    """Rows of 16 tokens, of several lengths, each a function of its number; up to MAX_MASKED are masked."""

    def sample(self, number):
        generator = torch.Generator().manual_seed(number)
        length, places = 16 - number % 3 * 4, torch.arange(16)
        tokens = torch.randint(3, 131, (16,), generator=generator)
        masked = torch.zeros(16, dtype=torch.bool)
        masked[torch.randperm(length, generator=generator)[: 2 + number % 4]] = True
        return {
            "tokens": tokens.masked_fill(masked, 1).masked_fill(places >= length, 0),
            "targets": tokens.masked_fill(~masked, -100),
            "token_types": (places >= length // 2).long(),
            "padding_mask": places >= length,
            "sentence_order": torch.tensor(number % 2),
        }

    def samples(self, first):
        rows = [self.sample(first + i) for i in range(self.micro_batch_size)]
        return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


class NoDeviceCopies(TorchDispatchMode):
    """Refuses to copy from the device to the host. Reading a value raises under fakes by itself."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and args[0].device != result.device:
            assert args[0].device.type == "cpu", f"copy from {args[0].device} to {result.device}"
        return result


def check_on_a_gpu(run_dir, model, data, optimizer, bound):
    """In bfloat16 it learns (the loss falls below `bound` of the first), a step makes no call that waits for
    the GPU, and a resumed run goes on bitwise."""

    def make(seed):
        rng = RngTracker(seed, device="cuda")
        gpt = GPT(model, Placement(rng=rng, device="cuda", dtype=torch.bfloat16))
        config = TrainConfig(global_batch_size=8, steps=40, run_dir=str(run_dir))
        return Trainer(gpt, data, token_loss, config, optimizer=optimizer, rng=rng)

    trainer = make(1)
    losses = [trainer.train_step().loss]
    torch.cuda.set_sync_debug_mode("error")
    try:
        losses += [trainer.train_step().loss for _ in range(29)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert losses[-1] < bound * losses[0]
    trainer.save()
    expected = [trainer.train_step().loss.item() for _ in range(3)]
    again = make(2)
    assert again.resume()
    assert [again.train_step().loss.item() for _ in range(3)] == expected


# Notices of ranks that share a pipe, whose lines may be cut into pieces.
_GLOO = re.compile(
    r"\[Gloo\] Rank (?:\[Gloo\] Rank | is connected to | peer ranks\. "
    r"|Expected number of connected peer ranks is : |[\d\n])*"
)


def run_fastmp(*arguments: object) -> str:
    """Run a command in a process of its own; return its output without the notices of torch 2.10's gloo."""
    command = [sys.executable, "-m", "fastmp", *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    return _GLOO.sub("", done.stdout)
