"""Trainers whose parameters have gradient hooks (`weight.register_hook`)."""

from __future__ import annotations

import zlib
from functools import partial

import torch
from trainer_tools import make_trainer

from fastmp.optim.named_params import named_parameters


def factor_of(name: str) -> float | None:
    """The number that a parameter's hook multiplies gradients by; None: it has no hook."""
    return (0.0, 0.5, -2.0, None)[zlib.crc32(name.encode()) % 4]


def hook(trainer):
    """Give three of four parameters a hook, which scales their gradients."""
    handles = []
    for name, param in named_parameters(trainer.runner.chunks):
        if (factor := factor_of(name)) is not None:
            handles.append(param.register_hook(partial(torch.mul, other=factor)))
    assert handles
    return handles


def hooked(*arguments, **options):
    trainer = make_trainer(*arguments, **options)
    hook(trainer)
    return trainer
