"""Slots of other ranks' experts in the gradient of the router.

transformers issue #48687 (2026-09-10), fixed by #48689. With `batched_mm` a slot of another rank's expert
still has an output, that of some local expert. Its weight of 0 hides this in the forward pass only: the
gradient of the weight is that output, and the router collects it.
"""

import torch
from parts import Copy, Experts, Reduce, Tokens
from torch import nn

EXPECTED = {"Bug": ("gradient", "backward only")}


class Parallel(Experts):
    def forward(self, x, target=None):
        x = self.before(x)
        scores, chosen = self.route(x)
        x, scores = Copy.apply(x, self.group), Copy.apply(scores, self.group)
        local = chosen - self.group.rank() * len(self.up)
        here, local = (local >= 0) & (local < len(self.up)), local.clamp(0, len(self.up) - 1)
        hidden = torch.tanh(torch.einsum("th,tkhf->tkf", x, self.up[local]))
        rows = torch.einsum("tkf,tkfh->tkh", hidden, self.down[local])
        masked = torch.where(here, scores, 0.0)
        if not self.masks_gradient:
            masked = scores + (masked - scores).detach()
        return Reduce.apply((masked[..., None] * rows).sum(1), self.group)


class Fixed(Tokens):
    layouts, masks_gradient, placements = {"ep": (1, 2, 4)}, True, {"up": {"ep": 0}, "down": {"ep": 0}}
    dense = lambda self, case: Experts()

    def parallel(self, dense, ranks):
        dense.__class__, dense.masks_gradient, dense.group = Parallel, self.masks_gradient, ranks.group("ep")
        dense.up = nn.Parameter(ranks.shard(dense.up, "ep", 0))
        dense.down = nn.Parameter(ranks.shard(dense.down, "ep", 0))
        return dense


class Bug(Fixed):
    masks_gradient = False
