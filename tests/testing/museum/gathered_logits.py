"""Full logits in a loss that expects a shard of the vocabulary.

Megatron-LM issue #7452, finding 2 (2026-09-17). `GPTModel` with `parallel_output=False` gathers the logits
and still computes a vocabulary-parallel loss: every rank adds the whole sum of exponentials, so the loss is
too large by log(TP), and the gradient is wrong.
"""

import torch.nn.functional as F
from parts import Copy, Gather, Tokens, vocab_parallel_log_probs
from torch import nn

EXPECTED = {"Bug": ("output", "log of the group size")}


class Dense(nn.Linear):
    def forward(self, x, target):
        return F.cross_entropy(super().forward(x), target, reduction="none")


class Parallel(nn.Module):
    def __init__(self, dense, ranks, gathered):
        super().__init__()
        self.weight, self.group = nn.Parameter(ranks.shard(dense.weight, "tp", 0)), ranks.group("tp")
        self.gathered = gathered

    def forward(self, x, target):
        logits = Copy.apply(x, self.group) @ self.weight.t()
        if self.gathered:
            logits = Gather.apply(logits, self.group, -1)
        return -vocab_parallel_log_probs(logits, target, self.group)[1]


class Fixed(Tokens):
    placements, gathered = {"weight": {"tp": 0}}, False
    dense = lambda self, case: Dense(4, 8, bias=False)
    parallel = lambda self, dense, ranks: Parallel(dense, ranks, self.gathered)


class Bug(Fixed):
    gathered = True
