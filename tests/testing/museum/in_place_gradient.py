"""A loss that overwrites its input with the gradient.

Liger-Kernel issue #272, pull requests #273 (2024-09-26) and #1251 (2026-06-04). The cross-entropy kernel
stores its gradient in the logits, and torch does not see the write. If an op in front of it has kept that
tensor for its own backward pass, as softmax and tanh do, its gradient is computed from the wrong values.
"""

import torch
import torch.nn.functional as F
from parts import Tokens, total
from torch import nn

EXPECTED = {"Bug": ("gradient", "overwritten memory")}


class FusedLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, target, in_place):
        losses = F.cross_entropy(logits, target, reduction="none")
        grad = logits.softmax(-1) - F.one_hot(target, logits.shape[-1])
        ctx.grad = logits.data.copy_(grad) if in_place else grad  # .data: unseen, like a Triton kernel
        return losses

    @staticmethod
    def backward(ctx, grad):
        return ctx.grad * grad[:, None], None, None


class Model(nn.Linear):
    fused = in_place = False

    def forward(self, x, target):
        logits = super().forward(x).tanh()
        loss = FusedLoss.apply(logits, target, self.in_place) if self.fused else None
        return F.cross_entropy(logits, target, reduction="none") if loss is None else loss


class Fixed(Tokens):
    layouts, in_place = {"dp": (2,)}, False
    dense = lambda self, case: Model(4, 8)

    def parallel(self, dense, ranks):
        dense.fused, dense.in_place = True, self.in_place
        return dense

    def synchronize(self, model, ranks):
        for param in model.parameters():
            param.grad = total(param.grad, ranks.group("dp"))


class Bug(Fixed):
    in_place = True
