"""Rows that a grouped GEMM does not write.

transformers pull request #48205 (2026-08-22), first bug. Slots of experts on other ranks are sorted behind
the local ones, where the grouped GEMM and its input gradient leave memory as it was. The weight 0 of these
slots does not hide a NaN: 0 times NaN is NaN, from the second step on, when memory has been used before.
"""

import torch
from parts import Copy, Experts, Reduce, Tokens
from torch import nn

EXPECTED = {"Bug": ("gradient", "unwritten memory")}


class GroupedMM(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, weight, expert, here, mask_backward):
        ctx.save_for_backward(rows, weight, expert, here)
        ctx.mask_backward = mask_backward
        return torch.where(here[:, None], torch.einsum("sh,shf->sf", rows, weight[expert]), 0.0)

    @staticmethod
    def backward(ctx, grad):
        rows, weight, expert, here = ctx.saved_tensors
        d_rows = torch.zeros_like(rows) if ctx.mask_backward else torch.empty_like(rows)
        d_rows[here] = torch.einsum("sf,shf->sh", grad[here], weight[expert[here]])
        d_weight = torch.zeros_like(weight).index_add_(
            0, expert[here], rows[here, :, None] * grad[here, None]
        )
        return d_rows, d_weight, None, None, None


class Parallel(Experts):
    def forward(self, x, target=None):
        x = self.before(x)
        scores, chosen = self.route(x)
        x, scores = Copy.apply(x, self.group), Copy.apply(scores, self.group)
        local = chosen.flatten() - self.group.rank() * len(self.up)
        here = (local >= 0) & (local < len(self.up))
        args = (local.clamp(0, len(self.up) - 1), here, self.mask)
        rows = GroupedMM.apply(x.repeat_interleave(2, 0), self.up, *args).tanh()
        rows = GroupedMM.apply(rows, self.down, *args) * torch.where(here, scores.flatten(), 0.0)[:, None]
        return Reduce.apply(rows.view(len(x), 2, -1).sum(1), self.group)


class Fixed(Tokens):
    layouts, mask, placements = {"ep": (1, 2, 4)}, True, {"up": {"ep": 0}, "down": {"ep": 0}}
    dense = lambda self, case: Experts()

    def parallel(self, dense, ranks):
        dense.__class__, dense.mask, dense.group = Parallel, self.mask, ranks.group("ep")
        dense.up = nn.Parameter(ranks.shard(dense.up, "ep", 0))
        dense.down = nn.Parameter(ranks.shard(dense.down, "ep", 0))
        return dense


class Bug(Fixed):
    mask = False
