"""The optimizer step over main gradients: global norm, clipping, AdamW on masters, skipping.

Everything stays on the device. The norm is a tensor, the clip coefficient is a tensor, and whether the step
counts is a tensor: a norm that is not finite reaches the fused kernel as `found_inf`, which then leaves
parameters and state as they are, on every rank alike because the norm is the same on every rank. Nothing
waits for the host.
AdamW: Loshchilov and Hutter, "Decoupled Weight Decay Regularization" (2019).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from fastmp.parallel.collectives import all_reduce_, group_rank
from fastmp.parallel.grads import main_dtype
from fastmp.parallel.layers import parallel_attributes

__all__ = ["AdamW", "clip_coefficient", "global_grad_norm"]


def global_grad_norm(
    parameters: Iterable[Parameter],
    *,
    tp_group: dist.ProcessGroup | None = None,
    mp_group: dist.ProcessGroup | None = None,
) -> Tensor:
    """2-norm of all main gradients of the model, each parameter counted once whatever the layout.

    parameters: this rank's parameters, with `main_grad` already reduced over data-parallel ranks.
    tp_group: parameters not marked `tensor_model_parallel` are replicated over it; its first rank counts
        them.
    mp_group: ranks that together hold one copy of the model (tensor and pipeline parallel); one all-reduce.

    Returns a 0-dim float64 tensor on the gradients' device, with the same bits on every rank. It is not
    finite as soon as one gradient on one rank is not, also on the ranks that do not count a replicated
    parameter.
    """
    sharded: list[Tensor] = []
    replicated: list[Tensor] = []
    for param in parameters:
        is_sharded = parallel_attributes(param).tensor_model_parallel
        (sharded if is_sharded else replicated).append(param.main_grad)
    if not sharded and not replicated:
        raise ValueError("global_grad_norm: no parameters given")
    # 0 x inf = nan: a rank that does not count the replicated ones still passes on that one is not finite.
    share = 1.0 if group_rank(tp_group) == 0 else 0.0
    squares = [_sum_of_squares(grads) * w for grads, w in ((sharded, 1.0), (replicated, share)) if grads]
    total = torch.stack(squares).sum()
    if mp_group is not None:
        all_reduce_(total, mp_group)
    return total.sqrt()


def _sum_of_squares(grads: list[Tensor]) -> Tensor:
    return torch.stack(torch._foreach_norm(grads)).double().square().sum()


def clip_coefficient(norm: Tensor, max_norm: float) -> Tensor:
    """Factor in (0, 1] that brings gradients of `norm` down to `max_norm`; a `max_norm` of 0 never clips."""
    if max_norm < 0:
        raise ValueError(f"clip_coefficient: max_norm must not be negative, got {max_norm}")
    return (max_norm / (norm + 1e-6)).clamp(max=1.0) if max_norm else torch.ones_like(norm)


class AdamW:
    """AdamW on main gradients, with torch's fused kernel.

    named_parameters: (name, parameter) pairs that have a `main_grad` (see `GradBuffer`). A float32 or float64
        parameter is updated in place; a bfloat16 or float16 one has a float32 master, of which it is the
        rounded copy. Parameters with fewer than two dimensions (biases, norms) are not decayed.

    `skipped_steps` is a 0-dim int64 tensor that counts the steps dropped for a gradient norm that was not
    finite.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, Parameter]],
        *,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
    ) -> None:
        self.parameters = dict(named_parameters)
        if not self.parameters:
            raise ValueError("AdamW: no parameters given")
        for name, param in self.parameters.items():
            if not hasattr(param, "main_grad"):
                raise ValueError(f"AdamW: parameter {name!r} has no main_grad; make a GradBuffer of it first")
        self.masters = {name: _master(param) for name, param in self.parameters.items()}
        decayed = [m for m in self.masters.values() if m.ndim >= 2]
        others = [m for m in self.masters.values() if m.ndim < 2]
        groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
        self._adamw = torch.optim.AdamW(
            [group for group in groups if group["params"]], lr=lr, betas=betas, eps=eps, fused=True
        )
        for master in self.masters.values():
            self._adamw.state[master] = {
                "step": torch.zeros((), dtype=torch.float32, device=master.device),
                "exp_avg": torch.zeros_like(master),
                "exp_avg_sq": torch.zeros_like(master),
            }
        device = next(iter(self.masters.values())).device
        self.skipped_steps = torch.zeros((), dtype=torch.int64, device=device)

    def step(self, lr: float | None = None, *, grad_norm: Tensor | None = None) -> None:
        """Update the parameters from their main gradients, with learning rate `lr` (the last one if None).

        grad_norm: 0-dim tensor; where it is not finite, parameters and state stay bitwise what they were, and
        `skipped_steps` grows by one. All ranks must pass the same value.
        """
        if lr is not None:
            for group in self._adamw.param_groups:
                group["lr"] = lr
        skip = None if grad_norm is None else ~torch.isfinite(grad_norm)
        self._adamw.found_inf = None if skip is None else skip.float()
        self._adamw.step()
        self._copy_back()
        if skip is not None:
            self.skipped_steps += skip

    @torch.no_grad()
    def _copy_back(self) -> None:
        rounded = {name: p for name, p in self.parameters.items() if p.dtype != self.masters[name].dtype}
        if rounded:
            torch._foreach_copy_(list(rounded.values()), [self.masters[name] for name in rounded])

    def state_dict(self) -> dict[str, Any]:
        """{"step", "skipped_steps": 0-dim tensors, "state": {name: {"exp_avg", "exp_avg_sq"}}}, not copied.

        A low-precision parameter has a third entry, "master".
        """
        state: dict[str, dict[str, Tensor]] = {}
        for name, param in self.parameters.items():
            master = self.masters[name]
            state[name] = {key: self._adamw.state[master][key] for key in ("exp_avg", "exp_avg_sq")}
            if param.dtype != master.dtype:
                state[name]["master"] = master
        return {"step": self._steps()[0], "skipped_steps": self.skipped_steps, "state": state}

    def _steps(self) -> list[Tensor]:
        """torch keeps one count of updates per parameter; here they are all equal."""
        return [self._adamw.state[master]["step"] for master in self.masters.values()]

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Copy `state_dict` (counts as tensors or numbers) into the optimizer, masters into their parameters.

        Raises ValueError naming the parameters that only one side has, or the entry whose shape differs.
        """
        mine, loaded = self.state_dict()["state"], state_dict["state"]
        if mine.keys() != loaded.keys():
            raise ValueError(
                f"AdamW.load_state_dict: only in the optimizer {sorted(mine.keys() - loaded.keys())[:3]}, "
                f"only in the state {sorted(loaded.keys() - mine.keys())[:3]}"
            )
        for name, entries in mine.items():
            for key, tensor in entries.items():
                got = tuple(loaded[name][key].shape) if key in loaded[name] else "nothing"
                if got != tuple(tensor.shape):
                    raise ValueError(
                        f"AdamW.load_state_dict: {name}.{key} is {tuple(tensor.shape)} here, got {got}"
                    )
        for name, entries in mine.items():
            for key, tensor in entries.items():
                tensor.copy_(loaded[name][key])
        for step in self._steps():
            step.fill_(state_dict["step"])
        self.skipped_steps.fill_(state_dict["skipped_steps"])
        self._copy_back()


def _master(param: Parameter) -> Tensor:
    """What the kernel updates: the parameter's own storage, or its copy in the main dtype."""
    master = param.detach().to(main_dtype(param.dtype))
    master.grad = param.main_grad
    return master
