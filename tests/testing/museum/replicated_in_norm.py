"""Replicated weights marked as shards.

TransformerEngine for ROCm, pull request #715 (2026-08-25). `Linear` marks every weight as tensor-parallel,
those that are replicated too (`parallel_mode=None`). The gradient norm counts them once for each rank, 1.36
to 1.52 times too large in two models, and gradients are clipped too much.
"""

import torch
from parts import Copy, Reduce, Tokens, total
from torch import nn

EXPECTED = {"Bug": ("norm", "counted n times in the norm")}


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.replicated, self.sharded, self.group = (
            nn.Linear(4, 4, bias=False),
            nn.Linear(4, 8, bias=False),
            None,
        )

    def forward(self, x, target=None):
        x = self.replicated(x)
        x = Copy.apply(x, self.group) if self.group else x
        out = self.sharded(x).tanh().sum(-1, keepdim=True)
        return Reduce.apply(out, self.group) if self.group else out


class Fixed(Tokens):
    placements, marked = {"sharded.weight": {"tp": 0}}, ("sharded.weight",)
    dense = lambda self, case: Layers()

    def parallel(self, dense, ranks):
        dense.sharded.weight, dense.group = (
            nn.Parameter(ranks.shard(dense.sharded.weight, "tp", 0)),
            ranks.group("tp"),
        )
        return dense

    def norm(self, model, ranks):
        counted = lambda name: name in self.marked or ranks.index("tp") == 0
        square = sum(p.grad.square().sum() for name, p in model.named_parameters() if counted(name))
        return total(torch.as_tensor(square, dtype=torch.float64), ranks.group("tp")).sqrt()


class Bug(Fixed):
    marked = ("sharded.weight", "replicated.weight")
