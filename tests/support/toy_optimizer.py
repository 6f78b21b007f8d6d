"""An optimizer from outside of fastmp: SGD with momentum and decoupled weight decay."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastmp.config import OPTIMIZERS, OptimizerConfig, OptimizerSpec, StateSpec
from fastmp.distributed.groups import ParallelGroups
from fastmp.optim.flat_params import FlatState
from fastmp.optim.grad_buffers import FlatBuffer, GradBuffer
from fastmp.optim.optimizer import Optimizer

STATE = StateSpec(("velocity",))


class Sgd(Optimizer):
    def __init__(self, grads: GradBuffer, *, momentum: float = 0.9, **options: Any) -> None:
        self.momentum = momentum
        super().__init__(grads, **options)

    def make_state(self, grads: FlatBuffer, number: int) -> FlatState:
        return FlatState(grads, self.name, self.states, STATE)

    def update(self, skip: Tensor | None, inv_scale: Tensor | None, clip_coefficient: Tensor | None) -> None:
        for i, j in self.order:
            flat = self.flats[i]
            # 1. The gradient of this rank's shard, unscaled and clipped.
            grad = flat.grads.grad[slice(*flat.grads.shards[j])]
            for factor in (inv_scale, clip_coefficient):
                grad = grad if factor is None else grad * factor
            # 2. The moment and the master weights; a skipped step keeps both.
            velocity, old = flat.moments["velocity"][flat.local[j]], flat.master_weights(j)
            moved = self.momentum * velocity + grad
            new = old - self.lr * moved
            count = True if skip is None else ~skip
            velocity.copy_(moved if skip is None else torch.where(skip, velocity, moved))
            flat.set_master_weights(j, new if skip is None else torch.where(skip, old, new))
            flat.steps[j] += count
            # 3. All ranks get the new parameters while the next bucket is updated.
            self.start_gather((i, j))


def make(grads: GradBuffer, config: OptimizerConfig, groups: ParallelGroups, **options: Any) -> Sgd:
    return Sgd(grads, lr=config.lr, momentum=config.momentum, states=config.states, **options)


def register() -> None:
    OPTIMIZERS.register(OptimizerSpec("sgd", "toy_optimizer:make", STATE, help="momentum"))
