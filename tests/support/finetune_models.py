"""Shared by the tests of heads: a small BERT, samples of each head, and a trainer on any layout."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from examples.megatron_paper.finetuning.losses import model_and_loss
from examples.megatron_paper.finetuning.samples import Sample, TaskData, TokenPair
from fastmp.config import BertConfig, GPTConfig, OptimizerConfig, ParallelConfig, TrainConfig
from fastmp.distributed.collectives import group_rank
from fastmp.distributed.grid import RankGrid
from fastmp.distributed.groups import ParallelGroups
from fastmp.distributed.rng import RngTracker
from fastmp.training.data.masked import SpecialTokens
from fastmp.training.trainer import Trainer

MODEL = GPTConfig(
    num_layers=2,
    hidden_size=16,
    num_heads=2,
    vocab_size=37,
    max_seq_len=12,
    activation="gelu",
    init_std=0.2,
    bert=BertConfig(post_norm=True),
)
PRE = replace(MODEL, bert=BertConfig())
SEQ_LEN = 12
OUTPUTS = {"classes": 3, "span": 1, "choices": 1}
SPECIAL = SpecialTokens(cls=1, sep=2, mask=0, pad=0)


def samples(head: str, number: int) -> list[Sample]:
    """Of several lengths, with labels that a model must guess."""
    draw = np.random.default_rng(11)

    def row() -> TokenPair:
        return TokenPair(*(draw.integers(3, 37, size=draw.integers(1, 5)).astype(np.int32) for _ in range(2)))

    made = []
    for _ in range(number):
        rows = tuple(row() for _ in range(4 if head == "choices" else 1))
        start = int(draw.integers(0, 4))
        labels = {"classes": (start % 3,), "choices": (start,), "span": (start, start + 1)}[head]
        made.append(Sample(rows, labels))
    return made


def task_data(head: str, **changes) -> TaskData:
    options = {"seq_len": SEQ_LEN, "micro_batch_size": 2, "batch_size": 8, "epochs": 3, "seed": 5, **changes}
    return TaskData(samples(head, 11), samples(head, 7), special=SPECIAL, **options)


def make_trainer(head: str, config=MODEL, *, run_dir="unused", **layout) -> Trainer:
    """A trainer in float64 of the model that all layouts start from."""
    layout = ParallelConfig(**layout)
    world = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    groups = ParallelGroups.alone()
    if world > 1:
        groups = ParallelGroups.create(RankGrid(world_size=world, tp=layout.tp, pp=layout.pp))
    rng = RngTracker(3, tp_rank=group_rank(groups.tp))
    options = {"rng": rng, "dtype": torch.float64, "head": head, "num_outputs": OUTPUTS[head]}
    chunks, loss = model_and_loss(config, groups, layout, **options)
    data = task_data(head)
    config = TrainConfig(
        steps=data.steps, global_batch_size=data.batch_size, run_dir=str(run_dir), eval_interval=0
    )
    optimizer = OptimizerConfig(lr=0.01, min_lr=0.0, schedule="linear", warmup_steps=1)
    model = chunks[0] if layout.pp * layout.vpp == 1 else chunks
    return Trainer(model, data, loss, config, optimizer=optimizer, groups=groups, rng=rng)
