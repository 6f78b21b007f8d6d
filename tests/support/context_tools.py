"""Models whose sequences are cut over ranks, and a training step of them."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.distributed as dist

from fastmp.config import RopeScaling
from fastmp.optim.grad_buffers import GradBuffer
from tools.small_models import EXPERTS, QWEN, SMALL

LLAMA = replace(QWEN, qk_norm=False)
LONG = {"factor": 4.0, "original_max_seq_len": 12}  # tokens, fewer than a sequence has
DYNAMIC = RopeScaling("dynamic", **LONG)
LONGROPE = RopeScaling("longrope", **LONG, short_factor=(1.0, 1.5, 2.0), long_factor=(2.0, 6.0, 9.0))
MODELS = {
    "gpt2": replace(SMALL, max_seq_len=32),
    "llama": replace(LLAMA, max_seq_len=32),
    "qwen3": replace(QWEN, max_seq_len=32, head_size=8, rotary_fraction=0.5),
    "moe": replace(EXPERTS, max_seq_len=32),
    "window": replace(QWEN, max_seq_len=32, sliding_window=11),
    "sinks": replace(
        QWEN, max_seq_len=32, sliding_window=11, full_attention_layers=(1,), attention_sinks=True
    ),
}
# models whose angles depend on the longest document of a batch
BY_LENGTH = {
    "dynamic": replace(LLAMA, max_seq_len=32, rope_scaling=DYNAMIC),
    "longrope": replace(LLAMA, max_seq_len=32, rope_scaling=LONGROPE),
}


def run_step(model, batches, groups):
    """Losses of every microbatch, sums of the auxiliary ones and of counts; gradients in `main_grad`."""
    grads = GradBuffer(
        model.named_parameters(), dp_group=groups.dp_cp, tp_group=groups.tp, edp_group=groups.edp
    )
    losses, aux, counts = [], torch.zeros((), dtype=torch.float64), 0
    for tokens_BS, targets_BS, weight_BS in batches:
        loss = model.loss(tokens_BS, targets_BS)
        total = ((loss if model.config.moe is None else loss.tokens) * weight_BS).sum()
        if model.config.moe is not None:
            aux += loss.aux.detach()
            counts = counts + loss.counts
            total = total + loss.aux
            loss = loss.tokens
        total.backward()
        losses.append(loss.detach())
    grads.reduce()
    if model.config.moe is not None:
        if groups.dp_cp is not None:
            dist.all_reduce(aux, group=groups.dp_cp)
        if groups.tp_cp_dp is not None:
            dist.all_reduce(counts, group=groups.tp_cp_dp)
    return losses, aux, counts
