"""Steps of exchanges over peers' memory, all of it on one device, beside copies of the same bytes."""

from __future__ import annotations

import torch
from torch import Tensor

from fastmp.ops.core.registry import compute_dtype

WORKLOADS = ()
GOALS = ()
_PEERS, _EXPERTS = 8, 256
_ROWS = ((8192, 7168, 8), (8192, 2048, 8), (8192, 4096, 2))
SHAPES = {
    **dict.fromkeys(("exchange_push", "exchange_pull", "exchange_take", "exchange_give"), _ROWS),
    "exchange_places": ((8192, 8, _EXPERTS), (8192, 8, 2 * _EXPERTS)),
    "exchange_counts": ((8, _EXPERTS),),
    "exchange_barrier": ((8,),),
}


def _epochs(ranks: int, device: str) -> Tensor:
    """Flags of ranks that all came long ago: nobody waits."""
    epochs = torch.full((ranks + 1,), 1 << 24, dtype=torch.int32, device=device)
    epochs[-1:].zero_()
    return epochs


def arguments(op: str, shape: tuple, dtype: torch.dtype, device: str, seed: int) -> tuple:
    """Random arguments of `torch.ops.fastmp.<op>`; a rank's peers are all at its own place, with other rows.

    Pushing and pulling are those of the outputs of experts: weighted, with gradients and rows kept.
    """
    generator = torch.Generator(device).manual_seed(seed)

    def integers(below: int, *shape: int) -> Tensor:
        return torch.randint(below, shape, generator=generator, device=device, dtype=torch.int32)

    def peer_offsets(ranks: int) -> Tensor:
        return torch.zeros(1, ranks, dtype=torch.int64, device=device)

    if op == "exchange_barrier":
        (ranks,) = shape
        return _epochs(ranks, device), peer_offsets(ranks), 0, 60.0
    if op == "exchange_counts":
        ranks, experts = shape
        counts = integers(99, 2, ranks, experts)
        return integers(99, experts), _epochs(ranks, device), counts, peer_offsets(ranks), 0, 60.0
    if op == "exchange_places":
        tokens, slots, experts = shape
        chosen = torch.rand(tokens, experts, generator=generator, device=device).topk(slots, 1).indices
        row_of, offsets = torch.ops.fastmp.permutation(chosen.to(torch.int32), experts)
        matrix = offsets.expand(_PEERS, -1).contiguous()
        return row_of, chosen.to(torch.int32), matrix, 1, _PEERS, 2 * tokens * slots
    tokens, hidden, slots = shape
    capacity = tokens * slots

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device).to(dtype)

    rows, epochs = random(2, capacity, hidden), _epochs(_PEERS, device)
    if op in ("exchange_take", "exchange_give"):
        offsets = torch.full((1,), capacity, dtype=torch.int32, device=device)
        given = (rows, epochs, offsets, hidden)
        return given if op == "exchange_take" else (random(capacity, hidden), offsets, epochs, rows)
    numbers = torch.randperm(capacity, generator=generator, device=device)
    where = (numbers * _PEERS // capacity * capacity + numbers).to(torch.int32).view(tokens, slots)
    probs = torch.rand(tokens, slots, generator=generator, device=device, dtype=compute_dtype(dtype))
    if op == "exchange_pull":
        return rows, epochs, peer_offsets(_PEERS), where, probs, True
    return (
        random(tokens, hidden),
        where,
        probs,
        random(tokens, slots, hidden),
        epochs,
        rows,
        peer_offsets(_PEERS),
    )
