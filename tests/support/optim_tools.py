"""Small models in plain torch, shared by the tests of fastmp.optim."""

from __future__ import annotations

import torch
from torch import nn


def make_model(dtype=torch.float64, seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5), nn.Tanh(), nn.Linear(5, 3)).to(dtype)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.embedding = nn.Embedding(11, 4, dtype=torch.float64)
        self.output = nn.Linear(4, 11, bias=False, dtype=torch.float64)
        self.output.weight = self.embedding.weight

    def forward(self, x):
        return self.output(self.embedding(x))
