"""Shards of the last dimension, joined along the first.

TransformerEngine issue #530 (2023-11-22). With FP8 and sequence parallelism, `Linear` gathers its
transposed input along the last dimension for the weight gradient; an all-gather joins shards along the
first, and a reshape makes that the right shape with the wrong order.
"""

import torch
import torch.distributed as dist
from parts import Linear, Tokens
from torch import nn

EXPECTED = {"Bug": ("gradient", "backward only")}


class SequenceParallelLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, group, reshaped):
        parts = [torch.empty_like(x) for _ in range(group.size())]
        dist.all_gather(parts, x.contiguous(), group=group)
        ctx.save_for_backward(x, weight)
        ctx.group, ctx.reshaped = group, reshaped
        return torch.cat(parts) @ weight.t()

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        parts = [torch.empty(x.shape[1], x.shape[0], dtype=x.dtype) for _ in range(ctx.group.size())]
        dist.all_gather(parts, x.t().contiguous(), group=ctx.group)
        joined = torch.cat(parts).view(x.shape[1], -1) if ctx.reshaped else torch.cat(parts, 1)
        return (grad @ weight).chunk(ctx.group.size())[ctx.group.rank()], (joined @ grad).t(), None, None


class Parallel(nn.Module):
    def __init__(self, dense, ranks, reshaped):
        super().__init__()
        self.weight, self.ranks, self.reshaped = (
            nn.Parameter(ranks.shard(dense.weight, "tp", 0)),
            ranks,
            reshaped,
        )

    def forward(self, x, target):
        local = self.ranks.shard(x, "tp", 0)
        return SequenceParallelLinear.apply(local, self.weight, self.ranks.group("tp"), self.reshaped)


class Fixed(Tokens):
    layouts, placements, reshaped = {"tp": (2,)}, {"weight": {"tp": 0}, "output": {"tp": 1}}, False
    dense = lambda self, case: Linear(4, 8, bias=False)
    parallel = lambda self, dense, ranks: Parallel(dense, ranks, self.reshaped)
    inputs = lambda self, case, generator: {"x": torch.randn(4, 4, generator=generator), "target": None}


class Bug(Fixed):
    reshaped = True
