"""The optimizer step over main gradients: global norm, clipping, AdamW on masters, skipping.

Masters and state lie in flat buffers in the order of the main gradients. A step is two launches over them
(`fastmp.ops.adamw_`), which scales and clips the gradients as it reads them and writes the low-precision
parameters. The host waits for nothing: norm, clip coefficient and whether the step counts are tensors on the
device. A norm that is not finite, which is the same on all ranks, reaches the kernel as `found_inf`, and
parameters and state stay as they are.
AdamW: Loshchilov and Hutter, "Decoupled Weight Decay Regularization" (2019).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from fastmp.ops import adamw_
from fastmp.parallel.collectives import all_reduce_, group_rank
from fastmp.parallel.grads import is_vector, main_dtype, main_grad
from fastmp.parallel.layers import parallel_attributes

__all__ = ["AdamW", "clip_coefficient", "global_grad_norm"]


def global_grad_norm(
    parameters: Iterable[Parameter],
    *,
    tp_group: dist.ProcessGroup | None = None,
    mp_group: dist.ProcessGroup | None = None,
    etp_group: dist.ProcessGroup | None = None,
    expert_mp_group: dist.ProcessGroup | None = None,
) -> Tensor:
    """The 2-norm of all main gradients of the model; each parameter counts once, whatever the layout.

    parameters: this rank's parameters, with `main_grad` already reduced over data-parallel ranks. Those
        marked `pipeline_replica` are counted by another stage.
    tp_group: parameters not marked `tensor_model_parallel` are replicated over it; its first rank counts
        them.
    mp_group: ranks that together hold one copy of the model (tensor and pipeline parallel); one all-reduce.
    etp_group, expert_mp_group: the same for parameters marked `expert_parallel`: tensor parallelism inside an
        expert, and the ranks that together hold one copy of all experts. Where both grids hold a copy of the
        model on the same ranks, `expert_mp_group` is `mp_group` and one all-reduce serves both.

    Returns a 0-dim float64 tensor on the gradients' device, with the same bits on every rank. It is not
    finite where one gradient on one rank is not, even a replicated one on a rank that does not count it.
    """
    grads: dict[tuple[bool, bool, bool], list[Tensor]] = {}
    for param in parameters:
        marks = parallel_attributes(param)
        kind = marks.expert_parallel, marks.tensor_model_parallel, marks.pipeline_replica
        grads.setdefault(kind, []).append(main_grad(param))
    if not grads:
        raise ValueError("global_grad_norm: no parameters given")
    device = next(iter(grads.values()))[0].device
    totals = torch.zeros(2, dtype=torch.float64, device=device)  # of all but experts, of experts
    for (expert, sharded, replica), members in grads.items():
        # 0 x inf is nan: a rank that does not count replicated gradients still shows that one is not finite.
        counts = not replica and (sharded or group_rank(etp_group if expert else tp_group) == 0)
        squares = torch.stack(torch._foreach_norm(members)).double().square()
        totals[int(expert)] += squares.sum() * float(counts)
    if expert_mp_group is mp_group:
        totals = totals.sum(0, keepdim=True)
        if mp_group is not None:
            all_reduce_(totals, mp_group)
    else:
        for total, group in zip(totals, (mp_group, expert_mp_group), strict=True):
            if group is not None:
                all_reduce_(total, group)
    return totals.sum().sqrt()


def clip_coefficient(norm: Tensor, max_norm: float) -> Tensor:
    """The factor in (0, 1] that brings `norm` down to `max_norm`; a `max_norm` of 0 never clips."""
    if max_norm < 0:
        raise ValueError(f"clip_coefficient: max_norm must not be negative, got {max_norm}")
    return (max_norm / (norm + 1e-6)).clamp(max=1.0) if max_norm else torch.ones_like(norm)


class AdamW:
    """AdamW on main gradients, two launches a step for each dtype of parameters in a `GradBuffer`.

    named_parameters: (name, parameter) pairs that have a `main_grad` (see `GradBuffer`). A float32 or float64
        parameter is its own master; a bfloat16 or float16 one is the rounded copy of a float32 master.
        Parameters with fewer than two dimensions (biases, norms; those of experts have one dimension more)
        are not decayed.

    The parameters move: `param.data` becomes a view of a flat buffer, with the strides it had, and no longer
    shares memory with a `param.data` taken before. So make the optimizer once the model has its device and
    dtype. Tied weights, which are one Parameter, stay tied.

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
            _check_gradient(name, param)
        _check_separate(self.parameters)
        self.lr: float | Tensor = lr
        self._options = {"betas": betas, "eps": eps, "weight_decay": weight_decay}
        self._flats = [_Flat(members) for members in _side_by_side(self.parameters)]
        state = {name: entries for flat in self._flats for name, entries in flat.entries().items()}
        self._state = {name: state[name] for name in self.parameters}
        self.masters = {name: self._state[name].pop("master") for name in self.parameters}
        self.skipped_steps = torch.zeros_like(self._flats[0].steps[0])

    @torch.no_grad()
    def step(
        self,
        lr: float | Tensor | None = None,
        *,
        grad_norm: Tensor | None = None,
        inv_scale: Tensor | None = None,
        clip_coefficient: Tensor | None = None,
    ) -> None:
        """Update the parameters from their main gradients, with learning rate `lr` (the last one if None).

        lr: a number, or a 0-dim tensor that a captured CUDA graph reads anew at each replay.
        grad_norm: 0-dim tensor; where it is not finite, parameters and state stay bitwise what they were, and
            `skipped_steps` grows by one. All ranks must pass the same value.
        inv_scale, clip_coefficient: 0-dim tensors that the gradients are multiplied by as they are read.
        """
        if lr is not None:
            self.lr = lr
        skip = None if grad_norm is None else ~torch.isfinite(grad_norm)
        for flat in self._flats:
            flat.check()
            decays = self._options["weight_decay"], 0.0
            for part, step, decay in zip(flat.parts(), flat.steps, decays, strict=True):
                *buffers, rounded = part
                adamw_(
                    *buffers, step, low_precision_out=rounded, lr=self.lr, inv_scale=inv_scale,
                    clip_coefficient=clip_coefficient, found_inf=skip,
                    **{**self._options, "weight_decay": decay},
                )  # fmt: skip
        # The kernel counts a new version of its buffers, which parameters do not share.
        torch.autograd.graph.increment_version(self.parameters.values())
        if skip is not None:
            self.skipped_steps += skip

    def state_dict(self) -> dict[str, Any]:
        """{"step", "skipped_steps": 0-dim tensors, "state": {name: {"exp_avg", "exp_avg_sq"}}}, not copied.

        A low-precision parameter has a third entry, "master".
        """
        state = {name: dict(entries) for name, entries in self._state.items()}
        for name, param in self.parameters.items():
            if param.dtype != self.masters[name].dtype:
                state[name]["master"] = self.masters[name]
        return {"step": self._flats[0].steps[0], "skipped_steps": self.skipped_steps, "state": state}

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
        pairs = [(n, key, own, loaded[n].get(key)) for n, own_n in mine.items() for key, own in own_n.items()]
        for name, key, own, new in pairs:
            got = "nothing" if new is None else tuple(new.shape)
            if got != tuple(own.shape):
                raise ValueError(f"AdamW.load_state_dict: {name}.{key} is {tuple(own.shape)} here, got {got}")
        for _, _, own, new in pairs:
            own.copy_(new)
        for flat in self._flats:
            flat.steps.fill_(state_dict["step"])
            if flat.rounded is not None:
                flat.rounded.copy_(flat.master)
        self.skipped_steps.fill_(state_dict["skipped_steps"])


class _Flat:
    """Parameters of one dtype whose main gradients lie side by side, those to decay first.

    Masters, averages and, for low precision, the parameters lie in buffers of the same order. An element is
    updated from those at its own place, so the buffers can be cut anywhere, for instance into equal shards.
    """

    @torch.no_grad()
    def __init__(self, parameters: dict[str, Parameter]) -> None:
        self.parameters = parameters
        sizes = [param.numel() for param in parameters.values()]
        self.num_decayed = sum(param.numel() for param in parameters.values() if not is_vector(param))
        first = next(iter(parameters.values()))
        self.grad = main_grad(first).as_strided((sum(sizes),), (1,))
        self.master = torch.empty(sum(sizes), dtype=main_dtype(first.dtype), device=first.device)
        self.exp_avg, self.exp_avg_sq = torch.zeros_like(self.master), torch.zeros_like(self.master)
        self.rounded = None
        if first.dtype != self.master.dtype:
            self.rounded = torch.empty_like(self.master, dtype=first.dtype)
        self.steps = torch.zeros(2, dtype=torch.int64, device=first.device)
        for master, param in zip(self._views(self.master), parameters.values(), strict=True):
            master.copy_(param)
        own = self.master if self.rounded is None else self.rounded.copy_(self.master)
        for view, param in zip(self._views(own), parameters.values(), strict=True):
            param.data = view

    def parts(self) -> tuple[list[Tensor | None], list[Tensor | None]]:
        """Slices of masters, gradients, averages and parameters: those to decay, and the others."""
        buffers = self.master, self.grad, self.exp_avg, self.exp_avg_sq, self.rounded
        cuts = slice(self.num_decayed), slice(self.num_decayed, None)
        first, second = ([None if b is None else b[cut] for b in buffers] for cut in cuts)
        return first, second

    def check(self) -> None:
        """Raise ValueError where the model has been moved, as by model.to(dtype), out of the buffers."""
        name, param = next(iter(self.parameters.items()))
        own = self.master if self.rounded is None else self.rounded
        if param.untyped_storage()._cdata != own.untyped_storage()._cdata:
            raise ValueError(
                f"AdamW: parameter {name!r} was {own.dtype} on {own.device} when the optimizer was made, but "
                f"has been moved to {param.dtype} on {param.device}; move the model first"
            )

    def _views(self, buffer: Tensor) -> list[Tensor]:
        """The view of `buffer` at each parameter's place, with its shape and strides."""
        parts = buffer.split([param.numel() for param in self.parameters.values()])
        params = self.parameters.values()
        return [x.as_strided(p.shape, p.stride()) for x, p in zip(parts, params, strict=True)]

    def entries(self) -> dict[str, dict[str, Tensor]]:
        """{name: {"exp_avg", "exp_avg_sq", "master"}}, views."""
        views = zip(*map(self._views, (self.exp_avg, self.exp_avg_sq, self.master)), strict=True)
        keys = ("exp_avg", "exp_avg_sq", "master")
        return {n: dict(zip(keys, v, strict=True)) for n, v in zip(self.parameters, views, strict=True)}


def _check_gradient(name: str, param: Parameter) -> None:
    if not hasattr(param, "main_grad"):
        raise ValueError(f"AdamW: parameter {name!r} has no main_grad; make a GradBuffer of it first")
    grad = param.main_grad
    ours, theirs = ([s for n, s in zip(param.shape, t.stride()) if n > 1] for t in (param, grad))
    if grad.shape != param.shape or ours != theirs or not torch.ops.aten.is_non_overlapping_and_dense(param):
        raise ValueError(
            f"AdamW: parameter {name!r} of shape {tuple(param.shape)} and strides {param.stride()} has a "
            f"main_grad of shape {tuple(grad.shape)} and strides {grad.stride()}; they must agree"
        )


def _check_separate(parameters: Mapping[str, Parameter]) -> None:
    """Raise ValueError where two Parameters share memory: each would move to a place of its own."""

    def place(param: Parameter) -> tuple[int, int]:
        return param.untyped_storage()._cdata, int(param.storage_offset()) * param.element_size()

    storage, end, before = 0, 0, ""
    for name, param in sorted(parameters.items(), key=lambda item: place(item[1])):
        if place(param) < (storage, end) and param.numel():
            raise ValueError(f"AdamW: {before!r} and {name!r} share memory; tie them as one Parameter")
        storage, begin = place(param)
        end, before = begin + param.nbytes, name


def _side_by_side(parameters: Mapping[str, Parameter]) -> list[dict[str, Parameter]]:
    """The parameters in as few groups as a `_Flat` allows."""

    def place(param: Parameter) -> tuple[Any, ...]:
        grad = main_grad(param)
        return grad.untyped_storage()._cdata, str(grad.dtype), str(param.dtype), grad.storage_offset()

    groups: list[dict[str, Parameter]] = []
    end: tuple[Any, ...] = ()
    vectors = True
    for name, param in sorted(parameters.items(), key=lambda item: place(item[1])):
        if place(param) != end or (vectors and not is_vector(param)):
            groups.append({})
        groups[-1][name] = param
        *kind, offset = place(param)
        end, vectors = (*kind, offset + param.numel()), is_vector(param)
    return groups
