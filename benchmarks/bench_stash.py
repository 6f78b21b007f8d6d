"""Experts with their activations in the stash, and the same experts with what autograd saves.

The rows are those of an expert-parallel rank, all of them real. The stash costs a copy of the rows that came
in, and two small kernels that allocate and free; what it saves is memory, which `fastmp plan recipe` states.
The peers' paged stashes have no function to call.
"""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.cases import OURS, Case, Workload, title
from fastmp.config import GPTConfig, MoEConfig
from fastmp.nn import Placement
from fastmp.nn.moe.activation_stash import ActivationStash, stashed_experts
from fastmp.nn.moe.experts import GroupedExperts
from fastmp.ops.core.registry import compute_dtype
from fastmp.ops.stash import new_state

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
        {OURS: lambda: stashed_experts(layer, x, offsets, stash, rows), SAVED: lambda: layer(x, offsets)},
        held + 2 * x.nbytes,
        2 * held + 3 * x.nbytes,
        flops=(flops, 2 * flops),
    )


# (rows, H, experts of the rank, F): of eight ranks Qwen3-30B-A3B with 4096 tokens, and of 32 DeepSeek-V3.
_SHAPES = ((32768, 2048, 16, 768), (32768, 7168, 8, 2048))
_TICKETS = 48 * 8  # layers times microbatches
WORKLOADS = (
    Workload(
        "stashed_experts",
        stash_case,
        cpu=((4096, 256, 16, 96),),
        cuda=_SHAPES,
        rivals=(OURS, SAVED),
        directions=("both",),
        tiny=(24, 16, 4, 8),
    ),
)
SHAPES = dict.fromkeys(
    (
        "stash_reserve", "stash_push", "stash_pull", "stash_release", "stash_mlp_in", "stash_mm",
        "stash_gate_backward_", "stash_wgrad", "stash_wgrad_",
    ),
    _SHAPES,
)  # fmt: skip


def arguments(op: str, shape: tuple[int, ...], dtype: torch.dtype, device: str, seed: int) -> tuple:
    """Random arguments of `torch.ops.fastmp.<op>`: an entry in the middle of a ring of twice its rows."""
    rows, hidden, experts, ffn = shape
    generator = torch.Generator(device).manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device).to(dtype)

    offsets = torch.arange(1, experts + 1, dtype=torch.int32, device=device) * (rows // experts)
    start = torch.tensor(rows // 2, device=device)
    if op == "stash_reserve":
        return offsets, new_state(_TICKETS, device), 2 * rows, 0
    if op == "stash_release":
        state = new_state(_TICKETS, device)
        torch.ops.fastmp.stash_reserve(offsets, state, 2 * rows, 0)
        return state, 0
    if op == "stash_push":
        return random(rows, hidden), random(2 * rows, hidden), start, offsets
    if op == "stash_pull":
        return random(2 * rows, hidden), start, offsets, rows
    if op == "stash_mlp_in":
        w = random(experts, 2 * ffn, hidden) / hidden**0.5
        return (
            random(rows, hidden),
            w,
            offsets,
            start,
            random(2 * rows, 2 * ffn),
            random(2 * rows, ffn),
            "silu",
        )
    if op == "stash_mm":
        return random(2 * rows, ffn), random(experts, hidden, ffn) / ffn**0.5, offsets, start, False, rows
    if op == "stash_gate_backward_":
        return random(rows, ffn), random(2 * rows, 2 * ffn), start, offsets, "silu"
    own = random(rows, hidden), random(2 * rows, ffn), offsets, None, start, rows
    if op == "stash_wgrad":
        return own
    return torch.zeros(experts, hidden, ffn, dtype=compute_dtype(dtype), device=device), *own
