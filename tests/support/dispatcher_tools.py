"""Routings of every kind through a token dispatcher, and training steps of a MoE layer with one."""

from __future__ import annotations

import torch
from moe_tools import SEED, with_moe

from fastmp.cuda_graphs.backends.cuda import CudaBackend
from fastmp.cuda_graphs.backends.recording import RecordingBackend
from fastmp.cuda_graphs.manager import GraphManager
from fastmp.distributed.rng import RngTracker
from fastmp.nn import LayerChain, Placement
from fastmp.nn.moe.layer import MoELayer
from fastmp.optim.grad_buffers import GradBuffer
from fastmp.pipeline.schedule import Schedule

E, K, MOST = 8, 3, 9  # experts, choices, tokens of a rank at most
STEPS, MICROBATCHES = 5, 2
KINDS = ("any", "empty", "skewed", "one token", "all to one", "dropped before")


def routing(kind: str, rank: int, generator: torch.Generator) -> torch.Tensor:
    """Choices (T, K) int32 of a rank's tokens, of different experts each; -1 goes nowhere."""
    tokens = {"empty": 0, "one token": int(rank == 1)}.get(kind)
    if tokens is None:
        tokens = int(torch.randint(MOST + 1, (), generator=generator))
    likes = torch.rand(tokens, E, generator=generator)
    if kind == "skewed":
        likes += torch.linspace(1.0, 0.0, E)
    elif kind == "all to one":
        likes[:, 2] += 2.0
    indices = likes.topk(K, 1).indices.to(torch.int32)
    if kind == "dropped before":
        indices[torch.rand(tokens, K, generator=generator) < 0.4] = -1
    return indices


def dispatch_and_combine(dispatcher, scales, tokens, indices, probs, grad):
    """Output, gradients of tokens and probs, and the rows, which each expert multiplies by its scale."""
    tokens, probs = tokens.clone().requires_grad_(), probs.clone().requires_grad_()
    prepared = dispatcher.preprocess(indices, probs, MOST)
    rows, offsets, state = dispatcher.dispatch(tokens, prepared)
    places = torch.arange(len(rows), dtype=torch.int32, device=offsets.device)
    expert = torch.searchsorted(offsets, places, right=True)
    output = dispatcher.combine(rows * scales[expert.clamp(max=len(offsets) - 1), None], state)[: len(tokens)]
    output.backward(grad)
    return output.detach(), tokens.grad, probs.grad, rows.detach()[: offsets[-1]], offsets


def train_moe_layer(dispatcher, groups, device, graphs):
    """Return outputs, losses, counts and gradients of all steps, and the manager of the graphs."""
    rng = RngTracker(SEED, device=device)
    config = with_moe(dispatcher=dispatcher, jitter=0.1)
    layer = MoELayer(config, Placement(groups, rng=rng, dtype=torch.float64, device=device))
    chain = LayerChain([layer])
    GradBuffer(chain.named_parameters())
    manager = None
    if graphs:
        backend = CudaBackend(rng) if device.type == "cuda" else RecordingBackend(rng)
        manager = GraphManager([chain], Schedule(1, MICROBATCHES).order(0), backend=backend)
    generator, seen = torch.Generator().manual_seed(groups.rank), []
    for _ in range(STEPS):
        if manager is not None:
            manager.begin_step()
        for _ in range(MICROBATCHES):
            hidden = torch.randn(6, 2, config.hidden_size, dtype=torch.float64, generator=generator)
            hidden = hidden.to(device).requires_grad_()
            output, aux, counts = chain(hidden)
            (output.square().sum() + aux).backward()
            seen += [output.detach(), aux.detach(), counts, hidden.grad]
    return [*seen, *(param.main_grad for param in layer.parameters())], manager
