"""Arguments of adamw_ with the small state, and what its tests look at: masters, and bits."""

from __future__ import annotations

import torch

from fastmp.testing.samples.optimizer_steps import adamw_arguments

LR, BETA1, BETA2, EPS, DECAY, REMAINDER, SEED = 10, 11, 12, 13, 14, 19, 20  # places of the op's arguments


def drawn(num_elements, dtype=torch.bfloat16, seed=0, device="cpu", **options):
    generator = torch.Generator(device).manual_seed(seed)
    return adamw_arguments(num_elements, dtype, generator, **{"split": True, "noisy": True, **options})


def replaced(inputs, changes):
    return tuple(changes.get(i, a) for i, a in enumerate(inputs))


def bits(tensor):
    return tensor.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])


def same(left, right):
    return all(torch.equal(bits(a), bits(b)) for a, b in zip(left, right, strict=True))


def masters():
    """All lower halves beside some upper ones: zeros, subnormals, the smallest and largest, both signs."""
    upper = torch.tensor([0x0000, 0x0001, 0x007F, 0x0080, 0x3F80, 0x4049, 0x7F7F])
    upper = torch.cat([upper, upper + 0x8000])
    numbers = (upper[:, None] << 16) + torch.arange(1 << 16)
    special = torch.tensor([0x7F800000, 0xFF800000])
    return torch.cat([numbers.flatten(), special]).to(torch.int32).view(torch.float32)


def exact_inputs(num_elements, first, **options):
    """Arguments with which both averages are computed without rounding, whatever the order of operations."""
    generator = torch.Generator().manual_seed(1)
    inputs = drawn(num_elements, torch.float32, first=first, **options)
    grad, m, v = (
        torch.randint(-most, most + 1, (num_elements,), generator=generator) / 256
        for most in (2047, 255, 255)
    )
    averages = {2: m.bfloat16(), 3: v.abs().bfloat16(), BETA1: 0.5, BETA2: 0.5}
    return replaced(inputs, {1: grad, **averages})
