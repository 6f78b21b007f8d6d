"""The bias of a row-parallel layer, added by every rank, or divided with its gradient.

MinivLLM issue #80 (2026-06-16), slapo #10 (2023-01-23), text-generation-inference #1036 (2023-09-18): the
bias is added in front of the all-reduce, once for every rank. torchtitan pull request #4332 (2026-08-26):
it is divided by the number of ranks, which divides its gradient too.
"""

from parts import Linear, Reduce, Tokens
from torch import nn

EXPECTED = {"Bug": ("output", "counted n times"), "Divided": ("gradient", "divided by the group size")}


class Parallel(nn.Module):
    def __init__(self, dense, ranks, bias):
        super().__init__()
        self.weight, self.bias = nn.Parameter(ranks.shard(dense.weight, "tp", 1)), dense.bias
        self.ranks, self.added = ranks, bias

    def forward(self, x, target=None):
        partial = self.ranks.shard(x, "tp", 1) @ self.weight.t()
        if self.added == "after":
            return Reduce.apply(partial, self.ranks.group("tp")) + self.bias
        bias = self.bias / self.ranks.size("tp") if self.added == "divided" else self.bias
        return Reduce.apply(partial + bias, self.ranks.group("tp"))


class Fixed(Tokens):
    placements, added = {"weight": {"tp": 1}}, "after"
    dense = lambda self, case: Linear(4, 4)
    parallel = lambda self, dense, ranks: Parallel(dense, ranks, self.added)


class Bug(Fixed):
    added = "before"


class Divided(Fixed):
    added = "divided"
