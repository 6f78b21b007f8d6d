"""Expert gradients averaged over fewer ranks than they were summed over.

Megatron-LM pull request #5956 (2026-07-22); the same in PyTorch issue #160285 (2025-08-10) and megablocks
#20 (2023-08-29). An expert sees the tokens of all expert-parallel ranks, and its gradient is averaged over
its data-parallel replicas alone: it is too large by the expert-parallel size.
"""

import torch
from parts import Exchange, Tokens, total
from torch import nn

EXPECTED = {"Bug": ("gradient", "counted n times")}


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.dense, self.experts, self.group = nn.Linear(4, 4), nn.Parameter(torch.randn(4, 4, 4)), None

    def forward(self, x):
        x = Exchange.apply(self.dense(x), self.group, True) if self.group else self.dense(x)
        x = torch.einsum("th,ehf->tf", x, self.experts)
        return (Exchange.apply(x, self.group, False) if self.group else x).tanh()


class Fixed(Tokens):
    layouts, data_axes, averaged = {"dp": (1, 2), "ep": (2,)}, ("dp", "ep"), ("dp", "ep")
    placements = {"experts": {"ep": 0}}
    dense = lambda self, case: Experts()
    inputs = lambda self, case, generator: {"x": torch.randn(3, 4, generator=generator)}

    def parallel(self, dense, ranks):
        dense.experts, dense.group = nn.Parameter(ranks.shard(dense.experts, "ep", 0)), ranks.group("ep")
        return dense

    def divisor(self, local, ranks):
        return local  # a mean on every rank, then averages over ranks

    def synchronize(self, model, ranks):
        for param in (model.dense.weight, model.dense.bias):
            param.grad = total(param.grad, ranks.group()) / ranks.case.world_size
        model.experts.grad = total(model.experts.grad, ranks.group("dp"))
        for axis in self.averaged:
            model.experts.grad /= ranks.size(axis)


class Bug(Fixed):
    averaged = ("dp",)
