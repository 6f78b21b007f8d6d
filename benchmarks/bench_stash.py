"""Experts with their activations in the stash, and the same experts with what autograd saves.

The rows are those of an expert-parallel rank, all of them real. The stash costs a copy of the rows that came
in, and two small kernels that allocate and free; what it saves is memory, which `fastmp plan recipe` states.
The peers' paged stashes have no function to call.
"""

from __future__ import annotations

import torch

from benchmarks.cases import OURS, Case, Workload, title
from fastmp.config import GPTConfig, MoEConfig
from fastmp.nn import Placement
from fastmp.nn.moe.experts import GroupedExperts
from fastmp.nn.moe.stash import ActivationStash, stashed_experts

SAVED = "fastmp saved by autograd"


def stash_case(rows: int, hidden: int, experts: int, ffn: int, dtype: torch.dtype, device: str) -> Case:
    moe = MoEConfig(num_experts=experts, top_k=1, expert_ffn_hidden_size=ffn)
    config = GPTConfig(hidden_size=hidden, num_heads=1, activation="swiglu", linear_bias=False, moe=moe)
    torch.manual_seed(0)
    layer = GroupedExperts(config, Placement(device=device, dtype=dtype))
    with torch.no_grad():  # numbers of about one all the way
        layer.fc1.normal_(std=hidden**-0.5)
        layer.fc2.normal_(std=ffn**-0.5)
    x, grad = (torch.randn(rows, hidden, device=device).to(dtype) for _ in range(2))
    x.requires_grad_()
    offsets = torch.arange(1, experts + 1, dtype=torch.int32, device=device) * (rows // experts)
    stash = ActivationStash(lambda balanced, capacity: capacity)
    held, flops = layer.fc1.nbytes + layer.fc2.nbytes, 2 * rows * 3 * hidden * ffn
    return Case(
        title("stashed_experts", (rows, hidden, experts, ffn), dtype),
        (x, layer.fc1, layer.fc2),
        grad,
        {
            OURS: lambda: stashed_experts(layer, x, offsets, stash, rows),
            SAVED: lambda: layer(x, offsets),
        },
        held + 2 * x.nbytes,
        2 * held + 3 * x.nbytes,
        flops=(flops, 2 * flops),
    )


# (rows, H, experts of the rank, F): of eight ranks Qwen3-30B-A3B with 4096 tokens, and of 32 DeepSeek-V3.
WORKLOADS = (
    Workload(
        "stashed_experts",
        stash_case,
        cpu=((4096, 256, 16, 96),),
        cuda=((32768, 2048, 16, 768), (32768, 7168, 8, 2048)),
        rivals=(OURS, SAVED),
        directions=("both",),
        tiny=(24, 16, 4, 8),
    ),
)


def test_stash(compare, case, rival, direction):
    compare(case(), rival, direction)
