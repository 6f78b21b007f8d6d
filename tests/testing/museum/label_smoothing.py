"""Label smoothing over a shard of the vocabulary.

Megatron-LM issue #7452, finding 1 (2026-09-17), reported before as #737 (2024-03-14) and #7464.
`vocab_parallel_cross_entropy` with label smoothing takes the mean log-probability of the local columns for
that of the vocabulary, so every tensor-parallel rank has its own loss.
"""

import torch.nn.functional as F
from parts import Copy, Reduce, Tokens, vocab_parallel_log_probs
from torch import nn

EXPECTED = {"Bug": ("output", "missing average")}


class Dense(nn.Linear):
    def forward(self, x, target):
        return F.cross_entropy(super().forward(x), target, reduction="none", label_smoothing=0.1)


class Parallel(nn.Module):
    def __init__(self, dense, ranks, local):
        super().__init__()
        self.weight, self.group = nn.Parameter(ranks.shard(dense.weight, "tp", 0)), ranks.group("tp")
        self.local = local

    def forward(self, x, target):
        logits = Copy.apply(x, self.group) @ self.weight.t()
        log_probs, picked = vocab_parallel_log_probs(logits, target, self.group)
        mean = log_probs.mean(-1) if self.local else Reduce.apply(log_probs.sum(-1), self.group) / 8
        return -(0.9 * picked + 0.1 * mean)


class Fixed(Tokens):
    placements, local = {"weight": {"tp": 0}}, False
    dense = lambda self, case: Dense(4, 8, bias=False)
    parallel = lambda self, dense, ranks: Parallel(dense, ranks, self.local)


class Bug(Fixed):
    local = True
