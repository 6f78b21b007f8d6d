"""A gradient norm for every expert-parallel rank.

NeMo Automodel issue #3816 (2026-09-05), pull request #3817; DeepSpeed #8475 averages such norms
(2026-09-10). The part of the experts is never summed over the expert-parallel ranks, so each clips the
weights that they share by its own factor, and the replicas drift apart.
"""

import torch
from parts import Copy, Experts, Reduce, Tokens, total
from torch import nn

EXPECTED = {"Bug": ("norm", "norm of one rank"), "Averaged": ("norm", "average of norms")}


class Parallel(Experts):
    def forward(self, x, target=None):
        x = self.before(x)
        scores, chosen = self.route(x)
        x, scores = Copy.apply(x, self.group), Copy.apply(scores, self.group)
        local = chosen - self.group.rank() * len(self.up)
        here, local = (local >= 0) & (local < len(self.up)), local.clamp(0, len(self.up) - 1)
        hidden = torch.tanh(torch.einsum("th,tkhf->tkf", x, self.up[local]))
        rows = torch.einsum("tkf,tkfh->tkh", hidden, self.down[local])
        return Reduce.apply((torch.where(here, scores, 0.0)[..., None] * rows).sum(1), self.group)


class Fixed(Tokens):
    layouts, placements = {"ep": (2, 4)}, {"up": {"ep": 0}, "down": {"ep": 0}}
    dense = lambda self, case: Experts()

    def parallel(self, dense, ranks):
        dense.__class__, dense.group = Parallel, ranks.group("ep")
        dense.up = nn.Parameter(ranks.shard(dense.up, "ep", 0))
        dense.down = nn.Parameter(ranks.shard(dense.down, "ep", 0))
        return dense

    def norm(self, model, ranks):
        squares = {name: p.grad.square().sum() for name, p in model.named_parameters()}
        experts = squares.pop("up") + squares.pop("down")
        return self.combine(sum(squares.values()), experts, ranks.group("ep"))

    def combine(self, shared, experts, group):
        return (shared + total(experts, group)).sqrt()


class Bug(Fixed):
    combine = lambda self, shared, experts, group: (shared + experts).sqrt()


class Averaged(Fixed):
    combine = lambda self, shared, experts, group: total((shared + experts).sqrt(), group) / group.size()
