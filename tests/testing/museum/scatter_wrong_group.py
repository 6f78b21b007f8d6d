"""The sequence scattered over one group and gathered over another.

Megatron-LM issue #7452, finding 7 (2026-09-17). `LLaVAModel` scatters the combined embeddings over the
global tensor-parallel group although the model was given another one, so the gather that follows puts
together [0, 1, 0, 1] where the sequence was [0, 1, 2, 3].
"""

import torch
from parts import Gather, Tokens, total
from torch import nn

EXPECTED = {"Bug": ("output", "wrong group")}


class Parallel(nn.Module):
    def __init__(self, dense, ranks, axis):
        super().__init__()
        self.layer, self.group, self.ranks, self.axis = dense, ranks.group("tp"), ranks, axis

    def forward(self, x):
        local = x.chunk(self.ranks.size(self.axis))[self.ranks.index(self.axis)]
        return Gather.apply(self.layer(local), self.group, 0)


class Layer(nn.Linear):
    def forward(self, x):
        return super().forward(x).tanh()


class Fixed(Tokens):
    layouts, sizes, axis = {"dp": (2,), "tp": (2,)}, {"tokens": (4, 8)}, "tp"
    dense = lambda self, case: Layer(4, 4)
    parallel = lambda self, dense, ranks: Parallel(dense, ranks, self.axis)
    dense_name = lambda self, name, ranks: name.removeprefix("layer.")
    inputs = lambda self, case, generator: {"x": torch.randn(case["tokens"], 4, generator=generator)}

    def synchronize(self, model, ranks):
        for param in model.parameters():
            param.grad = total(param.grad, ranks.group())


class Bug(Fixed):
    axis = "dp"
