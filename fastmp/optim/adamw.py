"""The optimizer step over main gradients: global norm, clipping, AdamW on each rank's shards, skipping.

Parameters lie in flat buffers at the places of their main gradients. So do master weights and moments, of
which a rank holds its own shards alone (ZeRO-1). A step is one launch for each bucket (`fastmp.ops.adamw_`),
which scales and clips the gradients as it reads them and writes the low-precision parameters; then the bucket
is gathered, in the background where hooks wait for it. The host waits for nothing: norm, clip coefficient and
whether the step counts are tensors on the device. A norm that is not finite, which is the same on all ranks,
reaches the kernel as `found_inf`, and parameters and state stay as they are.
AdamW: Loshchilov and Hutter, "Decoupled Weight Decay Regularization" (2019). ZeRO: Rajbhandari et al. (2020).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from fastmp.distributed.collectives import all_reduce_, group_rank
from fastmp.ops import adamw_
from fastmp.optim.flat_layout import ALIGNMENT
from fastmp.optim.flat_params import FlatState, check_separate
from fastmp.optim.grad_buffers import FlatBuffer, GradBuffer, is_vector, main_dtype
from fastmp.optim.param_all_gather import ParameterGather
from fastmp.tensor_parallel.attributes import parallel_attributes

__all__ = ["AdamW", "ParameterGroup", "clip_coefficient", "global_grad_norm"]

_RANDOM_RANGE = 1 << 40  # random numbers that each buffer has to itself: more than its elements


class ParameterGroup(NamedTuple):
    """How some parameters are updated. lr: the factor of the optimizer's learning rate."""

    lr: float = 1.0
    weight_decay: float = 0.0


def global_grad_norm(
    grads: GradBuffer,
    *,
    tp_group: dist.ProcessGroup | None = None,
    mp_group: dist.ProcessGroup | None = None,
    etp_group: dist.ProcessGroup | None = None,
    expert_mp_group: dist.ProcessGroup | None = None,
    world_group: dist.ProcessGroup | None = None,
) -> Tensor:
    """The 2-norm of all main gradients of the model; each parameter counts once, whatever the layout.

    grads: this rank's gradients, reduced. Those of parameters marked `pipeline_replica` are counted by
        another stage.
    tp_group: parameters not marked `tensor_model_parallel` are replicated over it; its first rank counts
        them.
    mp_group: ranks that together hold one copy of the model (tensor and pipeline parallel); one all-reduce.
    etp_group, expert_mp_group: the same for parameters marked `expert_parallel`: tensor parallelism inside an
        expert, and the ranks that together hold one copy of all experts. Where both grids hold a copy of the
        model on the same ranks, `expert_mp_group` is `mp_group` and one all-reduce serves both.
    world_group: all ranks. Where gradients are sharded, they hold one copy of everything together, and one
        all-reduce over them takes the place of the others.

    Raises ValueError for a buffer without parameters, and for sharded gradients without `world_group`.

    Returns a 0-dim float64 tensor on the gradients' device, with the same bits on every rank. It is not
    finite where one gradient on one rank is not, even a replicated one on a rank that does not count it.
    """
    if not grads.flats:
        raise ValueError("global_grad_norm: no parameters given")
    if world_group is None and any(flat.layout.num_ranks > 1 for flat in grads.flats):
        raise ValueError(
            "global_grad_norm: gradients are divided over ranks, each of which has a part of the norm; give "
            "all ranks as world_group"
        )
    device = grads.flats[0].grad.device
    totals = torch.zeros(2, dtype=torch.float64, device=device)  # of all but experts, of experts
    for flat in grads.flats:
        first = group_rank(etp_group if flat.plan.experts else tp_group) == 0
        for counts, members in _by_count(flat, first).items():
            if members:
                # 0 x inf is nan: a rank that does not count replicated gradients still shows a bad one.
                squares = torch.stack(_norms(members)).double().square()
                totals[int(flat.plan.experts)] += squares.sum() * float(counts)
    if grads.shard:
        groups: list[tuple[Tensor, dist.ProcessGroup | None]] = [(totals.sum(0, keepdim=True), world_group)]
    elif expert_mp_group is mp_group:
        groups = [(totals.sum(0, keepdim=True), mp_group)]
    else:
        groups = [(totals[0:1], mp_group), (totals[1:2], expert_mp_group)]
    for total, group in groups:
        if group is not None:
            all_reduce_(total, group)
    return torch.cat([total for total, _ in groups]).sum().sqrt()


def _by_count(flat: FlatBuffer, first: bool) -> dict[bool, list[Tensor]]:
    """The gradients of a buffer that this rank has the sums of, by whether it counts them."""
    found: dict[bool, list[Tensor]] = {True: [], False: []}
    for name, grad in flat.own.items():
        marks = parallel_attributes(flat.parameters[name])
        found[not marks.pipeline_replica and (marks.tensor_model_parallel or first)].append(grad)
    return found


def _norms(grads: list[Tensor]) -> list[Tensor]:
    narrow = grads[0].dtype.itemsize < 4
    return list(torch._foreach_norm(grads, 2, dtype=torch.float32) if narrow else torch._foreach_norm(grads))


def clip_coefficient(norm: Tensor, max_norm: float) -> Tensor:
    """The factor in (0, 1] that brings `norm` down to `max_norm`; a `max_norm` of 0 never clips."""
    if max_norm < 0:
        raise ValueError(f"clip_coefficient: max_norm must not be negative, got {max_norm}")
    return (max_norm / (norm + 1e-6)).clamp(max=1.0) if max_norm else torch.ones_like(norm)


class AdamW:
    """AdamW on the main gradients of a `GradBuffer`, one launch a step for each of its buckets.

    grads: the gradients. Where they are sharded, a rank holds the state of its own shards alone and updates
        these; then all ranks gather the parameters.
    lr: the learning rate, unless `step` gets another: a number, or a 0-dim tensor in float32 or float64.
    weight_decay: of parameters with two dimensions or more; biases and norms are not decayed (those of
        experts have one dimension more).
    group: (name, parameter) -> the group that the parameter belongs to, in place of `weight_decay`. It is
        asked once, and must answer alike on all ranks that hold a parameter.
    states: "classic": float32 moments and, for 16-bit parameters, float32 master weights. "small", for
        bfloat16 parameters: the master weight is the parameter and 16 bits more, the same number bit for bit,
        and moments are bfloat16, rounded stochastically: 6 bytes a parameter in place of 12. float32
        parameters get small moments. A float64 parameter has float64 state, and a float32 or float64
        parameter is its own master weight.
    seed: of the random bits of that rounding, which depend on the place of an element in its buffer and on
        the step, not on who updates it.

    The parameters move: `param.data` becomes a view of a flat buffer, with the strides it had, and no longer
    shares memory with a `param.data` taken before. So make the optimizer once the model has its device and
    dtype. Tied weights, which are one Parameter, stay tied. What is written to a low-precision parameter
    later is lost at the next step, which writes it from its master: load weights before. A parameter that is
    frozen later has a gradient of zero, and is decayed and moved by its moments.

    Attributes: `parameters` {name: parameter}; `gather`, by which forward waits for parameters, see
    `ParameterGather.attach`; `skipped_steps`, a 0-dim int64 tensor that counts the steps dropped for a
    gradient norm that was not finite.

    Raises ValueError for a buffer without parameters, parameters that share memory, small states for
    parameters of another dtype, and numbers out of range: betas lie in [0, 1), `lr`, `eps` and
    `weight_decay` are not negative (nor are those of a group).
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
        self.name = type(self).__name__
        self.parameters = grads.parameters
        if not self.parameters:
            raise ValueError(f"{self.name}: no parameters given")
        if states not in ("classic", "small"):
            raise ValueError(f"{self.name}: states must be 'classic' or 'small', got {states!r}")
        if not isinstance(lr, Tensor):
            check_range(self.name, lr=lr)
        check_range(self.name, eps=eps, weight_decay=weight_decay)
        check_range(self.name, below=1.0, **{"betas[0]": betas[0], "betas[1]": betas[1]})
        check_separate(self.name, self.parameters)
        if group is None:
            group = _decayed_matrices(weight_decay)
        group_of = {name: group(name, param) for name, param in self.parameters.items()}
        for name, each in group_of.items():
            check_range(f"{self.name}: group of {name!r}", **each._asdict())
        self.lr: float | Tensor = lr
        self._options: dict[str, Any] = {"betas": betas, "eps": eps}
        if states == "small":
            self._options["seed"] = seed
        self._flats = [
            self._make_flat(flat, group_of, states, number * _RANDOM_RANGE)
            for number, flat in enumerate(grads.flats)
        ]
        self._order = grads.order[::-1]  # what forward uses first comes first
        self.gather = ParameterGather(grads.flats)
        self.skipped_steps = torch.zeros_like(self._flats[0].steps[0])

    def _make_flat(
        self, grads: FlatBuffer, group_of: Mapping[str, ParameterGroup], states: str, origin: int
    ) -> FlatState:
        return _AdamWFlat(grads, self.name, group_of, states, origin)

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
        self.gather.wait()  # for what no forward has used since the last step
        for flat in self._flats:
            flat.check()
        self._update(skip, inv_scale, clip_coefficient)
        # The kernel counts a new version of its buffers, which parameters do not share.
        torch.autograd.graph.increment_version(self.parameters.values())
        if skip is not None:
            self.skipped_steps += skip
        self.gather.end_step()

    def _update(self, skip: Tensor | None, inv_scale: Tensor | None, clip_coefficient: Tensor | None) -> None:
        """Update this rank's shards of all buckets that AdamW updates, and start to gather them."""
        for i, j in self._order:
            flat = self._flats[i]
            if isinstance(flat, _AdamWFlat):
                adamw_(
                    *flat.arguments[j], **flat.options[j], lr=self.lr, inv_scale=inv_scale,
                    clip_coefficient=clip_coefficient, found_inf=skip, **self._options,
                )  # fmt: skip
                self._gather((i, j))

    def _gather(self, at: tuple[int, int]) -> None:
        flat = self._flats[at[0]]
        if flat.sharded and flat.grads.group is not None:
            self.gather.start(at, flat.bucket(at[1]), flat.grads.group)

    def master(self, name: str) -> Tensor:
        """The part of a parameter's master that this rank has, see `state_dict`; a copy where it is small."""
        if name not in self.parameters:
            raise ValueError(f"{self.name}.master: there is no parameter {name!r}")
        return next(flat for flat in self._flats if name in flat.grads.parameters).master_of(name)

    def state_dict(self) -> dict[str, Any]:
        """{"step", "skipped_steps": 0-dim tensors, "state": {name: {"exp_avg", "exp_avg_sq"}}}, not copied.

        A low-precision parameter has a third entry, "master" or, with small states, "remainder". Entries have
        the shape of the parameter, or, where this rank has the state of a part of it, are flat; a parameter
        of which it has none is left out.
        """
        entries = {name: each for flat in self._flats for name, each in flat.entries().items()}
        state = {name: entries[name] for name in self.parameters if name in entries}
        return {"step": self.counts()["steps"], "skipped_steps": self.skipped_steps, "state": state}

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Copy `state_dict` (counts as tensors or numbers) into the optimizer, and round parameters from it.

        The parameters of a sharded optimizer are gathered: every rank calls it. Raises ValueError naming the
        parameters that only one side has, or the entry whose shape differs.
        """
        self.gather.wait()
        mine, loaded = self.state_dict()["state"], state_dict["state"]
        if mine.keys() != loaded.keys():
            raise ValueError(
                f"{self.name}.load_state_dict: only in the optimizer "
                f"{sorted(mine.keys() - loaded.keys())[:3]}, only in the state "
                f"{sorted(loaded.keys() - mine.keys())[:3]}"
            )
        pairs = [(n, key, own, loaded[n].get(key)) for n, own_n in mine.items() for key, own in own_n.items()]
        for name, key, own, new in pairs:
            got = "nothing" if new is None else tuple(new.shape)
            if got != tuple(own.shape):
                raise ValueError(
                    f"{self.name}.load_state_dict: {name}.{key} is {tuple(own.shape)} here, got {got}"
                )
        for _, _, own, new in pairs:
            own.copy_(new)
        self.counts()["steps"].fill_(state_dict["step"])
        self.skipped_steps.fill_(state_dict["skipped_steps"])
        self.loaded()

    def counts(self) -> dict[str, Tensor]:
        """{"steps", "skipped_steps": 0-dim int64 tensors}, not copied."""
        return {"steps": self._flats[0].steps[0], "skipped_steps": self.skipped_steps}

    @torch.no_grad()
    def loaded(self) -> None:
        """Continue from what was written to `counts` and `state_dict()["state"]`: round parameters from it.

        The parameters of a sharded optimizer are gathered: every rank calls it.
        """
        self.gather.wait()
        for i, flat in enumerate(self._flats):
            flat.steps.fill_(self.counts()["steps"])
            flat.round()
            for j in range(len(flat.local)):
                self._gather((i, j))
        self.gather.wait()


def check_range(owner: str, *, below: float = math.inf, **numbers: float) -> None:
    """Raise ValueError, naming `owner`, for a number that is not in [0, `below`)."""
    for name, number in numbers.items():
        if not 0.0 <= number < below:
            raise ValueError(f"{owner}: {name} must be in [0, {below:g}), got {number}")


def _decayed_matrices(weight_decay: float) -> Callable[[str, Parameter], ParameterGroup]:
    matrices, vectors = ParameterGroup(weight_decay=weight_decay), ParameterGroup()
    return lambda name, param: vectors if is_vector(param) else matrices


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
        super().__init__(grads, optimizer, states, ("exp_avg", "exp_avg_sq"), narrow=True)
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
