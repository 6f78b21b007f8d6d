"""An all-reduce of a copy that is thrown away.

Megatron-LM issue #5337 (2026-06-14); SkyRL #1886 (2026-07-29) trained on such gradients. `_reduce` calls
`all_reduce(input.contiguous())` and returns `input`: for an input that is not contiguous the sum is in a
copy.
"""

import torch
import torch.distributed as dist
from parts import Reduce, Tokens
from torch import nn

EXPECTED = {"Bug": ("gradient", "missing all-reduce")}


class Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group, discards):
        ctx.group, ctx.discards = group, discards
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        summed = grad.contiguous()
        dist.all_reduce(summed, group=ctx.group)
        return (grad if ctx.discards else summed), None, None


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.group = nn.LayerNorm(4), nn.Linear(4, 8, bias=False), None

    def forward(self, x, target=None):
        x = self.norm(x)
        x = Copy.apply(x, self.group, self.discards) if self.group else x
        out = self.up(x.t().contiguous().t()).tanh().sum(-1, keepdim=True)  # sequence first, batch first
        return Reduce.apply(out, self.group) if self.group else out


class Fixed(Tokens):
    placements, discards = {"up.weight": {"tp": 0}}, False
    dense = lambda self, case: Layers()

    def parallel(self, dense, ranks):
        dense.up.weight, dense.group = nn.Parameter(ranks.shard(dense.up.weight, "tp", 0)), ranks.group("tp")
        dense.discards = self.discards
        return dense


class Bug(Fixed):
    discards = True
