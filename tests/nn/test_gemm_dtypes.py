"""GEMMs of 16-bit models take 16-bit operands: GPUs multiply float32 at a fraction of the rate.

On the meta device, whose models take the way of a GPU. Its attention is torch's formula in float32, batched
products that are left out here.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fastmp.config.recipe import load_recipe
from fastmp.nn import Placement
from fastmp.nn.gpt import GPT

CONFIGS = Path(__file__).parents[2] / "configs"
RECIPES = [path for path in sorted(CONFIGS.glob("*.toml")) if load_recipe(path).model.bert is None]


class Products(TorchDispatchMode):
    """The products of matrices that run while it is active: (name, dtypes and sizes of operands)."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function._schema.name in ("aten::mm", "aten::addmm"):
            operands = [x for x in args if isinstance(x, Tensor)]
            self.found.append((function._schema.name, *((x.dtype, tuple(x.shape)) for x in operands[-2:])))
        return function(*args, **(kwargs or {}))


def products_of(config) -> list[tuple]:
    """The products of a training step with main gradients, on 64 tokens."""
    model = GPT(config, Placement(device="meta", dtype=torch.bfloat16))
    for parameter in model.parameters():
        parameter.main_grad = torch.empty_like(parameter, dtype=torch.float32)
    tokens = torch.zeros(2, 32, dtype=torch.int64, device="meta")
    with Products() as products:
        losses = model.loss(tokens, tokens)
        losses.sum().backward()
    return products.found


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_no_operand_is_widened(path):
    config = load_recipe(path).model
    config = replace(config, vocab_size=config.vocab_size or 257)  # 0: that of the data
    layers = max((-1, *config.dense_layers)) + 2  # one without experts, if there is any, and one with them
    found = products_of(replace(config, num_layers=layers, full_attention_layers=()))
    assert found
    wide = [product for product in found if torch.float32 in (product[1][0], product[2][0])]
    assert not wide
