"""A whole training step of a dense GPT: fastmp's Trainer, plain torch with its AdamW, and that compiled.

In bfloat16 ours has bfloat16 parameters with float32 masters and gradients; plain torch has float32
parameters under autocast, which is what a user writes for the same precision.
"""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.cases import COMPILE, EAGER, OURS, Case, Workload, compiled, title
from benchmarks.measure import name_of
from benchmarks.plain import PlainGPT, plain_step
from fastmp.config import GPTConfig, OptimizerConfig, TrainConfig
from fastmp.nn import Placement
from fastmp.nn.gpt import GPT, flops_per_token
from fastmp.training.language import token_loss
from fastmp.training.trainer import Trainer

OPTIMIZER = OptimizerConfig(lr=1e-4, schedule="constant", warmup_steps=0)


class OneBatch:
    """The same random batch every time: the time does not depend on the tokens."""

    def __init__(self, batch_size: int, seq_len: int, vocab: int, seed: int) -> None:
        self.micro_batch_size = batch_size
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(vocab, (batch_size, seq_len + 1), generator=generator)
        self.tensors = {"tokens": ids[:, :-1].contiguous(), "targets": ids[:, 1:].contiguous()}

    def batch(self, *which: int) -> dict[str, Tensor]:
        return dict(self.tensors)

    def validation_batches(self, *which: int, max_batches: int | None) -> list[dict[str, Tensor]]:
        return []


def train_case(
    num_layers: int,
    hidden: int,
    heads: int,
    vocab: int,
    seq_len: int,
    batch_size: int,
    dtype: torch.dtype,
    device: str,
    seed: int = 0,
) -> Case:
    config = GPTConfig(
        num_layers=num_layers, hidden_size=hidden, num_heads=heads, vocab_size=vocab, max_seq_len=seq_len
    )
    torch.manual_seed(seed)
    model = GPT(config, Placement(device=device, dtype=dtype))
    if len(model.word_embedding.weight) != vocab:
        raise ValueError(f"train_case: the vocabulary of {vocab} would be padded; take a multiple of 128")
    data = OneBatch(batch_size, seq_len, vocab, seed)
    plain, to_compile = (PlainGPT(config, device=device).copy_from(model) for _ in range(2))
    steps = TrainConfig(steps=1 << 30, global_batch_size=batch_size, eval_interval=0, dtype=name_of(dtype))
    trainer = Trainer(model, data, token_loss, steps, optimizer=OPTIMIZER)
    rivals = {
        OURS: lambda: trainer.train_step().loss,
        EAGER: plain_step(plain, plain, data.batch, OPTIMIZER, dtype),
        COMPILE: plain_step(to_compile, compiled(to_compile), data.batch, OPTIMIZER, dtype),
    }
    tokens, size = batch_size * seq_len, sum(p.numel() for p in model.parameters())
    forward = int(flops_per_token(config, seq_len, causal=True) / 3) * tokens
    low = 2 * dtype.itemsize * size  # the weights are read once in each direction
    adamw = 28 * size + (dtype.itemsize * size if dtype.itemsize < 4 else 0)
    gradients = 4 * size
    return Case(
        title("training_step", (num_layers, hidden, heads, vocab, seq_len, batch_size), dtype),
        tuple(model.parameters()),
        (),
        rivals,
        low // 2,
        low // 2 + gradients + adamw,
        flops=(forward, 2 * forward),
        capturable=False,
    )


# (layers, H, heads, vocabulary, S, batch): GPT-3 medium and XL; on a CPU a small one.
WORKLOADS = (
    Workload(
        "training_step",
        train_case,
        cpu=((4, 256, 8, 32000, 128, 4),),
        cuda=((24, 1024, 16, 50304, 2048, 8), (24, 2048, 16, 50304, 2048, 4)),
        directions=("step",),
        tiny=(2, 16, 2, 128, 8, 2),
    ),
)
