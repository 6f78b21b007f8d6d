"""A norm weight that all heads share, with the gradient of the local heads.

Megatron-LM issue #7452, finding 11 (2026-09-17). The output norm of `GatedDeltaNet` has one weight for all
heads and so is replicated; its gradient is a partial sum over the local heads. The finalizer adds those
only with sequence parallelism, so replicas drift apart.
"""

import torch
from parts import Copy, Reduce, Tokens, total
from torch import nn

EXPECTED = {"Bug": ("gradient", "missing all-reduce")}


class Heads(nn.Module):
    def __init__(self, weight=None, group=None):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4, 3) if weight is None else weight)  # heads, in, out
        self.out_norm, self.group = nn.RMSNorm(3), group

    def forward(self, x, target=None):
        x = Copy.apply(x, self.group) if self.group else x
        out = self.out_norm(torch.einsum("ti,hio->tho", x, self.weight)).tanh().sum(1)
        return Reduce.apply(out, self.group) if self.group else out


class Fixed(Tokens):
    placements = {"weight": {"tp": 0}}
    dense = lambda self, case: Heads()
    parallel = lambda self, dense, ranks: Heads(ranks.shard(dense.weight, "tp", 0), ranks.group("tp"))

    def synchronize(self, model, ranks):
        model.out_norm.weight.grad = total(model.out_norm.weight.grad, ranks.group("tp"))


class Bug(Fixed):
    def synchronize(self, model, ranks):
        pass
