"""A second loss, divided by the rank's own number of tokens.

Megatron-LM issue #7452, finding 3 (2026-09-17). The loss of multi-token prediction is normalised with the
local count of valid tokens while the main loss has the global one: tokens of ranks with few of them weigh
more.
"""

import torch
import torch.nn.functional as F
from parts import Tokens, total
from torch import nn

EXPECTED = {"Bug": ("gradient", "local token counts")}


class Heads(nn.Module):
    def __init__(self):
        super().__init__()
        self.main, self.mtp, self.rescale = nn.Linear(4, 8), nn.Linear(4, 8), lambda tokens: 1.0

    def forward(self, x, target):
        losses = [F.cross_entropy(head(x), target, reduction="none") for head in (self.main, self.mtp)]
        return {"main": losses[0], "mtp": losses[1], "scale": self.rescale(len(x))}


class Fixed(Tokens):
    layouts, placements = {"dp": (1, 2, 4)}, {"loss": None}  # each loss is compared by itself
    dense = lambda self, case: Heads()
    parallel = lambda self, dense, ranks: dense
    count = lambda self, batch: len(batch["x"])

    def loss(self, outputs, batch):
        return outputs["main"].sum() + outputs["scale"] * outputs["mtp"].sum()

    def synchronize(self, model, ranks):
        for param in model.parameters():
            param.grad = total(param.grad, ranks.group("dp"))


class Bug(Fixed):
    def parallel(self, dense, ranks):
        tokens = lambda count: float(total(torch.tensor(float(count)), ranks.group("dp")))
        dense.rescale = lambda count: tokens(count) / (count * ranks.size("dp"))
        return dense
