"""Samples of experts whose activations lie in a stash: the ring buffer, and gated experts over it."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from fastmp.ops import OPS  # type: ignore[attr-defined]  # and all ops, which that registers
from fastmp.ops.core.registry import compute_dtype
from fastmp.ops.stash import new_state
from fastmp.testing.functions import OpFamily

#   rows of the ring, columns, gap between rows of the tensor, its rows, entries (rows, released) before, rows
_STASH_CASES = (
    (64, 32, 0, 40, (), 33),
    (64, 16, 3, 40, ((20, True), (30, False)), 12),  # allocated from row 50, released at the tail
    (64, 32, 0, 40, ((30, True), (20, False)), 24),  # begins at row 0 again
    (64, 7, 0, 40, ((50, False), (10, True), (4, True)), 9),  # released at the head
    (64, 32, 16, 70, ((40, False), (20, False)), 7),  # does not fit
    (64, 8, 0, 9, ((5, False), (0, True), (7, False)), 0),
    (300, 512, 0, 256, ((7, False),), 256),
    (16, 8, 8, 4, ((3, False),), 9),  # more rows than the tensor has
)
_TICKETS = 8


def _stash_ends(rows: int) -> Tensor:
    return torch.tensor([rows // 3, rows], dtype=torch.int32)


def stash_samples(op: str, dtype: torch.dtype, generator: torch.Generator) -> Iterator[tuple]:
    """Yield rings that are empty, partly in use, wrapped, full and void."""
    reserve, release = (OPS[f"stash_{name}"].implementations["reference"] for name in ("reserve", "release"))
    for size, columns, gap, capacity, before, rows in _STASH_CASES:
        state, ticket = new_state(_TICKETS, "cpu"), len(before)
        for number, (count, _) in enumerate(before):
            reserve(_stash_ends(count), state, size, number)
        released = [number for number, (_, done) in enumerate(before) if done]
        if op == "stash_release":
            for number in released[:-1]:
                release(state, number)
            yield state, released[-1] if released else ticket
            continue
        for number in released:
            release(state, number)
        if op == "stash_reserve":
            yield _stash_ends(rows), state, size, ticket
            if before:
                yield _stash_ends(rows), state.clone(), size, 0  # perhaps in use
            continue
        entry = reserve(_stash_ends(rows), state, size, ticket)
        ring = torch.randn(size, columns, generator=generator, dtype=torch.float64).to(dtype)
        if op == "stash_push":
            x = torch.randn(capacity, columns + gap, generator=generator, dtype=torch.float64).to(dtype)
            yield x[:, :columns], ring, *entry
        else:
            yield ring, *entry, capacity


#   rows of the ring, capacity, first row of the entry, ends, hidden, hidden units of an expert
_STASHED_MLP_CASES = (
    (90, 40, 17, (5, 5, 33), 32, 24),
    (64, 40, 24, (0, 40), 16, 8),
    (33, 9, 0, (2, 3, 9, 9), 7, 5),
    (40, 20, 40, (0, 0), 16, 16),
    (150, 150, 0, (70, 150), 128, 64),
)


def stashed_mlp_samples(op: str, dtype: torch.dtype, generator: torch.Generator) -> Iterator[tuple]:
    """Yield entries at the beginning, in the middle and at the end of the ring."""
    for size, capacity, first, ends, hidden, ffn in _STASHED_MLP_CASES:

        def random(*shape: int, wide: bool = False) -> Tensor:
            drawn = torch.randn(shape, generator=generator, dtype=torch.float64)
            return drawn.to(compute_dtype(dtype) if wide else dtype)

        offsets, start = torch.tensor(ends, dtype=torch.int32), torch.tensor(first)
        experts, forms = len(ends), ("silu", "gelu_tanh", "gelu")
        if op == "stash_mlp_in":
            for form in forms:
                w = random(experts, 2 * ffn, hidden) / hidden**0.5
                rings = random(size, 2 * ffn), random(size, ffn)
                yield random(capacity, hidden), w, offsets, start, *rings, form
        elif op == "stash_mm":
            for transposed in (False, True):
                w = random(experts, ffn, hidden) / hidden**0.5
                yield random(size, ffn if transposed else hidden), w, offsets, start, transposed, capacity
        elif op == "stash_gate_backward_":
            for form in forms:
                yield random(capacity, ffn), random(size, 2 * ffn), start, offsets, form
        else:
            for in_ring in (False, True):
                total = random(experts, hidden, ffn, wide=True)
                grad = random(size if in_ring else capacity, hidden)
                own = grad, random(size, ffn), offsets, start.clone() if in_ring else None, start, capacity
                yield (total, *own) if op == "stash_wgrad_" else own


FAMILIES = {
    "stash": OpFamily(stash_samples),
    "stashed_mlp": OpFamily(stashed_mlp_samples),
}
