"""AdamW on flat buffers: one launch a step for each bucket.

`fastmp.ops.adamw_` scales and clips the gradients as it reads them, updates the moments and master weights of
this rank's shard, and writes the low-precision parameters. A gradient norm that is not finite reaches it as
`found_inf`, and parameters and state stay as they are.
Loshchilov and Hutter, "Decoupled Weight Decay Regularization" (2019).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from fastmp.config import OPTIMIZERS, OptimizerConfig
from fastmp.distributed.groups import ParallelGroups
from fastmp.ops import adamw_
from fastmp.optim.flat_layout import ALIGNMENT
from fastmp.optim.flat_params import FlatState
from fastmp.optim.grad_buffers import FlatBuffer, GradBuffer, main_dtype
from fastmp.optim.optimizer import Optimizer, ParameterGroup, check_range

__all__ = ["AdamW"]

_RANDOM_RANGE = 1 << 40  # random numbers that each buffer has to itself: more than its elements


class AdamW(Optimizer):
    """AdamW on the main gradients of a `GradBuffer`, one launch a step for each of its buckets.

    Args:
        grads, lr, weight_decay, group, states: see `Optimizer`. Small states take 6 bytes a bfloat16
            parameter in place of 12: moments are bfloat16, rounded stochastically. float32 parameters have
            small moments, too.
        betas: the decay rates of the two moments, in [0, 1).
        eps: the term added to the denominator.
        seed: of the random bits of stochastic rounding. They depend on the place of an element in its buffer
            and on the step, not on the rank that updates it.

    Raises:
        ValueError: as `Optimizer`, or betas or eps out of range.

    Example:
        grads = GradBuffer(model.named_parameters())
        optimizer = AdamW(grads, lr=3e-4)
        grads.zero()
        model(x).sum().backward()
        grads.reduce()
        optimizer.step()
    """

    def __init__(
        self,
        grads: GradBuffer,
        *,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        group: Callable[[str, Parameter], ParameterGroup] | None = None,
        states: str = "classic",
        seed: int = 0,
    ) -> None:
        check_range(type(self).__name__, eps=eps)
        check_range(type(self).__name__, below=1.0, **{"betas[0]": betas[0], "betas[1]": betas[1]})
        self._options: dict[str, Any] = {"betas": betas, "eps": eps}
        if states == "small":
            self._options["seed"] = seed
        super().__init__(grads, lr=lr, weight_decay=weight_decay, group=group, states=states)

    @classmethod
    def from_config(
        cls, grads: GradBuffer, config: OptimizerConfig, groups: ParallelGroups, **options: Any
    ) -> Optimizer:
        """Make the optimizer of a recipe; options: the other arguments of `Optimizer`."""
        return cls(grads, **adamw_options(config), **options)

    def make_state(self, grads: FlatBuffer, number: int) -> FlatState:
        return _AdamWFlat(grads, self.name, self.group_of, self.states, number * _RANDOM_RANGE)

    def update(self, skip: Tensor | None, inv_scale: Tensor | None, clip_coefficient: Tensor | None) -> None:
        """Update the buckets that AdamW updates, all but those of other `FlatState`s."""
        for i, j in self.order:
            flat = self.flats[i]
            if isinstance(flat, _AdamWFlat):
                adamw_(
                    *flat.arguments[j], **flat.options[j], lr=self.lr, inv_scale=inv_scale,
                    clip_coefficient=clip_coefficient, found_inf=skip, **self._options,
                )  # fmt: skip
                self.start_gather((i, j))


def adamw_options(config: OptimizerConfig) -> dict[str, Any]:
    """Return the arguments of `AdamW` that a recipe has."""
    return {name: getattr(config, name) for name in ("lr", "betas", "eps", "weight_decay", "states")}


class _AdamWFlat(FlatState):
    """A flat buffer that AdamW updates.

    `arguments` and `options` are those of `adamw_` for each bucket that do not change.
    """

    def __init__(
        self,
        grads: FlatBuffer,
        optimizer: str,
        group_of: Mapping[str, ParameterGroup],
        states: str,
        origin: int,
    ) -> None:
        super().__init__(grads, optimizer, states, OPTIMIZERS["adamw"].state)
        layout, main = grads.layout, main_dtype(self.params.dtype)
        table = _GroupTable(layout.size, layout.ranges, group_of, main, self.params.device)
        self.arguments, self.options = [], list[dict[str, Any]]()
        for number, ((start, end), at) in enumerate(zip(grads.shards, self.local, strict=True)):
            own = self.shard(number)
            master = own if self.master is None else self.master[at]
            state = *(moment[at] for moment in self.moments.values()), self.steps[number]
            self.arguments.append((master, grads.grad[start:end], *state))
            out = None if self.master is None else own
            options = {"low_precision_out": out, "first": origin + start, **table.options(start, end)}
            if self.remainder is not None:
                options["remainder"] = self.remainder[at]
            self.options.append(options)


class _GroupTable:
    """The group of every 64 elements of a buffer, and the numbers of each group, as `adamw_` takes them."""

    def __init__(
        self,
        size: int,
        ranges: Mapping[str, tuple[int, int]],
        group_of: Mapping[str, ParameterGroup],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._groups = list(dict.fromkeys(group_of[name] for name in ranges))
        if len(self._groups) > 256:
            raise ValueError(f"AdamW: {len(self._groups)} parameter groups are more than 256")
        if len(self._groups) == 1 and self._groups[0].lr == 1:
            return
        table = torch.zeros(-(-size // ALIGNMENT), dtype=torch.uint8)
        for name, (start, end) in ranges.items():
            table[start // ALIGNMENT : -(-end // ALIGNMENT)] = self._groups.index(group_of[name])
        self._table, self._device = table, device
        numbers = torch.tensor(self._groups, dtype=dtype).t().contiguous().to(device)
        self._numbers = {"group_lr": numbers[0], "group_decay": numbers[1]}

    def options(self, start: int, end: int) -> dict[str, Any]:
        """The options of `adamw_` for the elements from `start` to `end`."""
        if len(self._groups) == 1 and self._groups[0].lr == 1:
            return {"weight_decay": self._groups[0].weight_decay}
        own = self._table[start // ALIGNMENT : -(-end // ALIGNMENT)]
        return {"groups": own.to(self._device, copy=True), **self._numbers}
