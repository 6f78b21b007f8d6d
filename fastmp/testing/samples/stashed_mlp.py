"""Sample arguments of gated experts in a stash: entries at the beginning, in the middle and at the end."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from fastmp.ops.core.registry import compute_dtype

#   rows of the ring, capacity, first row of the entry, ends, hidden, hidden units of an expert
_CASES = (
    (90, 40, 17, (5, 5, 33), 32, 24),
    (64, 40, 24, (0, 40), 16, 8),
    (33, 9, 0, (2, 3, 9, 9), 7, 5),
    (40, 20, 40, (0, 0), 16, 16),
    (150, 150, 0, (70, 150), 128, 64),
)


def samples(op: str, dtype: torch.dtype, generator: torch.Generator) -> Iterator[tuple]:
    for size, capacity, first, ends, hidden, ffn in _CASES:

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
