"""Routings of every kind through a token dispatcher, and training steps of a MoE layer with one."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from moe_tools import SEED, hidden_states, make_moe, own_part, with_moe
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

from fastmp.cuda_graphs.backends.cuda import CudaBackend
from fastmp.cuda_graphs.backends.recording import RecordingBackend
from fastmp.cuda_graphs.manager import GraphManager
from fastmp.distributed.rng import RngTracker
from fastmp.nn import LayerChain, Placement
from fastmp.nn.moe.layer import MoELayer
from fastmp.optim.grad_buffers import GradBuffer
from fastmp.schedule.schedule import Schedule

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


def routings(number: int, rank: int, width: int, dtype: torch.dtype, device="cpu") -> Iterator[tuple]:
    """Each kind in turn, with the arguments of `dispatch_and_combine` after the scales."""
    generator = torch.Generator().manual_seed(rank)
    wide = torch.promote_types(dtype, torch.float32)
    for example in range(number):
        kind = KINDS[example % len(KINDS)]
        indices = routing(kind, rank, generator)
        tokens, grad = (torch.randn(len(indices), width, generator=generator).to(dtype) for _ in range(2))
        probs = torch.rand(len(indices), K, generator=generator, dtype=wide)
        yield f"example {example}, {kind}", *(each.to(device) for each in (tokens, indices, probs, grad))


def compare_routings(dispatcher, ordinary, local, examples, *, same_rows=True, **near) -> None:
    """Outputs and gradients are near those of `ordinary`, rows and offsets equal; of `local` experts.

    same_rows: if not, the rows of an expert may come in another order.
    """
    for label, tokens, *given in examples:
        scales = torch.linspace(0.5, 2.0, local, dtype=tokens.dtype, device=tokens.device)
        (*found, rows, offsets), (*expected, expected_rows, expected_offsets) = (
            dispatch_and_combine(each, scales, tokens, *given) for each in (dispatcher, ordinary)
        )
        for name, a, b in zip(("output", "tokens", "probs"), found, expected, strict=True):
            assert_close(a, b, **near, msg=f"{label}: {name}")
        assert torch.equal(offsets, expected_offsets), label
        assert not same_rows or torch.equal(rows, expected_rows), label


def results_of_layer(config, groups, sequence_parallel: bool, *, recomputed: bool = False) -> list:
    """Output, losses, counts and gradients of a training step, then the output in evaluation mode.

    recomputed: a second step, in which the forward is recomputed, adds its gradients.
    """
    layer = make_moe(config, groups, sequence_parallel=sequence_parallel)
    parts = groups.grid.cp * groups.grid.tp
    S = 2 * parts if sequence_parallel else 3 * groups.grid.cp  # 3 positions: TP does not divide them
    hidden, weight = (
        own_part(hidden_states(S, 2 * groups.grid.dp, seed=seed), groups, sequence_parallel).clone()
        for seed in (5, 6)
    )
    hidden.requires_grad_()
    for run in (layer, lambda x: checkpoint(layer, x, use_reentrant=False))[: 1 + recomputed]:
        output, aux, counts = run(hidden)
        ((output * weight).sum() + aux).backward()
    gradients = [param.grad for param in layer.parameters()]
    return [output, aux, counts, hidden.grad, *gradients, layer.eval()(hidden)[0]]


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
