"""Options of the two sharded losses, and targets and weights for them."""

from __future__ import annotations

import torch

OPTIONS = {
    "plain": {},
    "label smoothing": {"label_smoothing": 0.1},
    "z-loss": {"z_loss": 1e-2},
    "padded vocabulary": {"vocab_size": 17},
    "padded vocabulary, a shard all padding": {"vocab_size": 5},
    "weights": {"token_weight": True},
    "everything": {
        "label_smoothing": 0.2,
        "z_loss": 1e-2,
        "vocab_size": 19,
        "token_weight": True,
        "ignore_index": 3,
    },
}


def problem(shapes, options, V, dtype=torch.float64):
    """Tensors of `shapes`, targets with two ignored, the gradient of the loss, options with their tensors.

    The first shape is (S, B, ...); targets, gradient and weights are (S, B). Numbers are rounded to `dtype`.
    """
    generator = torch.Generator().manual_seed(0)
    options, tokens = dict(options), shapes[0][:2]
    tensors = [torch.randn(shape, dtype=torch.float64, generator=generator).to(dtype) for shape in shapes]
    target = torch.randint(options.get("vocab_size", V), tokens, generator=generator)
    target[1, 2] = target[4, 0] = options.get("ignore_index", -100)
    grad_loss = torch.randn(tokens, dtype=torch.float64, generator=generator)
    if options.get("token_weight"):
        options["token_weight"] = torch.rand(tokens, dtype=torch.float64, generator=generator)
    return *tensors, target, grad_loss, options
