"""Dynamic loss scaling for float16: a state machine, and its execution on the device.

Small gradients are zero in float16, so the loss is multiplied by a scale before backward, and the optimizer
multiplies the gradients by its inverse. The scale halves where gradients overflow, and doubles after
`growth_interval` steps without overflow. It is always a power of two: scaling and its inverse round nothing.
`next_loss_scale` is the whole rule. `LossScaler` follows it with tensors, and the host never waits for them.
Micikevicius et al., "Mixed Precision Training" (2018).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = ["LossScale", "LossScaler", "next_loss_scale"]

_HIGHEST = 2.0**127  # twice as much is infinite in float32


class LossScale(NamedTuple):
    """The state of a loss scaler.

    `growth_tracker` counts the steps without overflow since the last overflow or doubling.
    `hysteresis_tracker` is how many more steps may overflow before the scale halves.
    """

    scale: float
    growth_tracker: int
    hysteresis_tracker: int


def next_loss_scale(
    state: LossScale, found_inf: bool, *, growth_interval: int, hysteresis: int, min_scale: float
) -> LossScale:
    """Return the state after a step; `found_inf`: its gradients overflowed.

    Each overflow takes one from the hysteresis tracker, and once that is at 0 halves the scale, but not below
    `min_scale`. Only a doubling gives `hysteresis` back, as in Megatron-LM: a scale that has begun to halve
    goes on to halve at every overflow until it suits. A scale that cannot double in float32 stays. With
    `hysteresis` 1, this is `torch.amp.GradScaler` with its default factors.
    """
    if found_inf:
        left = max(state.hysteresis_tracker - 1, 0)
        return LossScale(state.scale if left else max(state.scale / 2, min_scale), 0, left)
    if state.growth_tracker + 1 < growth_interval:
        return state._replace(growth_tracker=state.growth_tracker + 1)
    return LossScale(min(state.scale * 2, _HIGHEST), 0, hysteresis)


class LossScaler:
    """The scale of a float16 loss, in three tensors on `device` that `update` changes in place.

    `update` launches kernels only, so a CUDA graph can contain it.

    Args:
        init_scale, min_scale: powers of two, the first scale and the smallest one.
        growth_interval: consecutive steps without overflow after which the scale doubles.
        hysteresis: steps that may overflow before the scale halves; see `next_loss_scale`.

    Raises:
        ValueError: a scale that is not a power of two in float32, or a number that is not positive.

    Example:
        scaler = LossScaler(init_scale=2.0**10)
        (loss * scaler.scale).backward()
        norm = sum(p.grad.square().sum() for p in model.parameters()).sqrt()  # of scaled gradients
        for param in model.parameters():
            param.grad *= scaler.inv_scale
        scaler.update(~torch.isfinite(norm))
    """

    def __init__(
        self,
        *,
        device: torch.device | str = "cpu",
        init_scale: float = 2.0**16,
        min_scale: float = 1.0,
        growth_interval: int = 2000,
        hysteresis: int = 1,
    ) -> None:
        for name, value in (("init_scale", init_scale), ("min_scale", min_scale)):
            if not (2.0**-126 <= value <= _HIGHEST and math.frexp(value)[0] == 0.5):
                raise ValueError(f"LossScaler: {name} must be a power of two in float32, got {value}")
        if min_scale > init_scale:
            raise ValueError(f"LossScaler: min_scale {min_scale} is above init_scale {init_scale}")
        if growth_interval < 1 or hysteresis < 1:
            raise ValueError(
                f"LossScaler: growth_interval and hysteresis must be positive, got {growth_interval} and "
                f"{hysteresis}"
            )
        self.growth_interval, self.hysteresis, self.min_scale = growth_interval, hysteresis, min_scale
        self.scale = torch.tensor(init_scale, dtype=torch.float32, device=device)
        self._growth_tracker = torch.tensor(0, dtype=torch.int32, device=device)
        self._hysteresis_tracker = torch.tensor(hysteresis, dtype=torch.int32, device=device)

    @property
    def inv_scale(self) -> Tensor:
        """Return 1 / scale, which is exact, as a new 0-dim float32 tensor."""
        return self.scale.reciprocal()

    @torch.no_grad()
    def update(self, found_inf: Tensor) -> None:
        """Go to the next state; call it once a step, after the optimizer.

        Args:
            found_inf: 0-dim bool tensor on the scaler's device, True if a gradient of the step is not finite;
                the same on all ranks.

        Raises:
            ValueError: another shape, dtype or device.
        """
        if found_inf.dtype != torch.bool or found_inf.dim() or found_inf.device != self.scale.device:
            raise ValueError(
                f"LossScaler.update: found_inf must be a 0-dim bool tensor on {self.scale.device}, got "
                f"{tuple(found_inf.shape)} {found_inf.dtype} on {found_inf.device}; of a norm, pass "
                f"~torch.isfinite(norm)"
            )
        left = (self._hysteresis_tracker - found_inf.int()).clamp(min=0)
        steps = (self._growth_tracker + 1).masked_fill(found_inf, 0)
        doubles = steps >= self.growth_interval
        halved, doubled = (self.scale / 2).clamp(min=self.min_scale), (self.scale * 2).clamp(max=_HIGHEST)
        kept = torch.where(doubles, doubled, self.scale)
        self.scale.copy_(torch.where(found_inf & (left == 0), halved, kept))
        self._growth_tracker.copy_(steps.masked_fill(doubles, 0))
        self._hysteresis_tracker.copy_(left.masked_fill(doubles, self.hysteresis))

    def state_dict(self) -> dict[str, Tensor]:
        """Return {"scale": float32, "growth_tracker", "hysteresis_tracker": int32}, 0-dim, not copied."""
        trackers = {"growth_tracker": self._growth_tracker, "hysteresis_tracker": self._hysteresis_tracker}
        return {"scale": self.scale, **trackers}

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Copy `state_dict` (tensors or numbers) into the scaler. Raises ValueError for other keys."""
        mine = self.state_dict()
        if mine.keys() != state_dict.keys():
            raise ValueError(
                f"LossScaler.load_state_dict: need {sorted(mine)}, got {sorted(map(str, state_dict))}"
            )
        for key, tensor in mine.items():
            tensor.copy_(torch.as_tensor(state_dict[key]))
