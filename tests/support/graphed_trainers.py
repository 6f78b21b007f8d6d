"""Steps with and without graphs, for comparison bit by bit."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from train_tools import PackedSamples, Samples
from trainer_tools import make_trainer

from fastmp.config import GPTConfig, MoEConfig, ParallelConfig
from fastmp.distributed.groups import ParallelGroups

CONFIG = GPTConfig(
    **{"num_layers": 4, "hidden_size": 16, "num_heads": 4, "vocab_size": 131, "max_seq_len": 16},
    dropout=0.1,
    moe=MoEConfig(num_experts=4, expert_ffn_hidden_size=8, expert_bias=True, aux_loss=0.02, jitter=0.1),
)
DENSE = replace(CONFIG, moe=None, num_layers=2, attention_dropout=0.1)
EXPERTS = replace(CONFIG, num_layers=2, tie_embeddings=False)
ONE = ParallelConfig()


def make_graphed(graphs, groups=ParallelGroups.alone(), layout=ONE, config=CONFIG, **options):
    """Return a trainer whose ranks have 4 samples a microbatch, with the default optimizer."""
    options = {"seed": 3, "data": Samples(4), "optimizer": None, **options}
    return make_trainer(groups, layout, config=config, graphs=graphs, **options)


def run(graphs, groups=ParallelGroups.alone(), layout=ONE, config=CONFIG, steps=8, **options):
    """Return all numbers of some steps and of an evaluation among them, and the manager."""
    trainer, seen = make_graphed(graphs, groups, layout, config, **options), []
    on_gpu = trainer.device.type == "cuda"
    # torch's plain attention: its backward adds up in one order.
    with sdpa_kernel(SDPBackend.MATH) if on_gpu else nullcontext():
        for step in range(steps):
            result = trainer.train_step()
            seen += [result.loss, result.aux_loss, result.grad_norm, result.expert_counts]
            if step == min(4, steps - 2):
                seen.append(torch.tensor(trainer.evaluate().loss))
    seen += [tensor.detach().clone() for tensor in trainer.model.state_dict().values()]
    return [each for each in seen if each is not None], trainer.graphs


def run_packed(groups, layout, config, graphs, max_documents=12):
    """Return all numbers of some steps on packed documents, and the manager."""
    samples = partial(PackedSamples, max_documents=max_documents)
    trainer = make_trainer(groups, layout, config=config, samples=samples, graphs=graphs)
    results = [trainer.train_step() for _ in range(6)]
    seen = [number for result in results for number in (result.loss, result.grad_norm)]
    return [*seen, *(p.detach().clone() for p in trainer.grads.parameters.values())], trainer.graphs
