"""A sum that begins in memory nobody has written.

Triton pull request #4075 (2024-06-05), layer norm of the tutorials. The backward kernel adds rows of the
weight gradient to a buffer from `torch.empty`: right for as long as the allocator happens to return zeros.
"""

import torch
import torch.nn.functional as F
from parts import Tokens, total
from torch import nn

EXPECTED = {"Bug": ("gradient", "unwritten memory")}


class FusedLayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, empty):
        mean, var = x.mean(-1, keepdim=True), x.var(-1, keepdim=True, unbiased=False)
        normed = (x - mean) * (var + 1e-5).rsqrt()
        ctx.save_for_backward(normed)
        ctx.buffer = (torch.empty if empty else torch.zeros)(2, x.shape[-1], dtype=x.dtype)
        return normed * weight

    @staticmethod
    def backward(ctx, grad):
        (normed,) = ctx.saved_tensors
        for row, part in enumerate(grad * normed):  # locked groups of rows share a row of the buffer
            ctx.buffer[row % 2] += part
        return None, ctx.buffer.sum(0), None


class Model(nn.LayerNorm):
    fused = empty = False

    def forward(self, x, target=None):
        if self.fused:
            return FusedLayerNorm.apply(x, self.weight, self.empty)
        return F.layer_norm(x, (4,), self.weight)


class Fixed(Tokens):
    layouts, empty = {"dp": (2,)}, False
    dense = lambda self, case: Model(4, bias=False)

    def parallel(self, dense, ranks):
        dense.fused, dense.empty = True, self.empty
        return dense

    def synchronize(self, model, ranks):
        model.weight.grad = total(model.weight.grad, ranks.group("dp"))


class Bug(Fixed):
    empty = True
