"""Router scores with the gradient of the local experts.

transformers pull request #48205 (2026-08-22), second bug. Every rank computes its own experts for all
tokens, so its gradient of the scores covers their slots alone. Nothing adds these partial sums, and all
parameters in front of the mixture of experts lose the gradient through the router of the other ranks'
experts.
"""

import torch
from parts import Copy, Experts, Reduce, Tokens
from torch import nn

EXPECTED = {"Bug": ("gradient", "missing all-reduce")}


class Parallel(Experts):
    def forward(self, x, target=None):
        x = self.before(x)
        scores, chosen = self.route(x)
        scores = Copy.apply(scores, self.group) if self.summed else scores
        x, local = Copy.apply(x, self.group), chosen - self.group.rank() * len(self.up)
        here, local = (local >= 0) & (local < len(self.up)), local.clamp(0, len(self.up) - 1)
        hidden = torch.tanh(torch.einsum("th,tkhf->tkf", x, self.up[local]))
        rows = torch.einsum("tkf,tkfh->tkh", hidden, self.down[local])
        return Reduce.apply((torch.where(here, scores, 0.0)[..., None] * rows).sum(1), self.group)


class Fixed(Tokens):
    layouts, summed, placements = {"ep": (1, 2, 4)}, True, {"up": {"ep": 0}, "down": {"ep": 0}}
    dense = lambda self, case: Experts()

    def parallel(self, dense, ranks):
        dense.__class__, dense.summed, dense.group = Parallel, self.summed, ranks.group("ep")
        dense.up = nn.Parameter(ranks.shard(dense.up, "ep", 0))
        dense.down = nn.Parameter(ranks.shard(dense.down, "ep", 0))
        return dense


class Bug(Fixed):
    summed = False
