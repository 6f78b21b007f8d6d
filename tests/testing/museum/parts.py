"""Parts that several exhibits share: collectives with a gradient, a loss over vocabulary shards, inputs."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from fastmp.testing.differential import Subject


def total(x, group):
    """Return the sum of `x` over the ranks of `group`, without a gradient."""
    x = x.detach().clone(memory_format=torch.contiguous_format)
    dist.all_reduce(x, group=group)
    return x


class Copy(torch.autograd.Function):
    """The input; its gradient is summed over the group: in front of a column-parallel layer."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return total(grad, ctx.group), None


class Reduce(torch.autograd.Function):
    """The sum over the group; its gradient is the same on every rank: behind a row-parallel layer."""

    @staticmethod
    def forward(ctx, x, group):
        return total(x, group)

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class Gather(torch.autograd.Function):
    """The shards of the group, joined along dimension `dim`; their gradient is the local shard of it."""

    @staticmethod
    def forward(ctx, x, group, dim):
        ctx.group, ctx.dim = group, dim
        parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(group.size())]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts, dim)

    @staticmethod
    def backward(ctx, grad):
        return grad.chunk(ctx.group.size(), ctx.dim)[ctx.group.rank()].contiguous(), None, None


class Exchange(torch.autograd.Function):
    """All-gather (`gathers`) or reduce-scatter of tokens; each is the gradient of the other."""

    @staticmethod
    def forward(ctx, x, group, gathers):
        ctx.group, ctx.gathers = group, gathers
        if not gathers:
            return total(x, group).chunk(group.size())[group.rank()]
        parts = [torch.empty_like(x) for _ in range(group.size())]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, grad):
        return Exchange.apply(grad, ctx.group, not ctx.gathers), None, None


def vocab_parallel_log_probs(logits, target, group):
    """Return the log-probabilities of the local columns, and that of `target`, which one rank has.

    Every rank is taken to hold as many columns of the vocabulary as `logits` has.
    """
    peak = logits.detach().amax(-1, keepdim=True)
    dist.all_reduce(peak, dist.ReduceOp.MAX, group=group)
    sums = Reduce.apply((logits - peak).exp().sum(-1, keepdim=True), group)
    log_probs = logits - peak - Copy.apply(sums.log(), group)
    local = target - group.rank() * logits.shape[-1]
    here = (local >= 0) & (local < logits.shape[-1])
    picked = log_probs.gather(-1, local.clamp(0, logits.shape[-1] - 1)[:, None])[:, 0]
    return log_probs, Reduce.apply(torch.where(here, picked, 0.0), group)


class Tokens(Subject):
    """Subject whose modules take (tokens, 4) inputs and one target of 8 for each token."""

    layouts = {"tp": (1, 2, 4)}
    sizes = {"tokens": (3, 5)}

    def inputs(self, case, generator):
        tokens = case["tokens"]
        if case.uneven:
            tokens += int(torch.randint(3, (), generator=generator))
        x = torch.randn(tokens, 4, generator=generator)
        return {"x": x, "target": torch.randint(8, (tokens,), generator=generator)}


class Linear(nn.Linear):
    """A linear layer that takes and ignores targets."""

    def forward(self, x, target=None):
        return super().forward(x)


class Experts(nn.Module):
    """Two layers of each of 4 experts, and a router that sends every token to 2 of them."""

    def __init__(self):
        super().__init__()
        self.before = nn.Linear(4, 4)
        self.router = nn.Linear(4, 4, bias=False)
        self.up = nn.Parameter(torch.randn(4, 4, 6) / 2)
        self.down = nn.Parameter(torch.randn(4, 6, 4) / 2)

    def route(self, x):
        """Return the scores of the chosen experts and their numbers, both (tokens, 2)."""
        return self.router(x).softmax(-1).topk(2, -1)

    def forward(self, x, target=None):
        x = self.before(x)
        scores, chosen = self.route(x)
        hidden = torch.tanh(torch.einsum("th,tkhf->tkf", x, self.up[chosen]))
        return torch.einsum("tkf,tkfh,tk->th", hidden, self.down[chosen], scores)
