"""The gradient buffer and the optimizer of a model, as a configuration asks for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import nn
from torch.nn import Parameter

from fastmp.config import OPTIMIZERS, OptimizerConfig
from fastmp.config.specs import load
from fastmp.distributed.groups import ParallelGroups
from fastmp.optim.grad_buffers import GradBuffer
from fastmp.optim.loss_scaler import LossScaler
from fastmp.optim.named_params import named_parameters
from fastmp.optim.optimizer import Optimizer, ParameterGroup
from fastmp.tensor_parallel.fp8_linear import quantized_weights

__all__ = ["make_grads", "make_optimizer", "make_scaler"]


def make_grads(chunks: Sequence[nn.Module], config: OptimizerConfig, groups: ParallelGroups) -> GradBuffer:
    """Make the gradient buffer of this rank's chunks of a model."""
    cost = OPTIMIZERS[config.name].matrix_cost
    tp_groups = {"tp_group": groups.tp, "etp_group": groups.etp}
    return GradBuffer(
        named_parameters(chunks),
        dp_group=groups.dp_cp,
        tp_group=groups.tp,
        edp_group=groups.edp,
        shard=config.shard,
        bucket_size=config.bucket_size,
        bucket_unit=config.bucket_unit,
        grad_dtype=getattr(torch, config.grad_dtype),
        overlap=config.overlap,
        cost=None if cost is None else partial(load(cost), **tp_groups),
        fp8=quantized_weights(chunks),
        store_first=True,
    )


def make_optimizer(
    grads: GradBuffer,
    config: OptimizerConfig,
    groups: ParallelGroups,
    group: Callable[[str, Parameter], ParameterGroup] | None = None,
) -> Optimizer:
    """Make the optimizer of `grads`; `group` as of `Optimizer`."""
    made: Optimizer = load(OPTIMIZERS[config.name].make)(grads, config, groups, group=group)
    return made


def make_scaler(config: OptimizerConfig, device: torch.device) -> LossScaler:
    """Make the loss scaler of a float16 model.

    The loss is a sum over tokens, so the scale may have to fall below 1.
    """
    return LossScaler(
        device=device,
        init_scale=config.loss_scale,
        min_scale=2.0**-20,
        growth_interval=config.loss_scale_interval,
        hysteresis=config.loss_scale_hysteresis,
    )
