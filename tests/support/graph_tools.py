"""Training with and without graphs, step by step, for comparison bit by bit."""

from __future__ import annotations

import torch

from fastmp.config import GPTConfig, MoEConfig
from fastmp.cuda_graphs.backends.cuda import CudaBackend
from fastmp.cuda_graphs.backends.recording import RecordingBackend
from fastmp.cuda_graphs.manager import GraphManager
from fastmp.distributed.rng import RngTracker
from fastmp.nn import GPT, Placement
from fastmp.optim.adamw import AdamW
from fastmp.optim.grad_buffers import GradBuffer
from fastmp.schedule.schedule import Schedule

SMALL = {"num_layers": 3, "hidden_size": 32, "num_heads": 4, "vocab_size": 64, "max_seq_len": 16}
DENSE = GPTConfig(**SMALL, dropout=0.2, attention_dropout=0.1)
MOE = GPTConfig(
    **SMALL,
    **{"num_kv_heads": 2, "norm": "rmsnorm", "position": "rope", "activation": "swiglu", "qk_norm": True},
    dropout=0.1,
    moe=MoEConfig(
        **{"num_experts": 4, "expert_ffn_hidden_size": 16, "shared_expert_ffn_hidden_size": 16},
        **{"aux_loss": 0.1, "z_loss": 0.01, "jitter": 0.1},
    ),
)
SCOPES = [  # with the captured spans of each
    (DENSE, None, 1),
    (DENSE, ["attn"], 3),
    (DENSE, ["mlp"], 3),
    (DENSE, ["full"], 1),
    (MOE, None, 1),
    (MOE, ["moe"], 3),
    (MOE, ["attn", "moe_router", "moe_preprocess"], 3),
]


def train_gpt(
    config,
    *,
    graphs,
    scope=None,
    num_microbatches=4,
    steps=5,
    own_buffers=True,
    device="cpu",
    dtype=torch.float64,
    **options,
):
    """Return losses, counts and evaluations of some steps, the final parameters, and the graph manager.

    The microbatches weigh 1, 2, ...: a gradient that one took from another would show.
    """
    rng = RngTracker(1, device=device)
    model = GPT(config, Placement(rng=rng, dtype=dtype, device=device), **options)
    if own_buffers:
        grads = GradBuffer(model.named_parameters())
        optimizer, zero = AdamW(grads, lr=1e-2), grads.zero
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        zero = optimizer.zero_grad
    manager = None
    if graphs:
        backend = RecordingBackend(rng) if device == "cpu" else CudaBackend(rng)
        manager = GraphManager(
            [model.layers], Schedule(1, num_microbatches).order(0), backend=backend, scope=scope
        )
    data, seen = torch.Generator().manual_seed(5), []
    for _ in range(steps):
        zero()
        if manager is not None:
            manager.begin_step()
        for i in range(num_microbatches):
            ids = torch.randint(64, (2, 9), generator=data).to(device)
            losses = model.loss(ids[:, :-1], ids[:, 1:])
            if config.moe is not None:
                seen += losses.counts.double().flatten()
                losses = losses.tokens.sum() + losses.aux
            loss = losses.sum() * (i + 1)
            loss.backward()
            seen.append(loss.detach().double())
        optimizer.step()
        with torch.no_grad():
            ids = torch.randint(64, (3, 5), generator=data).to(device)
            seen.append(model.eval()(ids).double().sum())
            model.train()
    return torch.stack(seen), [param.detach().clone() for param in model.parameters()], manager


def assert_same_gpt(graphed, eager):
    """Compare two results of `train_gpt`."""
    assert_same_bits([graphed[0], *graphed[1]], [eager[0], *eager[1]])


def assert_same_bits(graphed, eager):
    """Compare numbers, tensors or None, one by one."""
    for i, (got, want) in enumerate(zip(graphed, eager, strict=True)):
        place = f"number {i} of {len(eager)}"
        if isinstance(got, torch.Tensor) and isinstance(want, torch.Tensor):
            assert torch.equal(got, want), f"{place}, shape {tuple(want.shape)}"
        else:
            assert got == want, f"{place}: {got}, eagerly {want}"
