"""Attention sinks left out of the gradient norm.

Megatron-LM issue #7452, finding 8 (2026-09-17), pull request #7530. The learnable softmax offset has one
entry for each local head, but is not marked as sharded: the norm takes it for a replica and counts only the
entries of rank 0, so gradients are clipped too little.
"""

import torch
from parts import Copy, Reduce, Tokens, total
from torch import nn

EXPECTED = {"Bug": ("norm", "missing from the norm")}


class Heads(nn.Module):
    def __init__(self, weight=None, sink=None, group=None):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 4) if weight is None else weight)
        self.sink, self.group = nn.Parameter(torch.randn(8) if sink is None else sink), group

    def forward(self, x, target=None):
        x = Copy.apply(x, self.group) if self.group else x
        out = (torch.sigmoid(x @ self.weight.t() - self.sink)).sum(-1, keepdim=True)
        return Reduce.apply(out, self.group) if self.group else out


class Fixed(Tokens):
    placements, sharded = {"weight": {"tp": 0}, "sink": {"tp": 0}}, ("weight", "sink")
    dense = lambda self, case: Heads()

    def parallel(self, dense, ranks):
        return Heads(ranks.shard(dense.weight, "tp", 0), ranks.shard(dense.sink, "tp", 0), ranks.group("tp"))

    def norm(self, model, ranks):
        counted = lambda name: name in self.sharded or ranks.index("tp") == 0
        square = sum(p.grad.square().sum() for name, p in model.named_parameters() if counted(name))
        return total(torch.as_tensor(square, dtype=torch.float64), ranks.group("tp")).sqrt()


class Bug(Fixed):
    sharded = ("weight",)
